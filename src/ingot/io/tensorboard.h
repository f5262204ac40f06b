#pragma once
// Event files for TensorBoard: numbers by step. A file is a row of records
//   length u64 | masked CRC-32C of the length u32 | an Event in protobuf's encoding | masked CRC-32C of the Event u32
// all little-endian, and its name begins with "events.out.tfevents.".
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ingot/io/file.h"

namespace ingot {

class TensorBoard {
 public:
  TensorBoard() = default;
  // A new file in `directory`. TensorBoard ignores the numbers of steps after `step` in earlier files, as for a run
  // resumed at `step`.
  TensorBoard(const std::string& directory, int64_t step);
  explicit operator bool() const { return bool(file_); }
  const std::string& path() const { return file_.path(); }
  void write(int64_t step, const std::vector<std::pair<std::string, double>>& numbers);

 private:
  void record(const std::string& event);
  File file_;
};

}  // namespace ingot
