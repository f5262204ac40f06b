#pragma once
// GPT-OSS with its weights, cache and activations in a GPU's memory. One sequence.
#include <map>
#include <memory>
#include <span>
#include <tuple>

#include "ingot/gpu/device.h"
#include "ingot/models/gpt_oss/decode/decode.h"
#include "ingot/models/gpt_oss/weights.h"

namespace ingot::gpt_oss_decode {

struct DeviceModelOptions {
  int64_t context = 0;  // 0: the model's
  int device = 0;
};

// Weights of the config's shapes without memory: what a synthetic model is made of.
GptOssWeights shapes_of(const GptOssConfig& config, WeightFormat dense, WeightFormat experts);

class DeviceModel {
 public:
  // What a model will take of the GPU's memory.
  static int64_t bytes(const GptOssConfig& config, const GptOssWeights& weights, const DeviceModelOptions& options);
  // Copies the weights, which may be gone afterwards. f32 matrices become bf16. Too little memory is said before any
  // is taken.
  DeviceModel(const GptOssConfig& config, const GptOssWeights& weights, const DeviceModelOptions& options);
  // Random weights of these shapes at realistic scale, made on the GPU.
  DeviceModel(const GptOssConfig& config, const GptOssWeights& shapes, const DeviceModelOptions& options,
              uint64_t seed);

  const Model& model() const { return model_; }
  const Buffers& buffers() const { return buffers_; }
  const GptOssConfig& config() const { return model_.config; }
  int64_t context() const { return context_; }
  int64_t batch() const { return max_columns(model_.config); }
  int64_t length() const { return length_; }
  int64_t weight_bytes() const { return weight_bytes_; }
  Stream stream() const { return *stream_; }

  // Appends 1 to batch() tokens and starts computing the logits of the last head_rows of them: 0, 1 or all.
  void extend(std::span<const int32_t> ids, uint32_t head_rows);
  // Appends what the last step found likeliest, n times.
  void continue_greedily(int64_t n);
  // Waits. What the last step found; Error(numeric) for logits that are not numbers.
  int32_t likeliest();
  void logits(uint32_t rows, float* to);  // (rows, V), host memory
  bool can_rewind(int64_t length) const;
  void rewind(int64_t length);

 private:
  DeviceModel(const GptOssConfig& config, const GptOssWeights& weights, const DeviceModelOptions& options,
              const uint64_t* seed);
  gpu::Graph& graph(uint32_t T, uint32_t head_rows);
  void grow(int64_t tokens);

  Model model_;
  Buffers buffers_;
  int64_t context_, ring_, length_ = 0, valid_from_ = 0, weight_bytes_ = 0;
  int device_;
  Arena arena_;
  std::unique_ptr<gpu::OwnedStream> stream_;
  std::map<std::pair<uint32_t, uint32_t>, std::unique_ptr<gpu::Graph>> graphs_;
};

// Random numbers of deviation `scale` as granules; fp8's row scales too.
void fill_granules(const WeightMatrix& w, double scale, uint64_t seed, Stream stream);
void fill_normal(void* to, DType dtype, int64_t n, double scale, double mean, uint64_t seed, Stream stream);

}  // namespace ingot::gpt_oss_decode
