#pragma once
// Parses answers that are text, with thoughts and calls between control tokens where the format has such tokens.
#include <memory>
#include <string>
#include <vector>

#include "ingot/text/chat/chat_format.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

// Ids of tokens; -1 where the format has no such token.
struct AnswerTokens {
  int32_t turn = -1;                         // begins a turn; never part of an answer
  int32_t think_begin = -1, think_end = -1;  // enclose thoughts
  int32_t call_begin = -1, call_end = -1;    // enclose {"name": ..., "arguments": ...}, or a list of such objects
  // An answer that is one JSON object with the name of one of these functions calls the function.
  std::vector<std::string> json_functions;
  // The space at the beginning of a part belongs to the format, as in vocabularies of SentencePiece.
  bool space_before_parts = false;
};
// The tokenizer must outlive the parser. Newlines around the tokens belong to the format, not to the content.
std::unique_ptr<ChatParser> make_answer_parser(const Tokenizer& tokenizer, const AnswerTokens& tokens);

}  // namespace ingot
