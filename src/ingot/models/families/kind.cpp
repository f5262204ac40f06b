// The families for the registry: their tokenizers and their decoder.
#include <algorithm>
#include <set>

#include "ingot/core/memory/memory.h"
#include "ingot/core/progress.h"
#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/io/json.h"
#include "ingot/models/checkpoint/open_decoder.h"
#include "ingot/models/families/family.h"
#include "ingot/models/families/text.h"
#include "ingot/models/families/weights.h"
#include "ingot/text/chat/templates.h"
#include "ingot/text/sentencepiece.h"

namespace ingot {
namespace {

DecoderWeights load(const std::string& path, const DecoderSpec& spec, int64_t layers, int64_t other_bytes,
                    bool passed_on) {
  if (ArchiveFile::is_one(path))
    return load_model_archive(path, archived_family(path),
                              {.layers = layers, .other_bytes = other_bytes, .passed_on = passed_on});
  const detail::Checkpoint checkpoint(path);
  const int64_t bytes = lay_out_family(checkpoint, spec, layers, nullptr).bytes;
  require_memory(bytes + other_bytes, path);
  Arena arena(bytes);
  detail::CheckpointLayout layout = lay_out_family(checkpoint, spec, layers, &arena);
  detail::read_range(layout.reads, layout.weights.embed.data.data, arena.capacity());
  layout.weights.arena = std::move(arena);
  return std::move(layout.weights);
}

// Where a GGUF file's blocks become bf16: their types, and the memory of all weights.
std::string dequantised_note(const std::string& path, int64_t bytes) {
  if (!GgufFile::is_one(path)) return "";
  const GgufSet set(path);
  std::set<std::string> types;
  for (const auto& file : set.files())
    for (const SafetensorsEntry& e : file->entries())
      if (gguf_block(e.dtype).numbers > 1 && e.dtype != "MXFP4") types.insert(e.dtype);
  std::string names;
  for (const std::string& t : types) names += (names.empty() ? "" : ", ") + t;
  if (names.empty()) return "";
  return ingot::detail::concat(
      names, " became bf16 in memory, ", format_bytes(double(bytes)),
      " of weights; --dense fp8 makes them smaller, and `ingot convert` writes such an archive");
}

OpenedModel open(const std::string& path, const DecoderOptions& o) {
  const DecoderSpec spec = read_family_spec(path);
  const auto shapes = [&](int64_t layers) {
    if (ArchiveFile::is_one(path)) return map_model_archive(path, archived_family(path), layers);
    return lay_out_family(detail::Checkpoint(path), spec, layers, nullptr).weights;
  };
  const auto read = [&](int64_t layers, int64_t other_bytes, bool passed_on) {
    return load(path, spec, layers, other_bytes, passed_on);
  };
  OpenedModel m = open_decoder(spec, {.shapes = shapes, .load = read}, o);
  if (const std::string note = dequantised_note(path, m.weight_bytes); !note.empty())
    m.note += (m.note.empty() ? "" : "; ") + note;
  return m;
}

// The tokenizer in the archive or the GGUF file, or beside the weights.
std::unique_ptr<Tokenizer> tokenizer_of(const std::string& model) {
  const std::string path = checkpoint_source(model);
  if (ArchiveFile::is_one(path)) {
    if (const auto model_file = archived_file(path, "tokenizer.model"))
      return std::make_unique<SentencePiece>(SentencePiece::parse(*model_file, path));
    if (const auto text = archived_file(path, "tokenizer.json")) return parse_tokenizer_json(*text, path);
  }
  if (GgufFile::is_one(path) && GgufFile(path).metadata().count("tokenizer.ggml.tokens") != 0)
    return load_tokenizer(path);
  if (const std::string directory = snapshot_of(model); is_directory(directory))
    if (const std::string beside = tokenizer_in(directory); !beside.empty()) return load_tokenizer(beside);
  fail(ErrorCode::not_found, model, ": found a model without a tokenizer, expected ",
       is_directory(model) ? "a tokenizer.json or tokenizer.model beside the weights" : "one in the file",
       ", or --tokenizer FILE");
}

// The chat format named in the options, or given by the model's template.
void find_chat_format(const std::string& model, const VocabularyOptions& o, Vocabulary& v) {
  const std::string where = o.tokenizer.empty() ? model : o.tokenizer;
  std::string name = o.chat_format, default_system;
  if (name.empty()) {
    const std::string text = chat_template_of(checkpoint_source(model));
    name = chat_format_of_template(text);
    if (const auto system = default_system_of_template(text)) default_system = system->text;
    std::string known;
    for (const std::string& n : chat_format_names()) known += (known.empty() ? "" : ", ") + n;
    if (name.empty())
      v.no_chat = ingot::detail::concat(
          "found ", text.empty() ? "no chat template" : "a chat template that is not known",
          ", expected --chat-format NAME (", known, "), or `ingot generate --raw` to continue the prompt as it is");
  }
  if (v.no_chat.empty()) {
    try {
      v.chat = make_chat_format(name, v.tokenizer, where, default_system);
    } catch (const Error& e) {  // a model without a chat format can still continue texts
      if (o.chat || !o.chat_format.empty()) throw;
      v.no_chat = e.what();  // without the file's name, because the caller's message contains this name
      if (v.no_chat.starts_with(where + ": ")) v.no_chat.erase(0, where.size() + 2);
    }
  }
  if (!v.no_chat.empty() && (o.chat || !o.chat_format.empty())) fail(ErrorCode::unsupported, where, ": ", v.no_chat);
}

Vocabulary vocabulary(const std::string& model, const VocabularyOptions& o) {
  const DecoderSpec spec = read_family_spec(model);
  Vocabulary v;
  v.tokenizer = o.tokenizer.empty() ? tokenizer_of(model) : load_tokenizer(o.tokenizer);
  v.bpe = dynamic_cast<const ByteBpe*>(v.tokenizer.get());
  // A control token may have an id beyond the model's vocabulary, like Gemma's image token in text-only models. Such a
  // token never occurs: no text is encoded to it, and it is never sampled.
  const auto specials = v.tokenizer->specials();
  const int64_t above =
      std::count_if(specials.begin(), specials.end(), [&](const auto& s) { return s.id >= spec.vocab; });
  if (v.tokenizer->vocab_size() - above > spec.vocab)
    fail(ErrorCode::bad_data, o.tokenizer.empty() ? model : o.tokenizer, ": found a tokenizer of ",
         v.tokenizer->vocab_size(), " tokens, expected at most ", spec.vocab, ", the model's vocabulary");
  if (!o.tokenizer.empty())
    v.start = start_token_of(o.tokenizer);
  else
    v.start = ArchiveFile::is_one(model) ? int32_t(spec.start_token) : start_token_of(checkpoint_source(model));
  find_chat_format(model, o, v);
  return v;
}

int64_t context(const std::string& path) { return read_family_spec(path).context; }

int64_t convert(const std::string& from, const std::string& to, WeightFormat dense) {
  return convert_family(from, to, {.forms = {.dense = dense, .experts = WeightFormat::bf16}});
}

}  // namespace

ModelKind family_kind() {
  return {.name = "decoder",
          .holds = is_family,
          .open = open,
          .vocabulary = vocabulary,
          .context = context,
          .convert = convert,
          .cuda = true,
          .gpus = true,
          .chats = true};
}

}  // namespace ingot
