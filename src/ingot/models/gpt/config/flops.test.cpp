#include "ingot/models/gpt/config/flops.h"

#include <gtest/gtest.h>

namespace ingot {
namespace {

TEST(flops, of_the_golf_preset_equal_a_count_by_hand) {
  const GptConfig golf = gpt_preset("golf");
  // A layer's matrices: q and o 512 x 512, k and v 256 x 512, up and down 2048 x 512.
  constexpr double kLayer = 2 * 512 * 512 + 2 * 256 * 512 + 2 * 2048 * 512, kHead = 8192 * 512;
  EXPECT_EQ(kLayer, 2883584);
  for (const bool looping : {false, true}) {
    const double layer_calls = looping ? 17 : 11;  // layers 3, 4 and 5 three times
    const GptFlops f = forward_flops(golf, looping);
    EXPECT_EQ(f.per_token, 2 * (layer_calls * kLayer + kHead));
    EXPECT_EQ(f.per_pair, layer_calls * 4 * 512);
  }
}

TEST(flops, a_factorised_embedding_counts_its_projection_and_a_narrow_head) {
  GptConfig c = gpt_preset("nano");
  const double whole = forward_flops(c, false).per_token;
  const double head = 2.0 * double(c.vocab * c.dim);
  c.embed_dim = c.dim / 2;
  EXPECT_EQ(forward_flops(c, false).per_token - (whole - head),
            2.0 * double(c.vocab * c.embed_dim + 2 * c.dim * c.embed_dim));
}

TEST(flops, pairs_equal_the_count_of_a_loop) {
  const std::vector<int32_t> cuts{0, 5, 5, 6, 20};
  for (const int64_t window : {0, 1, 3, 14, 100}) {
    double pairs = 0;
    for (size_t i = 0; i + 1 < cuts.size(); ++i)
      for (int32_t q = cuts[i]; q < cuts[i + 1]; ++q)
        for (int32_t k = cuts[i]; k <= q; ++k) pairs += window == 0 || q - k < window;
    EXPECT_EQ(attended_pairs(cuts, window), pairs) << window;
  }
}

}  // namespace
}  // namespace ingot
