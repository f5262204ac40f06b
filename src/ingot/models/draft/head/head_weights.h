#pragma once
// The tensors of an EAGLE-3 draft head in memory.
#include "ingot/models/decoder_weights.h"
#include "ingot/models/draft/head/head_config.h"

namespace ingot::draft {

// Letters: C hidden size, n boundaries, Q and KV widths of queries and keys, I hidden width of the MLP, V vocabulary of
// the target, D of the head. Vectors are f32; matrices in f32 stay f32, all further matrices become bf16. With
// HeadOptions::format all matrices but `embed` have this format.
struct HeadWeights {
  WeightMatrix fc;                 // (C, n C)
  Tensor fc_norm;                  // (n C), with norm_before_fc or fc_norm
  Tensor embed_norm, hidden_norm;  // (C): of the token's embedding and of the features
  Tensor mlp_norm, norm;           // (C)
  WeightMatrix qkv, o;             // (Q + 2 KV, 2 C): rows of q, then k, then v; (C, Q)
  WeightMatrix gate_up, down;      // (2I, C), rows of gate and up alternate; (C, I)
  WeightMatrix embed, head;        // (V, C), (D, C); left out where the target's are used
  std::vector<int32_t> ids;        // of the target, by id of the head; empty: the same ids
  Arena arena, converted;          // own all tensors; `converted` those of HeadOptions::format
};

// The configuration of a head and its weights. A head without an embedding or an output matrix of its own uses those of
// the target model, which the engine has.
struct DraftHead {
  HeadConfig config;
  HeadWeights weights;
};
// Reads the directory of a head. Every tensor must be present with its shape, and no tensor may be unused: all problems
// of the configuration, or all missing tensors, are in one Error{bad_data}. Error{unsupported} for a format that does
// not divide the rows of a matrix.
DraftHead load_draft_head(const std::string& path, const DecoderSpec& target, int64_t target_layers,
                          const HeadOptions& options = {});

}  // namespace ingot::draft
