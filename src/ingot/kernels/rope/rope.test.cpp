#include "ingot/kernels/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numbers>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::compare;
using testing::roundoff;
using testing::values;

// --- frequencies -------------------------------------------------------------------------------------------

TEST(RopeFrequencies, PlainAndNtkFollowTheirFormulas) {
  const RopeFrequencies plain = rope_frequencies(16, 10000);
  ASSERT_EQ(plain.theta.size(), 8u);
  EXPECT_EQ(plain.amplitude, 1);
  for (size_t j = 0; j < 8; ++j) EXPECT_NEAR(plain.theta[j], std::pow(10.0, -double(j) / 2), 1e-15);
  const RopeFrequencies ntk = rope_frequencies(16, 10000, {.kind = RopeScaling::ntk, .factor = 4});
  EXPECT_EQ(ntk.theta[0], 1);
  EXPECT_NEAR(ntk.theta[7], plain.theta[7] / 4, 1e-15);  // the slowest pair is slowed by the whole factor
}

TEST(RopeFrequencies, YarnGivesThePublishedNumbersOfGptOss) {
  const RopeFrequencies f = rope_frequencies(
      64, 150000, {.kind = RopeScaling::yarn, .factor = 32, .original_context = 4096, .truncate = false});
  EXPECT_NEAR(f.amplitude, 1.3465735902799727, 1e-15);
  const struct {
    size_t j;
    double theta;
  } want[] = {{0, 1.0},          {1, 0.6890443},    {8, 5.081327e-2},  {9, 3.170570e-2},  {12, 6.794959e-3},
              {13, 3.860359e-3}, {16, 4.564839e-4}, {17, 1.293187e-4}, {18, 3.830881e-5}, {31, 3.023511e-7}};
  for (auto [j, theta] : want) EXPECT_NEAR(f.theta[j] / theta, 1, 2e-7) << j;  // seven digits are given
}

TEST(RopeFrequencies, YarnRoundsTheRampOnlyOnRequest) {
  RopeScaling scaling{.kind = RopeScaling::yarn, .factor = 32, .original_context = 4096};
  const RopeFrequencies rounded = rope_frequencies(64, 150000, scaling);
  // The ramp is 8.09 .. 17.40; rounded outwards 8 .. 18.
  for (size_t j = 0; j < 32; ++j) {
    const double slowed = std::clamp((double(j) - 8) / 10, 0.0, 1.0), plain = std::pow(150000.0, -double(j) / 32);
    EXPECT_NEAR(rounded.theta[j] / (plain * (slowed / 32 + 1 - slowed)), 1, 1e-14) << j;
  }
  scaling.attention_factor = 1.25;
  EXPECT_EQ(rope_frequencies(64, 150000, scaling).amplitude, 1.25);
  scaling.attention_factor = 0, scaling.factor = 1;
  EXPECT_EQ(rope_frequencies(64, 150000, scaling).amplitude, 1);
}

// With a small base, the slow end of the ramp lies beyond the last pair.
TEST(RopeFrequencies, YarnsRampMayEndBehindTheLastPair) {
  const RopeFrequencies f =
      rope_frequencies(64, 500, {.kind = RopeScaling::yarn, .factor = 8, .original_context = 4096});
  // 15.52 .. 33.37, rounded outwards.
  for (size_t j = 0; j < 32; ++j) {
    const double slowed = std::clamp((double(j) - 15) / 19, 0.0, 1.0), plain = std::pow(500.0, -double(j) / 32);
    EXPECT_NEAR(f.theta[j] / (plain * (slowed / 8 + 1 - slowed)), 1, 1e-14) << j;
  }
  // 5.24 .. 11.26 of 8 dimensions: the end is the number of dimensions less one, and all pairs lie before the ramp.
  const RopeFrequencies short_head =
      rope_frequencies(8, 10, {.kind = RopeScaling::yarn, .factor = 8, .original_context = 4096});
  for (size_t j = 0; j < 4; ++j) EXPECT_NEAR(short_head.theta[j] / std::pow(10.0, -double(j) / 4), 1, 1e-14) << j;
}

