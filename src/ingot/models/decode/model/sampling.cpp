// Sampling on the GPU, from the logits of the slots' last steps.
#include <algorithm>

#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/sampling/logprobs.h"
#include "ingot/models/decode/model/device_model.h"

namespace ingot::decode {

std::optional<sampling::RowNoise> noise_of(const SlotSample& sample, int64_t vocab) {
  const SampleOptions& o = *sample.options;
  const SampleRow row = row_of(o.sampling, vocab);
  if (!o.bias.empty() || !o.allowed.empty() || filters(row)) return std::nullopt;
  return sampling::RowNoise{.seed = o.seed, .step = sample.step, .temperature = row.temperature};
}

StepSampling step_sampling_of(const SlotSample& sample, int64_t vocab) {
  const SampleOptions& o = *sample.options;
  const int64_t ids = o.vocab > 0 ? o.vocab : vocab;
  const std::optional<sampling::RowNoise> noise = noise_of(sample, ids);
  return {.vocab = uint32_t(ids), .id_alone = noise && o.logprobs < 0, .noise = noise.value_or(sampling::RowNoise{})};
}

#ifdef INGOT_HAS_CUDA_DECODE

void build_sampling(DeviceBuilder& b, int64_t vocab, int64_t rows, SamplingBuffers& sampling) {
  const Device device{Device::cuda, 0};
  sampling.count = rows;
  b.take(sampling.rows, 2 * rows);
  b.take(sampling.allowed, rows * ((vocab + 31) / 32));
  b.take(sampling.bias_ids, rows * kMostBiases);
  b.take(sampling.biases, rows * kMostBiases);
  b.take(sampling.workspace, sample_workspace_bytes(rows, device));
  b.take(sampling.top, rows * kMostLogprobs);
  b.take(sampling.logprobs, rows * (1 + kMostLogprobs));
  b.take(sampling.logprob_workspace, logprobs_workspace_bytes(vocab, kMostLogprobs, device, rows));
}

void SampledRows::add(const SlotSample& sample, int64_t vocab, int row) {
  const SampleOptions& o = *sample.options;
  SampleRow& r = sampled.emplace_back(row_of(o.sampling, vocab));
  r.seed = o.seed, r.step = sample.step, r.row = row;
  r.biases = int32_t(o.bias.size()), r.masked = o.allowed.empty() ? 0 : 1;
  (filters(r) ? some_filtered : some_unfiltered) = true;
}
void SampledRows::add_logprobs(const SlotSample& sample, int64_t vocab, int row) {
  scored.push_back({.row = row, .ids = int32_t(vocab)});
  top = std::max(top, sample.options->logprobs);
}

namespace {
[[noreturn]] void fail_without_numbers(const State& s) {
  fail(ErrorCode::numeric, "decode: found ", (s.flaw & 1) != 0 ? "a NaN logit" : "only -inf logits",
       " before position ", s.position, ", expected numbers");
}
bool has_token(const State& s) { return s.flaw == 0 && s.tokens[0] >= 0; }
}  // namespace

int32_t DeviceModel::likeliest(int slot) {
  const gpu::DeviceGuard guard(device_);
  synchronize();
  State s;
  gpu::copy_to_host(&s, buffers(slot).state, sizeof s);
  if (!has_token(s)) fail_without_numbers(s);
  return s.tokens[0];
}

bool DeviceModel::samples(const SampleOptions& o) {
  return int64_t(o.bias.size()) <= kMostBiases && o.logprobs <= kMostLogprobs;
}
// Biases and masks that the row already holds are not sent again.
void DeviceModel::send_adjustments(const SampleOptions& o, const SamplingBuffers& to_rows, int row,
                                   SentAdjustments& sent) {
  const int64_t words = (config().vocab + 31) / 32;
  const auto send = [&](void* to, const void* from, size_t bytes) {
    gpu::copy_rows({.to = to, .from = from, .row_bytes = int64_t(bytes), .device = device_}, *stream_);
  };
  const auto same = [](const LogitBias& a, const LogitBias& b) { return a.id == b.id && a.bias == b.bias; };
  if (const std::vector<LogitBias> bias = in_order(o.bias);
      !std::equal(bias.begin(), bias.end(), sent.bias.begin(), sent.bias.end(), same)) {
    std::vector<int32_t> ids;
    std::vector<float> biases;
    for (const LogitBias& b : bias) ids.push_back(b.id), biases.push_back(b.bias);
    if (!bias.empty()) {
      send(to_rows.bias_ids + row * kMostBiases, ids.data(), ids.size() * 4);
      send(to_rows.biases + row * kMostBiases, biases.data(), ids.size() * 4);
    }
    sent.bias = bias;
  }
  if (o.allowed.empty() || std::equal(o.allowed.begin(), o.allowed.end(), sent.allowed.begin(), sent.allowed.end()))
    return;
  send(to_rows.allowed + row * words, o.allowed.data(), o.allowed.size_bytes());
  sent.allowed.assign(o.allowed.begin(), o.allowed.end());
}

void DeviceModel::check_logits(const Slot& slot) const {
  INGOT_CHECK(!slot.id_alone, "decode: found a step that computed only the likeliest id, expected a step with logits");
}

int64_t DeviceModel::bytes_between_slots() const {
  if (slots_.size() == 1) return int64_t(sizeof(float)) * config().vocab;
  return reinterpret_cast<const char*>(buffers(1).state) - reinterpret_cast<const char*>(buffers(0).state);
}
// The arrays of `numbers` numbers that all slots have, as the rows of one tensor. `first` is the first slot's array.
Tensor DeviceModel::rows_of_slots(void* first, DType type, int64_t numbers) const {
  Tensor rows(first, type, {int64_t(slots_.size()), numbers}, {Device::cuda, device_});
  rows.stride[0] = bytes_between_slots() / size_of(type);
  return rows;
}

// Starts the sampling of rows of `logits` (R, V) into `tokens` (R), whose biases and masks have been sent.
void DeviceModel::start_sampling(const SampledRows& of, const SamplingBuffers& b, const Tensor& logits,
                                 const Tensor& tokens) {
  const int64_t n = int64_t(of.sampled.size()), m = int64_t(of.scored.size()), V = config().vocab,
                row_bytes = int64_t(sizeof(SampleRow));
  if (n + m == 0) return;
  std::vector<SampleRow> rows = of.sampled;
  rows.insert(rows.end(), of.scored.begin(), of.scored.end());
  const Device device{Device::cuda, device_};
  gpu::copy_rows({.to = b.rows, .from = rows.data(), .row_bytes = (n + m) * row_bytes, .device = device_}, *stream_);
  if (n > 0)
    ingot::sample({.logits = logits,
                   .tokens = tokens,
                   .bias_ids = Tensor(b.bias_ids, {b.count, kMostBiases}, device),
                   .biases = Tensor(b.biases, {b.count, kMostBiases}, device),
                   .allowed = Tensor(b.allowed, {b.count, (V + 31) / 32}, device),
                   .rows = Tensor(b.rows, DType::u8, {n, row_bytes}, device),
                   .some_filtered = of.some_filtered,
                   .some_unfiltered = of.some_unfiltered,
                   .workspace = Tensor(b.workspace, DType::u8, {sample_workspace_bytes(b.count, device)}, device)},
                  *stream_);
  if (m == 0) return;
  // Logprobs are computed from the logits before biases and masks, for all rows with the largest number of ids that any
  // row requests.
  const auto part = [&](void* first, DType type, int64_t most, int64_t numbers) {
    return Tensor(first, type, {b.count, most}, device).slice(1, 0, numbers);
  };
  logprobs({.logits = logits,
            .token = tokens,
            .top = of.top > 0 ? part(b.top, DType::i32, kMostLogprobs, of.top) : Tensor(),
            .values = part(b.logprobs, DType::f64, 1 + kMostLogprobs, 1 + of.top),
            .rows = Tensor(b.rows + n, DType::u8, {m, row_bytes}, device),
            .workspace = Tensor(b.logprob_workspace, DType::u8,
                                {logprobs_workspace_bytes(V, kMostLogprobs, device, b.count)}, device)},
           *stream_);
}

void DeviceModel::start_sampling(std::span<const SlotSample> of) {
  for (const SlotSample& r : of)
    INGOT_CHECK(!slots_[size_t(r.slot)].ahead, "decode: found slot ", r.slot,
                " sampled twice after one step, expected the token to be appended first");
  SampledRows rows;
  for (const SlotSample& r : of) {
    const SampleOptions& o = *r.options;
    INGOT_CHECK(samples(o), "decode: found ", o.bias.size(), " biases and logprobs of ", o.logprobs,
                " ids, expected at most ", kMostBiases, " and ", kMostLogprobs);
    Slot& slot = slots_[size_t(r.slot)];
    const int64_t vocab = o.vocab > 0 ? o.vocab : config().vocab;
    // The step itself may already have sampled this token.
    const bool found = slot.vocab == uint32_t(vocab) && noise_of(r, vocab) == slot.sampled_with;
    if (!found || o.logprobs >= 0) check_logits(slot);
    if (o.logprobs >= 0) rows.add_logprobs(r, vocab, r.slot);
    if (found) continue;
    send_adjustments(o, sampling_, r.slot, slot.sent);
    rows.add(r, vocab, r.slot);
  }
  start_sampling(rows, sampling_, rows_of_slots(buffers().logits, DType::f32, config().vocab),
                 rows_of_slots(buffers().state->tokens, DType::i32, 1).select(1, 0));
}

// A step with NaN logits sets `flaw`, which sampling does not change. The next step of the slots that go on is started
// before the wait, so that the GPU does not wait for the host.
std::vector<SlotSampled> DeviceModel::sample(std::span<const SlotSample> of) {
  const gpu::DeviceGuard guard(device_);
  start_sampling(of);
  const size_t slots = slots_.size();
  if (host_states_.capacity() == 0) host_states_ = Arena(int64_t(slots * sizeof(State)), gpu::pinned_memory());
  // The states are copied before the wait, so that a step waits only once.
  State* const states = static_cast<State*>(host_states_.at(0, DType::u8, {int64_t(slots * sizeof(State))}).data);
  const State* from = buffers().state;
  if (slots > 1) {
    constexpr int64_t kNumbers = int64_t(sizeof(State) / 4);
    const Tensor together(states_together_, DType::i32, {int64_t(slots), kNumbers}, {Device::cuda, device_});
    copy({.from = rows_of_slots(buffers().state, DType::i32, kNumbers), .to = together}, *stream_);
    from = states_together_;
  }
  gpu::copy_rows({.to = states, .from = from, .row_bytes = int64_t(slots * sizeof(State)), .device = device_},
                 *stream_);
  gpu::Event& sampled = slots_[size_t(of[0].slot)].sampled;
  sampled.record(*stream_);
  if (start_ahead(of)) {
    sampled.synchronize();
    check_waits();
  } else {
    synchronize();
  }
  std::vector<SlotSampled> found(of.size());
  for (size_t i = 0; i < of.size(); ++i) try {
      const State& state = states[of[i].slot];
      Slot& slot = slots_[size_t(of[i].slot)];
      if (!has_token(state)) {
        drop_ahead(slot);
        fail_without_numbers(state);
      }
      if (slot.ahead) slot.ahead->token = state.tokens[0];
      found[i].token.token = state.tokens[0];
      if (of[i].options->logprobs >= 0) found[i].token.logprobs = fetch_logprobs(of[i], sampling_, of[i].slot);
    } catch (...) { found[i].error = std::current_exception(); }
  return found;
}
TokenLogprobs DeviceModel::fetch_logprobs(const SlotSample& r, const SamplingBuffers& from, int64_t row) const {
  const int64_t top = r.options->logprobs;
  std::vector<int32_t> ids(static_cast<size_t>(top));
  std::vector<double> numbers(size_t(1 + top));
  gpu::copy_to_host(numbers.data(), from.logprobs + row * (1 + kMostLogprobs), int64_t(numbers.size()) * 8);
  if (top > 0) gpu::copy_to_host(ids.data(), from.top + row * kMostLogprobs, top * 4);
  return logprobs_of(ids, numbers);
}
SampledToken DeviceModel::sample(const SampleOptions& o, uint32_t step, int slot) {
  const SlotSample one{.slot = slot, .options = &o, .step = step};
  SlotSampled found = std::move(sample({&one, 1})[0]);
  if (found.error) std::rethrow_exception(found.error);
  return std::move(found.token);
}

void DeviceModel::logits(uint32_t rows, float* to, int slot) {
  const gpu::DeviceGuard guard(device_);
  synchronize();
  INGOT_CHECK(!slots_[size_t(slot)].ahead,
              "decode: found a request for the logits of a slot whose token was sampled, expected the token "
              "to be appended first");
  check_logits(slots_[size_t(slot)]);
  const float* const from = int64_t(rows) > batch() ? prompt_.logits : buffers(slot).logits;
  gpu::copy_to_host(to, from, int64_t(rows) * config().vocab * 4);
}

#endif

}  // namespace ingot::decode
