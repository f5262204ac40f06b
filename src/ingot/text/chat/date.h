#pragma once
// Dates in the form that conversations use, such as 2026-01-31.
#include <string>

namespace ingot {

std::string today();  // in the local time zone
// Whether the text is the date of an existing day in this form, the only form in the models' training.
bool is_date(const std::string& text);

}  // namespace ingot
