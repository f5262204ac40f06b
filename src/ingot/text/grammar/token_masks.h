#pragma once
// Which tokens of a vocabulary may follow what was said, in a grammar of bytes and control tokens.
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ingot/text/grammar/grammar.h"

namespace ingot {

// The tokens' bytes as a tree, laid out so that one pass over an array walks it and leaves out what cannot be.
class TokenTree {
 public:
  // tokens[id]: its bytes; one without bytes is no text. controls[i]: the id of the i-th control symbol, or -1.
  TokenTree(const std::vector<std::string>& tokens, std::vector<int32_t> controls);
  int64_t vocab() const { return vocab_; }
  std::vector<uint32_t> mask(GrammarWalk& walk, int32_t state) const;  // as DrawOptions::allowed has it
  int32_t next(GrammarWalk& walk, int32_t state, int32_t id) const;

 private:
  struct Node {
    uint8_t byte;
    uint16_t depth;  // of the bytes before it
    int32_t after;   // the next node that does not begin with this one
    int32_t token;   // the first one that ends here, or -1
  };
  void grow(const std::string& bytes, int32_t id, std::vector<int32_t>& path);
  int64_t vocab_;
  size_t longest_ = 0;
  std::vector<Node> nodes_;
  std::vector<int32_t> same_;  // by id: another token of the same bytes, or -1
  std::vector<std::string> bytes_;
  std::vector<int32_t> controls_;
};

// A grammar on a vocabulary; masks are kept. Several threads may use one.
class TokenGrammar {
 public:
  TokenGrammar(std::shared_ptr<const TokenTree> tree, Grammar grammar, Grammar::Rule start);
  int32_t start() const { return 0; }
  using Mask = std::shared_ptr<const std::vector<uint32_t>>;
  // One in which no token is allowed is Error{numeric}: the vocabulary cannot say what has to follow.
  Mask allowed(int32_t state);
  int32_t next(int32_t state, int32_t id);  // kDead: it was not allowed

 private:
  std::mutex mutex_;
  const std::shared_ptr<const TokenTree> tree_;
  GrammarWalk walk_;
  std::map<int32_t, Mask> masks_;
};

}  // namespace ingot
