#pragma once
// The kinds of models, and the function that opens a model of any kind: a path in, a decoder out.
//
// A new kind needs its files in models/<kind>/ and a line in registry.cpp. A program that uses the library may add
// kinds at run time instead (register_model); these are tried first.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ingot/kernels/quant/quant.h"
#include "ingot/models/decoder.h"
#include "ingot/models/options.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/chat/chat_format.h"

namespace ingot {

// A model's text.
struct Vocabulary {
  std::shared_ptr<const Tokenizer> tokenizer;
  const ByteBpe* bpe = nullptr;            // the same object, if the tokenizer is byte-level BPE
  std::shared_ptr<const ChatFormat> chat;  // null: the model has no chat format and only continues text
  std::string no_chat;                     // why there is no chat format, where the files tell
  int32_t start = -1;                      // first token of every sequence of the model, such as a raw prompt; -1: none
};
struct VocabularyOptions {
  std::string tokenizer;    // a file; empty: the model's own
  bool chat = false;        // a vocabulary without a chat format is refused
  std::string chat_format;  // one of chat_format_names(), in place of the format in the model's files
};

using OpenOptions = DecoderOptions;  // the name until 0.2

struct OpenedModel {
  std::shared_ptr<const void> memory;  // the memory behind the decoder
  std::unique_ptr<Decoder> decoder;
  std::vector<int32_t> end_ids;  // stop ids of an answer
  int64_t weight_bytes = 0;
  double load_seconds = 0;
  std::string note;  // why a present GPU was not used, or how this decoder differs from the default; or empty
};

struct ModelKind {
  const char* name = "";
  // Whether a path holds such a model, judged by names and small files. open() checks that the model is complete.
  bool (*holds)(const std::string& path) = nullptr;
  OpenedModel (*open)(const std::string& path, const DecoderOptions& options) = nullptr;
  // Returns the model's tokenizer and its chat format.
  Vocabulary (*vocabulary)(const std::string& path, const VocabularyOptions& options) = nullptr;
  // The longest context of the model. Null: the context is known only after opening the model.
  int64_t (*context)(const std::string& path) = nullptr;
  // Writes an archive whose dense matrices have this form and whose experts keep theirs, for DecoderOptions::dense;
  // null: the forms of such models are fixed.
  int64_t (*convert)(const std::string& from, const std::string& to, WeightFormat dense) = nullptr;
  bool cuda = false;   // open() serves DeviceChoice::cuda
  bool gpus = false;   // and runs on several GPUs
  bool chats = false;  // vocabularies have a chat format if their tokens include those of a known format
};

void register_model(const ModelKind& kind);  // before any thread opens a model
std::vector<ModelKind> model_kinds();        // in the order of trial
const ModelKind& model_kind_of(const std::string& path);

// Error{not_found} for a missing path, Error{bad_data} for a path without a model, Error{unsupported} where this build,
// machine or kind cannot run on the requested device.
OpenedModel open_model(const std::string& path, const DecoderOptions& options = {});
Vocabulary load_vocabulary(const std::string& path, const VocabularyOptions& options = {});

}  // namespace ingot
