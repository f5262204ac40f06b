#pragma once
// A decoder-only transformer with its weights, caches and activations in the memory of a GPU.
#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>

#include "ingot/gpu/device.h"
#include "ingot/gpu/watch.h"
#include "ingot/models/decode/batch/batch.h"
#include "ingot/models/decode/draft_head/device_head.h"
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
  // The bytes of GPU memory that a model needs, with the head where there is one.
  static int64_t bytes(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options,
                       int rank = 0, const draft::DraftHead* head = nullptr);
  // Returns the options, without the int8 prefilter if one of the GPUs has too little memory for its part. All ranks
  // decide alike, because they must compute the same stages.
  static DecoderOptions fit_to_memory(const DecoderSpec& config, const DecoderWeights& weights, DecoderOptions options,
                                      const draft::DraftHead* head = nullptr);
  // Copies the weights; the caller may free them afterwards. f32 matrices become bf16. Too little memory is an error
  // before any memory is taken. With a head all steps keep the hidden states that the head reads; the megakernel and
  // the row kernel, which keep none, then compute no step. Error{unsupported} with DeviceHead::unsupported_reason().
  DeviceModel(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options,
              const draft::DraftHead* head = nullptr);
  // The same with random weights of these shapes at realistic scale, made on the GPU.
  DeviceModel(const DecoderSpec& config, const DecoderWeights& shapes, const DecoderOptions& options, uint64_t seed);
  // Rank `rank` of options.gpus, on the GPU of that number, with its slice of the model (ranked_model.h makes all
  // ranks). If `seed` is not null, the weights are random.
  DeviceModel(const DecoderSpec& config, const DecoderWeights& weights, const DecoderOptions& options, int rank,
              const uint64_t* seed, const draft::DraftHead* head = nullptr);

  const DecoderSpec& config() const { return slots_[0].model.config; }
  int64_t context() const { return context_; }
  int64_t batch() const { return max_step_tokens(config()); }
  // the most tokens of extend() if at most one row of logits is wanted
  int64_t prompt_batch() const { return prompt_tokens_; }
  // if all rows are wanted
  int64_t rows_batch() const { return std::max(batch(), std::min(prompt_batch(), kPromptRows)); }
  int64_t length(int slot = 0) const { return slots_[size_t(slot)].length; }
  int64_t weight_bytes() const { return weight_bytes_; }
  Stream stream() const { return *stream_; }
  const Model& model(int slot = 0) const { return slots_[size_t(slot)].model; }
  const Buffers& buffers(int slot = 0) const { return slots_[size_t(slot)].buffers; }
  const PromptBuffers& prompt_buffers() const { return prompt_; }
  const LayerStages* stages(int slot = 0) const { return slots_[size_t(slot)].stages; }
  // With several ranks: gives this rank the addresses of the memory of all ranks, in the order of ranks. Call once,
  // before the first step.
  void connect(std::span<const std::unique_ptr<DeviceModel>> all);
  // Makes all slots ready for the next step after a step whose waits gave up, on this rank or on another. The tokens of
  // that step are removed from the slots. Waits for the GPU. Returns the first slot that had such a token, or 0.
  int reset();
  std::string place_in(int slot) const;  // the position of a slot, for errors
  // Waits for the started work. Returns which block waited for which value, if a wait of this GPU was the first to give
  // up; otherwise an empty string.
  std::string wait();
  // Waits for the started work. Throws Error(interrupted) if a wait gave up; all slots are then as before the failed
  // step.
  void synchronize();
  // Ends the waits of the running kernels, because another rank cannot do its part.
  void request_stop() { waits_->request_stop(); }
  int device() const { return device_; }

  // Turns the megakernel on or off from the next step on. If the megakernel is wanted and does not support the model,
  // nothing changes and the result is false.
  bool use_megakernel(bool wanted);
  // The same for the row kernel.
  bool use_row_kernel(RowKernelUse wanted);
  bool has_prefilter() const { return model().prefilter.rows != nullptr; }

  // The result of prompt_kernels() for a prompt of `tokens` tokens.
  std::vector<int> kernels_of_prompt(int64_t tokens, uint32_t head_rows) const;
  // Launches the kernels of a prompt of this length, so that their code is loaded. The launches wait for no other GPU,
  // and their results are meaningless: every rank must call reset() before its next step.
  void warm_up_prompt(int64_t tokens, uint32_t head_rows, int slot = 0);
  // Records the graphs that extend() launches for `tokens` tokens. This may allocate memory and therefore wait for the
  // kernels of other GPUs.
  void prepare(int64_t tokens, uint32_t head_rows, int slot = 0, uint32_t vocab = 0, bool id_alone = false);
  // Appends tokens and starts the computation of the last head_rows (0, 1 or all) rows of logits. The number of tokens
  // is at most batch(); with head_rows 0 or 1 at most prompt_batch(), and with all rows at most rows_batch(). Ids from
  // `vocab` on are not sampled; 0 means that all ids may be sampled. `id_alone` promises that the caller will not read
  // the logits, so that an int8 prefilter may be used; the sampled id is the same. The sampled id is the id of the
  // largest logit; the megakernel takes the largest sum of logit and noise.
  void extend(std::span<const int32_t> ids, uint32_t head_rows, int slot = 0, uint32_t vocab = 0, bool id_alone = false,
              const sampling::RowNoise& noise = {});
  // Appends the token that the last step sampled, n times. The megakernel increments the step of the noise.
  void continue_sampling(int64_t n, const sampling::RowNoise& noise, int slot = 0, bool id_alone = false);
  void continue_greedily(int64_t n, int slot = 0, bool id_alone = false) { continue_sampling(n, {}, slot, id_alone); }
  // The most slots of extend_sequences(), which appends one token to each of several slots in one pass over the
  // weights. Afterwards every slot has its logits and its most likely token. The logits are those of the row kernel, of
  // the phased path or, in steps of many sequences, of the matrix kernels, and differ from the megakernel's by
  // roundings. The number of slots chooses the path, also where sample() has started the step of some slots ahead: such
  // a step is dropped if it took another path. extend() of one slot keeps the result of a step ahead of several slots.
  int64_t max_sequences() const { return max_sequences_; }
  // For tests and measurements: steps of more sequences than this use the matrix kernels, if these support the model.
  void limit_small_batch(int64_t sequences);
  bool takes_matrix_kernels(int64_t sequences) const { return sequences > most_small_batch_; }
  // The smallest number of sequences for which one shared step was measured to take less time than a separate step of
  // each sequence.
  int64_t fewest_together() const { return uses_row_kernel(2, RowsOf::several_sequences) ? 2 : 3; }
  void extend_sequences(std::span<const int> slots, std::span<const int32_t> ids, uint32_t vocab = 0);
  // Appends to every slot its most likely token, n times.
  void continue_sequences(std::span<const int> slots, int64_t n);
  // Whether extend_parts() is possible. It appends parts of the prompts of several slots, prompt_batch() tokens in
  // total, in one pass of the matrix kernels. Afterwards every slot has the logits of the last token of its part and
  // the most likely token.
  bool takes_parts() const { return max_sequences_ > 1 && prompt_tokens_ > batch(); }
  void extend_parts(std::span<const Decoder::Part> parts);
  // The most rows of sample_drafts(); 1: this model computes no draft steps.
  int64_t draft_rows() const { return std::min<int64_t>(kMostDraftRows, batch()); }
  // Draft steps of different slots, as Decoder::sample_drafts(). Waits for the GPU once, unless a slot's options need
  // the host. Each slot keeps its pending token and the tokens of its result except the last one.
  std::vector<std::vector<SlotSampled>> sample_drafts(std::span<const DraftStep> steps);
  // The parts of sample_drafts(), for several ranks. All ranks record the graph of the step, which may wait for kernels
  // of other GPUs, and start the step's rows. Once all ranks have ended them, the first rank samples, and every other
  // rank keeps as many tokens.
  void prepare_drafts(std::span<const DraftStep> steps);
  void start_draft_rows(std::span<const DraftStep> steps);
  std::vector<std::vector<SlotSampled>> sample_draft_rows(std::span<const DraftStep> steps);
  void keep_draft_rows(std::span<const DraftStep> steps, std::span<const std::vector<SlotSampled>> sampled);
  bool has_head() const { return head_ != nullptr; }
  const DeviceHead* head() const { return head_.get(); }
  // Guesses up to `most` tokens that follow the slot's tokens and `next`, as far as the context has room. Waits for the
  // GPU.
  std::vector<int32_t> guess(int slot, int32_t next, int64_t most);
  const BatchedSequences& sequences() const { return sequences_; }
  const Buffers& sequences_buffers() const { return sequences_buffers_; }
  // continue_traced() appends one token by the megakernel and records the times of its stages in `trace` (see
  // trace_of()). prepare_trace() must be called before, because recording the graph may wait for the kernels of other
  // GPUs.
  void prepare_trace(const megakernel::Trace& trace, int slot = 0);
  void continue_traced(int slot = 0);
  // Waits for the last step of the slot and returns its sampled id. Error(numeric) if the logits are not numbers.
  // Error(interrupted) if a wait of the megakernel gave up; all slots are then as before the failed step.
  int32_t likeliest(int slot = 0);
  // sample() samples a token for each of several slots on the GPU, from the first row of logits of the slot's last
  // step, and computes the logprobs that the options ask for. It waits for the GPU once. The sampled token becomes the
  // result of the slot's step. An error in the logits of one slot is in the result of the slot; other errors are
  // thrown. samples() says whether the GPU can sample with these options.
  static bool samples(const SampleOptions& options);
  std::vector<SlotSampled> sample(std::span<const SlotSample> of);
  SampledToken sample(const SampleOptions& options, uint32_t step, int slot = 0);  // throws all errors
  // Copies the (rows, V) logits to host memory. With more than batch() rows, call it before the next step of any slot.
  void logits(uint32_t rows, float* to, int slot = 0);
  bool can_rewind(int64_t length, int slot = 0) const;
  // Copies the first `length` tokens of another slot. Returns false, with nothing changed, if the other slot could not
  // be rewound to `length` tokens.
  bool copy_tokens(int from, int to, int64_t length);
  void rewind(int64_t length, int slot = 0);
  // Whether a step can be traced (supports_trace()).
  bool takes_trace() const;
  // For measurements: sets the length of a slot to `length` tokens with random keys and values. The first call fills
  // the whole cache of the slot.
  void fill_cache_with_random(int64_t length, int slot = 0);

 private:
  // How a step of several slots is computed. The numbers of a row depend neither on the other rows nor on their number,
  // bit for bit; between two paths they differ by roundings.
  enum class SequencesPath { one_token, small_batch, row_kernel, matrix_kernels };
  struct Slot {
    Model model;  // all slots share the weights
    Buffers buffers;
    LayerStages* stages = nullptr;                  // on the device
    char* family_stages = nullptr;                  // the same for the families, else null
    Ranks* ranks = nullptr;                         // a copy of buffers.ranks on the device, with several ranks
    int64_t length = 0, valid_from = 0;             // the circular caches hold the tokens from valid_from on
    bool has_random_cache = false;                  // the cache has been filled by fill_cache_with_random()
    uint32_t vocab = 0;                             // of the last step: only ids below `vocab` were candidates
    bool id_alone = false;                          // the slot holds no logits of its last token
    sampling::RowNoise sampled_with;                // the noise with which the last step sampled its id
    std::optional<sampling::RowNoise> noise_there;  // the contents of buffers.noise; none: not known
    // A step that was started before the host knew the token that the step appends. The token is counted in `length`
    // when extend() is called with this token.
    struct Ahead {
      StepSampling how;
      std::optional<SequencesPath> path;  // of a step of several slots, which computes logits and samples nothing
      int32_t token = -1;
    };
    std::optional<Ahead> ahead;
    gpu::Event sampled;    // of the first slot of a sample(): the sampled tokens have been copied to the host
    SentAdjustments sent;  // in the slot's row of SamplingBuffers
    std::map<std::tuple<uint32_t, uint32_t, uint32_t, bool, bool>, std::unique_ptr<gpu::Graph>> graphs;
    std::unique_ptr<gpu::Graph> traced;
  };
  // Whether extend() launches a graph. Prompts of several tokens whose last row alone is wanted are launched kernel by
  // kernel, also those so short that they are computed like a step: a graph for each slot and number of tokens would
  // take host memory without a benefit. Over several GPUs such a step is a graph, because a first launch loads the
  // kernel's code, which may wait for kernels that wait for another GPU.
  bool is_recorded(int64_t T, uint32_t head_rows) const { return head_rows == T || ranked(); }
  void launch_step(Slot& slot, uint32_t T, uint32_t head_rows, uint32_t vocab, bool id_alone);
  gpu::Graph& graph(Slot& slot, uint32_t T, uint32_t head_rows, uint32_t vocab, bool id_alone = false);
  bool uses_prefilter(int64_t T, uint32_t head_rows, bool id_alone) const {
    return id_alone && has_prefilter() && samples_in_head(T, head_rows);
  }
  bool samples_in_head(int64_t T, uint32_t head_rows) const { return megakernel_ && T == 1 && head_rows == 1; }
  enum class RowsOf { one_sequence, several_sequences, drafts };
  // Whether the row kernel computes a step of T rows. All draft steps take the same path, whatever their rows, because
  // the bits of a slot's answer must not depend on the lengths of its drafts.
  bool uses_row_kernel(int64_t T, RowsOf rows) const {
    if (rows == RowsOf::drafts) return row_kernel_ != RowKernelUse::none;
    return 1 < T && T <= int64_t(kKernelRows) &&
           (row_kernel_ == RowKernelUse::all ||
            (row_kernel_ == RowKernelUse::where_faster && rows == RowsOf::several_sequences));
  }
  const KeptStates* kept_states() const { return has_head() ? &head_->states() : nullptr; }
  static DeviceHead::Sizes head_sizes(const DecoderSpec& config, const DecoderOptions& options);
  // Gives the head the tokens that the last step appended to the slots.
  void feed_head(std::span<const Decoder::Part> parts);
  void send_noise(Slot& slot, const sampling::RowNoise& noise);
  void check_logits(const Slot& slot) const;
  void check_room(int slot, int64_t tokens) const;
  void grow(Slot& slot, int64_t tokens);
  bool ranked() const { return slots_[0].buffers.ranks.several(); }
  SequencesPath path_of(int64_t sequences) const {
    if (takes_matrix_kernels(sequences)) return SequencesPath::matrix_kernels;
    if (uses_row_kernel(sequences, RowsOf::several_sequences)) return SequencesPath::row_kernel;
    return sequences > 1 ? SequencesPath::small_batch : SequencesPath::one_token;
  }
  void start_sequences(std::span<const int> slots, std::span<const int32_t> ids, int64_t n, uint32_t vocab,
                       SequencesPath path);
  void send_input(const BatchInput& input);
  gpu::Graph& sequences_graph(uint32_t sequences, uint32_t vocab, SequencesPath path);
  gpu::Graph& draft_graph(uint32_t rows);
  void start_draft_sampling(std::span<const DraftStep> steps);
  std::vector<SlotSampled> sampled_rows(const DraftStep& step, size_t first_row, const int32_t* tokens);
  void send_adjustments(const SampleOptions& options, const SamplingBuffers& to, int row, SentAdjustments& sent);
  int64_t bytes_between_slots() const;
  Tensor rows_of_slots(void* first, DType type, int64_t numbers) const;
  void start_sampling(std::span<const SlotSample> of);
  void start_sampling(const SampledRows& of, const SamplingBuffers& buffers, const Tensor& logits,
                      const Tensor& tokens);
  bool start_ahead(std::span<const SlotSample> of);
  bool start_slot_ahead(const SlotSample& sample);
  bool start_sequences_ahead(std::span<const SlotSample> going);
  static bool has_ahead(const Slot& slot, int32_t token, uint32_t vocab);
  void take_ahead(Slot& slot, uint32_t vocab);
  void drop_ahead(Slot& slot);  // waits for the GPU
  void check_waits();           // throws like synchronize(), after finished work
  TokenLogprobs fetch_logprobs(const SlotSample& of, const SamplingBuffers& from, int64_t row) const;

  int64_t context_, ring_, prompt_tokens_, max_sequences_, weight_bytes_ = 0;
  int64_t most_small_batch_ = 0;  // the most sequences of a step by the small-batch kernels
  Slice slice_;
  uint64_t* inbox_ = nullptr;  // with several ranks
  uint32_t* epoch_ = nullptr;
  PromptBuffers prompt_{};
  SamplingBuffers sampling_{};
  State* states_together_ = nullptr;  // (slots): copies of the slots' states, contiguous
  SamplingBuffers draft_sampling_{};  // of the rows of a draft step
  int32_t* draft_tokens_ = nullptr;   // the sampled tokens of these rows
  std::array<SentAdjustments, kMostDraftRows> draft_sent_;
  BatchedSequences sequences_;  // the inputs of a step of several slots, or of several rows
  BatchInput* sequences_input_ = nullptr;
  Buffers sequences_buffers_{};
  std::map<std::tuple<uint32_t, uint32_t, SequencesPath>, std::unique_ptr<gpu::Graph>> sequences_graphs_;
  std::map<std::pair<uint32_t, bool>, std::unique_ptr<gpu::Graph>> draft_graphs_;
  RowWords row_words_{};  // of the row kernel, for all slots
  Arena host_states_;     // pinned, (slots) State
  Arena host_tokens_;     // pinned, (kMostDraftRows): draft_tokens_
  int device_;
  Arena arena_;
  std::unique_ptr<gpu::OwnedStream> stream_;
  std::unique_ptr<gpu::WaitControl> waits_;
  bool megakernel_ = false;
  RowKernelUse row_kernel_ = RowKernelUse::none;
  std::deque<Slot> slots_;
  std::unique_ptr<DeviceHead> head_;  // null: none
};

}  // namespace ingot::decode
