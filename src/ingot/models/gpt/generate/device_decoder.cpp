// Generation on a GPU: prompts launch by launch, then a CUDA graph per token.
#include "ingot/models/device_decoder.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>

#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/sampling/sampling.h"
#include "ingot/models/gpt/generate/cache.h"
#include "ingot/models/gpt/generate/decoder.h"
#include "ingot/models/gpt/generate/device_weights.h"

namespace ingot {
namespace {

class DeviceGptDecoder final : public DeviceDecoder {
 public:
  DeviceGptDecoder(const GptConfig& c, const Tensor& weights, bool looping, Device device, int64_t slots,
                   const GptAdapters* adapters)
      : DeviceDecoder(slots),
        config_(c),
        device_(device),
        own_stream_(stream_on(device)),
        stream_(*own_stream_),
        weights_(weights, device, stream_),
        adapters_(adapters != nullptr ? *adapters : GptAdapters()),
        model_(c, gpt_types(device),
               {.capacity = c.context,
                .looping = looping,
                .max_adapter_rank = adapters != nullptr ? adapters->head.a.size(1) : 0,
                .device = device,
                .stream = stream_}),
        cache_(c, model_.program(), slots, c.context, gpt_types(device).compute, gpu::memory_of(device)),
        memory_(device_bytes(c, slots, device), gpu::memory_of(device)),
        pinned_(kWords * Arena::aligned(DType::i32, {1}) + Arena::aligned(DType::i32, {1}), gpu::pinned_memory()),
        tokens_(memory_.take(DType::i32, {c.context})),
        positions_(memory_.take(DType::i32, {c.context})),
        cu_(memory_.take(DType::i32, {2})),
        now_(memory_.take(DType::i32, {kWords})),
        sampled_(memory_.take(DType::i32, {1})),
        sampling_(memory_.take(DType::u8, {sample_workspace_bytes(1, device)})),
        next_(pinned_.take(DType::i32, {kWords})),
        answer_(pinned_.take(DType::i32, {1})),
        slots_(size_t(slots)) {
    for (Slot& slot : slots_) slot.logits = memory_.take(DType::f32, {1, c.vocab});
    gpu::fill_bytes(sampling_.data, 0, sampling_.bytes(), stream_);
    gpu::synchronize(device_, stream_);  // the host's weights may be freed from here on
  }

  int64_t vocab() const override { return config_.vocab; }
  int64_t context() const override { return config_.context; }
  int64_t batch() const override { return config_.context; }
  Device device() const override { return device_; }

 private:
  // The inputs of each token in GPU memory: the token, its position, the offsets (cu) of its query and of the keys
  // including the token's own, and the step of the sample. Gaps between some words make all tensors begin at multiples
  // of eight bytes.
  static constexpr int64_t kToken = 0, kPosition = 2, kCu = 4, kStep = 8, kWords = 10;

  static std::unique_ptr<gpu::OwnedStream> stream_on(Device device) {
    const gpu::DeviceGuard guard(device.index);
    return std::make_unique<gpu::OwnedStream>();
  }
  static int64_t device_bytes(const GptConfig& c, int64_t slots, Device device) {
    return 2 * Arena::aligned(DType::i32, {c.context}) + 3 * Arena::aligned(DType::i32, {kWords}) +
           slots * Arena::aligned(DType::f32, {1, c.vocab}) + Arena::aligned(sample_workspace_bytes(1, device));
  }

