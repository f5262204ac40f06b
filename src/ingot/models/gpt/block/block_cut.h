#pragma once
// The last layer call of a program where only some tokens are scored: the rows of these tokens, as views among all
// tokens and as packed rows.
#include "ingot/models/gpt/block/block_view.h"
#include "ingot/models/gpt/block/segments.h"

namespace ingot::detail {

// The same layer call over the packed rows of the scored tokens.
struct PackedLayerCall {
  explicit PackedLayerCall(const BlockView& whole) : layer_call(whole.layer_call), call(whole.call), b(whole.b) {
    const ScoredRows& r = *whole.b.scored;
    layer_call.skip_slot = -1, layer_call.enters_lanes = false;  // the input is already merged
    call.tokens = call.block_rows = call.scored();
    call.cu = call.scored_cu;
    call.positions = call.scored_positions, call.cu_seqlens = call.scored_cu_seqlens;
    b.layer_call = &layer_call;
    b.scored = nullptr;
    b.in0 = r.merged, b.in1 = r.lane1;
    b.saved.v = rows(r.v), b.saved.qkv = b.saved.kv = {};
    b.scratch.mixed = r.mixed, b.scratch.normed = r.normed, b.scratch.normed_grad = r.normed_grad;
    b.scratch.v_grad = b.scratch.v_grad_self = rows(r.v_grad);
  }
  PackedLayerCall(const PackedLayerCall&) = delete;
  Tensor rows(const Tensor& t) const { return t ? t.slice(0, 0, call.tokens) : t; }
  LayerCall layer_call;
  CallContext call;
  BlockTensors b;
};

struct ScoredTokens {
  const BlockView& at;

  Tensor packed(const Tensor& t, int64_t cols) const;
  void gather(const Tensor& from, const Tensor& to) const;
  void scatter(const Tensor& from, const Tensor& to) const;
  void add_scattered(const Tensor& from, const Tensor& to) const;
  // Expands the rows of the scored tokens to rows of all tokens, with zeros for the rest.
  void spread(const Tensor& g) const;

 private:
  template <class Use> void each_run(Use&& use) const {
    for_each_run(at.call.cu, at.call.scored_cu, [&](const SegmentRun& run) {
      if (run.scored > 0) use(run);
    });
  }
};

}  // namespace ingot::detail
