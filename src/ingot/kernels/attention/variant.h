#pragma once
// The choice among the variants of attention on a GPU.
#include "ingot/gpu/limits.h"

namespace ingot::cuda {

enum class AttentionVariant { hopper, portable, none };

// hopper: wgmma and tensor copies; portable: mma.sync and cp.async, which every GPU from compute capability 8.0 on has.
constexpr AttentionVariant attention_variant(const gpu::Limits& limits) {
  return limits.hopper             ? AttentionVariant::hopper
         : limits.capability >= 80 ? AttentionVariant::portable
                                   : AttentionVariant::none;
}

}  // namespace ingot::cuda
