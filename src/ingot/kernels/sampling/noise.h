#pragma once
// Gumbel noise from the Philox counter, with the same bits on every device:
//   noise(seed, step, lane, id) = -ln(-ln(u)),   u uniform in (0, 1), a function of the counter (seed, step, lane, id)
// The largest of logit / T + noise over a set of ids is a sample of softmax(logit / T) over that set (the Gumbel-max
// trick). Only integer operations, fused multiply-adds and single operations that round once are used, so that no
// library and no contraction can change a bit. |error| <= 2e-6 against fp64 (sampling.test.cpp).
//
// u has 31 random bits. Where 1 - u < 2^-16, that is where the noise is above 11, 31 more bits follow: the noise then
// reaches 44, so that even an id of probability 1e-15 is sampled as often as it should be.
#include <bit>
#include <cmath>
#include <cstdint>

#include "ingot/core/rng.h"

namespace ingot::sampling {

INGOT_HD inline float float_of_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
INGOT_HD inline uint32_t bits_of_float(float x) { return std::bit_cast<uint32_t>(x); }
INGOT_HD inline int leading_zeros(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __clz(int(x));
#else
  return std::countl_zero(x);
#endif
}

// ln(2^exponent * (1 + f)) for f in [sqrt(1/2) - 1, sqrt(2) - 1], with a relative error of 2^-23 near 1. The polynomial
// is that of logf() in Cephes.
INGOT_HD inline float log_of(float exponent, float f) {
  float p = 7.0376836292e-2f;
  p = std::fma(p, f, -1.1514610310e-1f);
  p = std::fma(p, f, 1.1676998740e-1f);
  p = std::fma(p, f, -1.2420140846e-1f);
  p = std::fma(p, f, 1.4249322787e-1f);
  p = std::fma(p, f, -1.6668057665e-1f);
  p = std::fma(p, f, 2.0000714765e-1f);
  p = std::fma(p, f, -2.4999993993e-1f);
  p = std::fma(p, f, 3.3333331174e-1f);
  const float square = std::fma(f, f, 0.f), ln = std::fma(square, std::fma(p, f, -0.5f), f);
  return std::fma(exponent, 0.693359375f, std::fma(exponent, -2.12194440e-4f, ln));  // ln 2 in two parts
}

// The smallest m for which m / 2^32 is above sqrt(1/2).
constexpr uint32_t kRootHalf = 0xb504f334u;

// -ln(u) for u = w / 2^32 with odd w; the relative error is about 2^-22 everywhere.
INGOT_HD inline float exponential(uint32_t w) {
  const int zeros = leading_zeros(w);
  const uint32_t m = w << zeros;  // u = m / 2^32 / 2^zeros
  const bool high = m >= kRootHalf;
  // Both differences are exact before they are rounded to floats.
  const float f = high ? float(0u - m) * -0x1p-32f : float(m - 0x80000000u) * 0x1p-31f;
  return -log_of(-float(high ? zeros : zeros + 1), f);
}

// -ln(x) of a normal (not subnormal) number.
INGOT_HD inline float minus_log(float x) {
  const uint32_t bits = bits_of_float(x);
  const int32_t exponent = int32_t(bits - 0x3f3504f3u) >> 23;
  return -log_of(float(exponent), float_of_bits(bits - (uint32_t(exponent) << 23)) - 1.f);
}

constexpr uint32_t kTail = 1u << 16;  // for values of 2^32 (1 - u) below this bound, 31 further bits are used
// 2^32 (1 - u), which is odd.
INGOT_HD inline uint32_t complement(uint32_t word) { return 0u - (word | 1u); }
// The noise of a word whose complement is at least kTail.
INGOT_HD inline float noise_of(uint32_t word) { return minus_log(exponential(word | 1u)); }
// -ln(u) for a word in the tail: 1 - u = v with 63 bits, and -ln(1 - v) = v + v^2 / 2 to 2^-33.
INGOT_HD inline float exponential_of_tail(uint32_t word, uint32_t more) {
  const uint64_t z = (uint64_t(complement(word) - 1) << 30 | more >> 1) << 1 | 1;
  const float v = float(z) * 0x1p-63f;
  return std::fma(v * 0.5f, v, v);
}
INGOT_HD inline float noise_of_tail(uint32_t word, uint32_t more) { return minus_log(exponential_of_tail(word, more)); }
// An upper bound of the noise of a word whose complement is at least kTail. The bound is at most 0.7 above the noise
// where the noise is above 1.
INGOT_HD inline float noise_bound(uint32_t word) {
  return std::fma(float(leading_zeros(complement(word)) + 1), 0.69314725f, 1e-5f);
}

// The sum of logit and scaled noise. The id with the largest sum is the sampled token.
template <class A> INGOT_HD inline A noisy(A temperature, A noise, A logit) {
  return std::fma(temperature, noise, logit);
}

// words[k], written so that the compiler does not index registers.
INGOT_HD inline uint32_t word_of(const std::array<uint32_t, 4>& words, uint32_t k) {
  const uint32_t low = k & 1 ? words[1] : words[0], high = k & 1 ? words[3] : words[2];
  return k & 2 ? high : low;
}

// The noise of one row of logits.
class Noise {
 public:
  INGOT_HD Noise(uint64_t seed, uint32_t step, uint32_t lane) : rng_(seed, Purpose::sampling, step), lane_(lane) {}
  // The random words of ids 4 quad to 4 quad + 3.
  INGOT_HD std::array<uint32_t, 4> words(uint32_t quad) const { return rng_.block(uint64_t(lane_) << 30 | quad); }
  INGOT_HD float of(uint32_t id, uint32_t word) const {
    if (complement(word) >= kTail) return noise_of(word);
    return noise_of_tail(word, word_of(rng_.block(more(id)), id & 3));
  }
  INGOT_HD float of(uint32_t id) const { return of(id, word_of(words(id >> 2), id & 3)); }
  // The noise of one id, with less code.
  INGOT_HD float of_one(uint32_t id) const {
    uint32_t word = 0;
    float x;
    for (uint64_t counter = uint64_t(lane_) << 30 | id >> 2;; counter = more(id)) {
      const uint32_t next = word_of(rng_.block(counter), id & 3);
      if (counter == more(id)) {
        x = exponential_of_tail(word, next);
        break;
      }
      word = next;
      x = exponential(word | 1u);
      if (complement(word) >= kTail) break;
    }
    return minus_log(x);
  }

 private:
  // The counter of the additional random bits for large noise.
  INGOT_HD uint64_t more(uint32_t id) const { return uint64_t(1) << 63 | uint64_t(lane_) << 30 | id >> 2; }
  Rng rng_;
  uint32_t lane_;
};

// The parameters of a row that is sampled at a temperature without filters, in device memory.
struct RowNoise {
  uint64_t seed = 0;
  uint32_t step = 0;
  float temperature = 0;  // 0: the largest logit wins

  INGOT_HD Noise noise() const { return {seed, step, 0}; }
  INGOT_HD float of(uint32_t id) const { return temperature > 0 ? noise().of_one(id) : 0; }
  INGOT_HD float sum(float noise, float logit) const { return noisy(temperature, noise, logit); }
  // Whether both rows give the same token for the same logits.
  INGOT_HD bool operator==(const RowNoise& o) const {
    return temperature == o.temperature && (temperature == 0 || (seed == o.seed && step == o.step));
  }
};

}  // namespace ingot::sampling
