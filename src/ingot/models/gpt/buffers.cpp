#include "ingot/models/gpt/buffers.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/core/memory/memory.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/residual/workspace.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rope/rope.h"

namespace ingot::detail {
namespace {

class Planner {
 public:
  explicit Planner(DType activations) : activations_(activations) {}
  void add(Tensor& into, Shape shape, int first, int last) { add(into, activations_, shape, first, last); }
  void add(Tensor& into, DType dtype, Shape shape, int first, int last) {
    wanted_.push_back({&into, dtype, shape, plan_.add(shape.numel() * size_of(dtype), first, last)});
  }
  int64_t solve() {
    plan_.solve();
    return plan_.total_bytes();
  }
  Arena place(Allocator& memory) {  // reserves addresses; on the CPU the system provides memory on the first write
    Arena arena(plan_.total_bytes(), memory);
    for (const Wanted& w : wanted_) *w.into = arena.at(plan_.offset(w.buffer), w.dtype, w.shape);
    return arena;
  }

 private:
  struct Wanted {
    Tensor* into;
    DType dtype;
    Shape shape;
    int buffer;
  };
  DType activations_;
  ArenaPlan plan_;
  std::vector<Wanted> wanted_;
};

struct Plan {
  const GptConfig& c;
  const LayerProgram& program;
  const GptOptions& options;
  GptTypes types;
  Planner planner;
  Buffers& b;
  int64_t T;
  int A;

  int forward_step(int i) const { return 1 + i; }
  int head_step() const { return A + 1; }
  int backward_step(int i) const { return A + 2 + 3 * (A - 1 - i); }  // the first of three
  int last_step() const { return options.training ? 4 * A + 2 : A + 1; }
  // The last step that needs a tensor kept by the forward of layer call i for its backward.
  int kept_until(int i) const { return options.training ? backward_step(i) + 2 : forward_step(i); }
  int64_t q_width() const { return c.heads * c.head_dim; }
  int64_t kv_width() const { return c.kv_heads * c.head_dim; }
  int64_t norm_workspace() const {
    return std::max<int64_t>(1, rmsnorm_backward_workspace_bytes(T, c.dim, types.activations, options.device));
  }

  void stream() {
    for (int i = 0; i <= A; ++i) {
      int last = i == A ? head_step() : kept_until(i);
      for (int j = 0; j < A; ++j)  // the output of layer call i - 1 may feed a later skip
        if (program.layer_calls[size_t(j)].skip_from == i - 1 && i > 0) last = std::max(last, kept_until(j));
      const int first = i == 0 ? 0 : forward_step(i - 1);
      if (i == 0 && c.resid_mix) last = options.training ? last_step() : forward_step(A - 1);
      planner.add(b.in0[size_t(i)], {T, c.dim}, first, last);
      const bool second = i > 0 && program.layer_calls[size_t(i - 1)].lanes;
      if (second) planner.add(b.in1[size_t(i)], {T, c.dim}, first, last);
    }
  }

  void layer_call(int i) {
    const int f = forward_step(i), k = kept_until(i);
    Saved& s = b.saved[size_t(i)];
    planner.add(s.rstd_attn, types.sums(), {T}, f, k);
    if (on_gpu()) {
      planner.add(s.qkv, {T, qkv_columns()}, f, k);
    } else {
      planner.add(s.q_raw, {T, q_width()}, f, k);
      planner.add(s.k_raw, {T, kv_width()}, f, k);
      planner.add(s.v, {T, kv_width()}, f, k);
    }
    planner.add(s.y, {T, q_width()}, f, k);
    planner.add(s.lse, types.sums(), {T * c.heads}, f, k);
    // These tensors are read only before attention's backward; the MLP's output only for the gradients of its scales.
    const int up = options.training ? backward_step(i) : f;
    planner.add(s.rstd_mlp, types.sums(), {T}, f, up);
    planner.add(s.mlp_out, {T, c.dim}, f, (c.branch_scale && !folds_scales(i)) || in_lanes(i) ? up : f);
    if (keeps_signs()) {
      planner.add(s.hidden, {T, c.mlp_hidden}, f, up);
      planner.add(s.signs, DType::u8, {linear_sign_bytes(T, c.mlp_hidden, options.device)}, f, up);
    } else if (options.training) {
      planner.add(s.pre, {T, c.mlp_hidden}, f, up);
    }
    scratch(i);
    if (options.training) scratch_backward(i);
  }

