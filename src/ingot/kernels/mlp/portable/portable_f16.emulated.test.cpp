// The f16 kernels of the portable form on the CPU: partial tiles in every direction, both heights of row tiles, several
// tiles a block, split sums and their last arrivals, weight norm, stored and recomputed activations.
#include "ingot/kernels/mlp/portable/portable_emulated.test.h"

namespace ingot {
namespace {

using testing::check_emulated;

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

}  // namespace
}  // namespace ingot
