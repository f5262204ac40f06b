#include "ingot/models/checkpoint/temporary_archive.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "ingot/core/check.h"

namespace ingot {

TemporaryArchive::TemporaryArchive() : path_((std::filesystem::temp_directory_path() / "ingot-XXXXXX").string()) {
  const int made = mkstemp(path_.data());
  if (made < 0) fail(ErrorCode::io, path_, ": found ", std::strerror(errno), ", expected a new file");
  close(made);
}
TemporaryArchive::~TemporaryArchive() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

}  // namespace ingot
