#include "ingot/kernels/moe/moe.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/quant/e4m3_blocks.h"

namespace ingot {
namespace {

void check_like(const char* op, const char* name, const Tensor& t, const Shape& shape, DType dtype, Device device) {
  INGOT_CHECK(t.shape == shape && t.dtype == dtype && t.contiguous(), op, ": ", name, ": found shape ", t.shape,
              " and dtype ", t.dtype, ", expected ", shape, " ", dtype, ", contiguous");
  INGOT_CHECK(t.device == device, op, ": ", name, ": found it on ", t.device, ", expected ", device);
}

void check_bank(const char* op, const char* name, const WeightMatrix& w, int64_t rows, int64_t cols, Device device) {
  check(w, op, name);
  INGOT_CHECK(w.is_bank() && w.rows() == rows && w.cols() == cols, op, ": ", name, ": found ", w.format, " of shape ",
              w.data.shape, ", expected a bank of matrices of ", rows, " rows and ", cols, " columns");
  INGOT_CHECK(w.data.device == device, op, ": ", name, ": found it on ", w.data.device, ", expected ", device);
}

// Where each part of the workspace lies. Slot (t, i) is the i-th expert of token t; `order` lists the slots expert by
// expert, each expert's in token order.
struct Plan {
  int64_t slots, widest;  // widest: rows of the largest product there can be
  int64_t first, order, in, gate_up, hidden, out, total;
  Plan(int64_t tokens, int64_t per_token, int64_t experts, int64_t width, int64_t hidden_width, DType dtype)
      : slots(tokens * per_token), widest(tokens) {
    auto take = [&, at = int64_t(0)](int64_t bytes) mutable {
      const int64_t begin = at;
      at += (bytes + 63) / 64 * 64;
      total = at;
      return begin;
    };
    const int64_t number = size_of(dtype);
    first = take((experts + 1) * 4);
    order = take(slots * 4);
    in = take(widest * width * number);
    gate_up = take(widest * 2 * hidden_width * number);
    hidden = take(widest * hidden_width * number);
    out = take(slots * width * number);
  }
};

}  // namespace

int64_t experts_workspace_bytes(int64_t tokens, int64_t per_token, int64_t experts, int64_t width, int64_t hidden,
                                DType dtype, Device) {
  return Plan(tokens, per_token, experts, width, hidden, dtype).total;
}

namespace cpu {
namespace {

template <class T>
void route_row(const T* logit, int64_t experts, int32_t* chosen, T* weight, int64_t k, bool renormalise) {
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e) {
      if (std::find(chosen, chosen + i, int32_t(e)) != chosen + i) continue;
      if (best < 0 || logit[e] > logit[best]) best = e;  // a NaN is chosen only if no number is left
    }
    chosen[i] = int32_t(best);
    weight[i] = logit[best];
  }
  const T top = weight[0];
  T sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += weight[i] = std::exp(weight[i] - top);
  if (!renormalise) {
    sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(logit[e] - top);
  }
  for (int64_t i = 0; i < k; ++i) weight[i] /= sum;
}

// Counts each expert's slots and lists the slots: first[e] to first[e + 1] of `order`.
void sort_slots(const Experts& a, const Plan& plan, int32_t* first, int32_t* order) {
  const int64_t E = a.gate_up.data.size(0), k = a.experts.size(1);
  const int32_t* chosen = a.experts.ptr<int32_t>();
  std::fill(first, first + E + 1, 0);
  for (int64_t s = 0; s < plan.slots; ++s) {
    INGOT_CHECK(chosen[s] >= 0 && chosen[s] < E, "experts: found expert ", chosen[s], " of token ", s / k,
                ", expected 0 to ", E - 1);
    for (int64_t i = s / k * k; i < s; ++i)
      INGOT_CHECK(chosen[i] != chosen[s], "experts: found expert ", chosen[s], " twice for token ", s / k,
                  ", expected ", k, " different ones");
    ++first[chosen[s] + 1];
  }
  for (int64_t e = 0; e < E; ++e) first[e + 1] += first[e];
  for (int64_t s = 0; s < plan.slots; ++s) order[first[chosen[s]]++] = int32_t(s);
  for (int64_t e = E; e > 0; --e) first[e] = first[e - 1];  // each entry has moved to the start of the next expert
  first[0] = 0;
}

template <class T> void round_rows(T* rows, int64_t n, int64_t width) {
  parallel_for(n, std::max<int64_t>(1, 16384 / width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) round_to_e4m3_blocks(rows + i * width, width);
  });
}

