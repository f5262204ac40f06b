#pragma once
// The norms of a pass, and the sums that they add to the residual stream.
#include "ingot/models/decode/draft_head/head_launches.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/prompt/prompt_norm.cuh"
#include "ingot/models/decode/prompt/prompt_pass.cuh"

namespace ingot::decode::prompts {

struct PassNorms : PromptPass {
  void norm(const Norm& n) const { launch("prompt norm", norm_kernel, p.T, n); }
  // The norm n, which first adds the experts' results to x.
  Norm with_experts(Norm n) const {
    n.down = b.down, n.place = b.place, n.weights = b.weights, n.k = uint32_t(c.experts_per_token);
    return n;
  }
  // The norm n, which first adds the two halves of output's sums to x.
  Norm with_halves(Norm n) const {
    n.down = b.down, n.place = b.half_rows, n.weights = b.half_weights, n.k = 2;
    return n;
  }
  // Over several GPUs: x += all parts of layer i's output or down, then y = norm(x).
  void norm_of_sum(const float* weight, bool down, size_t i) const {
    RankNorm n{.norm = norm_of(weight),
               .ranks = ranks,
               .part = {},
               .from = down ? ranks.channels : ranks.heads,
               .what = grid_barrier_of(uint32_t(i), down)};
    std::copy_n(b.parts[down], megakernel::kMostRanks, n.part);
    gpu::launch("prompt part", say_ready_kernel, {.grid = 1, .block = 32, .overlap = true, .device = p.device}, stream,
                ranks.exchange);
    launch("prompt sums and norm", rank_norm_kernel, p.T, n);
  }
  void norm_after_output(const Layer& l, size_t i) const {
    if (ranks.several()) return norm_of_sum(l.mlp_norm, false, i);
    add_branch(0, l.attn_post_norm);
    norm(output_in_halves ? with_halves(norm_of(l.mlp_norm)) : norm_of(l.mlp_norm));
  }
  // `weight` is null where the residual stream is needed alone.
  void norm_after_mlp(const Layer& l, const float* weight, size_t i) const {
    if (ranks.several()) return norm_of_sum(weight, true, i);
    add_branch(1, l.mlp_post_norm);
    if (l.experts && !c.norm.post) return norm(with_experts(norm_of(weight)));
    if (weight != nullptr) norm(norm_of(weight));
  }
  // x += the norm of the results of output (0) or down (1), where the model has such norms.
  void add_branch(int which, const float* weight) const {
    if (c.norm.post)
      add_normed_branch({b.x, b.part[which], stride, weight, uint32_t(p.T), uint32_t(c.hidden), float(c.norm.eps)},
                        stream);
  }
  // The first layer's input, and its norm.
  void embed(const float* weight) const {
    Norm first = norm_of(weight);
    if (c.embedding_scale == 1)
      first.table = m.embed, first.ids = b.ids;
    else
      launch("prompt embedding", embed_rows_kernel, p.T,
             ScaledRows{m.embed, b.ids, b.x, stride, uint32_t(c.hidden), float(c.embedding_scale)});
    norm(first);
  }
  // Keeps the residual stream after `layers` layers for the draft head, if there is one.
  void keep(size_t layers) const {
    if (p.states != nullptr)
      keep_states(*p.states, uint32_t(layers), b.x, stride, uint32_t(p.T), uint32_t(c.hidden), stream);
  }
  // Where adds_later(): the sum of the experts' results, which a later kernel adds to the residual stream.
  void sum_experts() const {
    Norm part = with_experts(norm_of(nullptr));
    part.x = b.part[1], part.first_part = true;
    norm(part);
  }
  // The norm of the last row of each part of a prompt.
  void norm_of_ends(int64_t rows) const {
    Norm n = norm_of(m.norm);
    n.rows = p.sequences->input->row;
    launch("prompt ends", norm_kernel, rows, n);
  }
};

}  // namespace ingot::decode::prompts
