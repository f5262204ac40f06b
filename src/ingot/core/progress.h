#pragma once
// A status line on stderr: redrawn in place on a terminal, and a plain line every few seconds elsewhere.
#include <chrono>
#include <string>

namespace ingot {

class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  // Shows the text, at most ten times a second on a terminal and once in `plain_seconds` elsewhere.
  void update(const std::string& text);
  // Leaves the text as a line of its own.
  void finish(const std::string& text);
  double plain_seconds = 5;

 private:
  std::chrono::steady_clock::time_point last_{};
  bool drawn_ = false;
};

std::string format_duration(double seconds);  // "1m 05s"
std::string format_count(double n);           // "12.3k"
std::string format_bytes(double n);           // "11.7 MB"

namespace detail {
// Writes a whole line, after clearing a progress line on the terminal. Never throws; a closed stderr is ignored.
void write_stderr_line(const std::string& text);
}  // namespace detail

}  // namespace ingot
