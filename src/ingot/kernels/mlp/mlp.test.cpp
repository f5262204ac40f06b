#include "ingot/kernels/mlp/mlp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::fill_normal;
using testing::values;

struct Net {
  std::vector<int64_t> widths;
  int64_t rows;
  bool activate_last = false, bias = true, weight_norm = false;
};
const std::vector<Net> kNets = {{{3, 2}, 1},
                                {{5, 7, 3}, 4, true},
                                {{9, 33, 17, 31, 2}, 6},
                                {{4, 4, 4, 4, 4, 4}, 31, true, false},
                                {{8, 65, 8}, 33, false, false},
                                {{3, 5, 2}, 0},
                                {{3, 2}, 5, false, true, true},
                                {{7, 12, 5, 9}, 11, true, true, true},
                                {{3, 5, 2}, 0, true, true, true}};

struct Memory {
  std::vector<Buffer> w, b, g, dw, db, dg;
  std::vector<MlpLayer> layers, grads;
  Memory(const Net& n, DType dtype) {
    for (size_t l = 0; l + 1 < n.widths.size(); ++l) {
      const int64_t k = n.widths[l], out = n.widths[l + 1];
      w.emplace_back(dtype, Shape{out, k}, k + int64_t(l));
      b.emplace_back(dtype, Shape{1, out});
      dw.emplace_back(dtype, Shape{out, k});
      db.emplace_back(dtype, Shape{1, out});
      fill_normal(w.back(), 10 + l, 1.5 / std::sqrt(double(k)));
      fill_normal(b.back(), 30 + l, 0.3);
      g.emplace_back(dtype, Shape{1, out});
      dg.emplace_back(dtype, Shape{1, out});
      fill_normal(g.back(), 50 + l, 0.3, 1.5);
      for (Buffer* grad : {&dw.back(), &db.back(), &dg.back()}) fill_zero(*grad);
    }
    for (size_t l = 0; l < w.size(); ++l) {
      layers.push_back(
          {w[l], n.bias ? b[l].tensor().row(0) : Tensor(), n.weight_norm ? g[l].tensor().row(0) : Tensor()});
      grads.push_back(
          {dw[l], n.bias ? db[l].tensor().row(0) : Tensor(), n.weight_norm ? dg[l].tensor().row(0) : Tensor()});
    }
  }
};

// Enough workspace for both directions, with or without `saved` and for any type of `saved`.
int64_t workspace_bytes(const Net& n, const Memory& m, DType dtype) {
  const Tensor x(nullptr, dtype, {n.rows, n.widths.front()}), y(nullptr, dtype, {n.rows, n.widths.back()});
  const Tensor saved(nullptr, DType::f32, {mlp_saved_elements(n.rows, m.layers, n.activate_last)});
  return std::max(
      {mlp_workspace_bytes({.x = x, .y = y, .layers = m.layers, .activate_last = n.activate_last}),
       mlp_workspace_bytes({.x = x, .y = y, .layers = m.layers, .activate_last = n.activate_last, .saved = saved}),
       mlp_backward_workspace_bytes(
           {.dy = y, .x = x, .layers = m.layers, .grads = m.grads, .activate_last = n.activate_last}),
       mlp_backward_workspace_bytes(
           {.dy = y, .x = x, .layers = m.layers, .grads = m.grads, .activate_last = n.activate_last, .saved = saved})});
}

template <class F> std::vector<double> reference(const Net& n, const Memory& m, std::vector<double> h) {
  for (size_t l = 0; l < m.w.size(); ++l) {
    const size_t k = size_t(n.widths[l]), out = size_t(n.widths[l + 1]);
    auto w = values(m.w[l]);
    const auto b = values(m.b[l]), g = values(m.g[l]);
    for (size_t j = 0; n.weight_norm && j < out; ++j) {
      double squares = 1e-12;
      for (size_t p = 0; p < k; ++p) squares += w[j * k + p] * w[j * k + p];
      for (size_t p = 0; p < k; ++p) w[j * k + p] *= g[j] / std::sqrt(squares);
    }
    std::vector<double> y(size_t(n.rows) * out);
    for (size_t t = 0; t < size_t(n.rows); ++t)
      for (size_t j = 0; j < out; ++j) {
        double sum = n.bias ? b[j] : 0;
        for (size_t p = 0; p < k; ++p) sum += h[t * k + p] * w[j * k + p];
        y[t * out + j] = n.activate_last || l + 1 < m.w.size() ? F::value(sum) : sum;
      }
    h = y;
  }
  return h;
}

