// The CUDA kernels against the fp64 loop. Without a GPU the numeric cases skip; the choice of configuration is plain
// C++.
#include "ingot/kernels/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ingot/gpu/device.h"
#include "ingot/kernels/rope/rope_config.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::compare;
using testing::DeviceBuffer;
using testing::roundoff;
using testing::values;

TEST(RopeConfig, HoldsEveryHeadAndKeepsToTheHardwaresLimits) {
  for (DType dtype : {DType::f32, DType::bf16})
    for (int64_t d : {2, 8, 20, 32, 64, 72, 80, 96, 128, 256, 512, 1024, 2080, 4096})
      for (int64_t half : {int64_t(0), int64_t(8), d / 4, d / 2})
        for (int64_t tokens : {1, 7, 500, 100000})
          for (int64_t heads : {1, 3, 8, 40})
            for (int kind = 0; kind < 32; ++kind) {
              if (2 * half > d) continue;
              const cuda::RopeShape s{.tokens = tokens,
                                      .heads = heads,
                                      .head_dim = d,
                                      .half = half,
                                      .dtype = dtype,
                                      .interleaved = bool(kind & 1),
                                      .norm = bool(kind & 2),
                                      .backward = (kind & 6) == 6,
                                      .in_place = bool(kind & 8)};
              const auto c = cuda::pick_rope_config(s, gpu::limits_of(kind & 16 ? "8.6" : "9.0"));
              EXPECT_TRUE(c.threads % 32 == 0 && c.threads <= cuda::kRopeThreads);
              EXPECT_TRUE(c.lanes >= 1 && c.lanes <= c.threads);
              if (c.vectors) EXPECT_GE(c.lanes, c.per_lane == 1 ? cuda::rope_row_vectors(s) : cuda::rope_head_lanes(s));
              if (s.norm || !c.vectors || c.per_lane == 1) EXPECT_TRUE((c.lanes & (c.lanes - 1)) == 0 && c.lanes <= 32);
              if (!s.backward) continue;
              const auto cut = cuda::pick_rope_slices(c, tokens, heads);
              EXPECT_LE(cut.slots * cut.rows * c.lanes, c.threads);
              EXPECT_GE(cut.slots * cut.chunks, heads);
              EXPECT_GE(cut.slices * cut.rows * cut.iterations, tokens);
              EXPECT_LE(cut.slices, std::min(tokens, cuda::kRopeMaxSlices));
            }
}

// The tests below need a GPU.
class RopeCuda : public testing::GpuTest<> {};

struct Case {
  int64_t tokens, heads, d, rotary;
  DType type = DType::bf16;
  bool interleaved = false;
  int sign = +1;
  bool normalise = true, gain = true;
  int64_t gap = 0, shift = 0;  // elements between heads; elements off an aligned address
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.tokens << "x" << c.heads << "x" << c.d << " rotary " << c.rotary << ' ' << c.type << " interleaved "
             << c.interleaved << " sign " << c.sign << " norm " << c.normalise << " gain " << c.gain << " gap " << c.gap
             << " shift " << c.shift;
}

