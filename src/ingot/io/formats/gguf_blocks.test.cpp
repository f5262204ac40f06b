#include "ingot/io/formats/gguf_blocks.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "ingot/io/formats/gguf.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

struct Golden {
  const char* dtype;
  std::vector<size_t> halves;  // the offsets of the block's f16 numbers
  float second, last;
  uint64_t hash;
};
// Written by tools/make_gguf_goldens.py: the numbers that the Python package gguf 0.19 decodes from 16 random blocks.
const std::vector<Golden> kGoldens = {
    {"Q4_0", {0}, -0.02435302734375f, -0.0f, 0x85ecd91c23e7b3fd},
    {"Q4_1", {0, 2}, -0.196258544921875f, 1.1838607788085938f, 0x47b6db13442d952d},
    {"Q5_0", {0}, -0.012176513671875f, 0.0005494356155395508f, 0x48b79b9aad479eff},
    {"Q5_1", {0, 2}, -0.2632293701171875f, 1.4294407367706299f, 0x2a088a4ee6955eff},
    {"Q8_0", {0}, -0.46270751953125f, -0.79376220703125f, 0x208469c3381bfe64},
    {"Q4_K", {0, 2}, 1.34515380859375f, -10.510418891906738f, 0x0406a301a2829498},
    {"Q5_K", {0, 2}, 3.39080810546875f, 51.764259338378906f, 0x3b7c31c4bd38c416},
    {"Q6_K", {208}, 149.74609375f, 18.5595703125f, 0xa7b5942ac1133b1d},
};

TEST(gguf_blocks, every_format_is_read_as_the_python_package_reads_it) {
  constexpr size_t kBlocks = 16;
  for (const Golden& g : kGoldens) {
    const GgufBlock block = gguf_block(g.dtype);
    const auto size = size_t(block.bytes);
    std::vector<uint8_t> data(size * kBlocks);
    uint32_t state = 1;
    for (uint8_t& byte : data) byte = uint8_t((state = state * 1664525u + 1013904223u) >> 24);
    for (size_t i = 0; i < kBlocks; ++i)
      for (const size_t half : g.halves) data[i * size + half + 1] &= 0xBF;  // keeps the number finite
    std::vector<float> numbers(size_t(block.numbers) * kBlocks);
    dequantize_gguf(g.dtype, data.data(), int64_t(numbers.size()), numbers.data());
    EXPECT_EQ(numbers[1], g.second) << g.dtype;
    EXPECT_EQ(numbers.back(), g.last) << g.dtype;
    std::vector<uint8_t> bytes(numbers.size() * 4);
    std::memcpy(bytes.data(), numbers.data(), bytes.size());
    uint64_t hash = 0xcbf29ce484222325u;
    for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
    EXPECT_EQ(hash, g.hash) << g.dtype;
  }
}

TEST(gguf_blocks, numbers_without_blocks_are_widened) {
  const uint8_t bytes[] = {0, 0, 128, 63, 0, 60, 128, 63};  // 1 in f32, in f16 and in bf16
  float x = 0;
  for (const auto& [dtype, at] : {std::pair("F32", 0), {"F16", 4}, {"BF16", 6}}) {
    dequantize_gguf(dtype, bytes + at, 1, &x);
    EXPECT_EQ(x, 1) << dtype;
  }
}

TEST(gguf_blocks, other_formats_and_parts_of_blocks_are_refused) {
  float out[32];
  const uint8_t block[32] = {};
  EXPECT_TRUE(can_dequantize_gguf("Q4_K"));
  EXPECT_FALSE(can_dequantize_gguf("IQ2_XXS"));
  EXPECT_NE(testing::error_of([&] { dequantize_gguf("IQ2_XXS", block, 256, out); }), "");
  EXPECT_NE(testing::error_of([&] { dequantize_gguf("Q4_0", block, 31, out); }), "");
}

}  // namespace
}  // namespace ingot
