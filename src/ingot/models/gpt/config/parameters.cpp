#include "ingot/models/gpt/config/parameters.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/rng.h"
#include "ingot/models/gpt/config/program.h"

namespace ingot {
namespace {

constexpr int64_t kAlign = 16;  // elements: a cache line of f32
int64_t round_up(int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

std::vector<Parameter> matrices_of(const GptConfig& c) {
  std::vector<Parameter> m;
  const auto add = [&](const std::string& name, int64_t rows, int64_t cols) {
    m.push_back({name, {rows, cols}, ParameterKind::matrix, 0});
  };
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  for (int64_t i = 0; i < c.layers; ++i) {
    const std::string block = "blocks." + std::to_string(i) + ".";
    add(block + "attn.q.weight", q, c.dim);
    add(block + "attn.k.weight", kv, c.dim);
    add(block + "attn.v.weight", kv, c.dim);
    add(block + "attn.o.weight", c.dim, q);
    add(block + "mlp.up.weight", c.mlp_hidden, c.dim);
    add(block + "mlp.down.weight", c.dim, c.mlp_hidden);
  }
  if (c.factorised()) {
    add("embed_proj.weight", c.dim, c.embed_dim);
    add("head_proj.weight", c.embed_dim, c.dim);
  }
  return m;
}

std::vector<Parameter> others_of(const GptConfig& c) {
  std::vector<Parameter> p;
  const int64_t width = c.factorised() ? c.embed_dim : c.dim;
  p.push_back({"tok_emb.weight", {c.vocab, width}, ParameterKind::embedding, 0});
  if (c.learned_positions) p.push_back({"pos_emb.weight", {c.context, c.dim}, ParameterKind::embedding, 0});
  if (!c.tied_embeddings) p.push_back({"lm_head.weight", {c.vocab, width}, ParameterKind::head, 0});
  const auto scalar = [&](const std::string& name, Shape shape) {
    p.push_back({name, shape, ParameterKind::scalar, 0});
  };
  for (int64_t i = 0; i < c.layers; ++i) {
    const std::string block = "blocks." + std::to_string(i) + ".";
    if (c.norm_weight) scalar(block + "attn_norm.weight", {c.dim});
    if (c.qk_gain) scalar(block + "attn.q_gain", {c.heads});
    if (c.branch_scale) scalar(block + "attn_scale", {c.dim});
    if (c.norm_weight) scalar(block + "mlp_norm.weight", {c.dim});
    if (c.branch_scale) scalar(block + "mlp_scale", {c.dim});
    if (c.resid_mix) scalar(block + "resid_mix", {2, c.dim});
  }
  const int slots = skip_slots(c);
  if (slots > 0) scalar("skip_weights", {slots, c.dim});
  if (slots > 0 && c.skip_gates) scalar("skip_gates", {slots, c.dim});
  if (c.lane_start >= 0) {
    scalar("parallel_post_lambdas", {c.layers, 2, 2});
    scalar("parallel_resid_lambdas", {c.layers, 2});
  }
  if (c.norm_weight) scalar("final_norm.weight", {c.dim});
  return p;
}

}  // namespace

ParameterLayout::ParameterLayout(const GptConfig& config) {
  check(config);
  // Matrices of equal shape form a bank; the largest bank comes first.
  std::map<std::pair<int64_t, int64_t>, std::vector<Parameter>> shapes;
  for (Parameter& m : matrices_of(config)) shapes[{m.shape[0], m.shape[1]}].push_back(std::move(m));
  std::vector<std::vector<Parameter>> banks;
  for (auto& [shape, members] : shapes) banks.push_back(std::move(members));
  std::stable_sort(banks.begin(), banks.end(), [](const auto& a, const auto& b) {
    return a[0].shape.numel() * int64_t(a.size()) > b[0].shape.numel() * int64_t(b.size());
  });
  const auto place = [&](Parameter p) {
    p.offset = padded_;
    padded_ += p.shape.numel();
    count_ += p.shape.numel();
    parameters_.push_back(std::move(p));
  };
  for (auto& members : banks) {
    banks_.push_back({padded_, int64_t(members.size()), members[0].shape[0], members[0].shape[1]});
    for (Parameter& p : members) place(std::move(p));
    padded_ = round_up(padded_);
  }
  for (Parameter& p : others_of(config)) {
    place(std::move(p));
    padded_ = round_up(padded_);
  }
}

const Parameter& ParameterLayout::find(const std::string& name) const {
  for (const Parameter& p : parameters_)
    if (p.name == name) return p;
  fail(ErrorCode::invalid_argument, "gpt: found no parameter named '", name, "' in this configuration");
}

Tensor ParameterLayout::view(const Tensor& flat, const Parameter& p) const {
  return flat.slice(0, p.offset, p.offset + p.shape.numel()).reshape(p.shape);
}

ParameterRange ParameterLayout::range(ParameterKind kind) const {
  ParameterRange r{0, 0};
  for (const Parameter& p : parameters_) {
    if (p.kind != kind) continue;
    if (r.count == 0) r.offset = p.offset;
    r.count = round_up(p.offset + p.shape.numel()) - r.offset;
  }
  r.count = std::min(r.count, padded_ - r.offset);
  return r;
}

namespace {

double dot(const double* a, const double* b, int64_t n) {
  double lane[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int k = 0; k < 8; ++k) lane[k] += a[i + k] * b[i + k];
  for (; i < n; ++i) lane[0] += a[i] * b[i];
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// Rows of `m` (count vectors of `length` >= count) become orthonormal: Gram-Schmidt, twice for accuracy. Normal rows
// give a matrix uniform over the orthogonal ones.
void orthonormalise(std::vector<double>& m, int64_t count, int64_t length) {
  for (int64_t i = 0; i < count; ++i) {
    double* row = m.data() + i * length;
    for (int pass = 0; pass < 2; ++pass)
      for (int64_t j = 0; j < i; ++j) {
        const double* other = m.data() + j * length;
        const double along = dot(row, other, length);
        for (int64_t k = 0; k < length; ++k) row[k] -= along * other[k];
      }
    const double inverse = 1 / std::sqrt(dot(row, row, length));
    for (int64_t k = 0; k < length; ++k) row[k] *= inverse;
  }
}

std::vector<double> initial_values(const GptConfig& c, const Parameter& p, const Rng& rng) {
  const int64_t n = p.shape.numel();
  std::vector<double> v(static_cast<size_t>(n));
  const auto normal = [&](double std) {
    for (int64_t i = 0; i < n; ++i) v[size_t(i)] = std * rng.normal(uint64_t(i));
  };
  const auto constant = [&](double x) { std::fill(v.begin(), v.end(), x); };
  const bool branch_output = p.name.ends_with("attn.o.weight") || p.name.ends_with("mlp.down.weight");
  if (p.kind == ParameterKind::embedding) {
    normal(c.embed_std);
  } else if (p.kind == ParameterKind::head || p.kind == ParameterKind::matrix) {
    if (c.init == "normal") {
      normal(branch_output ? c.init_std / std::sqrt(2.0 * double(c.layers)) : c.init_std);
    } else if (branch_output || p.kind == ParameterKind::head) {
      constant(0);
    } else {
      normal(1);
      const int64_t rows = p.shape[0], cols = p.shape[1];
      if (rows <= cols) {
        orthonormalise(v, rows, cols);
      } else {  // orthonormal columns
        std::vector<double> transposed(v.size());
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t k = 0; k < cols; ++k) transposed[size_t(k * rows + r)] = v[size_t(r * cols + k)];
        orthonormalise(transposed, cols, rows);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t k = 0; k < cols; ++k) v[size_t(r * cols + k)] = transposed[size_t(k * rows + r)];
      }
    }
  } else if (p.name.ends_with("attn.q_gain")) {
    constant(c.qk_gain_init);
  } else if (p.name.ends_with("resid_mix")) {
    for (int64_t i = 0; i < n; ++i) v[size_t(i)] = i < n / 2 ? 1 : 0;
  } else if (p.name == "skip_gates") {
    constant(0);
  } else if (p.name == "parallel_resid_lambdas") {
    constant(1.1);
  } else {
    constant(1);
  }
  return v;
}

}  // namespace

void initialise(const GptConfig& config, const ParameterLayout& layout, const Tensor& flat, uint64_t seed) {
  INGOT_CHECK_EQ(flat.numel(), layout.padded_count(), "gpt: length of the flat parameter tensor");
  fill_zero(flat);
  const auto& all = layout.all();
  parallel_tasks(int64_t(all.size()), [&](int64_t i) {
    const Parameter& p = all[size_t(i)];
    std::vector<double> v = initial_values(config, p, Rng(seed, Purpose::init, uint32_t(i)));
    copy(Tensor(v.data(), p.shape), layout.view(flat, p));
  });
}

}  // namespace ingot
