#pragma once
// Matrices in another format: bf16, fp8 or mxfp4 (kernels/quant/quant.h).
#include "ingot/core/memory/arena.h"
#include "ingot/kernels/quant/quant.h"

namespace ingot {

// The most bytes that in_format() takes of an arena. Error{unsupported} for mxfp4 with rows that its blocks do not
// divide.
int64_t bytes_in_format(const WeightMatrix& w, WeightFormat to);
// A copy of a matrix or a bank in rows: dequantised and quantised, with the same numbers as an archive of this format
// has.
WeightMatrix in_format(const WeightMatrix& w, WeightFormat to, Arena& arena);

}  // namespace ingot
