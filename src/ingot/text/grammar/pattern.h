#pragma once
// The regular part of ECMAScript's regular expressions, which JSON schemas write as `pattern`:
//
//   literals, ., [classes], [^classes], \d \D \w \W \s \S, \t \n \v \f \r \0 \xHH \uHHHH \u{H...}, escaped punctuation,
//   (groups), (?:groups), (?<named>groups), |, *, +, ?, {m}, {m,}, {m,n} (also lazy), ^ and $ anywhere.
//
// Refused: lookaround, references to groups, \b, \B, \p, flags. Where ECMAScript and Python differ, strings are taken
// that both take: \d, \w and \s are ASCII, \D, \W and \S leave out what Unicode calls so, . is no line's end.
#include <string_view>

#include "ingot/text/grammar/dfa.h"

namespace ingot {

// What the pattern is found in. Error{usage}: "character 3: a lookaround is not supported".
Dfa dfa_of_pattern(std::string_view pattern, AutomatonBudget& budget);

}  // namespace ingot
