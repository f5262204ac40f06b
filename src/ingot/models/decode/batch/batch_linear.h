#pragma once
// y (+)= x w^T + bias for up to 64 rows of x and one matrix, where the products of grouped_linear() would leave
// multiprocessors idle: the dense products of a step of sequences. All multiprocessors have nearly equal shares of the
// matrix, and request the beginning of their shares before the preceding kernel ends. The result has the same bits as
// that of grouped_linear() with the same `parts`.
#include "ingot/kernels/grouped/grouped.h"

namespace ingot::decode {

// Whether batch_linear() takes this product: one group, y of f32, at most 64 rows, and `add` without parts, on Hopper.
// A multiprocessor multiplies row tiles of one part of K: at most 16 of them for up to 32 rows of x; for 33 to 64 rows
// at most 3, with at most 64 weight tiles in each.
bool takes_batch_linear(const GroupedLinear& a);
void batch_linear(const GroupedLinear& a, Stream stream);

}  // namespace ingot::decode
