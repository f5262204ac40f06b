#pragma once
// Which numbers lie within bounds, as JSON writes them without an exponent: an automaton over their characters. Of at
// most 15 digits a double keeps every one, so a number compares with its bounds as its text does.
#include <optional>
#include <string>

#include "ingot/text/grammar/dfa.h"

namespace ingot {

// A number of JSON, exactly: -12.5 is {true, "12", "5"}, 0 is {false, "", ""}.
struct Decimal {
  bool negative = false;
  std::string whole, fraction;  // digits, without zeros at the outer end
};
// `text`: a number as JSON writes it. Error{usage}: it has too many digits.
Decimal parse_decimal(const std::string& text);

struct DecimalBound {
  Decimal value;
  bool open = false;  // the value itself is outside
};
struct DecimalRange {
  static constexpr int kDigits = 15;
  bool integers = false;
  std::optional<DecimalBound> low, high;
  std::optional<Decimal> multiple;  // of which the numbers are multiples; above 0
};
// Error{usage}: the multiple has too many digits for an automaton.
Dfa dfa_of_decimals(const DecimalRange& range, AutomatonBudget& budget);

}  // namespace ingot
