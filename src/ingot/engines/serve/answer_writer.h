#pragma once
// An answer in the form of an API whose stream builds the same object that the whole answer is. One writer makes both,
// so that the events hold what the whole answer would hold.
#include <string>

#include "ingot/engines/serve/answer_text.h"
#include "ingot/engines/serve/api_error.h"

namespace ingot {

struct AnswerUsage {
  int64_t prompt = 0, cached = 0, tokens = 0, thought_tokens = 0;
};
// How an answer ended.
struct AnswerEnd {
  bool cut = false;         // a limit or the context cut it
  std::string stop_string;  // that ended it, or empty
  AnswerUsage usage;
};

class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;
  // Each gives its events.
  virtual std::string begin() = 0;
  virtual std::string add(const AnswerPiece& piece) = 0;
  virtual std::string end(const AnswerEnd& end) = 0;
  virtual std::string fail(const ApiError& error) = 0;
  virtual std::string whole() const = 0;  // after end()
};

}  // namespace ingot
