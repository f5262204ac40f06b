#include "ingot/kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/attention/attention_segment.h"

namespace ingot {
namespace {

using detail::head_row;
using detail::Segment;
using detail::segment;
using detail::Visible;
using detail::visible;

// --- checks ------------------------------------------------------------------------------------------------

void check_device(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  INGOT_CHECK(t.device == like.device, op, ": found ", name, " on ", t.device, ", expected ", like.device);
}

void check_operand(const char* op, const char* name, const Tensor& t, const Tensor& like, int64_t heads,
                   int64_t width) {
  INGOT_CHECK_EQ(t.rank(), 3, op, ": rank of ", name);
  INGOT_CHECK_EQ(t.dtype, like.dtype, op, ": dtype of ", name);
  check_device(op, name, t, like);
  INGOT_CHECK_EQ(t.size(1), heads, op, ": heads of ", name);
  INGOT_CHECK_EQ(t.size(2), width, op, ": head size of ", name);
  INGOT_CHECK(width <= 1 || t.step(2) == 1, op, ": found ", name, " with last stride ", t.step(2), ", expected 1");
}

void check_offsets(const char* op, const char* name, const Tensor& cu, const Tensor& like) {
  INGOT_CHECK_EQ(cu.rank(), 1, op, ": rank of ", name);
  INGOT_CHECK_EQ(cu.dtype, DType::i32, op, ": dtype of ", name);
  check_device(op, name, cu, like);
  INGOT_CHECK_GE(cu.size(0), 1, op, ": length of ", name);
  INGOT_CHECK(cu.contiguous(), op, ": found ", name, " with stride ", cu.step(0), ", expected 1");
}

// Offsets are checked only on the CPU; a GPU kernel trusts the offsets.
void check_offset_values(const char* op, const char* name, const Tensor& cu) {
  if (cu.device.kind != Device::cpu) return;
  const int32_t* at = cu.ptr<int32_t>();
  INGOT_CHECK_EQ(at[0], 0, op, ": first entry of ", name);
  for (int64_t s = 0; s + 1 < cu.size(0); ++s)
    INGOT_CHECK(at[s] <= at[s + 1], op, ": found ", name, "[", s + 1, "] = ", at[s + 1], " after ", at[s],
                ", expected no decrease");
}
int64_t last_offset(const Tensor& cu) { return cu.ptr<int32_t>()[cu.size(0) - 1]; }

// Checks lse or its gradient.
void check_lse(const char* op, const char* name, const Tensor& t, const Tensor& q) {
  const Shape shape{q.size(1), q.size(0)};
  INGOT_CHECK(t.shape == shape, op, ": found ", name, " of shape ", t.shape, ", expected ", shape);
  INGOT_CHECK(t.size(1) <= 1 || t.step(1) == 1, op, ": found ", name, " with last stride ", t.step(1), ", expected 1");
  INGOT_CHECK_EQ(t.dtype, q.dtype == DType::f64 ? DType::f64 : DType::f32, op, ": dtype of ", name);
  check_device(op, name, t, q);
}

// The checks of forward and backward; both structs use the same field names.
template <class Op> void check_common(const char* op, const Op& a) {
  INGOT_CHECK(a.q && a.k && a.v && a.out && a.cu_q, op, ": found an operand missing, expected q, k, v, cu_q and out");
  INGOT_CHECK_EQ(a.q.rank(), 3, op, ": rank of q");
  INGOT_CHECK(a.q.dtype == DType::f32 || a.q.dtype == DType::f64 || a.q.device.kind != Device::cpu, op,
              ": found dtype ", a.q.dtype, ", expected f32 or f64 on a cpu");
  const int64_t heads = a.q.size(1), kv_heads = a.k.rank() == 3 ? a.k.size(1) : 0;
  check_operand(op, "q", a.q, a.q, heads, a.q.size(2));
  check_operand(op, "k", a.k, a.q, kv_heads, a.q.size(2));
  check_operand(op, "v", a.v, a.q, kv_heads, a.v.cols());
  check_operand(op, "out", a.out, a.q, heads, a.v.cols());
  INGOT_CHECK(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, op, ": found ", heads, " query heads and ", kv_heads,
              " key heads, expected a multiple");
  INGOT_CHECK_EQ(a.v.size(0), a.k.size(0), op, ": rows of v");
  INGOT_CHECK_EQ(a.out.size(0), a.q.size(0), op, ": rows of out");
  check_offsets(op, "cu_q", a.cu_q, a.q);
  check_offset_values(op, "cu_q", a.cu_q);
  if (a.cu_k) {
    check_offsets(op, "cu_k", a.cu_k, a.q);
    check_offset_values(op, "cu_k", a.cu_k);
    INGOT_CHECK_EQ(a.cu_k.size(0), a.cu_q.size(0), op, ": length of cu_k");
  }
  if (a.q.device.kind == Device::cpu) INGOT_CHECK_LE(last_offset(a.cu_q), a.q.size(0), op, ": last entry of cu_q");
  if (a.sinks) {
    INGOT_CHECK(a.sinks.shape == Shape({heads}) && a.sinks.contiguous(), op, ": found sinks of shape ", a.sinks.shape,
                ", expected ", Shape{heads}, ", contiguous");
    INGOT_CHECK(a.sinks.dtype == a.q.dtype || (a.sinks.dtype == DType::f32 && size_of(a.q.dtype) == 2), op,
                ": found sinks of dtype ", a.sinks.dtype, ", expected ", a.q.dtype, ", or f32 beside 16-bit types");
    check_device(op, "sinks", a.sinks, a.q);
  }
  if (a.lse) check_lse(op, "lse", a.lse, a.q);
  INGOT_CHECK_GE(a.window, 0, op, ": window");
  INGOT_CHECK(a.window == 0 || a.causal, op, ": found a window of ", a.window,
              " without a causal mask, expected causal");
  INGOT_CHECK(a.softcap >= 0, op, ": found softcap ", a.softcap, ", expected at least 0");
}

void check_keys(const Attention& a) {
  const char* op = "attention";
  INGOT_CHECK_GE(a.ring, 0, op, ": ring");
  const Tensor& cu = a.cu_k ? a.cu_k : a.cu_q;
  const bool host = a.q.device.kind == Device::cpu;
  if (a.ring == 0) {
    if (host) INGOT_CHECK_LE(last_offset(cu), a.k.size(0), op, ": last entry of cu_k");
    return;
  }
  const int64_t segments = a.cu_q.size(0) - 1;
  INGOT_CHECK(
      a.k_first && a.k_first.shape == Shape({segments}) && a.k_first.dtype == DType::i32 && a.k_first.contiguous(), op,
      ": found k_first of shape ", a.k_first.shape, " and dtype ", a.k_first.dtype, ", expected ", Shape{segments},
      " i32 with a ring");
  check_device(op, "k_first", a.k_first, a.q);
  INGOT_CHECK_GE(a.k.size(0), segments * a.ring, op, ": rows of k with a ring of ", a.ring);
  if (!host) return;
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t count = cu.ptr<int32_t>()[s + 1] - cu.ptr<int32_t>()[s], first = a.k_first.ptr<int32_t>()[s];
    INGOT_CHECK_LE(count, a.ring, op, ": visible keys of segment ", s);
    INGOT_CHECK(0 <= first && first < a.ring, op, ": found k_first[", s, "] = ", first, ", expected 0 to ", a.ring - 1);
  }
}

// All segments have equally many rows. Offsets on a GPU are not read.
void check_regular(const char* op, const char* name, const Tensor& t, const Tensor& cu) {
  const int64_t segments = cu.size(0) - 1, rows = t.size(0);
  if (segments == 0) return;
  INGOT_CHECK(rows % segments == 0, op, ": found ", rows, " rows of ", name, " in ", segments,
              " segments, expected a multiple where segments are regular");
  if (t.device.kind != Device::cpu) return;
  for (int64_t s = 0; s < segments; ++s)
    INGOT_CHECK_EQ(int64_t(cu.ptr<int32_t>()[s + 1] - cu.ptr<int32_t>()[s]), rows / segments, op, ": rows of ", name,
                   " in regular segment ", s);
}

void check_backward(const AttentionBackward& a) {
  const char* op = "attention_backward";
  check_common(op, a);
  INGOT_CHECK(a.lse && a.dout && a.dq && a.dk && a.dv, op,
              ": found an operand missing, expected lse, dout, dq, dk and dv");
  const int64_t heads = a.q.size(1), kv_heads = a.k.size(1);
  check_operand(op, "dout", a.dout, a.q, heads, a.v.cols());
  check_operand(op, "dq", a.dq, a.q, heads, a.q.cols());
  check_operand(op, "dk", a.dk, a.q, kv_heads, a.q.cols());
  check_operand(op, "dv", a.dv, a.q, kv_heads, a.v.cols());
  INGOT_CHECK_EQ(a.dout.size(0), a.q.size(0), op, ": rows of dout");
  INGOT_CHECK_EQ(a.dq.size(0), a.q.size(0), op, ": rows of dq");
  INGOT_CHECK_EQ(a.dk.size(0), a.k.size(0), op, ": rows of dk");
  INGOT_CHECK_EQ(a.dv.size(0), a.k.size(0), op, ": rows of dv");
  if (a.q.device.kind == Device::cpu)
    INGOT_CHECK_LE(last_offset(a.cu_k ? a.cu_k : a.cu_q), a.k.size(0), op, ": last entry of cu_k");
  if (a.regular) {
    check_regular(op, "q", a.q, a.cu_q);
    check_regular(op, "k", a.k, a.cu_k ? a.cu_k : a.cu_q);
  }
  if (a.dlse) {
    check_lse(op, "dlse", a.dlse, a.q);
    INGOT_CHECK(!a.has_delta, op, ": found dlse beside has_delta, expected one of them");
  }
  if (a.dsinks) {
    INGOT_CHECK(bool(a.sinks), op, ": found dsinks without sinks, expected both");
    INGOT_CHECK(a.dsinks.shape == Shape({heads}) && a.dsinks.contiguous(), op, ": found dsinks of shape ",
                a.dsinks.shape, ", expected ", Shape{heads}, ", contiguous");
    const DType sums = size_of(a.q.dtype) == 2 ? DType::f32 : a.q.dtype;
    INGOT_CHECK_EQ(a.dsinks.dtype, sums, op, ": dtype of dsinks");
    check_device(op, "dsinks", a.dsinks, a.q);
  }
}

void check_workspace(const AttentionBackward& a) {
  const char* op = "attention_backward";
  const int64_t bytes = attention_backward_workspace_bytes(a);
  if (bytes == 0) return;
  const Tensor& t = a.workspace;
  INGOT_CHECK(t.dtype == DType::u8 && t.contiguous() && t.numel() >= bytes, op, ": workspace: found ", t.numel(),
              " elements of ", t.dtype, ", expected at least ", bytes, " of u8");
  check_device(op, "workspace", t, a.q);
  INGOT_CHECK(reinterpret_cast<uintptr_t>(t.data) % 16 == 0, op,
              ": workspace: found an address not aligned to 16 bytes, expected an aligned one");
}

// --- the plain loop ----------------------------------------------------------------------------------------

template <class T> T dot(const T* a, const T* b, int64_t n) {
  T sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

template <class T> T capped(T score, T softcap) { return softcap > 0 ? softcap * std::tanh(score / softcap) : score; }

template <class T> void forward_row(const Attention& a, const Segment& g, int64_t head, int64_t i, T* scores) {
  const int64_t kv_head = head / (a.q.size(1) / a.k.size(1)), row = g.q_begin + i;
  const Visible see = visible(g, i, a.causal, a.window);
  const T* q = head_row<T>(a.q, row, head);
  T top = a.sinks ? a.sinks.ptr<T>()[head] : -std::numeric_limits<T>::infinity();
  for (int64_t j = see.begin; j < see.end; ++j) {
    scores[j] = capped(T(a.scale) * dot(q, head_row<T>(a.k, g.key_row(j), kv_head), a.q.cols()), T(a.softcap));
    top = std::max(top, scores[j]);
  }
  T* out = head_row<T>(a.out, row, head);
  std::fill(out, out + a.v.cols(), T(0));
  T sum = a.sinks ? std::exp(a.sinks.ptr<T>()[head] - top) : T(0);
  for (int64_t j = see.begin; j < see.end; ++j) {
    const T p = std::exp(scores[j] - top);
    const T* v = head_row<T>(a.v, g.key_row(j), kv_head);
    sum += p;
    for (int64_t c = 0; c < a.v.cols(); ++c) out[c] += p * v[c];
  }
  const bool nothing = see.begin == see.end && !a.sinks;
  if (!nothing)
    for (int64_t c = 0; c < a.v.cols(); ++c) out[c] /= sum;
  if (a.lse)
    static_cast<T*>(a.lse.data)[head * a.lse.stride[0] + row] =
        nothing ? -std::numeric_limits<T>::infinity() : top + std::log(sum);
}

template <class T> void forward_plain(const Attention& a) {
  const int64_t segments = a.cu_q.size(0) - 1, heads = a.q.size(1);
  parallel_tasks(segments * heads, [&](int64_t task) {
    const Segment g = segment(a.cu_q, a.cu_k, a.ring, a.k_first, task / heads);
    T* scores = static_cast<T*>(thread_scratch(0, g.keys * int64_t(sizeof(T))));
    for (int64_t i = 0; i < g.queries; ++i) forward_row<T>(a, g, task % heads, i, scores);
  });
}

// A query row: adds to dk and dv of its keys, writes dq, and returns its term of the gradient of its head's sink.
template <class T> T backward_row(const AttentionBackward& a, const Segment& g, int64_t head, int64_t i) {
  const int64_t kv_head = head / (a.q.size(1) / a.k.size(1)), row = g.q_begin + i, d = a.q.cols(), dv = a.v.cols();
  const Visible see = visible(g, i, a.causal, a.window);
  const T *q = head_row<T>(a.q, row, head), *dout = head_row<T>(a.dout, row, head);
  const T lse = static_cast<const T*>(a.lse.data)[head * a.lse.stride[0] + row];
  T delta = dot(dout, head_row<T>(a.out, row, head), dv);
  if (a.dlse) delta -= static_cast<const T*>(a.dlse.data)[head * a.dlse.stride[0] + row];  // d lse / d s[i,j] = p[i,j]
  T* dq = head_row<T>(a.dq, row, head);
  std::fill(dq, dq + d, T(0));
  for (int64_t j = see.begin; j < see.end; ++j) {
    const T *k = head_row<T>(a.k, g.key_row(j), kv_head), *v = head_row<T>(a.v, g.key_row(j), kv_head);
    T *dk = head_row<T>(a.dk, g.key_row(j), kv_head), *dvalue = head_row<T>(a.dv, g.key_row(j), kv_head);
    const T score = capped(T(a.scale) * dot(q, k, d), T(a.softcap));
    const T p = std::exp(score - lse);
    for (int64_t c = 0; c < dv; ++c) dvalue[c] += p * dout[c];
    T ds = p * (dot(dout, v, dv) - delta) * T(a.scale);
    if (a.softcap > 0) ds *= 1 - (score / T(a.softcap)) * (score / T(a.softcap));
    for (int64_t c = 0; c < d; ++c) dq[c] += ds * k[c];
    for (int64_t c = 0; c < d; ++c) dk[c] += ds * q[c];
  }
  if (!a.dsinks || lse == -std::numeric_limits<T>::infinity()) return 0;
  return -std::exp(a.sinks.ptr<T>()[head] - lse) * delta;
}

template <class T> void backward_plain(const AttentionBackward& a) {
  const int64_t segments = a.cu_q.size(0) - 1, heads = a.q.size(1), kv_heads = a.k.size(1);
  if (kv_heads == 0) return;
  const int64_t group = heads / kv_heads;
  T* sinks = static_cast<T*>(thread_scratch(3, segments * heads * int64_t(sizeof(T))));  // a partial sum per task
  parallel_tasks(segments * kv_heads, [&](int64_t task) {
    const int64_t s = task / kv_heads, kv_head = task % kv_heads;
    const Segment g = segment(a.cu_q, a.cu_k, 0, {}, s);
    for (int64_t j = 0; j < g.keys; ++j) {
      std::fill_n(head_row<T>(a.dk, g.key_row(j), kv_head), a.dk.cols(), T(0));
      std::fill_n(head_row<T>(a.dv, g.key_row(j), kv_head), a.dv.cols(), T(0));
    }
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      T sum = 0;
      for (int64_t i = 0; i < g.queries; ++i) sum += backward_row<T>(a, g, head, i);
      sinks[s * heads + head] = sum;
    }
  });
  if (!a.dsinks) return;
  for (int64_t s = 0; s < segments; ++s)
    for (int64_t head = 0; head < heads; ++head) a.dsinks.ptr<T>()[head] += sinks[s * heads + head];
}

// --- rows outside all segments ---------------------------------------------------------------------------

template <class T> void clear_rows(const Tensor& t, int64_t begin) {
  for (int64_t row = begin; row < t.size(0); ++row)
    for (int64_t head = 0; head < t.size(1); ++head) std::fill_n(head_row<T>(t, row, head), t.cols(), T(0));
}
template <class T> void clear_uncovered(const Attention& a) {
  const int64_t begin = last_offset(a.cu_q);
  clear_rows<T>(a.out, begin);
  if (!a.lse) return;
  for (int64_t head = 0; head < a.lse.size(0); ++head)
    std::fill_n(static_cast<T*>(a.lse.data) + head * a.lse.stride[0] + begin, a.lse.size(1) - begin,
                -std::numeric_limits<T>::infinity());
}
template <class T> void clear_uncovered(const AttentionBackward& a) {
  const int64_t keys = last_offset(a.cu_k ? a.cu_k : a.cu_q);
  clear_rows<T>(a.dq, last_offset(a.cu_q));
  clear_rows<T>(a.dk, keys);
  clear_rows<T>(a.dv, keys);
}

}  // namespace