// Every layout and type at heads of every kind of length, vectors and elements, more heads than a block holds.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (bool interleaved : {false, true}) {
      const int sign = interleaved ? -1 : +1;
      for (int64_t d : {32, 64, 96, 128, 256})
        for (int64_t rotary : {d, d / 2})
          all.push_back({.tokens = 37,
                         .heads = 5,
                         .d = d,
                         .rotary = rotary,
                         .type = t,
                         .interleaved = interleaved,
                         .sign = sign});
      const Case more[] = {
          {.tokens = 70, .heads = 4, .d = 64, .rotary = 16},
          {.tokens = 9, .heads = 3, .d = 64, .rotary = 24},   // half-split 16-bit: no whole vectors
          {.tokens = 19, .heads = 2, .d = 72, .rotary = 40},  // interleaved: an odd number of vectors turns
          {.tokens = 33, .heads = 1, .d = 80, .rotary = 32},
          {.tokens = 5, .heads = 70, .d = 128, .rotary = 128},  // a token's heads need several blocks
          {.tokens = 3, .heads = 300, .d = 16, .rotary = 16},
          {.tokens = 21, .heads = 3, .d = 512, .rotary = 512},  // the widest head of 16-bit vectors
          {.tokens = 4, .heads = 2, .d = 1040, .rotary = 64},   // more than a warp of vectors
          {.tokens = 12, .heads = 2, .d = 17, .rotary = 0},     // norm and gain alone
          {.tokens = 12, .heads = 3, .d = 64, .rotary = 0},
          {.tokens = 9, .heads = 2, .d = 21, .rotary = 6, .gap = 3},
          {.tokens = 1, .heads = 1, .d = 2, .rotary = 2},
          {.tokens = 11, .heads = 4, .d = 64, .rotary = 64, .gap = 8},    // vectors, strided
          {.tokens = 11, .heads = 4, .d = 64, .rotary = 64, .gap = 3},    // stride breaks alignment
          {.tokens = 11, .heads = 4, .d = 64, .rotary = 64, .shift = 1},  // address breaks alignment
          {.tokens = 40, .heads = 2, .d = 96, .rotary = 48, .normalise = false},
          {.tokens = 40, .heads = 2, .d = 40, .rotary = 20, .gain = false, .gap = 4},
          {.tokens = 23, .heads = 6, .d = 64, .rotary = 32, .normalise = false, .gain = false},
          {.tokens = 2000, .heads = 8, .d = 64, .rotary = 64},
      };
      for (Case c : more) {
        c.type = t, c.interleaved = interleaved, c.sign = sign;
        all.push_back(c);
      }
    }
  return all;
}

constexpr int64_t kPositions = 50;

struct Operands {
  explicit Operands(const Case& k)
      : c(k),
        x(k.type, shape(), k.d + k.gap, k.shift),
        y(k.type, shape(), k.d + k.gap, k.shift),
        rotated(k.type, shape(), k.d + k.gap, k.shift),
        back(k.type, shape(), k.d + k.gap, k.shift),
        dy(k.type, shape(), k.d + 2 * k.gap, k.shift),
        dx(k.type, shape(), k.d + k.gap, k.shift),
        gain(DType::f32, {k.heads}),
        dgain(DType::f32, {k.heads}),
        positions(DType::i32, {k.tokens}),
        cos(DType::f32, {kPositions, k.rotary / 2}),
        sin(DType::f32, {kPositions, k.rotary / 2}),
        workspace(DType::u8, {qk_norm_rope_backward_workspace_bytes(k.tokens, k.heads, Device{Device::cuda, 0})}) {
    testing::fill_normal(x.host(), 1, 2);
    testing::fill_normal(dy.host(), 2);
    testing::fill_normal(gain.host(), 3);
    testing::fill_normal(dgain.host(), 4);
    testing::fill_ids(positions.host(), 5, kPositions);
    if (k.rotary == 0) return;
    RopeFrequencies f = rope_frequencies(k.rotary, 10000);
    f.amplitude = 1.25;
    rope_table(f, cos.host(), sin.host());
  }
  Shape shape() const { return {c.tokens, c.heads, c.d}; }
  std::vector<DeviceBuffer*> all() {
    return {&x, &y, &rotated, &back, &dy, &dx, &gain, &dgain, &positions, &cos, &sin, &workspace};
  }
  void upload() {
    for (DeviceBuffer* b : all()) b->upload();
  }
  void download() {
    for (DeviceBuffer* b : all()) b->download();
  }
  template <class Op> Op with_table(Op a) const {
    if (c.rotary) a.positions = positions, a.cos = cos, a.sin = sin;
    a.interleaved = c.interleaved, a.sign = c.sign;
    return a;
  }
  Rope rope_op(const Tensor& from, const Tensor& to) const { return with_table(Rope{.x = from, .y = to}); }
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
  void run() const {
    qk_norm_rope(op(), {});
    qk_norm_rope_backward(backward_op(), {});
    if (c.rotary == 0) return;
    rope(rope_op(x, rotated), {});
    rope_backward(rope_op(dy, back), {});
  }

  Case c;
  DeviceBuffer x, y, rotated, back, dy, dx, gain, dgain, positions, cos, sin, workspace;
};