TEST(mlp, any_depth_follows_the_formula_with_and_without_saving) {
  for (const Net& n : kNets)
    for (bool save : {false, true})
      for (DType dtype : {DType::f64, DType::f32}) {
        const Memory m(n, dtype);
        const Buffer x(dtype, {n.rows, n.widths.front()}, n.widths.front() + 2);
        fill_normal(x, 1);
        Buffer y(dtype, {n.rows, n.widths.back()}, n.widths.back() + 1),
            saved(dtype, {mlp_saved_elements(n.rows, m.layers, n.activate_last)}),
            workspace(DType::u8, {workspace_bytes(n, m, dtype)});
        mlp({.x = x,
             .y = y,
             .layers = m.layers,
             .act = act_of<Softplus>,
             .activate_last = n.activate_last,
             .saved = save ? saved.tensor() : Tensor(),
             .workspace = workspace},
            {});
        // At most 65 terms a sum and 5 layers, each multiplying an error by about 1.5.
        const double tolerance = 65 * 8 * testing::roundoff(dtype) * 4;
        const auto result = testing::compare(y, reference<Softplus>(n, m, values(x)), tolerance, tolerance);
        EXPECT_TRUE(result.ok) << result.message;
        EXPECT_TRUE(y.guards_intact() && saved.guards_intact() && workspace.guards_intact());
      }
}

enum class Keep { nothing, values };
TEST(mlp, gradients_of_input_and_parameters_match_finite_differences) {
  for (const Net& n : kNets)
    for (auto [act, keep] : {std::pair{act_of<Softplus>, Keep::values},
                             {act_of<Silu>, Keep::values},
                             {act_of<Tanh>, Keep::nothing},
                             {act_of<Gelu>, Keep::nothing}}) {
      if (n.rows == 0) continue;
      const DType d = DType::f64;
      const Memory m(n, d);
      const Buffer x(d, {n.rows, n.widths.front()}), dy(d, {n.rows, n.widths.back()}, n.widths.back() + 3);
      fill_normal(x, 1);
      fill_normal(dy, 2);
      Buffer y(d, {n.rows, n.widths.back()}), dx(d, {n.rows, n.widths.front()}),
          saved(d, {mlp_saved_elements(n.rows, m.layers, n.activate_last)}),
          workspace(DType::u8, {workspace_bytes(n, m, d)});
      const auto loss = [&] {
        mlp({.x = x,
             .y = y,
             .layers = m.layers,
             .act = act,
             .activate_last = n.activate_last,
             .saved = keep == Keep::values ? saved.tensor() : Tensor(),
             .workspace = workspace},
            {});
        return testing::dot(y, dy);
      };
      loss();
      mlp_backward({.dy = dy,
                    .x = x,
                    .dx = dx,
                    .layers = m.layers,
                    .grads = m.grads,
                    .act = act,
                    .activate_last = n.activate_last,
                    .saved = keep == Keep::values ? saved.tensor() : Tensor(),
                    .workspace = workspace},
                   {});
      EXPECT_LT(testing::gradient_error(loss, x, dx, 3), 1e-6);
      for (size_t l = 0; l < m.w.size(); ++l) {
        EXPECT_LT(testing::gradient_error(loss, m.w[l], m.dw[l], 4), 1e-6) << "layer " << l;
        if (n.bias) { EXPECT_LT(testing::gradient_error(loss, m.b[l], m.db[l], 5), 1e-6) << "layer " << l; }
        if (n.weight_norm) { EXPECT_LT(testing::gradient_error(loss, m.g[l], m.dg[l], 6), 1e-6) << "layer " << l; }
        EXPECT_TRUE(m.dw[l].guards_intact() && m.db[l].guards_intact() && m.dg[l].guards_intact());
      }
      EXPECT_TRUE(dx.guards_intact() && workspace.guards_intact() && saved.guards_intact());
    }
}

