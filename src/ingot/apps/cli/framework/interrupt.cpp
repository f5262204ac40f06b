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
// The line is made beforehand: a handler may neither allocate nor lock.
std::array<char, 256> last_words;
std::atomic<size_t> last_words_size{0};
std::atomic<bool> ending{false};

void end_now(int) {
  while (ending.exchange(true)) ::pause();  // a second thread already ends the program
  remove_unfinished_files();
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, last_words.data(), last_words_size);
  ::_exit(exit_status(ErrorCode::interrupted));
}

void note(int signal) {
  if (noted != 0) end_now(signal);
  noted = signal;
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
  // Clears a progress line on the terminal, and resets colours.
  const std::string line =
      (isatty(STDERR_FILENO) == 1 ? "\x1b[0m\r\x1b[K" : "") + who.substr(0, 200) + ": stopped by a signal\n";
  last_words_size = 0;  // a signal during the copy prints nothing rather than part of the line
  std::copy(line.begin(), line.end(), last_words.begin());
  last_words_size = line.size();
  handle(SIGINT, end_now);
  handle(SIGTERM, end_now);
}

Interrupt::Interrupt() {
  noted = 0;
  old_int_ = handle(SIGINT, note);
  old_term_ = handle(SIGTERM, note);
}
Interrupt::~Interrupt() {
  sigaction(SIGINT, &old_int_, nullptr);
  sigaction(SIGTERM, &old_term_, nullptr);
}
int Interrupt::signal() const { return noted; }

}  // namespace ingot::cli
