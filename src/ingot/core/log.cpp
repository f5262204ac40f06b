#include "ingot/core/log.h"

#include <unistd.h>

#include <cstdlib>

#include "ingot/core/progress.h"

namespace ingot {
namespace {
LogLevel initial_level() {
  const char* wish = std::getenv("INGOT_LOG");
  if (wish == nullptr || *wish == 0) return LogLevel::info;
  const std::string w = wish;
  if (w == "error") return LogLevel::error;
  if (w == "warn") return LogLevel::warn;
  if (w == "info") return LogLevel::info;
  if (w == "debug") return LogLevel::debug;
  if (w == "trace") return LogLevel::trace;
  fail(ErrorCode::usage, "INGOT_LOG: found '", w, "', expected error, warn, info, debug or trace");
}
}  // namespace

LogLevel log_level() {
  static const LogLevel level = initial_level();
  return level;
}

void log_line(LogLevel l, const std::string& text) {
  if (l > log_level()) return;
  const char* prefix = l == LogLevel::error ? "error: " : l == LogLevel::warn ? "warning: " : "";
  detail::write_stderr_line(prefix + text);
}

}  // namespace ingot
