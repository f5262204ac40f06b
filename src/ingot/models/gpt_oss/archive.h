#pragma once
// GPT-OSS models as .ingot archives (models/checkpoint/archive.h).
#include <optional>
#include <string>
#include <vector>

#include "ingot/models/checkpoint/archive.h"
#include "ingot/models/gpt_oss/weights.h"

namespace ingot {

using GptOssForms = ArchiveForms;

// Converts a checkpoint's directory, an .iris or a GGUF file, or another archive, to an archive. Returns the archive's
// size in bytes.
int64_t convert_gpt_oss(const std::string& from, const std::string& to, const ConvertOptions& options = {});

// The published shapes "20b" and "120b", and "small" for tests.
GptOssConfig synthetic_gpt_oss(const std::string& name);
// Writes an archive of random weights, so that benchmarks and load tests need no download. Returns the archive's size
// in bytes.
int64_t write_synthetic_gpt_oss(const GptOssConfig& config, const std::string& to, uint64_t seed = 1,
                                const ConvertOptions& options = {});

GptOssForms gpt_oss_archive_forms(const std::string& path);  // the formats in an archive
ArchivedModel archived_gpt_oss(const GptOssConfig& config);

}  // namespace ingot