// The published definition, by wavelengths, with the numbers of Llama 3.1.
TEST(RopeFrequencies, Llama3DividesLongWavelengthsAndLeavesShortOnes) {
  const double factor = 8, context = 8192, low = 1, high = 4;
  const RopeFrequencies f = rope_frequencies(128, 500000,
                                             {.kind = RopeScaling::llama3,
                                              .factor = factor,
                                              .original_context = int64_t(context),
                                              .beta_fast = high,
                                              .beta_slow = low});
  int kept = 0, between = 0, divided = 0;
  for (size_t j = 0; j < 64; ++j) {
    const double theta = std::pow(500000.0, -double(j) / 64), wavelength = 2 * std::numbers::pi / theta;
    const double smooth = (context / wavelength - low) / (high - low);
    const double want = wavelength < context / high  ? (++kept, theta)
                        : wavelength > context / low ? (++divided, theta / factor)
                                                     : (++between, (1 - smooth) * theta / factor + smooth * theta);
    EXPECT_NEAR(f.theta[j] / want, 1, 1e-14) << j;
  }
  EXPECT_TRUE(kept > 10 && between > 3 && divided > 10) << kept << ' ' << between << ' ' << divided;
  EXPECT_EQ(f.amplitude, 1);
}

TEST(RopeFrequencies, TableHoldsEveryPositionWithItsAmplitude) {
  RopeFrequencies f = rope_frequencies(6, 100);
  f.amplitude = 1.5;
  Buffer cos(DType::f64, {70, 3}), sin(DType::f64, {70, 3}), cos32(DType::f32, {70, 3}), sin32(DType::f32, {70, 3});
  rope_table(f, cos, sin);
  rope_table(f, cos32, sin32);
  for (size_t p = 0; p < 70; ++p)
    for (size_t j = 0; j < 3; ++j) {
      EXPECT_NEAR(values(cos)[p * 3 + j], 1.5 * std::cos(double(p) * f.theta[j]), 1e-14);
      EXPECT_NEAR(values(sin)[p * 3 + j], 1.5 * std::sin(double(p) * f.theta[j]), 1e-14);
    }
  EXPECT_TRUE(compare(cos32, values(cos), 1e-30, roundoff(DType::f32)).ok);  // rounded once
  EXPECT_TRUE(compare(sin32, values(sin), 1e-30, roundoff(DType::f32)).ok);
  EXPECT_TRUE(cos.guards_intact() && sin.guards_intact() && cos32.guards_intact());
}

// --- rotation and norm -------------------------------------------------------------------------------------

