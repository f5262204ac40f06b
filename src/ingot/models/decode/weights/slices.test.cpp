#include "ingot/models/decode/weights/slices.h"

#include <gtest/gtest.h>

#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/fixtures/decode_cases.test.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot::decode {
namespace {

TEST(DecodeSlices, SharesOfThePublishedShapesAreWholeWeightTilesAndCoverTheModelOnce) {
  const GptOssConfig c = synthetic_gpt_oss("120b");
  for (const int ranks : {1, 2, 4, 8}) {
    SCOPED_TRACE(ranks);
    const std::vector<Slice> all = slices_of(c, ranks, Split::tensor);
    ASSERT_EQ(int(all.size()), ranks);
    Slice end;
    for (const Slice& s : all) {
      EXPECT_EQ(s.kv_heads.begin, end.kv_heads.end);
      EXPECT_EQ(s.channels.begin, end.channels.end);
      EXPECT_EQ(s.ids.begin, end.ids.end);
      EXPECT_EQ(s.kv_heads.size(), 8 / ranks);
      EXPECT_EQ(s.channels.begin % 64, 0);
      EXPECT_EQ(s.ids.begin % 16, 0);
      end = s;
    }
    EXPECT_EQ(end.kv_heads.end, 8);
    EXPECT_EQ(end.channels.end, 2880);
    EXPECT_EQ(end.ids.end, 201088);
  }
  EXPECT_EQ(slices_of(c, 1, Split::attention_experts)[0], whole(c));
  const std::vector<Slice> two = slices_of(c, 2, Split::tensor), four = slices_of(c, 4, Split::tensor);
  EXPECT_EQ(two[0].channels.size() / 64, 23);
  EXPECT_EQ(two[1].channels.size() / 64, 22);
  for (size_t r = 0; r < 4; ++r) EXPECT_EQ(four[r].channels.size() / 64, r == 0 ? 12 : 11);
}

TEST(DecodeSlices, TheFirstRankMayHaveAttentionAndTheRemainingRanksTheExperts) {
  const GptOssConfig c = synthetic_gpt_oss("120b");
  const std::vector<Slice> five = slices_of(c, 5, Split::attention_experts);
  EXPECT_EQ(five[0], (Slice{.kv_heads = {0, 8}, .channels = {}, .ids = {0, 201088}}));
  for (size_t r = 1; r < 5; ++r) {
    EXPECT_EQ(five[r].kv_heads.size() + five[r].ids.size(), 0);
    EXPECT_EQ(five[r].channels.size() / 64, r == 1 ? 12 : 11);
  }
  EXPECT_EQ(five[4].channels.end, 2880);
}

TEST(DecodeSlices, MoreGpusThanUnitsAreRefusedWithBothNumbers) {
  const auto refusal = [](const GptOssConfig& c, int ranks, Split split) {
    return testing::error_of([&] { slices_of(c, ranks, split); });
  };
  const GptOssConfig small = testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5);  // 2 key heads, 2 units of channels
  EXPECT_EQ(slices_of(small, 2, Split::tensor)[1].channels, (SliceRange{64, 96}));
  EXPECT_NE(refusal(small, 4, Split::tensor).find("found 4 GPUs, expected at most 2"), std::string::npos);
  EXPECT_NE(refusal(small, 4, Split::attention_experts).find("expected at most 3"), std::string::npos);
}

// A cut has the same numbers as the matrix, in every format, including the padding of the last weight tiles.
TEST(DecodeSlices, ASliceHasTheMatrixsNumbers) {
  const GptOssConfig c = testing::decode_config(96, 8, 4, 16, 224, 3, 2, 5);
  for (const WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    SCOPED_TRACE(name_of(f));
    const testing::DecodeModel m(c, f, f, 7);
    const GptOssLayer& l = m.weights.layers[0];
    for (const Slice& s : slices_of(c, 2, Split::tensor))
      for (const auto& [w, cut] : {std::pair<const WeightMatrix&, Cut>{l.qkv, qkv_cut(c, s)},
                                   {l.o, output_cut(c, s)},
                                   {l.gate_up, gate_up_cut(c, s)},
                                   {l.down, down_cut(c, s)},
                                   {m.weights.head, head_cut(c, s)}}) {
        const WeightMatrix one = w.is_bank() ? w.at(2) : w;
        std::vector<uint8_t> memory(size_t(cut_bytes(f, cut)));
        cut_weight_tiles(one, cut, memory.data());
        const int64_t N = cut.row_count(), K = cut.cols.size();
        std::vector<float> got(size_t(N * K)), all(size_t(one.rows() * one.cols())), want;
        dequantise(weight_tiles_at(memory.data(), f, 0, N, K), Tensor(got.data(), {N, K}), {});
        dequantise(one, Tensor(all.data(), {one.rows(), one.cols()}), {});
        for (const SliceRange& r : cut.rows)
          for (int64_t n = r.begin; n < r.end; ++n)
            want.insert(want.end(), &all[size_t(n * one.cols() + cut.cols.begin)],
                        &all[size_t(n * one.cols() + cut.cols.begin)] + K);
        EXPECT_EQ(got, want);
      }
  }
}

TEST(DecodeSlices, VectorsAreCutLikeTheRowsTheyBelongTo) {
  std::vector<float> numbers(2 * 6);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = float(i);
  const Cut cut{.rows = {{1, 3}, {5, 6}}, .cols = {0, 1}};
  EXPECT_EQ(cut_vector(Tensor(numbers.data(), {6}), cut), (std::vector<float>{1, 2, 5}));
  EXPECT_EQ(cut_vector(Tensor(numbers.data(), {2, 6}), cut), (std::vector<float>{1, 2, 5, 7, 8, 11}));
}

}  // namespace
}  // namespace ingot::decode
