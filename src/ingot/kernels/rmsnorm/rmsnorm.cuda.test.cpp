// The CUDA forward pass against the fp64 loop. Without a GPU the numeric cases skip; the choice of configuration is
// plain C++.
#include "ingot/kernels/rmsnorm/rmsnorm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/core/check.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/emulated_limits.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::compare;
using testing::DeviceBuffer;
using testing::roundoff;
using testing::values;

const int64_t kColumns[] = {1,    2,    7,    31,   63,   64,    65,    72,    96,    127,  128,
                            136,  192,  256,  257,  384,  512,   768,   1000,  1023,  1024, 2048,
                            2880, 4096, 5120, 8192, 8200, 12288, 16384, 32768, 50257, 65536};

TEST(RmsNormConfig, HoldsEveryRowAndKeepsToTheHardwaresLimits) {
  for (DType dtype : {DType::f32, DType::bf16})
    for (int64_t cols : kColumns)
      for (int64_t rows : {1, 3, 500, 5000, 100000})
        for (bool aligned : {false, true})
          for (int bits : {0, 1, 2, 3}) {
            const bool residual = (bits & 1) != 0, plain = (bits & 2) != 0;
            const auto c = cuda::pick_rmsnorm_config(
                {.rows = rows, .cols = cols, .dtype = dtype, .aligned = aligned, .residual = residual, .plain = plain});
            SCOPED_TRACE(::testing::Message() << rows << "x" << cols << ' ' << dtype << " aligned " << aligned);
            EXPECT_TRUE(c.threads >= 32 && c.threads <= cuda::kRmsNormMaxThreads && c.threads % 32 == 0);
            const int64_t per_vec = 16 / size_of(dtype);
            EXPECT_EQ(c.vectors, aligned && cols % per_vec == 0);
            if (!c.vectors) continue;
            EXPECT_GE(int64_t(c.group) * c.cluster * c.vecs_per_thread, cols / per_vec);
            EXPECT_TRUE((c.group & (c.group - 1)) == 0 || (plain && c.group % 32 == 0));
            EXPECT_LE(c.group, c.threads);
            EXPECT_TRUE(plain || !(c.kept || c.reread || c.walk));
            EXPECT_TRUE(!residual || !(c.kept || c.walk));
            EXPECT_LE(c.cluster, cuda::kRmsNormMaxCluster);
            EXPECT_TRUE(c.cluster == 1 || (c.group == c.threads && c.rows_per_group == 1));
            EXPECT_LE(c.vecs_per_thread * c.rows_per_group, residual ? 4 : 8);
          }
}

TEST(RmsNormConfig, KeepsRowsUpTo65536ColumnsInRegisters) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (bool residual : {false, true})
      EXPECT_TRUE(
          cuda::pick_rmsnorm_config({.rows = 100, .cols = 65536, .dtype = dtype, .residual = residual}).vectors);
  EXPECT_FALSE(cuda::pick_rmsnorm_config({.rows = 100, .cols = 1 << 20, .dtype = DType::f32}).vectors);
}

TEST(RmsNormConfig, LargeTensorsOf192And384ColumnsLeaveNoLaneIdle) {
  for (int64_t cols : {192, 384}) {
    const auto c = cuda::pick_rmsnorm_config({.rows = 100'000'000 / cols, .cols = cols, .dtype = DType::bf16});
    EXPECT_TRUE(c.kept);
    EXPECT_EQ(c.group * c.vecs_per_thread * 8, cols);
  }
}

// The tests below need a GPU.
class RmsNormCuda : public testing::GpuTest<> {};

// The PTX for sm_75 has no clusters.
std::vector<int> clusters() {
#ifdef INGOT_HAS_CUDA_RMSNORM
  if (cuda::rmsnorm_limits(0).hopper) return {1, 2, 4, 8};
#endif
  return {1};
}

struct Case {
  int64_t rows, cols;
  DType x = DType::bf16, y = DType::bf16, w = DType::bf16;
  bool weight = true, residual = false, unit_offset = false;
  int64_t gap = 0, shift = 0;  // elements between rows; elements off an aligned address
  double scale = 1;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << "x" << c.cols << ' ' << c.x << " -> " << c.y << " w " << (c.weight ? name_of(c.w) : "none")
             << " residual " << c.residual << " offset " << c.unit_offset << " gap " << c.gap << " shift " << c.shift;
}

