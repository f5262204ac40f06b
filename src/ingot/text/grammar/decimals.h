#pragma once
// An automaton over the characters of JSON numbers without an exponent, which accepts the numbers within bounds. A
// double represents every decimal of at most 15 digits, so comparing such texts digit by digit compares the numbers.
#include <optional>
#include <string>

#include "ingot/text/grammar/dfa.h"

namespace ingot {

// A JSON number, represented exactly: -12.5 is {true, "12", "5"}, 0 is {false, "", ""}.
struct Decimal {
  bool negative = false;
  std::string whole, fraction;  // digits, without leading zeros of `whole` and trailing zeros of `fraction`
};
// `text` is a JSON number. Throws Error{usage} where the number has too many digits.
Decimal parse_decimal(const std::string& text);

struct DecimalBound {
  Decimal value;
  bool open = false;  // whether the bound itself is excluded
};
struct DecimalRange {
  static constexpr int kDigits = 15;
  bool integers = false;
  std::optional<DecimalBound> low, high;
  std::optional<Decimal> multiple;  // accepted numbers are multiples of this positive number
};
// Throws Error{usage} where the multiple has too many digits for an automaton.
Dfa dfa_of_decimals(const DecimalRange& range, AutomatonBudget& budget);

}  // namespace ingot
