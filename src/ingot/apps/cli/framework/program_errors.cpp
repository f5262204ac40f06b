// The errors of a command line, in sentences that name the value found and the values expected.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>

#include "ingot/apps/cli/framework/program.h"
#include "ingot/io/json.h"

namespace ingot::cli {

namespace {

// Replaces every `flag` in `text` that is a word of its own.
void replace_flag(std::string& text, const std::string& flag, const std::string& source) {
  const auto in_word = [&](size_t i) {
    return i < text.size() && (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '-');
  };
  for (size_t at = text.find(flag); at != text.npos; at = text.find(flag, at + 1)) {
    if (in_word(at + flag.size()) || (at > 0 && text[at - 1] != ' ')) continue;
    text.replace(at, flag.size(), source);
    at += source.size() - 1;
  }
}

}  // namespace

std::string Program::with_source(const std::string& message) const {
  // The flags behind the subject are advice, such as "; --split all scores every shard".
  const size_t end = std::min({message.find(": "), message.find(", expected"), message.find("; "), message.size()});
  std::string subject = message.substr(0, end);
  for (const auto& leaf : leaves_) {
    if (leaf->path != chosen_) continue;
    for (const auto& given : leaf->given) {
      if (!given->has_value) continue;
      const Option& option = *given->option;
      const std::string& source = given->from.name.empty() ? option.path : given->from.name;
      const bool is_nested = option.path.find('.') != option.path.npos;
      if (is_nested && subject == option.path)
        subject = source;
      else
        replace_flag(subject, "--" + option.name, source);
    }
  }
  return subject + message.substr(end);
}
std::string Program::missing_subcommand() const {
  std::string known;
  for (const CLI::App* sub : deepest().get_subcommands(nullptr)) known += (known.empty() ? "" : ", ") + sub->get_name();
  const auto extra = deepest().remaining();
  return (extra.empty() ? "found no subcommand" : "found the unknown subcommand '" + extra.front() + "'") +
         ", expected one of " + known;
}
std::string Program::unknown_argument() const {
  std::vector<std::string> extra = names_.front().first->remaining(true);
  std::erase(extra, "--");  // the mark "--": all following words are arguments
  const std::string word = extra.empty() ? "--" : extra.front();
  const bool option = word.front() == '-';
  const std::string near = option ? meant_by(word) : "";
  return "found the unknown " + std::string(option ? "option" : "argument") + " '" + word + "'" +
         (near.empty() ? "" : " (did you mean " + near + "?)") + ", expected those of " + chosen() + " --help";
}
std::string Program::wrong_count(const std::string& words) const {
  const CLI::Option* option = deepest().get_option_no_throw(words.substr(0, words.find(':')));
  if (option == nullptr) return words;
  const bool many = option->count() > 1 && option->get_multi_option_policy() == CLI::MultiOptionPolicy::Throw;
  return option->get_name() + ": found " + (many ? std::to_string(option->count()) + " values" : "no value") +
         ", expected one " + wanted(*option);
}
std::string Program::swallowed_option() const {
  for (const CLI::Option* option : deepest().get_options())
    for (const std::string& word : option->nonpositional() ? option->results() : std::vector<std::string>())
      if (word.starts_with("--") && deepest().get_option_no_throw(word) != nullptr)
        return option->get_name() + ": found the option '" + word + "', expected one " + wanted(*option);
  return "";
}

// The option, or the key of the configuration, nearest to a mistyped word.
std::string Program::meant_by(const std::string& word) const {
  const size_t begin = std::min(word.find_first_not_of('-'), word.size());
  const std::string name = word.substr(begin, std::max(word.find('='), begin) - begin);
  std::string key = name;
  std::replace(key.begin(), key.end(), '-', '_');
  for (const auto& leaf : leaves_) {
    if (leaf->app != &deepest()) continue;
    const Names names = names_of(*leaf);
    if (const auto found = names.paths.find(key); found != names.paths.end() && !found->second.empty())
      return "--set " + found->second + "=...";
    std::vector<std::string> options{"help", "config", "set"};
    for (const auto& given : leaf->given) options.push_back(given->option->name);
    const std::string near = nearest_name(name, options);
    return near.empty() ? "" : "--" + near;
  }
  return "";
}
std::string Program::wanted(const CLI::Option& option) {
  return option.get_type_name() + " (" + short_help(option.get_description()) + ")";
}

}  // namespace ingot::cli