// Every length around a boundary of the kernels, all type mixes at a single length, odd strides and addresses.
std::vector<Case> cases() {
  std::vector<Case> all;
  const DType types[] = {DType::f32, DType::bf16, DType::f16};
  for (int64_t cols : kColumns)
    for (DType x : types)
      for (bool residual : {false, true})
        all.push_back({.rows = cols > 8192   ? 3
                               : cols > 1024 ? 13
                                             : 37,
                       .cols = cols,
                       .x = x,
                       .y = x,
                       .w = DType::f32,
                       .residual = residual});
  for (DType x : types)
    for (DType y : types)
      for (DType w : types)
        for (bool residual : {false, true})
          all.push_back({.rows = 9,
                         .cols = 320,
                         .x = x,
                         .y = y,
                         .w = w,
                         .residual = residual,
                         .unit_offset = residual,
                         .scale = 0.7});
  for (DType x : types) {
    all.push_back({.rows = 600, .cols = 256, .x = x, .y = x, .weight = false});
    all.push_back({.rows = 601, .cols = 64, .x = x, .y = x, .w = x});  // four rows per group, the last group incomplete
    all.push_back({.rows = 1203, .cols = 512, .x = x, .y = x, .w = x, .residual = true});
    all.push_back({.rows = 11, .cols = 1024, .x = x, .y = x, .w = x, .gap = 8});    // vectors, strided
    all.push_back({.rows = 11, .cols = 1024, .x = x, .y = x, .w = x, .gap = 3});    // stride breaks alignment
    all.push_back({.rows = 11, .cols = 1024, .x = x, .y = x, .w = x, .shift = 1});  // address breaks alignment
    all.push_back({.rows = 11, .cols = 515, .x = x, .y = x, .w = x, .residual = true, .gap = 1, .shift = 3});
    all.push_back({.rows = 1, .cols = 4096, .x = x, .y = x, .w = x});
    all.push_back({.rows = 1, .cols = 1, .x = x, .y = x, .w = x});
  }
  return all;
}

// The operands of a case on the device; the inputs are uploaded, the outputs poisoned.
struct Operands {
  explicit Operands(const Case& c)
      : x(c.x, {c.rows, c.cols}, c.cols + c.gap, c.shift),
        y(c.y, {c.rows, c.cols}, c.cols + c.gap, c.shift),
        residual(c.x, {c.rows, c.cols}, c.cols + c.gap, c.shift),
        sum(c.x, {c.rows, c.cols}, c.cols + c.gap, c.shift),
        w(c.w, {c.cols}, c.cols, c.shift),
        rstd(DType::f32, {c.rows}) {}
  void upload() {
    for (DeviceBuffer* b : {&x, &y, &residual, &sum, &w, &rstd}) b->upload();
  }
  void download() {
    for (DeviceBuffer* b : {&x, &y, &residual, &sum, &w, &rstd}) b->download();
  }
  RmsNorm op(const Case& c, double eps) const {
    RmsNorm a{.x = x, .y = y, .rstd = rstd, .eps = eps, .scale = c.scale, .unit_offset = c.unit_offset};
    if (c.weight) a.w = w;
    if (c.residual) a.residual = residual, a.sum = sum;
    return a;
  }
  DeviceBuffer x, y, residual, sum, w, rstd;
};

// Rounding errors of a float sum of squares in a thread and then over threads, halved by the square root, then rstd,
// two products, 1 + w and the division: all in units of 2^-24. The final rounding to y comes on top.
double relative_tolerance(const Case& c) {
  const double per_thread = std::max<double>(64, double(c.cols) / cuda::kRmsNormElementThreads);
  return roundoff(c.y) + ((per_thread + 14) / 2 + 8) * roundoff(DType::f32);
}
// Half the spacing of y's smallest numbers.
double absolute_tolerance(DType y) { return y == DType::f16 ? 0x1p-25 : 1e-40; }

