#include "ingot/models/checkpoint/archive_parts.h"

#include <filesystem>
#include <system_error>

#include "ingot/io/json.h"
#include "ingot/kernels/quant/weight_tiles.h"

namespace ingot::model_archive {

std::vector<int64_t> sizes_of(const Shape& s) { return {s.dim, s.dim + s.rank}; }
std::vector<int64_t> sizes_of(int64_t experts, int64_t rows, int64_t cols) {
  return experts > 0 ? std::vector{experts, rows, cols} : std::vector{rows, cols};
}
int64_t weight_tiles_bytes(WeightFormat f, int64_t experts, int64_t rows, int64_t cols) {
  return std::max<int64_t>(1, experts) * row_tile_count(rows) * row_tile_bytes(f, cols);
}

void Plan::vector(const std::string& name, Tensor& t, const Shape& shape) {
  parts.push_back({{name, "f32", "plain", sizes_of(shape), shape.numel() * 4}, t, {}, WeightFormat::f32});
}
void Plan::matrix(const std::string& name, WeightMatrix& w, int64_t experts, int64_t rows, int64_t cols, Role role) {
  const WeightFormat f = role == Role::dense ? forms.dense : role == Role::expert ? forms.experts : WeightFormat::bf16;
  const int64_t bytes = role == Role::plain ? rows * cols * 2 : weight_tiles_bytes(f, experts, rows, cols);
  parts.push_back(
      {{name, name_of(f), role == Role::plain ? "plain" : kTiled, sizes_of(experts, rows, cols), bytes}, {}, w, f});
}
std::vector<ArchiveEntry> Plan::entries() const {
  std::vector<ArchiveEntry> all;
  for (const Part& p : parts) all.push_back(p.entry);
  return all;
}

std::span<const char> Pieces::bytes_of(const WeightMatrix& piece, const Part& part) {
  const WeightMatrix stored = in_format(piece, part.to);
  if (part.entry.layout == "plain") return {static_cast<const char*>(stored.data.data), size_t(stored.data.bytes())};
  out_.resize(size_t(weight_tiles_bytes(part.to, 0, piece.rows(), piece.cols())));
  pack_weight_tiles(stored, weight_tiles_at(out_.data(), part.to, 0, piece.rows(), piece.cols()));
  return {reinterpret_cast<const char*>(out_.data()), out_.size()};
}
WeightMatrix Pieces::in_format(const WeightMatrix& w, WeightFormat f) {
  if (w.format == f) return w;
  const int64_t rows = w.rows(), cols = w.cols();
  wide_.resize(size_t(rows * cols));
  narrow_.resize(size_t(rows * cols * 2));
  scales_.resize(size_t(rows * std::max<int64_t>(4, cols / kMxBlock)));
  const Tensor wide(wide_.data(), {rows, cols});
  dequantise(w, wide, {});
  const WeightMatrix to =
      f == WeightFormat::bf16 ? WeightMatrix(Tensor(narrow_.data(), DType::bf16, {rows, cols}))
      : f == WeightFormat::fp8
          ? WeightMatrix(f, Tensor(narrow_.data(), {rows, cols}), Tensor(scales_.data(), DType::f32, {rows}))
          : WeightMatrix(f, Tensor(narrow_.data(), {rows, cols / kMxBlock, kMxBlock / 2}),
                         Tensor(scales_.data(), {rows, cols / kMxBlock}));
  quantise(wide, to, {});
  return to;
}

std::string about(const ArchivedModel& model, const ArchiveForms& forms) {
  return write_json(OrderedJson{{"model", OrderedJson::parse(model.description)},
                                {"dense", name_of(forms.dense)},
                                {"experts", name_of(forms.experts)}});
}

void require_replaceable(const std::string& from, const std::string& to) {
  std::error_code absent;
  if (!from.empty() && std::filesystem::equivalent(checkpoint_source(from), to, absent))
    fail(ErrorCode::usage, to, ": found the checkpoint itself, expected another name for the archive");
  if (std::filesystem::is_regular_file(to, absent) && file_size(to) > 0 && !ArchiveFile::is_one(to))
    fail(ErrorCode::usage, to, ": found a file that is no archive, expected a new name or an archive to replace");
}

}  // namespace ingot::model_archive
