#include "ingot/gpu/watch.h"

#ifdef INGOT_CUDA_BUILD
#include <cuda_runtime_api.h>
#endif

namespace ingot::gpu {

struct WaitControl::Shared {
  alignas(128) volatile uint32_t stop;
  alignas(128) WaitRecord record;
};

#ifdef INGOT_CUDA_BUILD
WaitControl::WaitControl(double limit_seconds) : stop_(128) {
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&host_), sizeof(Shared), cudaHostAllocMapped),
             "allocating mapped host memory for bounded waits");
  Shared* mapped = nullptr;
  check_cuda(cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped), host_, 0),
             "mapping the memory of bounded waits");
  watch_ = {.stop = static_cast<uint32_t*>(stop_.data()),
            .host_stop = const_cast<const uint32_t*>(&mapped->stop),
            .record = &mapped->record,
            .limit_ns = uint64_t(limit_seconds * 1e9)};
  reset({});
}
WaitControl::~WaitControl() { (void)cudaFreeHost(host_); }
#elif defined(INGOT_EMULATED_DEVICE)
WaitControl::WaitControl(double limit_seconds) : host_(new Shared), stop_(128) {
  watch_ = {.stop = static_cast<uint32_t*>(stop_.data()),
            .host_stop = const_cast<const uint32_t*>(&host_->stop),
            .record = &host_->record,
            .limit_ns = uint64_t(limit_seconds * 1e9)};
  reset({});
}
WaitControl::~WaitControl() { delete host_; }
#else
WaitControl::WaitControl(double) : stop_(128) {}  // fails by name
WaitControl::~WaitControl() = default;
#endif

void WaitControl::request_stop() { host_->stop = 1; }

void WaitControl::reset(Stream stream) {
  host_->stop = 0;
  host_->record = {};
  fill_bytes(stop_.data(), 0, stop_.bytes(), stream);
}

std::string WaitControl::report(std::initializer_list<const char*> names) const {
  const volatile WaitRecord& r = host_->record;
  if (r.state == kRunning) return {};
  const uint32_t what = r.what;
  const std::string name = what < names.size() ? names.begin()[what] : "wait " + std::to_string(what);
  return ingot::detail::concat("block ", r.block, " thread ", r.thread, " waited ", double(r.waited_ns) * 1e-6,
                               " ms for ", name, ": found ", r.seen, ", expected ", r.expected,
                               r.state == kStoppedByHost ? " (stopped by the host)" : " (timed out)");
}

void WaitControl::check(const char* op, std::initializer_list<const char*> names) const {
  if (const std::string found = report(names); !found.empty()) fail(ErrorCode::interrupted, op, ": ", found);
}

}  // namespace ingot::gpu
