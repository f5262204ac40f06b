#pragma once
// The kinds of models, and the one way to open a model whatever its kind: a path in, a decoder out.
//
// A new kind is its files in models/<kind>/ and one line in registry.cpp. A program of its own may add kinds at run
// time instead (register_model), which are asked first.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ingot/models/decoder.h"
#include "ingot/models/options.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/chat/chat_format.h"

namespace ingot {

// A model's text.
struct Vocabulary {
  std::shared_ptr<const Tokenizer> tokenizer;
  const ByteBpe* bpe = nullptr;            // the same, where it is byte-level BPE
  std::shared_ptr<const ChatFormat> chat;  // null: the model has no chat format and only continues text
  std::string no_chat;                     // why there is no chat format, where the files tell
  int32_t start = -1;  // begins every sequence of the model, such as a prompt that is continued as it is; -1: none does
};
struct VocabularyOptions {
  std::string tokenizer;    // a file; empty: the model's own
  bool chat = false;        // a vocabulary without a chat format is refused
  std::string chat_format;  // of chat_format_names(), in the place of the one that the model's files tell
};

using OpenOptions = DecoderOptions;  // the name until 0.2

struct OpenedModel {
  std::shared_ptr<const void> memory;  // what the decoder reads
  std::unique_ptr<Decoder> decoder;
  std::vector<int32_t> end_ids;  // ids that end an answer
  int64_t weight_bytes = 0;
  double load_seconds = 0;
  std::string note;  // why no GPU was taken although there is one, or what it does otherwise than usual; or empty
};

struct ModelKind {
  const char* name = "";
  // Whether a path holds such a model, told from names and small files. Whether it is whole, open() finds out.
  bool (*holds)(const std::string& path) = nullptr;
  OpenedModel (*open)(const std::string& path, const DecoderOptions& options) = nullptr;
  // Its text and its chat format.
  Vocabulary (*vocabulary)(const std::string& path, const VocabularyOptions& options) = nullptr;
  // The longest context of the model; null: opening the model tells.
  int64_t (*context)(const std::string& path) = nullptr;
  bool cuda = false;   // open() serves DeviceChoice::cuda
  bool gpus = false;   // and several of them
  bool chats = false;  // vocabularies have a chat format where their tokens allow one
};

void register_model(const ModelKind& kind);  // before other threads look
std::vector<ModelKind> model_kinds();        // in the order they are asked
const ModelKind& model_kind_of(const std::string& path);

// Error{not_found} where there is nothing, Error{bad_data} where there is no model, Error{unsupported} where this
// build, machine or kind cannot run on the device that was asked for.
OpenedModel open_model(const std::string& path, const DecoderOptions& options = {});
Vocabulary load_vocabulary(const std::string& path, const VocabularyOptions& options = {});

}  // namespace ingot
