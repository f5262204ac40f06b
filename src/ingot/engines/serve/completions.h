#pragma once
// Answers in the form of OpenAI's POST /v1/completions and /v1/chat/completions: one object with all choices, or a
// stream with the events of every choice.
#include <cstdint>
#include <string>
#include <vector>

#include "ingot/engines/serve/answer_text.h"
#include "ingot/engines/serve/api_request.h"
#include "ingot/engines/serve/scheduler.h"

namespace ingot {

// A choice that has ended. `answer` and `calls` are collected for a whole answer only.
struct CompletionChoice {
  AnswerPiece answer;            // text, thoughts and tokens
  std::vector<CallPiece> calls;  // each with all of its arguments
  ServeOutcome outcome;
  bool called = false;
  int64_t thought_tokens = 0;
};

class CompletionWriter {
 public:
  // Request and tokenizer must outlive the writer.
  CompletionWriter(const ApiRequest& request, const Tokenizer& tokenizer, std::string id, std::string model,
                   const std::string& version, int64_t created);
  // Events of a stream: before the first piece of a choice (empty for a text), of a piece, at the choice's end, and
  // after all choices.
  std::string begin(size_t choice) const;
  std::string add(size_t choice, const AnswerPiece& piece) const;
  std::string end(size_t choice, Finish finish, bool called) const;
  std::string finish(const std::vector<CompletionChoice>& choices) const;
  // The answer in one object.
  std::string whole(const std::vector<CompletionChoice>& choices) const;

 private:
  struct Json;  // keeps the JSON library out of this header
  const ApiRequest& request_;
  const Tokenizer& tokenizer_;
  const std::string id_, model_, fingerprint_;
  const int64_t created_;
};

}  // namespace ingot
