#include "ingot/kernels/rope/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/rope/rope.simd.h"

INGOT_SIMD_DECLARE(void rope_token(const detail::RopeToken& t); void rope_token_backward(const detail::RopeToken& t);)

namespace ingot {
namespace {

// --- frequencies -------------------------------------------------------------------------------------------

// The number of the pair, as a real number, that turns `rotations` times within the original context.
double pair_of_rotations(double rotations, int64_t rotary_dim, double base, double context) {
  return double(rotary_dim) * std::log(context / (rotations * 2 * std::numbers::pi)) / (2 * std::log(base));
}

// Pairs that turn often within the original context keep their frequency, and the frequency of pairs that turn seldom
// is divided by `factor`. For the pairs between, the multiplier of the frequency falls linearly from 1 to 1 / factor.
void apply_yarn(RopeFrequencies& f, int64_t rotary_dim, double base, const RopeScaling& scaling) {
  INGOT_CHECK(scaling.original_context > 0, "rope: found yarn with original_context ", scaling.original_context,
              ", expected the context the model was trained with");
  double low = pair_of_rotations(scaling.beta_fast, rotary_dim, base, scaling.original_context);
  double high = pair_of_rotations(scaling.beta_slow, rotary_dim, base, scaling.original_context);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, double(rotary_dim - 1));
  if (low == high) high += 0.001;  // avoids a division by zero; the ramp becomes a step
  for (size_t j = 0; j < f.theta.size(); ++j) {
    const double slowed = std::clamp((double(j) - low) / (high - low), 0.0, 1.0);
    f.theta[j] *= slowed / scaling.factor + (1 - slowed);
  }
  f.amplitude = scaling.factor > 1 ? 0.1 * std::log(scaling.factor) + 1 : 1;
  if (scaling.attention_factor > 0) f.amplitude = scaling.attention_factor;
}

// Between the two limits the frequency is a mean, weighted by the number of turns that a pair makes in the original
// context.
void apply_llama3(RopeFrequencies& f, const RopeScaling& s) {
  INGOT_CHECK(s.original_context > 0, "rope: found llama3 with original_context ", s.original_context,
              ", expected the context the model was trained with");
  INGOT_CHECK(s.beta_fast > s.beta_slow, "rope: found llama3 with beta_fast ", s.beta_fast,
              ", expected more than beta_slow = ", s.beta_slow);
  for (double& theta : f.theta) {
    const double turns = s.original_context * theta / (2 * std::numbers::pi);
    const double kept = std::clamp((turns - s.beta_slow) / (s.beta_fast - s.beta_slow), 0.0, 1.0);
    theta *= kept + (1 - kept) / s.factor;
  }
}

// --- checks ------------------------------------------------------------------------------------------------

void check_heads(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  INGOT_CHECK_EQ(t.rank(), 3, op, ": rank of ", name);
  INGOT_CHECK_EQ(t.dtype, like.dtype, op, ": dtype of ", name);
  INGOT_CHECK(t.device == like.device, op, ": found ", name, " on ", t.device, ", expected ", like.device);
  INGOT_CHECK(t.shape == like.shape, op, ": found ", name, " of shape ", t.shape, ", expected ", like.shape);
  INGOT_CHECK(t.cols() <= 1 || t.step(2) == 1, op, ": found ", name, " with last stride ", t.step(2), ", expected 1");
}
DType table_dtype(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

void check_rotation(const char* op, const Tensor& x, const Tensor& positions, const Tensor& cos, const Tensor& sin,
                    int sign) {
  INGOT_CHECK(bool(cos) && bool(sin), op, ": found only one of cos and sin, expected both");
  INGOT_CHECK_EQ(cos.rank(), 2, op, ": rank of cos");
  INGOT_CHECK(cos.shape == sin.shape, op, ": found sin of shape ", sin.shape, ", expected ", cos.shape);
  INGOT_CHECK(cos.contiguous() && sin.contiguous(), op, ": found a table with gaps, expected it contiguous");
  INGOT_CHECK_EQ(cos.dtype, table_dtype(x.dtype), op, ": dtype of cos");
  INGOT_CHECK_EQ(sin.dtype, table_dtype(x.dtype), op, ": dtype of sin");
  INGOT_CHECK_LE(2 * cos.cols(), x.cols(), op, ": rotary dimensions");
  INGOT_CHECK(sign == 1 || sign == -1, op, ": found sign ", sign, ", expected 1 or -1");
  INGOT_CHECK(positions.shape == Shape({x.size(0)}) && positions.dtype == DType::i32 && positions.contiguous(), op,
              ": found positions of shape ", positions.shape, " and dtype ", positions.dtype, ", expected ",
              Shape{x.size(0)}, " i32, contiguous");
  for (const Tensor* t : {&positions, &cos, &sin})
    INGOT_CHECK(t->device == x.device, op, ": found positions, cos or sin on ", t->device, ", expected ", x.device);
  INGOT_CHECK(cos.size(0) > 0 || x.size(0) == 0, op, ": found a table without rows for ", x.size(0),
              " tokens, expected at least one");
  if (x.device.kind != Device::cpu) return;  // only the device knows the positions
  const int32_t* p = positions.ptr<int32_t>();
  for (int64_t t = 0; t < x.size(0); ++t)
    INGOT_CHECK(0 <= p[t] && p[t] < cos.size(0), op, ": found positions[", t, "] = ", p[t], ", expected 0 to ",
                cos.size(0) - 1);
}
void check_gain(const char* op, const char* name, const Tensor& gain, const Tensor& x) {
  INGOT_CHECK(gain.shape == Shape({x.size(1)}) && gain.contiguous(), op, ": found ", name, " of shape ", gain.shape,
              ", expected ", Shape{x.size(1)}, ", contiguous");
  INGOT_CHECK_EQ(gain.dtype, table_dtype(x.dtype), op, ": dtype of ", name);
  INGOT_CHECK(gain.device == x.device, op, ": found ", name, " on ", gain.device, ", expected ", x.device);
}

// --- one head ----------------------------------------------------------------------------------------------

constexpr int64_t kTokens = 32;  // per task

template <class T> T* head_row(const Tensor& t, int64_t row, int64_t head) {
  return static_cast<T*>(t.data) + row * t.stride[0] + head * t.stride[1];
}

// A token's row of the table; half = 0 means no rotation.
template <class A> struct Angles {
  const A *cos = nullptr, *sin = nullptr;
  int64_t half = 0;
  A sign = 1;  // +1: rotate by the angle, -1: by the opposite angle
  bool interleaved = false;
};
template <class A, class Op> Angles<A> angles(const Op& a, int64_t token, int direction) {
  if (!a.cos) return {};
  const int64_t at = int64_t(a.positions.template ptr<int32_t>()[token]) * a.cos.cols();
  return {static_cast<const A*>(a.cos.data) + at, static_cast<const A*>(a.sin.data) + at, a.cos.cols(),
          A(direction * a.sign), a.interleaved};
}

// y may be x.
template <class T, class A> void rotate(const Angles<A>& r, const T* x, T* y, int64_t d) {
  const int64_t near = r.interleaved ? 2 : 1, far = r.interleaved ? 1 : r.half;
  for (int64_t j = 0; j < r.half; ++j) {
    const A x1 = A(x[j * near]), x2 = A(x[j * near + far]), c = r.cos[j], s = r.sign * r.sin[j];
    y[j * near] = T(x1 * c - x2 * s);
    y[j * near + far] = T(x2 * c + x1 * s);
  }
  if (x != y)
    for (int64_t c = 2 * r.half; c < d; ++c) y[c] = x[c];
}

// The fields that the f32 variants of all ops share; x and y are rows of (heads, d).
template <class Op>
detail::RopeToken token_of(const Op& a, const Tensor& x, const Tensor& y, int64_t t, int direction) {
  const auto r = angles<float>(a, t, direction);
  detail::RopeToken token{};
  token.x = head_row<float>(x, t, 0), token.x_head = x.stride[1];
  token.y = head_row<float>(y, t, 0), token.y_head = y.stride[1];
  token.heads = x.size(1), token.d = x.cols();
  token.cos = r.cos, token.sin = r.sin, token.half = r.half, token.sign = r.sign, token.interleaved = r.interleaved;
  return token;
}
// The fields of QK norm.
template <class Op> detail::RopeToken norm_token_of(const Op& a, const Tensor& y, int64_t t, int direction) {
  detail::RopeToken token = token_of(a, a.x, y, t, direction);
  token.normalise = a.normalise, token.eps = float(a.eps);
  token.gain = a.gain ? a.gain.template ptr<float>() : nullptr;
  return token;
}

template <class T> void rope_tokens(const Rope& a, int direction) {
  parallel_for(a.x.size(0), kTokens, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if constexpr (std::is_same_v<T, float>) {
        INGOT_SIMD_CALL(rope_token, token_of(a, a.x, a.y, t, direction));
        continue;
      }
      const auto r = angles<accum_t<T>>(a, t, direction);
      for (int64_t h = 0; h < a.x.size(1); ++h) rotate(r, head_row<T>(a.x, t, h), head_row<T>(a.y, t, h), a.x.cols());
    }
  });
}

