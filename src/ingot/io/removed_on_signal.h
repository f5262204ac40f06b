#pragma once
// A name that remove_unfinished_files() (file.h) removes, for temporary files that other functions write and replace.
#include <string>

namespace ingot {

// During its lifetime a signal that ends the process removes the file of this name, whichever file that is. The name
// must be the process's own, as the names of mkstemp are.
class RemovedOnSignal {
 public:
  explicit RemovedOnSignal(std::string path);
  ~RemovedOnSignal();  // the file stays
  RemovedOnSignal(const RemovedOnSignal&) = delete;
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  int slot_ = -1;
};

}  // namespace ingot
