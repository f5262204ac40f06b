#include "ingot/models/decode/model/decoder.h"

#include <gtest/gtest.h>

#include "ingot/models/decode/model/device_model.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

TEST(GptOssGpuRounding, OnlyMatricesInF32AreCounted) {
  const GptOssConfig c = synthetic_gpt_oss("20b");
  GptOssWeights w = decode::shapes_of(c, WeightFormat::bf16, WeightFormat::mxfp4);
  EXPECT_EQ(gpu_rounding(w), "");
  w.layers[0].router.format = w.layers[3].down.format = WeightFormat::f32;
  EXPECT_EQ(gpu_rounding(w), "2 of 122 matrices are rounded from f32 to bf16");
  // Tied: the head is the embedding.
  bf16 memory;
  w.embed.data.data = w.head.data.data = &memory;
  w.embed.format = w.head.format = WeightFormat::f32;
  EXPECT_EQ(gpu_rounding(w), "3 of 121 matrices are rounded from f32 to bf16");
}

}  // namespace
}  // namespace ingot
