#pragma once
// Writes an answer for an API whose stream builds the same object as a whole answer. One writer produces both forms, so
// that the events contain the same data as the whole answer.
#include <string>

#include "ingot/engines/serve/answer_text.h"
#include "ingot/engines/serve/api_error.h"

namespace ingot {

struct AnswerUsage {
  int64_t prompt = 0, cached = 0, tokens = 0, thought_tokens = 0;
};
// How an answer ended.
struct AnswerEnd {
  bool cut = false;         // a limit or the context ended the answer
  std::string stop_string;  // the stop string that ended the answer, or empty
  AnswerUsage usage;
};

class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;
  // Each function returns its events.
  virtual std::string begin() = 0;
  virtual std::string add(const AnswerPiece& piece) = 0;
  virtual std::string end(const AnswerEnd& end) = 0;
  virtual std::string fail(const ApiError& error) = 0;
  virtual std::string whole() const = 0;  // call after end()
};

}  // namespace ingot
