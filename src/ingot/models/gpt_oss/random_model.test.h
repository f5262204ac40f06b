#pragma once
// A small random GPT-OSS in memory, for tests of what runs on a model.
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/models/gpt_oss/weights.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot::testing {

struct RandomGptOss {
  TemporaryDirectory dir;  // has the checkpoint, in the folder m
  GptOssConfig config;
  GptOssWeights weights;

  // With a window of 6 short sequences exceed the window.
  explicit RandomGptOss(int64_t window = 6) {
    GptOssCheckpoint().write(dir / "m");
    config = read_gpt_oss_config(dir / "m");
    config.window = window;
    weights = load_gpt_oss(dir / "m", config);
  }
};

}  // namespace ingot::testing
