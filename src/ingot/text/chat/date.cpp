#include "ingot/text/chat/date.h"

#include <ctime>

namespace ingot {

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm day{};
  localtime_r(&now, &day);
  char text[16];
  return std::string(text, std::strftime(text, sizeof text, "%Y-%m-%d", &day));
}

bool is_date(const std::string& text) {
  std::tm day{};
  const char* end = text.size() == 10 ? ::strptime(text.c_str(), "%Y-%m-%d", &day) : nullptr;
  const std::tm asked = day;
  return end != nullptr && *end == 0 && std::mktime(&day) != -1 && day.tm_mday == asked.tm_mday;
}

}  // namespace ingot
