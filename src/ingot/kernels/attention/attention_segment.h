#pragma once
// A packed segment in the form for attention's CPU code.
#include <algorithm>

#include "ingot/kernels/attention/attention.h"

namespace ingot::detail {

struct Segment {
  int64_t q_begin, queries, keys;
  int64_t k_row, first, ring;  // the i-th visible key is in row k_row + i, or k_row + (first + i) % ring
  int64_t key_row(int64_t i) const { return ring == 0 ? k_row + i : k_row + (first + i) % ring; }
};
inline Segment segment(const Tensor& cu_q, const Tensor& cu_k, int64_t ring, const Tensor& k_first, int64_t s) {
  const int32_t* q = cu_q.ptr<int32_t>();
  const int32_t* k = cu_k ? cu_k.ptr<int32_t>() : q;
  const bool round = ring > 0;
  return {q[s], q[s + 1] - q[s], k[s + 1] - k[s], round ? s * ring : k[s], round ? k_first.ptr<int32_t>()[s] : 0, ring};
}

struct Visible {
  int64_t begin, end;
};  // of the segment's keys; empty: begin == end
inline Visible visible(const Segment& g, int64_t i, bool causal, int64_t window) {
  const int64_t end = causal ? std::clamp<int64_t>(i + g.keys - g.queries + 1, 0, g.keys) : g.keys;
  return {window > 0 ? std::max<int64_t>(0, end - window) : 0, end};
}

template <class T> T* head_row(const Tensor& t, int64_t row, int64_t head) {
  return static_cast<T*>(t.data) + row * t.stride[0] + head * t.stride[1];
}

// The fast paths for f32 (attention_tiles.cpp).
void attention_f32(const Attention& a);
void attention_backward_f32(const AttentionBackward& a);

}  // namespace ingot::detail