// The same operations in fp64 on the CPU, from the uploaded numbers.
struct Oracle {
  explicit Oracle(const Operands& o, const std::vector<double>& dgain_before, double eps = 0x1p-23)
      : c(o.c),
        x(DType::f64, o.shape()),
        y(DType::f64, o.shape()),
        rotated(DType::f64, o.shape()),
        back(DType::f64, o.shape()),
        dy(DType::f64, o.shape()),
        dx(DType::f64, o.shape()),
        gain(DType::f64, {c.heads}),
        dgain(DType::f64, {c.heads}),
        positions(DType::i32, {c.tokens}),
        cos(DType::f64, {kPositions, c.rotary / 2}),
        sin(DType::f64, {kPositions, c.rotary / 2}) {
    testing::assign(x, values(o.x.host()));
    testing::assign(dy, values(o.dy.host()));
    testing::assign(gain, values(o.gain.host()));
    testing::assign(dgain, dgain_before);
    testing::assign(positions, values(o.positions.host()));
    testing::assign(cos, values(o.cos.host()));
    testing::assign(sin, values(o.sin.host()));
    QkNormRope a = with_table(QkNormRope{.x = x, .y = y, .eps = eps, .normalise = c.normalise});
    QkNormRopeBackward b =
        with_table(QkNormRopeBackward{.x = x, .dy = dy, .dx = dx, .eps = eps, .normalise = c.normalise});
    if (c.gain) a.gain = b.gain = gain, b.dgain = dgain;
    qk_norm_rope(a, {});
    qk_norm_rope_backward(b, {});
    if (c.rotary == 0) return;
    rope(with_table(Rope{.x = x, .y = rotated}), {});
    rope_backward(with_table(Rope{.x = dy, .y = back}), {});
  }
  template <class Op> Op with_table(Op a) const {
    if (c.rotary) a.positions = positions, a.cos = cos, a.sin = sin;
    a.interleaved = c.interleaved, a.sign = c.sign;
    return a;
  }
  Case c;
  Buffer x, y, rotated, back, dy, dx, gain, dgain, positions, cos, sin;
};

void check_untouched(Operands& o) {
  for (DeviceBuffer* b : {&o.x, &o.dy, &o.gain, &o.positions, &o.cos, &o.sin})
    EXPECT_TRUE(b->untouched(true)) << "an input was written";
  for (DeviceBuffer* b : {&o.y, &o.rotated, &o.back, &o.dx, &o.dgain, &o.workspace})
    EXPECT_TRUE(b->untouched()) << "written outside of an output";
}

// A rotation is two products and a sum of numbers below 11 (5.5 standard deviations of 2) times 1.25. The norm sums the
// squares in a thread and then over lanes; dx sums two products more. Results are rounded once to their type, f16 also
// by half the spacing of its smallest numbers.
void check_against_fp64(Operands& o, const std::vector<double>& dgain_before) {
  check_untouched(o);
  const Case& c = o.c;
  const Oracle want(o, dgain_before);
  const double u = roundoff(DType::f32), sums = (double(c.d) + 16) * u;
  const double ends = c.type == DType::f32 ? 0 : roundoff(c.type), smallest = c.type == DType::f16 ? 0x1p-25 : 0;
  const auto near = [&](const char* name, const DeviceBuffer& got, const Buffer& wanted, double absolute, double last) {
    const auto result = compare(got.host(), values(wanted), absolute + (last > 0 ? smallest : 0), sums + 1.01 * last);
    EXPECT_TRUE(result.ok) << name << ": " << result.message;
  };
  if (c.rotary) {
    near("rope", o.rotated, want.rotated, 4 * u * 2 * 11 * 1.25, ends);
    near("rope_backward", o.back, want.back, 4 * u * 2 * 5.5 * 1.25, ends);
  }
  near("y", o.y, want.y, sums * 4, ends);
  near("dx", o.dx, want.dx, sums * 8, ends);
  if (c.gain) near("dgain", o.dgain, want.dgain, sums * 4 * std::sqrt(double(c.d) * double(c.tokens + 1)), 0);
}

void expect_agreement(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message() << c);
    Operands o(c);
    const auto dgain = values(o.dgain.host());
    o.upload();
    o.run();
    o.download();
    check_against_fp64(o, dgain);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(RopeCuda, AgreesWithTheFp64LoopOnRandomHeads) { expect_agreement(cases()); }

