#pragma once
// The tensors of a block for its parts: views of the rows of each block of tokens in turn, or of all tokens.
#include <algorithm>
#include <cmath>

#include "ingot/kernels/attention/attention.h"
#include "ingot/models/gpt/adapters/adapter.h"
#include "ingot/models/gpt/block/block.h"

namespace ingot::detail {

struct BlockView {
  BlockView(const CallContext& c, const BlockTensors& tensors)
      : call(c), config(c.config), b(tensors), layer_call(*tensors.layer_call), end(c.tokens) {}

  bool kept() const { return b.scratch.kept; }
  int64_t blocks() const { return std::max<int64_t>(1, (call.tokens + call.block_rows - 1) / call.block_rows); }
  // Calls body() for each block of tokens, shown by the views below; outside this call the views show all tokens.
  template <class Body> void each_block(Body&& body) {
    const int64_t rows = (call.tokens + blocks() - 1) / blocks();
    for (begin = 0; begin < call.tokens; begin = end) {
      end = std::min(call.tokens, begin + rows);
      body();
    }
    begin = 0;
    end = call.tokens;
  }

  BlockView of_tokens(int64_t first, int64_t last) const {
    BlockView part = *this;
    part.begin = first, part.end = last;
    return part;
  }

  // --- views of this block's tokens ---
  Tensor shown(const Tensor& t, Shape all) const { return view(t, all).slice(0, begin, end); }
  Tensor channels(const Tensor& t) const { return t ? shown(t, {call.tokens, config.dim}) : Tensor(); }
  Tensor q_rows(const Tensor& t) const { return t.slice(0, begin, end); }  // the rows may be parts of wider rows
  Tensor kv_rows(const Tensor& t) const { return t.slice(0, begin, end); }
  Tensor q_heads(const Tensor& t) const { return q_rows(t).split_last(config.heads); }
  Tensor kv_heads(const Tensor& t) const { return kv_rows(t).split_last(config.kv_heads); }
  Tensor lane0() const { return channels(b.in0); }
  Tensor lane1() const { return channels(layer_call.enters_lanes ? b.in0 : b.in1); }
  // The forward pass computes these rows once; the backward pass computes the rows again before and after attention,
  // block by block.
  Tensor read(const Tensor& t) const { return of_block ? view(t, {end - begin, config.dim}) : channels(t); }
  Tensor merged() const { return layer_call.skip_slot < 0 ? lane0() : read(b.scratch.merged); }
  Tensor mixed() const { return config.resid_mix ? read(b.scratch.mixed) : merged(); }
  Tensor mlp_out() const { return channels(b.saved.mlp_out); }
  Tensor pre() const { return b.saved.pre ? shown(b.saved.pre, {call.tokens, config.mlp_hidden}) : Tensor(); }
  Tensor signs() const {  // signs are kept only if all tokens form a single block
    if (!b.saved.signs) return {};
    return view(b.saved.signs, {linear_sign_bytes(call.tokens, config.mlp_hidden, call.device)});
  }
  Tensor activated() const {
    return b.saved.hidden ? shown(b.saved.hidden, {call.tokens, config.mlp_hidden}) : hidden(b.scratch.hidden);
  }
  Tensor rstd_attn() const { return shown(b.saved.rstd_attn, {call.tokens}); }
  Tensor rstd_mlp() const { return shown(b.saved.rstd_mlp, {call.tokens}); }
  Tensor positions() const { return call.positions.slice(0, begin, end); }
  Tensor lse() const { return view(b.saved.lse, {config.heads, call.tokens}); }
  Tensor cached_lse() const {  // segment by segment
    return view(b.saved.lse, {call.tokens * config.heads})
        .slice(0, begin * config.heads, end * config.heads)
        .reshape({config.heads, end - begin});
  }
  // Memory of a block.
  Tensor normed() const { return view(b.scratch.normed, {end - begin, config.dim}); }
  Tensor normed_mlp() const { return view(b.scratch.normed_mlp, {end - begin, config.dim}); }
  Tensor mid() const { return view(b.scratch.mid, {end - begin, config.dim}); }
  Tensor attn_out() const { return view(b.scratch.attn_out, {end - begin, config.dim}); }
  Tensor branch_grad() const { return view(b.scratch.branch_grad, {end - begin, config.dim}); }
  Tensor normed_grad() const { return view(b.scratch.normed_grad, {end - begin, config.dim}); }
  Tensor hidden(const Tensor& t) const { return view(t, {end - begin, config.mlp_hidden}); }
  Tensor z() const { return view(b.scratch.z, {end - begin, config.heads, config.head_dim}); }
  Tensor z_grad() const { return view(b.scratch.z_grad, {end - begin, config.heads, config.head_dim}); }
  bool rotates() const { return config.qk_norm || config.qk_gain || config.rotary_dim > 0; }
  double layer_scale() const { return config.layer_scale ? 1 / std::sqrt(double(layer_call.layer + 1)) : 1; }
  double softmax_scale() const { return 1 / std::sqrt(double(config.head_dim)); }

