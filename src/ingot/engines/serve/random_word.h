#pragma once
// Random names for answers, calls and lines of the log, which clients cannot guess.
#include <cstdio>
#include <random>
#include <string>

namespace ingot {

// 24 random hexadecimal digits.
inline std::string random_word() {
  static thread_local std::random_device device;
  char text[33];
  std::snprintf(text, sizeof text, "%08x%08x%08x", device(), device(), device());
  return text;
}

}  // namespace ingot
