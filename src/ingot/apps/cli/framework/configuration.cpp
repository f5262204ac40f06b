// The values of a command's options and sections: of a configuration file, the environment, --set and the command line.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>

#include "ingot/apps/cli/framework/program.h"
#include "ingot/core/check.h"
#include "ingot/io/json.h"
#include "ingot/io/utf8.h"

namespace ingot::cli {

// Collects the values of a command's options from the file, the environment, --set and the command line, in this order;
// a later value replaces an earlier one. Then stores them in the command's variables.
void Program::resolve(Leaf& leaf) {
  Json tree = read_config(leaf);
  take_environment(leaf, tree);
  take_sets(leaf, tree);
  refuse_both(leaf);
  for (const auto& given : leaf.given) {
    given->option->given = given->parsed->count() > 0;
    take_words(*given, tree);
  }
  for (const auto& given : leaf.given) {
    const Option& option = *given->option;
    const Json* value = find_path(tree, option.path);
    given->has_value = value != nullptr;
    if (value != nullptr && option.into != nullptr) store_value(option, *value, given->from);
    if (value == nullptr && option.required)
      fail(ErrorCode::usage, given->parsed->get_name(), " is missing (", option.help, ")");
  }
  for (const auto& section : leaf.command->sections_)
    *section.json = tree.contains(section.key) ? write_json(tree[section.key]) : "{}";
}
Json Program::read_config(Leaf& leaf) {
  Json tree = Json::object();
  if (leaf.config.empty())
    if (const char* file = std::getenv("INGOT_CONFIG"); file != nullptr) leaf.config = file;
  if (!leaf.config.empty()) {
    tree = read_json_file(leaf.config);
    if (!tree.is_object()) fail(ErrorCode::usage, leaf.config, ": found ", describe_json(tree), ", expected an object");
    tree = nested(leaf, tree, leaf.config);
  }
  return tree;
}
void Program::take_environment(Leaf& leaf, Json& tree) {
  for (const auto& given : leaf.given) {
    const Option& option = *given->option;
    const std::string name = environment_name(option);
    const char* word = option.placeholder.empty() && option.kind != Kind::flag ? nullptr : std::getenv(name.c_str());
    if (word == nullptr || *word == 0) continue;
    give(option, value_of(option, word, name), name, tree);
    given->from = {name, word};
  }
}
void Program::take_sets(Leaf& leaf, Json& tree) {
  for (const std::string& set : leaf.sets) {
    const size_t equals = set.find('=');
    if (equals == std::string::npos) fail(ErrorCode::usage, "--set: found '", set, "', expected KEY=VALUE");
    if (const int64_t at = find_invalid_utf8(set); at >= 0)
      fail(ErrorCode::usage, "--set: found an argument that is not UTF-8 at byte ", at, ", expected text");
    const std::string path = set.substr(0, equals);
    Json unused;
    at_path(unused, path, "--set");  // checks the form of the path first
    const std::string whole = path_of(leaf, path, "--set");
    at_path(tree, whole, "--set") = loose_value(set.substr(equals + 1));
    for (const auto& given : leaf.given)
      if (given->option->path == whole) given->from = {};
  }
}
void Program::take_words(Given& given, Json& tree) {
  const Option& option = *given.option;
  const std::string where = given.parsed->get_name();
  if (given.parsed->count() == 0) return;
  if (option.kind == Kind::list) {
    for (const std::string& word : given.words) not_empty(option, word, where);
    give(option, given.words, where, tree);
    given.from = {where, given.words.back()};
  } else {
    const std::string& word = option.kind == Kind::flag ? given.set : given.words.back();
    give(option, value_of(option, word, where), where, tree);
    given.from = {where, word};
  }
}
// Writes a value from a flag or the environment into the tree.
void Program::give(const Option& option, const Json& value, const std::string& where, Json& tree) {
  if (value.is_number() && !(value.get<double>() > option.above))
    fail(ErrorCode::usage, where, ": found ", plain(value.get<double>()), ", expected more than ", plain(option.above));
  if (!option.instead_of.empty() && find_path(tree, option.instead_of)) at_path(tree, option.instead_of, where) = 0;
  at_path(tree, option.path, where) = value;
}
void Program::refuse_both(const Leaf& leaf) {
  for (const auto& a : leaf.given)
    for (const auto& b : leaf.given)
      if (a->option->instead_of == b->option->path && a->parsed->count() > 0 && b->parsed->count() > 0)
        fail(ErrorCode::usage, "found ", a->parsed->get_name(), " and ", b->parsed->get_name(),
             ", expected one of them");
}

// --- names without their section

void Program::add_names(const Json& known, const std::string& path, Names& names) {
  for (const auto& [key, value] : known.items()) {
    const std::string below = path + "." + key;
    const auto [place, first] = names.paths.emplace(key, below);
    if (!first && place->second != below) place->second.clear();
    if (value.is_object()) add_names(value, below, names);
  }
}
Program::Names Program::names_of(const Leaf& leaf) {
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
std::string Program::path_of(const Leaf& leaf, const std::string& path, const std::string& where) {
  const Names names = names_of(leaf);
  const size_t dot = path.find('.');
  const std::string key = path.substr(0, dot), rest = path.substr(std::min(dot, path.size()));
  if (key.empty() || std::find(names.whole.begin(), names.whole.end(), key) != names.whole.end()) return path;
  const auto found = names.paths.find(key);
  if (found != names.paths.end() && !found->second.empty()) return found->second + rest;
  refuse_unknown(leaf, names, key, where);
}
[[noreturn]] void Program::refuse_unknown(const Leaf& leaf, const Names& names, const std::string& key,
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
Json Program::nested(const Leaf& leaf, const Json& tree, const std::string& where) {
  Json out = Json::object();
  for (const auto& [key, value] : tree.items()) {
    const std::string path = path_of(leaf, key, where);
    add_once(value, path, where, at_path(out, path, where));
  }
  return out;
}
// Some keys of a section may stand outside of it; no key may occur twice.
void Program::add_once(const Json& value, const std::string& path, const std::string& where, Json& into) {
  if (into.is_object() && value.is_object()) {
    for (const auto& [key, inner] : value.items()) add_once(inner, path + "." + key, where, into[key]);
  } else if (into.is_null()) {
    into = value;
  } else {
    fail(ErrorCode::usage, where, ": found ", path, " twice, expected one value");
  }
}

}  // namespace ingot::cli
