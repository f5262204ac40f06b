#pragma once
// An answer in the form of Anthropic's POST /v1/messages: a list of content blocks (thoughts, text, uses of tools), and
// for a stream the events that build the list.
#include <memory>
#include <vector>

#include "ingot/engines/serve/answer_writer.h"

namespace ingot {

// {"type": "error", "error": {"type", "message"}}, as Anthropic's clients read errors.
std::string to_messages_json(const ApiError& e);

class MessageWriter final : public AnswerWriter {
 public:
  // `prompt` is the number of tokens of the prompt, which the first event contains. `thoughts` says whether thoughts
  // are shown.
  MessageWriter(std::string id, std::string model, int64_t prompt, bool thoughts);
  std::string begin() override;
  std::string add(const AnswerPiece& piece) override;
  std::string end(const AnswerEnd& end) override;
  std::string fail(const ApiError& error) override;
  std::string whole() const override;

 private:
  enum class Kind { thought, text, call };
  struct Block {
    Kind kind;
    std::string id, name, text;
  };
  std::string open(Kind kind, const CallPiece& call = {});
  std::string grow(Kind kind, const std::string& text);
  std::string close();
  struct Json;  // keeps the JSON library out of this header
  const std::string id_, model_;
  const bool thoughts_;
  AnswerUsage usage_;
  std::string stop_reason_, stop_string_;
  std::vector<Block> blocks_;
  bool open_ = false;
};

}  // namespace ingot