void check_against_fp64(const Case& c, Operands& o, double eps) {
  EXPECT_TRUE(o.x.untouched(true)) << "x was written";
  EXPECT_TRUE(o.w.untouched(true)) << "w was written";
  EXPECT_TRUE(o.residual.untouched(true)) << "the residual was written";
  EXPECT_TRUE(o.y.untouched() && o.rstd.untouched() && o.sum.untouched(!c.residual)) << "written outside of an output";
  std::vector<double> s = values(o.x.host());
  if (c.residual) {
    const auto r = values(o.residual.host());
    for (size_t i = 0; i < s.size(); ++i) s[i] += r[i];
    const auto sum = compare(o.sum.host(), s, absolute_tolerance(c.x), roundoff(c.x) * (1 + 1e-6));
    EXPECT_TRUE(sum.ok) << "sum: " << sum.message;
    s = values(o.sum.host());  // the stored sum is normalised
  }
  Buffer x(DType::f64, {c.rows, c.cols}), w(DType::f64, {c.cols}), y(DType::f64, {c.rows, c.cols}),
      rstd(DType::f64, {c.rows});
  testing::assign(x, s);
  RmsNorm a{.x = x, .y = y, .rstd = rstd, .eps = eps, .scale = c.scale, .unit_offset = c.unit_offset};
  if (c.weight) {
    testing::assign(w, values(o.w.host()));
    a.w = w;
  }
  rmsnorm(a, {});
  const auto got = compare(o.y.host(), values(y), absolute_tolerance(c.y), relative_tolerance(c));
  EXPECT_TRUE(got.ok) << "y: " << got.message;
  const auto scales = compare(o.rstd.host(), values(rstd), 0, relative_tolerance(c) - roundoff(c.y));
  EXPECT_TRUE(scales.ok) << "rstd: " << scales.message;
}

void check_random_rows(const Case& c, uint64_t seed, const cuda::RmsNormConfig* config = nullptr) {
  SCOPED_TRACE(::testing::Message() << c);
  Operands o(c);
  testing::fill_normal(o.x.host(), seed, 2);
  testing::fill_normal(o.residual.host(), seed + 1, 3);
  testing::fill_normal(o.w.host(), seed + 2, 0.5, 1);
  o.upload();
  if (config == nullptr) rmsnorm(o.op(c, 1e-5), {});
#ifdef INGOT_HAS_CUDA_RMSNORM
  if (config != nullptr) cuda::rmsnorm_with(o.op(c, 1e-5), {.config = *config}, {});
#endif
  o.download();
  check_against_fp64(c, o, 1e-5);
}

TEST_F(RmsNormCuda, AgreesWithTheFp64LoopOnRandomRows) {
  uint64_t seed = 1;
  for (const Case& c : cases()) {
    check_random_rows(c, seed += 3);
    if (HasFailure()) return;
  }
}

// One case of each kind, for compute-sanitizer.
TEST_F(RmsNormCuda, AgreesWithTheFp64LoopSmall) {
  for (bool residual : {false, true})
    for (int64_t cols : {7, 72, 1024}) check_random_rows({.rows = 5, .cols = cols, .residual = residual}, 1);
  check_random_rows({.rows = 3, .cols = 320, .x = DType::f32, .y = DType::f16, .w = DType::f32, .gap = 3}, 2);
  for (int cluster : clusters()) {
    const cuda::RmsNormConfig config{.vecs_per_thread = 1, .group = 64, .cluster = cluster, .threads = 64};
    check_random_rows({.rows = 3, .cols = 512 * cluster, .w = DType::f32}, 3, &config);
  }
}

