#pragma once
// Ingot's families of decoder-only transformers besides GPT-OSS: Llama, Mistral, Qwen, Gemma. All are values of
// DecoderSpec; a family defines the keys of its config.json and of its GGUF files beyond the common keys.
//
// A new family needs a line in families.cpp, the two functions named there, and its rows in the tests.
#include <string>

#include "ingot/models/checkpoint/archive.h"
#include "ingot/models/families/config_reader.h"
#include "ingot/models/families/gguf_reader.h"
#include "ingot/models/spec.h"

namespace ingot {

struct Family {
  const char* model_type;           // of config.json
  const char* architecture = "";    // general.architecture of GGUF files; "": such files have a different family's
  const char* activation = "silu";  // the gate's function, by config.json's name
  // Reads the keys beyond the common keys, which are read before.
  void (*read_config)(ConfigReader& config, DecoderSpec& spec);
  void (*read_gguf)(GgufReader& file, DecoderSpec& spec) = nullptr;
  int64_t default_head_dim = 0;  // where config.json has no head_dim; 0: hidden size / heads
  bool default_tied = false;     // where config.json does not say whether the head is the embedding
  bool paired_rows = false;      // of queries and keys in GGUF files (Read::paired_head)
};
const Family* family_of_model_type(const std::string& model_type);      // null for an unknown model type
const Family* family_of_architecture(const std::string& architecture);  // likewise
std::string known_families();                                           // their model types, for messages

// config.json, with the ids that end an answer from generation_config.json where this file exists; a GGUF file's
// metadata; an archive's description. Error{unsupported} names a key with a value that the spec cannot express.
DecoderSpec read_family_spec(const std::string& path);
DecoderSpec family_spec_from_json(const std::string& text, const std::string& where);
// Converts a directory, a GGUF file or another archive to an archive. Returns the archive's size in bytes.
int64_t convert_family(const std::string& from, const std::string& to, const ConvertOptions& options);
ArchivedModel archived_family(const std::string& path);
// The weights without their memory, and the bytes of this memory: from the headers alone.
DecoderWeights family_shapes(const std::string& path, const DecoderSpec& spec);
int64_t family_weight_bytes(const std::string& path, const DecoderSpec& spec);

// Whether the path holds a model of another architecture than GPT-OSS: a directory whose config.json says so, a GGUF
// file, or an archive that was converted from such a directory or file.
bool is_family(const std::string& path);

}  // namespace ingot
