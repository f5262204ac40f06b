#include "ingot/apps/cli/framework/cli.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>

#include "ingot/apps/cli/framework/interrupt.h"
#include "ingot/core/check.h"
#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/core/version.h"
#include "ingot/gpu/limits.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/io/utf8.h"
#include "ingot/models/gpt/artifact/artifact.h"

namespace ingot::cli {

void set_command_line(int argc, char** argv);

namespace {

struct ClosedPipe {};  // the reader of standard output went away
constexpr int64_t kMaxInput = int64_t(1) << 30;

// --- from words to values
// from_chars, because strtod follows the locale.
template <class T> bool parse_number(std::string_view word, T& into) {
  if (word.starts_with('+')) word.remove_prefix(1);
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), into);
  return error == std::errc() && end == word.data() + word.size() && !word.empty();
}

// The beginning of an option's help, without defaults and explanations, for errors.
std::string short_help(const std::string& help) {
  return help.substr(0, std::min({help.find(" (default"), help.find("; "), help.find(": ")}));
}

// An unset variable of a script gives an empty word. Only a text may be empty; names of files, directories and runs may
// not.
const std::string& not_empty(const Option& option, const std::string& word, const std::string& where) {
  const std::string what = option.placeholder.empty() ? option.name : option.placeholder;
  if (word.empty() && what != "TEXT" && option.allowed.empty())
    fail(ErrorCode::usage, where, ": found an empty word, expected ", what, " (", short_help(option.help), ")");
  return word;
}

Json value_of(const Option& option, const std::string& word, const std::string& where) {
  int64_t integer = 0;
  double number = 0;
  switch (option.kind) {
    case Kind::flag:
      if (word == "1" || word == "true") return true;
      if (word == "0" || word == "false") return false;
      fail(ErrorCode::usage, where, ": found '", word, "', expected true or false");
    case Kind::integer:
      if (parse_number(word, integer)) return integer;
      fail(ErrorCode::usage, where, ": found '", word, "', expected an integer");
    case Kind::number:
      if (parse_number(word, number) && std::isfinite(number)) return number;
      fail(ErrorCode::usage, where, ": found '", word, "', expected a finite number");
    case Kind::text: return not_empty(option, word, where);
    case Kind::list: return Json::array({not_empty(option, word, where)});
  }
  return nullptr;
}

// The value of --set a.b=VALUE: JSON where the value parses as JSON, else text.
Json loose_value(const std::string& word) {
  Json value = Json::parse(word, nullptr, false);
  return value.is_discarded() ? Json(word) : value;
}

Json& at_path(Json& tree, const std::string& path, const std::string& where) {
  Json* node = &tree;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string key = path.substr(begin, end - begin);
    if (key.empty()) fail(ErrorCode::usage, where, ": found the key '", path, "', expected names joined by dots");
    if (node->is_null()) *node = Json::object();
    if (!node->is_object())
      fail(ErrorCode::usage, where, ": '", path.substr(0, begin - 1), "' is a ", describe_json(*node),
           ", expected an object");
    node = &(*node)[key];
    begin = end + 1;
  }
  return *node;
}
const Json* find_path(const Json& tree, const std::string& path) {
  const Json* node = &tree;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const auto found = node->is_object() ? node->find(path.substr(begin, end - begin)) : node->end();
    if (!node->is_object() || found == node->end()) return nullptr;
    node = &*found;
    begin = end + 1;
  }
  return node;
}

std::string environment_name(const Option& option) {
  std::string name = "INGOT_" + option.name;
  std::transform(name.begin(), name.end(), name.begin(), [](char c) { return c == '-' ? '_' : char(std::toupper(c)); });
  return name;
}

// --- from the resolved tree to the command's variables

// The flag or the environment variable that gave a value, and its text; empty: a key of a file or of --set.
struct Source {
  std::string name, word;
};
[[noreturn]] void wrong(const Option& option, const Json& value, const Source& from, const std::string& expected) {
  fail(ErrorCode::usage, from.name.empty() ? option.path : from.name, ": found ",
       from.name.empty() ? describe_json(value) : "'" + from.word + "'", ", expected ", expected);
}
std::string plain(double value) {
  char text[64];
  const bool whole = value == std::floor(value) && std::abs(value) < 1e15;  // 1000000, not 1e+06
  const auto end = whole ? std::to_chars(text, text + sizeof text, int64_t(value)).ptr
                         : std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}
