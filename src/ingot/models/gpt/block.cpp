#include "ingot/models/gpt/block.h"

#include <algorithm>
#include <cmath>

#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/lane_write/lane_write.h"
#include "ingot/kernels/mix/mix.h"
#include "ingot/kernels/residual_norm/residual_norm.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/scaled_add/scaled_add.h"
#include "ingot/kernels/skip_merge/skip_merge.h"
#include "ingot/models/gpt/adapter.h"
#include "ingot/models/gpt/segments.h"

namespace ingot::detail {
namespace {

class Block {
 public:
  Block(const CallContext& call, const BlockTensors& b)
      : call_(call), c_(call.config), b_(b), a_(*b.application), end_(call.tokens) {}

  void forward() {
    if (b_.scored != nullptr) return forward_cut();
    each_block([&] {
      merge_skip();
      read_input();
      show(MatrixInput::attention, normed());
      project_queries();
      project_keys();
      rotate();
    });
    attend();
    each_block([&] { write(); });
  }

  void backward(const BlockGradients& g) {
    if (b_.scored != nullptr) return backward_cut(g);
    of_block_ = true;
    each_block([&] {
      if (!kept()) {
        merge_skip();
        mix_input();
        attention_output_again();
      }
      if (a_.lanes)
        write_lanes_backward(g);
      else
        residual_backward(g);
      attention_output_backward();
    });
    if (!kept()) rotate();
    attend_backward();
    each_block([&] {
      if (blocks() > 1) {  // else they are those from before attention
        merge_skip();
        mix_input();
      }
      projections_backward();
      read_backward(g);
    });
  }

  // --- the last application, where only some tokens are scored: all of them have keys and values ---
  void forward_cut() {
    merge_skip();
    read_input();
    project_keys();
    rotate_keys();
    const ScoredRows& r = *b_.scored;
    gather(merged(), r.merged);
    if (c_.resid_mix) gather(mixed(), r.mixed);
    if (a_.lanes) gather(lane1(), r.lane1);
    gather(normed(), r.normed);
    gather(kv_rows(b_.saved.v), r.v);
    const Scored part(*this);
    Block p(part.call, part.b);
    p.project_queries();
    p.rotate_queries();
    attention({.q = p.q(),
               .k = k(),
               .v = v(),
               .cu_q = call_.scored_cu_seqlens,
               .cu_k = call_.cu_seqlens,
               .out = p.q_heads(b_.saved.y),
               .lse = p.lse(),
               .scale = softmax_scale(),
               .window = c_.window},
              call_.stream);
    p.write();
  }
  void backward_cut(const BlockGradients& g) {
    const Scratch& s = b_.scratch;
    const ScoredRows& r = *b_.scored;
    of_block_ = true;
    const Scored part(*this);
    Block p(part.call, part.b);
    if (a_.lanes)
      p.write_lanes_backward(g);
    else
      p.residual_backward(g);
    p.attention_output_backward();
    attention_backward({.q = p.q(),
                        .k = k(),
                        .v = v(),
                        .cu_q = call_.scored_cu_seqlens,
                        .cu_k = call_.cu_seqlens,
                        .out = p.q_heads(b_.saved.y),
                        .lse = p.lse(),
                        .dout = p.q_heads(s.y_grad),
                        .dq = p.q_heads(s.q_grad),
                        .dk = kv_heads(s.k_grad),
                        .dv = kv_heads(s.v_grad),
                        .has_delta = bool(p.delta()),
                        .scale = softmax_scale(),
                        .window = c_.window,
                        .workspace = s.attention_workspace},
                       call_.stream);
    if (a_.exclude_self) add_scattered(r.v_grad, kv_rows(s.v_grad));
    p.rotate_queries_backward();
    rotate_keys_backward();
    keys_backward(false);
    p.queries_backward();
    add_scattered(r.normed_grad, normed_grad());
    spread(g.g0);
    if (a_.lanes) spread(g.g1);
    read_backward(g);
  }

