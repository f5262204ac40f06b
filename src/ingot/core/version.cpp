#include "ingot/core/version.h"
namespace ingot {
const char* version() { return INGOT_VERSION; }
const char* commit() { return INGOT_COMMIT; }
}  // namespace ingot
