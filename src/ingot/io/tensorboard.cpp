#include "ingot/io/tensorboard.h"

#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <ctime>

#include "ingot/io/codecs/crc32c.h"

namespace ingot {
namespace {

// --- protobuf's encoding: a field is its number and wire type, then the value
enum Wire : uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

template <class T> void append_little(std::string& to, T value) {
  for (size_t i = 0; i < sizeof value; ++i) to += char(uint8_t(value >> (8 * i)));
}
void append_varint(std::string& to, uint64_t value) {
  for (; value >= 128; value >>= 7) to += char(uint8_t(value | 128));
  to += char(uint8_t(value));
}
void append_key(std::string& to, uint64_t field, Wire wire) { append_varint(to, field << 3 | wire); }
void append_bytes(std::string& to, uint64_t field, const std::string& bytes) {
  append_key(to, field, kBytes);
  append_varint(to, bytes.size());
  to += bytes;
}

// --- TensorFlow's messages: event.proto, summary.proto
std::string event_at(int64_t step) {
  timeval now{};
  ::gettimeofday(&now, nullptr);
  std::string event;
  append_key(event, 1, kFixed64);  // wall_time
  append_little(event, std::bit_cast<uint64_t>(double(now.tv_sec) + 1e-6 * double(now.tv_usec)));
  append_key(event, 2, kVarint);  // step
  append_varint(event, uint64_t(step));
  return event;
}
std::string value_of(const std::string& tag, double number) {
  std::string value;
  append_bytes(value, 1, tag);
  append_key(value, 2, kFixed32);  // simple_value
  append_little(value, std::bit_cast<uint32_t>(float(number)));
  return value;
}

// The format masks checksums, because a checksum of bytes with checksums would be weak.
uint32_t masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

}  // namespace

TensorBoard::TensorBoard(const std::string& directory, int64_t step) {
  static std::atomic<int> files{0};
  char host[256] = "host";
  ::gethostname(host, sizeof host - 1);
  create_directories(directory);
  file_ = File::append(join_path(directory, "events.out.tfevents." + std::to_string(std::time(nullptr)) + "." + host +
                                                "." + std::to_string(::getpid()) + "." + std::to_string(files++)));
  std::string begin = event_at(0);
  append_bytes(begin, 3, "brain.Event:2");  // file_version
  record(begin);
  std::string session;
  append_key(session, 1, kVarint);        // status
  append_varint(session, 1);              // START
  std::string from = event_at(step + 1);  // the first withdrawn step
  append_bytes(from, 7, session);         // session_log
  record(from);
}

void TensorBoard::write(int64_t step, const std::vector<std::pair<std::string, double>>& numbers) {
  std::string summary;
  for (const auto& [tag, number] : numbers) append_bytes(summary, 1, value_of(tag, number));
  std::string event = event_at(step);
  append_bytes(event, 5, summary);
  record(event);
}

// One write per record, so a reader sees complete records.
void TensorBoard::record(const std::string& event) {
  std::string bytes;
  append_little(bytes, uint64_t(event.size()));
  append_little(bytes, masked(crc32c(bytes)));
  bytes += event;
  append_little(bytes, masked(crc32c(event)));
  file_.write(bytes);
}

}  // namespace ingot
