#pragma once
#include <string>

#include "ingot/io/file.h"
#include "ingot/io/json.h"

namespace ingot {

// log.jsonl of a run: a JSON object per line. A full disk must not stop training: the first failure is reported, and
// later failures are silent. Before open() nothing is written.
class RunLog {
 public:
  // Removes an incomplete last line, left by a full disk or a kill, because the next line would continue the incomplete
  // line.
  void open(const std::string& path);
  void write(const OrderedJson& line);

 private:
  File file_;
  bool failed_ = false;
};

// Null for infinities and NaN, because JSON has no notation for these.
OrderedJson finite_or_null(double x);

}  // namespace ingot
