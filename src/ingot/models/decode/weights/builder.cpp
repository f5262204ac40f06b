#include "ingot/models/decode/weights/builder.h"

#include <algorithm>
#include <cmath>

#include "ingot/gpu/device.h"
#include "ingot/kernels/quant/weight_tiles.h"

namespace ingot::decode {

DecoderWeights shapes_of(const DecoderSpec& c, WeightFormat dense, WeightFormat experts) {
  DecoderWeights w;
  const auto vector = [](bool present, Shape shape) { return present ? Tensor(nullptr, DType::f32, shape) : Tensor(); };
  const int64_t C = c.hidden, I = c.intermediate;
  w.embed = WeightMatrix(Tensor(nullptr, DType::bf16, {c.vocab, C}));
  for (const LayerSpec& layer : c.layer) {
    const int64_t E = layer.experts ? c.experts : 0;  // 0 for matrices outside a bank
    const WeightFormat mlp = layer.experts ? experts : dense;
    DecoderLayer y;
    y.attn_norm = y.mlp_norm = vector(true, {C});
    y.attn_post_norm = y.mlp_post_norm = vector(c.norm.post, {C});
    y.q_norm = y.k_norm = vector(c.qk_norm, {c.head_dim});
    y.qkv = weight_tiles_at(nullptr, dense, 0, c.qkv_width(), C);
    y.o = weight_tiles_at(nullptr, dense, 0, C, c.q_width());
    if (layer.experts) y.router = weight_tiles_at(nullptr, WeightFormat::bf16, 0, c.experts, C);
    y.gate_up = weight_tiles_at(nullptr, mlp, E, 2 * I, C);
    y.down = weight_tiles_at(nullptr, mlp, E, C, I);
    y.b_qkv = vector(c.qkv_bias, {c.qkv_width()}), y.b_o = vector(c.output_bias, {C});
    y.b_router = vector(c.mlp_bias && layer.experts, {c.experts});
    y.sinks = vector(c.sinks, {c.heads});
    y.b_gate_up = vector(c.mlp_bias, E > 0 ? Shape{E, 2 * I} : Shape{2 * I});
    y.b_down = vector(c.mlp_bias, E > 0 ? Shape{E, C} : Shape{C});
    w.layers.push_back(y);
  }
  w.norm = vector(true, {C});
  w.head = weight_tiles_at(nullptr, dense, 0, c.vocab, C);
  return w;
}

#ifdef INGOT_HAS_CUDA_DECODE
namespace {

WeightFormat stored_format(const WeightMatrix& w) { return has_weight_tiles(w.format) ? w.format : WeightFormat::bf16; }
std::vector<bf16> rounded(const WeightMatrix& w) {
  std::vector<float> wide(size_t(w.rows() * w.cols()));
  dequantise(w, Tensor(wide.data(), {w.rows(), w.cols()}), {});
  return {wide.begin(), wide.end()};
}

}  // namespace

void DeviceBuilder::vector(const float*& p, const Tensor& from, double scale, double mean, const Cut* cut) {
  float* to;
  const int64_t n = cut == nullptr ? from.numel() : from.numel() / from.size(-1) * cut->row_count();
  take(to, n);
  p = to;
  if (memory_ == nullptr) return;
  if (seed_ != nullptr) return fill_normal(to, DType::f32, n, scale, mean, next_seed(), stream_);
  if (cut == nullptr) return uploader().copy(to, from.data, from.bytes());
  const std::vector<float> part = cut_vector(from, *cut);
  gpu::copy_to_device(to, part.data(), int64_t(part.size()) * 4);
}
void DeviceBuilder::constant(const float*& p, int64_t n, float value) {
  float* to;
  take(to, n);
  p = to;
  if (memory_ == nullptr) return;
  const std::vector<float> all(size_t(n), value);
  gpu::copy_to_device(to, all.data(), n * 4);
}
void DeviceBuilder::embedding(const bf16*& p, const WeightMatrix& from) {
  bf16* to;
  take(to, from.rows() * from.cols());
  p = to;
  if (memory_ == nullptr) return;
  if (seed_ != nullptr) return fill_normal(to, DType::bf16, from.rows() * from.cols(), 1, 0, next_seed(), stream_);
  if (from.format == WeightFormat::bf16) return uploader().copy(to, from.data.data, from.data.bytes());
  const int64_t step = std::max<int64_t>(1, (int64_t(8) << 20) / from.cols());
  for (int64_t r = 0; r < from.rows(); r += step) {
    const std::vector<bf16> rows = rounded(from.row_range(r, std::min(from.rows(), r + step)));
    gpu::copy_to_device(to + r * from.cols(), rows.data(), int64_t(rows.size()) * 2);
  }
}
void DeviceBuilder::matrix(Matrix& m, const WeightMatrix& from, double scale) {
  matrix(m, from, scale, {.rows = {{0, from.rows()}}, .cols = {0, from.cols()}});
}
void DeviceBuilder::matrix(Matrix& m, const WeightMatrix& from, double scale, const Cut& cut) {
  const WeightFormat f = stored_format(from);
  const int64_t experts = from.is_bank() ? from.data.size(0) : 0;
  uint8_t* to;
  take(to, std::max<int64_t>(1, experts) * cut_bytes(f, cut));
  const WeightMatrix device = weight_tiles_at(to, f, experts, cut.row_count(), cut.cols.size());
  m = matrix_of(device);
  if (memory_ == nullptr) return;
  fill(device, m, from, scale, cut);
  if (m.row_tiles > 0) order_for_device(device, stream_);
}

// The weight tiles of `from` have the order of an archive.
void DeviceBuilder::fill(const WeightMatrix& device, const Matrix& m, const WeightMatrix& from, double scale,
                         const Cut& cut) {
  const WeightFormat f = device.format;
  uint8_t* const to = device.data.ptr<uint8_t>();
  const int64_t experts = from.is_bank() ? from.data.size(0) : 0, N = device.rows(), K = device.cols();
  if (seed_ != nullptr) {
    const uint64_t seed = next_seed();  // every rank draws the same seeds, so that common parts are equal
    if (m.row_tiles > 0) fill_weight_tiles(device, scale, seed, stream_);
    return;
  }
  const bool all = N == from.rows() && K == from.cols();
  if (all && from.in_weight_tiles()) return uploader().copy(to, from.data.data, from.data.bytes());
  if (m.row_tiles == 0) return;
  if (from.in_weight_tiles() && row_tile_bytes(f, K) <= Uploader::kBufferBytes)
    return upload_cuts(from, cut, to, m.matrix_bytes);
  for (int64_t e = 0; e < std::max<int64_t>(1, experts); ++e) {
    const WeightMatrix one = experts > 0 ? from.at(e) : from;
    if (one.in_weight_tiles())
      upload_cut(one, cut, to + e * m.matrix_bytes);
    else
      upload_rows(one, cut, to + e * m.matrix_bytes, f);
  }
}
Uploader& DeviceBuilder::uploader() {
  if (!uploader_) uploader_ = std::make_unique<Uploader>(device_);
  return *uploader_;
}
void DeviceBuilder::upload_cuts(const WeightMatrix& from, const Cut& cut, uint8_t* to, int64_t matrix_bytes) {
  struct Part {
    int64_t expert;
    Cut cut;
    int64_t at;
  };
  const int64_t row_tile = row_tile_bytes(from.format, cut.cols.size()),
                rows = Uploader::kBufferBytes / row_tile * kWeightTileRows;
  std::vector<Part> parts;
  for (int64_t e = 0; e < (from.is_bank() ? from.data.size(0) : 1); ++e) {
    int64_t at = e * matrix_bytes;
    for (const SliceRange& range : cut.rows)
      for (int64_t r = range.begin; r < range.end; r += rows) {
        parts.push_back({e, {.rows = {{r, std::min(range.end, r + rows)}}, .cols = cut.cols}, at});
        at += cut_bytes(from.format, parts.back().cut);
      }
  }
  uploader().chunks(int64_t(parts.size()), [&](int64_t i, uint8_t* buffer) {
    const Part& part = parts[size_t(i)];
    cut_weight_tiles(from.is_bank() ? from.at(part.expert) : from, part.cut, buffer);
    return Uploader::Chunk{to + part.at, cut_bytes(from.format, part.cut)};
  });
}
void DeviceBuilder::upload_cut(const WeightMatrix& from, const Cut& cut, uint8_t* to) {
  cut_.resize(size_t(cut_bytes(from.format, cut)));
  cut_weight_tiles(from, cut, cut_.data());
  gpu::copy_to_device(to, cut_.data(), int64_t(cut_.size()));
}
void DeviceBuilder::upload_rows(const WeightMatrix& from, const Cut& cut, uint8_t* to, WeightFormat f) {
  constexpr int64_t kRows = 1024;  // rows uploaded at a time, a multiple of a row tile's rows
  const int64_t row_tile = row_tile_bytes(f, from.cols()), cut_band = row_tile_bytes(f, cut.cols.size());
  for (const SliceRange& range : cut.rows)
    for (int64_t r = range.begin; r < range.end; r += kRows) {
      const WeightMatrix rows = from.row_range(r, std::min(range.end, r + kRows));
      std::vector<bf16> narrow;
      WeightMatrix stored = rows;
      if (rows.format != f) {
        narrow = rounded(rows);
        stored = WeightMatrix(Tensor(narrow.data(), DType::bf16, {rows.rows(), rows.cols()}));
      }
      packed_.resize(size_t(row_tile_count(rows.rows()) * row_tile));
      const WeightMatrix packed = weight_tiles_at(packed_.data(), f, 0, rows.rows(), rows.cols());
      pack_weight_tiles(stored, packed);
      upload_cut(packed, {.rows = {{0, rows.rows()}}, .cols = cut.cols}, to);
      to += row_tile_count(rows.rows()) * cut_band;
    }
}

namespace {

// Biases of zero and sinks of -infinity, for models without biases or sinks.
struct Neutral {
  const float *biases = nullptr, *sinks = nullptr;  // biases: long enough for the router's and for gate and up's