namespace cpu {
void attention(const Attention& a, Stream) {
  if (a.q.dtype == DType::f32) {
    detail::attention_f32(a);
    clear_uncovered<float>(a);
  } else {
    forward_plain<double>(a);
    clear_uncovered<double>(a);
  }
}
void attention_backward(const AttentionBackward& a, Stream) {
  if (a.q.dtype == DType::f32) {
    detail::attention_backward_f32(a);
    clear_uncovered<float>(a);
  } else {
    backward_plain<double>(a);
    clear_uncovered<double>(a);
  }
}
}  // namespace cpu

namespace cuda {
void attention(const Attention& a, Stream stream);
void attention_backward(const AttentionBackward& a, Stream stream);
int64_t attention_backward_workspace_bytes(const AttentionBackward& a);
}  // namespace cuda

void attention(const Attention& a, Stream stream) {
  check_common("attention", a);
  check_keys(a);
  INGOT_DISPATCH(ATTENTION, a.q.device, attention, a, stream);
}

int64_t attention_backward_workspace_bytes(const AttentionBackward& a) {
  if constexpr (INGOT_HAS_CUDA(ATTENTION))
    if (a.q.device.kind == Device::cuda) return cuda::attention_backward_workspace_bytes(a);
  return 0;
}

void attention_backward(const AttentionBackward& a, Stream stream) {
  check_backward(a);
  check_workspace(a);
  INGOT_CHECK(!(a.add_dv || a.has_delta) || a.q.device.kind == Device::cuda,
              "attention_backward: found add_dv or has_delta on ", a.q.device, ", expected a GPU");
  INGOT_DISPATCH(ATTENTION, a.q.device, attention_backward, a, stream);
}

int64_t flops(const Attention& a) {
  const int64_t segments = a.cu_q.size(0) - 1;
  int64_t pairs = 0;
  for (int64_t s = 0; s < segments; ++s) {
    const Segment g = segment(a.cu_q, a.cu_k, 0, {}, s);
    for (int64_t i = 0; i < g.queries; ++i) {
      const Visible see = visible(g, i, a.causal, a.window);
      pairs += see.end - see.begin;
    }
  }
  return pairs * a.q.size(1) * 2 * (a.q.cols() + a.v.cols());
}

}  // namespace ingot
