#pragma once
// The parts of an archived model, in the order of the file, and their conversion into the archive's forms.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ingot/io/formats/archive.h"
#include "ingot/models/checkpoint/archive.h"

namespace ingot::model_archive {

constexpr int64_t kPieceRows = 1024;        // rows that are converted at a time; a multiple of the rows of a row tile
constexpr const char* kFiles = "files/";    // the prefix of attached files
constexpr const char* kTiled = "granules";  // the name of the layout of weight tiles in version 1 of the format

enum class Role { plain, router, dense, expert };

// Visits every part of a model once, in the order of the file: vector(name, tensor, shape) and
// matrix(name, matrix, experts or 0, rows, columns, role).
template <class Visit>
void visit_layer(DecoderLayer& l, const DecoderSpec& c, bool experts, const std::string& n, Visit& visit) {
  const int64_t bank = experts ? c.experts : 0;  // a dense MLP has no bank
  const Role role = experts ? Role::expert : Role::dense;
  const auto per_expert = [&](int64_t width) { return experts ? Shape{c.experts, width} : Shape{width}; };
  visit.vector(n + "attn_norm", l.attn_norm, Shape{c.hidden});
  visit.matrix(n + "qkv", l.qkv, 0, c.qkv_width(), c.hidden, Role::dense);
  if (c.qkv_bias) visit.vector(n + "b_qkv", l.b_qkv, Shape{c.qkv_width()});
  if (c.qk_norm) visit.vector(n + "q_norm", l.q_norm, Shape{c.head_dim});
  if (c.qk_norm) visit.vector(n + "k_norm", l.k_norm, Shape{c.head_dim});
  if (c.sinks) visit.vector(n + "sinks", l.sinks, Shape{c.heads});
  visit.matrix(n + "o", l.o, 0, c.hidden, c.q_width(), Role::dense);
  if (c.output_bias) visit.vector(n + "b_o", l.b_o, Shape{c.hidden});
  if (c.norm.post) visit.vector(n + "attn_post_norm", l.attn_post_norm, Shape{c.hidden});
  visit.vector(n + "mlp_norm", l.mlp_norm, Shape{c.hidden});
  if (experts) visit.matrix(n + "router", l.router, 0, c.experts, c.hidden, Role::router);
  if (experts && c.mlp_bias) visit.vector(n + "b_router", l.b_router, Shape{c.experts});
  visit.matrix(n + "gate_up", l.gate_up, bank, 2 * c.intermediate, c.hidden, role);
  if (c.mlp_bias) visit.vector(n + "b_gate_up", l.b_gate_up, per_expert(2 * c.intermediate));
  visit.matrix(n + "down", l.down, bank, c.hidden, c.intermediate, role);
  if (c.mlp_bias) visit.vector(n + "b_down", l.b_down, per_expert(c.hidden));
  if (c.norm.post) visit.vector(n + "mlp_post_norm", l.mlp_post_norm, Shape{c.hidden});
}
template <class Visit> void visit_parts(DecoderWeights& w, const DecoderSpec& c, int64_t layers, Visit&& visit) {
  w.layers.resize(size_t(layers));
  visit.matrix("embed", w.embed, 0, c.vocab, c.hidden, Role::plain);
  for (int64_t i = 0; i < layers; ++i)
    visit_layer(w.layers[size_t(i)], c, c.layer[size_t(i)].experts, "layers." + std::to_string(i) + ".", visit);
  visit.vector("norm", w.norm, Shape{c.hidden});
  visit.matrix("head", w.head, 0, c.vocab, c.hidden, Role::dense);
}

std::vector<int64_t> sizes_of(const Shape& s);
std::vector<int64_t> sizes_of(int64_t experts, int64_t rows, int64_t cols);  // of a bank of matrices; 0 experts: of a
                                                                             // single matrix
int64_t weight_tiles_bytes(WeightFormat f, int64_t experts, int64_t rows, int64_t cols);

// A part of an archive, and where its numbers come from.
struct Part {
  ArchiveEntry entry;
  Tensor vector;
  WeightMatrix matrix;
  WeightFormat to = WeightFormat::f32;
};
// The parts of a model in the given forms: a visitor of visit_parts().
struct Plan {
  const ArchiveForms& forms;
  std::vector<Part> parts;

  void vector(const std::string& name, Tensor& t, const Shape& shape);
  void matrix(const std::string& name, WeightMatrix& w, int64_t experts, int64_t rows, int64_t cols, Role role);
  std::vector<ArchiveEntry> entries() const;
};

// Converts pieces of matrices into the form of their part. The bytes are valid until the next call.
class Pieces {
 public:
  std::span<const char> bytes_of(const WeightMatrix& piece, const Part& part);

 private:
  WeightMatrix in_format(const WeightMatrix& w, WeightFormat f);
  std::vector<float> wide_;
  std::vector<uint8_t> narrow_, scales_, out_;
};

// Writes the bytes of an archive in order, and reports the progress.
class ProgressWriter {
 public:
  ProgressWriter(ArchiveWriter& writer, const ConvertOptions& options) : writer_(writer), options_(options) {}
  void put(const void* bytes, int64_t n) {
    writer_.write(bytes, n);
    done_ += n;
    if (options_.progress) options_.progress(done_, writer_.file_bytes());
  }
  void put(std::span<const char> bytes) { put(bytes.data(), int64_t(bytes.size())); }

 private:
  ArchiveWriter& writer_;
  const ConvertOptions& options_;
  int64_t done_ = 0;
};

// The archive's description of itself: JSON.
std::string about(const ArchivedModel& model, const ArchiveForms& forms);
// Throws where a file other than an archive would be replaced: a mistyped name must not cost a shard of the checkpoint.
// `from` may be empty.
void require_replaceable(const std::string& from, const std::string& to);
// write_model_archive() from an archive of the same kind.
int64_t convert_archive(const std::string& from, const std::string& to, const ArchivedModel& model,
                        const ConvertOptions& options);

}  // namespace ingot::model_archive
