// The f32 kernels of the portable form on the CPU: partial tiles in every direction, all heights of row tiles, several
// tiles a block, split sums and their last arrivals, weight norm, stored and recomputed activations.
#include "ingot/kernels/mlp/portable/portable_emulated.test.h"

namespace ingot {
namespace {

using testing::check_emulated, testing::check_on_card;

TEST(MlpPortableF32Emulated, PartialTilesOfEveryKindAgreeWithTheFp64Loop) {
  check_emulated<float>({.widths = {24, 40, 8}, .rows = 21}, 8, 2);
  check_emulated<float>({.widths = {8, 136, 72}, .rows = 35, .act = act_of<Silu>, .activate_last = true}, 8, 1);
}
TEST(MlpPortableF32Emulated, TallTilesAndSplitSumsAgreeWithTheFp64Loop) {
  check_emulated<float>({.widths = {72, 16, 24}, .rows = 300, .keep = false}, 32, 3);
}
TEST(MlpPortableF32Emulated, WeightNormAgreesWithTheFp64Loop) {
  check_emulated<float>({.widths = {16, 80, 24}, .rows = 19, .act = act_of<Tanh>, .weight_norm = true, .keep = false},
                        8, 2);
}
TEST(MlpPortableF32Emulated, EveryTileFitsTheSharedMemoryOfEveryGpu) { testing::check_tiles_fit<float>(); }
TEST(MlpPortableF32Emulated, EveryTileOf99KbAgreesWithTheFp64Loop) {
  check_on_card<float>({.widths = {40, 56, 24}, .rows = 150, .activate_last = true}, {56, 32}, {56, 32});
  check_on_card<float>({.widths = {64, 200}, .rows = 70, .keep = false}, {32, 32}, {32, 32});
  check_on_card<float>({.widths = {512, 512, 512}, .rows = 17, .act = act_of<Tanh>, .weight_norm = true}, {8, 32},
                       {8, 32});
}

}  // namespace
}  // namespace ingot
