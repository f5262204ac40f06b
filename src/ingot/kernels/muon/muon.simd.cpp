// Row functions: the parts of muon outside its products.
#include "ingot/core/cpu/simd.h"

namespace ingot::INGOT_SIMD {
namespace {

// Squares are summed in fp64: in fp32 a gradient of 1e-23 or 1e20 would have norm 0 or infinity.
template <class T> struct Squares {
  double lane[kLanes<T>] = {};
  void add(Vec<T> x) {
    for (int i = 0; i < kLanes<T>; ++i) lane[i] += double(x[i]) * double(x[i]);
  }
  double total() const {
    double sum = 0;
    for (int i = 0; i < kLanes<T>; ++i) sum += lane[i];
    return sum;
  }
};

template <class T, class Step> void for_each_vector(int64_t n, Step&& step) {
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) step(i, kLanes<T>);
  if (i < n) step(i, n - i);
}
template <class T> Vec<T> read(const T* p, int64_t n) { return n == kLanes<T> ? load(p) : load_tail(p, n); }
template <class T> void write(T* p, Vec<T> v, int64_t n) { n == kLanes<T> ? store(p, v) : store_tail(p, v, n); }

template <class T> double momentum_row(const T* g, T* buf, T* u, int64_t n, T scale, T mu, bool nesterov) {
  Squares<T> squares;
  for_each_vector<T>(n, [&](int64_t i, int64_t count) {
    const Vec<T> grad = read(g + i, count) * scale;
    const Vec<T> moved = read(buf + i, count) * mu + grad;
    write(buf + i, moved, count);
    const Vec<T> direction = nesterov ? grad + moved * mu : moved;
    write(u + i, direction, count);
    squares.add(direction);
  });
  return squares.total();
}
template <class T> double squares_of_row(const T* x, int64_t n) {
  Squares<T> squares;
  for_each_vector<T>(n, [&](int64_t i, int64_t count) { squares.add(read(x + i, count)); });
  return squares.total();
}
template <class T> void scale_row(T* x, int64_t n, T by) {
  for_each_vector<T>(n, [&](int64_t i, int64_t count) { write(x + i, read(x + i, count) * by, count); });
}
template <class T> void update_row(T* p, const T* x, int64_t n, T keep, T step) {
  for_each_vector<T>(
      n, [&](int64_t i, int64_t count) { write(p + i, read(p + i, count) * keep - read(x + i, count) * step, count); });
}

}  // namespace

double muon_momentum_f32(const float* g, float* buf, float* u, int64_t n, float scale, float mu, bool nesterov) {
  return momentum_row(g, buf, u, n, scale, mu, nesterov);
}
double muon_momentum_f64(const double* g, double* buf, double* u, int64_t n, double scale, double mu, bool nesterov) {
  return momentum_row(g, buf, u, n, scale, mu, nesterov);
}
double muon_squares_f32(const float* x, int64_t n) { return squares_of_row(x, n); }
double muon_squares_f64(const double* x, int64_t n) { return squares_of_row(x, n); }
void muon_scale_f32(float* x, int64_t n, float by) { scale_row(x, n, by); }
void muon_scale_f64(double* x, int64_t n, double by) { scale_row(x, n, by); }
void muon_update_f32(float* p, const float* x, int64_t n, float keep, float step) { update_row(p, x, n, keep, step); }
void muon_update_f64(double* p, const double* x, int64_t n, double keep, double step) {
  update_row(p, x, n, keep, step);
}

}  // namespace ingot::INGOT_SIMD
