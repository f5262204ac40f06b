#include "ingot/models/gpt/block/block.h"

#include "ingot/kernels/lane_write/lane_write.h"
#include "ingot/kernels/scaled_add/scaled_add.h"
#include "ingot/models/gpt/block/block_attention.h"
#include "ingot/models/gpt/block/block_cut.h"
#include "ingot/models/gpt/block/block_mlp.h"
#include "ingot/models/gpt/block/block_stream.h"

namespace ingot::detail {
namespace {

// The order of a layer call's parts, and their writes to the residual stream.
class Block {
 public:
  Block(const CallContext& call, const BlockTensors& b) : at_(call, b) {}
  Block(const Block&) = delete;  // the parts hold references to the view

  void forward() {
    if (at_.b.scored != nullptr) return forward_cut();
    at_.each_block([&] {
      stream_.merge_skip();
      stream_.read_input();
      at_.show(MatrixInput::attention, at_.normed());
      attn_.project_all();
      attn_.rotate();
    });
    attn_.attend();
    at_.each_block([&] { write(); });
  }

  void backward(const BlockGradients& g) {
    if (at_.b.scored != nullptr) return backward_cut(g);
    at_.of_block = true;
    at_.each_block([&] {
      if (!at_.kept()) {
        stream_.merge_skip();
        stream_.mix_input();
        attn_.attention_output_again();
      }
      if (at_.layer_call.lanes)
        write_lanes_backward(g);
      else
        residual_backward(g);
      attn_.attention_output_backward(at_.b.scaled != nullptr ? at_.channels(g.g0) : at_.branch_grad());
    });
    if (!at_.kept()) attn_.rotate();
    attn_.attend_backward();
    at_.each_block([&] {
      if (at_.blocks() > 1) {  // with a single block of tokens the rows from before attention are still in memory
        stream_.merge_skip();
        stream_.mix_input();
      }
      attn_.projections_backward(g.of_input);
      if (g.of_input) stream_.read_backward(g);
    });
  }

  // --- the last layer call, if only some tokens are scored: all tokens have keys and values ---
  void forward_cut() {
    stream_.merge_skip();
    stream_.read_input();
    attn_.project_keys();
    attn_.rotate_keys();
    const ScoredRows& r = *at_.b.scored;
    const ScoredTokens scored{at_};
    scored.gather(at_.merged(), r.merged);
    if (at_.config.resid_mix) scored.gather(at_.mixed(), r.mixed);
    if (at_.layer_call.lanes) scored.gather(at_.lane1(), r.lane1);
    scored.gather(at_.normed(), r.normed);
    scored.gather(at_.kv_rows(at_.b.saved.v), r.v);
    const PackedLayerCall part(at_);
    Block p(part.call, part.b);
    p.attn_.project_queries();
    p.attn_.rotate_queries();
    attention(p.at_.attention_to(all_keys(), p.at_.lse()), at_.call.stream);
    p.write();
  }
  // The keys and values visible to the queries of the scored tokens.
  BlockView::Seen all_keys() const {
    return {.k = at_.k(), .v = at_.v(), .cu_q = at_.call.scored_cu_seqlens, .cu_k = at_.call.cu_seqlens};
  }
  void backward_cut(const BlockGradients& g) {
    const Scratch& s = at_.b.scratch;
    const ScoredRows& r = *at_.b.scored;
    const ScoredTokens scored{at_};
    at_.of_block = true;
    const PackedLayerCall part(at_);
    Block p(part.call, part.b);
    if (at_.layer_call.lanes)
      p.write_lanes_backward(g);
    else
      p.residual_backward(g);
    p.attn_.attention_output_backward(p.at_.branch_grad());
    AttentionBackward a =
        p.at_.attention_backward_to(all_keys(), p.at_.lse(), at_.kv_heads(s.k_grad), at_.kv_heads(s.v_grad));
    a.has_delta = bool(p.at_.delta());
    attention_backward(a, at_.call.stream);
    if (at_.layer_call.exclude_self) scored.add_scattered(r.v_grad, at_.kv_rows(s.v_grad));
    p.attn_.rotate_queries_backward();
    attn_.rotate_keys_backward();
    attn_.keys_backward(false);
    p.attn_.queries_backward();
    scored.add_scattered(r.normed_grad, at_.normed_grad());
    scored.spread(g.g0);
    if (at_.layer_call.lanes) scored.spread(g.g1);
    stream_.read_backward(g);
  }

