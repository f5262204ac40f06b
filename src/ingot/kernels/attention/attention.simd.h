#pragma once
// The arguments that attention_tiles.cpp passes to attention.simd.cpp: plain structs, one per task. All strides are in
// elements.
// A task works on a segment and a key head. The query rows of the heads that share this key head are its lanes: lane l
// is query l / group of head l % group, so neighbouring lanes see nearly the same keys, and a vector holds several
// heads.
#include <cstdint>

namespace ingot::detail {

struct AttentionMask {
  int64_t queries, keys;  // of the segment
  int64_t group;          // query heads per key head
  int64_t window;
  bool causal;
};

struct AttentionTask {
  const float *q, *k, *v;  // first query of the segment and first head of the group; first key
  const float *k2, *v2;    // the ring's first row, which holds key `wrap` and is followed by the later keys
  const float* sinks;      // of the group's heads, or null
  float *out, *lse;        // as q; lse: first query of the group's first head, or null
  int64_t q_row, q_head, k_row, v_row, out_row, out_head, lse_head;
  int64_t lane_begin, lane_end, wrap;
  int64_t d, dv;
  AttentionMask mask;
  float scale, softcap;
  float* scratch;  // attention_scratch() floats
};

struct AttentionBackwardTask {
  const float *q, *k, *v, *out, *dout, *lse, *sinks;
  const float* dlse;  // as lse, or null
  float* dq;
  float *dk_sum, *dv_sum;  // (keys_end - keys_begin) rows of padded d and dv: overwritten
  float* dsinks;           // group numbers, overwritten; or null
  int64_t q_row, q_head, k_row, v_row, out_row, out_head, dout_row, dout_head, lse_head, dlse_head, dq_row, dq_head;
  int64_t lane_begin, lane_end, keys_begin, keys_end;
  int64_t d, dv;
  AttentionMask mask;
  float scale, softcap;
  float* scratch;  // attention_backward_scratch() floats
};

// static, because lower CPU levels must not use an inline function compiled with AVX-512. The sizes hold at every CPU
// level: no vector is longer than 16 floats, no panel wider than two vectors.
constexpr int64_t kAttentionPad = 16, kAttentionPanel = 32;
constexpr int64_t kAttentionKeys = 128;  // keys per tile, forward
constexpr int64_t kAttentionBlock = 64;  // lanes, and keys, per tile, backward
static constexpr int64_t attention_pad(int64_t d) { return (d + kAttentionPad - 1) / kAttentionPad * kAttentionPad; }
static constexpr int64_t attention_scratch(int64_t keys, int64_t d, int64_t dv) {
  const int64_t panel = kAttentionPanel * (attention_pad(d) + attention_pad(dv) + kAttentionKeys);
  return panel > keys + kAttentionPad ? panel : keys + kAttentionPad;
}
static constexpr int64_t attention_backward_scratch(int64_t d, int64_t dv) {
  return kAttentionBlock * (3 * attention_pad(d) + 2 * attention_pad(dv) + 2 * kAttentionBlock + 2);
}

}  // namespace ingot::detail