 private:
  // The same application as one of the scored tokens' rows, which stand packed.
  struct Scored {
    explicit Scored(const Block& whole) : application(whole.a_), call(whole.call_), b(whole.b_) {
      const ScoredRows& r = *whole.b_.scored;
      application.skip_slot = -1, application.enters_lanes = false;  // what was read is merged
      call.tokens = call.block_rows = call.scored();
      call.cu = call.scored_cu;
      call.positions = call.scored_positions, call.cu_seqlens = call.scored_cu_seqlens;
      b.application = &application;
      b.scored = nullptr;
      b.in0 = r.merged, b.in1 = r.lane1;
      b.saved.v = rows(r.v), b.saved.kv = {};
      b.scratch.mixed = r.mixed, b.scratch.normed = r.normed, b.scratch.normed_grad = r.normed_grad;
      b.scratch.v_grad = b.scratch.v_grad_self = rows(r.v_grad);
    }
    Scored(const Scored&) = delete;
    Tensor rows(const Tensor& t) const { return t ? t.slice(0, 0, call.tokens) : t; }
    Application application;
    CallContext call;
    BlockTensors b;
  };
  template <class Use> void each_scored_run(Use&& use) const {
    for_each_run(call_.cu, call_.scored_cu, [&](const SegmentRun& run) {
      if (run.scored > 0) use(run);
    });
  }
  Tensor packed(const Tensor& t, int64_t cols) const { return view(t, {call_.scored(), cols}); }
  void gather(const Tensor& from, const Tensor& to) const {
    each_scored_run([&](const SegmentRun& run) {
      copy({.from = run.last_of(from), .to = run.packed_of(packed(to, from.cols()))}, call_.stream);
    });
  }
  void scatter(const Tensor& from, const Tensor& to) const {
    each_scored_run([&](const SegmentRun& run) {
      copy({.from = run.packed_of(packed(from, to.cols())), .to = run.last_of(to)}, call_.stream);
    });
  }
  void add_scattered(const Tensor& from, const Tensor& to) const {
    const Tensor sum = packed(b_.scored->spare, to.cols());
    gather(to, sum);
    axpby({.x = packed(from, to.cols()), .y = sum}, call_.stream);
    scatter(sum, to);
  }
  // Rows of the scored tokens alone become those of all, zero where there was none.
  void spread(const Tensor& g) const {
    const Tensor rows = packed(b_.scored->spare, c_.dim), all = channels(g);
    copy({.from = packed(g, c_.dim), .to = rows}, call_.stream);
    fill({.to = all}, call_.stream);
    scatter(rows, all);
  }

  bool kept() const { return b_.scratch.kept; }
  int64_t blocks() const { return std::max<int64_t>(1, (call_.tokens + call_.block_rows - 1) / call_.block_rows); }
  // Calls body() with the views below showing one block of tokens after the other; otherwise they show all.
  template <class Body> void each_block(Body&& body) {
    const int64_t rows = (call_.tokens + blocks() - 1) / blocks();
    for (begin_ = 0; begin_ < call_.tokens; begin_ = end_) {
      end_ = std::min(call_.tokens, begin_ + rows);
      body();
    }
    begin_ = 0;
    end_ = call_.tokens;
  }

