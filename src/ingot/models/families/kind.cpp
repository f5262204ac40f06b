// The families for the registry: their tokenizers and their decoder.
#include "ingot/core/memory/memory.h"
#include "ingot/io/file.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/models/checkpoint/open_decoder.h"
#include "ingot/models/families/family.h"
#include "ingot/models/families/weights.h"

namespace ingot {
namespace {

DecoderWeights load(const std::string& path, const DecoderSpec& spec, int64_t layers, int64_t other_bytes) {
  const detail::Checkpoint checkpoint(path);
  const int64_t bytes = lay_out_family(checkpoint, spec, layers, nullptr).bytes;
  require_memory(bytes + other_bytes, path);
  Arena arena(bytes);
  detail::CheckpointLayout layout = lay_out_family(checkpoint, spec, layers, &arena);
  detail::read_range(layout.reads, layout.weights.embed.data.data, arena.capacity());
  layout.weights.arena = std::move(arena);
  return std::move(layout.weights);
}

OpenedModel open(const std::string& path, const DecoderOptions& o) {
  const DecoderSpec spec = read_family_spec(path);
  return open_decoder(
      spec,
      {.shapes =
           [&](int64_t layers) { return lay_out_family(detail::Checkpoint(path), spec, layers, nullptr).weights; },
       .load = [&](int64_t layers, int64_t other_bytes, bool) { return load(path, spec, layers, other_bytes); }},
      o);
}

// The one in the GGUF file, or beside the weights.
std::unique_ptr<Tokenizer> tokenizer_of(const std::string& model) {
  const std::string path = checkpoint_source(model);
  if (GgufFile::is_one(path) && GgufFile(path).metadata().count("tokenizer.ggml.tokens") != 0)
    return load_tokenizer(path);
  if (const std::string directory = snapshot_of(model); is_directory(directory))
    if (const std::string beside = tokenizer_in(directory); !beside.empty()) return load_tokenizer(beside);
  fail(ErrorCode::not_found, model, ": found a model without a tokenizer, expected ",
       is_directory(model) ? "a tokenizer.json beside the weights" : "one in the file", ", or --tokenizer FILE");
}

Vocabulary vocabulary(const std::string& model, const std::string& file, bool) {
  const DecoderSpec spec = read_family_spec(model);
  Vocabulary v;
  v.tokenizer = file.empty() ? tokenizer_of(model) : load_tokenizer(file);
  v.bpe = dynamic_cast<const ByteBpe*>(v.tokenizer.get());
  if (v.tokenizer->vocab_size() > spec.vocab)
    fail(ErrorCode::bad_data, file.empty() ? model : file, ": found a tokenizer of ", v.tokenizer->vocab_size(),
         " tokens, expected at most ", spec.vocab, ", the model's vocabulary");
  return v;
}

int64_t context(const std::string& path) { return read_family_spec(path).context; }

}  // namespace

ModelKind family_kind() {
  return {.name = "decoder",
          .holds = is_family,
          .open = open,
          .vocabulary = vocabulary,
          .context = context,
          .cuda = true,
          .gpus = true,
          .chats = true};
}

}  // namespace ingot