  const GptAdapters* adapters() const { return adapters_.layer_calls.empty() ? nullptr : &adapters_; }
  void clear(int slot) override { cache_.truncate(slot, 0); }
  int64_t cached_length(int slot) const override { return cache_.length(slot); }
  int64_t truncate(int slot, int64_t length) override {
    cache_.truncate(slot, length);
    return length;
  }
  void extend_slot(int slot, std::span<const int32_t> tokens, Rows rows, const Take& take) override {
    const gpu::DeviceGuard guard(device_.index);
    const int64_t begin = cached_length(slot), count = rows == Rows::all ? int64_t(tokens.size()) : 1;
    // Only scoring requests several rows; memory for these rows is allocated at the first request.
    Arena memory;
    if (count > 1) memory = Arena(Arena::aligned(DType::f32, {count, config_.vocab}), gpu::memory_of(device_));
    const Tensor logits = count > 1 ? memory.take(DType::f32, {count, config_.vocab}) : slots_[size_t(slot)].logits;
    compute(slot, tokens, logits);
    take_from_device(begin + int64_t(tokens.size()) - count, logits, take);
  }
  void extend_on_device(int slot, std::span<const int32_t> tokens, const SlotSample* next) override {
    const gpu::DeviceGuard guard(device_.index);
    Slot& s = slots_[size_t(slot)];
    s.sampled = next != nullptr && tokens.size() == 1 ? token_after(slot, tokens[0], *next) : std::nullopt;
    if (s.sampled) return;
    compute(slot, tokens, s.logits);
    gpu::synchronize(device_, stream_);  // errors and the time of a prompt belong to this call
  }
  // The device samples only in the graph of a token.
  bool samples_on_device(const SlotSample& s) const override { return slots_[size_t(s.slot)].sampled.has_value(); }
  std::vector<SlotSampled> sample_on_device(std::span<const SlotSample> samples) override {
    std::vector<SlotSampled> found;
    for (const SlotSample& s : samples)
      found.push_back({.token = {.token = *slots_[size_t(s.slot)].sampled, .logprobs = {}}, .error = {}});
    return found;
  }
  void copy_logits_to_host(int slot, const Take& take) override {
    const gpu::DeviceGuard guard(device_.index);
    take_from_device(cached_length(slot) - 1, slots_[size_t(slot)].logits, take);
  }
  void take_from_device(int64_t position, const Tensor& logits, const Take& take) {
    host_logits_.resize(size_t(logits.numel()));
    const Tensor copied(host_logits_.data(), {logits.size(0), config_.vocab});
    copy({.from = logits, .to = copied}, stream_);
    gpu::synchronize(device_, stream_);
    take(position, copied);
  }
  // Appends tokens and leaves the logits of the last of them, as many as `logits` has rows.
  void compute(int slot, std::span<const int32_t> tokens, const Tensor& logits) {
    const int64_t n = int64_t(tokens.size()), count = logits.size(0);
    std::vector<int32_t> ids(tokens.begin(), tokens.end()), positions(tokens.size()),
        wanted(static_cast<size_t>(count));
    std::iota(positions.begin(), positions.end(), int32_t(cached_length(slot)));
    std::iota(wanted.begin(), wanted.end(), int32_t(n - count));
    int32_t cu[2] = {0, int32_t(n)};
    const auto send = [&](int32_t* from, const Tensor& to, int64_t numbers) {
      const Tensor part = to.slice(0, 0, numbers);
      copy({.from = Tensor(from, {numbers}), .to = part}, stream_);
      return part;
    };
    const TokenBatch batch{.tokens = send(ids.data(), tokens_, n),
                           .positions = send(positions.data(), positions_, n),
                           .cu_seqlens = send(cu, cu_, 2),
                           .host_positions = Tensor(positions.data(), {n}),
                           .host_cu_seqlens = Tensor(cu, {2})};
    model_.extend(weights_.weights(), batch, {slot}, cache_, Tensor(wanted.data(), {count}), logits, adapters());
  }

