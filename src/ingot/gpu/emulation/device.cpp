// gpu/device.h and gpu/allocator.h for a build with the emulator as GPU (INGOT_CUDA=EMULATED). Device memory is host
// memory filled with NaNs. Work in a stream is complete when the call returns, or is recorded.
#ifdef INGOT_EMULATED_DEVICE
#include "ingot/gpu/device.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "ingot/gpu/allocator.h"
#include "ingot/gpu/emulation/grid.h"
#include "ingot/gpu/limits.h"

namespace ingot::gpu {
namespace {

constexpr int kSms = 4;  // few, for each block of a persistent kernel to process several tiles

int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }
void* take_memory(int64_t bytes) {
  void* const memory = std::aligned_alloc(256, size_t(round_up(bytes)));
  if (memory == nullptr)
    fail(ErrorCode::unsupported, "emulated GPU: refused ", bytes, " bytes of memory, found ",
         system_memory().available(), " free");
  std::memset(memory, 0xff, size_t(bytes));
  return memory;
}
std::atomic<int> devices = 1;
const Limits kEmulatedLimits{.sms = kSms, .l2_bytes = int64_t(1) << 20};
Limits& emulated_limits() {
  static Limits known = [] {
    const char* const as = std::getenv("INGOT_GPU_AS");
    return as == nullptr || *as == 0 ? kEmulatedLimits : imitate(kEmulatedLimits, limits_of(as));
  }();
  return known;
}
std::atomic<bool> reach_each_other = true;
thread_local int current = 0;
void check_device(int device) {
  INGOT_CHECK(0 <= device && device < devices, "emulated GPU: found cuda:", device,
              ", expected cuda:0 to cuda:", devices - 1);
}

using Clock = std::chrono::steady_clock;
using Recorded = std::vector<std::function<void()>>;

}  // namespace

int device_count() { return devices; }
int current_device() { return current; }
bool can_access_peer(int device, int peer) { return device != peer && reach_each_other; }
void enable_peer_access(int device, int peer) { check_device(device), check_device(peer); }
DeviceInfo device_info(int device) {
  check_device(device);
  return {.name = "emulated GPU",
          .sms = kSms,
          .major = 9,
          .minor = 0,
          .l2_bytes = int64_t(1) << 20,
          .memory_bytes = int64_t(8) << 30};
}
int sm_count(int device) { return limits(device).sms; }
double memory_bandwidth(int) { return 3e12; }
const Limits& limits(int device) {
  check_device(device);
  return emulated_limits();
}
void check_cuda_status(int status, const std::string& note) {
  fail(ErrorCode::unsupported, note, ": found status ", status, ", expected 0");
}
DeviceGuard::DeviceGuard(int device) : previous_(current) {
  check_device(device);
  current = device;
}
DeviceGuard::~DeviceGuard() { current = previous_; }

DeviceMemory::DeviceMemory(int64_t bytes) : bytes_(bytes) {
  if (bytes > 0) data_ = take_memory(bytes);
}
DeviceMemory::~DeviceMemory() { std::free(data_); }

OwnedStream::OwnedStream() : handle_(new char) {}
OwnedStream::~OwnedStream() { delete static_cast<char*>(handle_); }
void OwnedStream::synchronize() const {}

Event::Event() : handle_(new Clock::time_point) {}
Event::~Event() { delete static_cast<Clock::time_point*>(handle_); }
void Event::record(Stream) { *static_cast<Clock::time_point*>(handle_) = Clock::now(); }
void Event::synchronize() {}
double Event::seconds_since(const Event& start) const {
  return std::chrono::duration<double>(*static_cast<Clock::time_point*>(handle_) -
                                       *static_cast<Clock::time_point*>(start.handle_))
      .count();
}

Graph::Graph(Stream, const std::function<void()>& work) {
  auto recorded = std::make_unique<Recorded>();
  emulation::record(work, *recorded);
  handle_ = recorded.release();
}
Graph::~Graph() { delete static_cast<Recorded*>(handle_); }
void Graph::launch(Stream) const {
  for (const auto& step : *static_cast<Recorded*>(handle_)) emulation::submit(step);
}

void copy_to_device(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, size_t(bytes)); }
void copy_to_host(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, size_t(bytes)); }
void copy_on_device(void* to, const void* from, int64_t bytes, Stream) {
  emulation::submit([=] { std::memmove(to, from, size_t(bytes)); });
}
void fill_bytes(void* to, uint8_t value, int64_t bytes, Stream) {
  emulation::submit([=] { std::memset(to, value, size_t(bytes)); });
}
void copy_rows(const RowCopy& c, Stream) {
  check_device(c.device);
  emulation::submit([c] {
    for (int64_t r = 0; r < c.rows; ++r)
      std::memcpy(static_cast<char*>(c.to) + r * c.to_step, static_cast<const char*>(c.from) + r * c.from_step,
                  size_t(c.row_bytes));
  });
}
void synchronize() {}
void synchronize(Device, Stream) {}

namespace {
class OnDevice final : public Allocator {
 public:
  Device device() const override { return {Device::cuda, index}; }
  void* take(int64_t bytes) override { return take_memory(bytes); }
  void give_back(void* memory, int64_t) noexcept override { std::free(memory); }
  int64_t available() const override { return system_memory().available(); }
  int index = 0;
};
constexpr int kMostDevices = 8;
}  // namespace

Allocator& device_memory(int index) {
  check_device(index);
  static auto all = [] {
    std::array<OnDevice, kMostDevices> made;
    for (int i = 0; i < kMostDevices; ++i) made[size_t(i)].index = i;
    return made;
  }();
  return all[size_t(index)];
}
Allocator& memory_of(Device device) {
  return device.kind == Device::cpu ? system_memory() : device_memory(device.index);
}
Allocator& pinned_memory() { return system_memory(); }

}  // namespace ingot::gpu

namespace ingot::emulation {
void set_device_count(int count, bool peers) {
  INGOT_CHECK(1 <= count && count <= gpu::kMostDevices, "emulated GPU: found ", count, " GPUs, expected 1 to ",
              gpu::kMostDevices);
  gpu::devices = count;
  gpu::reach_each_other = peers;
}
void set_device_limits(const gpu::Limits& wanted) {
  gpu::emulated_limits() = gpu::imitate(gpu::kEmulatedLimits, wanted);
}

}  // namespace ingot::emulation
#endif
