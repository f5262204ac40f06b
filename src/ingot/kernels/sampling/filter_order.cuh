#pragma once
// The order in which filters keep ids, and the histograms that find a place in this order.
//
// The place of an id is an integer that grows along the order: of falling logits, equal logits by rising id. Histogram
// 0 counts the ids in the bins of bin_of(octaves) (filters.h), which the order visits one after the other. Histogram 1
// divides one of these bins into equal parts. Histograms 2 to 6 divide a part by 11 bits of the place each, and
// histogram 7 by the remaining 9 bits.
#include <cstdint>

#include "ingot/kernels/sampling/best.cuh"
#include "ingot/kernels/sampling/filters.h"

namespace ingot::sampling {

__device__ __forceinline__ uint64_t place_of(float logit, int32_t id) {
  Best b;
  b.add(logit, uint32_t(id));
  return ~b.key;
}
// The logit of a place.
__device__ __forceinline__ float logit_of(uint64_t place) { return float_of_ordered(uint32_t(~place >> 32)); }

// The part of its bin in which a distance of `octaves` lies.
__device__ __forceinline__ int part_of(float octaves) {
  if (!(octaves < float(kOctaves))) return 0;
  const float bins = octaves * float(kBinsPerOctave);
  return int((bins - float(int(bins))) * float(kBins));  // exact except for the last conversion
}
// The bits of the place that histogram `level` counts: their number, and the number of bits behind them.
__device__ __forceinline__ int digit_bits(int level) { return level == 7 ? 9 : 11; }
__device__ __forceinline__ int digit_shift(int level) { return level >= 7 ? 0 : 64 - 11 * (level - 1); }

struct Id {
  float logit, octaves;
  int32_t id;
  __device__ uint64_t place() const { return place_of(logit, id); }
  __device__ int bin() const { return bin_of(octaves); }
  __device__ int part() const { return part_of(octaves); }
};

// The ids that the next histogram counts: those of the bins that the earlier histograms have chosen.
struct CountedIds {
  int level = 0;          // the number of the next histogram
  int bin = 0, part = 0;  // the bins chosen in histograms 0 and 1
  uint64_t prefix = 0;    // the leading bits of the place, chosen in the histograms from 2 on
  __device__ bool has(const Id& id) const {
    if (level == 0) return true;
    if (id.bin() != bin || (level > 1 && id.part() != part)) return false;
    return level <= 2 || id.place() >> digit_shift(level - 1) == prefix;
  }
  // The bin of an id in the next histogram.
  __device__ int digit(const Id& id) const {
    if (level <= 1) return level == 0 ? id.bin() : id.part();
    return int(id.place() >> digit_shift(level) & ((1u << digit_bits(level)) - 1));
  }
  __device__ void choose(uint32_t digit) {
    if (level == 0)
      bin = int(digit);
    else if (level == 1)
      part = int(digit);
    else
      prefix = level == 2 ? digit : prefix << digit_bits(level) | digit;
    ++level;
  }
};

}  // namespace ingot::sampling
