#pragma once
// The cases of the CUDA suite of MLPs, and their operands.
#include <cmath>
#include <deque>
#include <functional>
#include <ostream>
#include <vector>

#include "ingot/kernels/mlp/forms.h"
#include "ingot/testing/device_buffer.h"

namespace ingot::mlp_cuda_test {

using cuda::MlpForm;
using testing::Buffer;
using testing::DeviceBuffer;
using testing::fill_normal;
using testing::values;
using Vector = std::vector<double>;

enum class Keep { own_type, f32, nothing };
struct Case {
  std::vector<int64_t> widths;
  int64_t rows;
  Act act = act_of<Softplus>;
  bool bias = true, weight_norm = false, activate_last = false;
  Keep keep = Keep::own_type;
  int64_t gap = 0;  // elements between the rows of x, y, dy and dx
  size_t depth() const { return widths.size() - 1; }
};
inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  for (int64_t w : c.widths) out << w << ' ';
  return out << "rows " << c.rows << ' ' << name_of(c.act) << " bias " << c.bias << " weight norm " << c.weight_norm
             << " activate_last " << c.activate_last << " keep " << int(c.keep) << " gap " << c.gap;
}

inline std::vector<int64_t> equal_widths(size_t depth, int64_t width) { return std::vector<int64_t>(depth + 1, width); }

// Each option is combined with each size at which the option could fail, not with every size. The options are
// distributed over the parts in turn.
struct CaseList {
  static constexpr Keep keeps[] = {Keep::own_type, Keep::nothing, Keep::f32};
  std::vector<Case> all;
  int i = 0;

