#include "ingot/text/grammar/token_masks.h"

#include <algorithm>
#include <numeric>

#include "ingot/core/check.h"

namespace ingot {

TokenTree::TokenTree(const std::vector<std::string>& tokens, std::vector<int32_t> controls)
    : vocab_(int64_t(tokens.size())), same_(tokens.size(), -1), bytes_(tokens), controls_(std::move(controls)) {
  INGOT_CHECK(controls_.size() <= size_t(Grammar::kControls), "tokens: found ", controls_.size(),
              " control tokens, expected at most ", Grammar::kControls);
  for (const int32_t id : controls_)
    if (id >= 0) bytes_[size_t(id)].clear();
  std::vector<int32_t> order(tokens.size()), path;
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return std::pair(bytes_[size_t(a)], a) < std::pair(bytes_[size_t(b)], b); });
  for (const int32_t id : order) grow(bytes_[size_t(id)], id, path);
  for (const int32_t open : path) nodes_[size_t(open)].after = int32_t(nodes_.size());
}

// Tokens come in the order of their bytes; `path` has the nodes of the previous token.
void TokenTree::grow(const std::string& bytes, int32_t id, std::vector<int32_t>& path) {
  if (bytes.empty() || bytes.size() > UINT16_MAX) return;
  size_t shared = 0;
  while (shared < path.size() && shared < bytes.size() && nodes_[size_t(path[shared])].byte == uint8_t(bytes[shared]))
    ++shared;
  for (size_t i = shared; i < path.size(); ++i) nodes_[size_t(path[i])].after = int32_t(nodes_.size());
  path.resize(shared);
  for (size_t i = shared; i < bytes.size(); ++i) {
    path.push_back(int32_t(nodes_.size()));
    nodes_.push_back({uint8_t(bytes[i]), uint16_t(i), -1, -1});
  }
  Node& last = nodes_[size_t(path.back())];
  same_[size_t(id)] = last.token;
  last.token = id;
  longest_ = std::max(longest_, bytes.size());
}

std::vector<uint32_t> TokenTree::mask(GrammarWalk& walk, int32_t state) const {
  std::vector<uint32_t> mask(size_t(vocab_ + 31) / 32);
  const auto allow = [&](int32_t id) { mask[size_t(id / 32)] |= 1u << (id % 32); };
  std::vector<int32_t> states(longest_ + 1);  // by the number of bytes read
  states[0] = state;
  for (size_t i = 0; i < nodes_.size();) {
    const Node& n = nodes_[i];
    const int32_t after = walk.next(states[n.depth], n.byte);
    if (after == GrammarWalk::kDead) {
      i = size_t(n.after);
      continue;
    }
    states[size_t(n.depth) + 1] = after;
    for (int32_t id = n.token; id >= 0; id = same_[size_t(id)]) allow(id);
    ++i;
  }
  for (size_t i = 0; i < controls_.size(); ++i)
    if (controls_[i] >= 0 && walk.next(state, Grammar::kFirstControl + int(i)) != GrammarWalk::kDead)
      allow(controls_[i]);
  return mask;
}

int32_t TokenTree::next(GrammarWalk& walk, int32_t state, int32_t id) const {
  INGOT_CHECK(id >= 0 && id < vocab_, "tokens: found id ", id, ", expected 0 to ", vocab_ - 1);
  if (const auto at = std::find(controls_.begin(), controls_.end(), id); at != controls_.end())
    return walk.next(state, Grammar::kFirstControl + int(at - controls_.begin()));
  const std::string& bytes = bytes_[size_t(id)];
  if (bytes.empty()) return GrammarWalk::kDead;
  for (size_t i = 0; i < bytes.size() && state != GrammarWalk::kDead; ++i) state = walk.next(state, uint8_t(bytes[i]));
  return state;
}

TokenGrammar::TokenGrammar(std::shared_ptr<const TokenTree> tree, Grammar grammar, Grammar::Rule start)
    : tree_(std::move(tree)), walk_(std::move(grammar), start) {}

TokenGrammar::Mask TokenGrammar::allowed(int32_t state) {
  constexpr size_t kMostMasks = 1024;  // of 25 KB each for a vocabulary of 200,000
  const std::lock_guard lock(mutex_);
  if (const auto at = masks_.find(state); at != masks_.end()) return at->second;
  auto mask = std::make_shared<const std::vector<uint32_t>>(tree_->mask(walk_, state));
  if (std::all_of(mask->begin(), mask->end(), [](uint32_t w) { return w == 0; }))
    fail(ErrorCode::numeric, "found no token that may follow, expected the vocabulary to have one");
  if (masks_.size() >= kMostMasks) masks_.clear();
  masks_[state] = mask;
  return mask;
}

int32_t TokenGrammar::next(int32_t state, int32_t id) {
  const std::lock_guard lock(mutex_);
  return tree_->next(walk_, state, id);
}

}  // namespace ingot
