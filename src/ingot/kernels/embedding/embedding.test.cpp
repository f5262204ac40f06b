#include "ingot/kernels/embedding/embedding.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::values;

struct Case {
  int64_t tokens, vocab, channels, gap;
};
const Case kCases[] = {{0, 3, 4, 0}, {1, 1, 1, 0}, {5, 3, 7, 2}, {40, 11, 130, 3}, {300, 17, 64, 0}, {9, 5, 0, 0}};

TEST(Embedding, CopiesOrAddsTheRowOfEachId) {
  for (const Case& c : kCases)
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      Buffer ids(DType::i32, {c.tokens}), table(dtype, {c.vocab, c.channels}, c.channels + c.gap);
      Buffer y(dtype, {c.tokens, c.channels}, c.channels + 2 * c.gap);
      testing::fill_ids(ids, 1, c.vocab);
      testing::fill_normal(table, 2);
      embedding({.ids = ids, .table = table, .y = y}, {});
      const auto id = values(ids), rows = values(table);
      std::vector<double> want;
      for (double i : id)
        for (int64_t k = 0; k < c.channels; ++k) want.push_back(rows[size_t(int64_t(i) * c.channels + k)]);
      EXPECT_EQ(values(y), want);
      embedding({.ids = ids, .table = table, .y = y, .accumulate = true}, {});
      for (double& v : want) v *= 2;  // exact in every type
      EXPECT_EQ(values(y), want);
      EXPECT_TRUE(y.guards_intact() && table.guards_intact());
    }
}

TEST(EmbeddingBackward, AddsEveryTokensGradientToItsRow) {
  for (const Case& c : kCases)
    for (DType dtype : {DType::f64, DType::f32}) {
      Buffer ids(DType::i32, {c.tokens}), dtable(dtype, {c.vocab, c.channels}, c.channels + c.gap);
      Buffer dy(dtype, {c.tokens, c.channels}, c.channels + 2 * c.gap);
      testing::fill_ids(ids, 1, c.vocab);
      testing::fill_normal(dtable, 2);
      testing::fill_normal(dy, 3);
      auto want = values(dtable), size = want, additions = std::vector<double>(want.size(), 0);
      for (double& v : size) v = std::abs(v);
      const auto id = values(ids), g = values(dy);
      embedding_backward({.ids = ids, .dy = dy, .dtable = dtable}, {});
      for (size_t t = 0; t < id.size(); ++t)
        for (int64_t k = 0; k < c.channels; ++k) {
          const size_t i = size_t(int64_t(id[t]) * c.channels + k);
          const double more = g[t * size_t(c.channels) + size_t(k)];
          want[i] += more, size[i] += std::abs(more), ++additions[i];
        }
      // Every addition rounds a sum bounded by the sum of its terms' sizes; a row without a token does not change.
      const auto got = values(dtable);
      for (size_t i = 0; i < want.size(); ++i)
        EXPECT_LE(std::abs(got[i] - want[i]), additions[i] * size[i] * testing::roundoff(dtype)) << i;
      EXPECT_TRUE(dtable.guards_intact());
    }
}

TEST(EmbeddingBackward, IsTheDerivativeOfTheForward) {
  Buffer ids(DType::i32, {20}), table(DType::f64, {7, 5}), y(DType::f64, {20, 5}), dy(DType::f64, {20, 5}),
      dtable(DType::f64, {7, 5});
  testing::fill_ids(ids, 1, 7);
  testing::fill_normal(table, 2);
  testing::fill_normal(dy, 3);
  fill_zero(dtable);
  embedding_backward({.ids = ids, .dy = dy, .dtable = dtable}, {});
  const auto run = [&] {
    embedding({.ids = ids, .table = table, .y = y}, {});
    return testing::dot(y, dy);
  };
  EXPECT_LT(testing::gradient_error(run, table, dtable, 4), 1e-6);
}

TEST(Embedding, ThreadsDoNotChangeABit) {
  const int before = thread_count();
  std::vector<double> first;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    Buffer ids(DType::i32, {500}), dy(DType::f32, {500, 200}), dtable(DType::f32, {13, 200});
    testing::fill_ids(ids, 1, 13);
    testing::fill_normal(dy, 3);
    fill_zero(dtable);
    embedding_backward({.ids = ids, .dy = dy, .dtable = dtable}, {});
    if (threads == 1) first = values(dtable);
    EXPECT_EQ(values(dtable), first);
  }
  set_thread_count(before);
}

TEST(Embedding, AnIdOutsideTheVocabularyIsNamedWithItsPosition) {
  Buffer ids(DType::i32, {4}), table(DType::f32, {3, 2}), y(DType::f32, {4, 2});
  fill_zero(table);
  for (int bad : {3, -1}) {
    testing::assign(ids, {0, 2, double(bad), 77});
    for (bool backward : {false, true}) {
      try {
        if (backward)
          embedding_backward({.ids = ids, .dy = y, .dtable = table}, {});
        else
          embedding({.ids = ids, .table = table, .y = y}, {});
        FAIL() << "no error for " << bad;
      } catch (const Error& e) {
        const std::string what = e.what();
        for (const std::string& part :
             {"id " + std::to_string(bad), std::string("position 2"), std::string("vocabulary of 3")})
          EXPECT_NE(what.find(part), std::string::npos) << what;
      }
    }
  }
  Buffer narrow(DType::f32, {4, 3});
  testing::assign(ids, {0, 0, 0, 0});
  EXPECT_THROW(embedding({.ids = ids, .table = table, .y = narrow}, {}), Error);
}

}  // namespace
}  // namespace ingot