template <class T> void run_experts(const Experts& a, Stream stream) {
  const int64_t tokens = a.x.size(0), C = a.x.size(1), k = a.experts.size(1), E = a.gate_up.data.size(0);
  const int64_t H = a.down.cols();
  const Plan plan(tokens, k, E, C, H, a.x.dtype);
  char* memory = static_cast<char*>(a.workspace.data);
  int32_t* first = reinterpret_cast<int32_t*>(memory + plan.first);
  int32_t* order = reinterpret_cast<int32_t*>(memory + plan.order);
  T* in = reinterpret_cast<T*>(memory + plan.in);
  T* out = reinterpret_cast<T*>(memory + plan.out);
  const T* x = a.x.ptr<T>();
  sort_slots(a, plan, first, order);
  GateOptions gate = a.options;
  gate.interleaved = true;
  for (int64_t e = 0; e < E; ++e) {
    const int64_t begin = first[e], n = first[e + 1] - begin;
    if (n == 0) continue;
    parallel_for(n, std::max<int64_t>(1, 65536 / C), [&](int64_t i0, int64_t i1) {
      for (int64_t i = i0; i < i1; ++i) std::copy_n(x + order[begin + i] / k * C, C, in + i * C);
    });
    if (a.e4m3_inputs) round_rows(in, n, C);
    const Tensor gate_up(reinterpret_cast<T*>(memory + plan.gate_up), {n, 2 * H});
    const Tensor hidden(reinterpret_cast<T*>(memory + plan.hidden), {n, H});
    stored_linear(
        {.x = Tensor(in, {n, C}), .w = a.gate_up.at(e), .b = a.b_gate_up ? a.b_gate_up.row(e) : Tensor(), .y = gate_up},
        stream);
    swiglu_gate({.gate = gate_up, .h = hidden, .options = gate}, stream);
    if (a.e4m3_inputs) round_rows(hidden.ptr<T>(), n, H);
    stored_linear({.x = hidden,
                   .w = a.down.at(e),
                   .b = a.b_down ? a.b_down.row(e) : Tensor(),
                   .y = Tensor(in, {n, C})},  // the inputs are no longer needed
                  stream);
    parallel_for(n, std::max<int64_t>(1, 65536 / C), [&](int64_t i0, int64_t i1) {
      for (int64_t i = i0; i < i1; ++i) std::copy_n(in + i * C, C, out + order[begin + i] * C);
    });
  }
  const T* weight = a.weights.ptr<T>();
  T* y = a.y.ptr<T>();
  parallel_for(tokens, std::max<int64_t>(1, 65536 / C), [&](int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; ++t)
      for (int64_t c = 0; c < C; ++c) {
        T sum = 0;
        for (int64_t i = 0; i < k; ++i) sum += weight[t * k + i] * out[(t * k + i) * C + c];
        y[t * C + c] = sum;
      }
  });
}

}  // namespace

void route(const Route& r, Stream) {
  const int64_t E = r.logits.size(1), k = r.experts.size(1);
  with_wide_float_type(r.logits.dtype, "route", [&](auto scalar) {
    using T = decltype(scalar);
    parallel_for(r.logits.size(0), std::max<int64_t>(1, 16384 / (E * k)), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        route_row(r.logits.ptr<T>() + t * E, E, r.experts.ptr<int32_t>() + t * k, r.weights.ptr<T>() + t * k, k,
                  r.renormalise);
    });
  });
}

void experts(const Experts& a, Stream stream) {
  with_wide_float_type(a.x.dtype, "experts", [&](auto scalar) { run_experts<decltype(scalar)>(a, stream); });
}

}  // namespace cpu

void route(const Route& r, Stream stream) {
  const char* op = "route";
  INGOT_CHECK(r.logits.rank() == 2 && r.logits.contiguous(), op, ": found logits of shape ", r.logits.shape,
              ", expected (T, E), contiguous");
  INGOT_CHECK(r.experts.rank() == 2, op, ": found experts of shape ", r.experts.shape, ", expected (T, k)");
  const int64_t k = r.experts.size(1);
  INGOT_CHECK(1 <= k && k <= r.logits.size(1), op, ": found ", k, " experts per token, expected 1 to ",
              r.logits.size(1));
  const Shape chosen{r.logits.size(0), k};
  check_like(op, "experts", r.experts, chosen, DType::i32, r.logits.device);
  check_like(op, "weights", r.weights, chosen, r.logits.dtype, r.logits.device);
  INGOT_DISPATCH_CPU_ONLY(r.logits.device, route, r, stream);
}

void experts(const Experts& a, Stream stream) {
  const char* op = "experts";
  INGOT_CHECK(a.x.rank() == 2 && a.x.contiguous(), op, ": found x of shape ", a.x.shape,
              ", expected (T, C), contiguous");
  INGOT_CHECK(a.gate_up && a.down && a.y && a.workspace, op,
              ": found an operand missing, expected gate_up, down, y and workspace");
  check(a.down, op, "down");
  const int64_t tokens = a.x.size(0), C = a.x.size(1), H = a.down.cols(), E = a.gate_up.data.size(0);
  const Device device = a.x.device;
  INGOT_CHECK_EQ(a.down.data.size(0), E, op, ": experts of down");
  check_bank(op, "gate_up", a.gate_up, 2 * H, C, device);
  check_bank(op, "down", a.down, C, H, device);
  INGOT_CHECK(a.experts.rank() == 2, op, ": found experts of shape ", a.experts.shape, ", expected (T, k)");
  const int64_t k = a.experts.size(1);
  check_like(op, "experts", a.experts, {tokens, k}, DType::i32, device);
  check_like(op, "weights", a.weights, {tokens, k}, a.x.dtype, device);
  check_like(op, "y", a.y, {tokens, C}, a.x.dtype, device);
  if (a.b_gate_up) check_like(op, "b_gate_up", a.b_gate_up, {E, 2 * H}, a.x.dtype, device);
  if (a.b_down) check_like(op, "b_down", a.b_down, {E, C}, a.x.dtype, device);
  INGOT_CHECK_GE(a.workspace.bytes(), experts_workspace_bytes(tokens, k, E, C, H, a.x.dtype, device), op,
                 ": bytes of workspace");
  INGOT_CHECK(a.workspace.device == device, op, ": found workspace on ", a.workspace.device, ", expected ", device);
  if (tokens == 0) return;
  INGOT_DISPATCH_CPU_ONLY(device, experts, a, stream);
}

}  // namespace ingot