  void equal_layers() {
    for (int64_t rows : {1, 7, 64, 65, 1000, 4097})
      for (size_t depth : {3, 5}) {
        ++i;
        all.push_back({.widths = equal_widths(depth, 128),
                       .rows = rows,
                       .bias = i % 2 == 0,
                       .weight_norm = i % 3 == 0,
                       .keep = keeps[i % 3]});
        all.push_back({.widths = equal_widths(depth, 64),
                       .rows = rows + 1,
                       .bias = i % 2 == 1,
                       .weight_norm = i % 4 == 1,
                       .activate_last = i % 3 == 1,
                       .keep = keeps[(i + 1) % 3]});
      }
    for (size_t depth = 1; depth <= 8; ++depth)
      all.push_back({.widths = equal_widths(depth, depth % 2 ? 128 : 64),
                     .rows = 130 + int64_t(depth),
                     .bias = depth % 2 == 0,
                     .weight_norm = depth % 4 == 3,
                     .activate_last = depth % 3 == 0,
                     .keep = keeps[depth % 3]});
  }
  // Weight norm alone, for which some variants have separate kernels: every depth, with and without kept values.
  void weight_norm_alone() {
    for (size_t depth = 1; depth <= 5; ++depth)
      for (Act act : {act_of<Softplus>, act_of<Silu>})
        all.push_back({.widths = equal_widths(depth, 128),
                       .rows = 60 + 130 * int64_t(depth),
                       .act = act,
                       .bias = false,
                       .weight_norm = true,
                       .keep = keeps[(depth + (act == act_of<Silu>)) % 3]});
  }
  // Every depth with its values kept, over 196 to 637 rows: several tiles of 64 rows, mostly with a partial last one.
  void many_tiles_with_values_kept() {
    for (size_t depth = 1; depth <= 8; ++depth)
      for (bool activate_last : {false, true})
        all.push_back({.widths = equal_widths(depth, (depth + activate_last) % 4 ? 128 : 64),
                       .rows = 700 - 63 * int64_t(depth),
                       .bias = (depth + activate_last) % 2 == 0,
                       .weight_norm = depth % 3 == 1,
                       .activate_last = activate_last});
  }
  // Widths with partial tiles, different widths, and the largest.
  void odd_widths() {
    const std::vector<std::vector<int64_t>> odd = {{8, 8},
                                                   {8, 128, 128, 8},
                                                   {24, 72, 40, 104, 16},
                                                   {128, 64, 128},
                                                   {96, 128, 128, 64},
                                                   {16, 256, 136, 8},
                                                   {200, 512, 8, 96},
                                                   {512, 512, 512},
                                                   {32, 64, 64, 64, 3 * 8}};
    for (const auto& widths : odd)
      for (int64_t rows : {5, 150, 333}) {
        ++i;
        all.push_back({.widths = widths,
                       .rows = rows,
                       .bias = i % 2 == 0,
                       .weight_norm = i % 3 != 0,
                       .activate_last = i % 4 == 0,
                       .keep = keeps[i % 3],
                       .gap = i % 2 ? 8 : 0});
      }
  }
  void of_depth(size_t depth, int64_t width, int64_t rows, Keep keep) {
    all.push_back({.widths = equal_widths(depth, width),
                   .rows = rows,
                   .bias = depth % 4 < 2,
                   .weight_norm = (depth + size_t(keep)) % 3 == 0,
                   .activate_last = depth % 4 == 3,
                   .keep = keep,
                   .gap = depth % 3 ? 0 : 24});
  }
  void of_widths(const std::vector<int64_t>& widths, Keep keep) {
    ++i;
    all.push_back({.widths = widths,
                   .rows = 64 * (i % 4) + 1 + i % 64,
                   .bias = i % 2 == 0,
                   .weight_norm = i % 3 == 0,
                   .keep = keep,
                   .gap = i % 2 ? 8 : 0});
  }
  // Wider than 128: every depth, kept and not, some blocks with a tile and some with none.
  void to_256() {
    for (size_t depth = 1; depth <= 8; ++depth)
      for (Keep keep : keeps)
        of_depth(depth, depth % 2 ? 256 : 200,
                 keep == Keep::nothing ? 40 + 130 * int64_t(depth) : 70 + 9 * int64_t(depth), keep);
    for (const auto& widths : std::vector<std::vector<int64_t>>{{136, 8}, {8, 256, 136, 16}, {200, 136, 256, 72, 248}})
      for (Keep keep : keeps) of_widths(widths, keep);
    for (int act = 0; act < Activations::size; ++act)
      for (Keep keep : {Keep::nothing, Keep::f32})
        all.push_back(
            {.widths = {72, 256, 144}, .rows = 150, .act = Act(act), .activate_last = act % 2 == 1, .keep = keep});
  }
  // Wider than 256: every depth, with values kept and not kept; layers of a single pass and of two, as first, middle
  // and last layer; partial tiles.
  void to_512() {
    for (size_t depth = 1; depth <= 8; ++depth)
      for (Keep keep : keeps)
        of_depth(depth, depth % 2 ? 512 : 264, 12 + 8 * int64_t(depth) + 20 * int64_t(keep), keep);
    for (const auto& widths : std::vector<std::vector<int64_t>>{{264, 8},
                                                                {8, 264},
                                                                {8, 512, 16, 40},
                                                                {512, 128, 512},
                                                                {384, 8, 504, 256, 392},
                                                                {72, 320, 320, 144},
                                                                {384, 160, 384, 328},
                                                                {192, 384, 200, 336},
                                                                {392, 448, 216, 440},
                                                                {448, 224, 8, 400}})
      for (Keep keep : keeps) {
        of_widths(widths, keep);
        all.back().activate_last = i % 5 == 0;
      }
    for (int act = 0; act < Activations::size; ++act)
      for (Keep keep : keeps)
        all.push_back(
            {.widths = {72, 328, 144}, .rows = 90, .act = Act(act), .activate_last = act % 2 == 1, .keep = keep});
    all.push_back({.widths = {64, 512, 64}, .rows = 9000, .weight_norm = true, .keep = Keep::nothing});
    all.push_back({.widths = {384, 328, 264}, .rows = 18000, .activate_last = true, .keep = Keep::f32});
    all.push_back({.widths = {8, 448, 400}, .rows = 9000, .act = act_of<Gelu>, .weight_norm = true});
  }
  // Wider than 128 with kept values: each depth, partial tiles, and more rows than a GPU's blocks take at once.
  void to_256_with_values_kept() {
    for (size_t depth = 1; depth <= 8; ++depth)
      all.push_back({.widths = equal_widths(depth, depth % 3 ? 256 : 200),
                     .rows = 900 - 63 * int64_t(depth),
                     .bias = depth % 2 == 0,
                     .weight_norm = depth % 3 == 1,
                     .activate_last = depth % 4 >= 2,
                     .gap = depth % 2 ? 16 : 0});
    for (const auto& widths : std::vector<std::vector<int64_t>>{{136, 136}, {256, 136, 200, 8}, {8, 256, 8}})
      for (int64_t rows : {1, 65, 257, 1100}) {
        ++i;
        all.push_back({.widths = widths,
                       .rows = rows,
                       .bias = i % 2 == 0,
                       .weight_norm = i % 3 == 0,
                       .activate_last = i % 4 == 0,
                       .gap = i % 3 ? 8 : 0});
      }
    all.push_back({.widths = {8, 136, 8}, .rows = 17011, .weight_norm = true});
    for (int act = 0; act < Activations::size; ++act)
      all.push_back({.widths = {64, 256, 144, 256}, .rows = 300, .act = Act(act), .activate_last = act % 2 == 0});
  }
  // Wider than 256 with kept values: each depth, layers of a single half and of two halves at any position, partial
  // tiles, a single warpgroup and two with rows, more rows than a GPU's blocks take at once.
  void to_512_with_values_kept() {
    for (size_t depth = 1; depth <= 8; ++depth)
      all.push_back({.widths = equal_widths(depth, depth % 3 ? 512 : 264),
                     .rows = 300 - 31 * int64_t(depth),
                     .bias = depth % 2 == 0,
                     .weight_norm = depth % 3 == 1,
                     .activate_last = depth % 4 >= 2,
                     .gap = depth % 2 ? 16 : 0});
    for (const auto& widths : std::vector<std::vector<int64_t>>{{264, 8},
                                                                {8, 384, 512},
                                                                {512, 136, 328},
                                                                {16, 512, 256, 264, 8},
                                                                {384, 384, 192, 200, 328},
                                                                {392, 448, 216, 224, 440}})
      for (int64_t rows : {1, 65, 700}) {
        ++i;
        all.push_back({.widths = widths,
                       .rows = rows,
                       .bias = i % 2 == 0,
                       .weight_norm = i % 5 < 2,
                       .activate_last = i % 3 == 0,
                       .gap = i % 3 ? 8 : 0});
      }
    all.push_back({.widths = {8, 264, 8}, .rows = 17011});
    all.push_back({.widths = {64, 512, 64}, .rows = 9000, .weight_norm = true, .activate_last = true});
    all.push_back({.widths = {384, 328, 264}, .rows = 20000, .weight_norm = true});
    all.push_back({.widths = {448, 400}, .rows = 9000, .weight_norm = true});
    for (int act = 0; act < Activations::size; ++act)
      all.push_back({.widths = {64, 512, 144, 320}, .rows = 200, .act = Act(act), .activate_last = act % 2 == 0});
  }
  void activations() {
    for (int act = 0; act < Activations::size; ++act)
      for (Keep keep : keeps)
        all.push_back(
            {.widths = {64, 128, 64, 128}, .rows = 77, .act = Act(act), .activate_last = act % 2 == 0, .keep = keep});
  }
};
inline std::vector<Case> cases() {
  CaseList list;
  list.equal_layers();
  list.weight_norm_alone();
  list.many_tiles_with_values_kept();
  list.odd_widths();
  list.to_256();
  list.to_256_with_values_kept();
  list.to_512_with_values_kept();
  list.to_512();
  list.activations();
  return list.all;
}