struct Case {
  int64_t tokens, heads, d, rotary, gap = 0;
  DType type = DType::f32;
  bool interleaved = false;
  int sign = +1;
  bool normalise = true, gain = true;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.tokens << "x" << c.heads << "x" << c.d << " rotary " << c.rotary << " gap " << c.gap << ' ' << c.type
             << " interleaved " << c.interleaved << " sign " << c.sign << " norm " << c.normalise << " gain " << c.gain;
}
const Case kCases[] = {
    {0, 2, 8, 8},
    {1, 1, 2, 2},
    {70, 4, 64, 16},
    {33, 8, 32, 32, 8, DType::f32, false, -1},
    {33, 3, 32, 32, 0, DType::f32, true},
    {9, 2, 21, 6, 3, DType::f32, true, -1},
    {40, 2, 96, 48, 0, DType::f32, false, +1, false},
    {40, 2, 40, 40, 4, DType::f32, false, -1, true, false},
    {12, 2, 17, 0, 1},  // norm and gain only
    {21, 2, 64, 64, 0, DType::bf16},
    {21, 2, 20, 12, 4, DType::f16, true, -1},
    {21, 2, 64, 32, 2, DType::f64, false, -1},
};
DType wide(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

struct Operands {
  static constexpr int64_t kPositions = 50;
  Case c;
  Buffer x, y, rotated, dy, dx, gain, dgain, positions, cos, sin;
  explicit Operands(const Case& k, bool oracle = false)
      : c(k),
        x(type(oracle), shape(), k.d + k.gap),
        y(type(oracle), shape(), k.d + k.gap),
        rotated(type(oracle), shape()),
        dy(type(oracle), shape(), k.d + 2 * k.gap),
        dx(type(oracle), shape(), k.d + k.gap),
        gain(wide(type(oracle)), {k.heads}),
        dgain(wide(type(oracle)), {k.heads}),
        positions(DType::i32, {k.tokens}),
        cos(wide(type(oracle)), {kPositions, k.rotary / 2}),
        sin(wide(type(oracle)), {kPositions, k.rotary / 2}) {
    fill(x, k.type, 1, 2), fill(dy, k.type, 2, 1), fill(gain, DType::f32, 3, 1), fill(dgain, DType::f32, 4, 1);
    testing::fill_ids(positions, 5, kPositions);
    if (k.rotary == 0) return;
    RopeFrequencies f = rope_frequencies(k.rotary, 10000);
    f.amplitude = 1.25;
    Buffer cos32(wide(k.type), cos.tensor().shape), sin32(wide(k.type), cos.tensor().shape);
    rope_table(f, cos32, sin32);
    testing::assign(cos, values(cos32)), testing::assign(sin, values(sin32));
  }
  DType type(bool oracle) const { return oracle ? DType::f64 : c.type; }
  Shape shape() const { return {c.tokens, c.heads, c.d}; }
  static void fill(const Tensor& t, DType type, uint64_t seed, double scale) {
    Buffer rounded(type, t.shape);
    testing::fill_normal(rounded, seed, scale);
    testing::assign(t, values(rounded));
  }
  Rope rope_op(const Tensor& from, const Tensor& to) const {
    return {.x = from,
            .y = to,
            .positions = positions,
            .cos = cos,
            .sin = sin,
            .interleaved = c.interleaved,
            .sign = c.sign};
  }
  QkNormRope op() const {
    QkNormRope a{.x = x, .y = y, .normalise = c.normalise, .interleaved = c.interleaved, .sign = c.sign};
    if (c.rotary) a.positions = positions, a.cos = cos, a.sin = sin;
    if (c.gain) a.gain = gain;
    return a;
  }
  QkNormRopeBackward backward_op() const {
    QkNormRopeBackward a{
        .x = x, .dy = dy, .dx = dx, .normalise = c.normalise, .interleaved = c.interleaved, .sign = c.sign};
    if (c.rotary) a.positions = positions, a.cos = cos, a.sin = sin;
    if (c.gain) a.gain = gain, a.dgain = dgain;
    return a;
  }
  void run() {
    qk_norm_rope(op(), {});
    qk_norm_rope_backward(backward_op(), {});
    if (c.rotary) rope(rope_op(x, rotated), {});
  }
  bool guards() const {
    for (const Buffer* b : {&x, &y, &rotated, &dy, &dx, &gain, &dgain, &positions, &cos, &sin})
      if (!b->guards_intact()) return false;
    return true;
  }
};

TEST(Rope, Fp64MatchesRotationOfComplexNumbers) {
  for (const bool interleaved : {false, true})
    for (const int sign : {+1, -1}) {
      Operands a({20, 3, 12, 8, 2, DType::f64, interleaved, sign});
      rope(a.rope_op(a.x, a.y), {});
      const auto x = values(a.x), y = values(a.y), cos = values(a.cos), sin = values(a.sin), p = values(a.positions);
      for (size_t row = 0; row < 60; ++row) {
        const size_t at = row * 12, angle = size_t(p[row / 3]) * 4;
        for (size_t j = 0; j < 4; ++j) {
          const size_t one = at + (interleaved ? 2 * j : j), two = interleaved ? one + 1 : one + 4;
          EXPECT_NEAR(y[one], x[one] * cos[angle + j] - sign * x[two] * sin[angle + j], 1e-14);
          EXPECT_NEAR(y[two], x[two] * cos[angle + j] + sign * x[one] * sin[angle + j], 1e-14);
        }
        for (size_t c = 8; c < 12; ++c) EXPECT_EQ(y[at + c], x[at + c]);
      }
    }
}

TEST(Rope, EveryTypeMatchesTheFp64Oracle) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands got(c), want(c, true);
    got.run();
    want.run();
    // Two products and a sum of numbers below 4.5 * 2 * 1.25; the norm sums d squares; the result is rounded to its
    // type.
    const double u = roundoff(wide(c.type)), sums = (double(c.d) + 16) * u,
                 ends = c.type == wide(c.type) ? 0 : roundoff(c.type);
    const auto near = [&](const char* name, const Buffer& a, const Buffer& b, double absolute) {
      const auto result = compare(a, values(b), absolute, sums + 1.01 * ends);
      EXPECT_TRUE(result.ok) << name << ": " << result.message;
    };
    if (c.rotary) near("rope", got.rotated, want.rotated, 4 * u * 11);
    near("y", got.y, want.y, sums * 4);
    near("dx", got.dx, want.dx, sums * 8);
    near("dgain", got.dgain, want.dgain, sums * 4 * std::sqrt(double(c.d) * double(c.tokens + 1)));
    EXPECT_TRUE(got.guards());
  }
}

