#pragma once
// Common code of `ingot serve` and of a command that starts a server for its own use: `ingot serve` in a separate
// process, on a free port of this machine.
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace ingot::cli {

// The keys of a file of --api-key-file: one per line; empty lines and lines that begin with # are ignored. No path, no
// keys.
std::vector<std::string> read_keys(const std::string& path);

constexpr int64_t kMostSlots = 256, kMostConnections = 1 << 16;  // of `ingot serve`

class ServerProcess {
 public:
  // Starts `ingot serve` with these words and returns when the server answers. The messages until then, and later
  // warnings, go to standard error. An error of the server is an error here, with the same message and code.
  explicit ServerProcess(const std::vector<std::string>& words);
  ~ServerProcess();  // ends the server and waits for its end
  ServerProcess(const ServerProcess&) = delete;
  const std::string& url() const { return url_; }

 private:
  bool read_line(std::string& line);
  [[noreturn]] void fail_as_the_server(const std::string& last);
  pid_t process_ = -1;
  int messages_ = -1;  // the server's standard error
  std::string read_, url_;
  std::thread reader_;
};

}  // namespace ingot::cli
