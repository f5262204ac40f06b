#include "ingot/gpu/limits.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "ingot/core/check.h"
#include "ingot/gpu/device.h"

namespace ingot::gpu {
namespace {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

struct Card {
  std::string_view capability;
  Limits limits;
};
constexpr Card kCards[] = {
    {"7.5", {75, false, 40, 1024, 64 * kKiB, 64 * kKiB, 4 * kMiB, {}}},
    {"8.0", {80, false, 108, 2048, 163 * kKiB, 164 * kKiB, 40 * kMiB, {}}},
    {"8.6", {86, false, 82, 1536, 99 * kKiB, 100 * kKiB, 6 * kMiB, {}}},
    {"8.9", {89, false, 128, 1536, 99 * kKiB, 100 * kKiB, 72 * kMiB, {}}},
    {"9.0", {}},
    {"10.0", {100, false, 148, 2048, 227 * kKiB, 228 * kKiB, 126 * kMiB, {}}},
    {"12.0", {120, false, 170, 1536, 99 * kKiB, 100 * kKiB, 96 * kMiB, {}}},
};

}  // namespace

Limits limits_of(std::string_view capability) {
  std::string known;
  for (const Card& card : kCards) {
    if (card.capability == capability) return card.limits;
    known += (known.empty() ? "" : ", ") + std::string(card.capability);
  }
  fail(ErrorCode::invalid_argument, "compute capability: found '", capability, "', expected one of ", known);
}

Limits imitate(const Limits& real, const Limits& wanted) {
  return {.capability = wanted.capability,
          .hopper = real.hopper && wanted.hopper,
          .sms = std::min(real.sms, wanted.sms),
          .threads_per_sm = std::min(real.threads_per_sm, wanted.threads_per_sm),
          .smem_per_block = std::min(real.smem_per_block, wanted.smem_per_block),
          .smem_per_sm = std::min(real.smem_per_sm, wanted.smem_per_sm),
          .l2_bytes = std::min(real.l2_bytes, wanted.l2_bytes),
          .clusters = {std::min(real.clusters[0], wanted.clusters[0]), std::min(real.clusters[1], wanted.clusters[1]),
                       std::min(real.clusters[2], wanted.clusters[2])}};
}

const Limits& current_limits() {
  if (const int device = current_device(); device >= 0) return limits(device);
  static const Limits emulated = [] {
    const char* const as = std::getenv("INGOT_GPU_AS");
    return as == nullptr || *as == 0 ? Limits{} : limits_of(as);
  }();
  return emulated;
}

}  // namespace ingot::gpu
