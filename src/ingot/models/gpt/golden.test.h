#pragma once
// Shared by tests against the numbers of tools/make_model_goldens.py: values computed from names and indices.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "ingot/io/json.h"
#include "ingot/models/gpt/config/parameters.h"

namespace ingot::testing {

inline uint64_t bits(const std::string& name, uint64_t i) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : name) h = (h ^ uint8_t(c)) * 0x100000001b3u;
  h += (i + 1) * 0x9e3779b97f4a7c15u;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
  h = (h ^ h >> 27) * 0x94d049bb133111ebu;
  return h ^ h >> 31;
}
inline double number(const std::string& name, int64_t i) {
  return double(bits(name, uint64_t(i)) >> 40) / (1 << 23) - 1;
}

// `weights` is f64 and flat.
inline void fill_golden_weights(const ParameterLayout& layout, const Tensor& weights) {
  for (const Parameter& p : layout.all())
    for (int64_t i = 0; i < p.shape.numel(); ++i) {
      const double u = number(p.name, i);
      double& w = layout.view(weights, p).ptr<double>()[i];
      if (p.kind == ParameterKind::matrix || p.kind == ParameterKind::head)
        w = u * std::sqrt(3.0 / double(p.shape[1]));
      else
        w = p.kind == ParameterKind::embedding ? u : 0.5 + 0.5 * u;
    }
}

// The golden numbers: the norm of the values of `p`, and their product with random numbers.
inline void expect_golden(const Tensor& values, const Parameter& p, const Json& golden, double limit,
                          const std::string& what) {
  const double norm = golden[0], product = golden[1];
  double squares = 0, found = 0;
  for (int64_t i = 0; i < p.shape.numel(); ++i) {
    const double v = values.ptr<double>()[i];
    squares += v * v;
    found += v * number("probe " + p.name, i);
  }
  EXPECT_NEAR(std::sqrt(squares), norm, limit * norm) << what;
  EXPECT_NEAR(found, product, limit * norm * std::sqrt(double(p.shape.numel()))) << what;
}

}  // namespace ingot::testing
