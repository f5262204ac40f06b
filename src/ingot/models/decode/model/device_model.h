#pragma once
// GPT-OSS with its weights, caches and activations in a GPU's memory.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>

#include "ingot/gpu/device.h"
#include "ingot/gpu/watch.h"
#include "ingot/models/decode/batch/batch.h"
#include "ingot/models/decode/model/sampling.h"
#include "ingot/models/decode/phased/decode.h"
#include "ingot/models/decode/prompt/prompt.h"
#include "ingot/models/decode/row_kernel/row_kernel.h"
#include "ingot/models/decode/small_batch/batched_sequences.h"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/models/decoder_weights.h"
#include "ingot/models/host_sampling.h"
#include "ingot/models/options.h"

namespace ingot::decode {

class DeviceModel {
 public:
  // What a model will take of the GPU's memory.
  static int64_t bytes(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options,
                       int rank = 0);
  // The same options, without the int8 prefilter where the memory of one of the GPUs has no room for its part: all
  // ranks of a step must leave the same.
  static DecoderOptions fit_to_memory(const DecoderSpec& config, const DecoderWeights& weights, DecoderOptions options);
  // Copies the weights, which may be gone afterwards. f32 matrices become bf16. Too little memory is said before any
  // is taken.
  DeviceModel(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options);
  // Random weights of these shapes at realistic scale, made on the GPU.
  DeviceModel(const DecoderSpec& config, const DecoderWeights& shapes, const DecoderOptions& options, uint64_t seed);
  // Rank `rank` of options.gpus, on the GPU of that number, with its slice of the model (ranked_model.h makes all
  // ranks). With a seed the weights are random.
  DeviceModel(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options, int rank,
              const uint64_t* seed);

  const DecoderSpec& config() const { return slots_[0].model.config; }
  int64_t context() const { return context_; }
  int64_t batch() const { return max_step_tokens(config()); }
  int64_t prompt_batch() const { return prompt_tokens_; }  // what extend() takes where no logits but the last are asked
  int64_t rows_batch() const { return std::max(batch(), std::min(prompt_batch(), kPromptRows)); }  // where all are
  int64_t length(int slot = 0) const { return slots_[size_t(slot)].length; }
  int64_t weight_bytes() const { return weight_bytes_; }
  Stream stream() const { return *stream_; }
  const Model& model(int slot = 0) const { return slots_[size_t(slot)].model; }
  const Buffers& buffers(int slot = 0) const { return slots_[size_t(slot)].buffers; }
  const PromptBuffers& prompt_buffers() const { return prompt_; }
  const LayerStages* stages(int slot = 0) const { return slots_[size_t(slot)].stages; }
  // Of several ranks each must be told of all, in order, before its first step.
  void connect(std::span<const std::unique_ptr<DeviceModel>> all);
  // Ready for the next step after one whose waits gave up, here or on another rank, as if it had not been: the token
  // that hung is not among the slots'. Waits. The first slot that had one; 0 where none had.
  int reset();
  std::string place_in(int slot) const;  // where it is, for errors
  // Waits for what was started. Who waited for what, where a wait of this GPU was the first to give up; else empty.
  std::string wait();
  // The same, with Error(interrupted), and all slots as before the token that hung.
  void synchronize();
  // Ends what is under way, as another rank cannot do its part.
  void request_stop() { waits_->request_stop(); }
  int device() const { return device_; }

  // From the next step on. False where it is wanted and does not take the model: nothing changes.
  bool use_megakernel(bool wanted);
  // The same of steps of 2 to 8 rows and the row kernel.
  bool use_row_kernel(bool wanted);
  bool has_prefilter() const { return model().prefilter.rows != nullptr; }

