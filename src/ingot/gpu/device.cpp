#ifndef INGOT_EMULATED_DEVICE  // gpu/emulation/device.cpp
#include "ingot/gpu/device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#ifdef INGOT_CUDA_BUILD
#include <cuda_runtime_api.h>
#endif

#include "ingot/gpu/limits.h"

namespace ingot::gpu {

#ifdef INGOT_CUDA_BUILD

int device_count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
  (void)cudaGetLastError();  // clears the error "no driver", which the next launch would report otherwise
  return 0;
}

int current_device() {
  int current = 0;
  check_cuda(cudaGetDevice(&current), "current device");
  return current;
}

DeviceInfo device_info(int device) {
  cudaDeviceProp p;
  check_cuda(cudaGetDeviceProperties(&p, device), "properties of cuda:", device);
  DeviceInfo info{.name = p.name,
                  .sms = p.multiProcessorCount,
                  .major = p.major,
                  .minor = p.minor,
                  .l2_bytes = p.l2CacheSize,
                  .memory_bytes = int64_t(p.totalGlobalMem)};
  check_cuda(cudaDriverGetVersion(&info.driver), "driver version");
  check_cuda(cudaRuntimeGetVersion(&info.runtime), "runtime version");
  return info;
}

bool can_access_peer(int device, int peer) {
  int can = 0;
  check_cuda(cudaDeviceCanAccessPeer(&can, device, peer), "peer access from cuda:", device, " to cuda:", peer);
  return can != 0;
}
void enable_peer_access(int device, int peer) {
  const DeviceGuard guard(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled)
    (void)cudaGetLastError();
  else
    check_cuda(status, "enabling peer access from cuda:", device, " to cuda:", peer);
}

int sm_count(int device) {
  int sms = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "number of SMs of cuda:", device);
  return std::min(sms, limits(device).sms);  // INGOT_GPU_AS may name a GPU with fewer
}

double memory_bandwidth(int device) {
  static std::array<std::atomic<double>, 64> known;  // 1 where the driver does not report the bandwidth
  const bool kept = device >= 0 && size_t(device) < known.size();
  if (const double found = kept ? known[size_t(device)].load() : 0; found > 0) return found;
  int kilohertz = 0, bits = 0;
  check_cuda(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device), "memory clock of cuda:", device);
  check_cuda(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device), "memory width of cuda:", device);
  const double found = std::max(1., 2e3 * kilohertz * bits / 8);
  if (kept) known[size_t(device)] = found;
  return found;
}

namespace {
// The error for a kernel without code for the current GPU.
std::string generation_text() {
  int device = 0, major = 0, minor = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  const std::string found = known ? std::to_string(major) + '.' + std::to_string(minor) : "unknown";
  return ": found a GPU of compute capability " + found + ", for which this build has no code of the kernel";
}
}  // namespace

void check_cuda_status(int status, const std::string& note) {
  const auto error = static_cast<cudaError_t>(status);
  (void)cudaGetLastError();  // clears errors, if possible
  if (error == cudaErrorNoKernelImageForDevice) fail(ErrorCode::unsupported, note, generation_text());
  fail(ErrorCode::unsupported, note, ": found ", cudaGetErrorName(error), ", ", cudaGetErrorString(error),
       ", expected cudaSuccess");
}

DeviceGuard::DeviceGuard(int device) {
  const int current = current_device();
  if (current == device) return;
  check_cuda(cudaSetDevice(device), "making cuda:", device, " current");
  previous_ = current;
}
DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

// The call takes 0.2 us of the host's time, so each thread remembers the kernels for which it has called. The call
// allows all of a block's shared memory: an unused permission costs nothing, and a smaller value could take away the
// permission that a launch of another thread needs.
void allow_smem(const char* name, const void* kernel, int device, int64_t bytes) {
  constexpr int64_t kUnasked = 32 * 1024;
  if (bytes <= kUnasked) return;
  struct Allowed {
    const void* kernel = nullptr;
    int device = 0;
    int64_t bytes = 0;
  };
  thread_local std::array<Allowed, 64> known;
  Allowed& at = known[(reinterpret_cast<uintptr_t>(kernel) >> 4) % known.size()];
  if (at.kernel == kernel && at.device == device && bytes <= at.bytes) return;
  cudaFuncAttributes declared;
  check_cuda(cudaFuncGetAttributes(&declared, kernel), name, ": attributes of the kernel");
  const int64_t all = limits(device).smem_per_block - int64_t(declared.sharedSizeBytes);
  INGOT_CHECK(bytes <= all, name, ": found a need for ", bytes, " bytes of shared memory, expected at most the ", all,
              " that a block can have on cuda:", device);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(all)), name, ": asking for ",
             all, " bytes of shared memory");
  at = {kernel, device, all};
}

DeviceMemory::DeviceMemory(int64_t bytes) : bytes_(bytes) {
  if (bytes > 0) check_cuda(cudaMalloc(&data_, size_t(bytes)), "allocating ", bytes, " bytes of device memory");
}
DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) (void)cudaFree(data_);
}

OwnedStream::OwnedStream() {
  check_cuda(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(&handle_), cudaStreamNonBlocking), "new stream");
}
OwnedStream::~OwnedStream() { (void)cudaStreamDestroy(static_cast<cudaStream_t>(handle_)); }
void OwnedStream::synchronize() const {
  check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(handle_)), "waiting for a stream");
}

