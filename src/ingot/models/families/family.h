#pragma once
// The families of decoder-only transformers that Ingot runs besides GPT-OSS: Llama, Mistral, Qwen, Gemma. All of them
// are values of DecoderSpec; a family is what its config.json and its GGUF files say in a way of their own.
//
// A new family is one line in families.cpp, the two functions that it names, and its rows in the tests.
#include <string>

#include "ingot/models/checkpoint/archive.h"
#include "ingot/models/families/config_reader.h"
#include "ingot/models/families/gguf_reader.h"
#include "ingot/models/spec.h"

namespace ingot {

struct Family {
  const char* model_type;           // of config.json
  const char* architecture = "";    // general.architecture of GGUF files; "": these have another family's
  const char* activation = "silu";  // the gate's function, as config.json names it
  // What lies beyond the common keys, which are read before.
  void (*read_config)(ConfigReader& config, DecoderSpec& spec);
  void (*read_gguf)(GgufReader& file, DecoderSpec& spec) = nullptr;
  int64_t default_head_dim = 0;  // where config.json has no head_dim; 0: hidden size / heads
  bool default_tied = false;     // where config.json does not say whether the head is the embedding
  bool paired_rows = false;      // of queries and keys in GGUF files (Read::paired_head)
};
const Family* family_of_model_type(const std::string& model_type);      // null where it is none
const Family* family_of_architecture(const std::string& architecture);  // likewise
std::string known_families();                                           // their model types, for messages

// config.json, with the ids that end an answer from generation_config.json where this file exists; a GGUF file's
// metadata; what an archive says of itself. Error{unsupported} names a key whose value the spec has no word for.
DecoderSpec read_family_spec(const std::string& path);
DecoderSpec family_spec_from_json(const std::string& text, const std::string& where);
// To an archive, from a directory, a GGUF file or another archive. Returns the archive's bytes.
int64_t convert_family(const std::string& from, const std::string& to, const ConvertOptions& options);
ArchivedModel archived_family(const std::string& path);
// The weights without their memory, and the memory that they take: from the headers alone.
DecoderWeights family_shapes(const std::string& path, const DecoderSpec& spec);
int64_t family_weight_bytes(const std::string& path, const DecoderSpec& spec);

// A directory whose config.json names a model type other than GPT-OSS's, a GGUF file of another architecture than
// GPT-OSS, or an archive that was made of one of these.
bool is_family(const std::string& path);

}  // namespace ingot
