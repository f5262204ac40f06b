// GPT-OSS for the registry: its tokenizer and its decoder.
#include <algorithm>

#include "ingot/gpu/device.h"
#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/models/registry.h"
#include "ingot/text/chat/harmony_format.h"

namespace ingot {
namespace {

OpenedModel open(const std::string& path, const DecoderOptions& asked) {
  DecoderOptions o = asked;
  GptOssConfig config = read_gpt_oss_config(path);
  config.e4m3_inputs = o.e4m3_experts;
  if (o.layers > config.layers)
    fail(ErrorCode::usage, "--layers: found ", o.layers, ", expected at most ", config.layers, ", the model's");
  if (o.context > config.context)
    fail(ErrorCode::usage, "found ", o.context, " tokens, expected at most ", config.context, ", the model's context");
  // A prompt shorter than a batch needs no room for more.
  o.batch = std::min(o.batch, o.context > 0 ? o.context : config.context);
  if (o.gpus > 1)
    if (const std::string unsupported_reason = gpus_unsupported_reason(config, o); !unsupported_reason.empty())
      fail(ErrorCode::unsupported, "--gpus ", o.gpus, ": ", unsupported_reason);
  // From the headers: who has no room reads nothing.
  std::string unsupported_reason =
      o.device == DeviceChoice::cpu ? "the CPU was asked for" : gpus_unsupported_reason(config, o);
  if (unsupported_reason.empty())
    unsupported_reason = gpu_unsupported_reason(config, gpt_oss_shapes(path, config, {.layers = o.layers}), o);
  const bool on_gpu = o.device == DeviceChoice::cuda || o.gpus > 1 || unsupported_reason.empty();
  if (on_gpu && !unsupported_reason.empty()) fail(ErrorCode::unsupported, "device cuda: ", unsupported_reason);
  const int64_t layers = o.layers > 0 ? o.layers : config.layers;
  auto weights = std::make_shared<GptOssWeights>(load_gpt_oss(
      path, config,
      {.layers = o.layers, .other_bytes = on_gpu ? 0 : decoder_bytes(config, layers, o), .passed_on = on_gpu}));
  OpenedModel m;
  m.decoder = on_gpu ? make_gpu_decoder(config, *weights, o) : make_decoder(config, *weights, o);
  if (o.device == DeviceChoice::automatic && !unsupported_reason.empty() && gpu::device_count() > 0)
    m.note = "on the CPU: " + unsupported_reason;
  if (on_gpu)
    if (const std::string rounding = gpu_rounding(*weights); !rounding.empty()) m.note = "on the GPU: " + rounding;
  if (on_gpu && o.e4m3_experts)
    m.note += (m.note.empty() ? "on the GPU: " : "; ") +
              std::string("tokens by a launch a phase for --quant, not by the megakernel");
  m.end_ids.assign(config.end_tokens.begin(), config.end_tokens.end());
  m.weight_bytes = weights->bytes();
  if (m.decoder->device().kind == Device::cpu) m.memory = weights;  // a GPU has its own
  return m;
}

// All of those without which there is no conversation.
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
  if (const auto json = gpt_oss_archived_file(archive, "tokenizer.json"))
    return std::make_unique<ByteBpe>(ByteBpe::parse(*json, archive));
  for (const std::string& name : gpt_oss_archived_files(archive))
    if (name.ends_with(".tiktoken"))
      return std::make_unique<ByteBpe>(ByteBpe::parse_tiktoken(*gpt_oss_archived_file(archive, name), archive));
  return nullptr;
}

// The one inside an archive or a GGUF file, or beside the weights.
std::unique_ptr<Tokenizer> tokenizer_of(const std::string& model) {
  const std::string path = gpt_oss_source(model);
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
Vocabulary vocabulary(const std::string& model, const std::string& file, bool chat) {
  const GptOssConfig config = read_gpt_oss_config(model);
  const std::string path = file.empty() ? model : file;
  Vocabulary v;
  v.tokenizer = file.empty() ? tokenizer_of(model) : load_tokenizer(path);
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
  // The published tokenizer names fewer tokens than the model has; where the answer ends tells whether it is the
  // model's.
  const std::vector<int64_t>& ends = config.end_tokens;
  if (!ends.empty() && std::find(ends.begin(), ends.end(), harmony->tokens().answer_end) == ends.end())
    fail(ErrorCode::bad_data, path, ": found <|return|> with id ", harmony->tokens().answer_end, ", expected ", ends[0],
         ", where the model's answers end: a tokenizer of another vocabulary");
  return v;
}

int64_t context(const std::string& path) { return read_gpt_oss_config(path).context; }

}  // namespace

ModelKind gpt_oss_kind() {
  return {.name = "gpt-oss",
          .holds = is_gpt_oss,
          .open = open,
          .vocabulary = vocabulary,
          .context = context,
          .cuda = true,
          .gpus = true,
          .chats = true};
}

}  // namespace ingot
