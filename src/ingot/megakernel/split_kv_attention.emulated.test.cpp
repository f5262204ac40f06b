// Attention of one token on the CPU: parts of several rounds, heads of several parts and tiles, caches that are rings.
#include "ingot/megakernel/split_kv_attention.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

constexpr uint32_t kThreads = 32 * 15, kTeams = 5;
struct Block {
  static void sync() { __syncthreads(); }
};
struct Inputs {
  decode_attention::Params p;
  token_attention::Published at;
  uint32_t position, epoch;
  gpu::Watch watch;
};

template <int kDim> __global__ void split_kv_attention_kernel(Inputs inputs) {
  auto& m = tile::shared<split_kv_attention::Memory<kDim>>();
  const split_kv_attention::Keys keys(inputs.p, inputs.position, split_kv_attention::kRound<kDim>,
                                      split_kv_attention::kPartStep<kDim>);
  const split_kv_attention::Attention<kDim, kThreads, Block> attention(inputs.p, keys, inputs.at, inputs.epoch, m);
  const auto put = [&](uint32_t n, uint32_t a, uint32_t b) {
    tile::EpochWords{{a, b, 0}, inputs.epoch}.store(inputs.at.mixed + n / 4);
  };
  const auto wait = [&](auto&& load, auto&& complete) {
    tile::wait_until(
        [&] {
          if (complete()) return true;
          load();
          return false;
        },
        [] { return 0u; }, 1, inputs.watch, 0);
  };
  const size_t row = size_t(inputs.position) * (inputs.p.dim / 2);
  const uint32_t units = attention.units(inputs.p, keys);
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    __syncthreads();
    // A chunk as in the ring; rows without a key are NaN.
    const auto chunks = [&](uint32_t count, auto&& use) {
      constexpr uint32_t kKeys = split_kv_attention::kChunkKeys<kDim>;
      alignas(16) bf16 chunk[2][kKeys][kDim];
      const auto u = attention.unit_of(inputs.p, keys, unit);
      for (uint32_t i = threadIdx.x / 32 / split_kv_attention::kChunkWarps; i < count; i += kTeams) {
        const split_kv_attention::KeyRows r = attention.rows_of(inputs.p, u, i);
        for (uint32_t which = 0; which < 2; ++which)
          for (uint32_t row = 0; row < kKeys; ++row)
            for (uint32_t d = 0; d < kDim; ++d) {
              const bf16* const from = which == 0 ? inputs.p.keys : inputs.p.values;
              chunk[which][row][d] = row < r.rows              ? from[r.first + row * kDim + d]
                                     : row < r.rows + r.others ? from[r.begin + (row - r.rows) * kDim + d]
                                                               : bf16(NAN);
            }
        use(reinterpret_cast<const char*>(chunk), i);
      }
    };
    attention.attend(
        unit, inputs.p.cos + row, inputs.p.sin + row, chunks,
        [&](uint32_t i, uint32_t j, float& a, float& b) { a = inputs.p.qkv[i], b = inputs.p.qkv[j]; }, put, [] {});
  }
  if (!attention.has_parts()) return;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) attention.add_parts(unit, wait, put);
}

struct Case {
  uint32_t position, heads, kv_heads, dim, rows, window, parts;
};

