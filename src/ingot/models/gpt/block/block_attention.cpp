#include "ingot/models/gpt/block/block_attention.h"

#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/models/gpt/block/block_stream.h"

namespace ingot::detail {

void AttentionBranch::project(const Tensor& w, const Tensor& y, AdapterPair LayerCallAdapters::*slot) const {
  const AdapterCall one[] = {at.adapter(slot)};
  adapted_linear(one, at.normed(), w, y);
}
void AttentionBranch::rotate() const { rotate_queries(), rotate_keys(); }
void AttentionBranch::rotate_queries() const {
  rotate(at.q_heads(at.b.saved.q_raw), at.q_heads(at.b.scratch.q), at.b.w.q_gain);
}
void AttentionBranch::rotate_keys() const {
  rotate(at.kv_heads(at.b.saved.k_raw), at.kv_heads(at.b.scratch.k), Tensor());
}
void AttentionBranch::rotate(const Tensor& x, const Tensor& y, const Tensor& gain) const {
  if (!at.rotates()) return;
  qk_norm_rope({.x = x,
                .y = y,
                .positions = at.positions(),
                .cos = at.call.cos,
                .sin = at.call.sin,
                .gain = gain,
                .eps = at.config.norm_eps,
                .normalise = at.config.qk_norm,
                .interleaved = at.config.rope_interleaved,
                .sign = at.config.rope_sign},
               at.call.stream);
}
void AttentionBranch::project_all() const {
  if (!at.b.saved.qkv || !at.b.w.qkv) return project_queries(), project_keys();
  const AdapterCall all[] = {at.adapter(&LayerCallAdapters::q), at.adapter(&LayerCallAdapters::k),
                             at.adapter(&LayerCallAdapters::v)};
  const AdapterPair* const rider = at.output_rides() ? &at.call.adapters->layer_calls[size_t(at.b.index)].o : nullptr;
  adapted_linear(all, at.normed(), at.b.w.qkv, at.qkv_rows(at.b.saved.qkv, rider != nullptr ? rider->a.size(1) : 0),
                 rider);
}
void AttentionBranch::project_queries() const { project(at.b.w.q, at.q_rows(at.b.saved.q_raw), &LayerCallAdapters::q); }
void AttentionBranch::project_keys() const {
  if (at.b.saved.kv && at.b.w.kv) {
    const AdapterCall both[] = {at.adapter(&LayerCallAdapters::k), at.adapter(&LayerCallAdapters::v)};
    return adapted_linear(both, at.normed(), at.b.w.kv, at.kv_rows(at.b.saved.kv));
  }
  project(at.b.w.k, at.kv_rows(at.b.saved.k_raw), &LayerCallAdapters::k);
  project(at.b.w.v, at.kv_rows(at.b.saved.v), &LayerCallAdapters::v);
}
void AttentionBranch::attend() const {
  if (at.call.cached != nullptr) return attend_cached();
  attention(at.attention_to({.k = at.k(), .v = at.v(), .cu_q = at.call.cu_seqlens}, at.lse()), at.call.stream);
}
void AttentionBranch::attention_output() const {
  if (at.layer_call.exclude_self)
    exclude_self({.y = at.q_heads(at.b.saved.y), .v = at.v(), .z = at.z()}, at.call.stream);
  at.show(MatrixInput::attention_output, at.excluded());
  if (at.b.scaled != nullptr) return at.add_product(at.excluded(), at.b.scaled->o, at.mixed(), at.mid());
  linear({.x = at.excluded(),
          .w = at.b.w.o,
          .y = at.attn_out(),
          .products = at.call.products,
          .workspace = at.call.linear_workspace},
         at.call.stream);
  adapter_forward(at.output_adapter(), at.normed(), at.attn_out(), true);
}
void AttentionBranch::attention_output_again() const {
  if (at.call.adapters != nullptr) ResidualStream{at}.norm(at.mixed(), at.b.w.attn_norm, at.normed(), Tensor());
  attention_output();
}
void AttentionBranch::attention_output_backward(const Tensor& dout) const {
  const Scratch& s = at.b.scratch;
  linear_backward(
      {.dy = dout,
       .x = at.excluded(),
       .w = at.b.scaled != nullptr ? at.b.scaled->o : at.b.w.o,
       .dx = at.layer_call.exclude_self ? at.z_grad().reshape({at.end - at.begin, at.config.heads * at.config.head_dim})
                                        : at.q_rows(s.y_grad),
       .dw = at.b.dw.o && at.b.scaled != nullptr ? at.b.scaled->o_grad : at.b.dw.o,
       .products = at.call.products,
       .workspace = at.call.linear_workspace},
      at.call.stream);
  if (!at.layer_call.exclude_self) return;
  exclude_self_backward({.y = at.q_heads(at.b.saved.y),
                         .v = at.v(),
                         .dz = at.z_grad(),
                         .dy = at.q_heads(s.y_grad),
                         .dv = at.kv_heads(at.adds_to_v() ? s.v_grad : s.v_grad_self),
                         .write_dv = true,
                         .delta = at.delta()},
                        at.call.stream);
}
void AttentionBranch::attend_backward() const {
  if (at.call.cached != nullptr) return attend_cached_backward();
  const Scratch& s = at.b.scratch;
  AttentionBackward a = at.attention_backward_to({.k = at.k(), .v = at.v(), .cu_q = at.call.cu_seqlens}, at.lse(),
                                                 at.kv_heads(s.k_grad), at.kv_heads(s.v_grad));
  a.add_dv = at.adds_to_v();
  a.has_delta = bool(at.delta());
  attention_backward(a, at.call.stream);
}
void AttentionBranch::projections_backward(bool of_input) const {
  const Scratch& s = at.b.scratch;
  if (at.layer_call.exclude_self && !at.adds_to_v())
    axpby({.x = at.kv_rows(s.v_grad_self), .y = at.kv_rows(s.v_grad)}, at.call.stream);
  rotate_backward();
  if (!at.kept()) ResidualStream{at}.norm(at.mixed(), at.b.w.attn_norm, at.normed(), Tensor());
  if (!s.qkv_grad || !at.b.w.qkv) return queries_backward(), keys_backward(true);
  AdapterCall all[] = {at.adapter(&LayerCallAdapters::q), at.adapter(&LayerCallAdapters::k),
                       at.adapter(&LayerCallAdapters::v)};
  all[0].kept = s.folded_kept;
  const AdapterCall output = at.output_adapter();
  if (output.rides) output_adapter_backward();  // writes its columns of qkv_grad
  adapted_linear_backward(all, at.normed(), at.b.w.qkv, at.b.dw.qkv,
                          at.qkv_rows(s.qkv_grad, output.rides ? output.pair->a.size(1) : 0),
                          of_input ? at.normed_grad() : Tensor(), false, output.rides ? &output : nullptr);
  if (!output.rides) output_adapter_backward();
}
void AttentionBranch::output_adapter_backward() const {
  adapter_backward(at.output_adapter(), at.normed(), at.branch_grad(), at.normed_grad(), true);
}
void AttentionBranch::queries_backward() const {
  project_backward(at.q_rows(at.b.scratch.q_grad), at.b.w.q, at.b.dw.q, &LayerCallAdapters::q, false);
  output_adapter_backward();
}
void AttentionBranch::keys_backward(bool accumulate) const {
  const Scratch& s = at.b.scratch;
  if (s.kv_grad && at.b.w.kv) {
    const AdapterCall both[] = {at.adapter(&LayerCallAdapters::k), at.adapter(&LayerCallAdapters::v)};
    adapted_linear_backward(both, at.normed(), at.b.w.kv, at.b.dw.kv, at.kv_rows(s.kv_grad), at.normed_grad(),
                            accumulate);
  } else {
    project_backward(at.kv_rows(s.k_grad), at.b.w.k, at.b.dw.k, &LayerCallAdapters::k, accumulate);
    project_backward(at.kv_rows(s.v_grad), at.b.w.v, at.b.dw.v, &LayerCallAdapters::v, true);
  }
}
void AttentionBranch::rotate_backward() const { rotate_queries_backward(), rotate_keys_backward(); }
void AttentionBranch::rotate_queries_backward() const {
  rotate_backward(at.q_heads(at.b.saved.q_raw), at.q_heads(at.b.scratch.q_grad), at.b.w.q_gain, at.b.dw.q_gain);
}
void AttentionBranch::rotate_keys_backward() const {
  rotate_backward(at.kv_heads(at.b.saved.k_raw), at.kv_heads(at.b.scratch.k_grad), Tensor(), Tensor());
}
void AttentionBranch::rotate_backward(const Tensor& x, const Tensor& d, const Tensor& gain, const Tensor& dgain) const {
  if (!at.rotates()) return;
  qk_norm_rope_backward({.x = x,
                         .dy = d,
                         .dx = d,
                         .positions = at.positions(),
                         .cos = at.call.cos,
                         .sin = at.call.sin,
                         .gain = gain,
                         .dgain = dgain,
                         .eps = at.config.norm_eps,
                         .normalise = at.config.qk_norm,
                         .interleaved = at.config.rope_interleaved,
                         .sign = at.config.rope_sign,
                         .workspace = gain ? at.b.scratch.rope_workspace : Tensor()},
                        at.call.stream);
}
void AttentionBranch::project_backward(const Tensor& dy, const Tensor& w, const Tensor& dw,
                                       AdapterPair LayerCallAdapters::*slot, bool accumulate) const {
  const AdapterCall one[] = {at.adapter(slot)};
  adapted_linear_backward(one, at.normed(), w, dw, dy, at.normed_grad(), accumulate);
}

// Calls use(begin, end, keys, values, cu) for each segment: its tokens; the keys and values visible to these tokens,
// first the cached ones and then the tokens' own; and the numbers of both (cu).
template <class Use> void AttentionBranch::each_cached(Use&& use) const {
  const CachedSegments& cached = *at.call.cached;
  for (size_t s = 0; s < cached.sequences.size(); ++s) {
    const int64_t begin = at.call.cu[s], end = at.call.cu[s + 1], sequence = cached.sequences[s];
    if (begin == end) continue;
    const int64_t base = sequence * cached.cache.capacity(), length = cached.cache.length(sequence);
    const int64_t total = base + length + end - begin, seen = cached_keys(cached, s, end - begin);
    use(begin, end, cached.cache.keys(at.b.index).slice(0, total - seen, total),
        cached.cache.values(at.b.index).slice(0, total - seen, total), at.call.cached_cu.row(int64_t(s)));
  }
}

// Appends this call's keys and values to each sequence's cache and attends to the whole cache.
void AttentionBranch::attend_cached() const {
  if (at.call.cache_at) {
    const GptCache& cache = at.call.cached->cache;
    const int64_t base = at.call.cached->sequences[0] * cache.capacity(), end = base + cache.capacity();
    const Tensor all_k = cache.keys(at.b.index).slice(0, base, end),
                 all_v = cache.values(at.b.index).slice(0, base, end);
    copy_at({.from = at.k(), .to = all_k, .at = at.call.cache_at}, at.call.stream);
    copy_at({.from = at.v(), .to = all_v, .at = at.call.cache_at}, at.call.stream);
    const Tensor cu = at.call.cached_cu.row(0);
    attention(at.attention_to({.k = all_k, .v = all_v, .cu_q = cu.row(0), .cu_k = cu.row(1)}, Tensor()),
              at.call.stream);
    return;
  }
  each_cached([&](int64_t begin, int64_t end, const Tensor& keys, const Tensor& values, const Tensor& cu) {
    const int64_t n = end - begin, seen = keys.size(0);
    copy({.from = at.k().slice(0, begin, end), .to = keys.slice(0, seen - n, seen)}, at.call.stream);
    copy({.from = at.v().slice(0, begin, end), .to = values.slice(0, seen - n, seen)}, at.call.stream);
    const BlockView part = at.of_tokens(begin, end);
    attention(part.attention_to({.k = keys, .v = values, .cu_q = cu.row(0), .cu_k = cu.row(1)}, part.cached_lse()),
              at.call.stream);
  });
}
// Cached keys and values are constant, so only the gradients of the keys of this call's tokens are kept.
void AttentionBranch::attend_cached_backward() const {
  const Scratch& s = at.b.scratch;
  each_cached([&](int64_t begin, int64_t end, const Tensor& keys, const Tensor& values, const Tensor& cu) {
    const int64_t n = end - begin, seen = keys.size(0);
    const Tensor dk = view(s.all_k_grad, keys.shape), dv = view(s.all_v_grad, keys.shape);
    const BlockView part = at.of_tokens(begin, end);
    attention_backward(part.attention_backward_to({.k = keys, .v = values, .cu_q = cu.row(0), .cu_k = cu.row(1)},
                                                  part.cached_lse(), dk, dv),
                       at.call.stream);
    copy({.from = dk.slice(0, seen - n, seen), .to = part.kv_heads(s.k_grad)}, at.call.stream);
    const Tensor own = part.kv_rows(s.v_grad), tail = dv.slice(0, seen - n, seen);
    if (at.adds_to_v())
      axpby({.x = tail.reshape({n, own.cols()}), .y = own}, at.call.stream);
    else
      copy({.from = tail, .to = own.split_last(at.config.kv_heads)}, at.call.stream);
  });
}

}  // namespace ingot::detail