  void build(DeviceBuilder& b, const DecoderSpec& c, const Slice& s) {
    const int64_t E = std::max<int64_t>(1, c.experts);
    if (!c.mlp_bias) b.constant(biases, E * std::max<int64_t>(1, 2 * s.channels.size()), 0);
    if (!c.sinks) b.constant(sinks, c.heads, -INFINITY);
  }
};
// The weights of a norm: 1 + w where the model says so.
void build_norm(DeviceBuilder& b, const DecoderSpec& c, const float*& p, const Tensor& w) {
  if (!c.norm.unit_offset || w.data == nullptr) return b.vector(p, w, 0.1, 1);
  std::vector<float> all(w.ptr<float>(), w.ptr<float>() + w.numel());
  for (float& v : all) v += 1;
  b.vector(p, Tensor(all.data(), {w.numel()}), 0.1, 1);
}

void build_layer(DeviceBuilder& b, const DecoderSpec& c, bool experts, const DecoderLayer& w, const Slice& s,
                 const Neutral& neutral, Layer& y) {
  y.experts = experts;
  const int64_t group = c.heads / c.kv_heads;
  const Cut qkv = qkv_cut(c, s), gate_up = gate_up_cut(c, s),
            heads{.rows = {{s.kv_heads.begin * group, s.kv_heads.end * group}}, .cols = {0, 1}};
  const double in = 1 / std::sqrt(double(c.hidden));
  build_norm(b, c, y.attn_norm, w.attn_norm);
  build_norm(b, c, y.mlp_norm, w.mlp_norm);
  if (c.norm.post)
    build_norm(b, c, y.attn_post_norm, w.attn_post_norm), build_norm(b, c, y.mlp_post_norm, w.mlp_post_norm);
  if (c.qk_norm) build_norm(b, c, y.q_norm, w.q_norm), build_norm(b, c, y.k_norm, w.k_norm);
  y.b_router = y.b_gate_up = neutral.biases;
  y.sinks = neutral.sinks;
  y.b_qkv = y.b_o = y.b_down = nullptr;
  if (c.mlp_bias && experts) b.vector(y.b_router, w.b_router, 0.5);
  if (c.sinks) b.vector(y.sinks, w.sinks, 1, 0, &heads);
  if (c.mlp_bias) b.vector(y.b_gate_up, w.b_gate_up, 0.2, 0, &gate_up), b.vector(y.b_down, w.b_down, 0.1);
  if (c.qkv_bias) b.vector(y.b_qkv, w.b_qkv, 0.2, 0, &qkv);
  if (c.output_bias) b.vector(y.b_o, w.b_o, 0.1);
  // Among the ranks that share a sum, only the first adds the bias.
  if (s.kv_heads.begin > 0 || s.kv_heads.size() == 0) y.b_o = nullptr;
  if (s.channels.begin > 0 || s.channels.size() == 0) y.b_down = nullptr;
  b.matrix(y.qkv, w.qkv, in, qkv);
  b.matrix(y.o, w.o, 1 / std::sqrt(double(c.q_width())), output_cut(c, s));
  if (experts) b.matrix(y.router, w.router, 2 * in);
  b.matrix(y.gate_up, w.gate_up, in, gate_up);
  b.matrix(y.down, w.down, 1 / std::sqrt(double(c.intermediate)), down_cut(c, s));
}

}  // namespace

void build_weights(DeviceBuilder& b, const DecoderSpec& c, const DecoderWeights& w, const Slice& s, Model& m) {
  m.config = c;
  if (s != whole(c)) m.kv_heads = s.kv_heads.size();
  m.layers.resize(w.layers.size());
  b.embedding(m.embed, w.embed);
  Neutral neutral;
  neutral.build(b, c, s);
  for (size_t l = 0; l < w.layers.size(); ++l)
    build_layer(b, c, c.layer[l].experts, w.layers[l], s, neutral, m.layers[l]);
  build_norm(b, c, m.norm, w.norm);
  b.matrix(m.head, w.head, 2 / std::sqrt(double(c.hidden)), head_cut(c, s));
}

#endif

}  // namespace ingot::decode
