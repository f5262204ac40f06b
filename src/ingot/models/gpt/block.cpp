#include "ingot/models/gpt/block.h"

#include <cmath>

#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/residual/residual.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/models/gpt/adapter.h"

namespace ingot::detail {
namespace {

class Block {
 public:
  Block(const CallContext& call, const BlockTensors& b)
      : call_(call), c_(call.config), b_(b), a_(*b.application), T_(call.tokens) {}

  void forward() {
    const Tensor merged = merge_skip();
    const Tensor mixed = mix_input(merged);
    norm(mixed, b_.w.attn_norm, normed(), rstd_attn());
    attention_branch(normed());
    if (a_.lanes) {
      norm(lane1(), b_.w.mlp_norm, normed(), rstd_mlp());
      mlp_branch(normed());
      write_lanes(merged);
    } else {
      scaled_add({.x = mixed, .branch = attn_out(), .scale = b_.w.attn_scale, .y = mid()}, {});
      norm(mid(), b_.w.mlp_norm, normed(), rstd_mlp());
      mlp_branch(normed());
      scaled_add({.x = mid(), .branch = mlp_out(), .scale = b_.w.mlp_scale, .y = channels(b_.out0)}, {});
    }
  }

  void backward(const BlockGradients& g) {
    const Tensor g0 = channels(g.g0), g1 = channels(g.g1);
    const Tensor merged = merge_skip();
    const Tensor mixed = mix_input(merged);
    if (a_.lanes) {
      lanes_backward(merged, mixed, g0, g1, g);
    } else {
      scaled_add({.x = mixed, .branch = attn_out(), .scale = b_.w.attn_scale, .y = mid()}, {});
      const Tensor branch_grad = channels(b_.scratch.branch_grad);
      scaled_add_backward(
          {.dy = g0, .branch = mlp_out(), .scale = b_.w.mlp_scale, .dbranch = branch_grad, .dscale = b_.dw.mlp_scale},
          {});
      mlp_branch_backward(mid(), branch_grad);
      norm_backward(mid(), b_.w.mlp_norm, b_.dw.mlp_norm, rstd_mlp(), g0, g0);
      scaled_add_backward({.dy = g0,
                           .branch = attn_out(),
                           .scale = b_.w.attn_scale,
                           .dbranch = branch_grad,
                           .dscale = b_.dw.attn_scale},
                          {});
      attention_branch_backward(mixed, branch_grad);
      norm_backward(mixed, b_.w.attn_norm, b_.dw.attn_norm, rstd_attn(), g0, g0);
      mix_input_backward(merged, g0, g0, g);
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
                           .dgate = b_.skip_dw.gate},
                          {});
    if (a_.enters_lanes) axpby({.x = g1, .y = g0}, {});  // both lanes started as one x
  }

 private:
  // --- views of this call's tokens ---
  Tensor channels(const Tensor& t) const { return t ? view(t, {T_, c_.dim}) : Tensor(); }
  Tensor q_rows(const Tensor& t) const { return view(t, {T_, c_.heads * c_.head_dim}); }
  Tensor kv_rows(const Tensor& t) const { return view(t, {T_, c_.kv_heads * c_.head_dim}); }
  Tensor q_heads(const Tensor& t) const { return view(t, {T_, c_.heads, c_.head_dim}); }
  Tensor kv_heads(const Tensor& t) const { return view(t, {T_, c_.kv_heads, c_.head_dim}); }
  Tensor hidden_rows(const Tensor& t) const { return view(t, {T_, c_.mlp_hidden}); }
  Tensor lane0() const { return channels(b_.in0); }
  Tensor lane1() const { return channels(a_.enters_lanes ? b_.in0 : b_.in1); }
  Tensor normed() const { return channels(b_.scratch.normed); }
  Tensor mid() const { return channels(b_.scratch.mid); }
  Tensor attn_out() const { return channels(b_.saved.attn_out); }
  Tensor mlp_out() const { return channels(b_.saved.mlp_out); }
  Tensor rstd_attn() const { return view(b_.saved.rstd_attn, {T_}); }
  Tensor rstd_mlp() const { return view(b_.saved.rstd_mlp, {T_}); }
  Tensor lse() const { return view(b_.saved.lse, {c_.heads, T_}); }
  bool rotates() const { return c_.qk_norm || c_.qk_gain || c_.rotary_dim > 0; }
  double layer_scale() const { return c_.layer_scale ? 1 / std::sqrt(double(a_.layer + 1)) : 1; }
  double softmax_scale() const { return 1 / std::sqrt(double(c_.head_dim)); }

