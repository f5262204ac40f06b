// The f32 kernels of the portable form on the CPU: partial tiles in every direction, both heights of row tiles, several
// tiles a block, split sums and their last arrivals, weight norm, stored and recomputed activations.
#include "ingot/kernels/mlp/portable/portable_emulated.test.h"

namespace ingot {
namespace {

using testing::check_emulated;

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

}  // namespace
}  // namespace ingot