// Rows of +-m with m a power of two have rstd = 1 / m exactly, so y is sign * w to the last bit: a wrong row, column,
// tile or mask cannot hide in a tolerance.
TEST_F(RmsNormCuda, IsExactOnRowsWhoseNormIsAPowerOfTwo) {
  for (Case c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    c.scale = 2;
    Operands o(c);
    const Rng rng(7, Purpose::test, uint32_t(c.cols));
    std::vector<double> s(size_t(c.rows * c.cols)), x(s.size()), r(s.size()), w(size_t(c.cols)), want(s.size());
    for (int64_t k = 0; k < c.cols; ++k) w[size_t(k)] = double(rng.below(uint64_t(k), 63)) - 31;
    for (int64_t t = 0; t < c.rows; ++t)
      for (int64_t k = 0; k < c.cols; ++k) {
        const size_t i = size_t(t * c.cols + k);
        const double sign = rng.bits(i + 1000) & 1 ? 1 : -1, m = double(1 << (t % 4));
        s[i] = sign * m;
        r[i] = c.residual ? double(rng.below(i + 77, 31)) - 15 : 0;
        x[i] = s[i] - r[i];
        want[i] = sign * 2 * (c.weight ? w[size_t(k)] + (c.unit_offset ? 1 : 0) : 1);
      }
    testing::assign(o.x.host(), x);
    testing::assign(o.residual.host(), r);
    testing::assign(o.w.host(), w);
    o.upload();
    rmsnorm(o.op(c, 0), {});
    o.download();
    if (c.residual) EXPECT_EQ(values(o.sum.host()), s);
    EXPECT_EQ(values(o.y.host()), want);
    if (HasFailure()) return;
  }
}

TEST_F(RmsNormCuda, GivesTheSameUnderEveryConfigurationThatFits) {
  for (DType x : {DType::f32, DType::bf16})
    for (int64_t cols : {64, 520, 4096, 16384})
      for (bool residual : {false, true}) {
        const Case c{.rows = 5, .cols = cols, .x = x, .y = x, .w = x, .residual = residual};
        for (int vecs : {1, 2, 4, 8})
          for (int group = 1; group <= cuda::kRmsNormMaxThreads; group *= 2)
            for (int cluster : clusters())
              for (int threads : {128, 1024})
                for (int streaming : {0, 1}) {
                  const int rows = vecs < 4 && streaming == 1 ? 4 / vecs : 1;
                  const bool fits = int64_t(vecs) * group * cluster * 16 / size_of(x) >= cols && group <= threads &&
                                    (cluster == 1 || (rows == 1 && group == threads)) && !(residual && vecs == 8);
                  if (!fits) continue;
                  [[maybe_unused]] const cuda::RmsNormTuning tuning{.config = {.vectors = true,
                                                                               .vecs_per_thread = vecs,
                                                                               .rows_per_group = rows,
                                                                               .group = group,
                                                                               .cluster = cluster,
                                                                               .threads = threads,
                                                                               .streaming = streaming == 1},
                                                                    .overlap = streaming == 0};
                  SCOPED_TRACE(::testing::Message() << c << " vecs " << vecs << " group " << group << " cluster "
                                                    << cluster << " threads " << threads);
                  Operands o(c);
                  testing::fill_normal(o.x.host(), 3);
                  testing::fill_normal(o.residual.host(), 4);
                  testing::fill_normal(o.w.host(), 5);
                  o.upload();
#ifdef INGOT_HAS_CUDA_RMSNORM
                  cuda::rmsnorm_with(o.op(c, 1e-6), tuning, {});
#endif
                  o.download();
                  check_against_fp64(c, o, 1e-6);
                  if (HasFailure()) return;
                }
      }
}

#ifdef INGOT_HAS_CUDA_RMSNORM
void check_under(const Case& c, const cuda::RmsNormTuning& tuning) {
  SCOPED_TRACE(::testing::Message() << c << " vectors " << tuning.config.vecs_per_thread << " read twice "
                                    << tuning.config.reread << " cluster " << tuning.config.cluster);
  Operands o(c);
  testing::fill_normal(o.x.host(), 3);
  testing::fill_normal(o.residual.host(), 4);
  testing::fill_normal(o.w.host(), 5);
  o.upload();
  cuda::rmsnorm_with(o.op(c, 1e-6), tuning, {});
  o.download();
  check_against_fp64(c, o, 1e-6);
}