template <class A> A rstd_of(const A* x, int64_t d, double eps) {
  A sum = 0;
  for (int64_t c = 0; c < d; ++c) sum += x[c] * x[c];
  return 1 / std::sqrt(sum / A(d) + A(eps));
}

template <class T> void qk_norm_rope_tokens(const QkNormRope& a) {
  using A = accum_t<T>;
  const int64_t d = a.x.cols();
  parallel_for(a.x.size(0), kTokens, [&](int64_t begin, int64_t end) {
    A* n = static_cast<A*>(thread_scratch(0, d * int64_t(sizeof(A))));
    for (int64_t t = begin; t < end; ++t) {
      if constexpr (std::is_same_v<T, float>) {
        INGOT_SIMD_CALL(rope_token, norm_token_of(a, a.y, t, +1));
        continue;
      }
      const auto r = angles<A>(a, t, +1);
      for (int64_t h = 0; h < a.x.size(1); ++h) {
        const T* x = head_row<T>(a.x, t, h);
        T* y = head_row<T>(a.y, t, h);
        for (int64_t c = 0; c < d; ++c) n[c] = A(x[c]);
        // The rotation is linear, so norm and gain are a single factor.
        A factor = a.normalise ? rstd_of(n, d, a.eps) : A(1);
        if (a.gain) factor *= static_cast<const A*>(a.gain.data)[h];
        rotate(r, n, n, d);
        for (int64_t c = 0; c < d; ++c) y[c] = T(n[c] * factor);
      }
    }
  });
}

