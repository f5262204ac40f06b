#include "ingot/kernels/embedding/embedding.h"

#include <algorithm>
#include <cstring>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"

namespace ingot {
namespace {

void check_operands(const Tensor& ids, const Tensor& table, const Tensor& y, const char* op) {
  INGOT_CHECK(ids.rank() == 1, op, ": found ids of shape ", ids.shape, ", expected (T)");
  INGOT_CHECK_EQ(ids.dtype, DType::i32, op, ": ids dtype");
  INGOT_CHECK(table.rank() == 2 && table.rows_uniform(), op, ": found a table of shape ", table.shape,
              ", expected (V, C) with contiguous rows");
  const Shape rows{ids.size(0), table.cols()};
  INGOT_CHECK(y.shape == rows && (y.rows_uniform() || y.numel() == 0), op, ": found token vectors of shape ", y.shape,
              ", expected ", rows, " with contiguous rows");
  INGOT_CHECK_EQ(y.device, table.device, op, ": device of the token vectors");
  INGOT_CHECK_EQ(ids.device, table.device, op, ": device of the ids");
}

void check_ids(const Tensor& ids, int64_t vocab, const char* op) {
  const int32_t* id = ids.ptr<int32_t>();
  for (int64_t t = 0; t < ids.size(0); ++t) {
    const int64_t v = id[t * ids.step(0)];
    INGOT_CHECK(v >= 0 && v < vocab, op, ": found id ", v, " at position ", t, ", expected 0 to ", vocab - 1,
                " (a vocabulary of ", vocab, ")");
  }
}

}  // namespace

namespace cpu {

void embedding(const Embedding& a, Stream) {
  check_ids(a.ids, a.table.size(0), "embedding");
  const int64_t C = a.table.cols();
  with_float_type(a.table.dtype, "embedding", [&](auto scalar) {
    using T = decltype(scalar);
    using A = accum_t<T>;
    const int32_t* ids = a.ids.ptr<int32_t>();
    const T* table = a.table.ptr<T>();
    T* out = a.y.ptr<T>();
    parallel_for(a.ids.size(0), std::max<int64_t>(1, 16384 / std::max<int64_t>(1, C)), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* row = table + ids[t * a.ids.step(0)] * a.table.row_stride();
        T* y = out + t * a.y.row_stride();
        if (a.accumulate)
          for (int64_t c = 0; c < C; ++c) y[c] = T(A(y[c]) + A(row[c]));
        else
          std::memcpy(y, row, size_t(C) * sizeof(T));
      }
    });
  });
}

// Tasks own columns and walk all tokens in order: no two tasks share a column, and every sum has a fixed order.
void embedding_backward(const EmbeddingBackward& a, Stream) {
  check_ids(a.ids, a.dtable.size(0), "embedding_backward");
  with_wide_float_type(a.dtable.dtype, "embedding_backward", [&](auto scalar) {
    using T = decltype(scalar);
    const int32_t* ids = a.ids.ptr<int32_t>();
    const T* dy = a.dy.ptr<T>();
    T* dtable = a.dtable.ptr<T>();
    constexpr int64_t kColumns = 256 / sizeof(T);  // four cache lines
    parallel_for(a.dtable.cols(), kColumns, [&](int64_t begin, int64_t end) {
      for (int64_t t = 0; t < a.ids.size(0); ++t) {
        const T* from = dy + t * a.dy.row_stride();
        T* to = dtable + ids[t * a.ids.step(0)] * a.dtable.row_stride();
        for (int64_t c = begin; c < end; ++c) to[c] += from[c];
      }
    });
  });
}

}  // namespace cpu

namespace cuda {
void embedding(const Embedding& a, Stream stream);
void embedding_backward(const EmbeddingBackward& a, Stream stream);
}  // namespace cuda

void embedding(const Embedding& a, Stream stream) {
  check_operands(a.ids, a.table, a.y, "embedding");
  INGOT_CHECK_EQ(a.y.dtype, a.table.dtype, "embedding: dtype of the token vectors");
  INGOT_DISPATCH(EMBEDDING, a.table.device, embedding, a, stream);
}

void embedding_backward(const EmbeddingBackward& a, Stream stream) {
  const char* op = "embedding_backward";
  check_operands(a.ids, a.dtable, a.dy, op);
  if (a.dy.device.kind == Device::cpu || a.dtable.dtype != DType::f32)
    INGOT_CHECK_EQ(a.dy.dtype, a.dtable.dtype, op, ": dtype of the token vectors");
  INGOT_DISPATCH(EMBEDDING, a.dtable.device, embedding_backward, a, stream);
}

}  // namespace ingot