// The operands of a case, on the device and their host mirrors.
struct Problem {
  Case c;
  DType dtype;
  DeviceBuffer x, y, dy, dx, saved, ahead, workspace;  // ahead: the forward pass' workspace
  std::deque<DeviceBuffer> w, b, g, dw, db, dg;
  bool need_dx = true;
  std::vector<bool> frozen;  // per layer

  Problem(const Case& k, DType t, MlpForm backward_form)
      : c(k),
        dtype(t),
        x(t, {c.rows, c.widths.front()}, c.widths.front() + c.gap),
        y(t, {c.rows, c.widths.back()}, c.widths.back() + c.gap),
        dy(t, {c.rows, c.widths.back()}, c.widths.back() + c.gap),
        dx(t, {c.rows, c.widths.front()}, c.widths.front() + c.gap),
        saved(c.keep == Keep::f32 ? DType::f32 : t, {0}),
        ahead(DType::u8, {0}),
        workspace(DType::u8, {0}),
        frozen(c.depth(), false) {
    for (size_t l = 0; l < c.depth(); ++l) {
      const int64_t n = c.widths[l + 1], k = c.widths[l];
      w.emplace_back(t, Shape{n, k});
      b.emplace_back(t, Shape{n});
      g.emplace_back(t, Shape{n});
      dw.emplace_back(DType::f32, Shape{n, k});
      db.emplace_back(DType::f32, Shape{n});
      dg.emplace_back(DType::f32, Shape{n});
    }
    saved = DeviceBuffer(saved.tensor().dtype, {mlp_saved_elements(c.rows, layers(), c.activate_last)});
    ahead = DeviceBuffer(DType::u8, {cuda::mlp_workspace_bytes(forward())});
    workspace = DeviceBuffer(DType::u8, {cuda::mlp_backward_workspace_bytes_with(backward(), backward_form)});
  }