// Cases that a sanitizer runs in seconds.
TEST_F(RopeCuda, AgreesWithTheFp64LoopWhenSmall) {
  std::vector<Case> small = cases();
  std::erase_if(small, [](const Case& c) { return c.tokens * c.heads * c.d > 6000 || c.type != DType::bf16; });
  expect_agreement(small);
}

// Heads of +-m with m a power of two have rstd = 1 / m exactly, quarter turns are exact, and so are gains of powers of
// two: every forward result is right to the last bit, and a wrong head, pair, position or mask cannot hide in a
// tolerance.
TEST_F(RopeCuda, IsExactForQuarterTurnsOfHeadsWhoseNormIsAPowerOfTwo) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    Operands o(c);
    const Rng rng(7, Purpose::test, uint32_t(c.d));
    std::vector<double> x(size_t(c.tokens * c.heads * c.d)), dy(x.size()), gain(size_t(c.heads)),
        cos(size_t(kPositions * (c.rotary / 2))), sin(cos.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const double m = double(1 << (i / size_t(c.d) % 4));
      x[i] = rng.bits(i) & 1 ? m : -m;
      dy[i] = double(rng.below(i + 777, 255)) - 127;
    }
    for (size_t h = 0; h < gain.size(); ++h) gain[h] = double(1 << (h % 5)) * (h % 3 ? 1 : -1);
    for (size_t i = 0; i < cos.size(); ++i) {
      const uint64_t quarter = rng.bits(i + 5000) & 3;
      cos[i] = quarter == 0 ? 1 : quarter == 2 ? -1 : 0;
      sin[i] = quarter == 1 ? 1 : quarter == 3 ? -1 : 0;
    }
    testing::assign(o.x.host(), x), testing::assign(o.dy.host(), dy), testing::assign(o.gain.host(), gain);
    testing::assign(o.cos.host(), cos), testing::assign(o.sin.host(), sin);
    const auto dgain = values(o.dgain.host());
    o.upload();
    QkNormRope a = o.op();
    a.eps = 0;
    qk_norm_rope(a, {});
    if (c.rotary) {
      rope(o.rope_op(o.x, o.rotated), {});
      rope_backward(o.rope_op(o.dy, o.back), {});
    }
    o.download();
    const Oracle want(o, dgain, 0);
    EXPECT_EQ(values(o.y.host()), values(want.y));
    if (c.rotary) EXPECT_EQ(values(o.rotated.host()), values(want.rotated));
    if (c.rotary) EXPECT_EQ(values(o.back.host()), values(want.back));
    if (HasFailure()) return;
  }
}

#ifdef INGOT_HAS_CUDA_ROPE
TEST_F(RopeCuda, GivesTheSameUnderEveryConfigurationThatFits) {
  const Case some[] = {{.tokens = 50, .heads = 6, .d = 64, .rotary = 64},
                       {.tokens = 31, .heads = 9, .d = 128, .rotary = 64, .type = DType::f32, .interleaved = true},
                       {.tokens = 31, .heads = 5, .d = 80, .rotary = 48, .type = DType::f16}};
  for (const Case& c : some)
    for (bool vectors : {true, false})
      for (int lanes : {2, 3, 4, 5, 8, 16, 32})
        for (int threads : {32, 64, 96, 256})
          for (int iterations : {1, 3, 100}) {
            const cuda::RopeShape s{
                .head_dim = c.d, .half = c.rotary / 2, .dtype = c.type, .interleaved = c.interleaved};
            const bool holds = !vectors || lanes >= cuda::rope_head_lanes(s), power = (lanes & (lanes - 1)) == 0;
            if (!holds || (!vectors && !power)) continue;
            Operands o(c);
            const cuda::RopeTuning tuning{
                .config = {.vectors = vectors, .lanes = lanes, .threads = threads, .iterations = iterations},
                .overlap = iterations == 1,
                .evict_first = iterations == 1};
            SCOPED_TRACE(::testing::Message() << c << " vectors " << vectors << " lanes " << lanes << " threads "
                                              << threads << " iterations " << iterations);
            const auto dgain = values(o.dgain.host());
            o.upload();
            o.run();  // under the default, for the rows that this configuration does not support
            cuda::rope_with(o.rope_op(o.x, o.rotated), tuning, {});
            cuda::rope_backward_with(o.rope_op(o.dy, o.back), tuning, {});
            if (power) {
              cuda::RopeTuning norm = tuning;
              norm.config.once = iterations == 1 && threads == 64;
              cuda::qk_norm_rope_with(o.op(), norm, {});
              gpu::copy_to_device(o.dgain.tensor().data, o.dgain.host().data, o.dgain.host().bytes());
              cuda::qk_norm_rope_backward_with(o.backward_op(), tuning, {});
            }
            o.download();
            check_against_fp64(o, dgain);
            if (HasFailure()) return;
          }
}