  AdapterCall adapter(AdapterPair ApplicationAdapters::*slot) const {
    AdapterCall call{.cu_seqlens = call_.cu_seqlens,
                     .low = b_.scratch.adapter_low,
                     .low_grad = b_.scratch.adapter_low_grad,
                     .products = call_.products};
    if (call_.adapters != nullptr) call.pair = &(call_.adapters->applications[size_t(b_.index)].*slot);
    if (call_.adapter_grads != nullptr) call.grad = &(call_.adapter_grads->applications[size_t(b_.index)].*slot);
    return call;
  }

  // --- reads of the residual stream ---
  Tensor merge_skip() const {
    if (a_.skip_slot < 0) return lane0();
    const Tensor merged = channels(b_.scratch.merged);
    skip_merge({.x = lane0(), .skip = channels(b_.skip), .w = b_.skip_w.weight, .gate = b_.skip_w.gate, .y = merged},
               {});
    return merged;
  }
  Tensor mix_input(const Tensor& merged) const {
    if (!c_.resid_mix) return merged;
    const Tensor mixed = channels(b_.scratch.mixed);
    mix({.x = merged, .x0 = channels(b_.x0), .a = b_.w.mix_a, .b = b_.w.mix_b, .y = mixed}, {});
    return mixed;
  }
  void mix_input_backward(const Tensor& merged, const Tensor& dmixed, const Tensor& dmerged,
                          const BlockGradients& g) const {
    if (c_.resid_mix)
      mix_backward({.x = merged,
                    .x0 = channels(b_.x0),
                    .a = b_.w.mix_a,
                    .b = b_.w.mix_b,
                    .dy = dmixed,
                    .dx = dmerged,
                    .dx0 = channels(g.x0_grad),
                    .da = b_.dw.mix_a,
                    .db = b_.dw.mix_b},
                   {});
    else if (dmixed.data != dmerged.data)
      copy(dmixed, dmerged);
  }
  void norm(const Tensor& x, const Tensor& w, const Tensor& y, const Tensor& rstd) const {
    rmsnorm({.x = x, .w = w, .y = y, .rstd = rstd, .eps = c_.norm_eps, .scale = layer_scale()}, {});
  }
  // dx = dsum + the gradient through the norm of x; the gradient of the normed rows is in scratch.
  void norm_backward(const Tensor& x, const Tensor& w, const Tensor& dw, const Tensor& rstd, const Tensor& dsum,
                     const Tensor& dx) const {
    rmsnorm_backward({.dy = channels(b_.scratch.normed_grad),
                      .s = x,
                      .w = w,
                      .rstd = rstd,
                      .dsum = dsum,
                      .dx = dx,
                      .dw = dw,
                      .workspace = b_.scratch.norm_workspace,
                      .eps = c_.norm_eps,
                      .scale = layer_scale()},
                     {});
  }

  // --- attention branch: normed rows n -> attn_out ---
  void project(const Tensor& n, const Tensor& w, const Tensor& y, AdapterPair ApplicationAdapters::*slot) const {
    linear({.x = n, .w = w, .y = y, .products = call_.products}, {});
    adapter_forward(adapter(slot), n, y);
  }
  // Rotated q and k from the raw projections; the raw ones themselves where nothing changes them.
  void rotate() const {
    if (!rotates()) return;
    QkNormRope r{.x = q_heads(b_.saved.q_raw),
                 .y = q_heads(b_.scratch.q),
                 .positions = call_.positions,
                 .cos = call_.cos,
                 .sin = call_.sin,
                 .gain = b_.w.q_gain,
                 .eps = c_.norm_eps,
                 .normalise = c_.qk_norm,
                 .interleaved = c_.rope_interleaved,
                 .sign = c_.rope_sign};
    qk_norm_rope(r, {});
    r.x = kv_heads(b_.saved.k_raw);
    r.y = kv_heads(b_.scratch.k);
    r.gain = Tensor();
    qk_norm_rope(r, {});
  }
  Tensor q() const { return q_heads(rotates() ? b_.scratch.q : b_.saved.q_raw); }
  Tensor k() const { return kv_heads(rotates() ? b_.scratch.k : b_.saved.k_raw); }
  Tensor v() const { return kv_heads(b_.saved.v); }

  void attention_branch(const Tensor& n) const {
    project(n, b_.w.q, q_rows(b_.saved.q_raw), &ApplicationAdapters::q);
    project(n, b_.w.k, kv_rows(b_.saved.k_raw), &ApplicationAdapters::k);
    project(n, b_.w.v, kv_rows(b_.saved.v), &ApplicationAdapters::v);
    rotate();
    if (call_.cache != nullptr)
      attend_cached();
    else
      attention({.q = q(),
                 .k = k(),
                 .v = v(),
                 .cu_q = call_.cu_seqlens,
                 .out = q_heads(b_.saved.y),
                 .lse = lse(),
                 .scale = softmax_scale(),
                 .window = c_.window},
                {});
    linear({.x = exclude(), .w = b_.w.o, .y = attn_out(), .products = call_.products}, {});
    adapter_forward(adapter(&ApplicationAdapters::o), n, attn_out());
  }
  Tensor exclude() const {
    if (!a_.exclude_self) return q_rows(b_.saved.y);
    exclude_self({.y = q_heads(b_.saved.y), .v = v(), .z = q_heads(b_.scratch.z)}, {});
    return q_rows(b_.scratch.z);
  }
  void attend_cached() const;