  // What prompt_kernels() says of a prompt of so many tokens.
  std::vector<int> kernels_of_prompt(int64_t tokens, uint32_t head_rows) const;
  // Launches them all, so that their code is loaded, and waits for no other GPU. What they compute is nonsense: every
  // rank must reset() before it goes on.
  void rehearse_prompt(int64_t tokens, uint32_t head_rows, int slot = 0);
  // Makes what extend() of so many tokens launches. It may allocate, and so wait for other GPUs' kernels.
  void prepare(int64_t tokens, uint32_t head_rows, int slot = 0, uint32_t vocab = 0, bool id_alone = false);
  // Appends 1 to batch() tokens, or with head_rows of at most 1 up to prompt_batch(), with all up to rows_batch(), and
  // starts computing the logits of the last head_rows of them: 0, 1 or all. Ids from `vocab` on are not sampled; 0: all
  // may be. `id_alone`: nobody will ask for the logits, so an int8 prefilter may be used; the id is the same. The id is
  // that of the largest logit, of the megakernel that of the largest sum of logit and noise.
  void extend(std::span<const int32_t> ids, uint32_t head_rows, int slot = 0, uint32_t vocab = 0, bool id_alone = false,
              const sampling::RowNoise& noise = {});
  // Appends what the last step sampled, n times. The megakernel counts the step of the noise.
  void continue_sampling(int64_t n, const sampling::RowNoise& noise, int slot = 0, bool id_alone = false);
  void continue_greedily(int64_t n, int slot = 0, bool id_alone = false) { continue_sampling(n, {}, slot, id_alone); }
  // One token to each of several slots, by one pass over the weights; every slot then has its logits and what it found
  // likeliest. The numbers of a sequence are those of the phased path or, in steps of many sequences, of the matrix
  // kernels, which differ from the megakernel's by roundings.
  int64_t most_streams() const { return most_streams_; }
  // For tests and measurements: steps of more sequences than this take the matrix kernels, where the model takes them.
  void limit_small_batch(int64_t sequences);
  bool takes_matrix_kernels(int64_t sequences) const { return sequences > most_small_batch_; }
  void extend_streams(std::span<const int> slots, std::span<const int32_t> ids, uint32_t vocab = 0);
  // The same n times, of what each found likeliest.
  void continue_streams(std::span<const int> slots, int64_t n);
  // Parts of the prompts of several slots, of prompt_batch() tokens in all, by one pass of the matrix kernels; every
  // slot then has the logits of its part's last token and what it found likeliest.
  bool takes_parts() const { return most_streams_ > 1 && prompt_tokens_ > batch(); }
  void extend_parts(std::span<const Decoder::Part> parts);
  const BatchedSequences& streams() const { return streams_; }
  const Buffers& stream_buffers() const { return streams_buffers_; }
  // The same once, by the megakernel, keeping its times in `trace`, of trace_of(...): prepared first, as it may wait
  // for other GPUs' kernels.
  void prepare_trace(const megakernel::Trace& trace, int slot = 0);
  void continue_traced(int slot = 0);
  // Waits. What the last step found; Error(numeric) for logits that are not numbers, Error(interrupted) where the
  // megakernel's blocks waited for each other too long: then all slots are as before the token that hung.
  int32_t likeliest(int slot = 0);
  // Samples for each of several slots from its last step's first row of logits, on the GPU, and makes the logprobs that
  // the options ask for; waits once. Each token counts as what the slot's step found. An error of one slot's numbers is
  // in its result; others are thrown. Where samples() of the options.
  static bool samples(const SampleOptions& options);
  std::vector<SlotSampled> sample(std::span<const SlotSample> of);
  SampledToken sample(const SampleOptions& options, uint32_t step, int slot = 0);  // throws all errors
  // (rows, V), host memory. More than batch() of them before any slot goes on.
  void logits(uint32_t rows, float* to, int slot = 0);
  bool can_rewind(int64_t length, int slot = 0) const;
  // The first `length` tokens of another slot. False where that slot could not be rewound to them: nothing changes.
  bool copy_tokens(int from, int to, int64_t length);
  void rewind(int64_t length, int slot = 0);
  // Whether a step can be traced: the megakernel takes the model, and its experts are in MXFP4.
  bool takes_trace() const;
  // For measurements: as if `length` tokens had been told, with random keys and values, of which the first call makes
  // those of the whole cache.
  void pretend(int64_t length, int slot = 0);

