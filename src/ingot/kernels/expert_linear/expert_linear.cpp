#include "ingot/kernels/expert_linear/expert_linear.h"

#include <initializer_list>
#include <utility>

#include "ingot/core/dispatch.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot {
namespace {

Tensor rows_of(const Tensor& t, int64_t begin, int64_t end) { return t ? t.slice(0, begin, end) : t; }
Tensor matrix_of(const Tensor& t, int64_t expert) { return t ? t.select(0, expert) : t; }

// f(expert, begin, end) for each expert with rows; returns the end of the last expert's rows.
template <class F> int64_t for_each_expert(const Tensor& offsets, F&& f) {
  const int32_t* at = offsets.ptr<int32_t>();
  const int64_t experts = offsets.size(0) - 1;
  for (int64_t e = 0; e < experts; ++e)
    if (at[e] < at[e + 1]) f(e, int64_t(at[e]), int64_t(at[e + 1]));
  return at[experts];
}

}  // namespace

namespace cpu {

void expert_linear(const ExpertLinear& a, Stream stream) {
  const int64_t end = for_each_expert(a.offsets, [&](int64_t e, int64_t from, int64_t to) {
    linear({.x = rows_of(a.x, from, to), .w = matrix_of(a.w, e), .b = matrix_of(a.b, e), .y = rows_of(a.y, from, to)},
           stream);
  });
  fill_zero(rows_of(a.y, end, a.y.rows()));
}

void expert_linear_backward(const ExpertLinearBackward& a, Stream stream) {
  if (a.overwrite)
    for (const Tensor& t : {a.dw, a.db})
      if (t) fill_zero(t);
  const int64_t end = for_each_expert(a.offsets, [&](int64_t e, int64_t from, int64_t to) {
    linear_backward({.dy = rows_of(a.dy, from, to),
                     .x = rows_of(a.x, from, to),
                     .w = matrix_of(a.w, e),
                     .dx = rows_of(a.dx, from, to),
                     .dw = matrix_of(a.dw, e),
                     .db = matrix_of(a.db, e)},
                    stream);
  });
  if (a.dx) fill_zero(rows_of(a.dx, end, a.dx.rows()));
}

}  // namespace cpu
namespace cuda {
void expert_linear(const ExpertLinear& a, Stream stream);
void expert_linear_backward(const ExpertLinearBackward& a, Stream stream);
}  // namespace cuda

namespace {

void check_operand(const char* op, const char* name, const Tensor& t, const Tensor& like, Shape shape) {
  INGOT_CHECK_EQ(t.device, like.device, op, ": device of ", name);
  INGOT_CHECK_EQ(t.dtype, like.dtype, op, ": dtype of ", name);
  INGOT_CHECK(t.shape == shape, op, ": found ", name, " of shape ", t.shape, ", expected ", shape);
  INGOT_CHECK(t.cols() <= 1 || t.step(-1) == 1, op, ": found ", name, " with last stride ", t.step(-1), ", expected 1");
}

// The number of experts.
int64_t check_offsets(const char* op, const Tensor& offsets, const Tensor& like) {
  INGOT_CHECK_EQ(offsets.device, like.device, op, ": device of offsets");
  INGOT_CHECK(offsets.rank() == 1 && offsets.size(0) >= 1 && offsets.dtype == DType::i32 && offsets.contiguous(), op,
              ": found offsets of shape ", offsets.shape, " and type ", offsets.dtype,
              ", expected int32 numbers, one more than experts");
  if (like.device.kind != Device::cpu) return offsets.size(0) - 1;
  const int32_t* at = offsets.ptr<int32_t>();
  const int64_t experts = offsets.size(0) - 1;
  INGOT_CHECK_EQ(at[0], 0, op, ": first offset");
  for (int64_t e = 0; e < experts; ++e)
    INGOT_CHECK(at[e] <= at[e + 1], op, ": found offsets[", e + 1, "] = ", at[e + 1], " after ", at[e],
                ", expected ascending numbers");
  INGOT_CHECK_LE(int64_t(at[experts]), like.rows(), op, ": last offset");
  return experts;
}

void check_matrix(const char* op, const char* name, const Tensor& t) {
  INGOT_CHECK_EQ(t.rank(), 2, op, ": rank of ", name);
  INGOT_CHECK(t.dtype == DType::f32 || t.dtype == DType::f64 || t.device.kind != Device::cpu, op, ": found ", name,
              " of type ", t.dtype, " on a CPU, expected f32 or f64");
}

}  // namespace

void expert_linear(const ExpertLinear& a, Stream stream) {
  const char* op = "expert_linear";
  check_matrix(op, "x", a.x);
  const int64_t experts = check_offsets(op, a.offsets, a.x);
  INGOT_CHECK_EQ(a.w.rank(), 3, op, ": rank of w");
  const int64_t n = a.w.size(1);
  check_operand(op, "w", a.w, a.x, {experts, n, a.x.cols()});
  check_operand(op, "y", a.y, a.x, {a.x.rows(), n});
  if (a.b) check_operand(op, "b", a.b, a.x, {experts, n});
  INGOT_DISPATCH(EXPERT_LINEAR, a.x.device, expert_linear, a, stream);
}

void expert_linear_backward(const ExpertLinearBackward& a, Stream stream) {
  const char* op = "expert_linear_backward";
  check_matrix(op, "dy", a.dy);
  const int64_t experts = check_offsets(op, a.offsets, a.dy), n = a.dy.cols();
  INGOT_CHECK((a.x || !a.dw) && (a.w || !a.dx), op, ": found ", a.dx ? "no w for dx" : "no x for dw", ", expected it");
  for (auto [name, t] : std::initializer_list<std::pair<const char*, const Tensor*>>{{"x", &a.x}, {"dx", &a.dx}})
    if (*t) check_operand(op, name, *t, a.dy, {a.dy.rows(), t->cols()});
  const int64_t k = a.dx ? a.dx.cols() : a.x.cols();
  if (a.x) INGOT_CHECK_EQ(a.x.cols(), k, op, ": columns of x");
  for (auto [name, t] : std::initializer_list<std::pair<const char*, const Tensor*>>{{"w", &a.w}, {"dw", &a.dw}})
    if (*t) check_operand(op, name, *t, a.dy, {experts, n, k});
  if (a.db) check_operand(op, "db", a.db, a.dy, {experts, n});
  INGOT_DISPATCH(EXPERT_LINEAR, a.dy.device, expert_linear_backward, a, stream);
}

}  // namespace ingot