  int64_t block_rows() const { return most_block_rows(T, options); }
  // On a GPU a single product is faster than two of half the width.
  bool on_gpu() const { return options.device.kind == Device::cuda; }
  bool keeps_rows() const { return options.training && options.keep_rows && block_rows() == T; }
  bool keeps_signs() const {
    return options.training && on_gpu() && types.activations == DType::bf16 &&
           slope_follows_from_value_and_sign(activation_named(c.activation));
  }
  // The output adapter's rows behind the rows of q, k and v, aligned.
  bool output_rides() const {
    return on_gpu() && keeps_rows() && options.most_folded > 0 && options.max_adapter_rank > 0;
  }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  int64_t qkv_columns() const {
    constexpr int64_t kAlign = 64;
    return qkv_width() + (output_rides() ? (options.max_adapter_rank + kAlign - 1) / kAlign * kAlign : 0);
  }
  bool in_lanes(int i) const { return program.layer_calls[size_t(i)].lanes; }
  // Two lanes read both branches, each with weights of its own; an adapter adds to a branch before its scale.
  bool folds_scales() const { return options.training && on_gpu() && c.branch_scale && options.max_adapter_rank == 0; }
  bool folds_scales(int i) const { return folds_scales() && !in_lanes(i); }
  int64_t numbers_scaled() const { return c.dim * (q_width() + c.mlp_hidden); }  // of a layer
  void scaled_matrices() {
    if (!folds_scales()) return;
    planner.add(b.scaled, types.compute, {c.layers * numbers_scaled()}, 0, last_step());
    planner.add(b.scaled_grads, types.master, {c.layers * numbers_scaled()}, head_step(), last_step());
  }
  void share_scaled_matrices() {
    if (!folds_scales()) return;
    b.scaled_of.resize(size_t(c.layers));
    const int64_t of_o = c.dim * q_width();
    for (int i = 0; i < A; ++i) {
      if (in_lanes(i)) continue;
      const int layer = program.layer_calls[size_t(i)].layer;
      const auto part = [&](const Tensor& all, bool down) {
        const int64_t first = layer * numbers_scaled() + (down ? of_o : 0);
        const int64_t columns = down ? c.mlp_hidden : q_width();
        return all.slice(0, first, first + c.dim * columns).reshape({c.dim, columns});
      };
      b.scaled_of[size_t(layer)] = {part(b.scaled, false), part(b.scaled, true), part(b.scaled_grads, false),
                                    part(b.scaled_grads, true)};
    }
  }

  void scratch(int i) {
    Scratch& s = b.forward[size_t(i)];
    const int now = forward_step(i);
    // Rows read by the backward pass up to its first, second or third step.
    const auto add = [&](Tensor& t, int64_t rows, int64_t width, int backward) {
      planner.add(t, {rows, width}, now, keeps_rows() && backward > 0 ? backward_step(i) + backward - 1 : now);
    };
    if (program.layer_calls[size_t(i)].skip_slot >= 0) add(s.merged, T, c.dim, 3);
    if (c.resid_mix) add(s.mixed, T, c.dim, 3);
    add(s.q, T, q_width(), 2);
    add(s.k, T, kv_width(), 2);
    add(s.normed, block_rows(), c.dim, 3);
    if (keeps_rows()) add(s.normed_mlp, T, c.dim, 1);
    if (!in_lanes(i)) add(s.mid, block_rows(), c.dim, 1);
    add(s.attn_out, block_rows(), c.dim, folds_scales(i) ? 0 : 1);
    add(s.z, block_rows(), q_width(), 1);
    if (!keeps_signs()) add(s.hidden, block_rows(), c.mlp_hidden, 0);
    add(s.adapter_low, T, options.max_adapter_rank, 0);
    if (keeps_rows()) add(s.mlp_low, T, options.max_adapter_rank, 1);
    if (keeps_rows() && !output_rides()) add(s.o_low, T, options.max_adapter_rank, 3);
    add_folded(s.folded, now, keeps_rows() ? backward_step(i) + 2 : now);
  }
  void add_folded(Tensor& t, int first, int last) {
    const int64_t rows = qkv_width() + (output_rides() ? options.max_adapter_rank : 0);
    if (options.most_folded > 0) planner.add(t, {options.most_folded, rows, c.dim}, first, last);
  }
  // Tensors shared by two steps under a single name.
  void share() {
    share_scaled_matrices();
    for (int i = 0; i < A; ++i) {
      Scratch &f = b.forward[size_t(i)], &s = b.backward[size_t(i)];
      const auto part = [&](const Tensor& all, Tensor& q, Tensor& kv, Tensor& k, Tensor& v) {
        if (!all) return;
        q = all.slice(1, 0, q_width()), kv = all.slice(1, q_width(), qkv_width());
        k = kv.slice(1, 0, kv_width()), v = kv.slice(1, kv_width(), 2 * kv_width());
      };
      Saved& saved = b.saved[size_t(i)];
      part(saved.qkv, saved.q_raw, saved.kv, saved.k_raw, saved.v);
      part(s.qkv_grad, s.q_grad, s.kv_grad, s.k_grad, s.v_grad);
      if (output_rides()) {
        const int64_t end = qkv_width() + options.max_adapter_rank;
        f.o_low = saved.qkv.slice(1, qkv_width(), end), s.o_low_grad = s.qkv_grad.slice(1, qkv_width(), end);
      }
      if (!keeps_rows()) f.normed_mlp = f.normed, s.normed_mlp = s.normed;
      if (!keeps_rows()) continue;
      s.kept = true;
      s.merged = f.merged, s.mixed = f.mixed, s.q = f.q, s.k = f.k, s.normed = f.normed, s.normed_mlp = f.normed_mlp;
      s.folded_kept = f.folded;
      s.attn_out = f.attn_out, s.z = f.z, s.o_low = f.o_low, s.mlp_low = f.mlp_low;
      if (!in_lanes(i)) s.mid = f.mid;
    }
  }

