#pragma once
// The values of options: from words to JSON, and from JSON to the command's variables. Every error names the option,
// the value found and the value expected.
#include <string>
#include <vector>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/io/json.h"

namespace ingot::cli {

// The flag or the environment variable that gave a value, and its text; empty: a key of a file or of --set.
struct Source {
  std::string name, word;
};

// A word of the command line or of the environment; `where` names the flag or the variable.
Json value_of(const Option& option, const std::string& word, const std::string& where);
// An unset variable of a script gives an empty word. Only an option with `empty_allowed` takes the empty word; names of
// files, directories and runs may not be empty. Returns `word`.
const std::string& not_empty(const Option& option, const std::string& word, const std::string& where);
// The value of --set a.b=VALUE: JSON where the value parses as JSON, else text.
Json loose_value(const std::string& word);
// Checks the value and stores it in the option's variable.
void store_value(const Option& option, const Json& value, const Source& from);

// The value at a path of names joined by dots; at_path() creates missing objects, find_path() returns null.
Json& at_path(Json& tree, const std::string& path, const std::string& where);
const Json* find_path(const Json& tree, const std::string& path);

std::string environment_name(const Option& option);
// The beginning of an option's help, without defaults and explanations, for errors.
std::string short_help(const std::string& help);
// The help of an option, with its choices where the text leaves some of them out.
std::string described(const Option& option);
std::string plain(double value);  // 1000000, not 1e+06
std::string listed(const std::vector<std::string>& names);

}  // namespace ingot::cli