// `kDim`: the width of a row of the cache.
template <int kDim> void check_token(const Case& c) {
  const uint32_t width = (c.heads + 2 * c.kv_heads) * c.dim, half = c.dim / 2, group = c.heads / c.kv_heads;
  auto numbers = [seed = uint64_t(c.position) * 8](size_t n, double scale) mutable {
    std::vector<float> v(n);
    testing::fill_normal(Tensor(v.data(), {int64_t(n)}), seed++, scale);
    return v;
  };
  const std::vector<float> qkv = numbers(width, 1), sinks = numbers(c.heads, 1);
  std::vector<float> cos(size_t(c.position + 1) * half), sin(cos.size());
  for (size_t i = 0; i < cos.size(); ++i) cos[i] = float(std::cos(double(i))), sin[i] = float(std::sin(double(i)));
  // The cache: NaN where nothing was written, zeros as padding of the head.
  const uint32_t low = c.window > 0 && c.position + 1 > c.window ? c.position + 1 - c.window : 0;
  std::vector<bf16> keys(size_t(c.kv_heads) * c.rows * kDim, bf16(NAN)), values = keys;
  const auto place = [&](uint32_t head, uint32_t key) { return (size_t(head) * c.rows + key % c.rows) * kDim; };
  for (uint32_t head = 0; head < c.kv_heads; ++head)
    for (uint32_t key = low; key < c.position; ++key) {
      const std::vector<float> kv = numbers(2 * c.dim, 1);
      for (uint32_t d = 0; d < kDim; ++d) {
        keys[place(head, key) + d] = bf16(d < c.dim ? kv[d] : 0);
        values[place(head, key) + d] = bf16(d < c.dim ? kv[c.dim + d] : 0);
      }
    }
  for (uint32_t head = 0; head < c.kv_heads; ++head)
    for (uint32_t d = c.dim; d < kDim; ++d)
      keys[place(head, c.position) + d] = values[place(head, c.position) + d] = bf16(0);

  // The expected result in fp64, from numbers rounded to bf16 as in the kernel.
  const auto rounded = [](double v) { return double(float(bf16(float(v)))); };
  const auto rotated = [&](const float* x) {
    std::vector<double> y(c.dim);
    for (uint32_t d = 0; d < half; ++d) {
      const double co = cos[size_t(c.position) * half + d], si = sin[size_t(c.position) * half + d];
      y[d] = rounded(x[d] * co - x[d + half] * si), y[d + half] = rounded(x[d + half] * co + x[d] * si);
    }
    return y;
  };
  std::vector<double> want;
  for (uint32_t h = 0; h < c.heads; ++h) {
    const uint32_t head = h / group;
    const std::vector<double> q = rotated(&qkv[h * c.dim]), fresh = rotated(&qkv[(c.heads + head) * c.dim]);
    std::vector<double> out(c.dim);
    double sum = std::exp(double(sinks[h]));
    for (uint32_t key = low; key <= c.position; ++key) {
      const bool is_new = key == c.position;
      double dot = 0;
      for (uint32_t d = 0; d < c.dim; ++d)
        dot += q[d] * (is_new ? fresh[d] : double(float(keys[place(head, key) + d])));
      const double share = std::exp(dot / std::sqrt(double(c.dim)));
      sum += share;
      for (uint32_t d = 0; d < c.dim; ++d)
        out[d] += share * (is_new ? rounded(qkv[(c.heads + c.kv_heads + head) * c.dim + d])
                                  : double(float(values[place(head, key) + d])));
    }
    for (double v : out) want.push_back(v / sum);
  }

  const uint32_t parts_bytes = uint32_t(token_attention::Published::parts_bytes(c.heads, c.parts, kDim));
  std::vector<tile::EpochWords> parts(parts_bytes / 16), mixed(c.heads * c.dim / 4);
  uint32_t stop = gpu::kRunning, host_stop = 0;
  gpu::WaitRecord record;
  const Inputs inputs{.p = {.position = nullptr,
                            .qkv = qkv.data(),
                            .cos = cos.data(),
                            .sin = sin.data(),
                            .sinks = sinks.data(),
                            .keys = keys.data(),
                            .values = values.data(),
                            .T = 1,
                            .heads = c.heads,
                            .kv_heads = c.kv_heads,
                            .dim = c.dim,
                            .rows = c.rows,
                            .window = c.window,
                            .parts = c.parts,
                            .group = group,
                            .scale = float(1 / std::sqrt(double(c.dim))),
                            .columns = WeightFormat::bf16},
                      .at = {parts.data(), mixed.data()},
                      .position = c.position,
                      .epoch = 9,
                      .watch = {.stop = &stop, .host_stop = &host_stop, .record = &record, .limit_ns = 50'000'000}};
  gpu::launch("token attention", split_kv_attention_kernel<kDim>, {.grid = 3, .block = kThreads, .cooperative = true},
              {}, inputs);

  ASSERT_EQ(stop, uint32_t(gpu::kRunning));
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const tile::EpochWords& four = mixed[i / 4];
    ASSERT_EQ(four.epoch, 9u);
    bf16 got;
    got.bits = uint16_t(four.word[i % 4 / 2] >> 16 * (i % 2));
    error += (float(got) - want[i]) * (float(got) - want[i]), size += want[i] * want[i];
  }
  // The probabilities and the result are rounded to bf16, which gives two relative errors of at most 2^-9 each.
  EXPECT_LT(std::sqrt(error / size), 0x1p-8);
}

TEST(SplitKvAttentionEmulated, OneRoundOrManyOnePartOrManyEqualTheFp64Loop) {
  for (const Case& c : {Case{0, 8, 1, 64, 16, 0, 1},        // the first token of a sequence
                        Case{127, 16, 2, 64, 160, 128, 2},  // the last token of a window before keys leave the window
                        Case{300, 8, 1, 64, 143, 128, 2},   // a circular cache that wraps around
                        Case{700, 8, 1, 64, 701, 0, 1},     // six rounds
                        Case{700, 8, 1, 32, 701, 0, 2},     // two parts of three rounds, a narrow head
                        Case{130, 12, 1, 64, 200, 0, 4},    // two tiles; the new key is alone in the round of its part
                        Case{384, 3, 1, 20, 400, 0, 16}}) {
    SCOPED_TRACE(::testing::Message() << "position " << c.position << ", heads " << c.heads << ", dim " << c.dim
                                      << ", parts " << c.parts);
    check_token<64>(c);
  }
}
TEST(SplitKvAttentionEmulated, HeadsOf128EqualTheFp64Loop) {
  for (const Case& c : {Case{0, 8, 1, 128, 16, 0, 1},        // the first token of a sequence
                        Case{63, 5, 1, 128, 64, 0, 1},       // a full round of one part
                        Case{150, 16, 2, 128, 143, 128, 2},  // a circular cache that wraps around
                        Case{330, 4, 1, 128, 331, 0, 1},     // six rounds
                        Case{330, 4, 1, 96, 331, 0, 2},      // two parts of three rounds, a narrow head
                        Case{66, 12, 1, 128, 100, 0, 4},     // two tiles; few keys in the last part
                        Case{570, 8, 1, 128, 600, 0, 9},     // parts for which most threads are needed
                        Case{600, 8, 1, 128, 640, 0, 9},     // parts of three chunks, a warp more than slots of Memory
                        Case{200, 3, 1, 80, 256, 0, 16}}) {
    SCOPED_TRACE(::testing::Message() << "position " << c.position << ", heads " << c.heads << ", dim " << c.dim
                                      << ", parts " << c.parts);
    check_token<128>(c);
  }
}

}  // namespace
}  // namespace ingot
