#include "ingot/core/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>

namespace ingot {
namespace {
std::mutex mutex;
bool line_open = false;  // a progress line stands on the terminal's current row

bool on_terminal() {
  static const bool tty = isatty(STDERR_FILENO) == 1;
  return tty;
}
size_t terminal_width() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1u : 79u;
}
void write_all(const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (n <= 0) return;  // stderr is closed
    done += size_t(n);
  }
}
}  // namespace

void detail::write_stderr_line(const std::string& text) {
  std::lock_guard lock(mutex);
  write_all((line_open ? "\r\x1b[K" : "") + text + "\n");
  line_open = false;
}

Progress::Progress() = default;
Progress::~Progress() {
  std::lock_guard lock(mutex);
  if (drawn_ && line_open) {
    write_all("\n");
    line_open = false;
  }
}

void Progress::update(const std::string& text) {
  const auto now = std::chrono::steady_clock::now();
  const double waited = std::chrono::duration<double>(now - last_).count();
  if (last_.time_since_epoch().count() != 0 && waited < (on_terminal() ? 0.1 : plain_seconds)) return;
  last_ = now;
  if (!on_terminal()) return detail::write_stderr_line(text);
  std::lock_guard lock(mutex);
  write_all("\r\x1b[K" + text.substr(0, terminal_width()));
  line_open = drawn_ = true;
}

void Progress::finish(const std::string& text) {
  detail::write_stderr_line(text);
  drawn_ = false;
}

std::string format_duration(double seconds) {
  char out[64];
  if (seconds < 10)
    std::snprintf(out, sizeof out, "%.1fs", seconds);
  else if (seconds < 60)
    std::snprintf(out, sizeof out, "%.0fs", seconds);
  else if (seconds < 3600)
    std::snprintf(out, sizeof out, "%dm %02ds", int(seconds) / 60, int(seconds) % 60);
  else
    std::snprintf(out, sizeof out, "%dh %02dm", int(seconds) / 3600, int(seconds) % 3600 / 60);
  return out;
}
std::string format_count(double n) {
  char out[32];
  if (n < 1e4)
    std::snprintf(out, sizeof out, "%.0f", n);
  else if (n < 1e6)
    std::snprintf(out, sizeof out, "%.1fk", n / 1e3);
  else if (n < 1e9)
    std::snprintf(out, sizeof out, "%.1fM", n / 1e6);
  else
    std::snprintf(out, sizeof out, "%.1fG", n / 1e9);
  return out;
}
std::string format_bytes(double n) {
  char out[32];
  if (n < 1e3)
    std::snprintf(out, sizeof out, "%.0f B", n);
  else if (n < 1e6)
    std::snprintf(out, sizeof out, "%.1f kB", n / 1e3);
  else if (n < 1e9)
    std::snprintf(out, sizeof out, "%.1f MB", n / 1e6);
  else
    std::snprintf(out, sizeof out, "%.2f GB", n / 1e9);
  return out;
}

}  // namespace ingot