Event::Event() { check_cuda(cudaEventCreate(reinterpret_cast<cudaEvent_t*>(&handle_)), "new event"); }
Event::~Event() { (void)cudaEventDestroy(static_cast<cudaEvent_t>(handle_)); }
void Event::record(Stream stream) {
  check_cuda(cudaEventRecord(static_cast<cudaEvent_t>(handle_), static_cast<cudaStream_t>(stream.handle)),
             "recording an event");
}
void Event::synchronize() {
  check_cuda(cudaEventSynchronize(static_cast<cudaEvent_t>(handle_)), "waiting for an event");
}
double Event::seconds_since(const Event& start) const {
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(start.handle_), static_cast<cudaEvent_t>(handle_)),
             "event time");
  return double(ms) * 1e-3;
}

Graph::Graph(Stream stream, const std::function<void()>& work) {
  const auto s = static_cast<cudaStream_t>(stream.handle);
  check_cuda(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "starting a graph capture");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    (void)cudaStreamEndCapture(s, &graph);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    throw;
  }
  check_cuda(cudaStreamEndCapture(s, &graph), "ending a graph capture");
  const cudaError_t status = cudaGraphInstantiate(reinterpret_cast<cudaGraphExec_t*>(&handle_), graph, 0);
  (void)cudaGraphDestroy(graph);
  check_cuda(status, "instantiating a graph");
  // The first launch of the graph then allocates nothing, because kernels of several GPUs that wait for each other must
  // not wait for an allocation.
  check_cuda(cudaGraphUpload(static_cast<cudaGraphExec_t>(handle_), s), "uploading a graph");
}
Graph::~Graph() { (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(handle_)); }
void Graph::launch(Stream stream) const {
  check_cuda(cudaGraphLaunch(static_cast<cudaGraphExec_t>(handle_), static_cast<cudaStream_t>(stream.handle)),
             "graph launch");
}

void copy_to_device(void* to, const void* from, int64_t bytes) {
  check_cuda(cudaMemcpy(to, from, size_t(bytes), cudaMemcpyHostToDevice), "copying ", bytes, " bytes to the device");
  // The copy may return while bytes are still on their way from a staging buffer, and further streams would not wait
  // for these bytes.
  check_cuda(cudaStreamSynchronize(cudaStreamLegacy), "copying ", bytes, " bytes to the device");
}
void copy_to_host(void* to, const void* from, int64_t bytes) {
  check_cuda(cudaMemcpy(to, from, size_t(bytes), cudaMemcpyDeviceToHost), "copying ", bytes, " bytes to the host");
}
void copy_on_device(void* to, const void* from, int64_t bytes, Stream stream) {
  check_cuda(
      cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream.handle)),
      "copying ", bytes, " bytes on the device");
}
void fill_bytes(void* to, uint8_t value, int64_t bytes, Stream stream) {
  check_cuda(cudaMemsetAsync(to, value, size_t(bytes), static_cast<cudaStream_t>(stream.handle)), "filling ", bytes,
             " bytes");
}
void copy_rows(const RowCopy& c, Stream stream) {
  const DeviceGuard guard(c.device);
  const auto s = static_cast<cudaStream_t>(stream.handle);
  // The driver finds out from the addresses which side is host memory.
  const cudaError_t status = c.rows == 1 ? cudaMemcpyAsync(c.to, c.from, size_t(c.row_bytes), cudaMemcpyDefault, s)
                                         : cudaMemcpy2DAsync(c.to, size_t(c.to_step), c.from, size_t(c.from_step),
                                                             size_t(c.row_bytes), size_t(c.rows), cudaMemcpyDefault, s);
  check_cuda(status, "copying ", c.rows, " rows of ", c.row_bytes, " bytes between host and cuda:", c.device);
}
void synchronize() { check_cuda(cudaDeviceSynchronize(), "waiting for the device"); }
void synchronize(Device device, Stream stream) {
  if (device.kind == Device::cpu) return;
  const DeviceGuard guard(device.index);
  check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle)), "waiting for a stream of ", device);
}

#else

namespace {
[[noreturn]] void no_cuda() {
  fail(ErrorCode::unsupported, "gpu: Ingot was built without CUDA; expected a build with INGOT_CUDA=ON");
}
}  // namespace

int device_count() { return 0; }
int current_device() { return -1; }
DeviceInfo device_info(int) { no_cuda(); }
int sm_count(int) { no_cuda(); }
double memory_bandwidth(int) { no_cuda(); }
const Limits& limits(int) { no_cuda(); }
bool can_access_peer(int, int) { no_cuda(); }
void enable_peer_access(int, int) { no_cuda(); }
void check_cuda_status(int, const std::string&) { no_cuda(); }
DeviceGuard::DeviceGuard(int) { no_cuda(); }
DeviceGuard::~DeviceGuard() = default;
DeviceMemory::DeviceMemory(int64_t) { no_cuda(); }
DeviceMemory::~DeviceMemory() = default;
OwnedStream::OwnedStream() { no_cuda(); }
OwnedStream::~OwnedStream() = default;
void OwnedStream::synchronize() const { no_cuda(); }
Event::Event() { no_cuda(); }
Event::~Event() = default;
void Event::record(Stream) { no_cuda(); }
void Event::synchronize() { no_cuda(); }
double Event::seconds_since(const Event&) const { no_cuda(); }
Graph::Graph(Stream, const std::function<void()>&) { no_cuda(); }
Graph::~Graph() = default;
void Graph::launch(Stream) const { no_cuda(); }
void copy_to_device(void*, const void*, int64_t) { no_cuda(); }
void copy_to_host(void*, const void*, int64_t) { no_cuda(); }
void copy_on_device(void*, const void*, int64_t, Stream) { no_cuda(); }
void fill_bytes(void*, uint8_t, int64_t, Stream) { no_cuda(); }
void copy_rows(const RowCopy&, Stream) { no_cuda(); }
void synchronize() { no_cuda(); }
void synchronize(Device device, Stream) {
  if (device.kind != Device::cpu) no_cuda();
}

#endif

}  // namespace ingot::gpu
#endif
