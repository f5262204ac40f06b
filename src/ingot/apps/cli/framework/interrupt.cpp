#include "ingot/apps/cli/framework/interrupt.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "ingot/core/check.h"
#include "ingot/io/file.h"

namespace ingot::cli {
namespace {

volatile std::sig_atomic_t noted = 0;
// A line that a handler prints. It is made beforehand, because a handler may neither allocate nor lock.
struct Line {
  std::array<char, 256> text;
  std::atomic<size_t> size{0};

  void set(const std::string& line) {
    size = 0;  // a signal during the copy prints nothing rather than part of the line
    const size_t fits = std::min(line.size(), text.size());
    std::copy_n(line.begin(), fits, text.begin());
    size = fits;
  }
  void print() const { [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, text.data(), size); }
};
Line last_words;   // of a signal that ends the program
Line first_words;  // of a signal that an Interrupt notes
std::atomic<bool> ending{false};

// On a terminal the line begins by clearing a progress line and resetting colours.
std::string as_line(const std::string& words) {
  return (isatty(STDERR_FILENO) == 1 ? "\x1b[0m\r\x1b[K" : "") + words.substr(0, 240) + "\n";
}

void end_now(int) {
  while (ending.exchange(true)) ::pause();  // a second thread already ends the program
  remove_unfinished_files();
  last_words.print();
  ::_exit(exit_status(ErrorCode::interrupted));
}

void note(int signal) {
  if (noted != 0) end_now(signal);
  noted = signal;
  first_words.print();
}

struct sigaction action_of(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  // No SA_RESTART: reads return early. The second signal is blocked, so that handlers never nest.
  sigaddset(&action.sa_mask, SIGINT);
  sigaddset(&action.sa_mask, SIGTERM);
  return action;
}

// Returns the previous action.
struct sigaction handle(int signal, void (*handler)(int)) {
  struct sigaction before {};
  sigaction(signal, nullptr, &before);
  if (before.sa_handler == SIG_IGN) return before;
  const struct sigaction action = action_of(handler);
  sigaction(signal, &action, nullptr);
  return before;
}

}  // namespace

void end_on_signals(const std::string& who) {
  last_words.set(as_line(who.substr(0, 200) + ": stopped by a signal"));
  handle(SIGINT, end_now);
  handle(SIGTERM, end_now);
}

Interrupt::Interrupt(const std::string& answer) {
  noted = 0;
  first_words.set(answer.empty() ? "" : as_line(answer));
  old_int_ = handle(SIGINT, note);
  old_term_ = handle(SIGTERM, note);
}
Interrupt::~Interrupt() {
  sigaction(SIGINT, &old_int_, nullptr);
  sigaction(SIGTERM, &old_term_, nullptr);
}
int Interrupt::signal() const { return noted; }

}  // namespace ingot::cli
