#pragma once
// y (+)= x w^T + bias for up to 64 rows of x and one matrix, where the products of grouped_linear() would leave
// multiprocessors idle: the dense products of a step of sequences. All multiprocessors have nearly equal shares of the
// matrix, and request the beginning of their shares before the preceding kernel ends. The result has the same bits as
// that of grouped_linear() with the same `parts`.
#include "ingot/kernels/grouped/grouped.h"

namespace ingot::decode {

// Whether batch_linear() takes this product: one group, y of f32, at most 32 rows, no more weights than 16 row tiles
// (of each part of K) per multiprocessor, and `add` without parts, on Hopper. With 33 to 64 rows the limit is three
// such row tiles per multiprocessor, of 64 weight tiles each.
bool takes_batch_linear(const GroupedLinear& a);
void batch_linear(const GroupedLinear& a, Stream stream);

}  // namespace ingot::decode