TEST(Rope, FusedPassEqualsNormThenRotationThenGain) {
  Operands a({30, 4, 24, 16, 0, DType::f64});
  qk_norm_rope(a.op(), {});
  auto n = values(a.x);
  const auto gain = values(a.gain);
  for (size_t row = 0; row < 120; ++row) {
    double sum = 0;
    for (size_t c = 0; c < 24; ++c) sum += n[row * 24 + c] * n[row * 24 + c];
    for (size_t c = 0; c < 24; ++c) n[row * 24 + c] /= std::sqrt(sum / 24 + a.op().eps);
  }
  testing::assign(a.dx, n);
  rope(a.rope_op(a.dx, a.rotated), {});
  auto want = values(a.rotated);
  for (size_t i = 0; i < want.size(); ++i) want[i] *= gain[i / 24 % 4];
  EXPECT_TRUE(compare(a.y, want, 1e-14, 1e-14).ok);
}

TEST(Rope, GradientsAgreeWithFiniteDifferences) {
  const Case cases[] = {
      {7, 3, 10, 6, 2, DType::f64, false, +1},
      {7, 3, 10, 10, 0, DType::f64, true, -1},
      {7, 3, 10, 4, 0, DType::f64, false, -1, false},
      {7, 3, 10, 0, 0, DType::f64},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands a(c);
    testing::assign(a.dgain, std::vector<double>(size_t(c.heads), 0));
    qk_norm_rope_backward(a.backward_op(), {});
    const auto loss = [&] {
      qk_norm_rope(a.op(), {});
      return testing::dot(a.y, a.dy);
    };
    EXPECT_LT(testing::gradient_error(loss, a.x, a.dx, 1), 1e-6);
    EXPECT_LT(testing::gradient_error(loss, a.gain, a.dgain, 2), 1e-6);
    if (c.rotary == 0) continue;
    rope_backward(a.rope_op(a.dy, a.dx), {});
    const auto plain = [&] {
      rope(a.rope_op(a.x, a.y), {});
      return testing::dot(a.y, a.dy);
    };
    EXPECT_LT(testing::gradient_error(plain, a.x, a.dx, 3), 1e-6);
  }
}