  // --- views of this block's tokens ---
  Tensor shown(const Tensor& t, Shape all) const { return view(t, all).slice(0, begin_, end_); }
  Tensor channels(const Tensor& t) const { return t ? shown(t, {call_.tokens, c_.dim}) : Tensor(); }
  Tensor q_rows(const Tensor& t) const { return shown(t, {call_.tokens, c_.heads * c_.head_dim}); }
  Tensor kv_rows(const Tensor& t) const { return t.slice(0, begin_, end_); }  // half of a wider one on a GPU
  Tensor q_heads(const Tensor& t) const { return shown(t, {call_.tokens, c_.heads, c_.head_dim}); }
  Tensor kv_heads(const Tensor& t) const { return kv_rows(t).split_last(c_.kv_heads); }
  Tensor lane0() const { return channels(b_.in0); }
  Tensor lane1() const { return channels(a_.enters_lanes ? b_.in0 : b_.in1); }
  // The backward pass forms these anew before attention and after it, block by block, and the forward pass once.
  Tensor read(const Tensor& t) const { return of_block_ ? view(t, {end_ - begin_, c_.dim}) : channels(t); }
  Tensor merged() const { return a_.skip_slot < 0 ? lane0() : read(b_.scratch.merged); }
  Tensor mixed() const { return c_.resid_mix ? read(b_.scratch.mixed) : merged(); }
  Tensor mlp_out() const { return channels(b_.saved.mlp_out); }
  Tensor pre() const { return b_.saved.pre ? shown(b_.saved.pre, {call_.tokens, c_.mlp_hidden}) : Tensor(); }
  Tensor signs() const {  // where they are kept all tokens are one block
    if (!b_.saved.signs) return {};
    return view(b_.saved.signs, {linear_sign_bytes(call_.tokens, c_.mlp_hidden, call_.device)});
  }
  Tensor activated() const {
    return b_.saved.hidden ? shown(b_.saved.hidden, {call_.tokens, c_.mlp_hidden}) : hidden(b_.scratch.hidden);
  }
  Tensor rstd_attn() const { return shown(b_.saved.rstd_attn, {call_.tokens}); }
  Tensor rstd_mlp() const { return shown(b_.saved.rstd_mlp, {call_.tokens}); }
  Tensor positions() const { return call_.positions.slice(0, begin_, end_); }
  Tensor lse() const { return view(b_.saved.lse, {c_.heads, call_.tokens}); }
  Tensor cached_lse(int64_t begin, int64_t end) const {  // one segment's after the other
    return view(b_.saved.lse, {call_.tokens * c_.heads})
        .slice(0, begin * c_.heads, end * c_.heads)
        .reshape({c_.heads, end - begin});
  }
  // Memory of one block.
  Tensor normed() const { return view(b_.scratch.normed, {end_ - begin_, c_.dim}); }
  Tensor normed_mlp() const { return view(b_.scratch.normed_mlp, {end_ - begin_, c_.dim}); }
  Tensor mid() const { return view(b_.scratch.mid, {end_ - begin_, c_.dim}); }
  Tensor attn_out() const { return view(b_.scratch.attn_out, {end_ - begin_, c_.dim}); }
  Tensor branch_grad() const { return view(b_.scratch.branch_grad, {end_ - begin_, c_.dim}); }
  Tensor normed_grad() const { return view(b_.scratch.normed_grad, {end_ - begin_, c_.dim}); }
  Tensor hidden(const Tensor& t) const { return view(t, {end_ - begin_, c_.mlp_hidden}); }
  Tensor z() const { return view(b_.scratch.z, {end_ - begin_, c_.heads, c_.head_dim}); }
  Tensor z_grad() const { return view(b_.scratch.z_grad, {end_ - begin_, c_.heads, c_.head_dim}); }
  bool rotates() const { return c_.qk_norm || c_.qk_gain || c_.rotary_dim > 0; }
  double layer_scale() const { return c_.layer_scale ? 1 / std::sqrt(double(a_.layer + 1)) : 1; }
  double softmax_scale() const { return 1 / std::sqrt(double(c_.head_dim)); }

  AdapterCall adapter(AdapterPair ApplicationAdapters::*slot) const {
    AdapterCall call{.cu = call_.cu,
                     .low = b_.scratch.adapter_low,
                     .low_grad = b_.scratch.adapter_low_grad,
                     .folded = b_.scratch.folded,
                     .products = call_.products,
                     .workspace = call_.linear_workspace,
                     .stream = call_.stream};
    if (call_.adapters != nullptr) call.pair = &(call_.adapters->applications[size_t(b_.index)].*slot);
    if (call_.adapter_grads != nullptr) call.grad = &(call_.adapter_grads->applications[size_t(b_.index)].*slot);
    return call;
  }

