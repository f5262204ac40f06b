#include "ingot/models/registry.h"

#include <gtest/gtest.h>

#include "ingot/gpu/device.h"
#include "ingot/io/file.h"
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;

TEST(registry, a_model_opens_by_its_path_with_the_requested_slots_and_context) {
  const testing::TemporaryDirectory dir;
  testing::GptOssCheckpoint().write(dir / "m");
  EXPECT_STREQ(model_kind_of(dir / "m").name, "gpt-oss");
  const OpenedModel m = open_model(dir / "m", {.context = 30, .layers = 1, .slots = 3});
  EXPECT_EQ(m.decoder->context(), 30);
  EXPECT_EQ(m.decoder->slots(), 3);
  EXPECT_EQ(m.decoder->vocab(), testing::GptOssCheckpoint::kVocab);
  EXPECT_GT(m.weight_bytes, 0);
  EXPECT_EQ(error_of([&] { open_model(dir / "m", {.context = 30, .layers = 3}); }),
            "usage: --layers: found 3, expected at most 2, the model's");
}

TEST(registry, a_path_without_a_model_is_refused_with_a_description) {
  const testing::TemporaryDirectory dir;
  EXPECT_EQ(error_of([&] { open_model(dir / "absent"); }),
            "not found: " + (dir / "absent") +
                ": found no such file or directory, expected a run, a checkpoint or a published model");
  write_file(dir / "file", "text");
  EXPECT_EQ(error_of([&] { open_model(dir / "file"); }),
            "bad data: " + (dir / "file") +
                ": found a file of 4 bytes of an unknown format, expected a run, a checkpoint or a published model (a "
                "directory, an archive, a GGUF or an .iris file)");
  EXPECT_NE(error_of([&] { open_model(dir.path()); }).find("found no checkpoint, expected directories like"),
            std::string::npos);
}

TEST(registry, a_missing_device_is_refused_before_anything_is_read) {
  EXPECT_EQ(int(device_named("auto")), int(DeviceChoice::automatic));
  EXPECT_EQ(error_of([] { device_named("tpu"); }), "usage: device: found 'tpu', expected auto, cpu or cuda");
  if (gpu::device_count() > 0) GTEST_SKIP() << "there is a GPU here";
  const testing::TemporaryDirectory dir;
  testing::GptOssCheckpoint().write(dir / "m");
  const std::string error = error_of([&] { open_model(dir / "m", {.device = DeviceChoice::cuda}); });
  EXPECT_TRUE(error.starts_with("unsupported: device cuda: found ")) << error;
  EXPECT_NE(open_model(dir / "m", {.context = 8, .device = DeviceChoice::cpu}).decoder, nullptr);
}

TEST(registry, kinds_added_at_run_time_are_asked_first) {
  const size_t before = model_kinds().size();
  const ModelKind kind = {.name = "mine",
                          .holds = [](const std::string& path) { return path.ends_with(".mine"); },
                          .open = [](const std::string&, const OpenOptions&) { return OpenedModel{.end_ids = {42}}; },
                          .vocabulary = [](const std::string&, const VocabularyOptions&) { return Vocabulary{}; }};
  register_model(kind);
  EXPECT_EQ(model_kinds().size(), before + 1);
  EXPECT_STREQ(model_kinds()[0].name, "mine");
  EXPECT_EQ(open_model("a.mine").end_ids, std::vector<int32_t>{42});
  EXPECT_NE(error_of([] { register_model({.name = "half"}); }).find("found 'half' without all of its functions"),
            std::string::npos);
}

}  // namespace
}  // namespace ingot
