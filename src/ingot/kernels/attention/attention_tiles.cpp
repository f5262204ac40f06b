// Cuts attention in f32 into tasks for attention.simd.cpp. The cut depends on each segment's own sizes, so a segment's
// result depends neither on the number of threads nor on the segments beside it.
#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/attention/attention.simd.h"
#include "ingot/kernels/attention/attention_segment.h"

INGOT_SIMD_DECLARE(void attention_forward(const detail::AttentionTask& t);
                   void attention_backward(const detail::AttentionBackwardTask& t);)

namespace ingot::detail {
namespace {

constexpr int64_t kForwardLanes = 128;     // query rows of a forward task, a multiple of every panel's width
constexpr int64_t kBackwardQueries = 512;  // of a backward task; longer segments sum dk and dv over several

AttentionMask mask_of(const Segment& g, int64_t group, int64_t window, bool causal) {
  return {.queries = g.queries, .keys = g.keys, .group = group, .window = window, .causal = causal};
}
const float* lse_of(const Tensor& lse, const Segment& g, int64_t head) {
  return lse ? static_cast<const float*>(lse.data) + head * lse.stride[0] + g.q_begin : nullptr;
}

// --- forward -----------------------------------------------------------------------------------------------

int64_t forward_blocks(const Segment& g, int64_t group) {
  return (g.queries * group + kForwardLanes - 1) / kForwardLanes;
}

void forward_task(const Attention& a, const Segment& g, int64_t kv_head, int64_t block) {
  const int64_t group = a.q.size(1) / a.k.size(1), head = kv_head * group;
  const int64_t wrap = g.ring == 0 ? g.keys : std::min(g.keys, g.ring - g.first);
  const int64_t scratch = attention_scratch(g.keys, a.q.cols(), a.v.cols());
  AttentionTask t{};
  t.q = head_row<float>(a.q, g.q_begin, head), t.q_row = a.q.stride[0], t.q_head = a.q.stride[1];
  t.k = head_row<float>(a.k, g.key_row(0), kv_head), t.k_row = a.k.stride[0];
  t.v = head_row<float>(a.v, g.key_row(0), kv_head), t.v_row = a.v.stride[0];
  t.k2 = head_row<float>(a.k, g.k_row, kv_head), t.v2 = head_row<float>(a.v, g.k_row, kv_head);
  t.sinks = a.sinks ? a.sinks.ptr<float>() + head : nullptr;
  t.out = head_row<float>(a.out, g.q_begin, head), t.out_row = a.out.stride[0], t.out_head = a.out.stride[1];
  t.lse = const_cast<float*>(lse_of(a.lse, g, head)), t.lse_head = a.lse.stride[0];
  t.lane_begin = block * kForwardLanes, t.lane_end = std::min(g.queries * group, t.lane_begin + kForwardLanes);
  t.wrap = wrap, t.d = a.q.cols(), t.dv = a.v.cols();
  t.mask = mask_of(g, group, a.window, a.causal);
  t.scale = float(a.scale), t.softcap = float(a.softcap);
  t.scratch = static_cast<float*>(thread_scratch(0, scratch * int64_t(sizeof(float))));
  INGOT_SIMD_CALL(attention_forward, t);
}

// --- backward ----------------------------------------------------------------------------------------------

// A run of queries of a segment, and their visible keys.
struct Chunk {
  int64_t segment, query_begin, query_end, keys_begin, keys_end;
  int64_t partial;  // first row of its sums of key head 0; -1: the chunk is a whole segment and needs no partial sums
  int64_t keys() const { return keys_end - keys_begin; }
};

int64_t chunks_of(const Segment& g) { return (g.queries + kBackwardQueries - 1) / kBackwardQueries; }

struct BackwardPlan {
  int64_t chunks = 0, partial_rows = 0;  // rows of a key head
};
// Fills `chunk`, if given; counts otherwise.
BackwardPlan plan_backward(const AttentionBackward& a, Chunk* chunk) {
  BackwardPlan plan;
  for (int64_t s = 0; s + 1 < a.cu_q.size(0); ++s) {
    const Segment g = segment(a.cu_q, a.cu_k, 0, {}, s);
    const int64_t n = chunks_of(g);
    for (int64_t i = 0; i < n; ++i, ++plan.chunks) {
      Chunk c{.segment = s,
              .query_begin = i * kBackwardQueries,
              .query_end = std::min(g.queries, (i + 1) * kBackwardQueries),
              .partial = -1};
      c.keys_begin = visible(g, c.query_begin, a.causal, a.window).begin;
      c.keys_end = visible(g, c.query_end - 1, a.causal, a.window).end;
      if (n > 1) {
        c.partial = plan.partial_rows;
        plan.partial_rows += c.keys();
      }
      if (chunk) chunk[plan.chunks] = c;
    }
  }
  return plan;
}

// The sums of a chunk and key head: dk first, then dv, rows of padded length.
struct KeySums {
  float *dk, *dv;
};
KeySums sums_at(float* memory, const AttentionBackward& a, int64_t rows) {
  return {memory, memory + rows * attention_pad(a.q.cols())};
}
int64_t sum_width(const AttentionBackward& a) { return attention_pad(a.q.cols()) + attention_pad(a.v.cols()); }

void clear_keys(const AttentionBackward& a, const Segment& g, int64_t kv_head) {
  for (int64_t j = 0; j < g.keys; ++j) {
    std::fill_n(head_row<float>(a.dk, g.k_row + j, kv_head), a.dk.cols(), 0.f);
    std::fill_n(head_row<float>(a.dv, g.k_row + j, kv_head), a.dv.cols(), 0.f);
  }
}
void add_keys(const AttentionBackward& a, const Segment& g, int64_t kv_head, const Chunk& c, const KeySums& sums) {
  const int64_t d = a.dk.cols(), dv = a.dv.cols();
  for (int64_t j = 0; j < c.keys(); ++j) {
    const int64_t row = g.k_row + c.keys_begin + j;
    const float *from = sums.dk + j * attention_pad(d), *from_v = sums.dv + j * attention_pad(dv);
    float *to = head_row<float>(a.dk, row, kv_head), *to_v = head_row<float>(a.dv, row, kv_head);
    for (int64_t i = 0; i < d; ++i) to[i] += from[i];
    for (int64_t i = 0; i < dv; ++i) to_v[i] += from_v[i];
  }
}

void backward_task(const AttentionBackward& a, const Chunk& c, int64_t kv_head, float* partial, float* dsinks) {
  const Segment g = segment(a.cu_q, a.cu_k, 0, {}, c.segment);
  const int64_t group = a.q.size(1) / a.k.size(1), head = kv_head * group;
  const int64_t own = partial ? 0 : c.keys() * sum_width(a);
  const int64_t scratch = attention_backward_scratch(a.q.cols(), a.v.cols());
  float* memory = static_cast<float*>(thread_scratch(0, (scratch + own) * int64_t(sizeof(float))));
  const KeySums sums = sums_at(partial ? partial : memory + scratch, a, c.keys());
  AttentionBackwardTask t{};
  t.q = head_row<float>(a.q, g.q_begin, head), t.q_row = a.q.stride[0], t.q_head = a.q.stride[1];
  t.k = head_row<float>(a.k, g.k_row, kv_head), t.k_row = a.k.stride[0];
  t.v = head_row<float>(a.v, g.k_row, kv_head), t.v_row = a.v.stride[0];
  t.out = head_row<float>(a.out, g.q_begin, head), t.out_row = a.out.stride[0], t.out_head = a.out.stride[1];
  t.dout = head_row<float>(a.dout, g.q_begin, head), t.dout_row = a.dout.stride[0], t.dout_head = a.dout.stride[1];
  t.dq = head_row<float>(a.dq, g.q_begin, head), t.dq_row = a.dq.stride[0], t.dq_head = a.dq.stride[1];
  t.lse = lse_of(a.lse, g, head), t.lse_head = a.lse.stride[0];
  t.dlse = lse_of(a.dlse, g, head), t.dlse_head = a.dlse.stride[0];
  t.sinks = a.sinks ? a.sinks.ptr<float>() + head : nullptr;
  t.dsinks = a.dsinks ? dsinks : nullptr;
  t.dk_sum = sums.dk, t.dv_sum = sums.dv;
  t.lane_begin = c.query_begin * group, t.lane_end = c.query_end * group;
  t.keys_begin = c.keys_begin, t.keys_end = c.keys_end;
  t.d = a.q.cols(), t.dv = a.v.cols();
  t.mask = mask_of(g, group, a.window, a.causal);
  t.scale = float(a.scale), t.softcap = float(a.softcap);
  t.scratch = memory;
  INGOT_SIMD_CALL(attention_backward, t);
  if (partial) return;
  clear_keys(a, g, kv_head);
  add_keys(a, g, kv_head, c, sums);
}

// Segments of several chunks, or of none: their sums are added in the chunks' order.
void add_partials(const AttentionBackward& a, const Chunk* chunk, int64_t chunks, int64_t s, int64_t kv_head,
                  float* partial) {
  const Segment g = segment(a.cu_q, a.cu_k, 0, {}, s);
  if (chunks_of(g) == 1) return;
  clear_keys(a, g, kv_head);
  const Chunk* c = std::lower_bound(chunk, chunk + chunks, s, [](const Chunk& x, int64_t y) { return x.segment < y; });
  for (; c < chunk + chunks && c->segment == s; ++c)
    add_keys(a, g, kv_head, *c, sums_at(partial + c->partial * sum_width(a), a, c->keys()));
}

}  // namespace

void attention_f32(const Attention& a) {
  const int64_t segments = a.cu_q.size(0) - 1, kv_heads = a.k.size(1);
  if (kv_heads == 0) return;
  const int64_t group = a.q.size(1) / kv_heads;
  int64_t* first = static_cast<int64_t*>(thread_scratch(3, (segments + 1) * int64_t(sizeof(int64_t))));
  first[0] = 0;  // first[s]: blocks before segment s
  for (int64_t s = 0; s < segments; ++s)
    first[s + 1] = first[s] + forward_blocks(segment(a.cu_q, a.cu_k, a.ring, a.k_first, s), group);
  const int64_t blocks = first[segments];
  ingot::parallel_tasks(blocks * kv_heads, [&](int64_t task) {
    const int64_t at = task / kv_heads, s = std::upper_bound(first, first + segments + 1, at) - first - 1;
    const int64_t block = first[s + 1] - 1 - at;  // a segment's last queries see the most keys and start first
    forward_task(a, segment(a.cu_q, a.cu_k, a.ring, a.k_first, s), task % kv_heads, block);
  });
}

void attention_backward_f32(const AttentionBackward& a) {
  const int64_t segments = a.cu_q.size(0) - 1, heads = a.q.size(1), kv_heads = a.k.size(1);
  if (kv_heads == 0) return;
  const int64_t group = heads / kv_heads;
  const BackwardPlan plan = plan_backward(a, nullptr);
  const int64_t chunk_bytes = (plan.chunks * int64_t(sizeof(Chunk)) + 63) / 64 * 64;
  const int64_t partial_floats = plan.partial_rows * sum_width(a);  // of a key head
  char* memory = static_cast<char*>(
      thread_scratch(3, chunk_bytes + (partial_floats * kv_heads + plan.chunks * heads) * int64_t(sizeof(float))));
  Chunk* chunk = reinterpret_cast<Chunk*>(memory);
  float* partial = reinterpret_cast<float*>(memory + chunk_bytes);
  float* dsinks = partial + partial_floats * kv_heads;
  plan_backward(a, chunk);
  ingot::parallel_tasks(plan.chunks * kv_heads, [&](int64_t task) {
    const int64_t i = task / kv_heads, kv_head = task % kv_heads;
    const Chunk& c = chunk[i];
    float* sums = c.partial < 0 ? nullptr : partial + kv_head * partial_floats + c.partial * sum_width(a);
    backward_task(a, c, kv_head, sums, dsinks + i * heads + kv_head * group);
  });
  if (plan.partial_rows > 0 || plan.chunks < segments)
    ingot::parallel_tasks(segments * kv_heads, [&](int64_t task) {
      add_partials(a, chunk, plan.chunks, task / kv_heads, task % kv_heads, partial + task % kv_heads * partial_floats);
    });
  if (!a.dsinks) return;
  for (int64_t i = 0; i < plan.chunks; ++i)
    for (int64_t h = 0; h < heads; ++h) a.dsinks.ptr<float>()[h] += dsinks[i * heads + h];
}

}  // namespace ingot::detail
