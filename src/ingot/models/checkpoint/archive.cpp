#include "ingot/models/checkpoint/archive.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "ingot/core/memory/memory.h"
#include "ingot/io/formats/archive.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/checkpoint/archive_finder.h"
#include "ingot/models/checkpoint/archive_parts.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/sentencepiece.h"

namespace ingot {
namespace {

using namespace model_archive;

constexpr int64_t kMaxAttached = 256 << 20;  // bytes

// Writes the parts of an archive from a checkpoint, which is read piece by piece.
class Converter {
 public:
  Converter(const std::vector<detail::Read>& reads, ArchiveWriter& writer, const ConvertOptions& options)
      : reads_(reads), writer_(writer, options) {}

  void write(const Part& part) {
    try {
      if (part.vector) return write_vector(part.vector);
      if (!part.matrix.is_bank()) return write_rows(part, part.matrix, true);
      for (int64_t e = 0; e < part.matrix.data.size(0); ++e) {
        const WeightMatrix one = part.matrix.at(e);
        bring(one);
        write_rows(part, one, false);
        release(one);
      }
    } catch (const Error& e) { fail(e.code, "\"", part.entry.name, "\": ", e.what()); }
  }
  void write_bytes(const std::string& bytes) { writer_.put(bytes); }

 private:
  // --- pieces of the checkpoint, in memory only during their use
  void bring(const WeightMatrix& w) {
    detail::read_range(reads_, w.data.data, w.data.bytes());
    if (w.scales) detail::read_range(reads_, w.scales.data, w.scales.bytes());
  }
  // Releases whole pages. They may also hold data of other tensors: this data has been written already, or is read
  // again from the file later.
  static void release(const void* begin, int64_t bytes) {
    constexpr uintptr_t kPage = 4096;
    const uintptr_t first = uintptr_t(begin) / kPage * kPage, last = uintptr_t(begin) + uintptr_t(bytes);
    ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
  static void release(const WeightMatrix& w) {
    release(w.data.data, w.data.bytes());
    if (w.scales) release(w.scales.data, w.scales.bytes());
  }

  void write_vector(const Tensor& t) {
    detail::read_range(reads_, t.data, t.bytes());
    writer_.put(t.data, t.bytes());
    release(t.data, t.bytes());
  }
  void write_rows(const Part& part, const WeightMatrix& w, bool piecewise) {
    for (int64_t begin = 0; begin < w.rows(); begin += kPieceRows) {
      const WeightMatrix piece = w.row_range(begin, std::min(w.rows(), begin + kPieceRows));
      if (piecewise) bring(piece);
      writer_.put(pieces_.bytes_of(piece, part));
      if (piecewise) release(piece);
    }
  }

  const std::vector<detail::Read>& reads_;
  ProgressWriter writer_;
  Pieces pieces_;
};

}  // namespace

WeightFormat archive_format_named(const std::string& name) {
  for (const WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    if (name == name_of(f)) return f;
  fail(ErrorCode::usage, "format of weights: found \"", name, "\", expected bf16, fp8 or mxfp4");
}

void check(const ArchiveForms& forms, const DecoderSpec& c, const std::string& where) {
  for (const auto& [form, what] : {std::pair{forms.dense, "dense"}, {forms.experts, "experts"}}) {
    if (!has_weight_tiles(form))
      fail(ErrorCode::usage, where, ": ", what, ": found ", form, ", expected bf16, fp8 or mxfp4");
  }
  const auto refuse = [&](const char* what, int64_t cols) {
    if (cols % kMxBlock != 0)
      fail(ErrorCode::unsupported, where, ": found ", what, " rows of ", cols, " numbers, expected a multiple of ",
           kMxBlock, " for mxfp4");
  };
  if (forms.dense == WeightFormat::mxfp4) refuse("dense", c.hidden), refuse("attention output", c.q_width());
  for (const LayerSpec& l : c.layer)
    if ((l.experts ? forms.experts : forms.dense) == WeightFormat::mxfp4)
      refuse(l.experts ? "expert" : "dense", c.hidden), refuse(l.experts ? "expert" : "dense", c.intermediate);
}

// --- writing

std::vector<AttachedFile> tokenizer_files(const std::string& from) {
  std::vector<AttachedFile> files;
  if (const std::string path = checkpoint_source(from); GgufFile::is_one(path)) {
    const GgufFile file(path);
    if (file.metadata().count("tokenizer.ggml.tokens") == 0) return files;
    if (SentencePiece::is_in(file)) return {{"tokenizer.model", SentencePiece::from_gguf(file).to_model()}};
    return {{"tokenizer.json", ByteBpe::from_gguf(file).to_json()}};
  }
  const std::string directory = snapshot_of(from), tokenizer = is_directory(directory) ? tokenizer_in(directory) : "";
  if (!tokenizer.empty()) files.push_back({base_name(tokenizer), read_file(tokenizer, kMaxAttached)});
  return files;
}

int64_t write_model_archive(const std::string& from, const std::string& to, const ArchivedModel& model,
                            const LayOutModel& lay_out, const std::vector<AttachedFile>& files,
                            const ConvertOptions& options) {
  check(options.forms, model.spec, from);
  require_replaceable(from, to);
  if (ArchiveFile::is_one(from)) return convert_archive(from, to, model, options);
  const detail::Checkpoint checkpoint(from);
  // Reserves address space for the whole checkpoint. Only the piece that is being converted takes memory.
  Arena arena(lay_out(checkpoint, nullptr).bytes);
  detail::CheckpointLayout layout = lay_out(checkpoint, &arena);
  Plan plan{options.forms, {}};
  visit_parts(layout.weights, model.spec, model.spec.layers, plan);
  std::vector<ArchiveEntry> entries = plan.entries();
  for (const auto& [name, content] : files) {
    const auto bytes = int64_t(content.size());
    entries.push_back({kFiles + name, "bytes", "plain", {bytes}, bytes});
  }
  ArchiveWriter writer(to, model.kind, about(model, options.forms), std::move(entries));
  Converter converter(layout.reads, writer, options);
  for (const Part& p : plan.parts) converter.write(p);
  for (const auto& [name, content] : files) converter.write_bytes(content);
  writer.commit();
  return writer.file_bytes();
}

// --- reading

ArchiveForms archive_forms(const std::string& path, const ArchivedModel& model) {
  const ArchiveFile file(path);
  DecoderWeights views;
  find_parts(file, model, model.spec.layers, views);
  ArchiveForms forms{.dense = views.head.format};
  for (size_t l = 0; l < views.layers.size(); ++l)
    if (model.spec.layer[l].experts) forms.experts = views.layers[l].gate_up.format;
  return forms;
}

DecoderWeights map_model_archive(const std::string& path, const ArchivedModel& model, int64_t layers) {
  auto file = std::make_shared<ArchiveFile>(path);
  DecoderWeights w;
  w.mapped_bytes = find_parts(*file, model, layers, w).bytes;
  w.mapping = std::move(file);
  return w;
}
DecoderWeights load_model_archive(const std::string& path, const ArchivedModel& model, const ArchiveLoad& load) {
  auto file = std::make_shared<ArchiveFile>(path);
  DecoderWeights w;
  const Finder found = find_parts(*file, model, load.layers, w);
  const int64_t room = available_memory();
  require_memory((load.passed_on ? 0 : found.bytes) + load.other_bytes, path);
  // An archive larger than memory is read while the weights are passed to the device.
  if (room < 0 || found.bytes <= room) file->prefetch(found.used);
  w.mapped_bytes = found.bytes;
  w.mapping = std::move(file);
  return w;
}

std::vector<std::string> archived_files(const std::string& path) {
  const std::string prefix = kFiles;
  std::vector<std::string> names;
  const ArchiveFile file(path);
  for (const ArchiveEntry& e : file.entries())
    if (e.name.starts_with(prefix)) names.push_back(e.name.substr(prefix.size()));
  return names;
}

std::optional<std::string> archived_file(const std::string& path, const std::string& name) {
  const ArchiveFile file(path);
  const ArchiveEntry* e = file.find(kFiles + name);
  if (e == nullptr) return {};
  if (e->bytes > kMaxAttached)
    fail(ErrorCode::bad_data, path, ": blob \"", e->name, "\": found ", e->bytes, " bytes, expected at most ",
         kMaxAttached);
  file.prefetch({e});
  return std::string(file.data(*e), size_t(e->bytes));
}

}  // namespace ingot
