#pragma once
// The program: a tree of commands, parsed by CLI11. program.cpp gives the commands to CLI11 and runs the chosen one,
// configuration.cpp collects the values of its options, and program_errors.cpp words the errors of the command line.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/framework/values.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace ingot::cli {

class Program {
 public:
  Program(Command& root, CLI::App& app);
  // Runs the deepest command named on the command line.
  void execute();
  // The command so far, such as "ingot tokenizer encode"; the prefix of every error.
  std::string chosen() const;

  // An error of the command with the names of the sources of the values that it is about. A key of a section, as in
  // "train.seconds: found ...", becomes the flag or the environment variable that gave the value. A flag, as in
  // "--stride: found ..." or "found --flat and --stride, expected ...", becomes the environment variable or the key
  // that gave the value.
  std::string with_source(const std::string& message) const;
  // The message when no subcommand was recognised behind chosen().
  std::string missing_subcommand() const;
  // The message for unknown words behind chosen().
  std::string unknown_argument() const;
  // The message for an option with too few values or too many; CLI11's own words begin with the option's name.
  std::string wrong_count(const std::string& words) const;
  // The message where an option stands in place of the preceding option's value; else empty.
  std::string swallowed_option() const;

 private:
  // An option of a command, as CLI11 found it on the command line.
  struct Given {
    Option* option;
    CLI::Option* parsed;
    std::vector<std::string> words;  // of an option with values
    std::string set;                 // of a flag
    Source from;                     // the flag or the environment variable that gave the final value
    bool has_value = false;          // whether any source gave a value
  };
  // A command that runs something.
  struct Leaf {
    Command* command;
    CLI::App* app;
    std::string path, config;
    std::vector<std::string> sets;
    int64_t threads = 0;
    std::vector<std::unique_ptr<Given>> given;
  };
  // The keys that a configuration of a command may have at the top.
  struct Names {
    std::vector<std::string> whole;            // options and sections
    std::map<std::string, std::string> paths;  // keys of sections that are short for a path; empty: ambiguous
  };

  void build(Command& command, CLI::App& app, const std::string& path);
  void build_leaf(Command& command, CLI::App& app, const std::string& path);
  const CLI::App& deepest() const;

  // configuration.cpp
  void resolve(Leaf& leaf);
  static Json read_config(Leaf& leaf);
  static void take_environment(Leaf& leaf, Json& tree);
  static void take_sets(Leaf& leaf, Json& tree);
  static void take_words(Given& given, Json& tree);
  static void give(const Option& option, const Json& value, const std::string& where, Json& tree);
  static void refuse_both(const Leaf& leaf);
  static void add_names(const Json& known, const std::string& path, Names& names);
  static Names names_of(const Leaf& leaf);
  static std::string path_of(const Leaf& leaf, const std::string& path, const std::string& where);
  [[noreturn]] static void refuse_unknown(const Leaf& leaf, const Names& names, const std::string& key,
                                          const std::string& where);
  static Json nested(const Leaf& leaf, const Json& tree, const std::string& where);
  static void add_once(const Json& value, const std::string& path, const std::string& where, Json& into);

  // program_errors.cpp
  std::string meant_by(const std::string& word) const;
  static std::string wanted(const CLI::Option& option);

  std::vector<std::unique_ptr<Leaf>> leaves_;
  std::vector<std::pair<CLI::App*, std::string>> names_;
  std::string chosen_;
};

}  // namespace ingot::cli
