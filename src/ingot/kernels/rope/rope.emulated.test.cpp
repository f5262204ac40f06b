// The CUDA kernels and their launcher on the CPU, under every configuration, where sanitizers see their accesses.
#include "ingot/kernels/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ingot/kernels/rope/rope_config.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::compare;
using testing::roundoff;
using testing::values;

struct Case {
  int64_t tokens, heads, d, rotary, gap = 0;
  DType type = DType::bf16;
  bool interleaved = false, normalise = true, gain = true;
};
constexpr int64_t kPositions = 20;

struct Operands {
  Operands(const Case& k, DType type)
      : c(k),
        wide(type == DType::f64 ? DType::f64 : DType::f32),
        x(type, {k.tokens, k.heads, k.d}, k.d + k.gap),
        y(type, {k.tokens, k.heads, k.d}, k.d + k.gap),
        rotated(type, {k.tokens, k.heads, k.d}, k.d + k.gap),
        dy(type, {k.tokens, k.heads, k.d}, k.d + k.gap),
        dx(type, {k.tokens, k.heads, k.d}, k.d + k.gap),
        gain(wide, {k.heads}),
        dgain(wide, {k.heads}),
        positions(DType::i32, {k.tokens}),
        cos(wide, {kPositions, k.rotary / 2}),
        sin(wide, {kPositions, k.rotary / 2}),
        workspace(DType::u8, {k.heads * std::min(k.tokens, cuda::kRopeMaxSlices) * 4}) {
    fill(x, k.type, 1, 2), fill(dy, k.type, 2, 1), fill(gain, DType::f32, 3, 1), fill(dgain, DType::f32, 4, 1);
    testing::fill_ids(positions, 5, kPositions);
    if (k.rotary == 0) return;
    Buffer cos32(DType::f32, cos.tensor().shape), sin32(DType::f32, cos.tensor().shape);
    rope_table(rope_frequencies(k.rotary, 10000), cos32, sin32);
    testing::assign(cos, values(cos32)), testing::assign(sin, values(sin32));
  }
  static void fill(const Tensor& t, DType type, uint64_t seed, double scale) {
    Buffer rounded(type, t.shape);
    testing::fill_normal(rounded, seed, scale);
    testing::assign(t, values(rounded));
  }
  template <class Op> Op with_table(Op a) const {
    if (c.rotary) a.positions = positions, a.cos = cos, a.sin = sin;
    a.interleaved = c.interleaved;
    return a;
  }
  Rope rope_op() const { return with_table(Rope{.x = x, .y = rotated}); }
  QkNormRope op() const {
    QkNormRope a = with_table(QkNormRope{.x = x, .y = y, .normalise = c.normalise});
    if (c.gain) a.gain = gain;
    return a;
  }
  QkNormRopeBackward backward_op() const {
    QkNormRopeBackward a = with_table(QkNormRopeBackward{.x = x, .dy = dy, .dx = dx, .normalise = c.normalise});
    if (c.gain) a.gain = gain, a.dgain = dgain, a.workspace = workspace;
    return a;
  }
  bool guards() const {
    for (const Buffer* b : {&x, &y, &rotated, &dy, &dx, &gain, &dgain, &positions, &cos, &sin, &workspace})
      if (!b->guards_intact()) return false;
    return true;
  }
  Case c;
  DType wide;
  Buffer x, y, rotated, dy, dx, gain, dgain, positions, cos, sin, workspace;
};

// Tolerances as in the tests on a GPU (rope.cuda.test.cpp).
void check(const Case& c, const cuda::RopeTuning& tuning, bool once = false) {
  SCOPED_TRACE(::testing::Message() << c.tokens << "x" << c.heads << "x" << c.d << " rotary " << c.rotary << ' '
                                    << c.type << " interleaved " << c.interleaved << " vectors "
                                    << tuning.config.vectors << " iterations " << tuning.config.iterations << " lanes "
                                    << tuning.config.lanes);
  Operands got(c, c.type), want(c, DType::f64);
  const bool rows = tuning.config.per_lane == 1;  // norms do not have this configuration
  cuda::RopeTuning forward = tuning;
  forward.config.spread = false;
  cuda::RopeTuning norm = rows ? cuda::default_rope_tuning(got.op()) : forward;
  norm.config.once = once;
  cuda::qk_norm_rope_with(got.op(), norm, {});
  qk_norm_rope(want.op(), {});
  cuda::qk_norm_rope_backward_with(got.backward_op(), rows ? cuda::default_rope_tuning(got.backward_op()) : tuning, {});
  qk_norm_rope_backward(want.backward_op(), {});
  if (c.rotary) cuda::rope_with(got.rope_op(), forward, {});
  if (c.rotary) rope(want.rope_op(), {});
  const double u = roundoff(DType::f32), sums = (double(c.d) + 16) * u;
  const double ends = c.type == DType::f32 ? 0 : 1.01 * roundoff(c.type);
  const auto near = [&](const char* name, const Buffer& a, const Buffer& b, double absolute, double last) {
    const auto result = compare(a, values(b), absolute, sums + last);
    EXPECT_TRUE(result.ok) << name << ": " << result.message;
  };
  if (c.rotary) near("rope", got.rotated, want.rotated, 4 * u * 2 * 11, ends);
  near("y", got.y, want.y, sums * 4, ends);
  near("dx", got.dx, want.dx, sums * 8, ends);
  if (c.gain) near("dgain", got.dgain, want.dgain, sums * 4 * std::sqrt(double(c.d) * double(c.tokens + 1)), 0);
  EXPECT_TRUE(got.guards());
}

