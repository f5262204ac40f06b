#include "ingot/apps/cli/shared/server_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/core/check.h"

extern char** environ;

namespace ingot::cli {
namespace {

constexpr double kPatience = 10;  // seconds that the server may take to end

// The environment of the server. The server must log its address, so its log level is `info`, whatever the level of
// this process.
std::vector<std::string> environment() {
  std::vector<std::string> all = {"INGOT_LOG=info"};
  for (char** e = environ; *e != nullptr; ++e)
    if (!std::string_view(*e).starts_with("INGOT_LOG=")) all.emplace_back(*e);
  return all;
}
std::vector<char*> null_ended(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& w : words) all.push_back(w.data());
  all.push_back(nullptr);
  return all;
}

}  // namespace

std::vector<std::string> read_keys(const std::string& path) {
  std::vector<std::string> keys;
  if (path.empty()) return keys;
  const std::string text = read_input(path);
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    line.erase(line.find_last_not_of(" \t\r") + 1);
    line.erase(0, line.find_first_not_of(" \t"));
    if (!line.empty() && line[0] != '#') keys.push_back(line);
    at = end + 1;
  }
  if (keys.empty()) fail(ErrorCode::bad_data, path, ": found no key, expected one a line");
  return keys;
}

ServerProcess::ServerProcess(const std::vector<std::string>& words) {
  std::vector<std::string> line = {"ingot", "serve", "--host", "127.0.0.1", "--port", "0"}, variables = environment();
  line.insert(line.end(), words.begin(), words.end());
  const std::vector<char*> arguments = null_ended(line), environment = null_ended(variables);
  std::array<int, 2> pipe{};
  if (::pipe2(pipe.data(), O_CLOEXEC) != 0) fail(ErrorCode::io, "a pipe: ", std::strerror(errno));
  process_ = ::fork();
  if (process_ < 0) fail(ErrorCode::io, "cannot start `ingot serve`: ", std::strerror(errno));
  if (process_ == 0) {
    // Only async-signal-safe functions until exec. The server ends as soon as this process ends for any reason. No
    // process reads its answers any more, so the server need not finish any answer; it removes its temporary files.
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    ::signal(SIGINT, SIG_DFL), ::signal(SIGTERM, SIG_DFL);
    ::dup2(pipe[1], STDERR_FILENO);
    ::execve("/proc/self/exe", arguments.data(), environment.data());
    ::_exit(127);
  }
  ::close(pipe[1]);
  messages_ = pipe[0];
  std::string text, last;
  while (url_.empty()) {
    if (!read_line(text)) fail_as_the_server(last);
    last = text;
    const size_t at = text.starts_with("serving ") ? text.find(" at http://") : text.npos;
    if (at != text.npos) url_ = text.substr(at + 4, text.find(' ', at + 4) - at - 4);
    if (!text.starts_with("ingot serve: ")) std::fprintf(stderr, "%s\n", text.c_str());
  }
  reader_ = std::thread([this] {
    for (std::string more; read_line(more);)
      if (more.starts_with("warning: ") || more.starts_with("ingot serve: "))
        std::fprintf(stderr, "%s\n", more.c_str());
  });
}

bool ServerProcess::read_line(std::string& line) {
  for (;;) {
    if (const size_t end = read_.find('\n'); end != std::string::npos) {
      line = read_.substr(0, end);
      read_.erase(0, end + 1);
      return true;
    }
    std::array<char, 4096> bytes;
    const ssize_t n = ::read(messages_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    read_.append(bytes.data(), size_t(n));
  }
}

void ServerProcess::fail_as_the_server(const std::string& last) {
  constexpr std::string_view kBeginning = "ingot serve: ";
  int status = 0;
  ::waitpid(process_, &status, 0);
  ::close(messages_);
  ErrorCode code = ErrorCode::io;
  for (int c = 0; c <= int(ErrorCode::interrupted); ++c)
    if (WIFEXITED(status) && exit_status(ErrorCode(c)) == WEXITSTATUS(status)) code = ErrorCode(c);
  fail(code, last.starts_with(kBeginning) ? last.substr(kBeginning.size()) : "`ingot serve` ended: " + last);
}

ServerProcess::~ServerProcess() {
  ::kill(process_, SIGTERM);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(kPatience);
  while (::waitpid(process_, nullptr, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > until) ::kill(process_, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  reader_.join();  // ends when the server closes its standard error
  ::close(messages_);
}

}  // namespace ingot::cli
