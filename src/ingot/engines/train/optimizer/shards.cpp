#include "ingot/engines/train/optimizer/shards.h"

#include <algorithm>
#include <cstring>

#include "ingot/core/cpu/thread_pool.h"

namespace ingot {

std::vector<Parts> deal_matrices(const std::vector<MatrixBank>& banks, int world) {
  std::vector<double> work(static_cast<size_t>(world));
  std::vector<Parts> dealt;
  for (const MatrixBank& b : banks) {
    // The operations of an iteration's products are proportional to the longer side and to the square of the shorter
    // side.
    const double one = double(b.rows) * double(b.cols) * double(std::min(b.rows, b.cols));
    std::vector<int64_t> counts(size_t(world), b.count / world);
    for (size_t r = 0; r < counts.size(); ++r) work[r] += one * double(counts[r]);
    for (int64_t left = b.count % world; left > 0; --left) {
      size_t next = 0;
      for (size_t r = 0; r < counts.size(); ++r) {
        const bool has_one = counts[r] > b.count / world, next_has = counts[next] > b.count / world;
        if (next_has != has_one ? next_has : work[r] < work[next]) next = r;
      }
      counts[next] += 1;
      work[next] += one;
    }
    Parts parts{0};
    for (const int64_t n : counts) parts.push_back(parts.back() + n);
    dealt.push_back(std::move(parts));
  }
  return dealt;
}

Parts in_numbers(const Parts& matrices, const MatrixBank& bank) {
  Parts numbers;
  for (const int64_t m : matrices) numbers.push_back(m * bank.rows * bank.cols);
  return numbers;
}

int64_t tokens_that_fit(int64_t wanted, int64_t unit, int64_t available, const std::function<int64_t(int64_t)>& bytes) {
  int64_t fit = 0, over = wanted / unit + 1;  // in units
  while (over - fit > 1) {
    const int64_t middle = fit + (over - fit) / 2;
    (bytes(middle * unit) <= available ? fit : over) = middle;
  }
  return fit * unit;
}

uint64_t hash_of_bits(const Tensor& t) {
  constexpr int64_t kBlock = 1 << 20;
  const int64_t bytes = t.bytes();
  std::vector<uint64_t> blocks(size_t((bytes + kBlock - 1) / kBlock));
  const auto mix = [](uint64_t h, uint64_t word) {
    h = (h ^ word) * 0x9e3779b97f4a7c15;
    return h ^ (h >> 32);
  };
  parallel_tasks(int64_t(blocks.size()), [&](int64_t i) {
    const char* const from = static_cast<const char*>(t.data) + i * kBlock;
    const int64_t n = std::min(kBlock, bytes - i * kBlock);
    uint64_t h = uint64_t(n);
    for (int64_t at = 0; at < n; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, from + at, size_t(std::min<int64_t>(8, n - at)));
      h = mix(h, word);
    }
    blocks[size_t(i)] = h;
  });
  uint64_t all = uint64_t(bytes);
  for (const uint64_t h : blocks) all = mix(all, h);
  return all;
}

}  // namespace ingot
