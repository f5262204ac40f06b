#include "ingot/io/codecs/compress.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ingot/core/check.h"

extern char** environ;

namespace ingot {

int64_t gzip_size(std::string_view bytes, int level) {
  z_stream stream{};
  constexpr int kWindowBitsGzip = 15 + 16;
  if (deflateInit2(&stream, level, Z_DEFLATED, kWindowBitsGzip, 8, Z_DEFAULT_STRATEGY) != Z_OK)
    fail(ErrorCode::io, "gzip: cannot start zlib at level ", level);
  unsigned char out[16384];
  int64_t total = 0;
  int status = Z_OK;
  while (status == Z_OK) {
    // zlib counts input in 32 bits.
    const size_t piece = std::min(bytes.size(), size_t(1) << 30);
    if (stream.avail_in == 0 && piece > 0) {
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
      stream.avail_in = uInt(piece);
      bytes.remove_prefix(piece);
    }
    stream.next_out = out;
    stream.avail_out = sizeof out;
    status = deflate(&stream, bytes.empty() ? Z_FINISH : Z_NO_FLUSH);
    total += int64_t(sizeof out - stream.avail_out);
  }
  deflateEnd(&stream);
  if (status != Z_STREAM_END) fail(ErrorCode::io, "gzip: zlib failed with status ", status);
  return total;
}

namespace {

struct Descriptor {
  int value = -1;
  ~Descriptor() { close(); }
  void close() {
    if (value >= 0) ::close(value);
    value = -1;
  }
};

// Writes to the child and counts the bytes of its output until the child closes the output.
int64_t exchange(Descriptor& to, Descriptor& from, std::string_view input, const std::string& name) {
  char buffer[65536];
  int64_t total = 0;
  for (;;) {
    if (input.empty()) to.close();
    pollfd wait[2] = {{from.value, POLLIN, 0}, {to.value, POLLOUT, 0}};
    if (::poll(wait, to.value >= 0 ? 2 : 1, -1) < 0) {
      if (errno == EINTR) continue;
      fail(ErrorCode::io, name, ": cannot poll: ", std::strerror(errno));
    }
    if (to.value >= 0 && wait[1].revents != 0) {
      const ssize_t n =
          ::send(to.value, input.data(), std::min(input.size(), sizeof buffer), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0)
        input.remove_prefix(size_t(n));
      else if (n < 0 && errno != EAGAIN && errno != EINTR)
        input = {};  // the child stopped reading; its exit status tells why
    }
    if (wait[0].revents != 0) {
      const ssize_t n = ::read(from.value, buffer, sizeof buffer);
      if (n == 0) return total;
      if (n < 0 && errno != EINTR) fail(ErrorCode::io, name, ": cannot read its output: ", std::strerror(errno));
      if (n > 0) total += n;
    }
  }
}

}  // namespace

std::optional<int64_t> tool_output_size(const std::vector<std::string>& command, std::string_view input) {
  INGOT_CHECK(!command.empty(), "tool: found no command");
  const std::string& name = command[0];
  // A socket for its stdin: writing to a pipe whose reader died would raise SIGPIPE.
  int in[2], out[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) != 0)
    fail(ErrorCode::io, name, ": cannot make a socket: ", std::strerror(errno));
  Descriptor child_in{in[0]}, to{in[1]};
  if (::pipe2(out, O_CLOEXEC) != 0) fail(ErrorCode::io, name, ": cannot make a pipe: ", std::strerror(errno));
  Descriptor from{out[0]}, child_out{out[1]};

  std::vector<char*> arguments;
  for (const std::string& a : command) arguments.push_back(const_cast<char*>(a.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, child_in.value, 0);
  posix_spawn_file_actions_adddup2(&actions, child_out.value, 1);
  pid_t child;
  const int error = ::posix_spawnp(&child, name.c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error == ENOENT) return std::nullopt;
  if (error != 0) fail(ErrorCode::io, name, ": cannot start: ", std::strerror(error));
  child_in.close();
  child_out.close();

  const auto reap = [&] {
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return status;
  };
  int64_t total = 0;
  try {
    total = exchange(to, from, input, name);
  } catch (...) {
    ::kill(child, SIGKILL);
    reap();
    throw;
  }
  to.close();
  const int status = reap();
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    fail(ErrorCode::io, name, ": failed with ", WIFEXITED(status) ? "exit status " : "signal ",
         WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  return total;
}

std::optional<int64_t> xz_size(std::string_view bytes) {
  return tool_output_size({"xz", "-9e", "--format=xz", "--stdout"}, bytes);
}

}  // namespace ingot
