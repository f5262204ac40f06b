// Sampling on the GPU: from the logits that a slot's last step left there.
#include <algorithm>

#include "ingot/kernels/sampling/adjust.h"
#include "ingot/kernels/sampling/logprobs.h"
#include "ingot/models/decode/model/device_model.h"
#include "ingot/models/host_decoder.h"

namespace ingot::decode {

#ifdef INGOT_HAS_CUDA_DECODE

void build_sampling(DeviceBuilder& b, int64_t vocab, SamplingBuffers& sampling) {
  b.take(sampling.adjusted, vocab);
  b.take(sampling.allowed, (vocab + 31) / 32);
  b.take(sampling.bias_ids, kMostBiases);
  b.take(sampling.biases, kMostBiases);
  b.take(sampling.top, kMostLogprobs);
  b.take(sampling.logprobs, 1 + kMostLogprobs);
  b.take(sampling.workspace, logprobs_workspace_bytes(vocab, kMostLogprobs, {Device::cuda, 0}));
}

int32_t DeviceModel::likeliest(int slot) {
  const gpu::DeviceGuard guard(device_);
  synchronize();
  State s;
  gpu::copy_to_host(&s, buffers(slot).state, sizeof s);
  if (s.flaw == 0 && s.tokens[0] >= 0) return s.tokens[0];
  fail(ErrorCode::numeric, "gpt-oss: found ", (s.flaw & 1) != 0 ? "a NaN logit" : "only -inf logits",
       " before position ", s.position, ", expected numbers");
}

bool DeviceModel::can_draw(const DrawOptions& o) {
  return int64_t(o.bias.size()) <= kMostBiases && o.logprobs <= kMostLogprobs;
}
void DeviceModel::send_adjustments(const DrawOptions& o) {
  const auto send = [&](void* to, const void* from, size_t bytes) {
    gpu::copy_rows({.to = to, .from = from, .row_bytes = int64_t(bytes), .device = device_}, *stream_);
  };
  const auto same = [](const LogitBias& a, const LogitBias& b) { return a.id == b.id && a.bias == b.bias; };
  if (const std::vector<LogitBias> bias = in_order(o.bias);
      !std::equal(bias.begin(), bias.end(), bias_sent_.begin(), bias_sent_.end(), same)) {
    std::vector<int32_t> ids;
    std::vector<float> biases;
    for (const LogitBias& b : bias) ids.push_back(b.id), biases.push_back(b.bias);
    if (!bias.empty())
      send(sampling_.bias_ids, ids.data(), ids.size() * 4), send(sampling_.biases, biases.data(), ids.size() * 4);
    bias_sent_ = bias;
  }
  if (o.allowed.empty() || std::equal(o.allowed.begin(), o.allowed.end(), allowed_sent_.begin(), allowed_sent_.end()))
    return;
  send(sampling_.allowed, o.allowed.data(), o.allowed.size_bytes());
  allowed_sent_.assign(o.allowed.begin(), o.allowed.end());
}

void DeviceModel::check_logits(const Slot& slot) const {
  INGOT_CHECK(!slot.id_alone, "gpt-oss: found a step that was asked for the likeliest id alone, expected its logits");
}

// A step that found no numbers says so in `flaw`, which a draw leaves alone.
DrawnToken DeviceModel::draw(const DrawOptions& o, uint32_t step, int index) {
  INGOT_CHECK(can_draw(o), "gpt-oss: found ", o.bias.size(), " biases and logprobs of ", o.logprobs,
              " ids, expected at most ", kMostBiases, " and ", kMostLogprobs);
  const gpu::DeviceGuard guard(device_);
  const Buffers& b = buffers(index);
  const Device device{Device::cuda, device_};
  const int64_t vocab = o.vocab > 0 ? o.vocab : config().vocab;
  const bool adjusts = !o.bias.empty() || !o.allowed.empty();
  const Tensor row(b.logits, {vocab}, device), token(b.state->tokens, {1}, device);
  if (adjusts) {
    send_adjustments(o);
    const int64_t n = int64_t(o.bias.size());
    adjust_logits({.logits = row,
                   .adjusted = Tensor(sampling_.adjusted, {vocab}, device),
                   .bias_ids = n > 0 ? Tensor(sampling_.bias_ids, {n}, device) : Tensor(),
                   .biases = n > 0 ? Tensor(sampling_.biases, {n}, device) : Tensor(),
                   .allowed = o.allowed.empty() ? Tensor() : Tensor(sampling_.allowed, {(vocab + 31) / 32}, device)},
                  *stream_);
  }
  const Slot& slot = slots_[size_t(index)];
  // Of a greedy draw the step has found the token.
  const bool found = !adjusts && o.sampling.temperature <= 0 && slot.vocab == uint32_t(vocab);
  if (!found || o.logprobs >= 0) check_logits(slot);
  if (!found)
    sample({.logits = Tensor(adjusts ? sampling_.adjusted : b.logits, {1, vocab}, device),
            .tokens = token,
            .options = o.sampling,
            .seed = o.seed,
            .step = step},
           *stream_);
  const int64_t top = std::max<int64_t>(0, o.logprobs);
  const Tensor values(sampling_.logprobs, {1 + top}, device);
  if (o.logprobs >= 0)
    logprobs(
        {.logits = row,
         .token = token,
         .top = top > 0 ? Tensor(sampling_.top, {top}, device) : Tensor(),
         .values = values,
         .workspace = Tensor(sampling_.workspace, DType::u8, {logprobs_workspace_bytes(vocab, top, device)}, device)},
        *stream_);
  DrawnToken drawn{.token = likeliest(index)};
  if (o.logprobs < 0) return drawn;
  std::vector<int32_t> ids(static_cast<size_t>(top));
  std::vector<double> numbers(size_t(1 + top));
  gpu::copy_to_host(numbers.data(), sampling_.logprobs, int64_t(numbers.size()) * 8);
  if (top > 0) gpu::copy_to_host(ids.data(), sampling_.top, top * 4);
  drawn.logprobs = logprobs_of(ids, numbers);
  return drawn;
}

void DeviceModel::logits(uint32_t rows, float* to, int slot) {
  const gpu::DeviceGuard guard(device_);
  synchronize();
  check_logits(slots_[size_t(slot)]);
  const float* const from = int64_t(rows) > batch() ? prompt_.logits : buffers(slot).logits;
  gpu::copy_to_host(to, from, int64_t(rows) * config().vocab * 4);
}

#endif

}  // namespace ingot::decode