TEST(RopeEmulated, EveryConfigurationAgreesWithTheFp64Loop) {
  const Case some[] = {{7, 3, 32, 32, 0, DType::bf16},
                       {5, 5, 48, 16, 8, DType::f32, true},
                       {3, 2, 40, 40, 0, DType::bf16, true, false},
                       {6, 2, 32, 16, 0, DType::f16, false, true, false},
                       {1, 3, 32, 32, 0, DType::f16},
                       {4, 9, 16, 0, 0, DType::f32}};
  for (const Case& c : some)
    for (int threads : {32, 96})
      for (int iterations : {1, 3, 100})
        check(c,
              {.config = {.lanes = c.type == DType::f32 ? 8 : 4, .threads = threads, .iterations = iterations},
               .evict_first = iterations == 1},
              iterations == 1 && threads == 96);
}

TEST(RopeEmulated, SpreadVectorsAgreeWithTheFp64Loop) {
  const Case some[] = {{7, 3, 64, 16, 0, DType::bf16},
                       {9, 2, 48, 16, 8, DType::f32},
                       {6, 2, 32, 16, 0, DType::f16, false, true, false},
                       {5, 4, 40, 0, 0, DType::bf16, false, false}};
  for (const Case& c : some)
    for (int threads : {32, 96})
      for (int iterations : {1, 3, 100}) {
        cuda::RopeTuning tuning = cuda::default_rope_tuning(Operands(c, c.type).backward_op());
        ASSERT_TRUE(tuning.config.spread);
        tuning.config.threads = threads, tuning.config.iterations = iterations;
        check(c, tuning);
      }
}

TEST(RopeEmulated, OneVectorALaneAgreesWithTheFp64Loop) {
  const Case some[] = {{7, 3, 32, 32, 0, DType::bf16},
                       {5, 5, 48, 16, 8, DType::f32, true},
                       {3, 2, 40, 40, 0, DType::bf16, true, false},
                       {6, 2, 48, 16, 0, DType::f16, false, true, false},
                       {1, 3, 32, 32, 0, DType::f16},
                       {4, 9, 16, 0, 0, DType::f32}};
  for (const Case& c : some)
    for (int threads : {32, 96})
      check(c, {.config = {.lanes = c.type == DType::f32 ? 16 : 8, .threads = threads, .per_lane = 1},
                .evict_first = threads == 32});
}

TEST(RopeEmulated, TwoHeadsALaneAgreeWithTheFp64Loop) {
  const Case some[] = {{7, 3, 32, 32, 0, DType::bf16},
                       {3, 2, 40, 40, 0, DType::bf16, true, false},
                       {6, 1, 48, 16, 0, DType::f16, false, true, false}};
  for (const Case& c : some)
    for (int threads : {32, 96}) {
      const Operands o(c, c.type);
      cuda::RopeTuning tuning = cuda::default_rope_tuning(o.rope_op());
      tuning.config.threads = threads, tuning.config.per_lane = tuning.config.heads = 2;
      cuda::rope_with(o.rope_op(), tuning, {});
      const auto got = values(o.rotated);
      cuda::rope_with(o.rope_op(), cuda::default_rope_tuning(o.rope_op()), {});
      EXPECT_EQ(got, values(o.rotated));
    }
}

TEST(RopeEmulated, SingleElementsAreUsedWhereVectorsDoNotFit) {
  const Case some[] = {{7, 3, 21, 6, 3, DType::bf16}, {5, 2, 18, 18, 1, DType::f32, true}, {2, 1, 2, 2, 0, DType::f16}};
  for (const Case& c : some)
    for (int lanes : {1, 4, 16}) check(c, {.config = {.vectors = false, .lanes = lanes, .threads = 32}});
}