  // --- reads of the residual stream ---
  void merge_skip() const {
    if (a_.skip_slot < 0) return;
    skip_merge({.x = lane0(), .skip = channels(b_.skip), .w = b_.skip_w.weight, .gate = b_.skip_w.gate, .y = merged()},
               call_.stream);
  }
  void mix_input() const {
    if (!c_.resid_mix) return;
    mix({.x = merged(), .x0 = channels(b_.x0), .a = b_.w.mix_a, .b = b_.w.mix_b, .y = mixed()}, call_.stream);
  }
  void read_input() const {
    if (!c_.resid_mix) return norm(merged(), b_.w.attn_norm, normed(), rstd_attn());
    residual_norm({.x = merged(),
                   .x0 = channels(b_.x0),
                   .a = b_.w.mix_a,
                   .b = b_.w.mix_b,
                   .mixed = mixed(),
                   .w = b_.w.attn_norm,
                   .y = normed(),
                   .rstd = rstd_attn(),
                   .eps = c_.norm_eps,
                   .norm_scale = layer_scale()},
                  call_.stream);
  }
  // g0 becomes the gradient of what the block read; the gradient of the attention branch's normed rows is in scratch.
  void read_backward(const BlockGradients& g) const {
    const Tensor g0 = channels(g.g0);
    if (a_.lanes) {
      const Tensor dread = view(b_.scratch.in_grad, {end_ - begin_, c_.dim});
      norm_backward(mixed(), b_.w.attn_norm, b_.dw.attn_norm, rstd_attn(), Tensor(), dread);
      mix_input_backward(dread, g);
      axpby({.x = dread, .y = g0}, call_.stream);
    } else {
      ResidualNormBackward r = norm_gradient(mixed(), b_.w.attn_norm, b_.dw.attn_norm, rstd_attn(), g0);
      if (c_.resid_mix) {
        r.x = merged(), r.x0 = channels(b_.x0), r.a = b_.w.mix_a, r.b = b_.w.mix_b;
        r.dx0 = channels(g.x0_grad), r.da = b_.dw.mix_a, r.db = b_.dw.mix_b;
      }
      residual_norm_backward(r, call_.stream);
    }
    if (a_.skip_slot >= 0)
      skip_merge_backward({.x = lane0(),
                           .skip = channels(b_.skip),
                           .w = b_.skip_w.weight,
                           .gate = b_.skip_w.gate,
                           .dy = g0,
                           .dx = g0,
                           .dskip = channels(g.skip_grad),
                           .dw = b_.skip_dw.weight,
                           .dgate = b_.skip_dw.gate,
                           .workspace = b_.scratch.residual_workspace,
                           .write_dskip = true},
                          call_.stream);
    if (a_.enters_lanes) axpby({.x = channels(g.g1), .y = g0}, call_.stream);  // both lanes started as one x
  }
  void mix_input_backward(const Tensor& d, const BlockGradients& g) const {
    if (!c_.resid_mix) return;
    mix_backward({.x = merged(),
                  .x0 = channels(b_.x0),
                  .a = b_.w.mix_a,
                  .b = b_.w.mix_b,
                  .dy = d,
                  .dx = d,
                  .dx0 = channels(g.x0_grad),
                  .da = b_.dw.mix_a,
                  .db = b_.dw.mix_b,
                  .workspace = b_.scratch.residual_workspace},
                 call_.stream);
  }
  void norm(const Tensor& x, const Tensor& w, const Tensor& y, const Tensor& rstd) const {
    residual_norm({.x = x, .w = w, .y = y, .rstd = rstd, .eps = c_.norm_eps, .norm_scale = layer_scale()},
                  call_.stream);
  }
  // Through the norm of m to what it was made of, added to g, which becomes that.
  ResidualNormBackward norm_gradient(const Tensor& m, const Tensor& w, const Tensor& dw, const Tensor& rstd,
                                     const Tensor& g) const {
    return {.dy = normed_grad(),
            .m = m,
            .rstd = rstd,
            .dsum = g,
            .w = w,
            .dw = dw,
            .dx = g,
            .workspace = b_.scratch.residual_workspace,
            .norm_workspace = b_.scratch.norm_workspace,
            .eps = c_.norm_eps,
            .norm_scale = layer_scale()};
  }
  // dx = dsum + the gradient through the norm of x; the gradient of the normed rows is in scratch.
  void norm_backward(const Tensor& x, const Tensor& w, const Tensor& dw, const Tensor& rstd, const Tensor& dsum,
                     const Tensor& dx) const {
    rmsnorm_backward({.dy = normed_grad(),
                      .s = x,
                      .w = w,
                      .rstd = rstd,
                      .dsum = dsum,
                      .dx = dx,
                      .dw = dw,
                      .workspace = b_.scratch.norm_workspace,
                      .eps = c_.norm_eps,
                      .scale = layer_scale()},
                     call_.stream);
  }

  void show(MatrixInput which, const Tensor& x) const {
    if (call_.inputs != nullptr) call_.inputs->seen(which, a_.layer, x);
  }

  // The branches' outputs, from attention on.
  void write() const {
    attention_output();
    if (a_.lanes) {
      norm(lane1(), b_.w.mlp_norm, normed_mlp(), rstd_mlp());
      mlp_branch();
      write_lanes();
    } else {
      residual_norm({.x = mixed(),
                     .branch = attn_out(),
                     .scale = b_.w.attn_scale,
                     .sum = mid(),
                     .w = b_.w.mlp_norm,
                     .y = normed_mlp(),
                     .rstd = rstd_mlp(),
                     .eps = c_.norm_eps,
                     .norm_scale = layer_scale()},
                    call_.stream);
      mlp_branch();
      scaled_add({.x = mid(), .branch = mlp_out(), .scale = b_.w.mlp_scale, .y = channels(b_.out0)}, call_.stream);
    }
  }