 private:
  struct Slot {
    Model model;  // the weights are the same in all
    Buffers buffers;
    LayerStages* stages = nullptr;                  // on the device
    Ranks* ranks = nullptr;                         // buffers.ranks on the device, where there are several
    int64_t length = 0, valid_from = 0;             // rings hold the tokens from here on
    bool pretends = false;                          // its cache is random
    uint32_t vocab = 0;                             // of the last step: the ids of which it found the likeliest
    bool id_alone = false;                          // it left no logits
    sampling::RowNoise sampled_with;                // how it sampled its id
    std::optional<sampling::RowNoise> noise_there;  // what lies in buffers.noise; none: not known
    // A step that was started before the host knew the token that it appends: it is not counted in `length` before
    // extend() asks for it.
    struct Ahead {
      StepSampling how;
      int32_t token = -1;
    };
    std::optional<Ahead> ahead;
    gpu::Event sampled;                // the state of the last sampled token has been copied to the host
    std::vector<LogitBias> bias_sent;  // what lies in its rows of SamplingBuffers
    std::vector<uint32_t> allowed_sent;
    std::map<std::tuple<uint32_t, uint32_t, uint32_t, bool, bool>, std::unique_ptr<gpu::Graph>> graphs;
    std::unique_ptr<gpu::Graph> traced;
  };
  gpu::Graph& graph(Slot& slot, uint32_t T, uint32_t head_rows, uint32_t vocab, bool id_alone = false);
  bool uses_prefilter(int64_t T, uint32_t head_rows, bool id_alone) const {
    return id_alone && has_prefilter() && samples_in_head(T, head_rows);
  }
  bool samples_in_head(int64_t T, uint32_t head_rows) const { return megakernel_ && T == 1 && head_rows == 1; }
  bool uses_row_kernel(int64_t T) const { return row_kernel_ && 1 < T && T <= int64_t(kKernelRows); }
  void send_noise(Slot& slot, const sampling::RowNoise& noise);
  void check_logits(const Slot& slot) const;
  void grow(Slot& slot, int64_t tokens);
  bool ranked() const { return slots_[0].buffers.ranks.several(); }
  void start_streams(std::span<const int> slots, std::span<const int32_t> ids, int64_t n, uint32_t vocab);
  void send_input(const BatchInput& input);
  gpu::Graph& streams_graph(uint32_t sequences, uint32_t vocab);
  void send_adjustments(const SampleOptions& options, int slot);
  int64_t bytes_between_slots() const;
  Tensor rows_of_slots(void* first, DType type, int64_t numbers) const;
  void start_sampling(std::span<const SlotSample> of);
  bool start_ahead(const SlotSample& sample);
  void drop_ahead(Slot& slot);  // waits
  void check_waits();           // after work that is done: as synchronize()
  TokenLogprobs fetch_logprobs(const SlotSample& of) const;

  int64_t context_, ring_, prompt_tokens_, most_streams_, weight_bytes_ = 0;
  int64_t most_small_batch_ = 0;  // sequences of a step by the small-batch kernels
  Slice slice_;
  uint64_t* inbox_ = nullptr;  // of several ranks
  uint32_t* epoch_ = nullptr;
  PromptBuffers prompt_{};
  SamplingBuffers sampling_{};
  BatchedSequences streams_;  // of several slots
  BatchInput* streams_input_ = nullptr;
  Buffers streams_buffers_{};
  std::map<std::tuple<uint32_t, uint32_t, bool, bool>, std::unique_ptr<gpu::Graph>> streams_graphs_;
  RowWords row_words_{};  // of the row kernel, for all slots
  Arena host_states_;     // pinned, (slots) State
  int device_;
  Arena arena_;
  std::unique_ptr<gpu::OwnedStream> stream_;
  std::unique_ptr<gpu::WaitControl> waits_;
  bool megakernel_ = false, row_kernel_ = false;
  std::deque<Slot> slots_;
};

}  // namespace ingot::decode
