#include "ingot/kernels/quant/quant.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::BenchCase;
using testing::Operands;
using testing::timed;

constexpr int64_t N = 4096, K = 2048;  // outputs, inputs

WeightMatrix weights(Operands& o, WeightFormat format) {
  if (format == WeightFormat::mxfp4)
    return {format, o.bytes({N, K / kMxBlock, 16}), o.bytes({N, K / kMxBlock}, 119, 4)};
  if (format == WeightFormat::fp8) return {format, o.bytes({N, K}, 0, 100), o.normal({N})};
  return WeightMatrix(o.zeros({N, K}, DType::bf16));
}

BenchCase product(WeightFormat format, int64_t rows) {
  const BenchCase c{.suite = "quant",
                    .name = rows == 1 ? "product of one row" : "product",
                    .shape = std::to_string(rows) + "x4096x2048",
                    .dtype = name_of(format),
                    .flops = 2.0 * double(rows) * N * K,
                    .bytes = double(weight_bytes(format, N, K))};
  return timed(c, [=](Operands& o) {
    const StoredLinear a{.x = o.normal({rows, K}), .w = weights(o, format), .y = o.zeros({rows, N})};
    return [=] { stored_linear(a, {}); };
  });
}

}  // namespace

INGOT_BENCH(quant) {
  std::vector<BenchCase> all;
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    for (const int64_t rows : {1, 64}) all.push_back(product(format, rows));
  return all;
}

}  // namespace ingot
