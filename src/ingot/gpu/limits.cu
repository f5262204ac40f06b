// Asks the driver for the limits of a GPU. The kernel below is never launched: it shows whether the driver loads
// machine code for sm_90a or PTX (every kernel with both is loaded by the same rule), and how many clusters run at
// once.
#include <cstdlib>
#include <mutex>

#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"

#ifndef INGOT_EMULATE
#include <cuda_runtime.h>

namespace ingot::gpu {
namespace {

__global__ void loaded_code_kernel() {}

// The clusters of blocks that fill a multiprocessor each.
void ask_clusters(Limits& l) {
  const auto* const kernel = reinterpret_cast<const void*>(loaded_code_kernel);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(l.smem_per_block)),
             "limits: shared memory");
  for (unsigned i = 0; i < 3; ++i) {
    cudaLaunchAttribute size;
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = 2u << i;
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3(2u << i);
    launch.blockDim = dim3(512);
    launch.dynamicSmemBytes = size_t(l.smem_per_block);
    launch.attrs = &size;
    launch.numAttrs = 1;
    check_cuda(cudaOccupancyMaxActiveClusters(&l.clusters[i], loaded_code_kernel, &launch), "limits: clusters of ",
               2u << i, " blocks");
  }
}

Limits ask(int device) {
  const DeviceGuard guard(device);
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "limits of cuda:", device);
    return value;
  };
  Limits l;
  l.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  l.sms = attribute(cudaDevAttrMultiProcessorCount);
  l.threads_per_sm = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  l.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  l.smem_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  l.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  cudaFuncAttributes loaded;
  check_cuda(cudaFuncGetAttributes(&loaded, loaded_code_kernel), "limits of cuda:", device, ": the loaded code");
  l.hopper = loaded.ptxVersion >= 90;
  if (l.hopper) ask_clusters(l);
  const char* const as = std::getenv("INGOT_GPU_AS");
  return as == nullptr || *as == 0 ? l : imitate(l, limits_of(as));
}

}  // namespace

const Limits& limits(int device) {
  constexpr int kDevices = 64;
  static Limits known[kDevices];
  static std::once_flag asked[kDevices];
  INGOT_CHECK(device >= 0 && device < kDevices, "found device ", device, ", expected 0 to ", kDevices - 1);
  std::call_once(asked[device], [&] { known[device] = ask(device); });
  return known[device];
}

}  // namespace ingot::gpu
#endif
