#pragma once
// A decoder-only transformer on the CPU, as its spec describes it (models/spec.h). Everything between the weights and
// the logits is fp32.
#include <memory>
#include <span>

#include "ingot/models/decode/cpu/cache.h"
#include "ingot/models/decoder_weights.h"

namespace ingot::decode {

struct CpuModelOptions {
  int64_t batch = 512;    // most tokens of an extend()
  int64_t positions = 0;  // number of positions; 0: the spec's context
};

class CpuModel {
 public:
  // The weights must outlive the model. Runs as many layers as the weights have. Error{unsupported} for a spec that the
  // CPU path does not compute.
  CpuModel(const DecoderSpec& spec, const DecoderWeights& weights, const CpuModelOptions& options = {});
  ~CpuModel();
  CpuModel(CpuModel&&) noexcept;
  static int64_t workspace_bytes(const DecoderSpec& spec, const CpuModelOptions& options);

  const DecoderSpec& spec() const;
  int64_t layers() const;
  int64_t batch() const;
  // The hidden states that a draft head reads: the residual stream behind the first `layers[i]` layers, before any
  // norm.
  struct Boundaries {
    std::vector<int64_t> layers;  // 0: the embedding; layers(): the input of the last norm
    Tensor rows;                  // (at least T, layers.size() * C) f32: a token's states side by side
  };
  // Appends tokens to the cache. Returns (T, C): the last norm's output, the input of logits(); valid until the next
  // call. `kept`, where given, receives hidden states on the way.
  Tensor extend(std::span<const int32_t> ids, KeyValueCache& cache, const Boundaries* kept = nullptr);
  // The same for up to kStepRows tokens. Each row has the same bits as extend() of its token alone: matrix products of
  // so few rows add in an order that does not depend on the number of rows, and attention is computed row by row.
  static constexpr int64_t kStepRows = 8;
  Tensor extend_rows(std::span<const int32_t> ids, KeyValueCache& cache, const Boundaries* kept = nullptr);
  void logits(const Tensor& normed, const Tensor& logits);  // (N, C), (N, V)

 private:
  Tensor compute(std::span<const int32_t> ids, KeyValueCache& cache, bool row_by_row, const Boundaries* kept);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot::decode
