#pragma once
// How the program ends on SIGINT and SIGTERM: unfinished files are removed, one line says so, the status is 130. What
// has something to save or to finish first holds an Interrupt. A signal that was ignored when the program started (as a
// shell starts jobs in the background) stays ignored.
#include <csignal>
#include <string>

namespace ingot::cli {

// From here on a signal ends the program; `who` is what its line begins with, and may change.
void end_on_signals(const std::string& who);

// While it lives, the first SIGINT or SIGTERM is noted instead of ending the program; the second one ends it.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  bool asked() const { return signal() != 0; }
  int signal() const;  // SIGINT or SIGTERM, or 0

 private:
  struct sigaction old_int_, old_term_;
};

}  // namespace ingot::cli
