#include "ingot/models/checkpoint/layout.h"

#include <algorithm>

namespace ingot::detail {

const StoredTensor* LayoutBuilder::find(const std::string& name, const std::vector<int64_t>& shape,
                                        std::initializer_list<const char*> dtypes) {
  const StoredTensor* place = set_.find(name);
  if (place == nullptr) {
    missing_.push_back(name);
    return nullptr;
  }
  used_.insert(name);
  const auto refuse = [&](const auto& found, const auto& expected) {
    fail(ErrorCode::bad_data, place->file->path(), ": tensor \"", name, "\": found ", found, ", expected ", expected);
  };
  if (place->shape != shape) refuse("shape " + shape_text(place->shape), shape_text(shape));
  std::string known;
  for (const char* d : dtypes) {
    if (place->dtype == d) return place;
    known += (known.empty() ? "" : " or ") + std::string(d);
  }
  refuse("dtype " + place->dtype, known);
  return nullptr;
}

Tensor LayoutBuilder::take(DType dtype, Shape shape) {
  // Bounded, because a config may require more bytes than 64 bits can count, for tensors that turn out to be missing.
  bytes = std::min(bytes + Arena::aligned(dtype, shape), int64_t(1) << 60);
  return arena_ != nullptr ? arena_->take(dtype, shape) : Tensor(nullptr, dtype, shape);
}
void LayoutBuilder::add(const StoredTensor* from, const Tensor& to, int64_t offset, Change change) {
  if (arena_ != nullptr && from != nullptr) reads.push_back({from, static_cast<char*>(to.data) + offset, change});
}

void LayoutBuilder::decode(const StoredTensor* from, const Tensor& to, int64_t offset, Into into, int64_t rows,
                           int64_t cols, int64_t stride, int64_t paired_head) {
  if (arena_ != nullptr && from != nullptr)
    reads.push_back(
        {from, static_cast<char*>(to.data) + offset, Change::decode, into, rows, cols, stride, paired_head});
}

DType LayoutBuilder::type_of(const std::vector<const StoredTensor*>& places) {
  return std::any_of(places.begin(), places.end(), [](auto* p) { return type_of(p) == DType::f32; }) ? DType::f32
                                                                                                     : DType::bf16;
}

WeightMatrix LayoutBuilder::decoded_rows(const Names& names, const std::vector<int64_t>& rows, int64_t cols,
                                         const std::vector<int64_t>& paired_heads) {
  std::vector<const StoredTensor*> places;
  int64_t all = 0, at = 0;
  for (size_t i = 0; i < names.size(); all += rows[i++]) places.push_back(find(names[i], {rows[i], cols}, kBlocks));
  const DType dtype = type_of(places);
  const Tensor t = take(dtype, {all, cols});
  const int64_t row = cols * size_of(dtype);
  for (size_t i = 0; i < names.size(); at += rows[i++])
    decode(places[i], t, at * row, into(dtype), rows[i], cols, row, paired_heads.empty() ? 0 : paired_heads[i]);
  return WeightMatrix(t);
}

Tensor LayoutBuilder::decoded_vector(const Names& names, const std::vector<int64_t>& widths,
                                     const std::vector<int64_t>& paired_heads) {
  int64_t all = 0, at = 0;
  for (const int64_t n : widths) all += n;
  const Tensor t = take(DType::f32, {all});
  for (size_t i = 0; i < names.size(); at += widths[i++]) {
    const StoredTensor* from = find(names[i], {widths[i]}, kNumbers);
    if (paired_heads.empty() || paired_heads[i] == 0)
      decode(from, t, at * 4, Into::f32, 1, widths[i], widths[i] * 4);
    else
      decode(from, t, at * 4, Into::f32, widths[i], 1, 4, paired_heads[i]);
  }
  return t;
}

WeightMatrix LayoutBuilder::alternating_rows(const std::vector<Names>& lists, int64_t rows, int64_t cols, bool bank) {
  std::vector<const StoredTensor*> places;
  for (const Names& names : lists)
    for (const std::string& name : names) places.push_back(find(name, {rows, cols}, kBlocks));
  const auto turns = int64_t(lists[0].size()), count = int64_t(lists.size());
  const DType dtype = type_of(places);
  const Tensor t = bank ? take(dtype, {count, turns * rows, cols}) : take(dtype, {turns * rows, cols});
  const int64_t row = cols * size_of(dtype);
  for (int64_t i = 0; i < int64_t(places.size()); ++i)
    decode(places[size_t(i)], t, (i / turns * turns * rows + i % turns) * row, into(dtype), rows, cols, turns * row);
  return WeightMatrix(t);
}

WeightMatrix LayoutBuilder::decoded_bank(const Names& names, int64_t experts, int64_t n, int64_t k) {
  std::vector<const StoredTensor*> places;
  for (const std::string& name : names) places.push_back(find(name, {experts, n, k}, kBlocks));
  const auto turns = int64_t(names.size());
  const bool mxfp4 =
      std::all_of(places.begin(), places.end(), [](auto* p) { return p != nullptr && p->dtype == "MXFP4"; });
  const int64_t rows = experts * n;
  if (!mxfp4) {
    const DType dtype = type_of(places);
    const Tensor t = take(dtype, {experts, turns * n, k});
    const int64_t row = k * size_of(dtype);
    for (int64_t i = 0; i < turns; ++i) decode(places[size_t(i)], t, i * row, into(dtype), rows, k, turns * row);
    return WeightMatrix(t);
  }
  const int64_t groups = k / kMxBlock, row = k / 2;
  const Tensor data = take(DType::u8, {experts, turns * n, groups, kMxBlock / 2});
  const Tensor scales = take(DType::u8, {experts, turns * n, groups});
  for (int64_t i = 0; i < turns; ++i) {
    decode(places[size_t(i)], data, i * row, Into::mx_blocks, rows, k, turns * row);
    decode(places[size_t(i)], scales, i * groups, Into::mx_scales, rows, k, turns * groups);
  }
  return {WeightFormat::mxfp4, data, scales};
}

void LayoutBuilder::report_missing() const {
  if (missing_.empty()) return;
  std::string list;
  for (size_t i = 0; i < std::min<size_t>(5, missing_.size()); ++i) list += (i ? ", " : "") + missing_[i];
  fail(ErrorCode::bad_data, set_.path(), ": ", missing_.size(), " tensors are missing, such as ", list);
}

namespace {
// The layer of a name, or -1.
int64_t layer_of(const std::string& name, const std::string& prefix) {
  if (name.rfind(prefix, 0) != 0) return -1;
  int64_t n = 0;
  size_t i = prefix.size();
  for (; i < name.size() && name[i] >= '0' && name[i] <= '9' && n < 1 << 20; ++i) n = n * 10 + (name[i] - '0');
  return i > prefix.size() && i < name.size() && name[i] == '.' ? n : -1;
}
}  // namespace

void LayoutBuilder::refuse_others(const std::string& layer_prefix, int64_t layers, int64_t all_layers) const {
  for (const auto& [name, place] : set_.tensors()) {
    if (used_.count(name) != 0) continue;
    if (const int64_t l = layer_of(name, layer_prefix); l >= layers && l < all_layers) continue;
    fail(ErrorCode::bad_data, place.file->path(), ": found tensor \"", name, "\", which a model of ", all_layers,
         " layers with this config does not have");
  }
}

}  // namespace ingot::detail
