#pragma once
// The framework of all subcommands. A subcommand describes its options once; from this description follow the command
// line, the INGOT_* environment, the keys of a --config file and of --set, the help text, and the precedence among
// them: flag > --set > environment > file > the variable's own default.
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "ingot/core/check.h"

namespace ingot::cli {

enum class Kind { flag, integer, unsigned_integer, number, text, list };

// An option. `spelling` is, for example, "--vocab N" or, for a positional argument, "RUN". The key in a configuration
// is the name without dashes and with underscores ("vocab"), the environment variable INGOT_VOCAB.
struct Option {
  std::string name, placeholder, path, help;
  Kind kind = Kind::text;
  void* into = nullptr;                  // bool, int64_t, uint64_t, double, std::string or vector of strings, by kind
  double low = 0, high = 0;              // of integers and numbers
  std::vector<std::string> allowed;      // of texts; empty: any
  bool required = false, given = false;  // given: by a flag on the command line
  double above = -HUGE_VAL;              // of a number for a section from a flag or the environment
  std::string instead_of;                // the path of a number replaced by this option: a flag over a file's choice
  bool negative = false;                 // of a flag: the given flag makes the variable false
  bool integers = false;                 // of a list: a configuration may give integers in place of strings
  bool empty_allowed = false;            // of a text or a list of texts: the empty text is a value
  std::string earlier;                   // a second name on the command line, kept for one version after a renaming
  std::function<void(const std::string&)> chosen;  // of a choice: takes its text, stored in `text`
  std::string text;
  Option& require() {
    required = true;
    return *this;
  }
  Option& more_than(double least) {
    above = least;
    return *this;
  }
  Option& negated() {
    negative = true;
    return *this;
  }
  Option& of_integers() {
    integers = true;
    return *this;
  }
  Option& allow_empty() {
    empty_allowed = true;
    return *this;
  }
  Option& earlier_name(const char* other) {
    earlier = other;
    return *this;
  }
  Option& replaces(const char* other) {
    instead_of = other;
    return *this;
  }
};

class Command {
 public:
  Command(std::string name, std::string summary);
  ~Command();
  Command(const Command&) = delete;

  // The variable holds the default and, when the command runs, the value.
  Option& flag(const char* spelling, bool& into, const char* help);
  Option& integer(const char* spelling, int64_t& into, int64_t low, int64_t high, const char* help);
  // Every number of 64 bits, such as a seed.
  Option& unsigned_integer(const char* spelling, uint64_t& into, const char* help);
  Option& number(const char* spelling, double& into, double low, double high, const char* help);
  Option& text(const char* spelling, std::string& into, const char* help);
  Option& choice(const char* spelling, std::string& into, std::vector<std::string> allowed, const char* help);
  // The same for an enum: each spelling with its value.
  template <class E>
  requires std::is_enum_v<E> Option& choice(const char* spelling, E& into,
                                            std::vector<std::pair<std::string, E>> values, const char* help) {
    Option& option = declare(spelling, Kind::text, nullptr, help);
    option.into = &option.text;
    for (const auto& [name, value] : values) option.allowed.push_back(name);
    option.chosen = [&into, values = std::move(values)](const std::string& text) {
      for (const auto& [name, value] : values)
        if (name == text) into = value;
    };
    return option;
  }
  Option& list(const char* spelling, std::vector<std::string>& into, const char* help);
  // A nested object of the configuration, such as "model", interpreted by the command itself: `json` receives the
  // values of file, environment and flags for this object ("{}" when none). `known` is an example object with every
  // key: a key with a unique name may stand alone in a configuration ("layers" for "model.layers").
  void section(const char* key, std::string& json, const std::string& known);
  // A key's name in different programs: an error for this name gives Ingot's name.
  void known_elsewhere(const char* name, const char* ours);
  // A flag for a single value inside a section: setting("--steps N", "train.steps", Kind::integer, "...").
  Option& setting(const char* spelling, const char* path, Kind kind, const char* help);

  // Throws where one of these options was given: an option without effect is a misunderstanding. `where` names the
  // command or model without use for the option ("a run of `ingot train`").
  void refuse_given(std::initializer_list<std::string_view> names, const std::string& where) const;

  void examples(const char* text);
  void run(std::function<void()> body);
  Command& add(const char* name, const char* summary);  // a nested subcommand

 private:
  friend class Program;
  struct Section {
    std::string key;
    std::string* json;
    std::string known;
  };
  Option& declare(const char* spelling, Kind kind, void* into, const char* help);
  std::string name_, summary_, examples_;
  std::vector<std::unique_ptr<Option>> options_;
  std::vector<Section> sections_;
  std::vector<std::pair<std::string, std::string>> elsewhere_;
  std::vector<std::unique_ptr<Command>> commands_;
  std::function<void()> body_;
};

// Parses, resolves, runs the chosen command; errors become one line on stderr and an exit status (docs/cli.md).
int run(Command& root, int argc, char** argv);

// --- input and output
// Standard output. A closed pipe ends the program quietly; every further failure is an Error.
void write_out(std::string_view text);
// The bytes of a file, or of standard input for "-" and "". With "" a terminal is refused as standard input.
std::string read_input(const std::string& path);
// Throws if the directory of `out` does not exist. Call this before work that takes minutes.
void require_directory_of(const std::string& out);
// Throws where writing `out` would replace one of the command's input files.
void refuse_to_replace(const std::string& out, const std::vector<std::string>& read);
// The same for the files that make a directory a run, including its checkpoints (`run` may be a checkpoint, or
// RUN/best), and for an artifact. Further files of a run, such as adapters, may be replaced.
void refuse_to_replace_run(const std::string& out, const std::string& run);
// The name of read_input()'s source, for errors: the file's name, or "standard input".
std::string input_name(const std::string& path);
// An Error of `work` is rethrown with its subject: a file, an option.
template <class Work> auto about(const std::string& what, Work&& work) {
  try {
    return work();
  } catch (const Error& e) { fail(e.code, what, ": ", e.what()); }
}
// A number with fixed digits, as in a table's second column, never with the locale's comma.
std::string fixed(double value, int digits);
// The value of `option`: the numbers of a list like "1,2,4"; both numbers of each pair of a list like
// "100:100,1024:100". A number below `least` is an error.
std::vector<int64_t> numbers_in(const char* option, const std::string& list, bool pairs = false, int64_t least = 1);
std::string with_commas(int64_t n);                // "35,944,602"
std::string counted(int64_t n, const char* what);  // "1 document", "2,000 documents"

// This process's command line in a shell's syntax, and the words that start the program (INGOT_PROGRAM, set by ./run,
// or "ingot"): for messages with the next command to type.
const std::string& command_line();
std::string command_line_without(const std::string& option);  // and its value
std::string quoted(const std::string& word);                  // in a shell's syntax
std::string program_name();

// --- the subcommands, a file each
void add_train(Command& root);
void add_eval(Command& root);
void add_accuracy(Command& eval);
void add_convert(Command& root);
void add_export(Command& root);
void add_generate(Command& root);
void add_ttt(Command& root);
void add_chat(Command& root);
void add_serve(Command& root);
void add_tokenizer(Command& root);
void add_data(Command& root);
void add_info(Command& root);
void add_plot(Command& root);
void add_doctor(Command& root);
void add_bench(Command& root);
void add_bench_decode(Command& bench);
void add_bench_draft(Command& bench);
void add_bench_prompt(Command& bench);
void add_bench_serve(Command& bench);
void add_demo(Command& root);

}  // namespace ingot::cli
