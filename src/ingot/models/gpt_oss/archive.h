#pragma once
// GPT-OSS models as .ingot archives: vectors as f32, the embedding in rows of bf16, every other matrix in weight tiles
// (kernels/quant/weight_tiles.h), so that the file's bytes are what the kernels read. Tokenizer files travel along.
//   embed, layers.<l>.{attn_norm, qkv, b_qkv, sinks, o, b_o, mlp_norm, router, b_router, gate_up, b_gate_up, down,
//   b_down}, norm, head, files/<name>
// A tied head is written out like any other.
#include <functional>
#include <optional>

#include "ingot/models/gpt_oss/weights.h"

namespace ingot {

// What matrices become: qkv, o and head; the experts. The router stays bf16.
struct GptOssForms {
  WeightFormat dense = WeightFormat::bf16, experts = WeightFormat::mxfp4;
};
void check(const GptOssForms& forms, const GptOssConfig& config, const std::string& where);

struct ConvertOptions {
  GptOssForms forms;
  std::function<void(int64_t, int64_t)> progress;  // bytes of the archive that are written, and all of them
};
// A checkpoint's directory, an .iris or a GGUF file, or another archive, to an archive, one piece of some ten MB at a
// time. What is in its form already is kept bit for bit. Only an archive, or an empty file, is replaced. Returns the
// archive's bytes.
int64_t convert_gpt_oss(const std::string& from, const std::string& to, const ConvertOptions& options = {});

// The published shapes "20b" and "120b", and "small" for tests.
GptOssConfig synthetic_gpt_oss(const std::string& name);
// An archive of random weights at realistic scale, a few MB of it in memory at a time, so that benchmarks and load
// tests need no download. The same seed, config and forms give the same bytes. It has no tokenizer. Returns its bytes.
int64_t write_synthetic_gpt_oss(const GptOssConfig& config, const std::string& to, uint64_t seed = 1,
                                const ConvertOptions& options = {});

GptOssForms gpt_oss_archive_forms(const std::string& path);  // what an archive has

// load_gpt_oss(), gpt_oss_shapes() and gpt_oss_weight_bytes() come here. Mapped, and brought into memory once. One
// that is passed on to a device may be larger than memory, and is read on its way then. An archive that another process
// shortens afterwards ends this one.
GptOssWeights load_gpt_oss_archive(const std::string& path, const GptOssConfig& config, const GptOssLoad& load);
GptOssWeights map_gpt_oss_archive(const std::string& path, const GptOssConfig& config,
                                  const GptOssLoad& load);  // unread
int64_t gpt_oss_archive_bytes(const std::string& path, const GptOssConfig& config, const GptOssLoad& load);
// A file that came with the checkpoint, such as tokenizer.json.
std::vector<std::string> gpt_oss_archived_files(const std::string& path);  // their names
std::optional<std::string> gpt_oss_archived_file(const std::string& path, const std::string& name);

}  // namespace ingot