  std::vector<MlpLayer> layers() const {
    std::vector<MlpLayer> all;
    for (size_t l = 0; l < c.depth(); ++l)
      all.push_back({w[l], c.bias ? b[l].tensor() : Tensor(), c.weight_norm ? g[l].tensor() : Tensor()});
    return all;
  }
  std::vector<MlpLayer> grads() const {
    std::vector<MlpLayer> all;
    for (size_t l = 0; l < c.depth(); ++l)
      all.push_back(
          frozen[l] ? MlpLayer{}
                    : MlpLayer{dw[l], c.bias ? db[l].tensor() : Tensor(), c.weight_norm ? dg[l].tensor() : Tensor()});
    return all;
  }
  Mlp forward() const {
    return {.x = x,
            .y = y,
            .layers = layers(),
            .act = c.act,
            .activate_last = c.activate_last,
            .saved = c.keep == Keep::nothing ? Tensor() : saved.tensor(),
            .workspace = ahead};
  }
  MlpBackward backward() const {
    return {.dy = dy,
            .x = x,
            .dx = need_dx ? dx.tensor() : Tensor(),
            .layers = layers(),
            .grads = grads(),
            .act = c.act,
            .activate_last = c.activate_last,
            .saved = c.keep == Keep::nothing ? Tensor() : saved.tensor(),
            .workspace = workspace};
  }
  template <class Use> void each(Use&& use) {
    for (DeviceBuffer* t : {&x, &y, &dy, &dx, &saved, &ahead, &workspace}) use(*t);
    for (auto* group : {&w, &b, &g, &dw, &db, &dg})
      for (DeviceBuffer& t : *group) use(t);
  }
  void upload() {
    each([](DeviceBuffer& t) { t.upload(); });
  }
  void download() {
    each([](DeviceBuffer& t) { t.download(); });
  }
  void fill(uint64_t seed);
  void run(MlpForm forward_form, MlpForm backward_form) {
    upload();
    cuda::mlp_with(forward(), forward_form, {});
    cuda::mlp_backward_with(backward(), backward_form, {});
    download();
  }
};

// Weights for which every layer's value before the activation has a standard deviation of 1.5 and, with a bias, a few
// columns lie at -12 to -18, deep in the left tail.
inline void Problem::fill(uint64_t seed) {
  fill_normal(x.host(), seed, 1);
  fill_normal(dy.host(), seed + 1, 1);
  Case part = c;
  for (size_t l = 0; l < c.depth(); ++l) {
    const size_t n = size_t(c.widths[l + 1]);
    fill_normal(w[l].host(), seed + 10 + l, 1 / std::sqrt(double(c.widths[l])));
    fill_normal(b[l].host(), seed + 30 + l, 0.5);
    Vector bias = values(b[l].host());
    for (size_t i = 3; i < n; i += 16) bias[i] = -12 - double(i % 7);
    testing::assign(b[l].host(), bias);
    fill_normal(g[l].host(), seed + 50 + l, 0.2, 1);
    for (auto* grad : {&dw, &db, &dg}) fill_normal((*grad)[l].host(), seed + 70 + l, 0.1);
  }
  Vector in = values(x.host());
  const size_t some = std::min<size_t>(size_t(c.rows), 64);
  for (size_t l = 0; l < c.depth() && some > 0; ++l) {
    const size_t n = size_t(c.widths[l + 1]), k = size_t(c.widths[l]);
    Vector weight = values(w[l].host()), next(some * n, 0.0), turned(k * n);
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < k; ++j) turned[j * n + i] = weight[i * k + j];
    for (size_t t = 0; t < some; ++t)
      for (size_t j = 0; j < k; ++j)  // with the outputs innermost, so that the compiler adds several at once
        for (size_t i = 0; i < n; ++i) next[t * n + i] += in[t * k + j] * turned[j * n + i];
    double squares = 0;
    for (const double sum : next) squares += sum * sum;
    const double scale = 1.5 / std::sqrt(squares / double(some * n) + 1e-9);
    for (double& v : weight) v *= scale;
    testing::assign(w[l].host(), weight);
    if (c.weight_norm) {  // g = 1.1 |v|, so that W = 1.1 v
      Vector length(n, 0.0);
      for (size_t i = 0; i < n * k; ++i) length[i / k] += weight[i] * weight[i];
      for (double& v : length) v = std::sqrt(v) * 1.1;
      testing::assign(g[l].host(), length);
    }
    const Vector bias = values(b[l].host());
    with_activation(c.act, [&](auto f) {
      for (size_t i = 0; i < next.size(); ++i) {
        const double z = next[i] * scale + (c.bias ? bias[i % n] : 0);
        next[i] = f.value(z);
      }
    });
    in = next;
  }
}

}  // namespace ingot::mlp_cuda_test
