#include "ingot/apps/cli/framework/cli.h"

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdlib>
#include <new>
#include <string>

#include "ingot/apps/cli/framework/closed_pipe.h"
#include "ingot/apps/cli/framework/command_line.h"
#include "ingot/apps/cli/framework/interrupt.h"
#include "ingot/apps/cli/framework/program.h"
#include "ingot/core/check.h"
#include "ingot/core/cpu/cpu.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/core/version.h"
#include "ingot/gpu/limits.h"

namespace ingot::cli {
namespace {
int report(const std::string& who, const std::string& message, int status) {
  std::string line = who + ": " + message;  // a single line without control codes, for any file name
  for (char& c : line)
    if (static_cast<unsigned char>(c) < ' ' || c == 127) c = ' ';
  detail::write_stderr_line(line);
  return status;
}

// Refuses a wrong INGOT_GPU_AS in every command, also where no GPU is used and nothing else reads the variable.
void check_gpu_variable() {
  const char* const capability = std::getenv("INGOT_GPU_AS");
  if (capability == nullptr || *capability == 0) return;
  try {
    (void)gpu::limits_of(capability);
  } catch (const Error& e) { fail(ErrorCode::usage, "INGOT_GPU_AS: ", e.what()); }
}

// Returns the exit status. Errors of the command itself pass through.
int parse_and_execute(Program& program, CLI::App& app, int argc, char** argv) {
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
    return parse_and_execute(program, app, argc, argv);
  } catch (const ClosedPipe&) { return 0; } catch (const Error& e) {
    return report(program.chosen(), program.with_source(e.what()), exit_status(e.code));
  } catch (const std::bad_alloc&) {
    return report(program.chosen(), "out of memory", 1);
  } catch (const std::exception& e) { return report(program.chosen(), std::string("internal error: ") + e.what(), 1); }
}

}  // namespace ingot::cli