std::string listed(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}
// Whether `text` holds `word` between characters that belong to no word.
bool mentions(const std::string& text, const std::string& word) {
  const auto in_word = [&](size_t at) {
    return at < text.size() && (std::isalnum(uint8_t(text[at])) || text[at] == '-');
  };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
    if (!in_word(at + word.size()) && (at == 0 || !in_word(at - 1))) return true;
  return false;
}
// The help of an option, with its choices where the text leaves some of them out.
std::string described(const Option& option) {
  const bool all_named = std::all_of(option.allowed.begin(), option.allowed.end(),
                                     [&](const std::string& word) { return mentions(option.help, word); });
  return all_named ? option.help : listed(option.allowed) + ": " + option.help;
}
std::string range_of(const Option& option, const char* what) {
  const std::string kind = what;
  if (std::isinf(option.high)) return kind + " of at least " + plain(option.low);
  return kind + " from " + plain(option.low) + " to " + plain(option.high);
}

void store_value(const Option& option, const Json& value, const Source& from) {
  switch (option.kind) {
    case Kind::flag:
      if (!value.is_boolean()) wrong(option, value, from, "true or false");
      *static_cast<bool*>(option.into) = value.get<bool>() != option.negative;
      return;
    case Kind::integer: {
      const bool in_range = value.is_number_integer() && double(value.get<int64_t>()) >= option.low &&
                            double(value.get<int64_t>()) <= option.high;
      if (!in_range) wrong(option, value, from, range_of(option, "an integer"));
      *static_cast<int64_t*>(option.into) = value.get<int64_t>();
      return;
    }
    case Kind::number: {
      const bool in_range =
          value.is_number() && value.get<double>() >= option.low && value.get<double>() <= option.high;
      if (!in_range) wrong(option, value, from, range_of(option, "a number"));
      *static_cast<double*>(option.into) = value.get<double>();
      return;
    }
    case Kind::text: {
      if (!value.is_string()) wrong(option, value, from, "a string");
      const auto text = value.get<std::string>();
      not_empty(option, text, option.path);
      if (!option.allowed.empty() &&
          std::find(option.allowed.begin(), option.allowed.end(), text) == option.allowed.end()) {
        wrong(option, value, from, "one of " + listed(option.allowed));
      }
      *static_cast<std::string*>(option.into) = text;
      if (option.chosen) option.chosen(text);
      return;
    }
    case Kind::list: {
      auto& into = *static_cast<std::vector<std::string>*>(option.into);
      into.clear();
      for (const Json& item : value.is_array() ? value : Json::array({value})) {
        if (!item.is_string()) wrong(option, item, from, "a string");
        not_empty(option, item.get_ref<const std::string&>(), option.path);
        into.push_back(item.get<std::string>());
      }
      return;
    }
  }
}

}  // namespace

// --- describing a command
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

// --- parsing
// Gives a tree of Commands to CLI11 and keeps the words found.
class Program {
 public:
  Program(Command& root, CLI::App& app) { build(root, app, root.name_); }

