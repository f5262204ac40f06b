#include "ingot/engines/train/run/run_log.h"

#include <cmath>

#include "ingot/core/log.h"

namespace ingot {

void RunLog::open(const std::string& path) {
  file_ = File::append(path);
  const std::string before = read_file(path);
  if (!before.empty() && before.back() != '\n') file_.shorten(int64_t(before.rfind('\n') + 1));
}

void RunLog::write(const OrderedJson& line) {
  if (!file_ || failed_) return;
  try {
    file_.write(show_json(line) + "\n");  // file names in the line may be any bytes
  } catch (const Error& e) {
    failed_ = true;
    log_warn("the log is incomplete from here on: ", e.what());
  }
}

OrderedJson finite_or_null(double x) { return std::isfinite(x) ? OrderedJson(x) : OrderedJson(nullptr); }

}  // namespace ingot