  void scratch_backward(int i) {
    Scratch& s = b.backward[size_t(i)];
    const int to = backward_step(i), attention = to + 1, from = to + 2;
    const auto rows = [&](Tensor& t, int64_t width, int first, int last) { planner.add(t, {T, width}, first, last); };
    const auto block = [&](Tensor& t, int64_t width, int first, int last) {
      planner.add(t, {block_rows(), width}, first, last);
    };
    for (Tensor* t : {&s.normed_grad, &s.branch_grad}) block(*t, c.dim, to, from);
    if (!keeps_rows()) {
      for (Tensor* t : {&s.merged, &s.mixed, &s.normed}) block(*t, c.dim, to, from);
      block(s.attn_out, c.dim, to, to);
      block(s.z, q_width(), to, to);
      rows(s.q, q_width(), attention, attention);
      rows(s.k, kv_width(), attention, attention);
    }
    if (!keeps_rows() || in_lanes(i)) block(s.mid, c.dim, to, to);
    block(s.z_grad, q_width(), to, to);
    if (!keeps_signs()) block(s.hidden, c.mlp_hidden, to, to);
    block(s.hidden_grad, c.mlp_hidden, to, to);
    rows(s.y_grad, q_width(), to, attention);
    if (!on_gpu()) rows(s.v_grad_self, kv_width(), to, from);
    if (on_gpu()) {
      rows(s.qkv_grad, qkv_columns(), to, from);
    } else {
      rows(s.q_grad, q_width(), attention, from);
      for (Tensor* t : {&s.k_grad, &s.v_grad}) rows(*t, kv_width(), attention, from);
    }
    const int64_t attending = attention_backward_workspace_bytes(
        {.q = Tensor(nullptr, types.activations, {T, c.heads, c.head_dim}, options.device),
         .cu_q = Tensor(nullptr, DType::i32, {options.any_order_segments + 1}, options.device),
         .deterministic = options.any_order_segments == 0});
    if (options.most_keys > 0)
      for (Tensor* t : {&s.all_k_grad, &s.all_v_grad})
        planner.add(*t, {options.most_keys, kv_width()}, attention, attention);
    if (attending > 0) planner.add(s.attention_workspace, DType::u8, {attending}, to, attention);
    block(s.in_grad, c.dim, from, from);
    for (Tensor* t : {&s.adapter_low, &s.adapter_low_grad}) rows(*t, options.max_adapter_rank, to, from);
    add_folded(s.folded, from, from);
    planner.add(s.norm_workspace, DType::u8, {norm_workspace()}, to, from);
    if (const int64_t sums = residual_workspace_bytes(T, c.dim, options.device); sums > 0)
      planner.add(s.residual_workspace, DType::u8, {sums}, to, from);
    const int64_t rope = c.qk_gain ? qk_norm_rope_backward_workspace_bytes(T, c.heads, options.device) : 0;
    if (rope > 0) planner.add(s.rope_workspace, DType::u8, {rope}, from, from);
  }

