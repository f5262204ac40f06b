// A path becomes a decoder on a GPU, or what stands against it is said: in a build whose GPU is the emulator's too.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include "ingot/models/gpt_oss/decode/decoder.h"
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/models/registry.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

struct GptOssOpenCuda : testing::GpuTest<> {
  testing::TemporaryDirectory dir;
  const std::string path = dir / "m";
};

// Matrices whose names contain `part` become f32.
void write_wide(const std::string& path, const std::string& part) {
  std::vector<std::vector<float>> memory;
  testing::GptOssCheckpoint().write(path, {.damage = [&](auto& tensors, std::string&) {
                                      for (auto& [name, t] : tensors) {
                                        if (name.find(part) == std::string::npos) continue;
                                        const bf16* const from = t.tensor.template ptr<bf16>();
                                        memory.emplace_back(from, from + t.tensor.numel());
                                        t.tensor = Tensor(memory.back().data(), t.tensor.shape);
                                      }
                                    }});
}

TEST_F(GptOssOpenCuda, MatricesInF32AreSaidToBecomeBf16) {
  testing::GptOssCheckpoint().write(path);
  EXPECT_EQ(open_model(path, {.tokens = 16}).note, "");
  write_wide(path, "o_proj.weight");
  EXPECT_EQ(open_model(path, {.tokens = 16}).note, "on the GPU: 2 of 12 matrices are rounded from f32 to bf16");
  EXPECT_EQ(open_model(path, {.tokens = 16, .device = DeviceChoice::cpu}).note, "");
}

}  // namespace
}  // namespace ingot
#endif
