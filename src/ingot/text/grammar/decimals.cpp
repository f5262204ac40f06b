#include "ingot/text/grammar/decimals.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "ingot/core/check.h"

namespace ingot {
namespace {

CodeSet one(char c) { return CodeSet({{uint32_t(c), uint32_t(c)}}); }

// Builds the states for numbers without a sign between two bounds without signs. Each number of digits before the point
// has its own states; digits are compared from the left.
class Magnitudes {
 public:
  Magnitudes(Nfa& nfa, bool integers, const DecimalBound* low, const DecimalBound* high)
      : nfa_(nfa), integers_(integers), low_(low), high_(high) {}

  void add(int32_t from) {
    for (size_t n = 1; n <= DecimalRange::kDigits; ++n) {
      const size_t least = low_ == nullptr ? 1 : whole_of(*low_).size();
      const size_t most = high_ == nullptr ? n : whole_of(*high_).size();
      if (n < least || n > most) continue;
      states_.clear();
      length_ = n;
      nfa_.step(from, state(0, low_ != nullptr && n == least, high_ != nullptr && n == most));
    }
  }

 private:
  static std::string whole_of(const DecimalBound& b) { return b.value.whole.empty() ? "0" : b.value.whole; }
  // The i-th digit of the bound, counted from the left, with the point skipped.
  char digit(const DecimalBound& b, size_t i) const {
    if (i < length_) return whole_of(b)[i];
    return i - length_ < b.value.fraction.size() ? b.value.fraction[i - length_] : '0';
  }
  // The state after `i` digits. `at_low` and `at_high`: the digits so far equal those of the lower or upper bound.
  int32_t state(size_t i, bool at_low, bool at_high) {
    const auto key = std::tuple(i, at_low, at_high);
    if (const auto known = states_.find(key); known != states_.end()) return known->second;
    const int32_t here = states_[key] = nfa_.add();
    if (i < length_) {
      add_digits(here, i, at_low, at_high);
      return here;
    }
    // Omitted digits count as zeros.
    const size_t behind = i - length_;
    const bool above = !at_low || (low_->value.fraction.size() <= behind && !low_->open);
    const bool below = !at_high || high_->value.fraction.size() > behind || !high_->open;
    if (above && below) nfa_.step(here, nfa_.accept);
    if (integers_ || i >= size_t(DecimalRange::kDigits)) return here;
    if (behind > 0) {
      add_digits(here, i, at_low, at_high);
    } else {
      const int32_t point = nfa_.add();
      nfa_.edge(here, one('.'), point);
      add_digits(point, i, at_low, at_high);
    }
    return here;
  }
  void add_digits(int32_t from, size_t i, bool at_low, bool at_high) {
    for (char d = i == 0 && length_ > 1 ? '1' : '0'; d <= '9'; ++d) {
      if ((at_low && d < digit(*low_, i)) || (at_high && d > digit(*high_, i))) continue;
      nfa_.edge(from, one(d), state(i + 1, at_low && d == digit(*low_, i), at_high && d == digit(*high_, i)));
    }
  }

