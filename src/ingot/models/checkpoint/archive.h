#pragma once
// Decoder-only transformers as .ingot archives: vectors as f32, the embedding in rows of bf16, every other matrix in
// weight tiles (kernels/quant/weight_tiles.h), so that kernels read the file's bytes directly. Tokenizer files are
// included. The names of the blobs, each present where the model has it:
//   embed, layers.<l>.{attn_norm, qkv, b_qkv, q_norm, k_norm, sinks, o, b_o, attn_post_norm, mlp_norm, router,
//   b_router, gate_up, b_gate_up, down, b_down, mlp_post_norm}, norm, head, files/<name>
// A tied head is written like a separate head.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ingot/models/checkpoint/layout.h"
#include "ingot/models/spec.h"

namespace ingot {

// The formats of matrices: qkv, o, head and dense MLPs; the experts. The router stays bf16.
struct ArchiveForms {
  WeightFormat dense = WeightFormat::bf16, experts = WeightFormat::mxfp4;
};
void check(const ArchiveForms& forms, const DecoderSpec& spec, const std::string& where);
WeightFormat archive_format_named(const std::string& name);  // bf16, fp8 or mxfp4; Error{usage} for other names

struct ConvertOptions {
  ArchiveForms forms;
  std::function<void(int64_t, int64_t)> progress;  // written bytes of the archive, and total bytes
};
// An archive's description of its model.
struct ArchivedModel {
  std::string kind;         // of the archive
  std::string description;  // JSON, the source of the spec for the model's kind
  DecoderSpec spec;
};
struct AttachedFile {
  std::string name, content;
};
// The tokenizer's files beside a checkpoint; the tokenizer of a GGUF file becomes a tokenizer.json, or a
// tokenizer.model where it is SentencePiece's.
std::vector<AttachedFile> tokenizer_files(const std::string& from);

// Computes the places of a checkpoint's tensors; without an arena the function only checks and counts.
using LayOutModel = std::function<detail::CheckpointLayout(const detail::Checkpoint&, Arena*)>;
// Converts a checkpoint or an archive of the same kind to an archive, in pieces of some ten MB. Tensors already in
// their form are kept bit for bit. Only an archive, or an empty file, is replaced. Returns the archive's bytes.
int64_t write_model_archive(const std::string& from, const std::string& to, const ArchivedModel& model,
                            const LayOutModel& lay_out, const std::vector<AttachedFile>& files,
                            const ConvertOptions& options);
// An archive of random weights at realistic scale, a few MB of it in memory at a time. The same seed, spec and forms
// give the same bytes. The archive has no tokenizer. Returns its bytes.
int64_t write_random_archive(const ArchivedModel& model, const std::string& to, uint64_t seed,
                             const ConvertOptions& options);

ArchiveForms archive_forms(const std::string& path, const ArchivedModel& model);  // the forms of an archive

struct ArchiveLoad {
  int64_t layers = 0;       // only the first `layers` layers; 0: all
  int64_t other_bytes = 0;  // memory the caller will want beside the weights, for the check before reading
  bool passed_on = false;   // the weights go to a device: a mapped archive then needs no host memory
};
// Maps the archive and reads it into memory once. An archive that is passed on to a device may be larger than memory:
// its pages are then read while the weights are copied to the device. If a second process shortens the archive
// afterwards, this process ends with SIGBUS.
DecoderWeights load_model_archive(const std::string& path, const ArchivedModel& model, const ArchiveLoad& load);
DecoderWeights map_model_archive(const std::string& path, const ArchivedModel& model, int64_t layers);  // unread

// Files stored with the checkpoint, such as tokenizer.json.
std::vector<std::string> archived_files(const std::string& path);  // their names
std::optional<std::string> archived_file(const std::string& path, const std::string& name);

}  // namespace ingot
