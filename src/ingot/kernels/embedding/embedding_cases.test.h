#pragma once
// Compares rows of a table and their gradients on another backend with plain loops.
#include <gtest/gtest.h>

#include <cmath>

#include "ingot/kernels/embedding/embedding.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::embedding_cases {

struct DeviceCase {
  int64_t tokens, vocab, channels, gap;
};
// Vectors and none, several chunks of tokens, blocks of ids and of columns.
constexpr DeviceCase kDeviceCases[] = {{0, 3, 4, 0}, {1, 1, 1, 0},     {5, 3, 7, 2},     {40, 11, 136, 8},
                                       {9, 5, 0, 0}, {2100, 33, 8, 0}, {70, 40, 1030, 0}};

template <class B> B ids_for(const DeviceCase& c, bool outside) {
  B ids(DType::i32, {c.tokens});
  testing::fill_ids(testing::host_of(ids), 1, c.vocab);
  int32_t* id = testing::host_of(ids).template ptr<int32_t>();
  if (outside && c.tokens > 4) id[2] = -1, id[4] = int32_t(c.vocab);
  testing::send(ids);
  return ids;
}

template <class B, class Call> void rows_are_copied_or_added(Call&& call) {
  for (const DeviceCase& c : kDeviceCases)
    for (DType type : {DType::f32, DType::bf16, DType::f16})
      for (bool outside : {false, true}) {
        B ids = ids_for<B>(c, outside), table(type, {c.vocab, c.channels}, c.channels + c.gap);
        B y(type, {c.tokens, c.channels}, c.channels + 2 * c.gap);
        testing::fill_normal(testing::host_of(table), 2);
        testing::send(table), testing::send(y);
        call(Embedding{.ids = ids, .table = table, .y = y});
        const auto rows = testing::values(testing::host_of(table));
        std::vector<double> want;
        for (double id : testing::values(testing::host_of(ids)))
          for (int64_t k = 0; k < c.channels; ++k)
            want.push_back(id < 0 || id >= double(c.vocab) ? std::nan("") : rows[size_t(int64_t(id) * c.channels + k)]);
        testing::expect_close(y, want, 0, 0);
        call(Embedding{.ids = ids, .table = table, .y = y, .accumulate = true});
        for (double& v : want) v *= 2;  // exact in every type
        testing::expect_close(y, want, 0, 0);
      }
}

template <class B, class Call> void gradients_are_added_to_their_rows(Call&& call) {
  for (const DeviceCase& c : kDeviceCases)
    for (DType type : {DType::f32, DType::bf16, DType::f16}) {
      B ids = ids_for<B>(c, true), dtable(DType::f32, {c.vocab, c.channels}, c.channels + c.gap);
      B dy(type, {c.tokens, c.channels}, c.channels + 2 * c.gap);
      testing::fill_normal(testing::host_of(dtable), 2);
      testing::fill_normal(testing::host_of(dy), 3);
      testing::send(dtable), testing::send(dy);
      auto want = testing::values(testing::host_of(dtable));
      double most = 1;  // additions to a number
      std::vector<int> additions(size_t(c.vocab), 0);
      const auto id = testing::values(testing::host_of(ids)), g = testing::values(testing::host_of(dy));
      for (size_t t = 0; t < id.size(); ++t) {
        if (id[t] < 0 || id[t] >= double(c.vocab)) continue;
        most = std::max(most, double(++additions[size_t(id[t])]));
        for (int64_t k = 0; k < c.channels; ++k)
          want[size_t(int64_t(id[t]) * c.channels + k)] += g[t * size_t(c.channels) + size_t(k)];
      }
      call(EmbeddingBackward{.ids = ids, .dy = dy, .dtable = dtable});
      // Every addition rounds a sum no larger than its terms together, of size below 5 each.
      testing::expect_close(dtable, want, 5 * most * std::sqrt(most) * testing::roundoff(DType::f32), 1e-7);
    }
}

}  // namespace ingot::embedding_cases
