#pragma once
#include <string>

#include "ingot/io/file.h"
#include "ingot/io/json.h"

namespace ingot {

// log.jsonl of a run: one JSON object a line. A full disk must not stop training: the first failure is reported and the
// rest stays silent. Before open() nothing is written.
class RunLog {
 public:
  // What a full disk or a kill cut off goes first: a line behind it would read as one with it.
  void open(const std::string& path);
  void write(const OrderedJson& line);

 private:
  File file_;
  bool failed_ = false;
};

// JSON has no word for a number that is not finite.
OrderedJson finite_or_null(double x);

}  // namespace ingot