TEST(mlp, frozen_gradients_stay_untouched_and_the_remaining_gradients_are_unchanged) {
  const Net n{{6, 11, 9, 5}, 13, true};
  const DType d = DType::f64;
  const Buffer x(d, {n.rows, 6}), dy(d, {n.rows, 5});
  fill_normal(x, 1);
  fill_normal(dy, 2);
  const auto run = [&](size_t trained_from, bool need_dx) {
    const Memory m(n, d);
    Buffer y(d, {n.rows, 5}), dx(d, {n.rows, 6}), saved(d, {mlp_saved_elements(n.rows, m.layers, true)}),
        workspace(DType::u8, {workspace_bytes(n, m, d)});
    fill_zero(dx);
    auto grads = m.grads;
    for (size_t l = 0; l < trained_from; ++l) grads[l] = {};
    mlp({.x = x,
         .y = y,
         .layers = m.layers,
         .act = act_of<Gelu>,
         .activate_last = true,
         .saved = saved,
         .workspace = workspace},
        {});
    mlp_backward({.dy = dy,
                  .x = x,
                  .dx = need_dx ? dx.tensor() : Tensor(),
                  .layers = m.layers,
                  .grads = grads,
                  .act = act_of<Gelu>,
                  .activate_last = true,
                  .saved = saved,
                  .workspace = workspace},
                 {});
    std::vector<std::vector<double>> all = {values(dx)};
    for (size_t l = 0; l < 3; ++l) {
      all.push_back(values(m.dw[l]));
      all.push_back(values(m.db[l]));
    }
    return all;
  };
  const auto want = run(0, true);
  for (size_t from : {0, 1, 2, 3})
    for (bool need_dx : {false, true}) {
      const auto got = run(from, need_dx);
      for (size_t i = 0; i < got.size(); ++i) {
        const bool frozen = i == 0 ? !need_dx : (i - 1) / 2 < from;
        EXPECT_EQ(got[i], frozen ? std::vector<double>(want[i].size(), 0.0) : want[i]) << from << " " << i;
      }
    }
}

TEST(mlp, saved_in_f32_and_recomputation_give_the_gradients_of_saved_values) {
  const Net n{{6, 11, 9, 5}, 13, true, true, true};
  const DType d = DType::f64;
  const Buffer x(d, {n.rows, 6}), dy(d, {n.rows, 5});
  fill_normal(x, 1);
  fill_normal(dy, 2);
  const auto run = [&](DType saved_dtype, bool keep) {
    const Memory m(n, d);
    Buffer y(d, {n.rows, 5}), dx(d, {n.rows, 6}), kept(saved_dtype, {mlp_saved_elements(n.rows, m.layers, true)}),
        workspace(DType::u8, {workspace_bytes(n, m, d)});
    const Tensor saved = keep ? kept.tensor() : Tensor();
    mlp({.x = x,
         .y = y,
         .layers = m.layers,
         .act = act_of<Silu>,
         .activate_last = true,
         .saved = saved,
         .workspace = workspace},
        {});
    mlp_backward({.dy = dy,
                  .x = x,
                  .dx = dx,
                  .layers = m.layers,
                  .grads = m.grads,
                  .act = act_of<Silu>,
                  .activate_last = true,
                  .saved = saved,
                  .workspace = workspace},
                 {});
    EXPECT_TRUE(kept.guards_intact() && workspace.guards_intact());
    std::vector<double> all = values(dx);
    for (const auto* group : {&m.dw, &m.db, &m.dg})
      for (const Buffer& grad : *group) {
        const auto v = values(grad);
        all.insert(all.end(), v.begin(), v.end());
      }
    return all;
  };
  const auto want = run(d, true), again = run(d, false), rounded = run(DType::f32, true);
  EXPECT_EQ(again, want);
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(rounded[i], want[i], 1e-5) << i;
  EXPECT_NE(rounded, want);
}

TEST(mlp, the_number_of_threads_changes_no_bit) {
  const int before = thread_count();
  const Net n{{64, 130, 40}, 150};
  const DType d = DType::f32;
  std::vector<double> first;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    const Memory m(n, d);
    const Buffer x(d, {n.rows, 64}), dy(d, {n.rows, 40});
    fill_normal(x, 1);
    fill_normal(dy, 2);
    Buffer y(d, {n.rows, 40}), dx(d, {n.rows, 64}), saved(d, {mlp_saved_elements(n.rows, m.layers, false)}),
        workspace(DType::u8, {workspace_bytes(n, m, d)});
    mlp({.x = x, .y = y, .layers = m.layers, .act = act_of<Relu>, .saved = saved, .workspace = workspace}, {});
    mlp_backward({.dy = dy,
                  .x = x,
                  .dx = dx,
                  .layers = m.layers,
                  .grads = m.grads,
                  .act = act_of<Relu>,
                  .saved = saved,
                  .workspace = workspace},
                 {});
    std::vector<double> all = values(y);
    for (const Buffer* b : {static_cast<const Buffer*>(&dx), &m.dw[0], &m.dw[1], &m.db[0]}) {
      const auto v = values(*b);
      all.insert(all.end(), v.begin(), v.end());
    }
    if (threads == 1) first = all;
    EXPECT_EQ(all, first);
  }
  set_thread_count(before);
}