  // The rotated queries, or the projections themselves if no operation changes q and k.
  Tensor q() const { return q_heads(rotates() ? b.scratch.q : b.saved.q_raw); }
  Tensor k() const { return kv_heads(rotates() ? b.scratch.k : b.saved.k_raw); }
  Tensor v() const { return kv_heads(b.saved.v); }
  // The input of the output projection.
  Tensor excluded() const {
    return layer_call.exclude_self ? z().reshape({end - begin, config.heads * config.head_dim}) : q_rows(b.saved.y);
  }
  // The keys and values visible to the queries, with the first row of each segment; without cu_k, cu_q serves for both.
  struct Seen {
    Tensor k, v, cu_q, cu_k;
  };
  // Attention of these tokens' queries to the visible keys and values.
  Attention attention_to(const Seen& s, const Tensor& lse) const {
    return {.q = q(),
            .k = s.k,
            .v = s.v,
            .cu_q = s.cu_q,
            .cu_k = s.cu_k,
            .out = q_heads(b.saved.y),
            .lse = lse,
            .scale = softmax_scale(),
            .window = config.window};
  }
  AttentionBackward attention_backward_to(const Seen& s, const Tensor& lse, const Tensor& dk, const Tensor& dv) const {
    const Attention a = attention_to(s, lse);
    AttentionBackward back{.q = a.q, .k = a.k, .v = a.v, .cu_q = a.cu_q, .cu_k = a.cu_k, .out = a.out, .lse = a.lse};
    back.dout = q_heads(b.scratch.y_grad);
    back.dq = q_heads(b.scratch.q_grad), back.dk = dk, back.dv = dv;
    back.scale = a.scale, back.window = a.window;
    back.deterministic = !call.any_order;
    back.workspace = b.scratch.attention_workspace;
    return back;
  }
  // Attention adds its part of V's gradient to the part of the self exclusion.
  bool adds_to_v() const { return layer_call.exclude_self && call.device.kind == Device::cuda; }
  // Attention also adds to the rows' sums of y * dy, which are computed where both tensors are in memory.
  Tensor delta() const {
    if (!adds_to_v()) return {};
    return Tensor(b.scratch.attention_workspace.data, DType::f32, {config.heads, call.tokens}, call.device);
  }

  AdapterCall adapter(AdapterPair LayerCallAdapters::*slot) const {
    AdapterCall a{.cu = call.cu,
                  .low = b.scratch.adapter_low,
                  .low_grad = b.scratch.adapter_low_grad,
                  .folded = b.scratch.folded,
                  .products = call.products,
                  .workspace = call.linear_workspace,
                  .stream = call.stream};
    if (call.adapters != nullptr) a.pair = &(call.adapters->layer_calls[size_t(b.index)].*slot);
    if (call.adapter_grads != nullptr) {
      a.grad = &(call.adapter_grads->layer_calls[size_t(b.index)].*slot);
      a.write_grad = call.adapter_grads->written;
    }
    return a;
  }
  // The adapters whose first product is kept.
  AdapterCall output_adapter() const {
    AdapterCall a = keeping(adapter(&LayerCallAdapters::o), b.scratch.o_low);
    if (!output_rides()) return a;
    a.rides = true;
    if (b.scratch.o_low_grad) a.low_grad = b.scratch.o_low_grad;
    return a;
  }
  // The first matrix of the output adapter is multiplied together with q, k and v, and their rows have columns for its
  // result.
  bool output_rides() const {
    if (!b.scratch.o_low || !b.saved.qkv || !b.w.qkv || b.saved.qkv.cols() == b.w.qkv.rows()) return false;
    const AdapterCall o = adapter(&LayerCallAdapters::o);
    return o.pair != nullptr && o.pair->a && (o.grad == nullptr || o.write_grad) &&
           adapters_fold(adapter(&LayerCallAdapters::q), b.w.qkv, o.pair->a.size(1));
  }
  Tensor qkv_rows(const Tensor& t, int64_t more_columns) const {
    return q_rows(t).slice(1, 0, b.w.qkv.rows() + more_columns);
  }
  AdapterCall mlp_adapter() const { return keeping(adapter(&LayerCallAdapters::mlp), b.scratch.mlp_low); }
  static AdapterCall keeping(AdapterCall a, const Tensor& low) {
    if (low) a.low = low, a.low_kept = true;
    return a;
  }
  // y = add + x w^T
  void add_product(const Tensor& x, const Tensor& w, const Tensor& add, const Tensor& y) const {
    matmul({.a = x,
            .b = w,
            .c = y,
            .transpose_b = true,
            .beta = 1,
            .products = call.products,
            .add = add,
            .workspace = call.linear_workspace},
           call.stream);
  }
  void show(MatrixInput which, const Tensor& x) const {
    if (call.inputs != nullptr) call.inputs->seen(which, layer_call.layer, x);
  }

  const CallContext& call;
  const GptConfig& config;
  const BlockTensors& b;
  const LayerCall& layer_call;
  int64_t begin = 0, end;  // the tokens of the views
  bool of_block = false;   // merged and mixed rows belong to a block of tokens
};

}  // namespace ingot::detail