TEST_F(RopeCuda, GivesTheSameWithOneVectorALane) {
  const Case some[] = {{.tokens = 50, .heads = 6, .d = 64, .rotary = 64},
                       {.tokens = 31, .heads = 9, .d = 128, .rotary = 64, .type = DType::f32, .interleaved = true},
                       {.tokens = 33, .heads = 3, .d = 128, .rotary = 96},
                       {.tokens = 17, .heads = 5, .d = 32, .rotary = 24, .type = DType::f32},
                       {.tokens = 31, .heads = 5, .d = 80, .rotary = 48, .type = DType::f16}};
  for (const Case& c : some)
    for (int lanes : {8, 16, 32})
      for (int threads : {32, 96, 256}) {
        const cuda::RopeShape s{.head_dim = c.d, .dtype = c.type};
        if (lanes < cuda::rope_row_vectors(s)) continue;
        Operands o(c);
        const cuda::RopeTuning tuning{.config = {.lanes = lanes, .threads = threads, .per_lane = 1},
                                      .evict_first = threads == 96};
        SCOPED_TRACE(::testing::Message() << c << " lanes " << lanes << " threads " << threads);
        const auto dgain = values(o.dgain.host());
        o.upload();
        o.run();  // under the default, for cases that this configuration does not support
        cuda::rope_with(o.rope_op(o.x, o.rotated), tuning, {});
        cuda::rope_backward_with(o.rope_op(o.dy, o.back), tuning, {});
        o.download();
        check_against_fp64(o, dgain);
        if (HasFailure()) return;
      }
}

TEST_F(RopeCuda, GivesTheSameWithTwoHeadsALane) {
  const Case some[] = {{.tokens = 50, .heads = 6, .d = 64, .rotary = 64},
                       {.tokens = 50, .heads = 1, .d = 64, .rotary = 32},
                       {.tokens = 31, .heads = 9, .d = 128, .rotary = 64, .type = DType::f32, .interleaved = true},
                       {.tokens = 33, .heads = 3, .d = 128, .rotary = 96},
                       {.tokens = 31, .heads = 5, .d = 80, .rotary = 48, .type = DType::f16, .gap = 8}};
  for (const Case& c : some)
    for (int threads : {32, 96, 128})
      for (bool in_place : {false, true}) {
        Operands o(c);
        const auto tuning = [&](const Rope& a) {
          cuda::RopeTuning t = cuda::default_rope_tuning(a);
          t.config.lanes = std::max(t.config.lanes, 16);
          t.config.per_lane = t.config.heads = 2;
          t.config.threads = threads;
          return t;
        };
        SCOPED_TRACE(::testing::Message() << c << " threads " << threads << " in place " << in_place);
        const auto dgain = values(o.dgain.host());
        o.upload();
        o.run();  // under the default, for cases that this configuration does not support
        rope(o.rope_op(o.x, o.rotated), {});
        rope_backward(o.rope_op(o.dy, o.back), {});
        o.download();
        const auto rotated = values(o.rotated.host()), back = values(o.back.host());
        const Rope forward = o.rope_op(o.x, in_place ? o.x : o.rotated),
                   backward = o.rope_op(o.dy, in_place ? o.dy : o.back);
        cuda::rope_with(forward, tuning(forward), {});
        cuda::rope_backward_with(backward, tuning(backward), {});
        o.download();
        if (!in_place) check_against_fp64(o, dgain);
        if (in_place) {
          EXPECT_EQ(values(o.x.host()), rotated);
          EXPECT_EQ(values(o.dy.host()), back);
        }
        EXPECT_TRUE(o.x.untouched() && o.dy.untouched());
        if (HasFailure()) return;
      }
}
#endif

