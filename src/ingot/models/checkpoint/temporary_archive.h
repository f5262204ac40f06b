#pragma once
// The name of a new, empty file in the directory of temporary files, which is removed at the end of the object's life,
// and by a signal that ends the process. An archive that was written to this file may be mapped; its contents remain
// until they are unmapped.
#include <string>

#include "ingot/io/removed_on_signal.h"

namespace ingot {

class TemporaryArchive {
 public:
  TemporaryArchive();
  ~TemporaryArchive();
  TemporaryArchive(const TemporaryArchive&) = delete;
  const std::string& path() const { return name_.path(); }

 private:
  RemovedOnSignal name_;
};

}  // namespace ingot
