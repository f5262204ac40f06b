#pragma once
// y (+)= x w^T + bias for up to 64 rows of x and one matrix, where the products of grouped_linear() would leave
// multiprocessors idle: the dense products of a step of sequences. All multiprocessors have nearly equal shares of the
// matrix, and request the beginning of their shares before the kernel ahead ends. The bits are those of
// grouped_linear(), with its `parts`.
#include "ingot/kernels/grouped/grouped.h"

namespace ingot::decode {

// Whether batch_linear() takes this product: one group, y of f32, at most 32 rows, no more weights than 16 row tiles
// (of each part of K) per multiprocessor, and `add` without parts, on Hopper. With 33 to 64 rows no more than three
// such row tiles, and 64 weight tiles of each.
bool takes_batch_linear(const GroupedLinear& a);
void batch_linear(const GroupedLinear& a, Stream stream);

}  // namespace ingot::decode
