// Every CUDA form against the fp64 loop, on what it says it takes. A form's error may be 1.5 times that of a chain of
// correctly rounded operations in the same type: each layer's result is rounded once; sums are exact for 16-bit types
// and those of a plain fp32 product for f32. Without a GPU the numeric cases skip.
#include <gtest/gtest.h>

#ifdef INGOT_HAS_CUDA_MLP
#include <cuda_runtime_api.h>
#endif

#include <cmath>
#include <deque>
#include <functional>
#include <map>

#include "ingot/gpu/device.h"
#include "ingot/kernels/mlp/mlp_cuda.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

#ifdef INGOT_HAS_CUDA_MLP
namespace ingot {
namespace {

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
std::ostream& operator<<(std::ostream& out, const Case& c) {
  for (int64_t w : c.widths) out << w << ' ';
  return out << "rows " << c.rows << ' ' << name_of(c.act) << " bias " << c.bias << " weight norm " << c.weight_norm
             << " activate_last " << c.activate_last << " keep " << int(c.keep) << " gap " << c.gap;
}

std::vector<int64_t> equal_widths(size_t depth, int64_t width) { return std::vector<int64_t>(depth + 1, width); }

// Each option meets each size it could go wrong with; not the whole product.
std::vector<Case> cases() {
  std::vector<Case> all;
  const Keep keeps[] = {Keep::own_type, Keep::nothing, Keep::f32};
  int i = 0;
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
  // Weight norm alone, where some forms have kernels for it: every depth of them, with and without kept values.
  for (size_t depth = 1; depth <= 5; ++depth)
    for (Act act : {act_of<Softplus>, act_of<Silu>})
      all.push_back({.widths = equal_widths(depth, 128),
                     .rows = 60 + 130 * int64_t(depth),
                     .act = act,
                     .bias = false,
                     .weight_norm = true,
                     .keep = keeps[(depth + (act == act_of<Silu>)) % 3]});
  // Every depth with its values kept, over more tiles than a cluster of blocks takes at once.
  for (size_t depth = 1; depth <= 8; ++depth)
    for (bool activate_last : {false, true})
      all.push_back({.widths = equal_widths(depth, (depth + activate_last) % 4 ? 128 : 64),
                     .rows = 700 - 63 * int64_t(depth),
                     .bias = (depth + activate_last) % 2 == 0,
                     .weight_norm = depth % 3 == 1,
                     .activate_last = activate_last});
  // Widths that fill no tile, that differ, and the largest.
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
  // Wider than 128: every depth, kept and not, some blocks with one tile and some with none.
  for (size_t depth = 1; depth <= 8; ++depth)
    for (Keep keep : keeps)
      all.push_back({.widths = equal_widths(depth, depth % 2 ? 256 : 200),
                     .rows = keep == Keep::nothing ? 40 + 130 * int64_t(depth) : 70 + 9 * int64_t(depth),
                     .bias = depth % 4 < 2,
                     .weight_norm = (depth + size_t(keep)) % 3 == 0,
                     .activate_last = depth % 4 == 3,
                     .keep = keep,
                     .gap = depth % 3 ? 0 : 24});
  for (const auto& widths : std::vector<std::vector<int64_t>>{{136, 8}, {8, 256, 136, 16}, {200, 136, 256, 72, 248}})
    for (Keep keep : keeps) {
      ++i;
      all.push_back({.widths = widths,
                     .rows = 64 * (i % 4) + 1 + i % 64,
                     .bias = i % 2 == 0,
                     .weight_norm = i % 3 == 0,
                     .keep = keep,
                     .gap = i % 2 ? 8 : 0});
    }
  for (int act = 0; act < Activations::size; ++act)
    for (Keep keep : {Keep::nothing, Keep::f32})
      all.push_back(
          {.widths = {72, 256, 144}, .rows = 150, .act = Act(act), .activate_last = act % 2 == 1, .keep = keep});
  // Wider than 128, where values are kept: each depth, tails, and more rows than a GPU's blocks take at once.
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
  for (int act = 0; act < Activations::size; ++act)
    for (Keep keep : keeps)
      all.push_back(
          {.widths = {64, 128, 64, 128}, .rows = 77, .act = Act(act), .activate_last = act % 2 == 0, .keep = keep});
  return all;
}

// The operands of one case, on the device and their host mirrors.
struct Problem {
  Case c;
  DType dtype;
  DeviceBuffer x, y, dy, dx, saved, workspace;
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
            .saved = c.keep == Keep::nothing ? Tensor() : saved.tensor()};
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
    for (DeviceBuffer* t : {&x, &y, &dy, &dx, &saved, &workspace}) use(*t);
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

// --- the reference and the chain ---------------------------------------------------------------------------

void round_to(DType dtype, Vector& v) {
  if (dtype == DType::f64) return;
  Buffer rounded(dtype, {int64_t(v.size())});
  testing::assign(rounded, v);
  v = values(rounded);
}

// (m, k) times (k, n) as a plain fp32 product sums: fused multiply-adds in the order of k, begun anew every 128.
Vector fp32_product(const Vector& a, const Vector& q, size_t m, size_t k, size_t n) {
  Vector out(m * n);
  const std::vector<float> left(a.begin(), a.end()), right(q.begin(), q.end());
  for (size_t i = 0; i < m; ++i) {
    std::vector<float> sum(n, 0.f), run(n, 0.f);
    for (size_t p = 0; p < k; ++p) {
      // The product of two floats is exact in a double.
      for (size_t j = 0; j < n; ++j)
        run[j] = float(double(left[i * k + p]) * double(right[p * n + j]) + double(run[j]));
      if ((p + 1) % 128 != 0 && p + 1 < k) continue;
      for (size_t j = 0; j < n; ++j) sum[j] += run[j];
      run.assign(n, 0.f);
    }
    std::copy(sum.begin(), sum.end(), out.begin() + std::ptrdiff_t(i * n));
  }
  return out;
}

// Small loops over fp64 vectors with a rounding after each operation: f64 gives the reference, the others the chain.
struct Chain {
  const Problem& p;
  DType round;
  std::vector<Vector> w, b, g, r, z, h, dw, db, dg;
  Vector y, dx, saved;