TEST_F(RopeCuda, OutputsMayReplaceInputs) {
  const auto check = [&](const Case& c) {
    SCOPED_TRACE(::testing::Message() << c);
    Operands apart(c), fused(c), alone(c);
    for (Operands* o : {&apart, &fused, &alone}) o->upload();
    apart.run();
    QkNormRope forward = fused.op();
    forward.y = forward.x;
    QkNormRopeBackward backward = fused.backward_op();
    backward.dx = backward.dy;
    qk_norm_rope_backward(backward, {});
    qk_norm_rope(forward, {});
    rope(alone.rope_op(alone.x, alone.x), {});
    rope_backward(alone.rope_op(alone.dy, alone.dy), {});
    for (Operands* o : {&apart, &fused, &alone}) o->download();
    EXPECT_EQ(values(fused.x.host()), values(apart.y.host()));
    EXPECT_EQ(values(fused.dy.host()), values(apart.dx.host()));
    EXPECT_EQ(values(fused.dgain.host()), values(apart.dgain.host()));
    EXPECT_EQ(values(alone.x.host()), values(apart.rotated.host()));
    EXPECT_EQ(values(alone.dy.host()), values(apart.back.host()));
    EXPECT_TRUE(fused.x.untouched() && alone.x.untouched() && alone.dy.untouched());
  };
  for (DType type : {DType::bf16, DType::f32})  // fp32 shows every rounding
    for (bool interleaved : {false, true})
      for (int64_t rotary : {64, 32, 24})
        check({.tokens = 90, .heads = 6, .d = 64, .rotary = rotary, .type = type, .interleaved = interleaved});
}

TEST_F(RopeCuda, RotatesHeadsInsideAWiderRowAndHeadsStoredTokenByToken) {
  // Keys inside a packed (T, q + k + v) product, and (H, T, D) memory seen as (T, H, D).
  constexpr int64_t T = 300, H = 3, D = 64, kWidth = 8 * D;
  for (bool transposed : {false, true}) {
    Operands o({.tokens = T, .heads = H, .d = D, .rotary = D});
    DeviceBuffer packed(DType::bf16, transposed ? Shape{H, T, D} : Shape{T, 1, kWidth});
    testing::fill_normal(packed.host(), 11);
    packed.upload();
    o.upload();
    const auto heads = [&](const Tensor& t) {
      if (!transposed) return t.select(1, 0).slice(1, 2 * D, 5 * D).split_last(H);
      Tensor view(t.data, t.dtype, {T, H, D}, t.device);
      view.stride[0] = D, view.stride[1] = T * D;
      return view;
    };
    QkNormRope a = o.op();
    a.x = heads(packed.tensor());
    qk_norm_rope(a, {});
    rope(o.rope_op(a.x, o.rotated), {});
    rope_backward(o.rope_op(a.x, heads(packed.tensor())), {});
    o.download();
    testing::assign(o.x.host(), values(heads(packed.host())));
    testing::assign(o.dy.host(), values(heads(packed.host())));
    packed.download();
    const Oracle want(o, values(o.dgain.host()));
    const double ends = 1.01 * roundoff(DType::bf16), u = roundoff(DType::f32);
    for (const auto& [got, wanted] :
         {std::pair(o.y.host(), want.y.tensor()), std::pair(o.rotated.host(), want.rotated.tensor()),
          std::pair(heads(packed.host()), want.back.tensor())}) {
      const auto result = compare(got, values(wanted), 400 * u, ends + 80 * u);
      EXPECT_TRUE(result.ok) << result.message;
    }
    EXPECT_TRUE(packed.untouched(false) && o.y.untouched());
    if (transposed) continue;
    const Tensor before = packed.host().select(1, 0).slice(1, 0, 2 * D);
    DeviceBuffer again(DType::bf16, {T, 1, kWidth});
    testing::fill_normal(again.host(), 11);
    EXPECT_EQ(values(before), values(again.host().select(1, 0).slice(1, 0, 2 * D))) << "written beside the heads";
  }
}

