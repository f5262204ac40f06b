#pragma once
// Which form of the token kernel a GPU takes: a pure function of its limits.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "ingot/gpu/limits.h"

namespace ingot::decode {

constexpr int64_t kMostShared = 226 * 1024;  // the most dynamic shared memory of a block in bytes

// How the blocks of the token kernel copy weights: not at all, because the GPU has no form of the kernel; by the copy
// engine; or by all lanes of a warp (megakernel/weight_copies.cuh).
enum class TokenCopies { none, engine, lanes };
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
  if (limits.capability >= 80) return {TokenCopies::lanes, bytes < kMostShared ? bytes : kMostShared};
  return {TokenCopies::none, 0};
}
// Whether single tokens take the token kernel: where it was measured, and elsewhere where the environment variable
// INGOT_MEGAKERNEL, whose value is the second argument, is 1.
constexpr bool prefers_token_kernel(const gpu::Limits& limits, std::string_view variable) {
  return limits.hopper || variable == "1";
}
inline bool prefers_token_kernel(const gpu::Limits& limits) {
  const char* const variable = std::getenv("INGOT_MEGAKERNEL");
  return prefers_token_kernel(limits, variable != nullptr ? variable : "");
}

}  // namespace ingot::decode