TEST(Rope, OutputsMayAliasInputs) {
  for (const bool interleaved : {false, true}) {
    const Case c{33, 4, 24, 16, 0, DType::f32, interleaved};
    Operands apart(c), fused(c), back(c), alone(c);
    apart.run();
    QkNormRope forward = fused.op();
    forward.y = forward.x;
    qk_norm_rope(forward, {});
    EXPECT_EQ(values(fused.x), values(apart.y));
    QkNormRopeBackward backward = back.backward_op();
    backward.dx = backward.dy;
    qk_norm_rope_backward(backward, {});
    EXPECT_EQ(values(back.dy), values(apart.dx));
    EXPECT_EQ(values(back.dgain), values(apart.dgain));
    rope(alone.rope_op(alone.x, alone.x), {});
    EXPECT_EQ(values(alone.x), values(apart.rotated));
  }
}

// The second case has more tokens than 64 blocks of 32, so that the number of tokens decides the size of a block.
TEST(Rope, ResultsAreBitwiseTheSameForAnyThreadCount) {
  const int before = thread_count();
  for (const int64_t tokens : {301, 4133}) {
    std::vector<std::vector<double>> seen;
    for (int threads : {1, 2, 3, 5}) {
      set_thread_count(threads);
      Operands a(tokens == 301 ? Case{tokens, 4, 32, 16} : Case{tokens, 2, 8, 8});
      a.run();
      std::vector<double> all = values(a.y);
      for (const Buffer* b : {&a.dx, &a.dgain, &a.rotated})
        for (double v : values(*b)) all.push_back(v);
      seen.push_back(all);
    }
    for (size_t i = 1; i < seen.size(); ++i) EXPECT_EQ(seen[0], seen[i]) << tokens << " tokens";
  }
  set_thread_count(before);
}

TEST(Rope, ErrorsNameBothValues) {
  Operands a({5, 2, 8, 8});
  const auto message = [](const std::function<void()>& use) -> std::string {
    try {
      use();
    } catch (const Error& e) { return e.what(); }
    return "no error";
  };
  std::string m = message([&] { rope_frequencies(7, 10000); });
  EXPECT_TRUE(m.find('7') != m.npos && m.find("even") != m.npos) << m;
  m = message([&] { rope_frequencies(2, 10000, {.kind = RopeScaling::ntk, .factor = 4}); });
  EXPECT_TRUE(m.find("rotary_dim 2") != m.npos && m.find("at least 4") != m.npos) << m;
  testing::assign(a.positions, {0, 1, 50, 3, 4});
  m = message([&] { rope(a.rope_op(a.x, a.y), {}); });
  EXPECT_TRUE(m.find("positions[2] = 50") != m.npos && m.find("49") != m.npos) << m;
  testing::fill_ids(a.positions, 5, 50);
  Rope rowless = a.rope_op(a.x, a.y);
  rowless.cos = rowless.cos.slice(0, 0, 0), rowless.sin = rowless.sin.slice(0, 0, 0);
  m = message([&] { rope(rowless, {}); });
  EXPECT_TRUE(m.find("a table without rows for 5 tokens") != m.npos) << m;
  m = message([&] { rope(a.rope_op(a.x.tensor().slice(2, 0, 6), a.y.tensor().slice(2, 0, 6)), {}); });
  EXPECT_TRUE(m.find('8') != m.npos && m.find('6') != m.npos) << m;
  Rope op = a.rope_op(a.x, a.y);
  op.sign = 0;
  m = message([&] { rope(op, {}); });
  EXPECT_TRUE(m.find("sign 0") != m.npos) << m;
  QkNormRope fused = a.op();
  fused.gain = fused.gain.slice(0, 0, 1);
  m = message([&] { qk_norm_rope(fused, {}); });
  EXPECT_TRUE(m.find("(1)") != m.npos && m.find("(2)") != m.npos) << m;
}

}  // namespace
}  // namespace ingot
