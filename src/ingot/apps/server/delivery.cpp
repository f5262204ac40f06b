#include "ingot/apps/server/delivery.h"

#include "ingot/engines/serve/messages.h"

namespace ingot::server {
namespace {

constexpr size_t kMostWaiting = 256 << 10;
constexpr double kSlowest = 4096;  // the rate in bytes per second at which a client must at least read the rest of an
                                   // ended answer

}  // namespace

void Delivery::wake() {
  if (asleep && connection != nullptr) {
    asleep = false;
    MHD_resume_connection(connection);
  }
}
void Delivery::sleep() {
  asleep = true;
  MHD_suspend_connection(connection);
}
void Delivery::fall_behind(double seconds) {
  if (!behind) behind_since = Clock::now();
  behind = true;
  patience = seconds;
}
void Delivery::push(const std::string& bytes) {
  const std::lock_guard lock(mutex);
  if (ended) return;  // the answer was cut off
  waiting += bytes;
  latest = Clock::now();
  if (waiting.size() > kMostWaiting) fall_behind(stall_seconds);
  wake();
}
void Delivery::took(size_t n) {
  waiting.erase(0, n);
  if (!ended && waiting.size() < kMostWaiting / 2) behind = false;
}
bool Delivery::ready() {
  const std::lock_guard lock(mutex);
  return !behind;
}
void Delivery::end(int code, const std::string& body) {
  const std::lock_guard lock(mutex);
  if (ended) return;
  status = code;
  waiting += body;
  ended = true;
  behind = false;
  fall_behind(stall_seconds + double(waiting.size()) / kSlowest);  // time to read the rest
  wake();
}
void Delivery::cut_off(const ApiError& e) {
  const std::string json = of_messages ? to_messages_json(e) : to_json(e);
  end(e.status, !streams ? json : (of_messages ? "event: error\ndata: " : "data: ") + json + "\n\n");
}

}  // namespace ingot::server
