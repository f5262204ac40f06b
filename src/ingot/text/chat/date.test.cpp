#include "ingot/text/chat/date.h"

#include <gtest/gtest.h>

namespace ingot {
namespace {

TEST(chat_date, a_date_is_an_existing_day_as_year_month_day) {
  for (const char* text : {"2026-01-31", "2024-02-29", "1999-12-31"}) EXPECT_TRUE(is_date(text)) << text;
  for (const char* text :
       {"", "2026-02-30", "2026-13-01", "2026-1-31", "2026-01-31 ", "31.01.2026", "2025-02-29", "today", "2026/01/31"})
    EXPECT_FALSE(is_date(text)) << text;
  EXPECT_TRUE(is_date(today()));
}

}  // namespace
}  // namespace ingot