// With R the rotation, n = x * rstd, r = R n and g = R^T dy:
//   dgain = r . dy = n . g        dx = gain * rstd * (g - n * mean(n * g))
template <class T>
void qk_norm_rope_backward_rows(const QkNormRopeBackward& a, int64_t begin, int64_t end, accum_t<T>* dgain) {
  using A = accum_t<T>;
  const int64_t d = a.x.cols();
  A* g = static_cast<A*>(thread_scratch(0, 2 * d * int64_t(sizeof(A))));
  A* n = g + d;
  for (int64_t t = begin; t < end; ++t) {
    if constexpr (std::is_same_v<T, float>) {
      detail::RopeToken token = norm_token_of(a, a.dx, t, -1);
      token.dy = head_row<float>(a.dy, t, 0), token.dy_head = a.dy.stride[1];
      token.dgain = dgain, token.scratch = g;
      INGOT_SIMD_CALL(rope_token_backward, token);
      continue;
    }
    const auto r = angles<A>(a, t, -1);
    for (int64_t h = 0; h < a.x.size(1); ++h) {
      const T *x = head_row<T>(a.x, t, h), *dy = head_row<T>(a.dy, t, h);
      T* dx = head_row<T>(a.dx, t, h);
      for (int64_t c = 0; c < d; ++c) n[c] = A(x[c]), g[c] = A(dy[c]);
      const A rstd = a.normalise ? rstd_of(n, d, a.eps) : A(1);
      rotate(r, g, g, d);
      A sum = 0;
      for (int64_t c = 0; c < d; ++c) sum += n[c] * g[c];
      sum *= rstd;
      if (dgain) dgain[h] += sum;
      const A factor = rstd * (a.gain ? static_cast<const A*>(a.gain.data)[h] : A(1));
      const A along = a.normalise ? sum / A(d) * rstd : A(0);
      for (int64_t c = 0; c < d; ++c) dx[c] = T(factor * (g[c] - n[c] * along));
    }
  }
}