// No kernel reads outside of the table.
TEST(RopeEmulated, APositionOutsideOfTheTableTakesItsLastRow) {
  const auto all_of = [](const Case& c, std::vector<double> positions, const cuda::RopeTuning* tuning, bool once) {
    Operands o(c, c.type);
    testing::assign(o.positions, positions);
    const auto tuned = [&](const auto& op) { return tuning ? *tuning : cuda::default_rope_tuning(op); };
    cuda::RopeTuning norm = tuned(o.op());
    if (norm.config.per_lane == 1) norm = cuda::default_rope_tuning(o.op());
    norm.config.spread = false, norm.config.once = once;
    cuda::RopeTuning back = tuned(o.backward_op()), turn = tuned(o.rope_op());
    if (back.config.per_lane == 1) back = cuda::default_rope_tuning(o.backward_op());
    cuda::rope_with(o.rope_op(), turn, {});
    cuda::qk_norm_rope_with(o.op(), norm, {});
    cuda::qk_norm_rope_backward_with(o.backward_op(), back, {});
    EXPECT_TRUE(o.guards());
    std::vector<double> all;
    for (const Buffer* b : {&o.rotated, &o.y, &o.dx, &o.dgain})
      for (double v : values(*b)) all.push_back(v);
    return all;
  };
  const double last = kPositions - 1, most = std::numeric_limits<int32_t>::max(),
               least = std::numeric_limits<int32_t>::min();
  const std::vector<double> outside = {-1, 3, kPositions, most, 0, least, last},
                            inside = {last, 3, last, last, 0, last, last};
  const cuda::RopeTuning vectors{.config = {.lanes = 4, .threads = 32, .iterations = 3}},
      one_vector{.config = {.lanes = 8, .threads = 32, .per_lane = 1}},
      elements{.config = {.vectors = false, .lanes = 4, .threads = 32}};
  for (bool interleaved : {false, true})
    for (const cuda::RopeTuning* tuning :
         {static_cast<const cuda::RopeTuning*>(nullptr), &vectors, &one_vector, &elements})
      for (bool once : {false, true}) {
        if (once && tuning != &vectors) continue;
        SCOPED_TRACE(::testing::Message() << "interleaved " << interleaved << " lanes "
                                          << (tuning ? tuning->config.lanes : 0) << " once " << once);
        const Case c{7, 3, 32, 32, 0, DType::bf16, interleaved};
        EXPECT_EQ(all_of(c, outside, tuning, once), all_of(c, inside, tuning, once));
      }
}

TEST(RopeEmulated, WithoutTokensNothingChanges) {
  const Case c{0, 3, 32, 16, 0, DType::f32};
  Operands o(c, c.type);
  const std::vector<double> sums = values(o.dgain);
  cuda::rope_with(o.rope_op(), cuda::default_rope_tuning(o.rope_op()), {});
  cuda::qk_norm_rope_with(o.op(), cuda::default_rope_tuning(o.op()), {});
  cuda::qk_norm_rope_backward_with(o.backward_op(), cuda::default_rope_tuning(o.backward_op()), {});
  EXPECT_EQ(values(o.dgain), sums);
  EXPECT_TRUE(o.guards());
}

TEST(RopeEmulated, OutputsMayReplaceInputs) {
  for (int64_t d : {32, 21}) {
    const Case c{6, 3, d, 16, 0, DType::f32};
    Operands apart(c, c.type), same(c, c.type);
    cuda::qk_norm_rope_with(apart.op(), cuda::default_rope_tuning(apart.op()), {});
    cuda::qk_norm_rope_backward_with(apart.backward_op(), cuda::default_rope_tuning(apart.backward_op()), {});
    QkNormRopeBackward backward = same.backward_op();
    backward.dx = backward.dy;
    cuda::qk_norm_rope_backward_with(backward, cuda::default_rope_tuning(backward), {});
    QkNormRope forward = same.op();
    forward.y = forward.x;
    cuda::qk_norm_rope_with(forward, cuda::default_rope_tuning(forward), {});
    EXPECT_EQ(values(same.x), values(apart.y));
    EXPECT_EQ(values(same.dy), values(apart.dx));
    EXPECT_EQ(values(same.dgain), values(apart.dgain));
    Operands alone(c, c.type), turned(c, c.type);
    Rope in_place = alone.rope_op();
    in_place.y = in_place.x;
    cuda::rope_with(in_place, cuda::default_rope_tuning(in_place), {});
    cuda::rope_with(turned.rope_op(), cuda::default_rope_tuning(turned.rope_op()), {});
    EXPECT_EQ(values(alone.x), values(turned.rotated));
  }
}

}  // namespace
}  // namespace ingot