  void scored_rows() {
    if (!keeps_rows() || !options.cut_last || options.most_scored == 0) return;
    ScoredRows& r = b.scored_rows;
    const int64_t N = std::min(options.most_scored, T);
    const int from = forward_step(A - 1), backward = backward_step(A - 1), to = backward + 2;
    for (Tensor* t : {&r.merged, &r.mixed, &r.lane1, &r.normed}) planner.add(*t, {N, c.dim}, from, to);
    planner.add(r.v, {N, kv_width()}, from, to);
    planner.add(r.v_grad, {N, kv_width()}, backward, to);
    planner.add(r.normed_grad, {N, c.dim}, backward, to);
    planner.add(r.spare, {N, std::max(c.dim, kv_width())}, backward, to);
  }

  void ends() {
    if (const int64_t bytes = linear_workspace_bytes(options.device); bytes > 0)
      planner.add(b.linear_workspace, DType::u8, {bytes}, 0, last_step());
    const int head = head_step();
    const int64_t E = c.embed_dim;
    planner.add(b.embedded, {T, c.factorised() ? E : c.dim}, 0, 0);
    if (c.factorised()) planner.add(b.embed_low, {T, E}, 0, 0);
    const int64_t N = options.most_scored > 0 ? std::min(options.most_scored, T) : T;
    planner.add(b.final, {T, c.dim}, head, head);
    planner.add(b.final_rstd, types.sums(), {N}, head, head);
    planner.add(b.head_normed, {N, c.dim}, head, head);
    planner.add(b.head_low, {N, options.max_adapter_rank}, head, head);
    if (c.factorised()) planner.add(b.head_in, {N, E}, head, head);
    if (options.most_scored > 0)
      for (Tensor* t : {&b.scored, &b.scored_grad}) planner.add(*t, {N, c.dim}, head, head);
    const int64_t head_bytes = linear_cross_entropy_workspace_bytes(
        N, c.factorised() ? E : c.dim, c.vocab, types.activations, options.products, options.device);
    planner.add(b.head_workspace, DType::u8, {std::max<int64_t>(1, head_bytes)}, head, head);
    if (!options.training) return;
    planner.add(b.head_normed_grad, {N, c.dim}, head, head);
    planner.add(b.head_low_grad, {N, options.max_adapter_rank}, head, head);
    if (c.factorised()) planner.add(b.head_in_grad, {N, E}, head, head);
    planner.add(b.g0, {T, c.dim}, head, last_step());
    if (c.lane_start >= 0) planner.add(b.g1, {T, c.dim}, head, last_step());
    if (c.resid_mix) planner.add(b.x0_grad, {T, c.dim}, head, last_step());
    for (int j = 0; j < A; ++j) {
      const int from = program.layer_calls[size_t(j)].skip_from;
      if (from >= 0) planner.add(b.skip_grad[size_t(from + 1)], {T, c.dim}, backward_step(j), backward_step(from));
    }
    planner.add(b.embedded_again, {T, c.factorised() ? E : c.dim}, last_step(), last_step());
    planner.add(b.embed_workspace, DType::u8, {norm_workspace()}, head, last_step());
    if (c.factorised()) planner.add(b.embed_low_grad, {T, E}, last_step(), last_step());
    if (c.factorised()) planner.add(b.embed_low_again, {T, E}, last_step(), last_step());
  }
};

Plan plan_for(Buffers& b, const GptConfig& config, const LayerProgram& program, const GptTypes& types,
              const GptOptions& options) {
  const size_t layer_calls = program.layer_calls.size();
  b.in0.resize(layer_calls + 1);
  b.in1.resize(layer_calls + 1);
  b.skip_grad.resize(layer_calls + 1);
  b.saved.resize(layer_calls);
  b.forward.resize(layer_calls);
  b.backward.resize(layer_calls);
  Plan plan{config, program, options, types, Planner(types.activations), b, options.capacity, int(layer_calls)};
  plan.stream();
  for (int i = 0; i < int(layer_calls); ++i) plan.layer_call(i);
  plan.scored_rows();
  plan.scaled_matrices();
  plan.ends();
  return plan;
}

}  // namespace

int64_t planned_bytes(const GptConfig& config, const LayerProgram& program, const GptTypes& types,
                      const GptOptions& options) {
  Buffers b;
  return plan_for(b, config, program, types, options).planner.solve();
}

Buffers plan_buffers(const GptConfig& config, const LayerProgram& program, const GptTypes& types,
                     const GptOptions& options) {
  Buffers b;
  Plan plan = plan_for(b, config, program, types, options);
  Allocator& memory = options.memory != nullptr ? *options.memory : gpu::memory_of(options.device);
  const int64_t bytes = plan.planner.solve();
  if (options.training)
    require_memory(bytes, detail::concat("training on ", options.capacity, " tokens at once"), memory);
  b.arena = plan.planner.place(memory);
  plan.share();
  return b;
}

}  // namespace ingot::detail
