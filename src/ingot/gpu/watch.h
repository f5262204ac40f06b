#pragma once
// Bounded device waits, the host's side. A kernel whose blocks wait for each other takes a Watch. A wait of the kernel
// (tile/flag.cuh) gives up after `limit_ns` or at the host's request, and records the waiting block and the awaited
// value. From then on no wait blocks: every block runs to its end by its usual path, and the results are discarded.
//     WaitControl control(2.0);                                    // once per engine: the constructor allocates
//     launch("decode", decode, {..., .cooperative = true}, stream, ..., control.watch());
//     ... synchronise the stream ...
//     control.check("decode", {"layer input", "grid barrier"});    // throws where a wait gave up
#include <cstdint>
#include <initializer_list>
#include <string>

#include "ingot/gpu/device.h"

namespace ingot::gpu {

// The values of the stop word. A GPU stopped by a second GPU leaves no record: the second GPU has the record.
enum : uint32_t { kRunning = 0, kTimedOut = 1, kStoppedByHost = 2, kStoppedByPeer = 3 };

// The record of the first failed wait, in mapped host memory.
struct WaitRecord {
  uint32_t state = kRunning;
  uint32_t what = 0;  // the kernel's number for this wait
  uint32_t block = 0, thread = 0;
  uint32_t expected = 0, seen = 0;
  uint64_t waited_ns = 0;
};

struct Watch {
  uint32_t* stop = nullptr;             // in device memory: kRunning, or the reason of the end
  const uint32_t* host_stop = nullptr;  // mapped host memory: not 0 requests the kernel to end
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
  // The waiting block and the awaited value in words, or an empty string. Call after the kernel. `names` are the names
  // of the kernel's numbers.
  std::string report(std::initializer_list<const char*> names = {}) const;
  // Throws Error(interrupted) with this report where a wait gave up.
  void check(const char* op, std::initializer_list<const char*> names = {}) const;
  // Prepares the next launch after a failed wait. The caller resets the kernel's own flags and counters.
  void reset(Stream stream);

 private:
  struct Shared;  // the mapped part
  Shared* host_ = nullptr;
  DeviceMemory stop_;
  Watch watch_;
};

}  // namespace ingot::gpu
