#include "ingot/gpu/side_streams.h"

#ifdef INGOT_CUDA_BUILD
#include <cuda_runtime.h>

#include "ingot/gpu/device.h"
#endif

namespace ingot::gpu {

#ifdef INGOT_CUDA_BUILD

namespace {

cudaStream_t stream_of(void* handle) { return static_cast<cudaStream_t>(handle); }
cudaEvent_t event_of(void* handle) { return static_cast<cudaEvent_t>(handle); }

void* new_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "side streams: new event");
  return event;
}
// `later` waits for the work that is on `earlier` now.
void order(void* event, void* earlier, void* later) {
  check_cuda(cudaEventRecord(event_of(event), stream_of(earlier)), "side streams: recording an event");
  check_cuda(cudaStreamWaitEvent(stream_of(later), event_of(event), 0), "side streams: waiting for an event");
}

}  // namespace

SideStreams::SideStreams(Device device, int count) {
  if (device.kind != Device::cuda || count <= 0) return;
  const DeviceGuard guard(device.index);
  begin_ = new_event();
  for (int i = 0; i < count; ++i) {
    Side& side = sides_.emplace_back();
    check_cuda(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(&side.stream), cudaStreamNonBlocking),
               "side streams: new stream");
    side.done = new_event();
  }
}
SideStreams::~SideStreams() {
  for (const Side& side : sides_) {
    (void)cudaStreamDestroy(stream_of(side.stream));
    (void)cudaEventDestroy(event_of(side.done));
  }
  if (begin_ != nullptr) (void)cudaEventDestroy(event_of(begin_));
}
void SideStreams::fork(Stream stream) {
  for (const Side& side : sides_) order(begin_, stream.handle, side.stream);
}
void SideStreams::join(Stream stream) {
  for (const Side& side : sides_) order(side.done, side.stream, stream.handle);
}

#else

SideStreams::SideStreams(Device, int) {}
SideStreams::~SideStreams() = default;
void SideStreams::fork(Stream) {}
void SideStreams::join(Stream) {}

#endif

void SideStreams::run(int tasks, Stream stream, const std::function<void(int task, Stream stream)>& work) {
  fork(stream);
  try {
    for (int task = 0; task < tasks; ++task) {
      const size_t lane = size_t(task) % (sides_.size() + 1);
      work(task, lane == 0 ? stream : Stream{sides_[lane - 1].stream});
    }
  } catch (...) {
    join(stream);  // the caller may free memory in the order of `stream`
    throw;
  }
  join(stream);
}

}  // namespace ingot::gpu
