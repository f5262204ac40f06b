#include "ingot/text/unicode.h"

#include <algorithm>
#include <vector>

namespace ingot::detail {

extern const uint32_t kUnicodeRuns[];
extern const int kUnicodeRunCount;

const uint8_t* char_classes() {
  // The runs are expanded once into a table of 1.1 MB: a lookup is one load, and a text touches few pages of the table.
  static const std::vector<uint8_t> classes = [] {
    std::vector<uint8_t> table(0x110000);
    for (int i = 0; i < kUnicodeRunCount; ++i) {
      const uint32_t end = i + 1 < kUnicodeRunCount ? kUnicodeRuns[i + 1] >> 8 : 0x110000;
      std::fill(table.begin() + (kUnicodeRuns[i] >> 8), table.begin() + end, uint8_t(kUnicodeRuns[i]));
    }
    table['\r'] |= kNewline;
    table['\n'] |= kNewline;
    return table;
  }();
  return classes.data();
}

}  // namespace ingot::detail
