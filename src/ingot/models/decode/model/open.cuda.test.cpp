// Opening a model by its path on a GPU, or the error that names what is missing. The GPU may be the emulator's.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <cinttypes>
#include <cmath>
#include <cstdio>

#include "ingot/gpu/allocator.h"
#include "ingot/gpu/limits.h"
#include "ingot/io/file.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/decode/model/ranked_model.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/models/registry.h"
#include "ingot/testing/emulated_limits.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;

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

TEST_F(GptOssOpenCuda, TheNoteNamesMatricesInF32ThatBecomeBf16) {
  testing::GptOssCheckpoint().write(path);
  EXPECT_EQ(open_model(path, {.context = 16}).note, "");
  write_wide(path, "o_proj.weight");
  EXPECT_EQ(open_model(path, {.context = 16}).note, "on the GPU: 2 of 12 matrices are rounded from f32 to bf16");
  EXPECT_EQ(open_model(path, {.context = 16, .device = DeviceChoice::cpu}).note, "");
}

TEST_F(GptOssOpenCuda, RandomWeightsAreMadeOnTheGpuInTheFormatOfTheirName) {
  std::vector<std::vector<int32_t>> answers;
  for (const char* name : {"synthetic:small", "synthetic:small", "synthetic:small:mxfp4"}) {
    const OpenedModel m = open_model(name, {.context = 16, .layers = 2, .device = DeviceChoice::cuda});
    EXPECT_EQ(m.note, "random weights: every answer is random text");
    EXPECT_GT(m.weight_bytes, 0);
    Sequence sequence(*m.decoder);
    sequence.extend(std::vector<int32_t>{1, 2, 3});
    answers.push_back(sequence.sample({.sampling = {.temperature = 1}, .seed = 5}, 4).tokens);
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_NE(answers[0], answers[2]);
}

#ifdef INGOT_EMULATED_DEVICE
TEST_F(GptOssOpenCuda, EveryGpuFromComputeCapability80OnGivesTheTokensOfHoppersPhasedPathByBothPaths) {
  testing::GptOssCheckpoint().write(path);
  const auto answer = [&](const DecoderOptions& options) {
    const OpenedModel m = open_model(path, options);
    EXPECT_EQ(m.note, "");
    EXPECT_EQ(m.decoder->device().kind, Device::cuda);
    Sequence sequence(*m.decoder);
    sequence.extend(std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18});
    return sequence.sample({.seed = 5}, 8).tokens;
  };
  const std::vector<int32_t> want = answer({.context = 64, .device = DeviceChoice::cuda, .megakernel = false});
  for (const char* capability : {"8.0", "8.6", "8.9", "10.0", "12.0"}) {
    const testing::EmulatedLimits limits(capability);
    for (const bool megakernel : {true, false})
      EXPECT_EQ(answer({.context = 64, .device = DeviceChoice::cuda, .megakernel = megakernel}), want)
          << capability << (megakernel ? ", the megakernel" : "");
  }
}
TEST_F(GptOssOpenCuda, AGpuOlderThanTheKernelsIsReplacedByTheCpuOrRefusedInOneLine) {
  testing::GptOssCheckpoint().write(path);
  gpu::Limits turing = gpu::limits_of("8.6");
  for (const int capability : {70, 75}) {
    turing.capability = capability;
    const testing::EmulatedLimits limits(turing);
    const std::string found =
        detail::concat("found emulated GPU of compute capability 7.", capability % 10, ", expected 8.0 or later");
    const OpenedModel m = open_model(path, {.context = 16});
    EXPECT_EQ(m.decoder->device().kind, Device::cpu);
    EXPECT_EQ(m.note, "on the CPU: " + found);
    EXPECT_EQ(open_model(path, {.context = 16, .device = DeviceChoice::cpu}).note, "");
    const auto refused = [&](const DecoderOptions& o) { return error_of([&] { open_model(path, o); }); };
    EXPECT_EQ(refused({.context = 16, .device = DeviceChoice::cuda}), "unsupported: device cuda: " + found);
  }
  EXPECT_EQ(open_model(path, {.context = 16}).decoder->device().kind, Device::cuda);
}
#endif

// The error equals, word for word, the CPU's error for the same file. No memory stays in use: the next model can be
// opened.
TEST_F(GptOssOpenCuda, ADamagedArchiveIsRefusedAsOnTheCpu) {
  const std::string archive = dir / "m.ingot";
  testing::GptOssCheckpoint().write(path);
  convert_gpt_oss(path, archive);
  const std::string whole = read_file(archive);
  const auto refusal = [&](DeviceChoice device) {
    return error_of([&] { open_model(archive, {.context = 16, .device = device}); });
  };
  const auto changed = [&](size_t at) {
    std::string bytes = whole;
    bytes[at] = char(bytes[at] ^ 1);
    return bytes;
  };
  const std::pair<const char*, std::string> damaged[] = {
      {"cut short, or changed", whole.substr(0, whole.size() - 1)},
      {"cut short, or changed", whole.substr(0, 5000)},
      {"cut short, or changed", whole + "x"},
      {"found version 0", changed(8)},
      {"the file is damaged", changed(whole.size() - 100)},
      {"the file is damaged", changed(whole.size() - 2)},
  };
  for (const auto& [want, bytes] : damaged) {
    SCOPED_TRACE(want);
    write_file(archive, bytes);
    const std::string found = refusal(DeviceChoice::cuda);
    EXPECT_NE(found.find(want), std::string::npos) << found;
    EXPECT_EQ(found, refusal(DeviceChoice::cpu));
    EXPECT_EQ(found, refusal(DeviceChoice::automatic));
  }
  write_file(archive, whole);
  EXPECT_EQ(open_model(archive, {.context = 16}).decoder->device().kind, Device::cuda);
}

// The error states the needed and the free memory of one GPU. The error comes before an invalid number in the file is
// read.
TEST_F(GptOssOpenCuda, TooLittleMemoryIsReportedBeforeAnythingIsRead) {
  testing::GptOssCheckpoint().write(path, {.damage = [](auto& tensors, std::string&) {
                                      *tensors.at("lm_head.weight").tensor.template ptr<bf16>() = bf16(NAN);
                                    }});
  const int64_t free = gpu::device_memory(0).available();
  if (free < 0) GTEST_SKIP() << "memory whose size is not known";
  const auto refused = [&](int64_t slots) {
    return error_of([&] { open_model(path, {.context = 100'000, .slots = slots, .device = DeviceChoice::cuda}); });
  };
  EXPECT_NE(refused(1).find("found NaN"), std::string::npos);
  const std::string found = refused(1'000'000);
  EXPECT_TRUE(found.starts_with("unsupported: device cuda: found ")) << found;
  EXPECT_TRUE(found.ends_with(" for weights and a context of 100000 tokens")) << found;
  int64_t there = 0, needed = 0;
  char name[100];
  ASSERT_EQ(
      std::sscanf(found.c_str(), "unsupported: device cuda: found %" SCNd64 " bytes free on %99[^,], expected %" SCNd64,
                  &there, name, &needed),
      3)
      << found;
  // other processes allocate and free memory in the meantime
  EXPECT_TRUE(free / 2 < there && there < 2 * free) << found;
  EXPECT_GT(needed, 1'000'000 * int64_t(100'000) * 4);  // two layers' keys and values, of more than one byte each
  EXPECT_GT(needed, there);
}

}  // namespace
}  // namespace ingot
#endif
