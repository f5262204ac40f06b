// The CUDA backward pass against the fp64 loop. Without a GPU the numeric cases skip; the choice of configuration is
// plain C++.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string_view>

#include "ingot/gpu/device.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::DeviceBuffer;
using testing::roundoff;
using testing::values;

const int64_t kColumns[] = {1,    2,    7,    31,   63,   64,   65,   72,    96,    128,   256,   257,  512,
                            1000, 1023, 1024, 2048, 2880, 4096, 8192, 12288, 16384, 32768, 50257, 65536};

TEST(RmsNormBackwardConfig, HoldsEveryRowAndKeepsToTheHardwaresLimits) {
  for (const char* capability : {"7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}) {
    const gpu::Limits sm = gpu::limits_of(capability);
    for (DType s : {DType::f32, DType::bf16})
      for (DType dy : {DType::f32, DType::bf16})
        for (int64_t cols : kColumns)
          for (int64_t rows : {1, 3, 500, 5000, 100000})
            for (bool aligned : {false, true})
              for (bool rare : {false, true}) {
                const cuda::RmsNormBackwardShape shape{
                    .rows = rows, .cols = cols, .s = s, .dy = dy, .aligned = aligned, .rare = rare};
                const auto c = cuda::pick_rmsnorm_backward_config(shape, sm);
                SCOPED_TRACE(::testing::Message()
                             << capability << ' ' << rows << "x" << cols << ' ' << s << " aligned " << aligned);
                EXPECT_TRUE(c.threads >= 32 && c.threads % 32 == 0);
                EXPECT_GE(c.blocks, 1);
                EXPECT_LE(c.blocks, rows);
                EXPECT_LE(c.blocks, cuda::most_partial_rows(rows, cols, s, sm));
                if (!c.vectors) continue;
                const int most = cuda::backward_threads(c, shape);
                EXPECT_LE(c.threads, most);
                const int64_t resident = c.cluster > 1 ? 1 : most / c.threads;
                EXPECT_LE(cuda::backward_smem(c, shape, sm) + cuda::kBackwardStaticBytes, sm.smem_per_block);
                if (sm.hopper)  // older GPUs may run the blocks one after another
                  EXPECT_LE(resident * (cuda::backward_smem(c, shape, sm) + cuda::kBackwardStaticBytes),
                            sm.smem_per_block + 1024);
                EXPECT_TRUE(c.stages >= 1 && c.stages <= cuda::kMaxStages);
                EXPECT_GE(int64_t(c.group) * c.cluster * c.columns, cols);
                EXPECT_LE(c.cluster, sm.hopper ? cuda::kRmsNormMaxCluster : 1);
                EXPECT_TRUE(c.cluster == 1 || c.group == c.threads);
                EXPECT_EQ(c.threads % c.group, 0);
                EXPECT_TRUE(c.group <= 32 || c.threads / c.group <= 15) << "named barriers";
              }
  }
}

TEST(RmsNormBackwardConfig, KeepsRowsUpTo65536ColumnsInRegistersOnHopper) {
  for (DType s : {DType::f32, DType::bf16})
    EXPECT_TRUE(cuda::pick_rmsnorm_backward_config({.rows = 100, .cols = 65536, .s = s, .dy = s}).vectors);
}

class RmsNormBackwardCuda : public testing::GpuTest<> {};

// The PTX for sm_75 has no clusters.
[[maybe_unused]] std::vector<int> clusters() {
#ifdef INGOT_HAS_CUDA_RMSNORM
  if (cuda::rmsnorm_limits(0).hopper) return {1, 2, 8};
#endif
  return {1};
}

// `ctest -R rmsnorm_portable` sets the environment that makes the driver compile the PTX for sm_75, whatever the GPU.
// INGOT_GPU_AS names a GPU whose limits hold.
TEST_F(RmsNormBackwardCuda, RunsTheRequestedVariant) {
#ifdef INGOT_HAS_CUDA_RMSNORM
  const char *const forced = std::getenv("CUDA_FORCE_PTX_JIT"), *const as = std::getenv("INGOT_GPU_AS");
  const bool imitates = as != nullptr && *as != 0 && std::string_view(as) != "9.0";
  const bool portable = (forced && *forced == '1') || imitates || gpu::device_info().major != 9;
  EXPECT_EQ(cuda::rmsnorm_limits(0).hopper, !portable);
#endif
}

struct Case {
  int64_t rows, cols;
  DType s = DType::bf16, dy = DType::bf16, w = DType::bf16;
  bool weight = true, unit_offset = false, rstd = true, dsum = false, accumulate = false, dx = true, dw = true;
  int64_t gap = 0, shift = 0;  // elements between rows; elements off an aligned address
  double scale = 1;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << "x" << c.cols << " s " << c.s << " dy " << c.dy << " w " << (c.weight ? name_of(c.w) : "none")
             << " offset " << c.unit_offset << " rstd " << c.rstd << " dsum " << c.dsum << " accumulate "
             << c.accumulate << " dx " << c.dx << " dw " << c.dw << " gap " << c.gap << " shift " << c.shift;
}

// Every length around every boundary of the kernels; all type mixes, and all ways to leave operands out, at a single
// length; odd strides and addresses; enough rows for every block to take several, the last blocks fewer.
std::vector<Case> cases() {
  std::vector<Case> all;
  const DType types[] = {DType::f32, DType::bf16, DType::f16};
  for (int64_t cols : kColumns)
    for (DType t : types)
      for (bool dsum : {false, true})
        all.push_back({.rows = cols > 8192   ? 5
                               : cols > 1024 ? 13
                                             : 37,
                       .cols = cols,
                       .s = t,
                       .dy = t,
                       .w = dsum ? t : DType::f32,
                       .rstd = dsum,
                       .dsum = dsum});
  for (DType s : types)
    for (DType dy : types)
      for (DType w : types)
        for (bool dsum : {false, true})
          all.push_back(
              {.rows = 9, .cols = 320, .s = s, .dy = dy, .w = w, .unit_offset = !dsum, .dsum = dsum, .scale = 0.7});
  for (int bits = 0; bits < 128; ++bits) {  // every way to leave operands out
    const auto on = [&](int i) { return (bits >> i & 1) != 0; };
    for (int64_t cols : {328, 331})
      all.push_back({.rows = 21,
                     .cols = cols,
                     .weight = on(0),
                     .unit_offset = on(1) && on(0),
                     .rstd = on(2),
                     .dsum = on(3),
                     .accumulate = on(4),
                     .dx = on(5),
                     .dw = on(6),
                     .scale = on(1) ? 1.5 : 1});
  }
  for (DType t : types) {
    all.push_back({.rows = 1003, .cols = 256, .s = t, .dy = t, .weight = false});
    all.push_back({.rows = 4001, .cols = 64, .s = t, .dy = t, .w = t});
    all.push_back({.rows = 203, .cols = 1024, .s = t, .dy = t, .w = t, .rstd = false, .dsum = true});
    all.push_back({.rows = 150, .cols = 2880, .s = t, .dy = t, .w = t});
    all.push_back({.rows = 40, .cols = 16384, .s = t, .dy = t, .w = t});
    all.push_back({.rows = 11, .cols = 1024, .s = t, .dy = t, .w = t, .dsum = true, .gap = 8});
    all.push_back({.rows = 11, .cols = 1024, .s = t, .dy = t, .w = t, .gap = 3});
    all.push_back({.rows = 11, .cols = 1024, .s = t, .dy = t, .w = t, .shift = 1});
    all.push_back({.rows = 501, .cols = 515, .s = t, .dy = t, .w = t, .dsum = true, .gap = 1, .shift = 3});
    all.push_back({.rows = 1, .cols = 4096, .s = t, .dy = t, .w = t});
  }
  return all;
}

struct Operands {
  explicit Operands(const Case& c)
      : dy(c.dy, {c.rows, c.cols}, c.cols + c.gap, c.shift),
        s(c.s, {c.rows, c.cols}, c.cols + c.gap, c.shift),
        dsum(c.s, {c.rows, c.cols}, c.cols + c.gap, c.shift),
        dx(c.s, {c.rows, c.cols}, c.cols + c.gap, c.shift),
        w(c.w, {c.cols}, c.cols, c.shift),
        rstd(DType::f32, {c.rows}),
        dw(DType::f32, {c.cols}),
        workspace(rmsnorm_backward_workspace_bytes(c.rows, c.cols, c.s, Device{Device::cuda, 0})) {
    gpu::fill_bytes(workspace.data(), 0xff, workspace.bytes(), {});
  }
  // Random operands; dx too, where ds is added to dx.
  void fill(const Case& c, uint64_t seed) {
    testing::fill_normal(dy.host(), seed);
    testing::fill_normal(s.host(), seed + 1, 2);
    testing::fill_normal(dsum.host(), seed + 2);
    testing::fill_normal(w.host(), seed + 3, 0.5, 1);
    testing::fill_normal(dw.host(), seed + 4);
    if (c.accumulate) testing::fill_normal(dx.host(), seed + 5);
  }
  void upload() {
    for (DeviceBuffer* b : {&dy, &s, &dsum, &dx, &w, &rstd, &dw}) b->upload();
  }
  void download() {
    for (DeviceBuffer* b : {&dy, &s, &dsum, &dx, &w, &rstd, &dw}) b->download();
  }
  RmsNormBackward op(const Case& c, double eps) const {
    RmsNormBackward a{
        .dy = dy, .s = s, .eps = eps, .scale = c.scale, .unit_offset = c.unit_offset, .accumulate_dx = c.accumulate};
    if (c.weight) a.w = w;
    if (c.rstd) a.rstd = rstd;
    if (c.dsum) a.dsum = dsum;
    if (c.dx) a.dx = dx;
    if (c.dw) {
      a.dw = dw;
      a.workspace = Tensor(workspace.data(), DType::u8, {workspace.bytes()}, Device{Device::cuda, 0});
    }
    return a;
  }
  DeviceBuffer dy, s, dsum, dx, w, rstd, dw;
  gpu::DeviceMemory workspace;
};

// The exact answer for the uploaded operands, and the sizes of the added terms: rounding is relative to them.
struct Exact {
  std::vector<double> dx, dw, dx_terms, dw_terms;
};
Exact exact(const Case& c, const Operands& o, double eps, const std::vector<double>& old_dx,
            const std::vector<double>& old_dw) {
  const size_t rows = size_t(c.rows), cols = size_t(c.cols);
  const auto dy = values(o.dy.host()), s = values(o.s.host()), dsum = values(o.dsum.host()), w = values(o.w.host());
  Exact e{.dx = std::vector<double>(rows * cols), .dw = old_dw, .dx_terms = {}, .dw_terms = std::vector<double>(cols)};
  e.dx_terms = e.dx;
  for (size_t k = 0; k < cols; ++k) e.dw_terms[k] = std::abs(old_dw[k]);
  for (size_t t = 0; t < rows; ++t) {
    const double *sr = &s[t * cols], *dr = &dy[t * cols];
    double squares = 0, mean = 0, size = 0;
    for (size_t k = 0; k < cols; ++k) squares += sr[k] * sr[k];
    const double r = 1 / std::sqrt(squares / double(cols) + eps);
    const auto slope = [&](size_t k) { return dr[k] * c.scale * (c.weight ? (c.unit_offset ? 1 : 0) + w[k] : 1); };
    for (size_t k = 0; k < cols; ++k) mean += slope(k) * sr[k] * r, size += std::abs(slope(k) * sr[k] * r);
    mean /= double(cols), size /= double(cols);
    for (size_t k = 0; k < cols; ++k) {
      const size_t i = t * cols + k;
      const double n = sr[k] * r, add = c.dsum ? dsum[i] : 0, old = c.accumulate ? old_dx[i] : 0;
      e.dx[i] = r * (slope(k) - n * mean) + add + old;
      e.dx_terms[i] = r * (std::abs(slope(k)) + std::abs(n) * size) + std::abs(add) + std::abs(old);
      e.dw[k] += dr[k] * c.scale * n;
      e.dw_terms[k] += std::abs(dr[k] * c.scale * n);
    }
  }
  return e;
}

void expect_close(const char* what, const std::vector<double>& got, const std::vector<double>& want,
                  const std::vector<double>& terms, double relative, double of_terms, double absolute) {
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_LE(std::abs(got[i] - want[i]), absolute + relative * std::abs(want[i]) + of_terms * terms[i])
        << what << " at " << i << ": found " << got[i] << ", expected " << want[i];
}

// Rounding in units of 2^-24 of the terms' size: the longest chain of additions in a thread and across threads, and the
// products around it. dx is rounded once more to its type.
void check_against_fp64(const Case& c, Operands& o, double eps) {
  for (const auto& [b, name] : {std::pair{&o.dy, "dy"}, {&o.s, "s"}, {&o.dsum, "dsum"}, {&o.w, "w"}, {&o.rstd, "rstd"}})
    EXPECT_TRUE(b->untouched(true)) << name << " was written";
  EXPECT_TRUE(o.dx.untouched(!c.dx) && o.dw.untouched(!c.dw)) << "written outside of an output";
  // The contents that fill() has written.
  Buffer old_dx(c.s, {c.rows, c.cols}), old_dw(DType::f32, {c.cols});
  testing::fill_normal(old_dw, 4);
  if (c.accumulate) testing::fill_normal(old_dx, 5);
  const Exact want = exact(c, o, eps, c.accumulate ? values(old_dx) : std::vector<double>(), values(old_dw));
  const double in_row = std::max<double>(64, double(c.cols) / 32) + 22, ulp = roundoff(DType::f32);
  if (c.dx)
    expect_close("dx", values(o.dx.host()), want.dx, want.dx_terms, roundoff(c.s), in_row * ulp,
                 c.s == DType::f16 ? 0x1p-25 : 1e-40);
  if (c.dw)
    expect_close("dw", values(o.dw.host()), want.dw, want.dw_terms, ulp, (double(c.rows) + 40 + in_row) * ulp, 1e-40);
}

// rstd as the forward pass computes: fp64, rounded once.
void place_rstd(const Case& c, Operands& o, double eps) {
  const auto s = values(o.s.host());
  std::vector<double> rstd(size_t(c.rows));
  for (size_t t = 0; t < rstd.size(); ++t) {
    double squares = 0;
    for (size_t k = 0; k < size_t(c.cols); ++k) squares += s[t * size_t(c.cols) + k] * s[t * size_t(c.cols) + k];
    rstd[t] = 1 / std::sqrt(squares / double(c.cols) + eps);
  }
  testing::assign(o.rstd.host(), rstd);
}

void check_random_rows(const Case& c, const cuda::RmsNormBackwardTuning* tuning = nullptr) {
  SCOPED_TRACE(::testing::Message() << c);
  Operands o(c);
  o.fill(c, 0);
  place_rstd(c, o, 1e-5);
  o.upload();
  if (tuning == nullptr) rmsnorm_backward(o.op(c, 1e-5), {});
#ifdef INGOT_HAS_CUDA_RMSNORM
  if (tuning != nullptr) cuda::rmsnorm_backward_with(o.op(c, 1e-5), *tuning, {});
#endif
  o.download();
  check_against_fp64(c, o, 1e-5);
}

TEST_F(RmsNormBackwardCuda, AgreesWithTheFp64FormulaOnRandomRows) {
  for (const Case& c : cases()) {
    check_random_rows(c);
    if (HasFailure()) return;
  }
}

// One case of each kind, for compute-sanitizer, without clusters: racecheck reports words polled across blocks
// (RoundSums) as hazards.
TEST_F(RmsNormBackwardCuda, AgreesWithTheFp64FormulaSmall) {
  for (bool dsum : {false, true})
    for (int64_t cols : {7, 72, 1024}) check_random_rows({.rows = 9, .cols = cols, .rstd = dsum, .dsum = dsum});
  check_random_rows({.rows = 3, .cols = 320, .s = DType::f32, .dy = DType::f16, .w = DType::f32, .gap = 3});
  for (int stages : {1, 3}) {
    const cuda::RmsNormBackwardTuning tuning{.config = {.group = 64, .threads = 128, .stages = stages, .blocks = 2}};
    check_random_rows({.rows = 13, .cols = 1024, .rstd = stages == 1}, &tuning);
  }
}

// Rows of +-m with m a power of two have n = +-1 exactly, and with integers in dy every dw is an integer: a row or a
// column counted twice, or not at all, cannot hide in a tolerance.
TEST_F(RmsNormBackwardCuda, SumsIntegersOfDwExactly) {
  for (const Case& c : cases()) {
    if (!c.dw) continue;
    SCOPED_TRACE(::testing::Message() << c);
    Operands o(c);
    const Rng rng(8, Purpose::test, uint32_t(c.cols));
    const size_t rows = size_t(c.rows), cols = size_t(c.cols);
    std::vector<double> s(rows * cols), dy(s.size()), dw(cols, 3), rstd(rows);
    for (size_t t = 0; t < rows; ++t) {
      const double m = double(1 << (t % 4));
      rstd[t] = 1 / m;
      for (size_t k = 0; k < cols; ++k) {
        const size_t i = t * cols + k;
        s[i] = rng.bits(i) & 1 ? m : -m;
        dy[i] = double(rng.below(i + 99, 15)) - 7;
      }
    }
    o.fill(c, 0);
    testing::assign(o.s.host(), s);
    testing::assign(o.dy.host(), dy);
    testing::assign(o.dw.host(), dw);
    testing::assign(o.rstd.host(), rstd);
    o.upload();
    Case exactly = c;
    exactly.scale = 2;
    rmsnorm_backward(o.op(exactly, 0), {});
    o.download();
    for (size_t i = 0; i < s.size(); ++i) dw[i % cols] += 2 * dy[i] * (s[i] > 0 ? 1 : -1);
    EXPECT_EQ(values(o.dw.host()), dw);
    if (HasFailure()) return;
  }
}

#ifdef INGOT_HAS_CUDA_RMSNORM
// Every supported way of spreading rows over threads that leaves less than half of the threads idle.
std::vector<cuda::RmsNormBackwardConfig> configurations(const cuda::RmsNormBackwardShape& s) {
  std::vector<cuda::RmsNormBackwardConfig> all;
  std::vector<std::pair<int, int>> kinds = {{16, 1}, {8, 2}};
  if (!s.rare && s.s != DType::f32) kinds.push_back({16, 2});
  const int64_t smem = cuda::rmsnorm_limits(0).smem_per_block;
  for (const auto& [columns, rows] : kinds)
    for (int group : {4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024})
      for (int cluster : clusters())
        for (int groups : {1, 3})
          for (int stages : {1, 2, 4})
            for (int blocks : {1, 2}) {
              const cuda::RmsNormBackwardConfig c{.group = group,
                                                  .cluster = cluster,
                                                  .threads = std::max(32, group) * groups,
                                                  .stages = stages,
                                                  .blocks = blocks,
                                                  .columns = columns,
                                                  .rows_at_once = rows};
              const int64_t room = int64_t(group) * cluster * columns;
              if (room >= s.cols && room < 2 * std::max<int64_t>(s.cols, 32 * cluster * columns) &&
                  c.threads <= cuda::backward_threads(c, s) && (cluster == 1 || (groups == 1 && group >= 32)) &&
                  stages * cuda::backward_stage_bytes(c, s) + cuda::kBackwardStaticBytes <= smem)
                all.push_back(c);
            }
  return all;
}

TEST_F(RmsNormBackwardCuda, GivesTheSameUnderEveryConfigurationThatFits) {
  for (DType t : {DType::f32, DType::bf16})
    for (int64_t cols : {64, 520, 1160, 4096, 16384})
      for (bool dsum : {false, true}) {
        const Case c{.rows = 23, .cols = cols, .s = t, .dy = t, .w = t, .dsum = dsum};
        const cuda::RmsNormBackwardShape shape{.rows = c.rows, .cols = cols, .s = t, .dy = t, .rare = dsum};
        for (const cuda::RmsNormBackwardConfig& config : configurations(shape)) {
          SCOPED_TRACE(::testing::Message()
                       << " group " << config.group << " cluster " << config.cluster << " threads " << config.threads
                       << " stages " << config.stages << " blocks " << config.blocks << " columns " << config.columns
                       << " rows " << config.rows_at_once);
          const cuda::RmsNormBackwardTuning tuning{.config = config, .overlap = config.blocks == 1};
          check_random_rows(c, &tuning);
          if (HasFailure()) return;
        }
      }
}
#endif

TEST_F(RmsNormBackwardCuda, TakesHeadsInsideAWiderRow) {
  constexpr int64_t T = 300, H = 3, D = 64, kWidth = 8 * D;
  DeviceBuffer packed(DType::bf16, {T, kWidth}), upstream(DType::bf16, {T, kWidth}), dx(DType::bf16, {T, kWidth}),
      dw(DType::f32, {D});
  testing::fill_normal(packed.host(), 11);
  testing::fill_normal(upstream.host(), 12);
  testing::fill_normal(dx.host(), 13);
  testing::fill_normal(dw.host(), 14);
  const auto heads = [&](const Tensor& t, int64_t first) {
    return t.slice(1, first * D, (first + H) * D).split_last(H);
  };
  Buffer s(DType::f64, {T, H, D}), dy(DType::f64, {T, H, D}), want(DType::f64, {T, H, D}), want_dw(DType::f64, {D});
  testing::assign(s, values(heads(packed.host(), 2)));
  testing::assign(dy, values(heads(upstream.host(), 5)));
  testing::assign(want_dw, values(dw.host()));
  const Device cpu;
  std::vector<uint8_t> scratch(size_t(rmsnorm_backward_workspace_bytes(T * H, D, DType::f64, cpu)));
  rmsnorm_backward({.dy = dy,
                    .s = s,
                    .dx = want,
                    .dw = want_dw,
                    .workspace = Tensor(scratch.data(), DType::u8, {int64_t(scratch.size())})},
                   {});
  for (DeviceBuffer* b : {&packed, &upstream, &dx, &dw}) b->upload();
  const auto rest = values(dx.host());
  const gpu::DeviceMemory workspace(rmsnorm_backward_workspace_bytes(T * H, D, DType::bf16, Device{Device::cuda, 0}));
  rmsnorm_backward({.dy = heads(upstream.tensor(), 5),
                    .s = heads(packed.tensor(), 2),
                    .dx = heads(dx.tensor(), 1),
                    .dw = dw,
                    .workspace = Tensor(workspace.data(), DType::u8, {workspace.bytes()}, Device{Device::cuda, 0})},
                   {});
  dx.download();
  dw.download();
  const auto got = testing::compare(heads(dx.host(), 1), values(want), 1e-5, roundoff(DType::bf16) * 1.01);
  EXPECT_TRUE(got.ok) << got.message;
  const auto got_dw = testing::compare(dw.host(), values(want_dw), 1e-3, 1e-5);
  EXPECT_TRUE(got_dw.ok) << got_dw.message;
  const auto now = values(dx.host());
  for (size_t i = 0; i < now.size(); ++i)
    if (const size_t column = i % kWidth; column < D || column >= (1 + H) * D) ASSERT_EQ(now[i], rest[i]) << i;
}

TEST_F(RmsNormBackwardCuda, WritesOverTheGradientsItReads) {
  for (int64_t cols : {256, 257, 4096}) {
    const Case c{.rows = 400, .cols = cols, .dsum = true};
    Operands plain(c), over_dy(c), over_dsum(c);
    for (Operands* o : {&plain, &over_dy, &over_dsum}) {
      o->fill(c, 0);
      place_rstd(c, *o, 1e-5);
      o->upload();
    }
    rmsnorm_backward(plain.op(c, 1e-5), {});
    RmsNormBackward a = over_dy.op(c, 1e-5);
    a.dx = a.dy;
    rmsnorm_backward(a, {});
    a = over_dsum.op(c, 1e-5);
    a.dx = a.dsum;
    rmsnorm_backward(a, {});
    for (Operands* o : {&plain, &over_dy, &over_dsum}) o->download();
    EXPECT_EQ(values(plain.dx.host()), values(over_dy.dy.host())) << "dx over dy, " << cols;
    EXPECT_EQ(values(plain.dx.host()), values(over_dsum.dsum.host())) << "dx over dsum, " << cols;
    EXPECT_EQ(values(plain.dw.host()), values(over_dy.dw.host()));
  }
}

TEST_F(RmsNormBackwardCuda, RepeatsBitForBit) {
  for (int64_t cols : {128, 2880, 331}) {
    const Case c{.rows = 633, .cols = cols};
    Operands o(c);
    o.fill(c, 0);
    place_rstd(c, o, 1e-5);
    const auto old = values(o.dw.host());
    std::vector<double> dx, dw;
    for (int i = 0; i < 20; ++i) {
      testing::assign(o.dw.host(), old);
      o.dw.upload();
      if (i == 0) o.upload();
      rmsnorm_backward(o.op(c, 1e-5), {});
      o.download();
      if (i == 0) dx = values(o.dx.host()), dw = values(o.dw.host());
      ASSERT_EQ(values(o.dx.host()), dx);
      ASSERT_EQ(values(o.dw.host()), dw);
    }
  }
}

// Forward and backward in turn, each starting while its predecessor ends: dx becomes the next round's dy and dw grows
// over 200 replays, so a step out of order changes bits.
TEST_F(RmsNormBackwardCuda, KeepsTheOrderOfAChainInAGraphOnASideStream) {
  const Case c{.rows = 700, .cols = 1024, .s = DType::f32, .dy = DType::f32, .w = DType::f32, .unit_offset = true};
  constexpr int kRounds = 200;
  Operands alone(c), chained(c);
  for (Operands* o : {&alone, &chained}) {
    o->fill(c, 0);
    testing::fill_normal(o->w.host(), 22, 0.1);
    o->upload();
  }
  const auto round = [&](const Operands& o, Stream stream, const auto& after_each) {
    rmsnorm({.x = o.s, .w = o.w, .y = o.dsum, .rstd = o.rstd, .unit_offset = true}, stream);
    after_each();
    RmsNormBackward a = o.op(c, 1e-5);
    rmsnorm_backward(a, stream);
    after_each();
    a.dy = o.dsum;
    a.dx = o.s;
    rmsnorm_backward(a, stream);
    after_each();
  };
  const gpu::OwnedStream side;
  const gpu::Graph graph(side, [&] { round(chained, side, [] {}); });
  for (int i = 0; i < kRounds; ++i) graph.launch(side);
  side.synchronize();
  for (int i = 0; i < kRounds; ++i) round(alone, {}, [] { gpu::synchronize(); });
  alone.download();
  chained.download();
  EXPECT_EQ(values(alone.dw.host()), values(chained.dw.host()));
  EXPECT_EQ(values(alone.s.host()), values(chained.s.host()));
  EXPECT_EQ(values(alone.dx.host()), values(chained.dx.host()));
}

TEST_F(RmsNormBackwardCuda, ReachesRowsBeyondTwoToThe31Elements) {
  constexpr int64_t kRows = 3, kCols = 128, kStride = (int64_t(1) << 30) + 8;
  constexpr int64_t kBytes = ((kRows - 1) * kStride + kCols) * 2;
  if (gpu::device_info().memory_bytes < int64_t(24) << 30) GTEST_SKIP() << "needs 24 GiB of device memory";
  const Case c{.rows = kRows, .cols = kCols};
  Operands near(c), far(c);
  const gpu::DeviceMemory s(kBytes), dx(kBytes);
  const auto spread = [&](const gpu::DeviceMemory& m) {
    Tensor t(m.data(), DType::bf16, {kRows, kCols}, Device{Device::cuda, 0});
    t.stride[0] = kStride;
    return t;
  };
  for (Operands* o : {&near, &far}) {
    o->fill(c, 0);
    place_rstd(c, *o, 1e-5);
    o->upload();
  }
  for (int64_t t = 0; t < kRows; ++t) gpu::copy_to_device(spread(s).row(t).data, near.s.host().row(t).data, kCols * 2);
  rmsnorm_backward(near.op(c, 1e-5), {});
  RmsNormBackward a = far.op(c, 1e-5);
  a.s = spread(s), a.dx = spread(dx);
  rmsnorm_backward(a, {});
  near.download();
  gpu::synchronize();
  Buffer row(DType::bf16, {kCols});
  for (int64_t t = 0; t < kRows; ++t) {
    gpu::copy_to_host(row.tensor().data, spread(dx).row(t).data, kCols * 2);
    EXPECT_EQ(values(row), values(near.dx.host().row(t))) << "row " << t;
  }
}

// A block of rows repeated until there are more than 2^31 elements: every repetition gives the block's own dx, and dw
// grows with their number.
TEST_F(RmsNormBackwardCuda, TakesMoreThanTwoToThe31Elements) {
  constexpr int64_t kCols = 64, kBlock = 65536, kRows = (int64_t(1) << 25) + kBlock, kTimes = kRows / kBlock;
  if (gpu::device_info().memory_bytes < int64_t(40) << 30) GTEST_SKIP() << "needs 40 GiB of device memory";
  const Case c{.rows = kBlock, .cols = kCols, .weight = false, .rstd = false};
  Operands o(c);
  o.fill(c, 0);
  testing::assign(o.dw.host(), std::vector<double>(kCols));
  o.upload();
  const gpu::DeviceMemory s(kRows * kCols * 2), dy(s.bytes()), dx(s.bytes()), dw(kCols * 4),
      workspace(rmsnorm_backward_workspace_bytes(kRows, kCols, c.s, Device{Device::cuda, 0}));
  gpu::fill_bytes(dw.data(), 0, dw.bytes(), {});
  const auto rows = [&](const gpu::DeviceMemory& m, int64_t first, int64_t count) {
    return Tensor(static_cast<char*>(m.data()) + first * kCols * 2, DType::bf16, {count, kCols},
                  Device{Device::cuda, 0});
  };
  for (int64_t t = 0; t < kRows; t += kBlock) {
    gpu::copy_on_device(rows(s, t, kBlock).data, o.s.tensor().data, kBlock * kCols * 2, {});
    gpu::copy_on_device(rows(dy, t, kBlock).data, o.dy.tensor().data, kBlock * kCols * 2, {});
  }
  rmsnorm_backward(o.op(c, 1e-5), {});
  RmsNormBackward a = o.op(c, 1e-5);
  a.s = rows(s, 0, kRows), a.dy = rows(dy, 0, kRows), a.dx = rows(dx, 0, kRows);
  a.dw = Tensor(dw.data(), DType::f32, {kCols}, Device{Device::cuda, 0});
  a.workspace = Tensor(workspace.data(), DType::u8, {workspace.bytes()}, Device{Device::cuda, 0});
  rmsnorm_backward(a, {});
  o.download();
  Buffer got(DType::bf16, {kBlock, kCols}), got_dw(DType::f32, {kCols});
  for (int64_t t : {int64_t(0), kTimes / 2 * kBlock, kRows - kBlock}) {
    gpu::copy_to_host(got.tensor().data, rows(dx, t, kBlock).data, kBlock * kCols * 2);
    EXPECT_EQ(values(got), values(o.dx.host())) << "from row " << t;
  }
  gpu::copy_to_host(got_dw.tensor().data, dw.data(), dw.bytes());
  const auto one = values(o.dw.host()), all = values(got_dw);
  // Terms are of size 1 and random: the bound is fp32's error on as many terms of alternating sign.
  for (size_t k = 0; k < one.size(); ++k)
    EXPECT_NEAR(all[k], double(kTimes) * one[k], 1e-3 * std::sqrt(double(kRows)) + 1e-4 * std::abs(all[k])) << k;
}

TEST_F(RmsNormBackwardCuda, AcceptsNoRowsAndLeavesDwAlone) {
  const Case c{.rows = 0, .cols = 64};
  Operands o(c);
  testing::fill_normal(o.dw.host(), 1);
  o.dw.upload();
  EXPECT_NO_THROW(rmsnorm_backward(o.op(c, 1e-5), {}));
  o.dw.download();
  EXPECT_TRUE(o.dw.untouched(true));
}

TEST_F(RmsNormBackwardCuda, RefusesOperandsWithoutAKernelByName) {
  const auto refusal = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& e) { return e.what(); }
    return "nothing was refused";
  };
  DeviceBuffer wide(DType::f64, {2, 64}), narrow(DType::bf16, {2, 64}), single(DType::f32, {2, 64});
  EXPECT_NE(refusal([&] { rmsnorm_backward({.dy = wide, .s = wide, .dx = wide}, {}); }).find("f64"), std::string::npos);
  const std::string mixed = refusal([&] { rmsnorm_backward({.dy = narrow, .s = single, .dx = narrow}, {}); });
  EXPECT_NE(mixed.find("rmsnorm_backward: found dx bf16, expected s's f32"), std::string::npos) << mixed;
}

}  // namespace
}  // namespace ingot
