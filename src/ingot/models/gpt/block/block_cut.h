#pragma once
// The last application of a program where only some tokens are scored: their rows as views among all tokens, and as
// packed rows.
#include "ingot/models/gpt/block/block_view.h"
#include "ingot/models/gpt/block/segments.h"

namespace ingot::detail {

// The same application over the packed rows of the scored tokens.
struct PackedApplication {
  explicit PackedApplication(const BlockView& whole) : application(whole.application), call(whole.call), b(whole.b) {
    const ScoredRows& r = *whole.b.scored;
    application.skip_slot = -1, application.enters_lanes = false;  // the input is a merged one
    call.tokens = call.block_rows = call.scored();
    call.cu = call.scored_cu;
    call.positions = call.scored_positions, call.cu_seqlens = call.scored_cu_seqlens;
    b.application = &application;
    b.scored = nullptr;
    b.in0 = r.merged, b.in1 = r.lane1;
    b.saved.v = rows(r.v), b.saved.qkv = b.saved.kv = {};
    b.scratch.mixed = r.mixed, b.scratch.normed = r.normed, b.scratch.normed_grad = r.normed_grad;
    b.scratch.v_grad = b.scratch.v_grad_self = rows(r.v_grad);
  }
  PackedApplication(const PackedApplication&) = delete;
  Tensor rows(const Tensor& t) const { return t ? t.slice(0, 0, call.tokens) : t; }
  Application application;
  CallContext call;
  BlockTensors b;
};

struct ScoredTokens {
  const BlockView& at;

  Tensor packed(const Tensor& t, int64_t cols) const;
  void gather(const Tensor& from, const Tensor& to) const;
  void scatter(const Tensor& from, const Tensor& to) const;
  void add_scattered(const Tensor& from, const Tensor& to) const;
  // Expands the rows of the scored tokens to rows of all tokens, with zeros for the others.
  void spread(const Tensor& g) const;

 private:
  template <class Use> void each_run(Use&& use) const {
    for_each_run(at.call.cu, at.call.scored_cu, [&](const SegmentRun& run) {
      if (run.scored > 0) use(run);
    });
  }
};

}  // namespace ingot::detail