void check_as_if_large(const Case& c, int vecs, bool overlap, bool again = false) {
  const int64_t lanes = (c.cols * size_of(c.x) / 16 + vecs - 1) / vecs;
  const int group = int(lanes <= 32 && !again ? cuda::round_up_pow2(lanes) : (lanes + 31) / 32 * 32);
  if (group > (c.residual ? cuda::kRmsNormMaxThreads : cuda::kKeptThreads)) return;
  if (vecs == 1 && group > 32) return;
  const cuda::RmsNormTuning tuning{.config = {.vecs_per_thread = vecs,
                                              .rows_per_group = vecs == 1 ? cuda::kRowPair : 1,
                                              .group = group,
                                              .threads = group <= 32 && !again ? 64 : group,
                                              .kept = !c.residual && !again,
                                              .reread = c.residual || again},
                                   .overlap = overlap};
  check_under(c, tuning);
}

void check_walk(const Case& c, int cluster, bool overlap) {
  check_under(c, {.config = {.vecs_per_thread = cuda::kWalkVecs,
                             .group = cuda::kWalkThreads,
                             .cluster = cluster,
                             .threads = cuda::kWalkThreads,
                             .walk = true},
                  .overlap = overlap});
}

TEST_F(RmsNormCuda, GivesTheSameAsForTensorsLargerThanL2) {
  for (DType x : {DType::f32, DType::bf16, DType::f16})
    for (int64_t cols : {8, 64, 72, 192, 520, 2880, 8192, 16384})
      for (bool residual : {false, true})
        for (bool single : {false, true})  // w in f32
          for (int vecs : {1, 2, 3, 4}) {
            if (residual && vecs != 2) continue;
            check_as_if_large({.rows = 37,
                               .cols = cols,
                               .x = x,
                               .y = x,
                               .w = single ? DType::f32 : x,
                               .weight = vecs == 2 || single,
                               .residual = residual,
                               .unit_offset = residual || vecs == 4,
                               .gap = single ? 8 : 0,
                               .scale = 0.7},
                              vecs, single, vecs == 4 && !single);
            if (HasFailure()) return;
          }
}

TEST_F(RmsNormCuda, GivesTheSameWhenClustersWalkOverRows) {
  if (!cuda::rmsnorm_limits(0).hopper) GTEST_SKIP() << "needs clusters";
  for (int64_t cols : {8, 2052, 8192, 20000, 65536})
    for (int cluster : {2, 8})
      for (int64_t rows : {1, 45, 700}) {
        if (cols > cluster * cuda::kWalkThreads * cuda::kWalkVecs * 4 || (rows == 700 && cols > 8192)) continue;
        check_walk({.rows = rows,
                    .cols = cols,
                    .x = DType::f32,
                    .y = DType::f32,
                    .w = DType::f32,
                    .weight = cols != 8192,
                    .unit_offset = cols == 20000,
                    .gap = cluster == 2 ? 4 : 0,
                    .scale = 0.7},
                   cluster, rows != 45);
        if (HasFailure()) return;
      }
}

TEST_F(RmsNormCuda, WalksOverRowsSmall) {
  if (!cuda::rmsnorm_limits(0).hopper) GTEST_SKIP() << "needs clusters";
  // No cluster: racecheck takes words polled across blocks for races.
  check_walk({.rows = 600, .cols = 1000, .x = DType::f32, .y = DType::f32, .w = DType::f32}, 1, true);
}

// The only barrier between the kernel's first writes to shared memory and the first row is the cluster's, so blocks
// without clusters are refused, too.
TEST_F(RmsNormCuda, BlocksThatWalkOverRowsAreRefusedWhereThereAreNoClusters) {
#ifdef INGOT_EMULATED_DEVICE
  const testing::EmulatedLimits ampere("8.0");
#endif
  const gpu::Limits limits = cuda::rmsnorm_limits(0);
  if (limits.hopper) GTEST_SKIP() << "this GPU has clusters";
  const std::string found = testing::error_of(
      [] { check_walk({.rows = 2, .cols = 1000, .x = DType::f32, .y = DType::f32, .w = DType::f32}, 1, true); });
  EXPECT_EQ(
      found,
      detail::concat("unsupported: rmsnorm: found blocks that walk over rows on a GPU of compute capability ",
                     limits.capability / 10, ".", limits.capability % 10, ", expected one of 9.0, which has clusters"));
}