// dgain is summed over blocks of tokens, then over blocks in order. The cut depends on the number of tokens alone.
int64_t tokens_per_block(int64_t tokens) { return std::max<int64_t>(kTokens, (tokens + 63) / 64); }

template <class T> void qk_norm_rope_backward_tokens(const QkNormRopeBackward& a) {
  using A = accum_t<T>;
  const int64_t tokens = a.x.size(0), heads = a.x.size(1), grain = tokens_per_block(tokens);
  const int64_t blocks = (tokens + grain - 1) / grain;
  A* partial = nullptr;
  if (a.dgain) {
    partial = static_cast<A*>(thread_scratch(3, blocks * heads * int64_t(sizeof(A))));
    std::fill(partial, partial + blocks * heads, A(0));
  }
  parallel_for(tokens, grain, [&](int64_t begin, int64_t end) {
    qk_norm_rope_backward_rows<T>(a, begin, end, partial ? partial + begin / grain * heads : nullptr);
  });
  if (!a.dgain) return;
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t h = 0; h < heads; ++h) static_cast<A*>(a.dgain.data)[h] += partial[block * heads + h];
}

}  // namespace

RopeFrequencies rope_frequencies(int64_t rotary_dim, double base, const RopeScaling& scaling) {
  INGOT_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0, "rope: found rotary_dim ", rotary_dim,
              ", expected it even and positive");
  INGOT_CHECK(base > 1, "rope: found base ", base, ", expected more than 1");
  INGOT_CHECK(scaling.factor > 0, "rope: found scaling factor ", scaling.factor, ", expected more than 0");
  if (scaling.kind == RopeScaling::ntk) {
    INGOT_CHECK(rotary_dim > 2, "rope: found rotary_dim ", rotary_dim, " with ntk scaling, expected at least 4");
    base *= std::pow(scaling.factor, double(rotary_dim) / double(rotary_dim - 2));
  }
  RopeFrequencies f;
  f.theta.resize(size_t(rotary_dim / 2));
  for (size_t j = 0; j < f.theta.size(); ++j) f.theta[j] = std::pow(base, -2.0 * double(j) / double(rotary_dim));
  if (scaling.kind == RopeScaling::yarn) apply_yarn(f, rotary_dim, base, scaling);
  if (scaling.kind == RopeScaling::llama3) apply_llama3(f, scaling);
  if (scaling.kind == RopeScaling::linear)
    for (double& theta : f.theta) theta /= scaling.factor;
  return f;
}

void rope_table(const RopeFrequencies& f, const Tensor& cos, const Tensor& sin) {
  INGOT_CHECK_EQ(cos.rank(), 2, "rope_table: rank of cos");
  INGOT_CHECK(cos.shape == sin.shape && cos.dtype == sin.dtype, "rope_table: found sin of shape ", sin.shape,
              " and dtype ", sin.dtype, ", expected ", cos.shape, " and ", cos.dtype);
  INGOT_CHECK_EQ(cos.cols(), int64_t(f.theta.size()), "rope_table: columns");
  INGOT_CHECK(cos.contiguous() && sin.contiguous(), "rope_table: found a table with gaps, expected it contiguous");
  INGOT_CHECK(cos.device.kind == Device::cpu && sin.device.kind == Device::cpu, "rope_table: found a table on ",
              cos.device, ", expected cpu: copy it to where it is used");
  const int64_t half = cos.cols();
  with_wide_float_type(cos.dtype, "rope_table", [&](auto type) {
    using T = decltype(type);
    parallel_for(cos.size(0), 64, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p)
        for (int64_t j = 0; j < half; ++j) {
          const double angle = double(p) * f.theta[size_t(j)];
          cos.ptr<T>()[p * half + j] = T(f.amplitude * std::cos(angle));
          sin.ptr<T>()[p * half + j] = T(f.amplitude * std::sin(angle));
        }
    });
  });
}

