#pragma once
// The memory of a bound model: its activations and their lifetimes in steps, planned into a single arena.
//
// Steps: 0 embedding, 1 + i the forward of layer call i, A + 1 the head, three for the backward of each layer call, the
// last layer call first (up to attention, attention, from attention to the block's input), then the embedding's
// backward. A buffer used by a single step is scratch; the scratch of all steps shares memory.
#include <vector>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/memory/arena.h"
#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/config/program.h"

namespace ingot::detail {

// The tensors kept from the forward of a layer call to its backward. Cheap functions of these tensors (the mixed read,
// the normed inputs, rotated q and k, attention's output projection, the activated hidden layer) are computed again
// instead of stored, except with GptOptions::keep_rows. If the slope of the activation follows from its value and a
// sign, a GPU keeps value and sign instead of the argument.
struct Saved {
  Tensor rstd_attn, rstd_mlp;  // (T)
  Tensor q_raw, k_raw, v;      // (T, H D), (T, Hkv D), before norm, rotation and gain
  Tensor qkv, kv;  // (T, (H + 2 Hkv) D) and columns for an adapter; on a GPU q_raw, k_raw and v are parts of qkv, and
                   // k_raw and v of kv
  Tensor y, lse;   // (T, H D) attention before XSA, (H, T)
  Tensor mlp_out;  // (T, C) the branch before its scale
  Tensor pre;      // (T, hidden) before the activation
  Tensor hidden, signs;  // or: after the activation, and whether the argument was positive
};

struct Scratch {
  Tensor merged, mixed;  // (T, C) after the skip, after the mix; backward: of a block
  Tensor q, k;           // (T, H D), (T, Hkv D) rotated
  Tensor q_grad, k_grad, v_grad, v_grad_self, y_grad;
  Tensor qkv_grad, kv_grad;       // on a GPU the gradients of q, k and v are parts of these, as in Saved
  Tensor all_k_grad, all_v_grad;  // of a segment's keys, including cached keys
  // For one block of tokens at a time.
  Tensor normed, normed_mlp, mid;            // norm(...) of the two branches, x + attention branch
  Tensor z, z_grad;                          // attention after XSA
  Tensor attn_out;                           // the branch before its scale
  Tensor hidden;                             // activated
  Tensor branch_grad, normed_grad, in_grad;  // backward only
  Tensor hidden_grad;
  Tensor norm_workspace, rope_workspace, attention_workspace, residual_workspace, folded;
  Tensor folded_kept;                    // the forward pass's `folded`
  Tensor adapter_low, adapter_low_grad;  // (T, R)
  Tensor o_low, mlp_low;                 // the first products of these adapters, if rows are kept
  Tensor o_low_grad;  // a part of qkv_grad, as o_low is of qkv, if the documents have weights of their own
  bool kept = false;  // in a backward pass: the rows of the forward pass are still there
};

// For the last layer call, the rows of the scored tokens: its inputs, attention's values, and gradients.
struct ScoredRows {
  Tensor merged, mixed, lane1, normed;  // (N, C)
  Tensor v, v_grad;                     // (N, Hkv D)
  Tensor normed_grad, spare;            // (N, C), (N, max(C, Hkv D))
};

// A layer's output matrices times the scales of its branches, (C, H D) and (C, hidden), so that the products add the
// scaled branches to the residual stream, and the gradients of these matrices. From the gradients follow those of the
// matrices and of the scales: a branch itself is neither written nor read.
struct ScaledMatrices {
  Tensor o, down;            // in the type of products
  Tensor o_grad, down_grad;  // in the type of the master weights
};

struct Buffers {
  Arena arena;
  Tensor linear_workspace;      // in every step
  Tensor scaled, scaled_grads;  // all layers' ScaledMatrices, one after another; empty where scales are not folded
  std::vector<ScaledMatrices> scaled_of;  // [layers]
  std::vector<Tensor> in0,
      in1;  // [A + 1] inputs of each layer call; in0[A] is the output of the last call. in1: second lane
  std::vector<Saved> saved;                // [A]
  std::vector<Scratch> forward, backward;  // [A]
  std::vector<Tensor> skip_grad;           // [A + 1]: gradient of in0[i] through a skip
  // Embedding and head.
  Tensor embedded, embed_low;                      // before embed_norm; factorised: (T, E)
  Tensor final, final_rstd, head_in, head_normed;  // combined lanes; norm; factorised: (T, E)
  ScoredRows scored_rows;                          // empty unless the last layer call has rows only for scored tokens
  Tensor scored, scored_grad;                      // the scored rows, unless all rows are scored
  Tensor head_in_grad, head_normed_grad, head_workspace, head_low, head_low_grad, loss_rows;
  Tensor g0, g1, x0_grad;  // gradients of the two lanes and of x0
  Tensor embedded_again, embed_low_again, embed_low_grad, embed_workspace;
};

// Operations on each token alone run over blocks of this many tokens: the output of an op is still in the cache for the
// next op (a golf step takes about 6 % less CPU time on Zen 3), and scratch memory holds a single block. Weights are
// packed once per block, which is too slow only for products by bf16 tiles; with such products all tokens form a single
// block. On a GPU all tokens also form a single block, because every block would launch every op again. With adapters
// each document is a block.
inline int64_t most_block_rows(int64_t capacity, const GptOptions& options) {
  constexpr int64_t kRows = 1024;
  const bool tiles = options.products == Products::bf16 && cpu_level() >= CpuLevel::avx512_amx;
  const bool one = options.device.kind != Device::cpu || tiles || options.max_adapter_rank > 0 || capacity < kRows;
  return one ? capacity : kRows;
}

// The memory for plan_buffers.
int64_t planned_bytes(const GptConfig& config, const LayerProgram& program, const GptTypes& types,
                      const GptOptions& options);
Buffers plan_buffers(const GptConfig& config, const LayerProgram& program, const GptTypes& types,
                     const GptOptions& options);

}  // namespace ingot::detail
