#include "ingot/apps/cli/framework/program.h"

#include <CLI/CLI.hpp>

#include "ingot/apps/cli/framework/interrupt.h"
#include "ingot/core/cpu/thread_pool.h"

namespace ingot::cli {

Program::Program(Command& root, CLI::App& app) { build(root, app, root.name_); }
void Program::build(Command& command, CLI::App& app, const std::string& path) {
  names_.emplace_back(&app, path);
  app.set_help_flag("--help", "this text");
  if (!command.examples_.empty()) app.footer("Examples:\n" + command.examples_);
  if (!command.commands_.empty()) app.require_subcommand(command.body_ ? 0 : 1, 1);
  for (auto& sub : command.commands_)
    build(*sub, *app.add_subcommand(sub->name_, sub->summary_), path + " " + sub->name_);
  if (command.body_) build_leaf(command, app, path);
}
void Program::build_leaf(Command& command, CLI::App& app, const std::string& path) {
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
      // Each use of a repeatable flag takes a single value. Otherwise the flag would also take a positional argument
      // that follows the value.
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
void Program::execute() {
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
const CLI::App& Program::deepest() const {
  const CLI::App* found = names_.front().first;
  for (const auto& [app, name] : names_)
    if (app->parsed()) found = app;
  return *found;
}
std::string Program::chosen() const {
  std::string path = names_.empty() ? "ingot" : names_.front().second;
  for (const auto& [app, name] : names_)
    if (app->parsed()) path = name;
  return chosen_.empty() ? path : chosen_;
}

}  // namespace ingot::cli