  // Runs the deepest command named on the command line.
  void execute() {
    for (auto& leaf : leaves_)
      if (leaf->app->parsed()) {
        chosen_ = leaf->path;
        end_on_signals(chosen_);
        resolve(*leaf);
        if (leaf->threads > 0) set_thread_count(int(leaf->threads));
        leaf->command->body_();
        return;  // a nested subcommand's leaf stands before that of the command around it
      }
  }
  // An error of the command about a key of a section, such as "train.seconds: found ...", with the name of the flag or
  // of the environment variable in place of the key where one of these gave the value.
  std::string with_source(const std::string& message) const {
    for (const auto& leaf : leaves_)
      for (const auto& given : leaf->given)
        if (const std::string& path = given->option->path; leaf->path == chosen_ && !given->from.name.empty() &&
                                                           path.find('.') != path.npos &&
                                                           message.starts_with(path + ":"))
          return given->from.name + message.substr(path.size());
    return message;
  }
  // The command so far, such as "ingot tokenizer encode"; the prefix of every error.
  std::string chosen() const {
    std::string path = names_.empty() ? "ingot" : names_.front().second;
    for (const auto& [app, name] : names_)
      if (app->parsed()) path = name;
    return chosen_.empty() ? path : chosen_;
  }
  // The message when no subcommand was recognised behind chosen().
  std::string missing_subcommand() const {
    std::string known;
    for (const CLI::App* sub : deepest().get_subcommands(nullptr))
      known += (known.empty() ? "" : ", ") + sub->get_name();
    const auto extra = deepest().remaining();
    return (extra.empty() ? "found no subcommand" : "found the unknown subcommand '" + extra.front() + "'") +
           ", expected one of " + known;
  }
  // The message for unknown words behind chosen().
  std::string unknown_argument() const {
    std::vector<std::string> extra = names_.front().first->remaining(true);
    std::erase(extra, "--");  // the mark "--": all following words are arguments
    const std::string word = extra.empty() ? "--" : extra.front();
    const bool option = word.front() == '-';
    const std::string near = option ? meant_by(word) : "";
    return "found the unknown " + std::string(option ? "option" : "argument") + " '" + word + "'" +
           (near.empty() ? "" : " (did you mean " + near + "?)") + ", expected those of " + chosen() + " --help";
  }
  // The message for an option with too few values or too many; CLI11's own words begin with the option's name.
  std::string wrong_count(const std::string& words) const {
    const CLI::Option* option = deepest().get_option_no_throw(words.substr(0, words.find(':')));
    if (option == nullptr) return words;
    const bool many = option->count() > 1 && option->get_multi_option_policy() == CLI::MultiOptionPolicy::Throw;
    return option->get_name() + ": found " + (many ? std::to_string(option->count()) + " values" : "no value") +
           ", expected one " + wanted(*option);
  }
  // The message where an option stands in place of the preceding option's value; else empty.
  std::string swallowed_option() const {
    for (const CLI::Option* option : deepest().get_options())
      for (const std::string& word : option->nonpositional() ? option->results() : std::vector<std::string>())
        if (word.starts_with("--") && deepest().get_option_no_throw(word) != nullptr)
          return option->get_name() + ": found the option '" + word + "', expected one " + wanted(*option);
    return "";
  }

