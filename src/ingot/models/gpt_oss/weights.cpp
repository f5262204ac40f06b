#include "ingot/models/gpt_oss/weights.h"

#include "ingot/core/memory/memory.h"
#include "ingot/io/formats/archive.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/models/gpt_oss/checkpoint.h"

namespace ingot {

GptOssWeights load_gpt_oss(const std::string& path, const GptOssConfig& config, const GptOssLoad& load) {
  const int64_t layers = detail::layers_of(config, load);
  if (ArchiveFile::is_one(path))
    return load_model_archive(path, archived_gpt_oss(config),
                              {.layers = layers, .other_bytes = load.other_bytes, .passed_on = load.passed_on});
  const detail::Checkpoint checkpoint(path);
  const int64_t bytes = detail::lay_out(checkpoint, config, layers, nullptr).bytes;
  require_memory(bytes + load.other_bytes, path);
  Arena arena(bytes);
  detail::CheckpointLayout layout = detail::lay_out(checkpoint, config, layers, &arena);
  detail::read_range(layout.reads, layout.weights.embed.data.data, arena.capacity());
  layout.weights.arena = std::move(arena);
  return std::move(layout.weights);
}

GptOssWeights gpt_oss_shapes(const std::string& path, const GptOssConfig& config, const GptOssLoad& load) {
  if (ArchiveFile::is_one(path))
    return map_model_archive(path, archived_gpt_oss(config), detail::layers_of(config, load));
  return detail::lay_out(detail::Checkpoint(path), config, detail::layers_of(config, load), nullptr).weights;
}

int64_t gpt_oss_weight_bytes(const std::string& path, const GptOssConfig& config, const GptOssLoad& load) {
  if (ArchiveFile::is_one(path)) return gpt_oss_shapes(path, config, load).mapped_bytes;
  return detail::lay_out(detail::Checkpoint(path), config, detail::layers_of(config, load), nullptr).bytes;
}

}  // namespace ingot
