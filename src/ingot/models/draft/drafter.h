#pragma once
// Drafters guess the next tokens of a slot; the model then checks several tokens in one step (docs/speculation.md). A
// drafter's mistakes cost time and never change an answer.
#include <cstdint>
#include <span>
#include <vector>

namespace ingot::draft {

// Where a draft comes from. Each source has its own record of acceptance.
enum class Source { lookup, long_lookup, prediction, head };
constexpr int kSources = 4;
const char* name_of(Source source);

struct Draft {
  std::vector<int32_t> tokens;
  Source source = Source::lookup;
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  // The slot's tokens in order, the pending token included; never tokens that were drafted and not accepted.
  virtual void append(std::span<const int32_t> ids) = 0;
  virtual void truncate(int64_t length) = 0;  // forgets the tokens after the first `length`
  virtual int64_t length() const = 0;
  // Up to `most` tokens that may come next; none where the drafter has no guess. Depends on the appended tokens alone.
  virtual Draft draft(int64_t most) const = 0;
};

}  // namespace ingot::draft
