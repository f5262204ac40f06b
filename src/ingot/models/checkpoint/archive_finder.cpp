#include "ingot/models/checkpoint/archive_finder.h"

#include <cstdlib>
#include <set>

#include "ingot/core/check.h"
#include "ingot/kernels/quant/weight_tiles.h"

namespace ingot::model_archive {

namespace {

void require_kind(const ArchiveFile& file, const std::string& kind) {
  if (file.kind() != kind)
    fail(ErrorCode::unsupported, file.path(), ": found an archive of \"", file.kind().substr(0, 40), "\", expected ",
         kind);
}
int64_t layer_of(const std::string& name) {
  const std::string prefix = "layers.";
  return name.rfind(prefix, 0) == 0 ? std::strtoll(name.c_str() + prefix.size(), nullptr, 10) : -1;
}

}  // namespace

const ArchiveEntry& Finder::find(const std::string& name, const std::vector<int64_t>& shape, const char* layout) {
  const ArchiveEntry* e = file.find(name);
  if (e == nullptr) fail(ErrorCode::bad_data, file.path(), ": blob \"", name, "\" is missing");
  if (e->shape != shape)
    fail(ErrorCode::bad_data, file.path(), ": blob \"", name, "\": found shape ", shape_text(e->shape), ", expected ",
         shape_text(shape));
  if (e->layout != layout)
    fail(ErrorCode::bad_data, file.path(), ": blob \"", name, "\": found layout \"", e->layout.substr(0, 40),
         "\", expected ", layout);
  used.push_back(e);
  bytes += e->bytes;
  return *e;
}
void Finder::require_bytes(const ArchiveEntry& e, int64_t expected) {
  if (e.bytes != expected)
    fail(ErrorCode::bad_data, file.path(), ": blob \"", e.name, "\": found ", e.bytes, " bytes, expected ", expected,
         " for its shape and format");
}
void Finder::wrong_format(const ArchiveEntry& e, const char* expected) {
  fail(ErrorCode::bad_data, file.path(), ": blob \"", e.name, "\": found format \"", e.format.substr(0, 40),
       "\", expected ", expected);
}
// The mapping is read-only, and no caller writes through this pointer.
void* Finder::memory(const ArchiveEntry& e) { return const_cast<char*>(file.data(e)); }

void Finder::vector(const std::string& name, Tensor& t, const Shape& shape) {
  const ArchiveEntry& e = find(name, sizes_of(shape), "plain");
  if (e.format != "f32") wrong_format(e, "f32");
  require_bytes(e, shape.numel() * 4);
  t = Tensor(memory(e), DType::f32, shape);
}
void Finder::matrix(const std::string& name, WeightMatrix& w, int64_t experts, int64_t rows, int64_t cols, Role role) {
  const ArchiveEntry& e = find(name, sizes_of(experts, rows, cols), role == Role::plain ? "plain" : kTiled);
  if (role == Role::plain) {
    if (e.format != "bf16") wrong_format(e, "bf16");
    require_bytes(e, rows * cols * 2);
    w = WeightMatrix(Tensor(memory(e), DType::bf16, {rows, cols}));
    return;
  }
  const WeightFormat f = e.format == "bf16"    ? WeightFormat::bf16
                         : e.format == "fp8"   ? WeightFormat::fp8
                         : e.format == "mxfp4" ? WeightFormat::mxfp4
                                               : WeightFormat::f64;
  if (f == WeightFormat::f64 || (f == WeightFormat::mxfp4 && cols % kMxBlock != 0))
    wrong_format(e, f == WeightFormat::f64 ? "bf16, fp8 or mxfp4" : "one for rows of no whole mxfp4 block");
  require_bytes(e, weight_tiles_bytes(f, experts, rows, cols));
  w = weight_tiles_at(memory(e), f, experts, rows, cols);
}

void Finder::refuse_others(int64_t layers, int64_t all_layers) const {
  std::set<const ArchiveEntry*> known(used.begin(), used.end());
  for (const ArchiveEntry& e : file.entries()) {
    if (known.count(&e) != 0 || e.name.rfind(kFiles, 0) == 0) continue;
    if (const int64_t l = layer_of(e.name); l >= layers && l < all_layers) continue;  // a layer that was not requested
    fail(ErrorCode::bad_data, file.path(), ": found blob \"", e.name.substr(0, 200),
         "\", which a model with this config does not have");
  }
}

Finder find_parts(const ArchiveFile& file, const ArchivedModel& model, int64_t layers, DecoderWeights& w) {
  require_kind(file, model.kind);
  Finder finder{file};
  visit_parts(w, model.spec, layers, finder);
  finder.refuse_others(layers, model.spec.layers);
  return finder;
}

}  // namespace ingot::model_archive