TEST(mlp, errors_name_the_found_and_the_expected_value) {
  const Memory m({{3, 5, 2}, 4}, DType::f32);
  const Buffer x(DType::f32, {4, 6}), good(DType::f32, {4, 3});
  Buffer y(DType::f32, {4, 2}), small(DType::u8, {3});
  const auto message = [](const Mlp& op) {
    try {
      mlp(op, {});
    } catch (const Error& e) { return std::string(e.what()); }
    return std::string();
  };
  EXPECT_EQ(message({.x = x, .y = y, .layers = m.layers}), "mlp: layer 0: w: found (5, 3), expected (N, 6)");
  EXPECT_EQ(message({.x = good, .y = y, .layers = {}}), "mlp: found no layers, expected at least one");
  Buffer wide(DType::f32, {4, 3}), doubles(DType::f64, {4, 2});
  EXPECT_EQ(message({.x = good, .y = wide, .layers = m.layers}), "mlp: y: found (4, 3), expected (4, 2)");
  EXPECT_EQ(message({.x = good, .y = doubles, .layers = m.layers}), "mlp: y: found dtype f64, expected x's f32");
  auto layers = m.layers;
  layers[1].g = layers[0].b;
  EXPECT_EQ(message({.x = good, .y = y, .layers = layers}), "mlp: layer 1: g: found (5), expected (2)");
  EXPECT_NE(message({.x = good, .y = y, .layers = m.layers, .saved = doubles}).find("saved: found 8 elements of f64"),
            std::string::npos);
  EXPECT_NE(message({.x = good, .y = y, .layers = m.layers, .workspace = small})
                .find("workspace: found 3 elements of u8, expected at least"),
            std::string::npos);
  const Buffer dy(DType::f32, {4, 2});
  auto grads = m.grads;
  grads[1].g = layers[1].b;
  try {
    mlp_backward({.dy = dy, .x = good, .layers = m.layers, .grads = grads}, {});
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()), "mlp_backward: layer 1: found a gradient of g, expected g itself beside it");
  }
}

// The operands have no memory: unsupported problems are refused before anything is read.
TEST(mlp, a_gpu_takes_eight_layers_of_widths_in_multiples_of_eight_up_to_512) {
  const Device gpu{Device::cuda, 0};
  const auto message = [&](DType dtype, std::vector<int64_t> widths, int64_t gap = 0, int64_t rows = 4,
                           void* bias = nullptr) -> std::string {
    Mlp op{.x = Tensor(nullptr, dtype, {rows, widths.front()}, gpu),
           .y = Tensor(nullptr, dtype, {rows, widths.back()}, gpu)};
    op.x.stride[0] += gap;
    for (size_t l = 0; l + 1 < widths.size(); ++l)
      op.layers.push_back({.w = Tensor(nullptr, dtype, {widths[l + 1], widths[l]}, gpu),
                           .b = Tensor(bias, dtype, {widths[l + 1]}, gpu)});
    try {
      mlp(op, {});
    } catch (const Error& e) { return e.what(); }
    return "nothing was refused";
  };
  EXPECT_EQ(message(DType::f64, {8, 8}), "mlp: x: found dtype f64 on a GPU, expected f16, bf16 or f32");
  EXPECT_EQ(message(DType::f16, {8, 8, 8, 8, 8, 8, 8, 8, 8, 8}), "mlp: found 9 layers, expected at most 8 on a GPU");
  EXPECT_EQ(message(DType::f16, {12, 8}), "mlp: found input width 12, expected a multiple of 8 from 8 to 512 on a GPU");
  EXPECT_EQ(message(DType::f16, {8, 520, 8}),
            "mlp: found layer width 520, expected a multiple of 8 from 8 to 512 on a GPU");
  EXPECT_EQ(message(DType::bf16, {8, 8}, 1), "mlp: x: found rows 18 bytes apart, expected a multiple of 16");
  EXPECT_EQ(message(DType::bf16, {8, 8}, 0, int64_t(1) << 40),
            "mlp: x: found 1099511627776 rows, expected at most 8589934592 on a GPU");
  EXPECT_EQ(message(DType::bf16, {8, 8}, 0, 4, reinterpret_cast<void*>(8)),
            "mlp: b: found an address that is no multiple of 16, expected an aligned one");

  // The workspace's size must be known before the backward pass is called.
  MlpBackward nine{.x = Tensor(nullptr, DType::f16, {4, 8}, gpu)};
  nine.layers.resize(9, {.w = Tensor(nullptr, DType::f16, {8, 8}, gpu)});
  nine.grads.resize(9);
  try {
    mlp_backward_workspace_bytes(nine);
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()), "mlp_backward: found 9 layers, expected at most 8 on a GPU");
  }
}

}  // namespace
}  // namespace ingot