TEST_F(RopeCuda, RepeatsBitForBitInAGraphOnASideStream) {
  const Case c{.tokens = 3001, .heads = 12, .d = 64, .rotary = 64};
  Operands alone(c), graphed(c);
  for (Operands* o : {&alone, &graphed}) o->upload();
  constexpr int kRounds = 50;
  // Rotates x and back into x: each step needs the result of the preceding step, and the gain's gradient accumulates.
  const auto round = [](const Operands& o, Stream stream) {
    rope(o.rope_op(o.x, o.rotated), stream);
    rope_backward(o.rope_op(o.rotated, o.x), stream);
    qk_norm_rope(o.op(), stream);
    QkNormRopeBackward b = o.backward_op();
    b.dy = o.y;
    qk_norm_rope_backward(b, stream);
    qk_norm_rope_backward(o.backward_op(), stream);
  };
  const gpu::OwnedStream side;
  const gpu::Graph graph(side, [&] { round(graphed, side); });
  for (int i = 0; i < kRounds; ++i) graph.launch(side);
  side.synchronize();
  for (int i = 0; i < kRounds; ++i) {
    round(alone, {});
    gpu::synchronize();
  }
  alone.download();
  graphed.download();
  for (auto [a, b] : {std::pair(&alone.x, &graphed.x), std::pair(&alone.y, &graphed.y),
                      std::pair(&alone.dx, &graphed.dx), std::pair(&alone.dgain, &graphed.dgain)})
    EXPECT_EQ(values(a->host()), values(b->host()));
}

TEST_F(RopeCuda, KeepsNanAndInfinityInTheirPairs) {
  const Case c{.tokens = 12, .heads = 2, .d = 64, .rotary = 32};
  Operands o(c);
  auto x = values(o.x.host());
  const size_t nan = 3 * 128 + 64 + 5, inf = 7 * 128 + 40;  // (token 3, head 1, pair 5) and a dimension that passes
                                                            // through
  x[nan] = NAN, x[inf] = INFINITY;
  testing::assign(o.x.host(), x);
  o.upload();
  rope(o.rope_op(o.x, o.rotated), {});
  qk_norm_rope(o.op(), {});
  o.download();
  const auto turned = values(o.rotated.host()), y = values(o.y.host());
  for (size_t i = 0; i < turned.size(); ++i) {
    if (i == nan || i == nan + 16)
      ASSERT_TRUE(std::isnan(turned[i])) << i;
    else if (i == inf)
      ASSERT_EQ(turned[i], INFINITY);
    else
      ASSERT_TRUE(std::isfinite(turned[i])) << i;
    if (i / 64 == nan / 64) ASSERT_TRUE(std::isnan(y[i])) << i;
    if (i / 64 != nan / 64 && i != inf) ASSERT_TRUE(std::isfinite(y[i])) << i;
  }
}

TEST_F(RopeCuda, ReachesHeadsBeyondTwoToThe31Elements) {
  constexpr int64_t kTokens = 2, kHeads = 3, kDim = 64, kHead = (int64_t(1) << 29) + 8, kToken = 3 * kHead + 16;
  constexpr int64_t kBytes = (kToken + 2 * kHead + kDim) * 2;
  if (gpu::device_info().memory_bytes < int64_t(24) << 30) GTEST_SKIP() << "needs 24 GiB of device memory";
  const gpu::DeviceMemory big(kBytes);
  Operands o({.tokens = kTokens, .heads = kHeads, .d = kDim, .rotary = kDim});
  o.upload();
  Tensor far(big.data(), DType::bf16, {kTokens, kHeads, kDim}, Device{Device::cuda, 0});
  far.stride[0] = kToken, far.stride[1] = kHead;
  rope(o.rope_op(o.x, far), {});
  rope_backward(o.rope_op(far, o.rotated), {});
  QkNormRopeBackward b = o.backward_op();
  const auto dgain = values(o.dgain.host());
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t h = 0; h < kHeads; ++h)
      gpu::copy_on_device(static_cast<char*>(big.data()) + (t * kToken + h * kHead) * 2,
                          static_cast<char*>(o.dy.tensor().data) + (t * kHeads + h) * kDim * 2, kDim * 2, {});
  b.dy = b.dx = far;
  qk_norm_rope_backward(b, {});
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t h = 0; h < kHeads; ++h)
      gpu::copy_on_device(static_cast<char*>(o.dx.tensor().data) + (t * kHeads + h) * kDim * 2,
                          static_cast<char*>(big.data()) + (t * kToken + h * kHead) * 2, kDim * 2, {});
  o.download();
  const Oracle want(o, dgain);
  // A rotation and its inverse give amplitude^2 times x, rounded twice.
  std::vector<double> twice = values(o.x.host());
  for (double& v : twice) v *= 1.25 * 1.25;
  const auto there_and_back =
      compare(o.rotated.host(), twice, 2 * roundoff(DType::bf16) * 11 * 1.25 * 1.25, roundoff(DType::bf16));
  EXPECT_TRUE(there_and_back.ok) << there_and_back.message;
  const double u = roundoff(DType::f32);
  const auto dx = compare(o.dx.host(), values(want.dx), 80 * 8 * u, 1.01 * roundoff(DType::bf16) + 80 * u);
  EXPECT_TRUE(dx.ok) << dx.message;
}

