#pragma once
// The weights of a GPT-OSS model in memory, and their reading from a checkpoint's directory.
#include <vector>

#include "ingot/core/arena.h"
#include "ingot/kernels/quant/quant.h"
#include "ingot/models/gpt_oss/config.h"

namespace ingot {

// Vectors are f32. Matrices keep the checkpoint's format: bf16 or f32, experts mxfp4 (packed), bf16 or f32.
struct GptOssLayer {
  Tensor attn_norm, mlp_norm;   // (C)
  WeightMatrix qkv, o, router;  // (Q + 2 KV, C): rows of q, then k, then v; (C, Q); (E, C)
  Tensor b_qkv, b_o, b_router;  // b_qkv and b_o left out where the config has no attention bias
  Tensor sinks;                 // (heads)
  WeightMatrix gate_up, down;   // (E, 2I, C) gate and up interleaved by rows, (E, C, I)
  Tensor b_gate_up, b_down;     // (E, 2I), (E, C)
};
struct GptOssWeights {
  WeightMatrix embed, head;  // (V, C); tied: the same memory
  Tensor norm;               // (C)
  std::vector<GptOssLayer> layers;
  Arena arena;  // owns all of it
  int64_t bytes() const { return arena.used(); }
};

struct GptOssLoad {
  int64_t layers = 0;       // the first so many; 0: all
  int64_t other_bytes = 0;  // memory the caller will want beside the weights, for the check before reading
};
// Reads a checkpoint in any of its namings: Hugging Face's with mxfp4 blocks and scales, OpenAI's own, and what
// transformers writes (experts (E, C, 2I) and (E, I, C), turned here). Every tensor must be there with the config's
// shape and a type that serves, and none may be left over (but those of layers beyond `layers`). Memory is checked
// before any of it is taken.
GptOssWeights load_gpt_oss(const std::string& directory, const GptOssConfig& config, const GptOssLoad& load = {});

// Memory the weights of `load.layers` layers will take, from the checkpoint's headers alone.
int64_t gpt_oss_weight_bytes(const std::string& directory, const GptOssConfig& config, const GptOssLoad& load = {});

}  // namespace ingot
