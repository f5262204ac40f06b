#pragma once
// Runs of a few steps on a text that each test writes anew.
#include <string>

#include "ingot/engines/train/trainer.h"
#include "ingot/io/file.h"
#include "ingot/models/gpt/config/presets.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot::testing {

inline std::string some_text() {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * 7919 % 1000) + " of a small text\n";
  return text;
}

inline RunConfig small_run(bool golf = true) {
  RunConfig c;
  c.model = gpt_preset(golf ? "golf" : "nano");
  c.model.dim = 32;
  c.model.layers = 4;
  c.model.heads = 4;
  c.model.kv_heads = golf ? 2 : 4;
  c.model.head_dim = 8;
  c.model.mlp_hidden = 48;
  c.model.context = 32;
  if (golf) {
    c.model.rotary_dim = 4;
    c.model.xsa_layers = 4;
    c.model.lane_start = 3;
    c.model.loop_first = 1;
    c.model.loop_last = 1;
    c.model.loop_extra = 1;
    c.model.loop_from = 0.5;
  } else {
    c.train.optimizer.matrix_optimizer = "adamw";
    c.train.optimizer.matrix_lr = c.train.optimizer.embed_lr = c.train.optimizer.scalar_lr = 3e-3;
  }
  c.train.tokenizer = "char";
  c.train.order = "windows";
  c.train.batch_tokens = 128;
  c.train.steps = 12;
  return c;
}

inline RunData data_for(RunConfig& c, const TemporaryDirectory& dir) {
  const std::string file = dir.path() + "/text.txt";
  if (!exists(file)) write_file(file, some_text());
  return load_run_data(file, c);
}

}  // namespace ingot::testing
