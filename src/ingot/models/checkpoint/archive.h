#pragma once
// Decoder-only transformers as .ingot archives: vectors as f32, the embedding in rows of bf16, every other matrix in
// weight tiles (kernels/quant/weight_tiles.h), so that the file's bytes are what the kernels read. Tokenizer files
// travel along.
//   embed, layers.<l>.{attn_norm, qkv, b_qkv, q_norm, k_norm, sinks, o, b_o, attn_post_norm, mlp_norm, router,
//   b_router, gate_up, b_gate_up, down, b_down, mlp_post_norm}, norm, head, files/<name>; each where the model has it
// A tied head is written out like any other.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ingot/models/checkpoint/layout.h"
#include "ingot/models/spec.h"

namespace ingot {

// What matrices become: qkv, o, head and dense MLPs; the experts. The router stays bf16.
struct ArchiveForms {
  WeightFormat dense = WeightFormat::bf16, experts = WeightFormat::mxfp4;
};
void check(const ArchiveForms& forms, const DecoderSpec& spec, const std::string& where);

struct ConvertOptions {
  ArchiveForms forms;
  std::function<void(int64_t, int64_t)> progress;  // bytes of the archive that are written, and all of them
};
// What an archive says of its model.
struct ArchivedModel {
  std::string kind;         // of the archive
  std::string description;  // JSON, from which the model's kind makes the spec
  DecoderSpec spec;
};
struct AttachedFile {
  std::string name, content;
};
// The tokenizer's files beside a checkpoint; that of a GGUF file becomes a tokenizer.json.
std::vector<AttachedFile> tokenizer_files(const std::string& from);

// Where a checkpoint's tensors go; without an arena it only checks and counts.
using LayOutModel = std::function<detail::CheckpointLayout(const detail::Checkpoint&, Arena*)>;
// A checkpoint or another archive of the same kind to an archive, one piece of some ten MB at a time. What is in its
// form already is kept bit for bit. Only an archive, or an empty file, is replaced. Returns the archive's bytes.
int64_t write_model_archive(const std::string& from, const std::string& to, const ArchivedModel& model,
                            const LayOutModel& lay_out, const std::vector<AttachedFile>& files,
                            const ConvertOptions& options);
// An archive of random weights at realistic scale, a few MB of it in memory at a time. The same seed, spec and forms
// give the same bytes. It has no tokenizer. Returns its bytes.
int64_t write_random_archive(const ArchivedModel& model, const std::string& to, uint64_t seed,
                             const ConvertOptions& options);

ArchiveForms archive_forms(const std::string& path, const ArchivedModel& model);  // what an archive has

struct ArchiveLoad {
  int64_t layers = 0;       // the first so many
  int64_t other_bytes = 0;  // memory the caller will want beside the weights, for the check before reading
  bool passed_on = false;   // to a device: an archive, which is read where it lies, needs no memory of the host's
};
// Mapped, and brought into memory once. One that is passed on to a device may be larger than memory, and is read on its
// way then. An archive that another process shortens afterwards ends this one.
DecoderWeights load_model_archive(const std::string& path, const ArchivedModel& model, const ArchiveLoad& load);
DecoderWeights map_model_archive(const std::string& path, const ArchivedModel& model, int64_t layers);  // unread

// A file that came with the checkpoint, such as tokenizer.json.
std::vector<std::string> archived_files(const std::string& path);  // their names
std::optional<std::string> archived_file(const std::string& path, const std::string& name);

}  // namespace ingot
