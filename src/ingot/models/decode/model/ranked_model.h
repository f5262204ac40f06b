#pragma once
// GPT-OSS over one GPU or several of one host, in one process: GPU r is rank r and has a slice of the weights and of
// the key heads (slices.h). All steps are made by all ranks at once; their kernels write into each other's memory and
// add in the order of ranks, so all have the same residual stream, bit for bit, and draw the same ids. One rank is a
// DeviceModel alone.
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ingot/models/decode/model/device_model.h"
#include "ingot/models/decode/model/trace.h"

namespace ingot::decode {

// What keeps cuda:0 to cuda:(ranks - 1) from sharing a model, in a line; empty where nothing does: too few GPUs, GPUs
// that the kernels do not run on, no peer access between two of them.
std::string ranks_unsupported_reason(int ranks);

class RankedModel {
 public:
  // One rank a GPU, options.gpus of them; options.split says how they share the weights. Error{unsupported} before any
  // memory is taken where ranks_unsupported_reason() or slices_of() refuse.
  RankedModel(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options);
  // Random weights of these shapes; what all ranks have is the same.
  RankedModel(const DecoderSpec& config, const DecoderWeights& shapes, const DecoderOptions& options, uint64_t seed);

  int ranks() const { return int(ranks_.size()); }
  DeviceModel& rank(int r) { return *ranks_[size_t(r)]; }
  const DeviceModel& rank(int r) const { return *ranks_[size_t(r)]; }
  const DecoderSpec& config() const { return rank(0).config(); }
  int64_t context() const { return rank(0).context(); }
  int64_t batch() const { return rank(0).batch(); }
  int64_t prompt_batch() const { return rank(0).prompt_batch(); }
  int64_t rows_batch() const { return rank(0).rows_batch(); }
  int64_t length(int slot = 0) const { return rank(0).length(slot); }
  int64_t weight_bytes() const;  // of all ranks

  // As DeviceModel's. Errors of waits name the GPU: "GPU 0: block 3 thread 5 waited 1500 ms for GPU 1 and its part of
  // ..."; all slots are then as before the token that hung, and the GPUs usable.
  void synchronize();
  bool use_megakernel(bool wanted);
  void extend(std::span<const int32_t> ids, uint32_t head_rows, int slot = 0, uint32_t vocab = 0, bool id_alone = false,
              const sampling::RowNoise& noise = {});
  void continue_sampling(int64_t n, const sampling::RowNoise& noise, int slot = 0, bool id_alone = false);
  void continue_greedily(int64_t n, int slot = 0, bool id_alone = false) { continue_sampling(n, {}, slot, id_alone); }
  int64_t most_streams() const { return rank(0).most_streams(); }  // 1 with several ranks
  void extend_streams(std::span<const int> slots, std::span<const int32_t> ids, uint32_t vocab = 0);
  bool takes_parts() const { return rank(0).takes_parts(); }
  void extend_parts(std::span<const Decoder::Part> parts) { ranks_[0]->extend_parts(parts); }
  // The same once, by the megakernel: its stages on the first `blocks` blocks of every GPU, by the first one's clock.
  std::vector<StageSpan> trace_token(uint32_t blocks, int slot = 0);
  int32_t likeliest(int slot = 0);
  std::vector<SlotSampled> sample(std::span<const SlotSample> of);
  void logits(uint32_t rows, float* to, int slot = 0);
  bool can_rewind(int64_t length, int slot = 0) const { return rank(0).can_rewind(length, slot); }
  void rewind(int64_t length, int slot = 0);
  bool copy_tokens(int from, int to, int64_t length);
  void pretend(int64_t length, int slot = 0);

 private:
  RankedModel(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options,
              const uint64_t* seed);
  // Before any rank's kernels run: making a graph may wait for them.
  void prepare(int64_t tokens, uint32_t head_rows, int slot, uint32_t vocab, bool id_alone);
  // The same of a prompt's kernels: the first launch of each loads its code.
  void prepare_prompt(int64_t tokens, uint32_t head_rows, int slot);
  template <class Call> void on_each(bool side_by_side, Call&& call);
  // For all ranks: who waited for what. Error where a GPU runs no kernels of this process any more.
  std::string wait();
  void share_drawn(int slot);  // where drawn_by_first_

  std::vector<std::unique_ptr<DeviceModel>> ranks_;
  std::vector<bool> drawn_by_first_;      // by slot: the other ranks do not know the last id
  std::set<std::vector<int>> rehearsed_;  // kernels of prompts
};

}  // namespace ingot::decode
