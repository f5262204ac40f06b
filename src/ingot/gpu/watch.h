#pragma once
// Bounded device waits, the host's side. A kernel whose blocks wait for each other takes a Watch; its waits
// (tile/flag.cuh) give up when one of them lasts longer than `limit_ns` or the host asks, record who waited for what,
// and from then on no wait blocks: every block runs to its end by its usual path, and what it computed is discarded.
//     WaitControl control(2.0);                                      // once, per engine: it allocates
//     launch("decode", decode, {..., .cooperative = true}, stream, ..., control.watch());
//     ... synchronise the stream ...
//     control.check("decode", {"layer input", "grid barrier"});      // throws where a wait gave up
#include <cstdint>
#include <initializer_list>
#include <string>

#include "ingot/gpu/device.h"

namespace ingot::gpu {

// What the stop word says. Who was stopped by another GPU leaves no record: that one has it.
enum : uint32_t { kRunning = 0, kTimedOut = 1, kStoppedByHost = 2, kStoppedByPeer = 3 };

// What the first wait that gave up was waiting for. In mapped host memory.
struct WaitRecord {
  uint32_t state = kRunning;
  uint32_t what = 0;  // the kernel's number for this wait
  uint32_t block = 0, thread = 0;
  uint32_t expected = 0, seen = 0;
  uint64_t waited_ns = 0;
};

struct Watch {
  uint32_t* stop = nullptr;             // device memory: kRunning, or why not
  const uint32_t* host_stop = nullptr;  // mapped host memory: not 0 asks the kernel to end
  WaitRecord* record = nullptr;
  uint64_t limit_ns = 0;
};

class WaitControl {
 public:
  explicit WaitControl(double limit_seconds = 2);
  ~WaitControl();
  WaitControl(const WaitControl&) = delete;
  WaitControl& operator=(const WaitControl&) = delete;

  Watch watch() const { return watch_; }
  // Asks a running kernel to end: its waits give up within about a millisecond.
  void request_stop();
  // After the kernel: who waited for what, or nothing. `names` says what the kernel's numbers mean.
  std::string report(std::initializer_list<const char*> names = {}) const;
  // Throws Error(interrupted) with that report where there is one.
  void check(const char* op, std::initializer_list<const char*> names = {}) const;
  // Ready for the next launch after one that gave up. The kernel's own flags and counters are the caller's to reset.
  void reset(Stream stream);

 private:
  struct Shared;  // the mapped part
  Shared* host_ = nullptr;
  DeviceMemory stop_;
  Watch watch_;
};

}  // namespace ingot::gpu
