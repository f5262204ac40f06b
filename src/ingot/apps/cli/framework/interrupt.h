#pragma once
// How the program ends on SIGINT and SIGTERM: unfinished files are removed, a line reports the signal, the status is
// 130. A command with something to save or to finish first holds an Interrupt. A signal ignored at the program's start
// (as in a shell's background jobs) stays ignored.
#include <csignal>
#include <string>

namespace ingot::cli {

// From this call on a signal ends the program. `who` is the beginning of the line that reports the signal; a later call
// may change it.
void end_on_signals(const std::string& who);

// During its lifetime, the first SIGINT or SIGTERM is noted instead of ending the program, and `answer` is printed if
// it is not empty; the second signal ends the program.
class Interrupt {
 public:
  explicit Interrupt(const std::string& answer = "");
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  bool asked() const { return signal() != 0; }
  int signal() const;  // SIGINT or SIGTERM, or 0

 private:
  struct sigaction old_int_, old_term_;
};

}  // namespace ingot::cli