  Nfa& nfa_;
  const bool integers_;
  const DecimalBound* const low_;
  const DecimalBound* const high_;
  size_t length_ = 0;  // digits before the point
  std::map<std::tuple<size_t, bool, bool>, int32_t> states_;
};

bool is_zero(const Decimal& d) { return d.whole.empty() && d.fraction.empty(); }
DecimalBound without_sign(DecimalBound b) {
  b.value.negative = false;
  return b;
}

Dfa within(const DecimalRange& r, AutomatonBudget& budget) {
  Nfa nfa;
  nfa.start = nfa.add();
  nfa.accept = nfa.add();
  // Adds numbers of one sign, whose bounds become magnitudes: `near` is the bound on the side of zero.
  const auto add_sign = [&](bool negative, int32_t from) {
    const auto& far = negative ? r.low : r.high;
    const auto& near = negative ? r.high : r.low;
    const auto other_side = [&](const DecimalBound& b) { return b.value.negative != negative && !is_zero(b.value); };
    if (far && other_side(*far)) return;
    std::optional<DecimalBound> low, high;
    if (near && !other_side(*near)) low = without_sign(*near);
    if (far) high = without_sign(*far);
    Magnitudes(nfa, r.integers, low ? &*low : nullptr, high ? &*high : nullptr).add(from);
  };
  add_sign(false, nfa.start);
  const int32_t sign = nfa.add();
  nfa.edge(nfa.start, one('-'), sign);
  add_sign(true, sign);
  return determinize(nfa, false, budget);
}

// Accepts the multiples of m in decimal notation: the state is the remainder of the digits so far. The automaton
// accepts leading zeros and any number of digits, which the bounds exclude.
Dfa multiples_of(const Decimal& m) {
  constexpr int64_t kMost = 4096;
  int64_t modulus = 0;
  for (const char d : m.whole + m.fraction) {
    modulus = modulus * 10 + (d - '0');
    if (modulus > kMost)
      fail(ErrorCode::usage, "found ", m.whole, ".", m.fraction, ", expected at most ", kMost, " without the point");
  }
  const auto places = int64_t(m.fraction.size());
  Dfa d;
  // Groups of states by the number of digits after the point, 0 to `places`; the last group holds the states directly
  // after the point.
  const auto number = [&](int64_t behind, int64_t remainder) { return int32_t(1 + behind * modulus + remainder); };
  d.states.resize(size_t(1 + (places + 2) * modulus));
  const auto add_digits = [&](Dfa::State& s, int64_t behind, int64_t remainder) {
    for (int64_t k = 0; k < 10; ++k)
      s.edges.push_back({uint32_t('0' + k), uint32_t('0' + k), number(behind, (remainder * 10 + k) % modulus)});
  };
  d.states[0].edges.push_back({'-', '-', number(0, 0)});
  add_digits(d.states[0], 0, 0);
  for (int64_t behind = 0; behind <= places; ++behind)
    for (int64_t remainder = 0; remainder < modulus; ++remainder) {
      Dfa::State& s = d.states[size_t(number(behind, remainder))];
      int64_t rest = remainder;
      for (int64_t i = behind; i < places; ++i) rest = rest * 10 % modulus;
      s.accepts = rest == 0;
      if (behind == 0 && places > 0) s.edges.push_back({'.', '.', number(places + 1, remainder)});
      if (behind == 0 || behind < places) add_digits(s, behind == 0 ? 0 : behind + 1, remainder);
    }
  for (int64_t remainder = 0; places > 0 && remainder < modulus; ++remainder)  // right behind the point
    add_digits(d.states[size_t(number(places + 1, remainder))], 1, remainder);
  return d;
}

}  // namespace

Decimal parse_decimal(const std::string& text) {
  constexpr int64_t kMostDigits = 400;
  Decimal d{.negative = text.starts_with('-')};
  const size_t power_at = std::min(text.find_first_of("eE"), text.size());
  const int64_t power = power_at < text.size() ? std::stol(text.substr(power_at + 1)) : 0;
  std::string digits;
  int64_t point = 0;
  bool seen = false;
  for (size_t i = d.negative ? 1 : 0; i < power_at; ++i) {
    if (text[i] == '.') {
      seen = true;
    } else {
      digits += text[i];
      point += seen ? 0 : 1;
    }
  }
  point += power;
  if (point > kMostDigits || point < -kMostDigits) fail(ErrorCode::usage, "found ", text, ", expected fewer digits");
  if (point < 0) digits.insert(0, size_t(-point), '0'), point = 0;
  if (size_t(point) > digits.size()) digits.append(size_t(point) - digits.size(), '0');
  d.whole = digits.substr(0, size_t(point));
  d.fraction = digits.substr(size_t(point));
  d.whole.erase(0, std::min(d.whole.find_first_not_of('0'), d.whole.size()));
  d.fraction.erase(d.fraction.find_last_not_of('0') + 1);
  return d;
}

Dfa dfa_of_decimals(const DecimalRange& range, AutomatonBudget& budget) {
  const Dfa bounded = within(range, budget);
  return range.multiple ? intersect(bounded, multiples_of(*range.multiple), budget) : bounded;
}

}  // namespace ingot
