#pragma once
// An answer in the form of OpenAI's POST /v1/responses: a list of items (thoughts, messages, calls of functions) and,
// for a stream, the events that build the list.
#include <string>
#include <vector>

#include "ingot/engines/serve/answer_writer.h"

namespace ingot {

class ResponseWriter final : public AnswerWriter {
 public:
  // `repeated` is a JSON object with the request's fields that the response repeats. `tokenizer` names the tokens of
  // log probabilities and must outlive the writer; null: the request asks for none.
  ResponseWriter(std::string id, std::string model, int64_t created, std::string repeated = "{}",
                 const Tokenizer* tokenizer = nullptr);
  std::string begin() override;
  std::string add(const AnswerPiece& piece) override;
  std::string end(const AnswerEnd& end) override;
  std::string fail(const ApiError& error) override;
  std::string whole() const override;

 private:
  enum class Kind { reasoning, message, call };
  struct Item {
    Kind kind;
    std::string id, text, name, call_id;
    const char* status = "in_progress";
    std::vector<TokenInfo> tokens = {};  // of a message's text, where the request asks for their log probabilities
  };
  std::string open(Kind kind, const CallPiece& call = {});
  std::string grow(Kind kind, const std::string& text, const std::vector<TokenInfo>& tokens = {});
  // Closes the open item, if any, with a status.
  std::string close(const char* status = "completed");
  struct Json;  // keeps the JSON library out of this header
  const std::string id_, model_, repeated_;
  const int64_t created_;
  const Tokenizer* const tokenizer_;
  int64_t completed_ = 0;  // the time of the end, or 0
  std::string status_ = "in_progress", error_;
  AnswerUsage usage_;
  std::vector<Item> items_;
  bool open_ = false;
  int64_t sequence_ = 0;
};

}  // namespace ingot
