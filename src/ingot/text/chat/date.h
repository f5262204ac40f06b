#pragma once
// Dates as conversations state them, such as 2026-01-31.
#include <string>

namespace ingot {

std::string today();  // of the local time zone
// Whether the text is the date of a day that exists, in this form: models were trained with this form only.
bool is_date(const std::string& text);

}  // namespace ingot
