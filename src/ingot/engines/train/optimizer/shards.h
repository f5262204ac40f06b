#pragma once
// How the work of an optimizer step is divided among the ranks of a run.
#include <cstdint>
#include <functional>
#include <vector>

#include "ingot/core/comm/communicator.h"
#include "ingot/models/gpt/config/parameters.h"

namespace ingot {

// Deals the matrices of each bank to the ranks, as parts of the bank counted in matrices. The numbers of matrices of
// two ranks differ by at most 1; a remainder goes to the ranks with the least work so far.
std::vector<Parts> deal_matrices(const std::vector<MatrixBank>& banks, int world);
// The same parts counted in numbers (elements).
Parts in_numbers(const Parts& matrices, const MatrixBank& bank);

// The most tokens, a multiple of `unit` and at most `wanted`, for which bytes(tokens) is at most `available`; `bytes`
// grows with the tokens. 0 if even one unit does not fit.
int64_t tokens_that_fit(int64_t wanted, int64_t unit, int64_t available, const std::function<int64_t(int64_t)>& bytes);

// A hash of a tensor in host memory: the same for the same bits, with any number of threads.
uint64_t hash_of_bits(const Tensor& t);

}  // namespace ingot
