#pragma once
// The progress of a long command, and the estimate of its end.
#include <unistd.h>

#include <chrono>
#include <functional>

#include "ingot/core/progress.h"

namespace ingot::cli {

// "converting 1.2 GB of 13.8 GB, ETA 14s", at the speed so far.
inline std::string bar_text(const std::string& what, double done, double all, double seconds,
                            const std::function<std::string(double)>& shown) {
  std::string text = what + " " + shown(done) + " of " + shown(all);
  if (done > 0 && done <= all) text += ", ETA " + format_duration(seconds * (all - done) / done);
  return text;
}

class Bar {
 public:
  explicit Bar(std::string what, std::function<std::string(double)> shown = format_bytes)
      : what_(std::move(what)), shown_(std::move(shown)) {}
  void at(int64_t done, int64_t all) {
    if (seconds() > quiet_) progress_.update(bar_text(what_, double(done), double(all), seconds(), shown_));
  }
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::string what_;
  std::function<std::string(double)> shown_;
  Progress progress_;
  double quiet_ = isatty(STDERR_FILENO) == 1 ? 0.3 : 1;  // a short command needs no line
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace ingot::cli