  // --- attention branch: normed rows -> attn_out ---
  void project(const Tensor& w, const Tensor& y, AdapterPair ApplicationAdapters::*slot) const {
    const AdapterCall one[] = {adapter(slot)};
    adapted_linear(one, normed(), w, y);
  }
  // Rotated q and k from the raw projections; the raw ones themselves where nothing changes them.
  void rotate() const { rotate_queries(), rotate_keys(); }
  void rotate_queries() const { rotate(q_heads(b_.saved.q_raw), q_heads(b_.scratch.q), b_.w.q_gain); }
  void rotate_keys() const { rotate(kv_heads(b_.saved.k_raw), kv_heads(b_.scratch.k), Tensor()); }
  void rotate(const Tensor& x, const Tensor& y, const Tensor& gain) const {
    if (!rotates()) return;
    qk_norm_rope({.x = x,
                  .y = y,
                  .positions = positions(),
                  .cos = call_.cos,
                  .sin = call_.sin,
                  .gain = gain,
                  .eps = c_.norm_eps,
                  .normalise = c_.qk_norm,
                  .interleaved = c_.rope_interleaved,
                  .sign = c_.rope_sign},
                 call_.stream);
  }
  Tensor q() const { return q_heads(rotates() ? b_.scratch.q : b_.saved.q_raw); }
  Tensor k() const { return kv_heads(rotates() ? b_.scratch.k : b_.saved.k_raw); }
  Tensor v() const { return kv_heads(b_.saved.v); }

  void project_queries() const { project(b_.w.q, q_rows(b_.saved.q_raw), &ApplicationAdapters::q); }
  void project_keys() const {
    if (b_.saved.kv && b_.w.kv) {
      const AdapterCall both[] = {adapter(&ApplicationAdapters::k), adapter(&ApplicationAdapters::v)};
      return adapted_linear(both, normed(), b_.w.kv, kv_rows(b_.saved.kv));
    }
    project(b_.w.k, kv_rows(b_.saved.k_raw), &ApplicationAdapters::k);
    project(b_.w.v, kv_rows(b_.saved.v), &ApplicationAdapters::v);
  }
  void attend() const {
    if (call_.cached != nullptr) return attend_cached();
    attention({.q = q(),
               .k = k(),
               .v = v(),
               .cu_q = call_.cu_seqlens,
               .out = q_heads(b_.saved.y),
               .lse = lse(),
               .scale = softmax_scale(),
               .window = c_.window},
              call_.stream);
  }
  // With adapters, which are given all tokens at once, the normed rows are still those that were projected.
  void attention_output() const {
    if (a_.exclude_self) exclude_self({.y = q_heads(b_.saved.y), .v = v(), .z = z()}, call_.stream);
    show(MatrixInput::attention_output, excluded());
    linear({.x = excluded(),
            .w = b_.w.o,
            .y = attn_out(),
            .products = call_.products,
            .workspace = call_.linear_workspace},
           call_.stream);
    adapter_forward(adapter(&ApplicationAdapters::o), normed(), attn_out());
  }
  // The same bits once more: 2 T C H D operations cost less than T rows in memory from the forward pass to here.
  void attention_output_again() const {
    if (call_.adapters != nullptr) norm(mixed(), b_.w.attn_norm, normed(), Tensor());
    attention_output();
  }
  Tensor excluded() const {
    return a_.exclude_self ? z().reshape({end_ - begin_, c_.heads * c_.head_dim}) : q_rows(b_.saved.y);
  }
  void attend_cached() const;
  void attend_cached_backward() const;
  template <class Use> void each_cached(Use&& use) const;

