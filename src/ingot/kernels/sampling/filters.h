#pragma once
// The arithmetic of top-p and min-p, which every device shares: the distance of an id from the likeliest id in octaves,
// the weight of the id, and its bin in a histogram. See sampling.h.
#include <cmath>
#include <cstdint>

#include "ingot/core/hd.h"
#include "ingot/kernels/sampling/noise.h"

namespace ingot::sampling {

// Sums of weights. 2^48 weights of up to 2^(16 + 48) fit.
using Wide = unsigned __int128;

constexpr int kOctaves = 48;        // an id this far below the likeliest id has the weight 0
constexpr int kBinsPerOctave = 32;  // up to kOctaves; beyond, an octave has two bins, and the last bin takes the rest
constexpr int kBins = 2048;

// Computed in fp32, rounded once by each of the two operations. At least 0, and 0 for the largest logit even where that
// logit is infinite.
INGOT_HD inline float octaves_below(float high, float logit, float octaves_per_logit) {
  return logit == high ? 0.f : std::fma(high - logit, octaves_per_logit, 0.f);
}
INGOT_HD inline float octaves_below(double high, double logit, float octaves_per_logit) {
  return logit == high ? 0.f : std::fma(float(high - logit), octaves_per_logit, 0.f);
}

// 2^16 times 2^-fraction, where fraction is `octaves` without its whole part, rounded to an integer: 2^15 to 2^16, and
// 0 from kOctaves on. The polynomial is that of exp2f() in Cephes.
INGOT_HD inline uint32_t mantissa_of(float octaves) {
  if (!(octaves < float(kOctaves))) return 0;
  const float x = 0.5f - (octaves - float(int(octaves)));
  float p = 1.535336188319500e-4f;
  p = std::fma(p, x, 1.339887440266574e-3f);
  p = std::fma(p, x, 9.618437357674640e-3f);
  p = std::fma(p, x, 5.550332471162809e-2f);
  p = std::fma(p, x, 2.402264791363012e-1f);
  p = std::fma(p, x, 6.931472028550421e-1f);
  p = std::fma(p, x, 1.f);
  return uint32_t(std::fma(p, 46340.95f, 0.5f));  // 2^15.5
}
INGOT_HD inline int bin_of(float octaves) {
  if (octaves < float(kOctaves)) return int(octaves * float(kBinsPerOctave));
  const float beyond = std::fma(octaves < 512.f ? octaves : 512.f, 2.f, -2.f * float(kOctaves));
  const int bin = kOctaves * kBinsPerOctave + int(beyond);
  return bin < kBins ? bin : kBins - 1;
}
// The weight of a mantissa in this bin, or of a sum of such mantissas.
INGOT_HD inline Wide weight_of(uint64_t mantissas, int bin) {
  const int octave = bin / kBinsPerOctave;
  return octave < kOctaves ? Wide(mantissas) << (kOctaves - octave) : Wide(0);
}
// The sum at which top-p stops: top_p (in units of 2^-32) times the total, rounded up, at least 1.
INGOT_HD inline Wide target_of(Wide total, uint32_t top_p) {
  const Wide low = (total & 0xffffffffu) * top_p, target = (total >> 32) * top_p + ((low + 0xffffffffu) >> 32);
  return target > 0 ? target : Wide(1);
}

}  // namespace ingot::sampling