  // n and the gradient of attn_out (branch_grad) -> the gradient of n, in scratch.normed_grad.
  void attention_branch_backward(const Tensor& x, const Tensor& dout) const {
    const Scratch& s = b_.scratch;
    norm(x, b_.w.attn_norm, normed(), Tensor());
    rotate();
    linear_backward(
        {.dy = dout, .x = exclude(), .w = b_.w.o, .dx = q_rows(s.z_grad), .dw = b_.dw.o, .products = call_.products},
        {});
    Tensor dy = q_heads(s.z_grad);
    if (a_.exclude_self) {
      fill_zero(kv_heads(s.v_grad_self));
      exclude_self_backward({.y = q_heads(b_.saved.y),
                             .v = v(),
                             .dz = q_heads(s.z_grad),
                             .dy = q_heads(s.y_grad),
                             .dv = kv_heads(s.v_grad_self)},
                            {});
      dy = q_heads(s.y_grad);
    }
    attention_backward({.q = q(),
                        .k = k(),
                        .v = v(),
                        .cu_q = call_.cu_seqlens,
                        .out = q_heads(b_.saved.y),
                        .lse = lse(),
                        .dout = dy,
                        .dq = q_heads(s.q_grad),
                        .dk = kv_heads(s.k_grad),
                        .dv = kv_heads(s.v_grad),
                        .scale = softmax_scale(),
                        .window = c_.window},
                       {});
    if (a_.exclude_self) axpby({.x = kv_rows(s.v_grad_self), .y = kv_rows(s.v_grad)}, {});
    rotate_backward();
    const Tensor dn = channels(s.normed_grad);
    project_backward(q_rows(s.q_grad), b_.w.q, b_.dw.q, &ApplicationAdapters::q, false);
    project_backward(kv_rows(s.k_grad), b_.w.k, b_.dw.k, &ApplicationAdapters::k, true);
    project_backward(kv_rows(s.v_grad), b_.w.v, b_.dw.v, &ApplicationAdapters::v, true);
    adapter_backward(adapter(&ApplicationAdapters::o), normed(), dout, dn);
  }
  void rotate_backward() const {
    if (!rotates()) return;
    const Scratch& s = b_.scratch;
    QkNormRopeBackward r{.x = q_heads(b_.saved.q_raw),
                         .dy = q_heads(s.q_grad),
                         .dx = q_heads(s.q_grad),
                         .positions = call_.positions,
                         .cos = call_.cos,
                         .sin = call_.sin,
                         .gain = b_.w.q_gain,
                         .dgain = b_.dw.q_gain,
                         .eps = c_.norm_eps,
                         .normalise = c_.qk_norm,
                         .interleaved = c_.rope_interleaved,
                         .sign = c_.rope_sign};
    qk_norm_rope_backward(r, {});
    r.x = kv_heads(b_.saved.k_raw);
    r.dy = r.dx = kv_heads(s.k_grad);
    r.gain = r.dgain = Tensor();
    qk_norm_rope_backward(r, {});
  }
  void project_backward(const Tensor& dy, const Tensor& w, const Tensor& dw, AdapterPair ApplicationAdapters::*slot,
                        bool accumulate) const {
    const Tensor dn = channels(b_.scratch.normed_grad);
    linear_backward(
        {.dy = dy, .x = normed(), .w = w, .dx = dn, .dw = dw, .accumulate_dx = accumulate, .products = call_.products},
        {});
    adapter_backward(adapter(slot), normed(), dy, dn);
  }