  // The gradient of attn_out is in scratch.branch_grad, what attention_output multiplied still in scratch.z.
  void attention_output_backward() const {
    const Scratch& s = b_.scratch;
    linear_backward(
        {.dy = branch_grad(),
         .x = excluded(),
         .w = b_.w.o,
         .dx = a_.exclude_self ? z_grad().reshape({end_ - begin_, c_.heads * c_.head_dim}) : q_rows(s.y_grad),
         .dw = b_.dw.o,
         .products = call_.products,
         .workspace = call_.linear_workspace},
        call_.stream);
    if (!a_.exclude_self) return;
    exclude_self_backward({.y = q_heads(b_.saved.y),
                           .v = v(),
                           .dz = z_grad(),
                           .dy = q_heads(s.y_grad),
                           .dv = kv_heads(adds_to_v() ? s.v_grad : s.v_grad_self),
                           .write_dv = true,
                           .delta = delta()},
                          call_.stream);
  }
  // Attention adds its part of V's gradient to what the self exclusion left.
  bool adds_to_v() const { return a_.exclude_self && call_.device.kind == Device::cuda; }
  // So it does with the rows' sums of y * dy, which are formed where both are at hand.
  Tensor delta() const {
    if (!adds_to_v()) return {};
    return Tensor(b_.scratch.attention_workspace.data, DType::f32, {c_.heads, call_.tokens}, call_.device);
  }
  void attend_backward() const {
    if (call_.cached != nullptr) return attend_cached_backward();
    const Scratch& s = b_.scratch;
    attention_backward({.q = q(),
                        .k = k(),
                        .v = v(),
                        .cu_q = call_.cu_seqlens,
                        .out = q_heads(b_.saved.y),
                        .lse = lse(),
                        .dout = q_heads(s.y_grad),
                        .dq = q_heads(s.q_grad),
                        .dk = kv_heads(s.k_grad),
                        .dv = kv_heads(s.v_grad),
                        .add_dv = adds_to_v(),
                        .has_delta = bool(delta()),
                        .scale = softmax_scale(),
                        .window = c_.window,
                        .workspace = s.attention_workspace},
                       call_.stream);
  }
  // The gradients of q, k and v -> the gradient of the normed rows, in scratch.normed_grad.
  void projections_backward() const {
    const Scratch& s = b_.scratch;
    if (a_.exclude_self && !adds_to_v()) axpby({.x = kv_rows(s.v_grad_self), .y = kv_rows(s.v_grad)}, call_.stream);
    rotate_backward();
    if (!kept()) norm(mixed(), b_.w.attn_norm, normed(), Tensor());
    queries_backward();
    keys_backward(true);
  }
  // To the gradient of the normed rows; o's adapter reads these too.
  void queries_backward() const {
    project_backward(q_rows(b_.scratch.q_grad), b_.w.q, b_.dw.q, &ApplicationAdapters::q, false);
    adapter_backward(adapter(&ApplicationAdapters::o), normed(), branch_grad(), normed_grad());
  }
  void keys_backward(bool accumulate) const {
    const Scratch& s = b_.scratch;
    if (s.kv_grad && b_.w.kv) {
      const AdapterCall both[] = {adapter(&ApplicationAdapters::k), adapter(&ApplicationAdapters::v)};
      adapted_linear_backward(both, normed(), b_.w.kv, b_.dw.kv, kv_rows(s.kv_grad), normed_grad(), accumulate);
    } else {
      project_backward(kv_rows(s.k_grad), b_.w.k, b_.dw.k, &ApplicationAdapters::k, accumulate);
      project_backward(kv_rows(s.v_grad), b_.w.v, b_.dw.v, &ApplicationAdapters::v, true);
    }
  }
  void rotate_backward() const { rotate_queries_backward(), rotate_keys_backward(); }
  void rotate_queries_backward() const {
    rotate_backward(q_heads(b_.saved.q_raw), q_heads(b_.scratch.q_grad), b_.w.q_gain, b_.dw.q_gain);
  }
  void rotate_keys_backward() const {
    rotate_backward(kv_heads(b_.saved.k_raw), kv_heads(b_.scratch.k_grad), Tensor(), Tensor());
  }
  void rotate_backward(const Tensor& x, const Tensor& d, const Tensor& gain, const Tensor& dgain) const {
    if (!rotates()) return;
    qk_norm_rope_backward({.x = x,
                           .dy = d,
                           .dx = d,
                           .positions = positions(),
                           .cos = call_.cos,
                           .sin = call_.sin,
                           .gain = gain,
                           .dgain = dgain,
                           .eps = c_.norm_eps,
                           .normalise = c_.qk_norm,
                           .interleaved = c_.rope_interleaved,
                           .sign = c_.rope_sign,
                           .workspace = gain ? b_.scratch.rope_workspace : Tensor()},
                          call_.stream);
  }
  void project_backward(const Tensor& dy, const Tensor& w, const Tensor& dw, AdapterPair ApplicationAdapters::*slot,
                        bool accumulate) const {
    const AdapterCall one[] = {adapter(slot)};
    adapted_linear_backward(one, normed(), w, dw, dy, normed_grad(), accumulate);
  }

