#pragma once
// Computes which tokens of a vocabulary may come next, in a grammar of bytes and control tokens.
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ingot/text/grammar/grammar.h"

namespace ingot {

// The tokens' bytes as a tree in preorder, so that one pass over an array visits the tree and skips subtrees that
// cannot follow.
class TokenTree {
 public:
  // tokens[id]: the token's bytes; a token without bytes never follows as text. controls[i]: the id of the i-th control
  // symbol, or -1.
  TokenTree(const std::vector<std::string>& tokens, std::vector<int32_t> controls);
  int64_t vocab() const { return vocab_; }
  std::vector<uint32_t> mask(GrammarWalk& walk, int32_t state) const;  // as in SampleOptions::allowed
  int32_t next(GrammarWalk& walk, int32_t state, int32_t id) const;

 private:
  struct Node {
    uint8_t byte;
    uint16_t depth;  // the number of bytes before the byte of this node
    int32_t after;   // the next node outside of this node's subtree
    int32_t token;   // the first token that ends at this node, or -1
  };
  void grow(const std::string& bytes, int32_t id, std::vector<int32_t>& path);
  int64_t vocab_;
  size_t longest_ = 0;
  std::vector<Node> nodes_;
  std::vector<int32_t> same_;  // by id: another token with the same bytes, or -1
  std::vector<std::string> bytes_;
  std::vector<int32_t> controls_;
};

// A grammar over a vocabulary, with a cache of masks. May be shared by several threads.
class TokenGrammar {
 public:
  TokenGrammar(std::shared_ptr<const TokenTree> tree, Grammar grammar, Grammar::Rule start);
  int32_t start() const { return 0; }
  using Mask = std::shared_ptr<const std::vector<uint32_t>>;
  // Throws Error{numeric} where no token may follow, because the vocabulary has no token for the text that the grammar
  // requires.
  Mask allowed(int32_t state);
  int32_t next(int32_t state, int32_t id);  // kDead: the token was not allowed

 private:
  std::mutex mutex_;
  const std::shared_ptr<const TokenTree> tree_;
  GrammarWalk walk_;
  std::map<int32_t, Mask> masks_;
};

}  // namespace ingot