  // --- MLP branch: normed rows m -> mlp_out ---
  void mlp_branch(const Tensor& m) const {
    MlpBlocks(T_, call_.products).each([&](int64_t begin, int64_t end) {
      const auto rows = [&](const Tensor& t) { return t.slice(0, begin, end); };
      const Tensor hidden = view(b_.scratch.hidden, {end - begin, c_.mlp_hidden});
      linear({.x = rows(m),
              .w = b_.w.up,
              .y = hidden,
              .pre = rows(hidden_rows(b_.saved.pre)),
              .act = call_.act,
              .products = call_.products},
             {});
      linear({.x = hidden, .w = b_.w.down, .y = rows(mlp_out()), .products = call_.products}, {});
    });
    adapter_forward(adapter(&ApplicationAdapters::mlp), m, mlp_out());
  }
  void mlp_branch_backward(const Tensor& x, const Tensor& dout) const {
    const Scratch& s = b_.scratch;
    const Tensor dm = channels(s.normed_grad);
    norm(x, b_.w.mlp_norm, normed(), Tensor());
    MlpBlocks(T_, call_.products).each([&](int64_t begin, int64_t end) {
      const auto rows = [&](const Tensor& t) { return t.slice(0, begin, end); };
      const Tensor hidden = view(s.hidden, {end - begin, c_.mlp_hidden});
      const Tensor dpre = view(s.hidden_grad, {end - begin, c_.mlp_hidden});
      linear_backward({.dy = rows(dout),
                       .x = hidden,
                       .w = b_.w.down,
                       .dx = dpre,
                       .dw = b_.dw.down,
                       .pre = rows(hidden_rows(b_.saved.pre)),
                       .act = call_.act,
                       .products = call_.products,
                       .form_x = bool(b_.dw.down)},
                      {});
      linear_backward(
          {.dy = dpre, .x = rows(normed()), .w = b_.w.up, .dx = rows(dm), .dw = b_.dw.up, .products = call_.products},
          {});
    });
    adapter_backward(adapter(&ApplicationAdapters::mlp), normed(), dout, dm);
  }

  // --- two lanes ---
  void write_lanes(const Tensor& merged) const {
    lane_write({.lane0 = merged,
                .lane1 = lane1(),
                .a = attn_out(),
                .b = mlp_out(),
                .scale_a = b_.w.attn_scale,
                .scale_b = b_.w.mlp_scale,
                .r = b_.w.lane_resid,
                .p = b_.w.lane_post,
                .out0 = channels(b_.out0),
                .out1 = channels(b_.out1)},
               {});
  }
  void lanes_backward(const Tensor& merged, const Tensor& mixed, const Tensor& g0, const Tensor& g1,
                      const BlockGradients& g) const {
    const Scratch& s = b_.scratch;
    const Tensor da = channels(s.branch_grad), db = mid();  // a lane block has no mid row
    lane_write_backward({.lane0 = merged,
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
                         .da = da,
                         .db = db,
                         .dscale_a = b_.dw.attn_scale,
                         .dscale_b = b_.dw.mlp_scale,
                         .dr = b_.dw.lane_resid,
                         .dp = b_.dw.lane_post},
                        {});
    mlp_branch_backward(lane1(), db);
    norm_backward(lane1(), b_.w.mlp_norm, b_.dw.mlp_norm, rstd_mlp(), g1, g1);
    attention_branch_backward(mixed, da);
    const Tensor dread = channels(s.in_grad);
    norm_backward(mixed, b_.w.attn_norm, b_.dw.attn_norm, rstd_attn(), Tensor(), dread);
    mix_input_backward(merged, dread, dread, g);
    axpby({.x = dread, .y = g0}, {});
  }

  const CallContext& call_;
  const GptConfig& c_;
  const BlockTensors& b_;
  const Application& a_;
  const int64_t T_;
};

// Appends this call's keys and values to each sequence's cache and attends to all of it.
void Block::attend_cached() const {
  const int32_t* cu = call_.cu_seqlens.ptr<int32_t>();
  const int64_t capacity = call_.cache->capacity();
  const Tensor& k_cache = call_.cache->keys(b_.index);
  const Tensor& v_cache = call_.cache->values(b_.index);
  for (size_t s = 0; s < call_.sequences->size(); ++s) {
    const int64_t begin = cu[s], end = cu[s + 1], base = (*call_.sequences)[s] * capacity;
    if (begin == end) continue;
    const int64_t length = call_.cache->length((*call_.sequences)[s]), total = length + end - begin;
    copy(k().slice(0, begin, end), k_cache.slice(0, base + length, base + total));
    copy(v().slice(0, begin, end), v_cache.slice(0, base + length, base + total));
    int32_t cu_q[2] = {0, int32_t(end - begin)}, cu_k[2] = {0, int32_t(total)};
    attention({.q = q().slice(0, begin, end),
               .k = k_cache.slice(0, base, base + total),
               .v = v_cache.slice(0, base, base + total),
               .cu_q = Tensor(cu_q, {2}),
               .cu_k = Tensor(cu_k, {2}),
               .out = q_heads(b_.saved.y).slice(0, begin, end),
               .scale = softmax_scale(),
               .window = c_.window},
              {});
  }
}

}  // namespace

void block_forward(const CallContext& call, const BlockTensors& b) { Block(call, b).forward(); }
void block_backward(const CallContext& call, const BlockTensors& b, const BlockGradients& g) {
  Block(call, b).backward(g);
}

}  // namespace ingot::detail
