#include "ingot/models/registry.h"

#include <deque>

#include "ingot/core/clock.h"
#include "ingot/core/progress.h"
#include "ingot/gpu/device.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/models/checkpoint/archive.h"
#include "ingot/models/checkpoint/temporary_archive.h"

namespace ingot {

// A line per kind, in the order in which kinds are tried. GPT-OSS takes every GGUF file and archive that no family has
// taken; the last kind takes any directory, and its error names the missing files of a run.
#define INGOT_MODEL_KINDS(KIND) \
  KIND(synthetic_gpt_oss_kind)  \
  KIND(family_kind)             \
  KIND(gpt_oss_kind)            \
  KIND(gpt_kind)

#define INGOT_DECLARE(kind) ModelKind kind();
INGOT_MODEL_KINDS(INGOT_DECLARE)
#undef INGOT_DECLARE

namespace {

std::deque<ModelKind>& kinds() {
#define INGOT_CALL(kind) kind(),
  static std::deque<ModelKind> all = {INGOT_MODEL_KINDS(INGOT_CALL)};
#undef INGOT_CALL
  return all;
}

void check_device(const ModelKind& kind, DeviceChoice device) {
  if (device != DeviceChoice::cuda) return;
  if (gpu::device_count() == 0)  // asked first: without a driver other questions about GPUs are errors
#if defined(INGOT_CUDA_BUILD) || defined(INGOT_EMULATED_DEVICE)
    fail(ErrorCode::unsupported, "device cuda: found no GPU, expected one and its driver");
#else
    fail(ErrorCode::unsupported, "device cuda: found a build without CUDA, expected one made with INGOT_CUDA=ON");
#endif
  if (!kind.cuda)
    fail(ErrorCode::unsupported, "device cuda: found a model of the kind ", kind.name,
         ", which runs on the CPU only, expected device auto or cpu");
}

void check_gpus(const ModelKind& kind, const DecoderOptions& o) {
  if (o.gpus == 1) return;
  if (o.device == DeviceChoice::cpu)
    fail(ErrorCode::usage, "--gpus: found ", o.gpus, " with device cpu, expected device auto or cuda");
  if (!kind.gpus)
    fail(ErrorCode::unsupported, "--gpus: found ", o.gpus, " for a model of the kind ", kind.name,
         ", which runs on one device, expected 1");
}

}  // namespace

void register_model(const ModelKind& kind) {
  INGOT_CHECK(kind.holds && kind.open && kind.vocabulary, "register_model: found '", kind.name,
              "' without all of its functions, expected holds, open and vocabulary");
  kinds().push_front(kind);
}
std::vector<ModelKind> model_kinds() { return {kinds().begin(), kinds().end()}; }

const ModelKind& model_kind_of(const std::string& path) {
  for (const ModelKind& k : kinds())
    if (k.holds(path)) return k;
  fail(exists(path) ? ErrorCode::bad_data : ErrorCode::not_found, path, ": found ", found_instead(path),
       ", expected a run, a checkpoint or a published model",
       exists(path) ? " (a directory, an archive, a GGUF or an .iris file)" : "");
}

namespace {

// Errors name the model's path in place of the archive's.
OpenedModel open_archive_of(const std::string& path, const ModelKind& kind, const std::string& archive,
                            const DecoderOptions& options) {
  try {
    return kind.open(archive, options);
  } catch (const Error& e) {
    std::string message = e.what();
    if (const size_t at = message.find(archive); at != std::string::npos) message.replace(at, archive.size(), path);
    fail(e.code, message);
  }
}

// A temporary archive with dense matrices of this form is mapped in place of the checkpoint.
OpenedModel open_converted(const ModelKind& kind, const std::string& path, const DecoderOptions& options) {
  if (ArchiveFile::is_one(path))
    fail(ErrorCode::usage, "--dense: found an archive, ", path,
         ", expected a checkpoint or a GGUF file; `ingot convert` writes an archive of other forms");
  if (kind.convert == nullptr)
    fail(ErrorCode::usage, "--dense: found ", path, ", a model of the kind ", kind.name,
         ", expected a published checkpoint or a GGUF file");
  const TemporaryArchive archive;
  kind.convert(path, archive.path(), archive_format_named(options.dense));
  OpenedModel m = open_archive_of(path, kind, archive.path(), options);
  m.note += ingot::detail::concat(m.note.empty() ? "" : "; ", "dense matrices became ", options.dense, " at loading, ",
                                  format_bytes(double(m.weight_bytes)), " of weights");
  return m;
}

}  // namespace

OpenedModel open_model(const std::string& path, const DecoderOptions& options) {
  const auto start = Clock::now();
  const ModelKind& kind = model_kind_of(path);
  check_device(kind, options.device);
  check_gpus(kind, options);
  OpenedModel m = options.dense.empty() ? kind.open(path, options) : open_converted(kind, path, options);
  if (!options.draft_head.empty() && !m.decoder->has_draft_head())
    fail(ErrorCode::unsupported, "--draft: found a draft head for a model of the kind ", kind.name,
         ", whose engine has none, expected a published model");
  m.load_seconds = seconds_since(start);
  return m;
}

Vocabulary load_vocabulary(const std::string& path, const VocabularyOptions& options) {
  return model_kind_of(path).vocabulary(path, options);
}

}  // namespace ingot