 private:
  // The option, or the key of the configuration, nearest to a mistyped word.
  std::string meant_by(const std::string& word) const {
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
  static std::string wanted(const CLI::Option& option) {
    return option.get_type_name() + " (" + short_help(option.get_description()) + ")";
  }
  const CLI::App& deepest() const {
    const CLI::App* found = names_.front().first;
    for (const auto& [app, name] : names_)
      if (app->parsed()) found = app;
    return *found;
  }
  struct Given {
    Option* option;
    CLI::Option* parsed;
    std::vector<std::string> words;
    std::string set;
    Source from;
  };
  struct Leaf {
    Command* command;
    CLI::App* app;
    std::string path, config;
    std::vector<std::string> sets;
    int64_t threads = 0;
    std::vector<std::unique_ptr<Given>> given;
  };

  void build(Command& command, CLI::App& app, const std::string& path) {
    names_.emplace_back(&app, path);
    app.set_help_flag("--help", "this text");
    if (!command.examples_.empty()) app.footer("Examples:\n" + command.examples_);
    if (!command.commands_.empty()) app.require_subcommand(command.body_ ? 0 : 1, 1);
    for (auto& sub : command.commands_)
      build(*sub, *app.add_subcommand(sub->name_, sub->summary_), path + " " + sub->name_);
    if (command.body_) build_leaf(command, app, path);
  }

  void build_leaf(Command& command, CLI::App& app, const std::string& path) {
    auto leaf = std::make_unique<Leaf>();
    leaf->command = &command, leaf->app = &app, leaf->path = path;
    command.integer("--threads N", leaf->threads, 1, 1024, "number of threads (default: one per CPU)");
    for (auto& option : command.options_) {
      auto given = std::make_unique<Given>();
      given->option = option.get();
      const bool positional = option->placeholder.empty() && option->kind != Kind::flag;
      const std::string names =
          (positional ? "" : "--") + option->name + (option->earlier.empty() ? "" : ",--" + option->earlier);
      if (option->kind == Kind::flag) {
        given->parsed = app.add_flag(names, given->set, option->help);
      } else {
        given->parsed = app.add_option(names, given->words, described(*option));
        const bool many = option->kind == Kind::list;
        // A repeatable flag takes a single value each time, so that the flag does not swallow a positional argument
        // behind the value.
        given->parsed->expected(1, many && positional ? CLI::detail::expected_max_vector_size : 1);
        given->parsed->multi_option_policy(many ? CLI::MultiOptionPolicy::TakeAll : CLI::MultiOptionPolicy::Throw);
        given->parsed->type_name(positional ? "" : option->placeholder);
        given->parsed->allow_extra_args(many && positional);
      }
      leaf->given.push_back(std::move(given));
    }
    app.add_option("--config", leaf->config, "a JSON file with any of these options")->type_name("FILE");
    app.add_option("--set", leaf->sets, "one value of the configuration, with precedence over the file")
        ->type_name("A.B=C")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->allow_extra_args(false);
    leaves_.push_back(std::move(leaf));
  }

  void resolve(Leaf& leaf) {
    Json tree = Json::object();
    if (leaf.config.empty())
      if (const char* file = std::getenv("INGOT_CONFIG"); file != nullptr) leaf.config = file;
    if (!leaf.config.empty()) {
      tree = read_json_file(leaf.config);
      if (!tree.is_object())
        fail(ErrorCode::usage, leaf.config, ": found ", describe_json(tree), ", expected an object");
      tree = nested(leaf, tree, leaf.config);
    }
    for (const auto& given : leaf.given) {
      const Option& option = *given->option;
      const std::string name = environment_name(option);
      const char* word = option.placeholder.empty() && option.kind != Kind::flag ? nullptr : std::getenv(name.c_str());
      if (word == nullptr || *word == 0) continue;
      give(option, value_of(option, word, name), name, tree);
      given->from = {name, word};
    }
    for (const std::string& set : leaf.sets) {
      const size_t equals = set.find('=');
      if (equals == std::string::npos) fail(ErrorCode::usage, "--set: found '", set, "', expected KEY=VALUE");
      if (const int64_t at = find_invalid_utf8(set); at >= 0)
        fail(ErrorCode::usage, "--set: found an argument that is not UTF-8 at byte ", at, ", expected text");
      const std::string path = set.substr(0, equals);
      Json malformed;
      at_path(malformed, path, "--set");  // checks the form of the path first
      const std::string whole = path_of(leaf, path, "--set");
      at_path(tree, whole, "--set") = loose_value(set.substr(equals + 1));
      for (const auto& given : leaf.given)
        if (given->option->path == whole) given->from = {};
    }
    refuse_both(leaf);
    for (const auto& given : leaf.given) {
      given->option->given = given->parsed->count() > 0;
      take_words(*given, tree);
    }
    for (const auto& given : leaf.given) {
      const Option& option = *given->option;
      const Json* value = find_path(tree, option.path);
      if (value != nullptr && option.into != nullptr) store_value(option, *value, given->from);
      if (value == nullptr && option.required)
        fail(ErrorCode::usage, given->parsed->get_name(), " is missing (", option.help, ")");
    }
    for (const auto& section : leaf.command->sections_)
      *section.json = tree.contains(section.key) ? write_json(tree[section.key]) : "{}";
  }

  static void take_words(Given& given, Json& tree) {
    const Option& option = *given.option;
    const std::string where = given.parsed->get_name();
    if (given.parsed->count() == 0) return;
    if (option.kind == Kind::list) {
      for (const std::string& word : given.words) not_empty(option, word, where);
      give(option, given.words, where, tree);
    } else {
      const std::string& word = option.kind == Kind::flag ? given.set : given.words.back();
      give(option, value_of(option, word, where), where, tree);
      given.from = {where, word};
    }
  }
  // Puts a value from a flag or the environment in its place.
  static void give(const Option& option, const Json& value, const std::string& where, Json& tree) {
    if (value.is_number() && !(value.get<double>() > option.above))
      fail(ErrorCode::usage, where, ": found ", plain(value.get<double>()), ", expected more than ",
           plain(option.above));
    if (!option.instead_of.empty() && find_path(tree, option.instead_of)) at_path(tree, option.instead_of, where) = 0;
    at_path(tree, option.path, where) = value;
  }
  static void refuse_both(const Leaf& leaf) {
    for (const auto& a : leaf.given)
      for (const auto& b : leaf.given)
        if (a->option->instead_of == b->option->path && a->parsed->count() > 0 && b->parsed->count() > 0)
          fail(ErrorCode::usage, "found ", a->parsed->get_name(), " and ", b->parsed->get_name(),
               ", expected one of them");
  }

  // --- names without their section
  struct Names {
    std::vector<std::string> whole;            // keys at the top: options, sections
    std::map<std::string, std::string> paths;  // short keys allowed at the top, with their paths; empty: ambiguous
  };
  static void add_names(const Json& known, const std::string& path, Names& names) {
    for (const auto& [key, value] : known.items()) {
      const std::string below = path + "." + key;
      const auto [place, first] = names.paths.emplace(key, below);
      if (!first && place->second != below) place->second.clear();
      if (value.is_object()) add_names(value, below, names);
    }
  }
  static Names names_of(const Leaf& leaf) {
    Names names;
    for (const auto& section : leaf.command->sections_) {
      names.whole.push_back(section.key);
      add_names(parse_json(section.known, section.key), section.key, names);
    }
    for (const auto& given : leaf.given) {
      const std::string& path = given->option->path;
      if (path.find('.') == std::string::npos) names.whole.push_back(path);
    }
    for (const std::string& name : names.whole) names.paths.erase(name);  // full names are never short keys
    return names;
  }
  // "steps" means "train.steps"; the first word of a path with dots must be known.
  static std::string path_of(const Leaf& leaf, const std::string& path, const std::string& where) {
    const Names names = names_of(leaf);
    const size_t dot = path.find('.');
    const std::string key = path.substr(0, dot), rest = path.substr(std::min(dot, path.size()));
    if (key.empty() || std::find(names.whole.begin(), names.whole.end(), key) != names.whole.end()) return path;
    const auto found = names.paths.find(key);
    if (found != names.paths.end() && !found->second.empty()) return found->second + rest;
    refuse_unknown(leaf, names, key, where);
  }
  [[noreturn]] static void refuse_unknown(const Leaf& leaf, const Names& names, const std::string& key,
                                          const std::string& where) {
    std::vector<std::string> all = names.whole;
    for (const auto& [name, path] : names.paths)
      if (!path.empty()) all.push_back(name);
    std::string near = nearest_name(key, all);
    for (const auto& [name, ours] : leaf.command->elsewhere_)
      if (name == key) near = ours;
    fail(ErrorCode::usage, where, ": found the unknown key '", key, "'",
         near.empty() ? "" : " (did you mean '" + near + "'?)", ", expected one of ", listed(names.whole),
         names.paths.empty() ? "" : " or a key of these sections");
  }
  // The object in a file, with every key moved into its section.
  static Json nested(const Leaf& leaf, const Json& tree, const std::string& where) {
    Json out = Json::object();
    for (const auto& [key, value] : tree.items()) {
      const std::string path = path_of(leaf, key, where);
      add_once(value, path, where, at_path(out, path, where));
    }
    return out;
  }
  // Some keys of a section may stand outside of it; no key may occur twice.
  static void add_once(const Json& value, const std::string& path, const std::string& where, Json& into) {
    if (into.is_object() && value.is_object()) {
      for (const auto& [key, inner] : value.items()) add_once(inner, path + "." + key, where, into[key]);
    } else if (into.is_null()) {
      into = value;
    } else {
      fail(ErrorCode::usage, where, ": found ", path, " twice, expected one value");
    }
  }

  std::vector<std::unique_ptr<Leaf>> leaves_;
  std::vector<std::pair<CLI::App*, std::string>> names_;
  std::string chosen_;
};

namespace {
int report(const std::string& who, const std::string& message, int status) {
  std::string line = who + ": " + message;  // a single line without control codes, for any file name
  for (char& c : line)
    if (static_cast<unsigned char>(c) < ' ' || c == 127) c = ' ';
  detail::write_stderr_line(line);
  return status;
}
}  // namespace

namespace {
// Refuses a wrong INGOT_GPU_AS in every command, also where no GPU is used and nothing else reads the variable.
void check_gpu_variable() {
  const char* const capability = std::getenv("INGOT_GPU_AS");
  if (capability == nullptr || *capability == 0) return;
  try {
    (void)gpu::limits_of(capability);
  } catch (const Error& e) { fail(ErrorCode::usage, "INGOT_GPU_AS: ", e.what()); }
}
}  // namespace

int run(Command& root, int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a write to a closed pipe returns EPIPE instead
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond the file size limit returns EFBIG instead
  end_on_signals("ingot");
  CLI::App app("Trains small GPTs, and runs these and published models such as GPT-OSS.", "ingot");
  app.set_version_flag("--version", std::string("ingot ") + version() + " (" + commit() + ")", "version and commit");
  Program program(root, app);
  set_command_line(argc, argv);
  try {
    try {
      app.parse(argc, argv);
      log_debug("ingot ", version(), " (", commit(), ") on ", cpu_model(), ", ", cpu_count(), " CPUs");
      if (const std::string message = program.swallowed_option(); !message.empty()) fail(ErrorCode::usage, message);
      check_gpu_variable();
      program.execute();
    } catch (const CLI::CallForHelp&) { write_out(app.help()); } catch (const CLI::CallForVersion& e) {
      write_out(std::string(e.what()) + "\n");
    } catch (const CLI::RequiredError&) {
      return report(program.chosen(), program.missing_subcommand(), exit_status(ErrorCode::usage));
    } catch (const CLI::ExtrasError&) {
      const std::string swallowed = program.swallowed_option();
      return report(program.chosen(), swallowed.empty() ? program.unknown_argument() : swallowed,
                    exit_status(ErrorCode::usage));
    } catch (const CLI::ArgumentMismatch& e) {
      return report(program.chosen(), program.wrong_count(e.what()), exit_status(ErrorCode::usage));
    } catch (const CLI::ParseError& e) {
      return report(program.chosen(), std::string(e.what()) + "; see " + program.chosen() + " --help",
                    exit_status(ErrorCode::usage));
    }
    return 0;
  } catch (const ClosedPipe&) { return 0; } catch (const Error& e) {
    return report(program.chosen(), program.with_source(e.what()), exit_status(e.code));
  } catch (const std::bad_alloc&) {
    return report(program.chosen(), "out of memory", 1);
  } catch (const std::exception& e) { return report(program.chosen(), std::string("internal error: ") + e.what(), 1); }
}

// --- input and output
void write_out(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EPIPE) throw ClosedPipe{};
    if (n < 0) fail(ErrorCode::io, "standard output: ", std::strerror(errno));
    text.remove_prefix(size_t(n));
  }
}

