// Registers GPT-OSS, from files or with random weights: opens its tokenizer and its decoder.

#include <algorithm>

#include "ingot/core/memory/memory.h"
#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/models/checkpoint/open_decoder.h"
#include "ingot/models/checkpoint/stored_tensors.h"
#include "ingot/models/checkpoint/temporary_archive.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/models/each_weight.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/models/gpt_oss/synthetic.h"
#include "ingot/models/registry.h"
#include "ingot/text/chat/harmony_format.h"

namespace ingot {
namespace {

OpenedModel open(const std::string& path, const DecoderOptions& o) {
  const GptOssConfig config = read_gpt_oss_config(path);
  return open_decoder(config,
                      {.shapes = [&](int64_t layers) { return gpt_oss_shapes(path, config, {.layers = layers}); },
                       .load =
                           [&](int64_t layers, int64_t other_bytes, bool passed_on) {
                             return load_gpt_oss(
                                 path, config, {.layers = layers, .other_bytes = other_bytes, .passed_on = passed_on});
                           }},
                      o);
}

// Whether the vocabulary has every control token of Harmony.
bool has_control_tokens(const ByteBpe& bpe) {
  const auto& specials = bpe.rules().specials;
  const auto has = [&](const char* name) {
    return std::any_of(specials.begin(), specials.end(), [&](const SpecialToken& s) { return s.text == name; });
  };
  for (const char* name : kHarmonyControls)
    if (!has(name)) return false;
  return true;
}

std::unique_ptr<Tokenizer> archived_tokenizer(const std::string& archive) {
  if (const auto json = archived_file(archive, "tokenizer.json"))
    return std::make_unique<ByteBpe>(ByteBpe::parse(*json, archive));
  for (const std::string& name : archived_files(archive))
    if (name.ends_with(".tiktoken"))
      return std::make_unique<ByteBpe>(ByteBpe::parse_tiktoken(*archived_file(archive, name), archive));
  return nullptr;
}

// The tokenizer inside an archive or a GGUF file, or beside the weights.
std::unique_ptr<Tokenizer> tokenizer_of(const std::string& model) {
  const std::string path = checkpoint_source(model);
  if (GgufFile::is_one(path) && GgufFile(path).metadata().count("tokenizer.ggml.tokens") != 0)
    return load_tokenizer(path);
  if (ArchiveFile::is_one(path))
    if (auto inside = archived_tokenizer(path)) return inside;
  if (const std::string directory = snapshot_of(model); is_directory(directory))
    if (const std::string beside = tokenizer_in(directory); !beside.empty()) return load_tokenizer(beside);
  fail(ErrorCode::not_found, model, ": found a model without a tokenizer, expected ",
       is_directory(model) ? "a tokenizer.json or o200k_base.tiktoken beside the weights" : "one in the file",
       ", or --tokenizer FILE");
}

// Refuses a tokenizer that belongs to another model.
Vocabulary vocabulary_of(const GptOssConfig& config, std::shared_ptr<const Tokenizer> tokenizer,
                         const std::string& path, bool chat) {
  Vocabulary v{.tokenizer = std::move(tokenizer)};
  v.bpe = dynamic_cast<const ByteBpe*>(v.tokenizer.get());
  if (!v.bpe)
    fail(ErrorCode::bad_data, path, ": found a tokenizer of the kind ", v.tokenizer->kind(),
         ", expected byte-level BPE, as GPT-OSS has it");
  if (v.bpe->vocab_size() > config.vocab)
    fail(ErrorCode::bad_data, path, ": found a tokenizer of ", v.bpe->vocab_size(), " tokens, expected at most ",
         config.vocab, ", the model's vocabulary");
  if (!chat && !has_control_tokens(*v.bpe)) return v;
  const auto harmony = std::make_shared<HarmonyFormat>(std::shared_ptr<const ByteBpe>(v.tokenizer, v.bpe), path);
  v.chat = harmony;
  // The published tokenizer names fewer tokens than the model has. The ids that end an answer show whether the
  // tokenizer belongs to the model.
  const std::vector<int64_t>& ends = config.end_tokens;
  if (!ends.empty() && std::find(ends.begin(), ends.end(), harmony->tokens().answer_end) == ends.end())
    fail(ErrorCode::bad_data, path, ": found <|return|> with id ", harmony->tokens().answer_end, ", expected ", ends[0],
         ", where the model's answers end: a tokenizer of another vocabulary");
  return v;
}

// Refuses any chat format except Harmony, the only format of these models.
void refuse_other_format(const VocabularyOptions& o) {
  if (!o.chat_format.empty() && o.chat_format != "harmony")
    fail(ErrorCode::usage, "chat format: found \"", o.chat_format.substr(0, 40), "\", expected harmony for GPT-OSS");
}

Vocabulary vocabulary(const std::string& model, const VocabularyOptions& o) {
  refuse_other_format(o);
  const std::string& file = o.tokenizer;
  const bool chat = o.chat || !o.chat_format.empty();
  return vocabulary_of(read_gpt_oss_config(model), file.empty() ? tokenizer_of(model) : load_tokenizer(file),
                       file.empty() ? model : file, chat);
}

int64_t context(const std::string& path) { return read_gpt_oss_config(path).context; }

int64_t convert(const std::string& from, const std::string& to, WeightFormat dense) {
  return convert_gpt_oss(from, to, {.forms = {.dense = dense}});
}

// --- random weights

constexpr uint64_t kSyntheticSeed = 1;

bool holds_synthetic(const std::string& path) { return synthetic_model(path).has_value(); }
GptOssConfig synthetic_config(const std::string& path) { return synthetic_gpt_oss(synthetic_model(path)->size); }

// Writes a temporary archive, maps the file and removes it. An error about memory names the model in place of the file.
GptOssWeights made_on_the_cpu(const std::string& name, const GptOssConfig& config, WeightFormat dense,
                              const GptOssLoad& load) {
  const TemporaryArchive file;
  write_synthetic_gpt_oss(config, file.path(), kSyntheticSeed, {.forms = {.dense = dense}});
  require_memory(gpt_oss_weight_bytes(file.path(), config, load) + load.other_bytes, name);
  return load_gpt_oss(file.path(), config, load);
}

OpenedModel open_synthetic(const std::string& path, const DecoderOptions& asked) {
  const SyntheticModel model = *synthetic_model(path);
  GptOssConfig config = synthetic_gpt_oss(model.size);
  config.e4m3_inputs = asked.e4m3_experts;
  GptOssWeights shapes = decode::shapes_of(config, model.dense, WeightFormat::mxfp4);
  const DecoderPlacement p = place_decoder(config, asked, [&](const DecoderOptions& o) {
    if (o.layers > 0) shapes.layers.resize(size_t(o.layers));
    return gpu_unsupported_reason(config, shapes, o);
  });
  OpenedModel m{.note = "random weights: every answer is random text"};
  m.end_ids.assign(config.end_tokens.begin(), config.end_tokens.end());
  add_placement_notes(m, p, config, {});
  struct Memory {
    GptOssWeights weights;
    std::optional<draft::DraftHead> head;
  };
  const auto memory = std::make_shared<Memory>();
  if (asked.layers > 0) shapes.layers.resize(size_t(asked.layers));
  memory->head = load_head(config, shapes, p);
  const draft::DraftHead* head = memory->head ? &*memory->head : nullptr;
  if (head != nullptr) add_head_note(m, *head);
  if (p.on_gpu) {
    m.weight_bytes = bytes_of_weights(shapes, false);
    m.decoder = make_synthetic_gpu_decoder(config, shapes, p.options, kSyntheticSeed, head);
    return m;
  }
  if (model.size != "small")
    fail(ErrorCode::unsupported, path, ": found no GPU for these weights (", p.unsupported_reason,
         "), expected one, or a model of `ingot convert --synthetic ", model.size, "`, which also runs on a CPU");
  const int64_t layers = asked.layers > 0 ? asked.layers : config.layers;
  memory->weights =
      made_on_the_cpu(path, config, model.dense,
                      {.layers = asked.layers, .other_bytes = decoder_bytes(config, layers, p.options, head)});
  m.decoder = make_decoder(config, memory->weights, p.options, head);
  m.weight_bytes = memory->weights.bytes();
  m.memory = memory;
  return m;
}

Vocabulary synthetic_vocabulary(const std::string& model, const VocabularyOptions& o) {
  refuse_other_format(o);
  const std::string& file = o.tokenizer;
  const bool chat = o.chat || !o.chat_format.empty();
  const GptOssConfig config = synthetic_config(model);
  if (file.empty()) return vocabulary_of(config, std::make_shared<ByteBpe>(synthetic_tokenizer(config)), model, chat);
  return vocabulary_of(config, load_tokenizer(file), file, chat);
}

int64_t synthetic_context(const std::string& path) { return synthetic_config(path).context; }

}  // namespace

ModelKind synthetic_gpt_oss_kind() {
  return {.name = "synthetic gpt-oss",
          .holds = holds_synthetic,
          .open = open_synthetic,
          .vocabulary = synthetic_vocabulary,
          .context = synthetic_context,
          .cuda = true,
          .gpus = true,
          .chats = true};
}

ModelKind gpt_oss_kind() {
  return {.name = "gpt-oss",
          .holds = is_gpt_oss,
          .open = open,
          .vocabulary = vocabulary,
          .context = context,
          .convert = convert,
          .cuda = true,
          .gpus = true,
          .chats = true};
}

}  // namespace ingot
