// How a command describes its options.
#include <algorithm>
#include <cctype>
#include <memory>
#include <string>
#include <utility>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/core/check.h"

namespace ingot::cli {

Command::Command(std::string name, std::string summary) : name_(std::move(name)), summary_(std::move(summary)) {}
Command::~Command() = default;

Option& Command::declare(const char* spelling, Kind kind, void* into, const char* help) {
  auto option = std::make_unique<Option>();
  const std::string words = spelling;
  const size_t space = std::min(words.find(' '), words.size());
  option->name = words.substr(words.starts_with("--") ? 2 : 0, space - (words.starts_with("--") ? 2 : 0));
  option->placeholder = words.starts_with("--") ? words.substr(std::min(space + 1, words.size())) : "";
  option->path = option->name;
  std::replace(option->path.begin(), option->path.end(), '-', '_');
  std::transform(option->path.begin(), option->path.end(), option->path.begin(),
                 [](char c) { return char(std::tolower(c)); });
  option->help = help;
  option->kind = kind;
  option->into = into;
  options_.push_back(std::move(option));
  return *options_.back();
}
Option& Command::flag(const char* spelling, bool& into, const char* help) {
  return declare(spelling, Kind::flag, &into, help);
}
Option& Command::integer(const char* spelling, int64_t& into, int64_t low, int64_t high, const char* help) {
  Option& option = declare(spelling, Kind::integer, &into, help);
  option.low = double(low), option.high = double(high);
  return option;
}
Option& Command::unsigned_integer(const char* spelling, uint64_t& into, const char* help) {
  return declare(spelling, Kind::unsigned_integer, &into, help);
}
Option& Command::number(const char* spelling, double& into, double low, double high, const char* help) {
  Option& option = declare(spelling, Kind::number, &into, help);
  option.low = low, option.high = high;
  return option;
}
Option& Command::text(const char* spelling, std::string& into, const char* help) {
  return declare(spelling, Kind::text, &into, help);
}
Option& Command::choice(const char* spelling, std::string& into, std::vector<std::string> allowed, const char* help) {
  Option& option = declare(spelling, Kind::text, &into, help);
  option.allowed = std::move(allowed);
  return option;
}
Option& Command::list(const char* spelling, std::vector<std::string>& into, const char* help) {
  return declare(spelling, Kind::list, &into, help);
}
void Command::section(const char* key, std::string& json, const std::string& known) {
  sections_.push_back({key, &json, known});
}
void Command::known_elsewhere(const char* name, const char* ours) { elsewhere_.emplace_back(name, ours); }
Option& Command::setting(const char* spelling, const char* path, Kind kind, const char* help) {
  Option& option = declare(spelling, kind, nullptr, help);
  option.path = path;
  return option;
}
void Command::refuse_given(std::initializer_list<std::string_view> names, const std::string& where) const {
  for (const auto& option : options_)
    if (option->given && std::find(names.begin(), names.end(), option->name) != names.end())
      fail(ErrorCode::usage, "found --", option->name, ", which changes nothing with ", where, "; leave it out");
}
void Command::examples(const char* text) { examples_ = text; }
void Command::run(std::function<void()> body) { body_ = std::move(body); }
Command& Command::add(const char* name, const char* summary) {
  commands_.push_back(std::make_unique<Command>(name, summary));
  return *commands_.back();
}

}  // namespace ingot::cli
