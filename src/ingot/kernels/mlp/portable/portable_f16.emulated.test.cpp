// The f16 kernels of the portable form on the CPU: partial tiles in every direction, all heights of row tiles, several
// tiles a block, split sums and their last arrivals, weight norm, stored and recomputed activations.
#include "ingot/gpu/emulation/grid.h"
#include "ingot/kernels/mlp/portable/portable_emulated.test.h"

namespace ingot {
namespace {

using testing::check_emulated, testing::check_on_card, testing::EmulatedMlp, testing::EmulatedNet;

TEST(MlpPortableF16Emulated, PartialTilesOfEveryKindAgreeWithTheFp64Loop) {
  check_emulated<f16>({.widths = {24, 40, 8}, .rows = 21}, 16, 2);
  check_emulated<f16>({.widths = {8, 136, 72}, .rows = 35, .act = act_of<Silu>, .activate_last = true}, 16, 1);
}
TEST(MlpPortableF16Emulated, TallTilesAndSplitSumsAgreeWithTheFp64Loop) {
  check_emulated<f16>({.widths = {72, 16, 24}, .rows = 300, .keep = false}, 64, 3);
}
TEST(MlpPortableF16Emulated, WeightNormAgreesWithTheFp64Loop) {
  check_emulated<f16>({.widths = {16, 80, 24}, .rows = 19, .act = act_of<Tanh>, .weight_norm = true, .keep = false}, 16,
                      2);
}
TEST(MlpPortableF16Emulated, EveryTileFitsTheSharedMemoryOfEveryGpu) { testing::check_tiles_fit<f16>(); }
TEST(MlpPortableF16Emulated, EveryTileOf99KbAgreesWithTheFp64Loop) {
  check_on_card<f16>({.widths = {40, 48, 24}, .rows = 300}, {128, 128}, {64, 128});
  check_on_card<f16>({.widths = {128, 72}, .rows = 140, .activate_last = true, .keep = false}, {64, 128}, {64, 128});
  check_on_card<f16>({.widths = {64, 256, 136}, .rows = 33, .act = act_of<Gelu>}, {16, 128}, {16, 128});
  check_on_card<f16>({.widths = {512, 512, 512}, .rows = 20, .weight_norm = true}, {16, 64}, {16, 64});
}
// In 99 KB the scales of weight norm find room only beside narrow tiles of the weights. The bits are those of the wide
// tiles, which GPUs with more shared memory take. Tiles of 64 terms are partial in some layers, and several in others.
TEST(MlpPortableF16Emulated, NarrowTilesOfWeightsFitInto99KbAndGiveTheSameBits) {
  const gpu::Limits card = gpu::limits_of("8.6"), ampere = gpu::limits_of("8.0");
  for (const bool keep : {false, true}) {
    const EmulatedNet net{.widths = {200, 512, 72, 512, 24},
                          .rows = 19,
                          .act = keep ? act_of<Silu> : act_of<Softplus>,
                          .weight_norm = true,
                          .activate_last = keep,
                          .keep = keep};
    EmulatedMlp<f16> narrow(net, DType::f16), wide(net, DType::f16);
    narrow.run_kernels(card);
    testing::expect_near_fp64(narrow);
    if (wide.tile_for(ampere, false).smem > gpu::current_limits().smem_per_block) continue;  // INGOT_GPU_AS=8.6
    emulation::settings().seed = 7;  // another order of the threads
    wide.run_kernels(ampere);
    emulation::settings().seed = 1;
    EXPECT_EQ(narrow.outputs(), wide.outputs());
  }
}

}  // namespace
}  // namespace ingot
