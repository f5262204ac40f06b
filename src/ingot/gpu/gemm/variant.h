#pragma once
// The forms of the core and the choice among them: Hopper's (core.cuh), and the portable form (portable/core.cuh),
// which every GPU from compute capability 8.0 on runs.
#include <cstdint>
#include <type_traits>

#include "ingot/gpu/gemm/config.h"
#include "ingot/gpu/limits.h"

namespace ingot::gemm {

enum class Variant : uint8_t { hopper, portable, none };
inline Variant variant_of(const gpu::Limits& limits) {
  return limits.hopper ? Variant::hopper : limits.capability >= 80 ? Variant::portable : Variant::none;
}
// The variant for a GPU. The emulator runs the portable form, because it has neither wgmma nor tensor copies.
inline Variant variant_on([[maybe_unused]] int device) {
#ifdef INGOT_EMULATE
  return Variant::portable;
#else
  return variant_of(gpu::limits(device));
#endif
}

// The tile of a product whose tile is `hopper` on Hopper.
inline Tile tile_on(int device, const Tile& hopper) {
  return variant_on(device) == Variant::hopper ? hopper : kPortableTile;
}

struct HopperCore;
struct PortableCore;
// Calls use(std::type_identity<Core>{}), where Core is the form of the core for this GPU. Call only where a form exists
// (not Variant::none).
template <class Use> void with_core([[maybe_unused]] int device, Use&& use) {
#ifndef INGOT_EMULATE
  if (variant_on(device) == Variant::hopper) return use(std::type_identity<HopperCore>{});
#endif
  use(std::type_identity<PortableCore>{});
}

}  // namespace ingot::gemm