// Smaller cases for compute-sanitizer.
TEST_F(RmsNormCuda, GivesTheSameAsForLargeTensorsSmall) {
  for (int64_t cols : {64, 520, 2880})
    for (bool residual : {false, true}) check_as_if_large({.rows = 5, .cols = cols, .residual = residual}, 2, true);
  check_as_if_large({.rows = 3, .cols = 4096, .x = DType::f32, .y = DType::f32, .w = DType::f32}, 4, true);
  check_as_if_large({.rows = 3, .cols = 520}, 4, true, true);
}

// In place, on tensors large enough for the variants above to be the default.
TEST_F(RmsNormCuda, WritesLargeTensorsInPlaceAndOverTheResidual) {
  const Case c{.rows = 4500, .cols = 4096, .x = DType::bf16, .y = DType::bf16, .residual = true};
  Operands apart(c), in_place(c);
  for (Operands* o : {&apart, &in_place}) {
    testing::fill_normal(o->x.host(), 3);
    testing::fill_normal(o->residual.host(), 4);
    testing::fill_normal(o->w.host(), 5);
    o->upload();
  }
  EXPECT_TRUE(cuda::default_rmsnorm_tuning(apart.op(c, 1e-6)).config.reread == cuda::rmsnorm_limits(0).hopper);
  rmsnorm(apart.op(c, 1e-6), {});
  RmsNorm a = in_place.op(c, 1e-6);
  a.sum = a.residual;
  rmsnorm(a, {});
  RmsNorm alone = apart.op(c, 1e-6), over = in_place.op(c, 1e-6);
  alone.residual = alone.sum = over.residual = over.sum = Tensor();
  DeviceBuffer y(DType::bf16, {c.rows, c.cols});
  alone.y = y;
  EXPECT_TRUE(cuda::default_rmsnorm_tuning(alone).config.kept == cuda::rmsnorm_limits(0).hopper);
  over.y = over.x;
  for (DeviceBuffer* b : {&apart.y, &apart.sum, &in_place.y, &in_place.residual}) b->download();
  EXPECT_EQ(values(apart.y.host()), values(in_place.y.host()));
  EXPECT_EQ(values(apart.sum.host()), values(in_place.residual.host()));
  rmsnorm(alone, {});
  rmsnorm(over, {});
  y.download();
  in_place.x.download();
  EXPECT_EQ(values(y.host()), values(in_place.x.host()));
}
#endif

TEST_F(RmsNormCuda, NormalisesHeadsInsideAWiderRow) {
  // Keys inside a packed (T, q + k + v) product: (T, H, D) with a stride between tokens that is no multiple of H * D.
  constexpr int64_t T = 300, H = 3, D = 64, kWidth = 8 * D;
  DeviceBuffer packed(DType::bf16, {T, kWidth}), y(DType::bf16, {T, H, D});
  testing::fill_normal(packed.host(), 11);
  packed.upload();
  y.upload();
  const auto heads = [&](const Tensor& t) { return t.slice(1, 2 * D, 5 * D).split_last(H); };
  rmsnorm({.x = heads(packed.tensor()), .y = y}, {});
  y.download();
  Buffer x(DType::f64, {T, H, D}), want(DType::f64, {T, H, D});
  testing::assign(x, values(heads(packed.host())));
  rmsnorm({.x = x, .y = want}, {});
  const auto got = compare(y.host(), values(want), 1e-40, relative_tolerance({.rows = T, .cols = D}));
  EXPECT_TRUE(got.ok) << got.message;
  EXPECT_TRUE(y.untouched());
}

TEST_F(RmsNormCuda, WritesInPlaceAndOverTheResidual) {
  for (int64_t cols : {256, 257, 4096}) {
    const Case c{.rows = 40, .cols = cols};
    Operands plain(c), aliased(c);
    for (Operands* o : {&plain, &aliased}) {
      testing::fill_normal(o->x.host(), 1);
      testing::fill_normal(o->residual.host(), 2);
      testing::fill_normal(o->w.host(), 3);
      o->upload();
    }
    rmsnorm(plain.op(c, 1e-5), {});
    RmsNorm a = aliased.op(c, 1e-5);
    a.y = a.x;
    rmsnorm(a, {});
    plain.download();
    aliased.download();
    EXPECT_EQ(values(plain.y.host()), values(aliased.x.host())) << "y over x, " << cols;

    Case with = c;
    with.residual = true;
    plain.upload();
    testing::fill_normal(aliased.x.host(), 1);
    aliased.upload();
    rmsnorm(plain.op(with, 1e-5), {});
    a = aliased.op(with, 1e-5);
    a.sum = a.residual;
    rmsnorm(a, {});
    plain.download();
    aliased.download();
    EXPECT_EQ(values(plain.sum.host()), values(aliased.residual.host())) << "sum over residual, " << cols;
    EXPECT_EQ(values(plain.y.host()), values(aliased.y.host())) << cols;
  }
}

