#include "ingot/kernels/lane_write/lane_write.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, C = 1024;    // rows, columns
constexpr double kTensor = 4.0 * T * C;  // bytes of a tensor

}  // namespace

INGOT_BENCH(lane_write) {
  return {
      timed({.suite = "lane_write", .name = "forward", .shape = "4096x1024", .dtype = "f32", .bytes = 6 * kTensor},
            [](Operands& o) {
              const LaneWrite a{o.normal({T, C}), o.normal({T, C}), o.normal({T, C}), o.normal({T, C}),
                                o.normal({C}),    o.normal({C}),    o.normal({2}),    o.normal({2, 2}),
                                o.zeros({T, C}),  o.zeros({T, C})};
              return [=] { lane_write(a, {}); };
            }),
  };
}

}  // namespace ingot
