// Models of `ingot train`, for the registry.
#include "ingot/io/file.h"
#include "ingot/models/gpt/decoder.h"
#include "ingot/models/gpt/trained.h"
#include "ingot/models/registry.h"

namespace ingot {
namespace {

OpenedModel open(const std::string& path, const OpenOptions& o) {
  if (o.layers > 0)
    fail(ErrorCode::usage, "--layers: found ", o.layers, ", expected none with a model of `ingot train`");
  auto trained = std::make_shared<TrainedModel>(load_trained(path));
  OpenedModel m;
  m.decoder = make_decoder(trained->config, trained->weights, trained->looping, trained->products, o.slots);
  if (trained->tokenizer->bos() >= 0) m.end_ids.push_back(trained->tokenizer->bos());
  m.weight_bytes = trained->weights.bytes();
  m.memory = trained;
  return m;
}

Vocabulary vocabulary(const std::string& path, const std::string& tokenizer, bool harmony) {
  if (harmony) fail(ErrorCode::unsupported, path, ": found a model of `ingot train`, expected one that speaks Harmony");
  Vocabulary v;
  v.tokenizer = tokenizer.empty() ? trained_tokenizer(path) : std::shared_ptr(load_tokenizer(tokenizer));
  v.bpe = dynamic_cast<const ByteBpe*>(v.tokenizer.get());
  return v;
}

}  // namespace

ModelKind gpt_kind() { return {.name = "gpt", .holds = is_trained, .open = open, .vocabulary = vocabulary}; }

}  // namespace ingot