// Kernels of a chain may start while their predecessor ends (programmatic dependent launch): the order must still be
// the stream's. Each round starts from the same numbers, norms them back and forth, and adds the result to a running
// sum, so that a step out of order in any of 1000 replays changes the sum's bits.
TEST_F(RmsNormCuda, KeepsTheOrderOfAChainInAGraphOnASideStream) {
  const Case c{.rows = 257, .cols = 1024, .x = DType::f32, .y = DType::f32, .w = DType::f32, .unit_offset = true};
  constexpr int kSteps = 6, kRounds = 1000;
  DeviceBuffer start(c.x, {c.rows, c.cols});
  testing::fill_normal(start.host(), 21);
  start.upload();
  Operands alone(c), chained(c);
  for (Operands* o : {&alone, &chained}) {
    testing::fill_normal(o->w.host(), 22, 0.1);
    testing::fill_normal(o->sum.host(), 23);
    o->upload();
  }
  const auto round = [&](const Operands& o, Stream stream, const auto& after_each) {
    gpu::copy_on_device(o.x.tensor().data, start.tensor().data, start.tensor().bytes(), stream);
    for (int i = 0; i < kSteps; ++i) {
      RmsNorm a = o.op(c, 1e-5);
      if (i % 2) std::swap(a.x, a.y);
      rmsnorm(a, stream);
      after_each();
    }
    rmsnorm({.x = o.x, .residual = o.sum, .sum = o.sum, .y = o.residual}, stream);
    after_each();
  };
  const gpu::OwnedStream side;
  const gpu::Graph graph(side, [&] { round(chained, side, [] {}); });
  for (int i = 0; i < kRounds; ++i) graph.launch(side);
  side.synchronize();
  for (int i = 0; i < kRounds; ++i) round(alone, {}, [] { gpu::synchronize(); });
  alone.download();
  chained.download();
  EXPECT_EQ(values(alone.sum.host()), values(chained.sum.host()));
}

TEST_F(RmsNormCuda, RepeatsBitForBit) {
  const Case c{.rows = 333, .cols = 2880};
  Operands o(c);
  testing::fill_normal(o.x.host(), 1);
  testing::fill_normal(o.w.host(), 2);
  o.upload();
  rmsnorm(o.op(c, 1e-5), {});
  o.download();
  const auto first = values(o.y.host());
  for (int i = 0; i < 50; ++i) {
    rmsnorm(o.op(c, 1e-5), {});
    o.download();
    ASSERT_EQ(values(o.y.host()), first);
  }
}

TEST_F(RmsNormCuda, KeepsNanAndInfinityInTheirRows) {
  const Case c{.rows = 12, .cols = 512, .weight = false};
  Operands o(c);
  testing::fill_normal(o.x.host(), 1);
  auto x = values(o.x.host());
  x[3 * 512 + 100] = NAN;
  x[5 * 512 + 511] = INFINITY;
  for (int64_t k = 0; k < 512; ++k) x[size_t(7 * 512 + k)] = 0;
  testing::assign(o.x.host(), x);
  o.upload();
  rmsnorm(o.op(c, 1e-5), {});
  o.download();
  const auto y = values(o.y.host());
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t row = i / 512;
    if (row == 3)
      ASSERT_TRUE(std::isnan(y[i])) << i;
    else if (row == 5)
      ASSERT_EQ(std::isnan(y[i]), i == 5 * 512 + 511) << i;  // inf * 0
    else
      ASSERT_TRUE(std::isfinite(y[i])) << i;
    if (row == 7) ASSERT_EQ(y[i], 0) << i;
  }
}

