#pragma once
// Human-readable lines on stderr. INGOT_LOG=error|warn|info|debug|trace chooses the least important level shown.
#include <string>

#include "ingot/core/check.h"

namespace ingot {

enum class LogLevel { error, warn, info, debug, trace };
LogLevel log_level();
void log_line(LogLevel level, const std::string& text);

template <class... Note> void log_error(const Note&... n) { log_line(LogLevel::error, detail::concat(n...)); }
template <class... Note> void log_warn(const Note&... n) { log_line(LogLevel::warn, detail::concat(n...)); }
template <class... Note> void log_info(const Note&... n) { log_line(LogLevel::info, detail::concat(n...)); }
template <class... Note> void log_debug(const Note&... n) {
  if (log_level() >= LogLevel::debug) log_line(LogLevel::debug, detail::concat(n...));
}

}  // namespace ingot
