#pragma once
// The weights of a decoder-only transformer in memory. The spec (spec.h) determines which of the weights a model has.
#include <memory>
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/kernels/quant/quant.h"

namespace ingot {

// Vectors are f32. Matrices keep their stored format, in rows or in weight tiles (kernels/quant). Letters: C hidden
// size, Q and KV widths of queries and keys, D head dimension, E experts, I hidden width of an MLP.
struct DecoderLayer {
  Tensor attn_norm, mlp_norm;   // (C)
  WeightMatrix qkv, o, router;  // (Q + 2 KV, C): rows of q, then k, then v; (C, Q); (E, C)
  Tensor b_qkv, b_o, b_router;  // left out where the spec has none
  Tensor sinks;                 // (heads)
  // (E, 2I, C) and (E, C, I), of a dense MLP (2I, C) and (C, I); rows of gate and up are interleaved.
  WeightMatrix gate_up, down;
  Tensor b_gate_up, b_down;              // (E, 2I), (E, C), of a dense MLP (2I), (C)
  Tensor attn_post_norm, mlp_post_norm;  // (C), with NormSpec::post
  Tensor q_norm, k_norm;                 // (D), with DecoderSpec::qk_norm
};
struct DecoderWeights {
  WeightMatrix embed, head;  // (V, C); tied: the same memory
  Tensor norm;               // (C)
  std::vector<DecoderLayer> layers;
  Arena arena;  // owns all memory outside an archive's mapping
  std::shared_ptr<const void> mapping;
  int64_t mapped_bytes = 0;
  int64_t bytes() const { return arena.used() + mapped_bytes; }
};

}  // namespace ingot
