#pragma once
// The time that has passed, by a clock that is never set.
#include <chrono>

namespace ingot {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace ingot
