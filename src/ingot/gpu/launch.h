#pragma once
// The kernel launcher: launch(kernel, {.grid = g, .block = b}, stream, arguments...). Included by .cu files.
#ifdef INGOT_EMULATE
#include <tuple>

#include "ingot/gpu/emulation/cuda.h"
#else
#include <cuda_runtime.h>
#endif

#include "ingot/core/tensor.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"

namespace ingot::gpu {

struct Launch {
  int64_t grid = 1, block = 1;  // blocks, threads per block
  int64_t smem = 0;             // dynamic shared memory, bytes
  int cluster = 1;              // blocks per cluster; above 1 only where limits(device).hopper
  // The kernel calls ptx::wait_for_earlier_kernels() first, so its blocks may start early. Without effect on a GPU that
  // does not run the code for sm_90a, because the PTX for older GPUs lacks the wait.
  bool overlap = false;
  int device = 0;
  bool cooperative = false;  // the blocks wait for each other: either all blocks run at once, or the launch is refused
};

#ifdef INGOT_EMULATE
// In emulation: runs the kernel to its end, or adds the launch to the graph in recording.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const Launch& at, Stream, A&&... arguments) {
  const emulation::Shape shape{
      .grid = at.grid, .block = at.block, .smem = at.smem, .cluster = at.cluster, .cooperative = at.cooperative};
  emulation::submit([name, kernel, shape, given = std::tuple<P...>(P(arguments)...)] {
    emulation::run(name, shape, [&] { std::apply(kernel, given); });
  });
}
template <class... P> int64_t resident_blocks(const char*, void (*)(P...), const Launch&) {
  const int64_t limit = emulation::settings().resident_blocks;
  return limit > 0 ? limit : 8;
}
template <class... P> int64_t resident_clusters(const char*, void (*)(P...), const Launch&) { return 1; }
#else
inline cudaLaunchAttribute cluster_attribute(const char* name, const void* kernel, const Launch& at) {
  constexpr int kPortable = 8;  // larger clusters must be allowed for each kernel
  if (at.cluster > kPortable)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name,
               ": allowing clusters of ", at.cluster, " blocks");
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(at.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const Launch& at, Stream stream, A&&... arguments) {
  INGOT_CHECK(at.grid >= 1 && at.grid <= 0x7fffffff && at.grid % at.cluster == 0, name, ": found a grid of ", at.grid,
              " blocks, expected 1 to 2147483647 and a multiple of the cluster of ", at.cluster);
  const bool hopper = limits(at.device).hopper;
  if (at.cluster > 1 && !hopper)
    fail(ErrorCode::unsupported, name, ": found a kernel of clusters of ", at.cluster, " blocks on cuda:", at.device,
         ", expected a GPU of compute capability 9.0, which has clusters");
  const DeviceGuard guard(at.device);
  check_cuda(cudaPeekAtLastError(), name, " not launched: an error of an earlier CUDA call was pending");
  allow_smem(name, reinterpret_cast<const void*>(kernel), at.device, at.smem);
  cudaLaunchAttribute attribute[3];
  unsigned attributes = 0;
  if (at.cluster > 1) attribute[attributes++] = cluster_attribute(name, reinterpret_cast<const void*>(kernel), at);
  if (at.overlap && hopper) {
    attribute[attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[attributes].val.programmaticStreamSerializationAllowed = 1;
    ++attributes;
  }
  if (at.cooperative) {
    attribute[attributes].id = cudaLaunchAttributeCooperative;
    attribute[attributes].val.cooperative = 1;
    ++attributes;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(at.grid));
  config.blockDim = dim3(unsigned(at.block));
  config.dynamicSmemBytes = size_t(at.smem);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = attribute;
  config.numAttrs = attributes;
  check_cuda(cudaLaunchKernelEx(&config, kernel, P(arguments)...), name, ": launch of ", at.grid, " blocks of ",
             at.block, " threads, clusters of ", at.cluster, ", ", at.smem,
             " bytes of shared memory on cuda:", at.device);
}

// The number of concurrent blocks of this kernel on the device: the limit of a cooperative launch.
template <class... P> int64_t resident_blocks(const char* name, void (*kernel)(P...), const Launch& at) {
  const DeviceGuard guard(at.device);
  allow_smem(name, reinterpret_cast<const void*>(kernel), at.device, at.smem);
  int per_sm = 0, sms = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, int(at.block), size_t(at.smem)), name,
             ": occupancy");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, at.device), name, ": number of SMs");
  return int64_t(per_sm) * sms / at.cluster * at.cluster;
}
// The number of clusters of this kernel that the device runs at once. The number is 0 where no group of the GPU's
// multiprocessors is large enough for a cluster, which can happen for clusters of more than eight blocks.
template <class... P> int64_t resident_clusters(const char* name, void (*kernel)(P...), const Launch& at) {
  const DeviceGuard guard(at.device);
  allow_smem(name, reinterpret_cast<const void*>(kernel), at.device, at.smem);
  cudaLaunchAttribute attribute = cluster_attribute(name, reinterpret_cast<const void*>(kernel), at);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(at.cluster));
  config.blockDim = dim3(unsigned(at.block));
  config.dynamicSmemBytes = size_t(at.smem);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess) return clusters;
  (void)cudaGetLastError();
  return 0;
}
#endif

}  // namespace ingot::gpu
