#pragma once
// An automaton over the characters of the JSON numbers without an exponent that lie within bounds. A double keeps every
// decimal of at most 15 digits, so comparing the texts of such numbers is comparing the numbers.
#include <optional>
#include <string>

#include "ingot/text/grammar/dfa.h"

namespace ingot {

// A number of JSON, exactly: -12.5 is {true, "12", "5"}, 0 is {false, "", ""}.
struct Decimal {
  bool negative = false;
  std::string whole, fraction;  // digits, without zeros at the outer end
};
// `text`: a JSON number. Error{usage}: the number has too many digits.
Decimal parse_decimal(const std::string& text);

struct DecimalBound {
  Decimal value;
  bool open = false;  // the value itself is outside
};
struct DecimalRange {
  static constexpr int kDigits = 15;
  bool integers = false;
  std::optional<DecimalBound> low, high;
  std::optional<Decimal> multiple;  // the numbers are multiples of this one, which is above 0
};
// Error{usage}: the multiple has too many digits for an automaton.
Dfa dfa_of_decimals(const DecimalRange& range, AutomatonBudget& budget);

}  // namespace ingot