TEST_F(RmsNormCuda, ReachesRowsBeyondTwoToThe31Elements) {
  constexpr int64_t kRows = 3, kCols = 128, kStride = (int64_t(1) << 30) + 8;
  constexpr int64_t kBytes = ((kRows - 1) * kStride + kCols) * 2;
  if (gpu::device_info().memory_bytes < int64_t(24) << 30) GTEST_SKIP() << "needs 24 GiB of device memory";
  const gpu::DeviceMemory big(kBytes);
  Buffer row(DType::bf16, {kRows, kCols});
  testing::fill_normal(row, 9);
  Tensor x(big.data(), DType::bf16, {kRows, kCols}, Device{Device::cuda, 0});
  x.stride[0] = kStride;
  for (int64_t t = 0; t < kRows; ++t)
    gpu::copy_to_device(static_cast<char*>(big.data()) + t * kStride * 2, row.tensor().row(t).data, kCols * 2);
  DeviceBuffer y(DType::bf16, {kRows, kCols});
  y.upload();
  rmsnorm({.x = x, .y = y}, {});
  y.download();
  Buffer exact(DType::f64, {kRows, kCols}), want(DType::f64, {kRows, kCols});
  testing::assign(exact, values(row));
  rmsnorm({.x = exact, .y = want}, {});
  const auto got = compare(y.host(), values(want), 1e-40, relative_tolerance({.rows = kRows, .cols = kCols}));
  EXPECT_TRUE(got.ok) << got.message;
}

// A block of rows repeated until there are more than 2^31 elements: every repetition gives the block's own result.
TEST_F(RmsNormCuda, TakesMoreThanTwoToThe31Elements) {
  constexpr int64_t kCols = 64, kBlock = 65536, kRows = (int64_t(1) << 25) + kBlock;
  if (gpu::device_info().memory_bytes < int64_t(24) << 30) GTEST_SKIP() << "needs 24 GiB of device memory";
  DeviceBuffer x(DType::bf16, {kBlock, kCols}), y(DType::bf16, {kBlock, kCols});
  testing::fill_normal(x.host(), 17);
  x.upload();
  y.upload();
  const gpu::DeviceMemory many_x(kRows * kCols * 2), many_y(kRows * kCols * 2);
  const auto rows = [&](const gpu::DeviceMemory& m, int64_t first, int64_t count) {
    return Tensor(static_cast<char*>(m.data()) + first * kCols * 2, DType::bf16, {count, kCols},
                  Device{Device::cuda, 0});
  };
  for (int64_t t = 0; t < kRows; t += kBlock)
    gpu::copy_on_device(rows(many_x, t, kBlock).data, x.tensor().data, kBlock * kCols * 2, {});
  const RmsNorm many{.x = rows(many_x, 0, kRows), .y = rows(many_y, 0, kRows)};
  rmsnorm(many, {});
#ifdef INGOT_HAS_CUDA_RMSNORM
  cuda::rmsnorm_with({.x = x, .y = y}, cuda::default_rmsnorm_tuning(many), {});  // few rows are summed in another order
#endif
  y.download();
  Buffer got(DType::bf16, {kBlock, kCols});
  for (int64_t t : {int64_t(0), kRows / 2 / kBlock * kBlock, kRows - kBlock}) {
    gpu::copy_to_host(got.tensor().data, rows(many_y, t, kBlock).data, kBlock * kCols * 2);
    EXPECT_EQ(values(got), values(y.host())) << "from row " << t;
  }
}

TEST_F(RmsNormCuda, AcceptsNoRows) {
  DeviceBuffer x(DType::bf16, {0, 64}), y(DType::bf16, {0, 64});
  EXPECT_NO_THROW(rmsnorm({.x = x, .y = y}, {}));
  gpu::synchronize();
}

TEST_F(RmsNormCuda, RefusesOperandsWithoutAKernelByName) {
  const auto refusal = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::unsupported);
      return e.what();
    }
    return "nothing was refused";
  };
  DeviceBuffer wide(DType::f64, {2, 64}), out(DType::f64, {2, 64});
  EXPECT_NE(refusal([&] { rmsnorm({.x = wide, .y = out}, {}); }).find("f64"), std::string::npos);
}

}  // namespace
}  // namespace ingot
