// Registers the models of `ingot train`.
#include "ingot/gpu/device.h"
#include "ingot/io/file.h"
#include "ingot/models/gpt/config/place.h"
#include "ingot/models/gpt/generate/decoder.h"
#include "ingot/models/gpt/generate/device_weights.h"
#include "ingot/models/gpt/trained.h"
#include "ingot/models/registry.h"

namespace ingot {
namespace {

OpenedModel open(const std::string& path, const DecoderOptions& o) {
  if (o.layers > 0)
    fail(ErrorCode::usage, "--layers: found ", o.layers, ", expected none with a model of `ingot train`");
  struct Held : TrainedModel {
    std::vector<float> numbers;
    std::unique_ptr<DeviceAdapters> adapters;
  };
  auto trained = std::make_shared<Held>();
  static_cast<TrainedModel&>(*trained) = load_trained(path);
  const GptPlace place = place_of_gpt(trained->config, o.device);
  const GptAdapters* adapters = nullptr;
  if (!o.adapters.empty()) {
    const SafetensorsFile file(o.adapters);
    require_adapters_of(*trained, file);
    const AdapterLayout layout(trained->config, layer_program(trained->config, trained->looping), adapter_rank(file));
    trained->numbers.resize(size_t(layout.numbers()));
    const Tensor flat(trained->numbers.data(), {layout.numbers()});
    read_adapters(file, layout, flat);
    trained->adapters = std::make_unique<DeviceAdapters>(layout, flat, place.device, Stream());
    gpu::synchronize(place.device, {});  // the decoder uses another stream
    adapters = &trained->adapters->views();
  }
  const int64_t slots = with_default_slots(o, trained->config.context).slots;
  OpenedModel m;
  m.note = place.note;
  if (place.device.kind == Device::cuda)
    m.decoder = make_device_decoder(trained->config, trained->weights, trained->looping, place.device, slots, adapters);
  else
    m.decoder = make_decoder(trained->config, trained->weights, trained->looping, trained->products, slots, adapters);
  if (trained->tokenizer->bos() >= 0) m.end_ids.push_back(trained->tokenizer->bos());
  m.weight_bytes = trained->weights.bytes();
  m.memory = trained;
  return m;
}

Vocabulary vocabulary(const std::string& path, const VocabularyOptions& o) {
  const std::string& tokenizer = o.tokenizer;
  if (o.chat || !o.chat_format.empty())
    fail(ErrorCode::unsupported, path, ": found a model of `ingot train`, expected one that has a chat format");
  Vocabulary v;
  v.tokenizer = trained_tokenizer(path);
  if (!tokenizer.empty()) {  // open() compares the model's own tokenizer with the hash in the model
    const std::shared_ptr<const Tokenizer> given = load_tokenizer(tokenizer);
    if (given->hash() != v.tokenizer->hash())
      fail(ErrorCode::bad_data, tokenizer, ": found a tokenizer of ", given->vocab_size(), " tokens with hash ",
           given->hash(), ", expected the model's, ", v.tokenizer->vocab_size(), " tokens with hash ",
           v.tokenizer->hash());
    v.tokenizer = given;
  }
  v.bpe = dynamic_cast<const ByteBpe*>(v.tokenizer.get());
  v.start = v.tokenizer->bos();
  return v;
}

}  // namespace

ModelKind gpt_kind() {
  return {.name = "gpt", .holds = is_trained, .open = open, .vocabulary = vocabulary, .cuda = true};
}

}  // namespace ingot
