#pragma once
// A GPU's limits for kernels: the facts for the choice of an operation's variant. The pure functions of these choices
// take a Limits, so tests cover GPUs that are not present.
#include <cstdint>
#include <string_view>

namespace ingot::gpu {

struct Limits {
  int capability = 90;  // compute capability times 10
  // Whether the driver runs the machine code for sm_90a: clusters, overlapping launches, tensor copies and wgmma. False
  // on older and newer GPUs, and where CUDA_FORCE_PTX_JIT=1 makes the driver compile the PTX instead.
  bool hopper = true;
  int sms = 132;
  int threads_per_sm = 2048;
  int64_t smem_per_block = 227 * 1024, smem_per_sm = 228 * 1024;  // bytes of shared memory, at most
  int64_t l2_bytes = int64_t(50) << 20;
  // The number of concurrent clusters of 2, 4 and 8 blocks when each block fills its multiprocessor: fewer than sms /
  // size, because the multiprocessors are grouped and the size of a group need not be a multiple of the cluster's.
  int clusters[3] = {66, 32, 14};
  constexpr int resident(int cluster) const {
    return cluster == 1 ? sms : clusters[cluster == 2 ? 0 : cluster == 4 ? 1 : 2];
  }
  constexpr bool operator==(const Limits&) const = default;
};

// The limits of GPUs by compute capability ("7.5" is a T4, "8.0" an A100, "8.6" an RTX 3090, "8.9" an RTX 4090, "9.0"
// an H100 or H200, "10.0" a B200, "12.0" an RTX 5090). Throws for any other text. Only the limits of 9.0 were measured.
Limits limits_of(std::string_view capability);
// The smaller limit of the two in each field, with the capability of `wanted`: the limits with which a GPU with limits
// `real` imitates `wanted`.
Limits imitate(const Limits& real, const Limits& wanted);

// The limits of cuda:device, read from the driver once. Where the environment variable INGOT_GPU_AS holds a compute
// capability, as limits_of() takes it, a GPU offers at most the limits of that GPU. Throws where the build has no CUDA.
const Limits& limits(int device);
// The limits of this thread's GPU. In a build without a GPU, where kernels are emulated, the limits of an H100, or of
// the GPU that INGOT_GPU_AS names.
const Limits& current_limits();

}  // namespace ingot::gpu