  // --- MLP branch: normed rows -> mlp_out ---
  void mlp_branch() const {
    const Tensor h = activated();
    show(MatrixInput::mlp_up, normed_mlp());
    linear({.x = normed_mlp(),
            .w = b_.w.up,
            .y = h,
            .pre = pre(),
            .signs = signs(),
            .act = call_.act,
            .products = call_.products,
            .workspace = call_.linear_workspace},
           call_.stream);
    show(MatrixInput::mlp_down, h);
    linear({.x = h, .w = b_.w.down, .y = mlp_out(), .products = call_.products, .workspace = call_.linear_workspace},
           call_.stream);
    adapter_forward(adapter(&ApplicationAdapters::mlp), normed_mlp(), mlp_out());
  }
  // The gradient of mlp_out -> the gradient of the normed rows, in scratch.normed_grad.
  void mlp_branch_backward(const Tensor& x, const Tensor& dout) const {
    const Tensor dpre = hidden(b_.scratch.hidden_grad), dm = normed_grad();
    if (!kept()) norm(x, b_.w.mlp_norm, normed_mlp(), Tensor());
    linear_backward({.dy = dout,
                     .x = activated(),
                     .w = b_.w.down,
                     .dx = dpre,
                     .dw = b_.dw.down,
                     .pre = pre(),
                     .signs = signs(),
                     .act = call_.act,
                     .products = call_.products,
                     .form_x = b_.dw.down && !b_.saved.hidden,
                     .workspace = call_.linear_workspace},
                    call_.stream);
    linear_backward({.dy = dpre,
                     .x = normed_mlp(),
                     .w = b_.w.up,
                     .dx = dm,
                     .dw = b_.dw.up,
                     .products = call_.products,
                     .workspace = call_.linear_workspace},
                    call_.stream);
    adapter_backward(adapter(&ApplicationAdapters::mlp), normed_mlp(), dout, dm);
  }

  // --- writes of the residual stream: both leave the gradient of attn_out in scratch.branch_grad ---
  void residual_backward(const BlockGradients& g) const {
    const Tensor g0 = channels(g.g0);
    if (!kept()) scaled_add({.x = mixed(), .branch = attn_out(), .scale = b_.w.attn_scale, .y = mid()}, call_.stream);
    scaled_add_backward({.dy = g0,
                         .branch = mlp_out(),
                         .scale = b_.w.mlp_scale,
                         .dbranch = branch_grad(),
                         .dscale = b_.dw.mlp_scale,
                         .workspace = b_.scratch.residual_workspace},
                        call_.stream);
    mlp_branch_backward(mid(), branch_grad());
    ResidualNormBackward r = norm_gradient(mid(), b_.w.mlp_norm, b_.dw.mlp_norm, rstd_mlp(), g0);
    r.branch = attn_out(), r.scale = b_.w.attn_scale;
    r.dbranch = branch_grad(), r.dscale = b_.dw.attn_scale;
    residual_norm_backward(r, call_.stream);
  }
  void write_lanes() const {
    lane_write({.lane0 = merged(),
                .lane1 = lane1(),
                .a = attn_out(),
                .b = mlp_out(),
                .scale_a = b_.w.attn_scale,
                .scale_b = b_.w.mlp_scale,
                .r = b_.w.lane_resid,
                .p = b_.w.lane_post,
                .out0 = channels(b_.out0),
                .out1 = channels(b_.out1)},
               call_.stream);
  }
  void write_lanes_backward(const BlockGradients& g) const {
    const Tensor g0 = channels(g.g0), g1 = channels(g.g1), db = mid();  // a lane block has no mid row
    lane_write_backward({.lane0 = merged(),
                         .lane1 = lane1(),
                         .a = attn_out(),
                         .b = mlp_out(),
                         .scale_a = b_.w.attn_scale,
                         .scale_b = b_.w.mlp_scale,
                         .r = b_.w.lane_resid,
                         .p = b_.w.lane_post,
                         .dout0 = g0,
                         .dout1 = g1,
                         .dlane0 = g0,
                         .dlane1 = g1,
                         .da = branch_grad(),
                         .db = db,
                         .dscale_a = b_.dw.attn_scale,
                         .dscale_b = b_.dw.mlp_scale,
                         .dr = b_.dw.lane_resid,
                         .dp = b_.dw.lane_post,
                         .workspace = b_.scratch.residual_workspace},
                        call_.stream);
    mlp_branch_backward(lane1(), db);
    norm_backward(lane1(), b_.w.mlp_norm, b_.dw.mlp_norm, rstd_mlp(), g1, g1);
  }

