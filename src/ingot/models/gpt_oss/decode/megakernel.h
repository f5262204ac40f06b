#pragma once
// A token by one persistent kernel: one source file per format of the dense matrices (megakernel_*.cu).
#include "ingot/megakernel/handoff.h"
#include "ingot/models/gpt_oss/decode/stages.h"

namespace ingot::gpt_oss_decode {

// What the stages of a layer are told.
struct LayerStages {
  NormProduct qkv;
  decode_attention::Params attention;
  ResidualProduct output;
  Router router;
  GateUp gate_up;
  Down down;
};
inline LayerStages stages_of(const Plan& s, const Layer& l, uint32_t index) {
  return {qkv_of(s, l),           attention_of(s, l),      output_of(s, l),
          router_of(s, l, index), gate_up_of(s, l, index), down_of(s, l, index)};
}

struct Token {
  Embedding embedding;
  NormProduct head;
  const LayerStages* layers;  // on the device
  uint32_t count, head_rows;
  uint32_t experts, k;
  uint32_t choice, stage, bytes;  // places in dynamic shared memory, and all of it
  megakernel::Grid grid;
};

// Hand-offs of a token, in order: the embedding's, then of each layer one after each stage.
constexpr uint32_t kHandoffsOfLayer = 6;

template <WeightFormat Dense> struct Megakernel {
  // `layer`: any of the layers, for its sizes and formats.
  static void launch(const Token& token, const LayerStages& layer, int64_t blocks, Stream stream);
};

}  // namespace ingot::gpt_oss_decode
