#pragma once
// How the work of an optimizer step is dealt to the ranks of a run.
#include <cstdint>
#include <functional>
#include <vector>

#include "ingot/core/comm/communicator.h"
#include "ingot/models/gpt/config/parameters.h"

namespace ingot {

// Which matrices of each bank a rank updates, as parts of the bank in matrices. Every rank gets as many of a bank as
// any other, or one less; what does not divide goes to those with the least work so far.
std::vector<Parts> deal_matrices(const std::vector<MatrixBank>& banks, int world);
// In numbers of the bank.
Parts in_numbers(const Parts& matrices, const MatrixBank& bank);

// The most tokens, a multiple of `unit` and at most `wanted`, whose passes take at most `available` bytes; `bytes`
// grows with them. 0: not even one unit.
int64_t tokens_that_fit(int64_t wanted, int64_t unit, int64_t available, const std::function<int64_t(int64_t)>& bytes);

// Of a tensor in host memory: equal for the same bits, of any number of threads.
uint64_t hash_of_bits(const Tensor& t);

}  // namespace ingot
