#include "ingot/kernels/embedding/embedding.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, V = 8192, C = 1024;  // tokens, vocabulary, channels
constexpr double kTensor = 4.0 * T * C;          // bytes of y

}  // namespace

INGOT_BENCH(embedding) {
  return {
      timed({.suite = "embedding", .name = "forward", .shape = "4096x1024", .dtype = "f32", .bytes = 2 * kTensor},
            [](Operands& o) {
              const Embedding a{.ids = o.ids({T}, V), .table = o.normal({V, C}), .y = o.zeros({T, C})};
              return [=] { embedding(a, {}); };
            }),
      timed({.suite = "embedding", .name = "backward", .shape = "4096x1024", .dtype = "f32", .bytes = 3 * kTensor},
            [](Operands& o) {
              const EmbeddingBackward a{.ids = o.ids({T}, V), .dy = o.normal({T, C}), .dtable = o.zeros({V, C})};
              return [=] { embedding_backward(a, {}); };
            }),
  };
}

}  // namespace ingot
