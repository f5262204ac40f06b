#pragma once
// The regular part of ECMAScript's regular expressions, which JSON schemas write as `pattern`:
//
//   literals, ., [classes], [^classes], \d \D \w \W \s \S, \t \n \v \f \r \0 \xHH \uHHHH \u{H...}, escaped punctuation,
//   (groups), (?:groups), (?<named>groups), |, *, +, ?, {m}, {m,}, {m,n} (also lazy), ^ and $ anywhere.
//
// Refused: lookaround, references to groups, \b, \B, \p, flags. Where ECMAScript and Python differ, only strings that
// both match are accepted: \d, \w and \s are ASCII; \D, \W and \S leave out Unicode's digits, word characters and white
// space; a dot matches no line terminator.
#include <string_view>

#include "ingot/text/grammar/dfa.h"

namespace ingot {

// The strings in which the pattern has a match. Error{usage}: "character 3: a lookaround is not supported".
Dfa dfa_of_pattern(std::string_view pattern, AutomatonBudget& budget);

}  // namespace ingot
