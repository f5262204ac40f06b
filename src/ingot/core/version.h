#pragma once
namespace ingot {
const char* version();  // "0.2.0", stated once in CMakeLists.txt
const char* commit();   // of the tree this was configured from, or "unknown"
}  // namespace ingot