TEST_F(RopeCuda, APositionOutsideOfTheTableTakesItsLastRow) {
  const double last = kPositions - 1, most = std::numeric_limits<int32_t>::max(),
               least = std::numeric_limits<int32_t>::min();
  const std::vector<double> outside = {-1, 3, kPositions, most, 0, least}, inside = {last, 3, last, last, 0, last};
  const auto all_of = [](const Case& c, const std::vector<double>& six) {
    Operands o(c);
    std::vector<double> positions(size_t(c.tokens));
    for (size_t t = 0; t < positions.size(); ++t) positions[t] = six[t % six.size()];
    testing::assign(o.positions.host(), positions);
    o.upload();
    o.run();
    o.download();
    std::vector<double> all;
    for (DeviceBuffer* b : {&o.y, &o.rotated, &o.back, &o.dx, &o.dgain})
      for (double v : values(b->host())) all.push_back(v);
    return all;
  };
  for (const Case& c : {Case{.tokens = 7, .heads = 3, .d = 64, .rotary = 64},       // two vectors per lane
                        Case{.tokens = 7, .heads = 3, .d = 64, .rotary = 16},       // the spread layout
                        Case{.tokens = 3000, .heads = 8, .d = 128, .rotary = 128},  // forward without a walk
                        Case{.tokens = 7, .heads = 3, .d = 64, .rotary = 64, .interleaved = true},
                        Case{.tokens = 7, .heads = 3, .d = 21, .rotary = 6}})  // element by element
    EXPECT_EQ(all_of(c, outside), all_of(c, inside)) << c.tokens << " x " << c.heads << " x " << c.d;
}

TEST_F(RopeCuda, AcceptsNoTokens) {
  Operands o({.tokens = 0, .heads = 4, .d = 64, .rotary = 64});
  o.upload();
  EXPECT_NO_THROW(o.run());
  o.download();
  EXPECT_TRUE(o.dgain.untouched(true));
}

TEST_F(RopeCuda, RefusesUnsupportedOperandsByName) {
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& e) { return e.what(); }
    return "nothing was refused";
  };
  Operands o({.tokens = 5, .heads = 2, .d = 8, .rotary = 8});
  o.upload();
  QkNormRopeBackward b = o.backward_op();
  b.workspace = b.workspace.slice(0, 0, 16);
  std::string m = message([&] { qk_norm_rope_backward(b, {}); });
  EXPECT_TRUE(m.find("workspace") != m.npos && m.find("40") != m.npos && m.find("16") != m.npos) << m;
  DeviceBuffer wide(DType::f64, {5, 2, 8}), table(DType::f64, {kPositions, 4});
  m = message([&] { rope({.x = wide, .y = wide, .positions = o.positions, .cos = table, .sin = table}, {}); });
  EXPECT_TRUE(m.find("rope") != m.npos && m.find("f64") != m.npos) << m;
  Rope other = o.rope_op(o.x, o.y);
  other.y = o.y.host();
  m = message([&] { rope(other, {}); });
  EXPECT_TRUE(m.find("cpu") != m.npos && m.find("cuda:0") != m.npos) << m;
}

}  // namespace
}  // namespace ingot
