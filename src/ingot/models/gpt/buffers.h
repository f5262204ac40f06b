#pragma once
// The memory of one bound model: which activations exist, from which step to which, planned into one arena.
//
// Steps: 0 embedding, 1 + i the forward of application i, A + 1 the head, A + 2 + (A - 1 - i) the backward of
// application i, 2A + 2 the embedding's backward. A buffer that only one step uses is scratch and shares memory with
// every other step's.
#include <vector>

#include "ingot/core/arena.h"
#include "ingot/models/gpt/gpt.h"

namespace ingot::detail {

// Kept from the forward of an application to its backward. Everything that is a cheap function of these (the mixed
// read, the normed inputs, rotated q and k, the activated hidden layer) is computed again instead of stored.
struct Saved {
  Tensor rstd_attn, rstd_mlp;  // (T)
  Tensor q_raw, k_raw, v;      // (T, H D), (T, Hkv D), before norm, rotation and gain
  Tensor y, lse;               // (T, H D) attention before XSA, (H, T)
  Tensor attn_out, mlp_out;    // (T, C) the branches before their scale
  Tensor pre;                  // (T, hidden) before the activation
};

struct Scratch {
  // Rows of C channels.
  Tensor merged, mixed, normed, mid;         // after the skip, after the mix, norm(...), x + attention branch
  Tensor branch_grad, normed_grad, in_grad;  // backward only
  Tensor q, k, z;                            // rotated q and k, attention after XSA
  Tensor hidden;                             // (a block of tokens, hidden) activated
  Tensor q_grad, k_grad, v_grad, v_grad_self, y_grad, z_grad;
  Tensor hidden_grad;  // as hidden
  Tensor norm_workspace, adapter_low, adapter_low_grad;
};

struct Buffers {
  Arena arena;
  std::vector<Tensor> in0, in1;  // [A + 1] inputs of each application; in0[A] leaves the last one. in1: second lane
  std::vector<Saved> saved;      // [A]
  std::vector<Scratch> forward, backward;  // [A]
  std::vector<Tensor> skip_grad;           // [A + 1]: gradient that reaches in0[i] through a skip
  // Embedding and head.
  Tensor embedded, embed_low;                      // before embed_norm; factorised: (T, E)
  Tensor final, final_rstd, head_in, head_normed;  // combined lanes; norm; factorised: (T, E)
  Tensor head_in_grad, head_normed_grad, head_workspace, head_low, head_low_grad, loss_rows;
  Tensor g0, g1, x0_grad;  // gradients of the two lanes and of x0
  Tensor embedded_again, embed_low_again, embed_low_grad, embed_workspace;
};

// Tokens whose hidden layer exists at one time. A megabyte or four of it stays in the last-level cache between the
// products that write and read it (a golf step takes 6 % less on Zen 3), and weights are packed often enough to notice
// only where products are of bf16: there all tokens go together.
struct MlpBlocks {
  int64_t tokens, rows;  // rows: of a block, the last may have fewer
  MlpBlocks(int64_t all, Products products) : tokens(all) {
    const int64_t most = most_rows(all, products), blocks = most > 0 ? (all + most - 1) / most : 1;
    rows = (all + blocks - 1) / blocks;
  }
  template <class Body> void each(Body&& body) const {
    for (int64_t at = 0; at < tokens; at += rows) body(at, at + rows < tokens ? at + rows : tokens);
  }
  static int64_t most_rows(int64_t all, Products products) {
    return products == Products::bf16 || all < 1024 ? all : 1024;
  }
};

Buffers plan_buffers(const GptConfig& config, const LayerProgram& program, DType dtype, const GptOptions& options);

}  // namespace ingot::detail
