#pragma once
#include "ingot/kernels/sum/sum.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::sum_cases {

template <class B, class Call> void adds_to_the_total(Call&& call) {
  for (DType t : {DType::f64, DType::f32})
    for (int64_t n : {0, 1, 1000, 100003}) {
      B x = testing::normal<B>(t, {n}, 1, 10), total = testing::holding<B>(DType::f64, {1}, {2.5});
      double want = 2.5, size = 2.5;
      for (double v : testing::values(testing::host_of(x))) want += v, size += std::abs(v);
      call(Sum{.x = x, .total = total});
      testing::expect_close(total, {want}, 1e-16 * double(n) * size / 10, 0);  // in another order of fp64
    }
}

}  // namespace ingot::sum_cases
