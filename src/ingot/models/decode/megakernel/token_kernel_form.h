#pragma once
// Which form of the token kernel a GPU takes: a pure function of its limits.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "ingot/core/check.h"
#include "ingot/gpu/limits.h"

namespace ingot::decode {

constexpr int64_t kMostShared = 226 * 1024;  // the most dynamic shared memory of a block in bytes

// How the blocks of the token kernel copy weights.
enum class TokenCopies {
  none,    // the GPU has no form of the kernel
  engine,  // one warp of a block requests copies from the copy engine (megakernel/weight_stream.cuh)
  warps,   // each multiplying warp copies its own weights (megakernel/warp_ring.cuh)
};
struct TokenKernelForm {
  TokenCopies copies;
  int64_t shared_bytes;  // dynamic shared memory of a block, at most
  constexpr bool operator==(const TokenKernelForm&) const = default;
};
// The form with the copy engine needs the shared memory of Hopper, and beside the machine code for sm_90a there is its
// PTX for compute_90. The form without the copy engine takes any GPU from compute capability 8.0 on.
constexpr TokenKernelForm token_kernel_form(const gpu::Limits& limits) {
  constexpr int64_t kStatic = 1024;  // shared memory that the kernel has besides
  const int64_t bytes = limits.smem_per_block - kStatic;
  if (limits.capability >= 90 && bytes >= kMostShared) return {TokenCopies::engine, kMostShared};
  if (limits.capability >= 80) return {TokenCopies::warps, bytes < kMostShared ? bytes : kMostShared};
  return {TokenCopies::none, 0};
}
// The value of the environment variable INGOT_MEGAKERNEL; empty where the variable is not set.
inline std::string_view megakernel_variable() {
  const char* const variable = std::getenv("INGOT_MEGAKERNEL");
  return variable != nullptr ? variable : "";
}
// Throws Error{usage} unless the value is 0, 1 or empty.
inline void check_megakernel_variable(std::string_view variable = megakernel_variable()) {
  if (!variable.empty() && variable != "0" && variable != "1")
    fail(ErrorCode::usage, "INGOT_MEGAKERNEL: found '", variable, "', expected 0 or 1");
}
// Whether single tokens take the token kernel: on every GPU that has a form of the kernel, because with the limits of
// each kind of GPU the kernel was faster than a launch for each phase (docs/lab/portable.md), unless INGOT_MEGAKERNEL
// is 0. Checks the variable too.
inline bool prefers_token_kernel(const gpu::Limits& limits, std::string_view variable = megakernel_variable()) {
  check_megakernel_variable(variable);
  return variable != "0" && token_kernel_form(limits).copies != TokenCopies::none;
}

}  // namespace ingot::decode
