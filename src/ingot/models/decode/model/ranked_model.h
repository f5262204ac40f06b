#pragma once
// A model over one GPU or several GPUs of a host, in one process: GPU r is rank r and has a slice of the weights and of
// the key heads (slices.h). All ranks compute each step at the same time. Their kernels write into each other's memory
// and add the parts of a sum in the order of the ranks, so all ranks have the same residual stream, bit for bit, and
// sample the same ids. With one rank the model is a single DeviceModel.
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ingot/models/decode/model/device_model.h"
#include "ingot/models/decode/model/trace.h"

namespace ingot::decode {

// Returns in one line why cuda:0 to cuda:(ranks - 1) cannot share a model: too few GPUs, GPUs that the kernels do not
// support, or no peer access between two GPUs. Empty if they can.
std::string ranks_unsupported_reason(int ranks);

class RankedModel {
 public:
  // One rank for each of options.gpus GPUs; options.split says how the ranks share the weights. Throws
  // Error{unsupported} before any memory is taken if ranks_unsupported_reason() or slices_of() refuse the model.
  RankedModel(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options,
              const draft::DraftHead* head = nullptr);
  // Random weights of these shapes. The weights that all ranks have are equal.
  RankedModel(const DecoderSpec& config, const DecoderWeights& shapes, const DecoderOptions& options, uint64_t seed);
  // The same; with `seed` the weights are random.
  RankedModel(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options,
              const uint64_t* seed, const draft::DraftHead* head);

  int ranks() const { return int(ranks_.size()); }
  DeviceModel& rank(int r) { return *ranks_[size_t(r)]; }
  const DeviceModel& rank(int r) const { return *ranks_[size_t(r)]; }
  const DecoderSpec& config() const { return rank(0).config(); }
  int64_t context() const { return rank(0).context(); }
  int64_t batch() const { return rank(0).batch(); }
  int64_t prompt_batch() const { return rank(0).prompt_batch(); }
  int64_t rows_batch() const { return rank(0).rows_batch(); }
  int64_t length(int slot = 0) const { return rank(0).length(slot); }
  int64_t weight_bytes() const;  // the sum over all ranks

  // These functions are the same as DeviceModel's. An error of a wait names the GPU: "GPU 0: block 3 thread 5 waited
  // 1500 ms for GPU 1 and its part of ..."; afterwards all slots are as before the failed step, and the GPUs remain
  // usable.
  void synchronize();
  bool use_megakernel(bool wanted);
  void extend(std::span<const int32_t> ids, uint32_t head_rows, int slot = 0, uint32_t vocab = 0, bool id_alone = false,
              const sampling::RowNoise& noise = {});
  void continue_sampling(int64_t n, const sampling::RowNoise& noise, int slot = 0, bool id_alone = false);
  void continue_greedily(int64_t n, int slot = 0, bool id_alone = false) { continue_sampling(n, {}, slot, id_alone); }
  int64_t max_sequences() const { return rank(0).max_sequences(); }  // 1 with several ranks
  int64_t fewest_together() const { return rank(0).fewest_together(); }
  void extend_sequences(std::span<const int> slots, std::span<const int32_t> ids, uint32_t vocab = 0);
  bool takes_parts() const { return rank(0).takes_parts(); }
  void extend_parts(std::span<const Decoder::Part> parts) { ranks_[0]->extend_parts(parts); }
  // Appends one token by the megakernel. Returns its stages on the first `blocks` blocks of every GPU, by the clock of
  // the first GPU.
  std::vector<StageSpan> trace_token(uint32_t blocks, int slot = 0);
  int32_t likeliest(int slot = 0);
  std::vector<SlotSampled> sample(std::span<const SlotSample> of);
  int64_t draft_rows() const { return rank(0).draft_rows(); }
  // The first rank samples, and computes the draft head.
  std::vector<std::vector<SlotSampled>> sample_drafts(std::span<const DraftStep> steps);
  bool has_head() const { return rank(0).has_head(); }
  std::vector<int32_t> guess(int slot, int32_t next, int64_t most) { return ranks_[0]->guess(slot, next, most); }
  void logits(uint32_t rows, float* to, int slot = 0);
  bool can_rewind(int64_t length, int slot = 0) const { return rank(0).can_rewind(length, slot); }
  void rewind(int64_t length, int slot = 0);
  bool copy_tokens(int from, int to, int64_t length);
  void fill_cache_with_random(int64_t length, int slot = 0);

 private:
  // Called before any rank's kernels run, because recording a graph may wait for kernels.
  void prepare(int64_t tokens, uint32_t head_rows, int slot, uint32_t vocab, bool id_alone);
  // The same for the kernels of a prompt, because the first launch of a kernel loads its code.
  void prepare_prompt(int64_t tokens, uint32_t head_rows, int slot);
  template <class Call> void on_each(bool side_by_side, Call&& call);
  // Waits for all ranks. Returns which wait gave up first. Throws if a GPU no longer runs kernels of this process.
  std::string wait();
  void share_sampled(int slot);  // if sampled_by_first_ is set for the slot

  std::vector<std::unique_ptr<DeviceModel>> ranks_;
  std::vector<bool> sampled_by_first_;    // by slot: the other ranks do not know the last sampled id
  std::set<std::vector<int>> warmed_up_;  // the sets of prompt kernels whose code is loaded
};

}  // namespace ingot::decode
