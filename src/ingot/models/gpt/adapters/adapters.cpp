#include "ingot/models/gpt/adapters/adapters.h"

#include <cmath>

namespace ingot {
namespace {
constexpr int64_t kAlign = 64;  // numbers: each matrix begins at a cache line, in any type
}

AdapterLayout::AdapterLayout(const GptConfig& c, const LayerProgram& program, int64_t rank)
    : layer_calls_(program.layer_calls.size()), rank_(rank) {
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const auto piece = [&](std::string name, int64_t rows, int64_t cols) {
    pieces_.push_back({std::move(name), numbers_, rows, cols});
    numbers_ += (rows * cols + kAlign - 1) / kAlign * kAlign;
  };
  const auto pair = [&](const std::string& name, int64_t in, int64_t out) {
    piece(name + ".a", rank, in);
    piece(name + ".b", out, rank);
  };
  for (size_t i = 0; i < layer_calls_; ++i) {
    const std::string of = "applications." + std::to_string(i) + ".";
    pair(of + "q", c.dim, q);
    pair(of + "k", c.dim, kv);
    pair(of + "v", c.dim, kv);
    pair(of + "o", c.dim, c.dim);
    pair(of + "mlp", c.dim, c.dim);
  }
  pair("head", c.dim, c.vocab);
}

GptAdapters AdapterLayout::views(const Tensor& flat) const {
  size_t next = 0;
  const auto piece = [&] {
    const Piece& p = pieces_[next++];
    Tensor t = flat.slice(1, p.offset, p.offset + p.rows * p.cols);
    t.shape = {flat.size(0), p.rows, p.cols};
    t.stride[0] = flat.row_stride(), t.stride[1] = p.cols, t.stride[2] = 1;
    return t;
  };
  const auto pair = [&] {
    AdapterPair p;
    p.a = piece(), p.b = piece();
    return p;
  };
  GptAdapters all;
  for (size_t i = 0; i < layer_calls_; ++i) {
    LayerCallAdapters of;
    for (AdapterPair* p : {&of.q, &of.k, &of.v, &of.o, &of.mlp}) *p = pair();
    all.layer_calls.push_back(of);
  }
  all.head = pair();
  return all;
}

std::vector<NamedTensor> AdapterLayout::named(const Tensor& flat) const {
  std::vector<NamedTensor> all;
  for (const Piece& p : pieces_)
    all.push_back({p.name, flat.slice(0, p.offset, p.offset + p.rows * p.cols).reshape({p.rows, p.cols})});
  return all;
}

int64_t adapter_rank(const SafetensorsFile& file) {
  const SafetensorsEntry* head = file.find("head.a");
  if (head == nullptr || head->shape.size() != 2 || head->shape[0] < 1)
    fail(ErrorCode::bad_data, file.path(), ": found ", head == nullptr ? "no" : shape_text(head->shape),
         " head.a, expected a file of adapters that `ingot ttt` made");
  return head->shape[0];
}

void read_adapters(const SafetensorsFile& file, const AdapterLayout& layout, const Tensor& flat) {
  fill_zero(flat);
  file.read_all(layout.named(flat));
  for (const float* x = flat.ptr<float>(); x != flat.ptr<float>() + flat.numel(); ++x)
    if (!std::isfinite(*x))
      fail(ErrorCode::bad_data, file.path(), ": found ", *x, " in an adapter, expected finite numbers");
}

}  // namespace ingot