void require_directory_of(const std::string& out) {
  if (!is_directory(parent_path(out)))
    fail(ErrorCode::not_found, out, ": found no directory ", parent_path(out), ", expected one to write to");
}
void refuse_to_replace(const std::string& out, const std::vector<std::string>& read) {
  for (const std::string& path : read) {
    std::error_code no_such_file;
    if (std::filesystem::equivalent(out, path, no_such_file))
      fail(ErrorCode::usage, out, ": found a file that is read here, expected another name for the result");
  }
}
namespace {
constexpr const char* kOfCheckpoint = "manifest.json";

// `path` itself, or the run's directory if `path` is a checkpoint. RUN/best is a checkpoint by its name alone
// (io/checkpoint.h).
std::string whole_run(const std::string& path) {
  if (exists(join_path(path, kOfCheckpoint))) return join_path(path, "..");
  return base_name(path) == "best" && !exists(path) ? parent_path(path) : path;
}
}  // namespace
void refuse_to_replace_run(const std::string& out, const std::string& run) {
  const std::string whole = whole_run(run);
  if (!is_directory(whole)) return refuse_to_replace(out, {run, artifact_tokenizer(run)});
  for (const char* name : {"config.json", "tokenizer.json", "tokenizer.model", "log.jsonl", "best.json"})
    refuse_to_replace(out, {join_path(whole, name)});
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator(whole, unreadable))
    if (entry.is_directory(unreadable) && exists(join_path(entry.path(), kOfCheckpoint)))
      for (const auto& file : std::filesystem::directory_iterator(entry.path(), unreadable))
        refuse_to_replace(out, {file.path()});
}
std::string input_name(const std::string& path) { return path.empty() || path == "-" ? "standard input" : path; }

std::string read_input(const std::string& path) {
  if (!path.empty() && path != "-") return read_file(path, kMaxInput);
  if (path.empty() && isatty(STDIN_FILENO))
    fail(ErrorCode::usage, "no input: give it on standard input or with --file");
  return read_standard_input(kMaxInput);
}

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
