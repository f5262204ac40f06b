#pragma once
// The order of MXFP4 codes in GPU memory. A weight tile (weight_tiles.h) keeps its places and its scales. The 32 bits
// of each word of 8 codes are dealt out so that four logic instructions and a rotation give the four pairs of bf16 for
// matrix instructions; the multiplier does the shifts to the left. This takes five instructions, where codes in a row
// need nine; each costs two cycles of the pipe that bounds products of few activation vectors.
//
// A pair is codes i and i + 4 of a weight tile's word, in the low and the high half: signs at bit 15, the remaining
// three bits at 8 to 6: the number times 2^-126. With M for those eight places and y = w rotated left by 6:
//   pair 0: w & M      pair 1: (w << 4) & M      pair 2: (y << 4) & M      pair 3: (y ^ (y << 8)) & M
// This form was found by trying all forms with one rotation and three shifts: it is the cheapest form from whose 32
// bits w can be recovered. At most three shifts of M have no bit in common, so the bits of pair 3 are sums of two bits.
#include <cstdint>

#include "ingot/core/hd.h"

namespace ingot::weight_tiles {

constexpr uint32_t kPairBits = 0x81c081c0u;

INGOT_HD constexpr uint32_t turned(uint32_t w) {
#ifdef __CUDA_ARCH__
  return __funnelshift_l(w, w, 6);  // from the plain rotation ptxas makes an additional shift
#else
  return w << 6 | w >> 26;
#endif
}
// Pair i of a word in device order.
INGOT_HD constexpr uint32_t two_of_mxfp4(uint32_t w, int i) {
  if (i == 0) return w & kPairBits;
  if (i == 1) return (w << 4) & kPairBits;
  const uint32_t y = turned(w);
  if (i == 2) return (y << 4) & kPairBits;
  return (y ^ (y << 8)) & kPairBits;
}
// The word whose pairs are the codes of a weight tile's word.
INGOT_HD constexpr uint32_t to_device_order(uint32_t codes) {
  const auto pair = [codes](int i) {
    const uint32_t c = codes >> (4 * i) & 0x000f000fu;
    return (c & 0x00080008u) << 12 | (c & 0x00070007u) << 6;
  };
  const uint32_t y = pair(2) >> 4, last = pair(3);
  uint32_t w = pair(0) | pair(1) >> 4 | y >> 6 | y << 26;
  // Pair 3 gives the bit that differs from an already known bit: eight places below in y, in w, or around the end.
  w |= ((last << 18 ^ w << 24) & 0x04000000u) | ((last >> 14 ^ w >> 8) & 0x00000400u);
  constexpr uint32_t kNext[] = {0x00000003u, 0x00000200u, 0x00030000u, 0x02000000u};
  for (const uint32_t next : kNext) w |= (last >> 6 ^ w << 8) & next;
  return w;
}
INGOT_HD constexpr uint32_t from_device_order(uint32_t w) {
  uint32_t codes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t two = two_of_mxfp4(w, i);
    codes |= ((two >> 12 & 0x00080008u) | (two >> 6 & 0x00070007u)) << (4 * i);
  }
  return codes;
}

}  // namespace ingot::weight_tiles
