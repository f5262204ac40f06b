#pragma once
// Reads answers that are text, with thoughts and calls between tokens of their own where the format has such tokens.
#include <memory>
#include <string>
#include <vector>

#include "ingot/text/byte_bpe.h"
#include "ingot/text/chat/chat_format.h"

namespace ingot {

// Ids; -1 where the format has none.
struct AnswerTokens {
  int32_t turn = -1;                         // begins a turn: no answer has one
  int32_t think_begin = -1, think_end = -1;  // around thoughts
  int32_t call_begin = -1, call_end = -1;    // around {"name": ..., "arguments": ...}
  // An answer that is one JSON object with the name of one of these functions calls the function.
  std::vector<std::string> json_functions;
};
// The tokenizer must outlive the parser. Newlines around the tokens belong to the format, not to the content.
std::unique_ptr<ChatParser> make_answer_parser(const ByteBpe& tokenizer, const AnswerTokens& tokens);

}  // namespace ingot
