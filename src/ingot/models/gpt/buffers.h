#pragma once
// The memory of one bound model: which activations exist, from which step to which, planned into one arena.
//
// Steps: 0 embedding, 1 + i the forward of application i, A + 1 the head, three for the backward of each application,
// the last one first (up to attention, attention, from there to the block's input), then the embedding's backward. A
// buffer that only one step uses is scratch and shares memory with every other step's.
#include <vector>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/memory/arena.h"
#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/config/program.h"

namespace ingot::detail {

// Kept from the forward of an application to its backward. Everything that is a cheap function of these (the mixed
// read, the normed inputs, rotated q and k, attention's output projection, the activated hidden layer) is computed
// again instead of stored, but for GptOptions::keep_rows. Where the slope of the activation follows from its value and
// a sign, a GPU keeps these instead of what was activated.
struct Saved {
  Tensor rstd_attn, rstd_mlp;  // (T)
  Tensor q_raw, k_raw, v;      // (T, H D), (T, Hkv D), before norm, rotation and gain
  Tensor qkv, kv;  // (T, (H + 2 Hkv) D) and columns that an adapter needs: these are parts of it on a GPU, and of kv
  Tensor y, lse;   // (T, H D) attention before XSA, (H, T)
  Tensor mlp_out;  // (T, C) the branch before its scale
  Tensor pre;      // (T, hidden) before the activation
  Tensor hidden, signs;  // or after it, and whether it was positive before
};

struct Scratch {
  Tensor merged, mixed;  // (T, C) after the skip, after the mix; backward: of one block
  Tensor q, k;           // (T, H D), (T, Hkv D) rotated
  Tensor q_grad, k_grad, v_grad, v_grad_self, y_grad;
  Tensor qkv_grad, kv_grad;       // of which these are parts on a GPU, as of Saved
  Tensor all_k_grad, all_v_grad;  // of one segment's keys, cached ones included
  // Of one block of tokens.
  Tensor normed, normed_mlp, mid;            // norm(...) of the two branches, x + attention branch
  Tensor z, z_grad;                          // attention after XSA
  Tensor attn_out;                           // the branch before its scale
  Tensor hidden;                             // activated
  Tensor branch_grad, normed_grad, in_grad;  // backward only
  Tensor hidden_grad;
  Tensor norm_workspace, rope_workspace, attention_workspace, residual_workspace, folded;
  Tensor folded_kept;                    // the forward pass's `folded`
  Tensor adapter_low, adapter_low_grad;  // (T, R)
  Tensor o_low, mlp_low;                 // what these adapters' first matrices gave, where rows are kept
  Tensor o_low_grad;                     // part of qkv_grad, as o_low is of qkv; where documents' weights are formed
  bool kept = false;                     // of a backward pass: the rows that the forward pass formed are still there
};

// Of the last application, rows of the tokens that are scored: what it read, attention's values, and gradients.
struct ScoredRows {
  Tensor merged, mixed, lane1, normed;  // (N, C)
  Tensor v, v_grad;                     // (N, Hkv D)
  Tensor normed_grad, spare;            // (N, C), (N, max(C, Hkv D))
};

struct Buffers {
  Arena arena;
  Tensor linear_workspace;       // in every step
  std::vector<Tensor> in0, in1;  // [A + 1] inputs of each application; in0[A] leaves the last one. in1: second lane
  std::vector<Saved> saved;      // [A]
  std::vector<Scratch> forward, backward;  // [A]
  std::vector<Tensor> skip_grad;           // [A + 1]: gradient that reaches in0[i] through a skip
  // Embedding and head.
  Tensor embedded, embed_low;                      // before embed_norm; factorised: (T, E)
  Tensor final, final_rstd, head_in, head_normed;  // combined lanes; norm; factorised: (T, E)
  ScoredRows scored_rows;                          // empty where the last application is not cut
  Tensor scored, scored_grad;                      // rows that are scored, where not all are
  Tensor head_in_grad, head_normed_grad, head_workspace, head_low, head_low_grad, loss_rows;
  Tensor g0, g1, x0_grad;  // gradients of the two lanes and of x0
  Tensor embedded_again, embed_low_again, embed_low_grad, embed_workspace;
};

// What is done to each token by itself runs over blocks of so many: what one op writes, the next one finds in cache (a
// golf step takes some 6 % less CPU time on Zen 3), and scratch memory is that of a block. Weights are packed once per
// block, which shows only where products run by tiles of bf16: there all tokens are one block. So they are on a GPU,
// which would launch every op as often. Adapters cut tokens into documents.
inline int64_t most_block_rows(int64_t capacity, const GptOptions& options) {
  constexpr int64_t kRows = 1024;
  const bool tiles = options.products == Products::bf16 && cpu_level() >= CpuLevel::avx512_amx;
  const bool one = options.device.kind != Device::cpu || tiles || options.max_adapter_rank > 0 || capacity < kRows;
  return one ? capacity : kRows;
}

// What plan_buffers takes of memory.
int64_t planned_bytes(const GptConfig& config, const LayerProgram& program, const GptTypes& types,
                      const GptOptions& options);
Buffers plan_buffers(const GptConfig& config, const LayerProgram& program, const GptTypes& types,
                     const GptOptions& options);

}  // namespace ingot::detail