  Chain(const Problem& problem, DType t) : p(problem), round(t) {
    forward();
    backward();
  }
  size_t width(size_t l) const { return size_t(p.c.widths[l]); }
  size_t rows() const { return size_t(p.c.rows); }
  bool active(size_t l) const { return p.c.activate_last || l + 1 < p.c.depth(); }
  bool keeps_value() const { return slope_follows_from_value(p.c.act); }

  Buffer matrix(const Vector& v, size_t n, size_t k) const {
    Buffer m(DType::f64, {int64_t(n), int64_t(k)});
    testing::assign(m, v);
    return m;
  }
  static Vector turned(const Vector& v, size_t n, size_t k) {
    Vector out(v.size());
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < k; ++j) out[j * n + i] = v[i * k + j];
    return out;
  }
  Vector product(const Vector& a, size_t m, size_t k, bool ta, const Vector& q, size_t n, bool tb) const {
    if (round == DType::f32) return fp32_product(ta ? turned(a, k, m) : a, tb ? turned(q, n, k) : q, m, k, n);
    Buffer out(DType::f64, {int64_t(m), int64_t(n)});
    const Buffer left = ta ? matrix(a, k, m) : matrix(a, m, k), right = tb ? matrix(q, n, k) : matrix(q, k, n);
    matmul({.a = left, .b = right, .c = out, .transpose_a = ta, .transpose_b = tb}, {});
    return values(out);
  }
  void form_weight(size_t l) {
    w.push_back(values(p.w[l].host()));
    b.push_back(p.c.bias ? values(p.b[l].host()) : Vector(width(l + 1), 0.0));
    g.push_back(values(p.g[l].host()));
    r.emplace_back();
    if (!p.c.weight_norm) return;
    const size_t k = width(l);
    for (size_t n = 0; n < width(l + 1); ++n) {
      double sum = 1e-12;
      for (size_t j = 0; j < k; ++j) sum += w[l][n * k + j] * w[l][n * k + j];
      r[l].push_back(1 / std::sqrt(sum));
      for (size_t j = 0; j < k; ++j) w[l][n * k + j] *= g[l][n] * r[l][n];
    }
    round_to(round, w[l]);
  }
  Vector apply(const Vector& v, bool slope, bool from_value) const {
    Vector out(v.size());
    with_activation(p.c.act, [&](auto f) {
      using F = decltype(f);
      for (size_t i = 0; i < v.size(); ++i) {
        if constexpr (has_slope_from_value<F>) {
          if (slope && from_value) {
            out[i] = F::slope_from_value(v[i]);
            continue;
          }
        }
        out[i] = slope ? F::slope(v[i]) : F::value(v[i]);
      }
    });
    return out;
  }
  void forward() {
    Vector in = values(p.x.host());
    for (size_t l = 0; l < p.c.depth(); ++l) {
      form_weight(l);
      if (l == 0) h.push_back(in);
      Vector sum = product(in, rows(), width(l), false, w[l], width(l + 1), true);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += b[l][i % width(l + 1)];
      in = active(l) ? apply(sum, false, false) : sum;
      round_to(round, in);
      round_to(round, sum);
      if (active(l)) {
        const Vector& kept = keeps_value() ? in : sum;
        saved.insert(saved.end(), kept.begin(), kept.end());
      }
      z.push_back(keeps_value() ? in : sum);
      // What dW of the next layer multiplies follows from what is kept.
      Vector input = active(l) && !keeps_value() ? apply(sum, false, false) : in;
      round_to(round, input);
      h.push_back(input);
    }
    y = in;
  }
  void times_slope(Vector& d, size_t l) const {
    const Vector slope = apply(z[l], true, keeps_value());
    for (size_t i = 0; i < d.size(); ++i) d[i] *= slope[i];
  }
  void backward() {
    const size_t depth = p.c.depth();
    dw.resize(depth), db.resize(depth), dg.resize(depth);
    Vector d = values(p.dy.host());
    if (p.c.activate_last) {
      times_slope(d, depth - 1);
      round_to(round, d);
    }
    for (size_t l = depth; l-- > 0;) {
      const size_t n = width(l + 1), k = width(l);
      dw[l] = product(d, n, rows(), true, h[l], k, false);
      db[l] = product(Vector(rows(), 1.0), 1, rows(), false, d, n, false);
      if (p.c.weight_norm) weight_norm_backward(l, n, k);
      d = product(d, rows(), n, false, w[l], k, false);
      if (l > 0) times_slope(d, l - 1);
      round_to(round, d);
    }
    dx = d;
  }
  void weight_norm_backward(size_t l, size_t n, size_t k) {
    const Vector v = values(p.w[l].host());
    dg[l].assign(n, 0.0);
    for (size_t i = 0; i < n; ++i) {
      Vector row(dw[l].begin() + std::ptrdiff_t(i * k), dw[l].begin() + std::ptrdiff_t((i + 1) * k)), u(k);
      for (size_t j = 0; j < k; ++j) u[j] = v[i * k + j] * r[l][i];
      dg[l][i] = product(row, 1, k, false, u, 1, false)[0];
      for (size_t j = 0; j < k; ++j)
        dw[l][i * k + j] = g[l][i] * r[l][i] * (dw[l][i * k + j] - v[i * k + j] * r[l][i] * dg[l][i]);
    }
  }
};

// Weights such that every layer's value before the activation has a standard deviation of 1.5 and, with a bias, a few
// columns sit at -12 to -18, deep in the left tail.
void Problem::fill(uint64_t seed) {
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
    Vector weight = values(w[l].host()), next(some * n);
    double squares = 0;
    for (size_t t = 0; t < some; ++t)
      for (size_t i = 0; i < n; ++i) {
        double sum = 0;
        for (size_t j = 0; j < k; ++j) sum += in[t * k + j] * weight[i * k + j];
        next[t * n + i] = sum, squares += sum * sum;
      }
    const double scale = 1.5 / std::sqrt(squares / double(some * n) + 1e-9);
    for (double& v : weight) v *= scale;
    testing::assign(w[l].host(), weight);
    if (c.weight_norm) {  // |v| is what g must be to keep W
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

// --- the comparison ------------------------------------------------------------------------------------------

struct Errors {
  double rms = 0, worst = 0, size = 0;
  size_t at = 0;
};
Errors errors(const Vector& got, const Vector& want) {
  Errors e;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = std::abs(got[i] - want[i]);
    e.rms += d * d;
    e.size += want[i] * want[i];
    if (!(d <= e.worst)) e.worst = d, e.at = i;  // a NaN too
  }
  const double n = double(std::max<size_t>(want.size(), 1));
  e.rms = std::sqrt(e.rms / n), e.size = std::sqrt(e.size / n);
  return e;
}
// At most 1.5 times the chain's error, and no single value further off than twice the chain's furthest. A few values
// say little about a root mean square, so small results get more room: up to a rounding of a value of usual size. The
// furthest of a few rows' values says little too: a dW of one row is a vector's errors times another's values, and the
// worst of a hundred sums' errors is 3 to 6 times their root mean square (fp32, 64 products, 200 seeds).
void expect_as_good_as(const char* what, const Vector& got, const Vector& want, const Vector& chain, int64_t rows,
                       double unit) {
  ASSERT_EQ(got.size(), want.size()) << what;
  const Errors ours = errors(got, want), theirs = errors(chain, want);
  const bool few = want.size() < 1024;
  const double floor = unit * ours.size;
  const double rms = few ? 2 * theirs.rms + floor : 1.5 * theirs.rms + 0.1 * floor;
  const double worst = few || rows < 16 ? 3 * theirs.worst + 2 * floor : 2 * theirs.worst + floor;
  EXPECT_TRUE(ours.rms <= rms && ours.worst <= worst)
      << what << ": error rms " << ours.rms << " (chain " << theirs.rms << ", allowed " << rms << "), worst "
      << ours.worst << " (chain " << theirs.worst << ", allowed " << worst << ") at " << ours.at << ": found "
      << got[ours.at] << ", expected " << want[ours.at] << ", values' rms " << ours.size;
}
Vector difference(Vector a, const Vector& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

void compare_all(const Problem& p, const Chain& want, const Chain& chain, const std::map<std::string, Vector>& before) {
  const double unit = testing::roundoff(p.dtype);
  expect_as_good_as("y", values(p.y.host()), want.y, chain.y, p.c.rows, unit);
  if (p.c.keep != Keep::nothing)
    expect_as_good_as("saved", values(p.saved.host()), want.saved, chain.saved, p.c.rows, unit);
  if (p.need_dx) expect_as_good_as("dx", values(p.dx.host()), want.dx, chain.dx, p.c.rows, unit);
  for (size_t l = 0; l < p.c.depth(); ++l) {
    if (p.frozen[l]) continue;
    const auto gradient = [&](const char* name, const DeviceBuffer& got, const Vector& exact, const Vector& rounded) {
      const std::string what = name + std::to_string(l);
      expect_as_good_as(what.c_str(), difference(values(got.host()), before.at(what)), exact, rounded, p.c.rows,
                        p.dtype == DType::f32 ? 4 * unit : unit);  // f32: what it adds to rounds as well
    };
    gradient("dw", p.dw[l], want.dw[l], chain.dw[l]);
    if (p.c.bias) gradient("db", p.db[l], want.db[l], chain.db[l]);
    if (p.c.weight_norm) gradient("dg", p.dg[l], want.dg[l], chain.dg[l]);
  }
}
void expect_only_outputs_written(Problem& p) {
  EXPECT_TRUE(p.x.untouched(true) && p.dy.untouched(true)) << "an input was written";
  for (size_t l = 0; l < p.c.depth(); ++l) {
    EXPECT_TRUE(p.w[l].untouched(true) && p.b[l].untouched(true) && p.g[l].untouched(true))
        << "a parameter was written";
    EXPECT_TRUE(p.dw[l].untouched(p.frozen[l]) && p.db[l].untouched(p.frozen[l] || !p.c.bias) &&
                p.dg[l].untouched(p.frozen[l] || !p.c.weight_norm))
        << "written beside a gradient of layer " << l;
  }
  EXPECT_TRUE(p.y.untouched() && p.dx.untouched(!p.need_dx)) << "written beside an output";
  EXPECT_TRUE(p.saved.untouched(p.c.keep == Keep::nothing) && p.workspace.untouched()) << "written beside a buffer";
}

// --- the cases -------------------------------------------------------------------------------------------------

struct Forms {
  const char* name;
  MlpForm forward, backward;
  DType dtype;
};
std::ostream& operator<<(std::ostream& out, const Forms& f) { return out << f.name; }

class MlpCuda : public testing::GpuTest<::testing::TestWithParam<Forms>> {
 protected:
  static bool taken(const Case& c) {
    // Asked with pointers to nowhere: whether a form takes a problem depends on shapes, types and options only.
    const DType t = GetParam().dtype;
    const Device gpu{Device::cuda, 0};
    Mlp f{.x = Tensor(nullptr, t, {c.rows, c.widths.front()}, gpu),
          .y = Tensor(nullptr, t, {c.rows, c.widths.back()}, gpu),
          .act = c.act,
          .activate_last = c.activate_last};
    MlpBackward b{.dy = f.y, .x = f.x, .dx = f.x, .act = c.act, .activate_last = c.activate_last};
    for (size_t l = 0; l < c.depth(); ++l) {
      const Shape shape = {c.widths[l + 1], c.widths[l]}, vector = {c.widths[l + 1]};
      f.layers.push_back({Tensor(nullptr, t, shape, gpu), c.bias ? Tensor(nullptr, t, vector, gpu) : Tensor(),
                          c.weight_norm ? Tensor(nullptr, t, vector, gpu) : Tensor()});
      b.grads.push_back({Tensor(nullptr, DType::f32, shape, gpu),
                         c.bias ? Tensor(nullptr, DType::f32, vector, gpu) : Tensor(),
                         c.weight_norm ? Tensor(nullptr, DType::f32, vector, gpu) : Tensor()});
    }
    b.layers = f.layers;
    if (c.keep != Keep::nothing)
      f.saved = b.saved = Tensor(nullptr, c.keep == Keep::f32 ? DType::f32 : t,
                                 {mlp_saved_elements(c.rows, f.layers, c.activate_last)}, gpu);
    return cuda::mlp_takes(f, GetParam().forward) && cuda::mlp_takes(b, GetParam().backward);
  }
};

std::map<std::string, Vector> gradients_now(const Problem& p) {
  std::map<std::string, Vector> all;
  for (size_t l = 0; l < p.c.depth(); ++l) {
    all["dw" + std::to_string(l)] = values(p.dw[l].host());
    all["db" + std::to_string(l)] = values(p.db[l].host());
    all["dg" + std::to_string(l)] = values(p.dg[l].host());
  }
  return all;
}
void check_case(const Case& c, const Forms& forms) {
  SCOPED_TRACE(::testing::Message() << c << ' ' << forms);
  Problem p(c, forms.dtype, forms.backward);
  p.fill(1);
  const auto before = gradients_now(p);
  const Chain want(p, DType::f64);
  p.run(forms.forward, forms.backward);
  expect_only_outputs_written(p);
  compare_all(p, want, Chain(p, forms.dtype), before);
}

TEST_P(MlpCuda, AgreesWithTheFp64LoopForwardAndBackward) {
  int taken_cases = 0, bad = 0;
  for (const Case& c : cases()) {
    if (!taken(c)) continue;
    ++taken_cases;
    check_case(c, GetParam());
    if (HasFailure() && ++bad == 4) return;
  }
  if (taken_cases == 0) GTEST_SKIP() << "this form is not part of the build";
  EXPECT_GT(taken_cases, 10) << "the form refuses nearly every case";
}

// Bits of everything that a run writes.
std::vector<Vector> outputs(const Problem& p) {
  std::vector<Vector> all = {values(p.y.host()), values(p.dx.host())};
  if (p.c.keep != Keep::nothing) all.push_back(values(p.saved.host()));
  for (size_t l = 0; l < p.c.depth(); ++l)
    for (const auto* group : {&p.dw, &p.db, &p.dg}) all.push_back(values((*group)[l].host()));
  return all;
}
TEST_P(MlpCuda, RepeatsBitForBitAlsoFromAGraph) {
  for (const Case& c :
       {Case{.widths = equal_widths(3, 128), .rows = 4097}, Case{.widths = {256, 256, 136, 256}, .rows = 9000},
        Case{.widths = {64, 128, 64}, .rows = 700, .weight_norm = true, .keep = Keep::nothing}}) {
    if (!taken(c)) continue;
    Problem p(c, GetParam().dtype, GetParam().backward);
    p.fill(7);
    const Problem& start = p;
    const auto before = gradients_now(start);
    p.run(GetParam().forward, GetParam().backward);
    const auto first = outputs(p);
    const gpu::OwnedStream side;
    const gpu::Graph graph(side, [&] {
      cuda::mlp_with(p.forward(), GetParam().forward, side);
      cuda::mlp_backward_with(p.backward(), GetParam().backward, side);
    });
    for (int i = 0; i < 10; ++i) {
      for (size_t l = 0; l < c.depth(); ++l) {
        testing::assign(p.dw[l].host(), before.at("dw" + std::to_string(l)));
        testing::assign(p.db[l].host(), before.at("db" + std::to_string(l)));
        testing::assign(p.dg[l].host(), before.at("dg" + std::to_string(l)));
      }
      p.upload();  // the workspace is what the last run left
      graph.launch(side);
      side.synchronize();
      p.download();
      const auto again = outputs(p);
      for (size_t k = 0; k < first.size(); ++k) ASSERT_EQ(again[k], first[k]) << c << " output " << k << " run " << i;
    }
  }
}

// Sums over other numbers of rows may differ in their order.
void expect_same_sums(const Vector& got, const Vector& want, bool bit_for_bit, const char* what, size_t layer) {
  if (bit_for_bit) {
    EXPECT_EQ(got, want) << what << layer;
    return;
  }
  const Errors e = errors(got, want);
  EXPECT_LE(e.rms, 1e-5 * e.size) << what << layer;
}
TEST_P(MlpCuda, FrozenPartsStayUntouchedAndTheOthersAreTheSame) {
  for (int64_t width : {64, 200})
    for (Keep keep : {Keep::own_type, Keep::nothing})
      for (bool weight_norm : {false, true}) {
        const Case c{.widths = equal_widths(3, width), .rows = 300, .weight_norm = weight_norm, .keep = keep};
        if (!taken(c)) continue;
        std::vector<Vector> all_trained;
        for (int frozen = 0; frozen < 16; ++frozen) {  // bit l: layer l; bit 3: the input
          SCOPED_TRACE(::testing::Message() << c << ' ' << GetParam() << " frozen " << frozen);
          Problem p(c, GetParam().dtype, GetParam().backward);
          p.fill(3);
          for (size_t l = 0; l < 3; ++l) p.frozen[l] = frozen >> l & 1;
          p.need_dx = !(frozen & 8);
          p.run(GetParam().forward, GetParam().backward);
          expect_only_outputs_written(p);
          const auto now = outputs(p);
          if (frozen == 0) all_trained = now;
          if (p.need_dx) { EXPECT_EQ(now[1], all_trained[1]); }
          const size_t first = now.size() - 9;
          for (size_t l = 0; l < 3; ++l)
            for (size_t k = 0; k < 3; ++k)
              if (!p.frozen[l])
                expect_same_sums(now[first + 3 * l + k], all_trained[first + 3 * l + k], true, "gradient of layer ", l);
          if (HasFailure()) return;
        }
      }
}

TEST_P(MlpCuda, ANanStaysInItsRow) {
  for (size_t width : {64, 256}) {
    const Case c{.widths = equal_widths(3, int64_t(width)), .rows = 130};
    if (!taken(c)) continue;
    Problem p(c, GetParam().dtype, GetParam().backward);
    p.fill(5);
    Vector x = values(p.x.host());
    x[77 * width + 5] = NAN;
    testing::assign(p.x.host(), x);
    p.run(GetParam().forward, GetParam().backward);
    const Vector y = values(p.y.host());
    for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(std::isnan(y[i]), i / width == 77) << i;
  }
}

// Rows that repeat, more of them than all blocks take at once: every tile passes the same weights.
TEST_P(MlpCuda, ARowsResultIsTheSameWhereverItStands) {
  constexpr int64_t kPeriod = 333, kRows = 27000;
  const auto check = [](size_t depth, int64_t width, bool weight_norm) {
    const Case c{.widths = equal_widths(depth, width),
                 .rows = kRows,
                 .bias = depth % 2 == 1,
                 .weight_norm = weight_norm,
                 .keep = depth % 4 == 0 ? Keep::own_type : Keep::nothing};
    if (!taken(c)) return;
    SCOPED_TRACE(::testing::Message() << c << ' ' << GetParam());
    Problem p(c, GetParam().dtype, MlpForm::portable);
    p.fill(17);
    Vector x = values(p.x.host());
    const size_t period = size_t(kPeriod * width);
    for (size_t i = period; i < x.size(); ++i) x[i] = x[i - period];
    testing::assign(p.x.host(), x);
    p.upload();
    cuda::mlp_with(p.forward(), GetParam().forward, {});
    p.download();
    const Vector y = values(p.y.host());
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_FALSE(std::isnan(y[i])) << i / size_t(width);
      if (i >= period) ASSERT_EQ(y[i], y[i - period]) << i / size_t(width);
    }
  };
  for (bool weight_norm : {false, true}) {
    for (size_t depth : {2, 5, 7, 8}) check(depth, 128, weight_norm);
    for (size_t depth : {3, 8}) check(depth, 256, weight_norm);
  }
}

TEST_P(MlpCuda, AcceptsNoRows) {
  const Case c{.widths = equal_widths(3, 64), .rows = 0};
  Problem p(c, GetParam().dtype, MlpForm::portable);
  p.upload();
  EXPECT_NO_THROW(mlp(p.forward(), {}));
  const int64_t bytes = mlp_backward_workspace_bytes(p.backward());
  DeviceBuffer workspace(DType::u8, {bytes});
  MlpBackward b = p.backward();
  b.workspace = workspace;
  EXPECT_NO_THROW(mlp_backward(b, {}));
  p.download();
  for (size_t l = 0; l < 3; ++l) EXPECT_TRUE(p.dw[l].untouched(true));
}

// A batch of sequences is their rows: every form, as the entry points choose it.
TEST_P(MlpCuda, TakesLeadingDimensionsAsRows) {
  for (int64_t rows : {90, 9000}) {
    const Case c{.widths = {128, 64, 8}, .rows = rows};
    Problem p(c, GetParam().dtype, MlpForm::portable);
    const auto run = [&](bool in_two) {
      p.fill(19);
      DeviceBuffer workspace(DType::u8, {mlp_backward_workspace_bytes(p.backward())});
      Mlp f = p.forward();
      MlpBackward b = p.backward();
      b.workspace = workspace;
      if (in_two)
        for (Tensor* t : {&f.x, &f.y, &b.dy, &b.x, &b.dx}) *t = t->reshape({2, rows / 2, t->cols()});
      p.upload();
      workspace.upload();
      mlp(f, {});
      mlp_backward(b, {});
      p.download();
      return outputs(p);
    };
    const auto want = run(false), got = run(true);
    for (size_t k = 0; k < want.size(); ++k) EXPECT_EQ(got[k], want[k]) << c << " output " << k;
  }
}

TEST_P(MlpCuda, TheEntryPointsChooseAFormThatAgrees) {
  for (const Case& c : {Case{.widths = equal_widths(3, 128), .rows = 100}, Case{.widths = {128, 64, 8}, .rows = 9000},
                        Case{.widths = {64, 256, 200}, .rows = 9000}}) {
    Problem p(c, GetParam().dtype, MlpForm::portable);
    p.fill(11);
    const auto before = gradients_now(p);
    const Chain want(p, DType::f64);
    DeviceBuffer workspace(DType::u8, {mlp_backward_workspace_bytes(p.backward())});
    p.upload();
    workspace.upload();
    MlpBackward b = p.backward();
    b.workspace = workspace;
    mlp(p.forward(), {});
    mlp_backward(b, {});
    p.download();
    workspace.download();
    EXPECT_TRUE(workspace.untouched());
    SCOPED_TRACE(::testing::Message() << c);
    compare_all(p, want, Chain(p, GetParam().dtype), before);
  }
}

// Everything a stream is given: launches, copies, fills.
size_t nodes_of(const std::function<void(Stream)>& work) {
  const gpu::OwnedStream side;
  const auto stream = static_cast<cudaStream_t>(Stream(side).handle);
  cudaGraph_t graph = nullptr;
  size_t n = 0;
  gpu::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  work(side);
  gpu::check_cuda(cudaStreamEndCapture(stream, &graph), "end of capture");
  gpu::check_cuda(cudaGraphGetNodes(graph, nullptr, &n), "nodes");
  gpu::check_cuda(cudaGraphDestroy(graph), "graph");
  return n;
}
TEST_P(MlpCuda, IsOneLaunchForwardAndAtMostTwoBackward) {
  for (int64_t rows : {1, 100, 3000, 20000})
    for (Keep keep : {Keep::own_type, Keep::nothing, Keep::f32})
      for (int64_t width : {64, 128, 256, 264}) {
        const Case c{.widths = equal_widths(3, width), .rows = rows, .weight_norm = rows != 100, .keep = keep};
        if (!taken(c)) continue;
        SCOPED_TRACE(::testing::Message() << c);
        Problem p(c, GetParam().dtype, GetParam().backward);
        EXPECT_EQ(nodes_of([&](Stream s) { cuda::mlp_with(p.forward(), GetParam().forward, s); }), 1u);
        EXPECT_LE(nodes_of([&](Stream s) { cuda::mlp_backward_with(p.backward(), GetParam().backward, s); }), 2u);
      }
}

// The last rows of a batch of more than 2^31 elements, everything before them zero, beside a batch of these rows alone.
TEST_P(MlpCuda, AddressesMoreThanTwoToThe31Elements) {
  constexpr int64_t kWidth = 128, kTail = 168, kRows = (int64_t(1) << 24) + 40;  // the tail begins a tile in both
  const DType t = GetParam().dtype;
  if (t != DType::f16 || gpu::device_info().memory_bytes < (int64_t(60) << 30)) GTEST_SKIP();
  const Case c{.widths = equal_widths(3, kWidth), .rows = kTail, .bias = false};
  if (!taken(c)) GTEST_SKIP();
  Problem p(c, t, GetParam().backward);
  p.fill(13);
  p.run(GetParam().forward, GetParam().backward);
  const auto alone = outputs(p);
  p.fill(13);
  p.upload();

  const int64_t tail_at = (kRows - kTail) * kWidth * size_of(t), tail_bytes = kTail * kWidth * size_of(t);
  std::deque<gpu::DeviceMemory> memory;
  const auto zeros = [&](DType type, Shape shape) {
    memory.emplace_back(shape.numel() * size_of(type));
    gpu::fill_bytes(memory.back().data(), 0, memory.back().bytes(), {});
    return Tensor(memory.back().data(), type, shape, Device{Device::cuda, 0});
  };
  Mlp f = p.forward();
  MlpBackward b = p.backward();
  f.x = b.x = zeros(t, {kRows, kWidth}), f.y = zeros(t, {kRows, kWidth});
  b.dy = zeros(t, {kRows, kWidth}), b.dx = zeros(t, {kRows, kWidth});
  f.saved = b.saved = zeros(t, {mlp_saved_elements(kRows, f.layers, false)});
  b.workspace = zeros(DType::u8, {cuda::mlp_backward_workspace_bytes_with(b, GetParam().backward)});
  gpu::synchronize();
  gpu::copy_to_device(static_cast<char*>(f.x.data) + tail_at, p.x.host().data, tail_bytes);
  gpu::copy_to_device(static_cast<char*>(b.dy.data) + tail_at, p.dy.host().data, tail_bytes);
  cuda::mlp_with(f, GetParam().forward, {});
  cuda::mlp_backward_with(b, GetParam().backward, {});
  p.download();
  const auto tail_of = [&](const Tensor& of) {
    Buffer tail(t, {kTail, kWidth});
    gpu::copy_to_host(tail.tensor().data, static_cast<const char*>(of.data) + tail_at, tail_bytes);
    return values(tail);
  };
  EXPECT_EQ(tail_of(f.y), alone[0]);
  EXPECT_EQ(tail_of(b.dx), alone[1]);
  for (size_t l = 0; l < 3; ++l) { expect_same_sums(values(p.dw[l].host()), alone[3 + 3 * l], false, "dw", l); }
}

TEST(MlpCudaForms, AreChosenByShapesTypesAndGenerationAlone) {
  const Device gpu{Device::cuda, 0};
  const auto problem = [&](DType t, int64_t rows, int64_t width) {
    return Mlp{.x = Tensor(nullptr, t, {rows, width}, gpu),
               .y = Tensor(nullptr, t, {rows, width}, gpu),
               .layers = {{.w = Tensor(nullptr, t, {width, width}, gpu)}}};
  };
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f32, 100000, 128), 9), MlpForm::portable);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 100000, 256), 9), MlpForm::wide);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::bf16, 100000, 136), 9), MlpForm::wide);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 100000, 264), 9), MlpForm::portable);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 100000, 256), 10), MlpForm::portable);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::bf16, 100000, 128), 9), MlpForm::sm90);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 500, 64), 9), MlpForm::few_rows);
  const auto backward = [&](int64_t rows, int64_t width, DType saved) {
    const Mlp m = problem(DType::bf16, rows, width);
    return MlpBackward{.dy = m.y,
                       .x = m.x,
                       .layers = {m.layers[0], m.layers[0]},
                       .grads = {MlpLayer{}, MlpLayer{}},
                       .act = act_of<Softplus>,
                       .saved = Tensor(nullptr, saved, {rows * width}, gpu)};
  };
  EXPECT_EQ(cuda::pick_mlp_form(backward(8192, 128, DType::bf16), 9), MlpForm::few_rows);
  EXPECT_EQ(cuda::pick_mlp_form(backward(8193, 128, DType::bf16), 9), MlpForm::sm90);
  EXPECT_EQ(cuda::pick_mlp_form(backward(100, 136, DType::bf16), 9), MlpForm::portable);
  EXPECT_EQ(cuda::pick_mlp_form(backward(512, 136, DType::bf16), 9), MlpForm::wide);
  EXPECT_EQ(cuda::pick_mlp_form(backward(512, 256, DType::f32), 9), MlpForm::portable);
  EXPECT_EQ(cuda::pick_mlp_form(backward(512, 264, DType::bf16), 9), MlpForm::portable);
  EXPECT_EQ(cuda::pick_mlp_form(backward(100, 128, DType::bf16), 8), MlpForm::portable);
  for (int major : {8, 10, 12}) EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 1000, 64), major), MlpForm::portable);
  try {
    cuda::pick_mlp_form(problem(DType::f16, 1000, 64), 7);
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::unsupported);
    EXPECT_STREQ(e.what(), "mlp: found a GPU of compute capability 7.x, expected 8.0 or later");
  }
}