  const CallContext& call_;
  const GptConfig& c_;
  const BlockTensors& b_;
  const Application& a_;
  int64_t begin_ = 0, end_;  // the tokens that views show
  bool of_block_ = false;    // merged and mixed rows are those of one block
};

// Calls use(begin, end, keys, values, cu) for each segment: its tokens; the keys and values that they see, of what is
// cached and, after that, of themselves; how many both are.
template <class Use> void Block::each_cached(Use&& use) const {
  const CachedSegments& cached = *call_.cached;
  for (size_t s = 0; s < cached.sequences.size(); ++s) {
    const int64_t begin = call_.cu[s], end = call_.cu[s + 1], sequence = cached.sequences[s];
    if (begin == end) continue;
    const int64_t base = sequence * cached.cache.capacity(), length = cached.cache.length(sequence);
    const int64_t total = base + length + end - begin, seen = cached_keys(cached, s, end - begin);
    use(begin, end, cached.cache.keys(b_.index).slice(0, total - seen, total),
        cached.cache.values(b_.index).slice(0, total - seen, total), call_.cached_cu.row(int64_t(s)));
  }
}

// Appends this call's keys and values to each sequence's cache and attends to all of it.
void Block::attend_cached() const {
  if (call_.cache_at) {
    const GptCache& cache = call_.cached->cache;
    const int64_t base = call_.cached->sequences[0] * cache.capacity(), end = base + cache.capacity();
    const Tensor all_k = cache.keys(b_.index).slice(0, base, end), all_v = cache.values(b_.index).slice(0, base, end);
    copy_at({.from = k(), .to = all_k, .at = call_.cache_at}, call_.stream);
    copy_at({.from = v(), .to = all_v, .at = call_.cache_at}, call_.stream);
    attention({.q = q(),
               .k = all_k,
               .v = all_v,
               .cu_q = call_.cached_cu.row(0).row(0),
               .cu_k = call_.cached_cu.row(0).row(1),
               .out = q_heads(b_.saved.y),
               .scale = softmax_scale(),
               .window = c_.window},
              call_.stream);
    return;
  }
  each_cached([&](int64_t begin, int64_t end, const Tensor& keys, const Tensor& values, const Tensor& cu) {
    const int64_t n = end - begin, seen = keys.size(0);
    copy({.from = k().slice(0, begin, end), .to = keys.slice(0, seen - n, seen)}, call_.stream);
    copy({.from = v().slice(0, begin, end), .to = values.slice(0, seen - n, seen)}, call_.stream);
    attention({.q = q().slice(0, begin, end),
               .k = keys,
               .v = values,
               .cu_q = cu.row(0),
               .cu_k = cu.row(1),
               .out = q_heads(b_.saved.y).slice(0, begin, end),
               .lse = cached_lse(begin, end),
               .scale = softmax_scale(),
               .window = c_.window},
              call_.stream);
  });
}
// What is cached is constant: of the keys' gradients those of the call's own tokens stay.
void Block::attend_cached_backward() const {
  const Scratch& s = b_.scratch;
  each_cached([&](int64_t begin, int64_t end, const Tensor& keys, const Tensor& values, const Tensor& cu) {
    const int64_t n = end - begin, seen = keys.size(0);
    const Tensor dk = view(s.all_k_grad, keys.shape), dv = view(s.all_v_grad, keys.shape);
    attention_backward({.q = q().slice(0, begin, end),
                        .k = keys,
                        .v = values,
                        .cu_q = cu.row(0),
                        .cu_k = cu.row(1),
                        .out = q_heads(b_.saved.y).slice(0, begin, end),
                        .lse = cached_lse(begin, end),
                        .dout = q_heads(s.y_grad).slice(0, begin, end),
                        .dq = q_heads(s.q_grad).slice(0, begin, end),
                        .dk = dk,
                        .dv = dv,
                        .scale = softmax_scale(),
                        .window = c_.window,
                        .workspace = s.attention_workspace},
                       call_.stream);
    copy({.from = dk.slice(0, seen - n, seen), .to = kv_heads(s.k_grad).slice(0, begin, end)}, call_.stream);
    const Tensor own = kv_rows(s.v_grad).slice(0, begin, end), tail = dv.slice(0, seen - n, seen);
    if (adds_to_v())
      axpby({.x = tail.reshape({n, own.cols()}), .y = own}, call_.stream);
    else
      copy({.from = tail, .to = own.split_last(c_.kv_heads)}, call_.stream);
  });
}

}  // namespace

void block_forward(const CallContext& call, const BlockTensors& b) { Block(call, b).forward(); }
void block_backward(const CallContext& call, const BlockTensors& b, const BlockGradients& g) {
  Block(call, b).backward(g);
}

}  // namespace ingot::detail
