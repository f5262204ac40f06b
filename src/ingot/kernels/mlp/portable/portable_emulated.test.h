#pragma once
// The portable kernels on the CPU, one fiber per thread: the common code of the two emulated tests (f16 on tensor-core
// fragments, f32). Sanitizers see the kernels' own source lines; the bounds on errors are those of the GPU suite,
// without a chain.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "ingot/kernels/mlp/portable/plan.h"
#include "ingot/testing/testing.h"

namespace ingot::testing {

struct EmulatedNet {
  std::vector<int64_t> widths;
  int64_t rows;
  Act act = act_of<Softplus>;
  bool weight_norm = false, activate_last = false, keep = true;
};

template <class T> struct EmulatedMlp {
  const EmulatedNet& net;
  std::deque<Buffer> memory;
  Mlp f;
  MlpBackward b;

  // `dtype` f64 gives the reference on the same numbers.
  EmulatedMlp(const EmulatedNet& n, DType dtype) : net(n) {
    const DType sums = dtype == DType::f64 ? DType::f64 : DType::f32;
    const auto make = [&](DType t, Shape s, double scale, double mean = 0) {
      memory.emplace_back(t, s);
      Buffer rounded(dtype_of<T>, s);
      fill_normal(rounded, memory.size(), scale, mean);
      if (scale > 0) assign(memory.back(), values(rounded));
      return memory.back().tensor();
    };
    const auto zeros = [&](Shape s) {
      memory.emplace_back(sums, s);
      fill_zero(memory.back());
      return memory.back().tensor();
    };
    f.x = make(dtype, {n.rows, n.widths.front()}, 1);
    b.dy = make(dtype, {n.rows, n.widths.back()}, 1);
    f.y = make(dtype, {n.rows, n.widths.back()}, 0);
    b.dx = make(dtype, {n.rows, n.widths.front()}, 0);
    for (size_t l = 0; l + 1 < n.widths.size(); ++l) {
      const int64_t N = n.widths[l + 1], K = n.widths[l];
      const Tensor w = make(dtype, {N, K}, 1 / std::sqrt(double(K))), bias = make(dtype, {N}, 1),
                   g = make(dtype, {N}, 0.3, 1.5);
      f.layers.push_back({w, bias, n.weight_norm ? g : Tensor()});
      b.grads.push_back({zeros({N, K}), zeros({N}), n.weight_norm ? zeros({N}) : Tensor()});
    }
    f.act = b.act = n.act;
    f.activate_last = b.activate_last = n.activate_last;
    b.x = f.x, b.layers = f.layers;
    if (n.keep) f.saved = b.saved = make(dtype, {mlp_saved_elements(n.rows, f.layers, n.activate_last)}, 0);
  }
  void workspace(int64_t bytes) {
    memory.emplace_back(DType::u8, Shape{bytes});
    f.workspace = b.workspace = memory.back();
  }
  // Tiles of `rows_of_tile` rows, and of the usual tiles of weights.
  void run_kernels(int rows_of_tile, int64_t grid) {
    int scales = 0;
    const int size = int(sizeof(T)), reduction = cuda::portable_reduction(size),
              stride = cuda::portable_rows(f, scales).stride;
    const cuda::PortableConfig c{.rows = rows_of_tile,
                                 .reduction = reduction,
                                 .smem = cuda::portable_smem(rows_of_tile, reduction, stride, size, scales),
                                 .grid = grid};
    run_kernels(c, c);
  }
  // The tiles that a GPU with these limits takes, forward and backward.
  cuda::PortableConfig tile_for(const gpu::Limits& limits, bool backward) const {
    int scales = 0;
    const int size = int(sizeof(T)), stride = cuda::portable_rows(f, scales).stride;
    return cuda::pick_portable(net.rows, stride, size, scales, limits,
                               backward ? cuda::portable_backward_height(size) : 0);
  }
  void run_kernels(const gpu::Limits& limits) { run_kernels(tile_for(limits, false), tile_for(limits, true)); }
  void run_kernels(const cuda::PortableConfig& forward, const cuda::PortableConfig& backward) {
    workspace(cuda::PortableBackward(b).bytes);
    int scales = 0;
    cuda::PortableRows rows = cuda::portable_rows(f, scales);
    rows.y = f.y.data, rows.y_stride = f.y.row_stride();
    cuda::launch_portable_forward<T>(rows, forward, 0, {});
    const cuda::PortableBackward back(b);
    cuda::launch_portable_chain<T>(back.rows, backward, 0, {});
    cuda::launch_portable_grad<T>(back.grad, 0, {});
  }
  // The bytes of all outputs; of `saved` only where it was kept.
  std::vector<std::string> outputs() const {
    std::vector<Tensor> all = {f.y, b.dx};
    if (net.keep) all.push_back(f.saved);
    for (const MlpLayer& g : b.grads)
      for (const Tensor& t : {g.w, g.b, g.g})
        if (t) all.push_back(t);
    std::vector<std::string> bytes;
    for (const Tensor& t : all) bytes.emplace_back(static_cast<const char*>(t.data), size_t(t.bytes()));
    return bytes;
  }
  void run_reference() {
    workspace(std::max(mlp_workspace_bytes(f), mlp_backward_workspace_bytes(b)));
    mlp(f, {});
    mlp_backward(b, {});
  }
};

inline void expect_near(const char* what, const Tensor& got, const Tensor& want, double unit) {
  if (!want) return;
  const auto g = values(got), w = values(want);
  double error = 0, size = 0;
  for (size_t i = 0; i < w.size(); ++i) error += (g[i] - w[i]) * (g[i] - w[i]), size += w[i] * w[i];
  // Each of up to four layers rounds its result once or twice on the way here.
  EXPECT_LE(std::sqrt(error), 8 * unit * std::sqrt(size)) << what;
}

template <class T> void expect_near_fp64(EmulatedMlp<T>& got) {
  const EmulatedNet& n = got.net;
  EmulatedMlp<T> want(n, DType::f64);
  want.run_reference();
  const double unit = roundoff(dtype_of<T>);
  expect_near("y", got.f.y, want.f.y, unit);
  expect_near("dx", got.b.dx, want.b.dx, unit);
  for (size_t l = 0; l < n.widths.size() - 1; ++l) {
    SCOPED_TRACE(::testing::Message() << "layer " << l);
    expect_near("dw", got.b.grads[l].w, want.b.grads[l].w, unit);
    expect_near("db", got.b.grads[l].b, want.b.grads[l].b, unit);
    expect_near("dg", got.b.grads[l].g, want.b.grads[l].g, unit);
  }
  for (const Buffer& m : got.memory) EXPECT_TRUE(m.guards_intact());
}
template <class T> void check_emulated(const EmulatedNet& n, int rows_of_tile, int64_t grid) {
  EmulatedMlp<T> got(n, dtype_of<T>);
  got.run_kernels(rows_of_tile, grid);
  expect_near_fp64(got);
}

// Runs the tiles that an RTX 3090 with two multiprocessors takes: of the given numbers of rows and of terms of the
// sums.
using RowsByTerms = std::pair<int, int>;
template <class T> void check_on_card(const EmulatedNet& n, RowsByTerms forward, RowsByTerms backward) {
  gpu::Limits card = gpu::limits_of("8.6");
  card.sms = 2;
  EmulatedMlp<T> got(n, dtype_of<T>);
  for (const bool back : {false, true}) {
    const cuda::PortableConfig c = got.tile_for(card, back);
    EXPECT_EQ(RowsByTerms(c.rows, c.reduction), back ? backward : forward);
    EXPECT_LE(c.smem, card.smem_per_block);
  }
  got.run_kernels(card);
  expect_near_fp64(got);
}

// Whatever the network, a tile finds room in the shared memory of every GPU from compute capability 8.0 on. The need
// depends on the widest layer, on the rows of all weights with weight norm, and on the number of rows.
template <class T> void check_tiles_fit() {
  const int size = int(sizeof(T));
  for (const char* capability : {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}) {
    const gpu::Limits limits = gpu::limits_of(capability);
    for (int width = 8; width <= cuda::kMlpTo512; width += 8)
      for (int scales = 0; scales <= cuda::kMlpMaxLayers * width; scales += 8)
        for (const int64_t rows : {1, 17, 1000, 5000, 20000, 1 << 20})
          for (const int first : {0, cuda::portable_backward_height(size)}) {
            const auto c = cuda::pick_portable(rows, cuda::portable_stride(width, size), size, scales, limits, first);
            ASSERT_LE(c.smem, limits.smem_per_block)
                << capability << ", " << width << " wide, " << scales << " scales, " << rows << " rows";
            ASSERT_EQ(c.smem,
                      cuda::portable_smem(c.rows, c.reduction, cuda::portable_stride(width, size), size, scales));
            if (limits.smem_per_block > 99 * 1024) ASSERT_EQ(c.reduction, cuda::portable_reduction(size));
          }
  }
}

}  // namespace ingot::testing