  // A graph for each slot, for the last requested kind of sampling.
  struct Recorded {
    std::unique_ptr<gpu::Graph> graph;
    int64_t vocab = 0;
    SamplingOptions sampling;
    uint64_t seed = 0;
    bool is(int64_t v, const SamplingOptions& o, uint64_t s) const {
      return graph && vocab == v && seed == s && sampling.temperature == o.temperature && sampling.top_k == o.top_k &&
             sampling.top_p == o.top_p && sampling.min_p == o.min_p;
    }
  };
  // Appends a token and samples the next token by a graph. For options that need the logits on the host, appends
  // nothing and returns no value.
  std::optional<int32_t> token_after(int slot, int32_t token, const SlotSample& next) {
    const SampleOptions& options = *next.options;
    if (!options.bias.empty() || !options.allowed.empty() || options.logprobs >= 0) return {};
    const int64_t vocab = vocab_of(options);
    const SamplingOptions& o = options.sampling;
    const uint64_t seed = options.seed;
    const int64_t n = cached_length(slot);
    if (n == 0 || n >= config_.context) return {};  // compute() reports the error
    int32_t* const word = next_.ptr<int32_t>();
    word[kToken] = token;
    word[kPosition] = int32_t(n);
    word[kCu] = word[kCu + 2] = 0, word[kCu + 1] = 1, word[kCu + 3] = int32_t(n + 1);
    word[kStep] = int32_t(next.step);
    Recorded& r = slots_[size_t(slot)].recorded;
    if (!r.is(vocab, o, seed)) {
      const auto work = [&] { one_token(slot, vocab, o, seed); };
      work();  // prepares library handles and code, which must not happen during a recording
      gpu::synchronize(device_, stream_);
      r = {.graph = std::make_unique<gpu::Graph>(stream_, work), .vocab = vocab, .sampling = o, .seed = seed};
    }
    r.graph->launch(stream_);
    gpu::synchronize(device_, stream_);
    cache_.advance(slot, 1);
    const int32_t sampled = *answer_.ptr<int32_t>();
    if (sampled < 0) {
      cache_.truncate(slot, n);
      fail(ErrorCode::numeric, "sample: found logits that are not numbers after token ", token, " at position ", n,
           ", expected numbers");
    }
    return sampled;
  }
  void one_token(int slot, int64_t vocab, const SamplingOptions& o, uint64_t seed) {
    copy({.from = next_, .to = now_}, stream_);
    const auto word = [&](int64_t at, int64_t count) { return now_.slice(0, at, at + count); };
    const Tensor cu = word(kCu, 2), cached = word(kCu, 4).reshape({1, 2, 2});
    int32_t host_cu[2] = {0, 1};
    const TokenBatch batch{.tokens = word(kToken, 1),
                           .positions = word(kPosition, 1),
                           .cu_seqlens = cu,
                           .host_positions = next_.slice(0, kPosition, kPosition + 1),
                           .host_cu_seqlens = Tensor(host_cu, {2})};
    const Tensor& logits = slots_[size_t(slot)].logits;
    model_.next(weights_.weights(), batch, slot, cache_, cached, logits, adapters());
    ingot::sample({.logits = logits.slice(1, 0, vocab),
                   .tokens = sampled_,
                   .options = o,
                   .seed = seed,
                   .device_step = word(kStep, 1),
                   .workspace = sampling_},
                  stream_);
    copy({.from = sampled_, .to = answer_}, stream_);
  }

  GptConfig config_;
  Device device_;
  std::unique_ptr<gpu::OwnedStream> own_stream_;  // the default stream cannot be recorded
  Stream stream_;
  DeviceWeights weights_;
  GptAdapters adapters_;
  Gpt model_;
  GptCache cache_;
  Arena memory_, pinned_;
  Tensor tokens_, positions_, cu_, now_, sampled_, sampling_;
  Tensor next_, answer_;  // pinned
  std::vector<float> host_logits_;
  struct Slot {
    Tensor logits;                   // (1, V): of the last token
    std::optional<int32_t> sampled;  // the token that the last graph sampled from them
    Recorded recorded;
  };
  std::vector<Slot> slots_;
};

}  // namespace

std::unique_ptr<Decoder> make_device_decoder(const GptConfig& config, const Tensor& weights, bool looping,
                                             Device device, int64_t slots, const GptAdapters* adapters) {
  return std::make_unique<DeviceGptDecoder>(config, weights, looping, device, slots, adapters);
}

}  // namespace ingot
