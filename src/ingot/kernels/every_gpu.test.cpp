// The choices of all operations on GPUs of every size, from a laptop's to a server's, among them sizes that no GPU has
// in common: each choice finds a kernel whose blocks fit the GPU, and a grid that is neither empty nor too large.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "ingot/gpu/gemm/schedule.h"
#include "ingot/kernels/grouped/schedule.h"
#include "ingot/kernels/linear/cuda/activated.h"
#include "ingot/kernels/linear/cuda/linear_config.h"
#include "ingot/kernels/mlp/portable/portable.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/kernels/rope/rope_config.h"
#include "ingot/kernels/sampling/sampling_config.h"
#include "ingot/kernels/swiglu/gated.h"
#include "ingot/kernels/swiglu/swiglu_config.h"

namespace ingot::cuda {
namespace {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB, kMostBlocks = 0x7fffffff;

struct Gpu {
  gpu::Limits limits;
  std::string name;
};
std::string name_of(const gpu::Limits& l) {
  return std::to_string(l.capability) + (l.hopper ? " as Hopper, " : ", ") + std::to_string(l.sms) +
         " multiprocessors, " + std::to_string(l.smem_per_block / kKiB) + " KB of shared memory, " +
         std::to_string(l.l2_bytes / kMiB) + " MB of L2";
}
// Numbers of multiprocessors from a part of a divided GPU to a B200's and an RTX 5090's.
std::vector<Gpu> gpus() {
  std::vector<Gpu> all;
  for (const int sms : {7, 14, 16, 20, 24, 40, 58, 72, 84, 108, 132, 148, 160, 170, 188})
    for (const int64_t l2 : {2 * kMiB, 6 * kMiB, 32 * kMiB, 50 * kMiB, 126 * kMiB}) {
      const auto add = [&](int capability, bool hopper, int threads, int64_t smem, std::array<int, 3> clusters) {
        gpu::Limits l{.capability = capability,
                      .hopper = hopper,
                      .sms = sms,
                      .threads_per_sm = threads,
                      .smem_per_block = smem * kKiB,
                      .smem_per_sm = (smem + (smem == 64 ? 0 : 1)) * kKiB,
                      .l2_bytes = l2,
                      .clusters = {clusters[0], clusters[1], clusters[2]}};
        all.push_back({l, name_of(l)});
      };
      add(75, false, 1024, 64, {});
      for (const int64_t smem : {99, 163, 227}) add(80, false, smem == 99 ? 1536 : 2048, smem, {});
      add(100, false, 2048, 227, {});
      // The parts of a divided Hopper GPU may hold few clusters of eight blocks, or none.
      add(90, true, 2048, 227, {sms / 2, sms / 5, sms / 10});
    }
  return all;
}

// Fails for a grid that a launch refuses.
void expect_launch(int64_t blocks, int64_t threads, int64_t smem, const gpu::Limits& l) {
  EXPECT_TRUE(blocks >= 1 && blocks <= kMostBlocks) << blocks << " blocks";
  EXPECT_TRUE(threads >= 32 && threads <= std::min(1024, l.threads_per_sm) && threads % 32 == 0)
      << threads << " threads";
  EXPECT_LE(smem, l.smem_per_block);
}

constexpr int64_t kRows[] = {1, 2, 17, 300, 4096, 100'000, int64_t(1) << 31};
constexpr int64_t kColumns[] = {1, 7, 8, 64, 100, 768, 1024, 2880, 4096, 5120, 16384, 65536, 262144};

TEST(EveryGpu, HasARmsNormForEveryRow) {
  for (const Gpu& g : gpus())
    for (const int64_t rows : kRows)
      for (const int64_t cols : kColumns)
        for (const DType dtype : {DType::f32, DType::bf16})
          for (const int bits : {0, 1, 2, 3}) {
            const bool aligned = (bits & 1) != 0, other = (bits & 2) != 0;  // other: a residual, or rare operands
            SCOPED_TRACE(::testing::Message() << g.name << ": " << rows << " x " << cols << " bits " << bits);
            const RmsNormConfig c = pick_rmsnorm_config(
                {.rows = rows, .cols = cols, .dtype = dtype, .aligned = aligned, .residual = other}, g.limits);
            ASSERT_GE(c.rows_per_block(), 1);
            expect_launch(gemm::ceil_div(std::min(rows, kMostBlocks), c.rows_per_block()), c.threads, 0, g.limits);
            EXPECT_LE(c.cluster, g.limits.hopper ? kRmsNormMaxCluster : 1);
            if (c.vectors) EXPECT_GE(int64_t(c.group) * c.cluster * c.vecs_per_thread * 16 / size_of(dtype), cols);

            const RmsNormBackwardShape shape{
                .rows = rows, .cols = cols, .s = dtype, .dy = dtype, .aligned = aligned, .rare = other};
            const RmsNormBackwardConfig b = pick_rmsnorm_backward_config(shape, g.limits);
            expect_launch(int64_t(b.blocks) * b.cluster, b.threads,
                          b.vectors ? backward_smem(b, shape, g.limits) + kBackwardStaticBytes : 0, g.limits);
            EXPECT_LE(b.blocks, rows);
            EXPECT_LE(b.cluster, g.limits.hopper ? kRmsNormMaxCluster : 1);
            EXPECT_GE(b.stages, 1);
            if (b.vectors) EXPECT_GE(int64_t(b.group) * b.cluster * b.columns, cols);
          }
}

TEST(EveryGpu, HasAGateAndARotationForEveryShape) {
  for (const Gpu& g : gpus())
    for (const int64_t rows : kRows)
      for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const bool aligned = (bits & 1) != 0, interleaved = (bits & 2) != 0, backward = (bits & 4) != 0;
        SCOPED_TRACE(::testing::Message() << g.name << ": " << rows << " rows, bits " << bits);
        for (const int64_t cols : {int64_t(1), int64_t(100), int64_t(4096), int64_t(16384)}) {
          const SwigluGateConfig c = pick_swiglu_gate_config(
              {.rows = rows, .cols = cols, .aligned = aligned, .interleaved = interleaved, .backward = backward},
              g.limits);
          EXPECT_TRUE(c.units_per_thread == 1 || c.units_per_thread == 2 || c.units_per_thread == 4);
          EXPECT_LE(c.threads, kSwigluMaxThreads);
          expect_launch(1, c.threads, 0, g.limits);
        }
        for (const int64_t dim : {2, 64, 100, 128, 256, 2048})
          for (const int64_t heads : {1, 3, 64})
            for (const bool norm : {false, true}) {
              const RopeConfig c = pick_rope_config({.tokens = rows,
                                                     .heads = heads,
                                                     .head_dim = dim,
                                                     .half = dim / 2,
                                                     .aligned = aligned,
                                                     .interleaved = interleaved,
                                                     .norm = norm,
                                                     .backward = norm && backward},
                                                    g.limits);
              ASSERT_TRUE(c.lanes >= 1 && c.lanes <= c.threads && c.iterations >= 1);
              const RopeSlices s = pick_rope_slices(c, rows, heads);
              ASSERT_TRUE(s.slots >= 1 && s.rows >= 1 && s.iterations >= 1);
              expect_launch(s.chunks * s.slices, c.threads, 0, g.limits);
              EXPECT_GE(s.chunks * s.slots, heads);
              EXPECT_GE(s.slices * s.rows * s.iterations, rows);
            }
      }
}

TEST(EveryGpu, HasAPortableMlpFrom80On) {
  for (const Gpu& g : gpus()) {
    if (g.limits.capability < 80) continue;
    for (const int element : {2, 4})
      for (const int widest : {8, 64, 136, 256, 512})
        for (const int scales : {0, widest, kMlpMaxLayers * widest})
          for (const int first : {0, portable_backward_height(element)})
            for (const int64_t rows : kRows) {
              SCOPED_TRACE(::testing::Message() << g.name << ": " << rows << " rows, " << widest << " wide, " << element
                                                << " bytes, " << scales << " scales");
              const PortableConfig c =
                  pick_portable(rows, portable_stride(widest, element), element, scales, g.limits, first);
              expect_launch(c.grid, kPortableThreads, c.smem, g.limits);
              EXPECT_LE(c.grid, gemm::ceil_div(rows, c.rows));
            }
  }
  for (const int64_t rows : kRows)
    for (const int tiles : {1, 3, 264, 265, 512}) {
      const PortableSplit s = pick_split(rows, tiles);
      EXPECT_TRUE(s.splits >= 1 && s.rows_per_split * s.splits >= rows && s.rows_per_split * (s.splits - 1) < rows)
          << rows << " rows, " << tiles << " tiles";
    }
}

TEST(EveryGpu, HasATileForEveryProduct) {
  constexpr std::array kFormats = {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4};
  for (const Gpu& g : gpus()) {
    const int64_t sms = g.limits.sms;
    for (const int64_t rows : {int64_t(1), int64_t(17), int64_t(300), int64_t(100'000), int64_t(1) << 24})
      for (const int64_t columns : {int64_t(8), int64_t(2880), int64_t(201'088)})
        for (const int64_t k : {int64_t(8), int64_t(4096), int64_t(128'256)}) {
          SCOPED_TRACE(::testing::Message() << g.name << ": " << rows << " x " << columns << " over " << k);
          const gemm::Problem p{rows, columns, k};
          for (const gemm::Tile& tile : {gemm::kPairs128, gemm::kTurns128, gemm::kTurns192, gemm::kPortableTile}) {
            EXPECT_GT(gemm::modelled_time(p, tile, sms), 0);
            const double used = gemm::efficiency(p, tile, sms);
            EXPECT_TRUE(used > 0 && std::isfinite(used)) << used;
            if (rows * columns < int64_t(1) << 38) expect_launch(gemm::Grid::of(p, tile).tiles, 128, 0, g.limits);
          }
          for (const bool combines : {false, true}) {
            const int form = pick_core_form(p, combines, sms);
            EXPECT_TRUE(form >= 0 && form < int(std::size(kCoreForms)));
          }
          for (const WeightFormat f : kFormats)
            for (const int64_t groups : {1, 32, 2048}) {
              const int width = grouped::pick_portable_width(f, rows, groups, (columns + 15) / 16, sms);
              EXPECT_TRUE(std::count(std::begin(grouped::kPortableWidths), std::end(grouped::kPortableWidths), width) ||
                          width == grouped::portable_widest(f))
                  << width;
              for (const bool gated : {false, true}) {
                const grouped::TileShape t = grouped::pick_tile(rows, groups, (columns + 15) / 16, sms, f, gated);
                EXPECT_TRUE(t.rows >= 1 && t.rows <= t.kernel && (!gated || t.row_tiles == int(grouped::kBands)));
              }
            }
        }
  }
}

TEST(EveryGpu, HasBlocksForEveryRowOfFilteredSampling) {
  for (const Gpu& g : gpus()) {
    ResidentClusters resident{};
    resident[1] = g.limits.sms;
    if (g.limits.hopper)
      resident[2] = g.limits.clusters[0], resident[4] = g.limits.clusters[1], resident[8] = g.limits.clusters[2];
    for (const int64_t rows : {1, 3, 64, 4096})
      for (const int64_t turns : {1, 13, 50, 300}) {
        const int cluster = pick_filter_cluster(rows, turns, 13, resident);
        EXPECT_TRUE(cluster >= 1 && cluster <= kMostCluster && resident[size_t(cluster)] > 0) << g.name;
      }
  }
}

TEST(EveryGpu, HasHintsToL2InOrder) {
  for (const Gpu& g : gpus()) {
    EXPECT_GT(gpu::half_l2_bytes(g.limits), 0) << g.name;
    EXPECT_GT(gpu::beyond_l2_bytes(g.limits), gpu::half_l2_bytes(g.limits)) << g.name;
    EXPECT_GT(gpu::kept_in_l2_bytes(g.limits), 0) << g.name;
  }
}

}  // namespace
}  // namespace ingot::cuda
