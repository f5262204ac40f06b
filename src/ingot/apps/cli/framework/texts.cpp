// Numbers and lists in texts, and this process's command line in a shell's syntax.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/framework/command_line.h"
#include "ingot/core/check.h"

namespace ingot::cli {

std::string fixed(double value, int digits) {
  char text[400];
  const auto end = std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, digits).ptr;
  return std::string(text, end);
}
std::vector<int64_t> numbers_in(const char* option, const std::string& list, bool pairs, int64_t least) {
  std::vector<int64_t> all;
  const char *at = list.data(), *const end = at + list.size();
  while (at < end) {
    int64_t n = 0;
    const auto [last, error] = std::from_chars(at, end, n);
    const bool first_of_pair = pairs && all.size() % 2 == 0;
    const bool goes_on = last != end && *last == (first_of_pair ? ':' : ',') && last + 1 != end;
    if (error != std::errc() || n < least || n > 1 << 30 || !(goes_on || (last == end && !first_of_pair)))
      fail(ErrorCode::usage, option, ": found '", list, "', expected numbers like ",
           pairs ? "100:100,1024:100" : "1,2,4,8");
    all.push_back(n);
    at = last + (goes_on ? 1 : 0);
  }
  return all;
}
std::string with_commas(int64_t n) {
  const std::string digits = std::to_string(n);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0 && digits[i - 1] != '-') out += ',';
    out += digits[i];
  }
  return out;
}

std::string counted(int64_t n, const char* what) { return with_commas(n) + " " + what + (n == 1 ? "" : "s"); }

namespace {
std::string the_command_line;
std::vector<std::string> the_words;
}  // namespace

std::string quoted(const std::string& word) {
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return c < 128 && (std::isalnum(c) || std::strchr("_-+=./,:@%", c) != nullptr);
  });
  if (plain) return word;
  std::string out = "'";
  for (char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

const std::string& command_line() { return the_command_line; }
void set_command_line(int argc, char** argv) {
  the_words.assign(argv + std::min(argc, 1), argv + argc);
  the_command_line = command_line_without("");
}
std::string command_line_without(const std::string& option) {
  std::string line = program_name();
  for (size_t i = 0; i < the_words.size(); ++i) {
    if (!option.empty() && the_words[i] == option)
      ++i;
    else if (option.empty() || !the_words[i].starts_with(option + "="))
      line += " " + cli::quoted(the_words[i]);
  }
  return line;
}
std::string program_name() {
  const char* name = std::getenv("INGOT_PROGRAM");
  return name != nullptr && *name != 0 ? name : "ingot";
}

}  // namespace ingot::cli
