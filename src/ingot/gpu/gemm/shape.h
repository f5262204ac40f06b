#pragma once
// The vocabulary of matrix products: C (M x N) = A (M x K) B (N x K)^T, in `batch` copies. This file contains only host
// code and constants, so tests of choices need no GPU.
#include <cstdint>

namespace ingot::gemm {

struct Problem {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  bool operator==(const Problem&) const = default;
};

// How the two multiplying warpgroups share a block's tiles.
//     cooperative  each warpgroup takes 64 rows of every tile: the widest tile and the least traffic. The epilogue is
//                  not hidden, which costs little where K is large.
//     ping_pong    each warpgroup takes every other tile as a whole: the epilogue of one warpgroup runs during the
//                  products of the other.
enum class Team : uint8_t { cooperative, ping_pong };

// The part of C that a block computes at a time. In a cluster of 2, two vertically adjacent blocks share the rows of B:
// each block loads half of these rows for both.
struct Tile {
  int n = 256;
  Team team = Team::cooperative;
  int cluster = 2;
  bool operator==(const Tile&) const = default;
};

constexpr int kTileM = 128;  // rows of a block's tile
constexpr int kTileK = 64;   // elements of a 16-bit type: a row of the 128-byte swizzle
constexpr int kWarpgroups = 2, kConsumerThreads = 128 * kWarpgroups, kThreads = 128 + kConsumerThreads;
constexpr uint32_t kPanelBytes = 64 * 128;  // 64 rows of 128 bytes, of any type
constexpr int64_t kSharedBytes = 227 * 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace ingot::gemm