namespace cpu {
void rope(const Rope& a, Stream) {
  with_float_type(a.x.dtype, "rope", [&](auto t) { rope_tokens<decltype(t)>(a, +1); });
}
void rope_backward(const Rope& a, Stream) {
  with_float_type(a.x.dtype, "rope_backward", [&](auto t) { rope_tokens<decltype(t)>(a, -1); });
}
void qk_norm_rope(const QkNormRope& a, Stream) {
  with_float_type(a.x.dtype, "qk_norm_rope", [&](auto t) { qk_norm_rope_tokens<decltype(t)>(a); });
}
void qk_norm_rope_backward(const QkNormRopeBackward& a, Stream) {
  with_float_type(a.x.dtype, "qk_norm_rope_backward", [&](auto t) { qk_norm_rope_backward_tokens<decltype(t)>(a); });
}
}  // namespace cpu

namespace cuda {
void rope(const Rope& a, Stream stream);
void rope_backward(const Rope& a, Stream stream);
void qk_norm_rope(const QkNormRope& a, Stream stream);
void qk_norm_rope_backward(const QkNormRopeBackward& a, Stream stream);
int64_t qk_norm_rope_backward_workspace_bytes(int64_t tokens, int64_t heads);
}  // namespace cuda

void rope(const Rope& a, Stream stream) {
  check_heads("rope", "x", a.x, a.x);
  check_heads("rope", "y", a.y, a.x);
  check_rotation("rope", a.x, a.positions, a.cos, a.sin, a.sign);
  INGOT_DISPATCH(ROPE, a.x.device, rope, a, stream);
}

void rope_backward(const Rope& a, Stream stream) {
  check_heads("rope_backward", "x", a.x, a.x);
  check_heads("rope_backward", "y", a.y, a.x);
  check_rotation("rope_backward", a.x, a.positions, a.cos, a.sin, a.sign);
  INGOT_DISPATCH(ROPE, a.x.device, rope_backward, a, stream);
}

void qk_norm_rope(const QkNormRope& a, Stream stream) {
  const char* op = "qk_norm_rope";
  check_heads(op, "x", a.x, a.x);
  check_heads(op, "y", a.y, a.x);
  if (a.cos || a.sin) check_rotation(op, a.x, a.positions, a.cos, a.sin, a.sign);
  if (a.gain) check_gain(op, "gain", a.gain, a.x);
  INGOT_DISPATCH(ROPE, a.x.device, qk_norm_rope, a, stream);
}

void qk_norm_rope_backward(const QkNormRopeBackward& a, Stream stream) {
  const char* op = "qk_norm_rope_backward";
  check_heads(op, "x", a.x, a.x);
  check_heads(op, "dy", a.dy, a.x);
  check_heads(op, "dx", a.dx, a.x);
  if (a.cos || a.sin) check_rotation(op, a.x, a.positions, a.cos, a.sin, a.sign);
  if (a.gain) check_gain(op, "gain", a.gain, a.x);
  if (a.dgain) {
    INGOT_CHECK(bool(a.gain), op, ": found dgain without gain, expected both");
    check_gain(op, "dgain", a.dgain, a.x);
    const int64_t need = qk_norm_rope_backward_workspace_bytes(a.x.size(0), a.x.size(1), a.x.device);
    const int64_t have = a.workspace ? a.workspace.bytes() : 0;
    INGOT_CHECK_GE(have, need, op, ": bytes of workspace");
    INGOT_CHECK(need == 0 || (a.workspace.device == a.x.device && a.workspace.contiguous()), op,
                ": found a workspace on ", a.workspace.device, ", expected it contiguous on ", a.x.device);
  }
  INGOT_DISPATCH(ROPE, a.x.device, qk_norm_rope_backward, a, stream);
}

int64_t qk_norm_rope_backward_workspace_bytes([[maybe_unused]] int64_t tokens, [[maybe_unused]] int64_t heads,
                                              [[maybe_unused]] Device device) {
  if constexpr (INGOT_HAS_CUDA(ROPE))
    if (device.kind == Device::cuda) return cuda::qk_norm_rope_backward_workspace_bytes(tokens, heads);
  return 0;  // the threads of a CPU have workspaces of their own
}

}  // namespace ingot