 private:
  // Writes the branches' outputs to the residual stream, from attention on.
  void write() const {
    attn_.attention_output();
    if (at_.layer_call.lanes) {
      stream_.norm(at_.lane1(), at_.b.w.mlp_norm, at_.normed_mlp(), at_.rstd_mlp());
      mlp_.forward();
      write_lanes();
    } else if (at_.b.scaled != nullptr) {
      stream_.norm(at_.mid(), at_.b.w.mlp_norm, at_.normed_mlp(), at_.rstd_mlp());
      mlp_.forward();
    } else {
      residual_norm({.x = at_.mixed(),
                     .branch = at_.attn_out(),
                     .scale = at_.b.w.attn_scale,
                     .sum = at_.mid(),
                     .w = at_.b.w.mlp_norm,
                     .y = at_.normed_mlp(),
                     .rstd = at_.rstd_mlp(),
                     .eps = at_.config.norm_eps,
                     .norm_scale = at_.layer_scale()},
                    at_.call.stream);
      mlp_.forward();
      scaled_add({.x = at_.mid(), .branch = at_.mlp_out(), .scale = at_.b.w.mlp_scale, .y = at_.channels(at_.b.out0)},
                 at_.call.stream);
    }
  }

  // --- writes of the residual stream: both leave the gradient of attn_out in scratch.branch_grad; with folded scales
  // g0 is the gradient of mid ---
  void residual_backward(const BlockGradients& g) const {
    const Tensor g0 = at_.channels(g.g0);
    if (at_.b.scaled != nullptr) {
      mlp_.backward(at_.mid(), g0);
      residual_norm_backward(stream_.norm_gradient(at_.mid(), at_.b.w.mlp_norm, at_.b.dw.mlp_norm, at_.rstd_mlp(), g0),
                             at_.call.stream);
      return;
    }
    if (!at_.kept())
      scaled_add({.x = at_.mixed(), .branch = at_.attn_out(), .scale = at_.b.w.attn_scale, .y = at_.mid()},
                 at_.call.stream);
    scaled_add_backward({.dy = g0,
                         .branch = at_.mlp_out(),
                         .scale = at_.b.w.mlp_scale,
                         .dbranch = at_.branch_grad(),
                         .dscale = at_.b.dw.mlp_scale,
                         .workspace = at_.b.scratch.residual_workspace},
                        at_.call.stream);
    mlp_.backward(at_.mid(), at_.branch_grad());
    ResidualNormBackward r = stream_.norm_gradient(at_.mid(), at_.b.w.mlp_norm, at_.b.dw.mlp_norm, at_.rstd_mlp(), g0);
    r.branch = at_.attn_out(), r.scale = at_.b.w.attn_scale;
    r.dbranch = at_.branch_grad(), r.dscale = at_.b.dw.attn_scale;
    residual_norm_backward(r, at_.call.stream);
  }
  void write_lanes() const {
    lane_write({.lane0 = at_.merged(),
                .lane1 = at_.lane1(),
                .a = at_.attn_out(),
                .b = at_.mlp_out(),
                .scale_a = at_.b.w.attn_scale,
                .scale_b = at_.b.w.mlp_scale,
                .r = at_.b.w.lane_resid,
                .p = at_.b.w.lane_post,
                .out0 = at_.channels(at_.b.out0),
                .out1 = at_.channels(at_.b.out1)},
               at_.call.stream);
  }
  void write_lanes_backward(const BlockGradients& g) const {
    const Tensor g0 = at_.channels(g.g0), g1 = at_.channels(g.g1), db = at_.mid();  // a lane block has no mid row
    lane_write_backward({.lane0 = at_.merged(),
                         .lane1 = at_.lane1(),
                         .a = at_.attn_out(),
                         .b = at_.mlp_out(),
                         .scale_a = at_.b.w.attn_scale,
                         .scale_b = at_.b.w.mlp_scale,
                         .r = at_.b.w.lane_resid,
                         .p = at_.b.w.lane_post,
                         .dout0 = g0,
                         .dout1 = g1,
                         .dlane0 = g0,
                         .dlane1 = g1,
                         .da = at_.branch_grad(),
                         .db = db,
                         .dscale_a = at_.b.dw.attn_scale,
                         .dscale_b = at_.b.dw.mlp_scale,
                         .dr = at_.b.dw.lane_resid,
                         .dp = at_.b.dw.lane_post,
                         .workspace = at_.b.scratch.residual_workspace},
                        at_.call.stream);
    mlp_.backward(at_.lane1(), db);
    stream_.norm_backward(at_.lane1(), at_.b.w.mlp_norm, at_.b.dw.mlp_norm, at_.rstd_mlp(), g1, g1);
  }

  BlockView at_;
  const ResidualStream stream_{at_};
  const AttentionBranch attn_{at_};
  const MlpBranch mlp_{at_};
};

}  // namespace

void block_forward(const CallContext& call, const BlockTensors& b) { Block(call, b).forward(); }
void block_backward(const CallContext& call, const BlockTensors& b, const BlockGradients& g) {
  Block(call, b).backward(g);
}

}  // namespace ingot::detail
