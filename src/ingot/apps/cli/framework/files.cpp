// Standard input and output of a command, and the files that its result must not replace.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/framework/closed_pipe.h"
#include "ingot/core/check.h"
#include "ingot/io/file.h"
#include "ingot/models/gpt/artifact/artifact.h"

namespace ingot::cli {
namespace {
constexpr int64_t kMaxInput = int64_t(1) << 30;  // bytes
}  // namespace

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

}  // namespace ingot::cli