constexpr MlpForm kPortable = MlpForm::portable, kFew = MlpForm::few_rows, kSm90 = MlpForm::sm90, kWide = MlpForm::wide;
INSTANTIATE_TEST_SUITE_P(, MlpCuda,
                         ::testing::Values(Forms{"portable_f16", kPortable, kPortable, DType::f16},
                                           Forms{"portable_bf16", kPortable, kPortable, DType::bf16},
                                           Forms{"portable_f32", kPortable, kPortable, DType::f32},
                                           Forms{"few_rows_f16", kFew, kPortable, DType::f16},
                                           Forms{"few_rows_bf16", kFew, kPortable, DType::bf16},
                                           Forms{"sm90_forward_f16", kSm90, kPortable, DType::f16},
                                           Forms{"sm90_forward_bf16", kSm90, kPortable, DType::bf16},
                                           Forms{"wide_forward_f16", kWide, kPortable, DType::f16},
                                           Forms{"wide_forward_bf16", kWide, kPortable, DType::bf16},
                                           Forms{"few_rows_backward_f16", kPortable, kFew, DType::f16},
                                           Forms{"few_rows_backward_bf16", kPortable, kFew, DType::bf16},
                                           Forms{"sm90_backward_f16", kPortable, kSm90, DType::f16},
                                           Forms{"sm90_backward_bf16", kPortable, kSm90, DType::bf16},
                                           Forms{"wide_backward_f16", kPortable, kWide, DType::f16},
                                           Forms{"wide_backward_bf16", kPortable, kWide, DType::bf16}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace ingot
#endif
