#include "ingot/models/decode/model/decoder.h"

#include <algorithm>

#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/models/decode/megakernel/token_kernel_form.h"
#include "ingot/models/decode/model/ranked_model.h"
#include "ingot/models/decode/model/trace.h"
#include "ingot/models/device_decoder.h"

namespace ingot {

std::string gpu_rounding(const DecoderWeights& w) {
  std::vector<const WeightMatrix*> all = {&w.embed};
  const bool tied = w.embed.data.data != nullptr && w.head.data.data == w.embed.data.data;
  if (!tied) all.push_back(&w.head);
  for (const DecoderLayer& l : w.layers) all.insert(all.end(), {&l.qkv, &l.o, &l.router, &l.gate_up, &l.down});
  const auto wide = std::count_if(all.begin(), all.end(), [](auto* m) { return m->format == WeightFormat::f32; });
  if (wide == 0) return {};
  return ingot::detail::concat(wide, " of ", all.size(), " matrices are rounded from f32 to bf16");
}

#ifndef INGOT_HAS_CUDA_DECODE

std::string gpu_missing_paths(const DecoderSpec&) { return {}; }

std::string gpus_unsupported_reason(const DecoderSpec&, const DecoderOptions&) {
  return "found a build without CUDA, expected one made with INGOT_CUDA=ON";
}
std::string gpu_unsupported_reason(const DecoderSpec&, const DecoderWeights&, const DecoderOptions&,
                                   const draft::DraftHead*) {
  return "found a build without CUDA, expected one made with INGOT_CUDA=ON";
}
std::unique_ptr<Decoder> make_gpu_decoder(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o,
                                          const draft::DraftHead*) {
  fail(ErrorCode::unsupported, "device cuda: ", gpu_unsupported_reason(c, w, o));
}
std::unique_ptr<Decoder> make_synthetic_gpu_decoder(const DecoderSpec& c, const DecoderWeights& w,
                                                    const DecoderOptions& o, uint64_t, const draft::DraftHead*) {
  return make_gpu_decoder(c, w, o);
}

#else
namespace {

using decode::DeviceModel;
using decode::RankedModel;

class GpuDecoder final : public DeviceDecoder {
 public:
  // With `seed` the weights are random; null: the given weights.
  GpuDecoder(const DecoderSpec& c, const DecoderWeights& weights, const DecoderOptions& o, const uint64_t* seed,
             const draft::DraftHead* head)
      : DeviceDecoder(o.slots),
        model_(c, weights, DeviceModel::fit_to_memory(c, weights, o, head), seed, head),
        batch_(std::max(o.batch, model_.prompt_batch())),
        columns_(o.batched_sequences ? model_.max_sequences() : 1) {}

  int64_t vocab() const override { return model_.config().vocab; }
  int64_t context() const override { return model_.context(); }
  int64_t batch() const override { return batch_; }
  int64_t columns() const override { return columns_; }
  int64_t draft_rows() const override { return model_.draft_rows(); }
  Device device() const override { return {Device::cuda, 0}; }
  bool traces() const override { return model_.rank(0).takes_trace(); }
  bool has_draft_head() const override { return model_.has_head(); }

 private:
  void clear(int slot) override { model_.rewind(0, slot); }
  int64_t cached_length(int slot) const override { return model_.length(slot); }
  int64_t truncate(int slot, int64_t length) override {
    model_.rewind(model_.can_rewind(length, slot) ? length : 0, slot);
    return model_.length(slot);
  }
  void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) override {
    const size_t most = size_t(rows == Rows::all ? model_.rows_batch() : model_.prompt_batch());
    for (size_t at = 0; at < ids.size(); at += most) {
      const auto part = ids.subspan(at, std::min(most, ids.size() - at));
      const bool last = at + part.size() == ids.size();
      const size_t wanted = rows == Rows::all ? part.size() : last ? 1 : 0;
      const int64_t begin = cached_length(slot);
      model_.extend(part, uint32_t(wanted), slot);
      if (wanted == 0) continue;
      logits_.resize(wanted * size_t(vocab()));
      model_.logits(uint32_t(wanted), logits_.data(), slot);
      take(begin + int64_t(part.size() - wanted), Tensor(logits_.data(), {int64_t(wanted), vocab()}));
    }
  }
  void extend_on_device(int slot, std::span<const int32_t> ids, const SlotSample* next) override {
    const decode::StepSampling how =
        next != nullptr ? decode::step_sampling_of(*next, vocab()) : decode::StepSampling{};
    const size_t most = size_t(model_.prompt_batch());
    for (size_t at = 0; at < ids.size(); at += most) {
      const auto part = ids.subspan(at, std::min(most, ids.size() - at));
      model_.extend(part, at + part.size() == ids.size() ? 1 : 0, slot, how.vocab, how.id_alone, how.noise);
    }
    if (next == nullptr) model_.synchronize();  // errors and the time of a prompt belong to this call
  }
  bool feed_on_device(std::span<const PendingToken> pending) override {
    if (int64_t(pending.size()) < model_.fewest_together()) return false;
    std::vector<int> slots;
    std::vector<int32_t> ids;
    for (const PendingToken& p : pending) slots.push_back(p.next.slot), ids.push_back(p.id);
    model_.extend_sequences(slots, ids, uint32_t(vocab_of(*pending[0].next.options)));
    return true;
  }
  bool extends_together() const override { return columns_ > 1 && model_.takes_parts(); }
  void extend_parts_on_device(std::span<const Part> parts) override {
    const size_t most = size_t(columns_);
    for (size_t at = 0; at < parts.size(); at += most)
      model_.extend_parts(parts.subspan(at, std::min(most, parts.size() - at)));
    model_.synchronize();  // errors and the time of prompts belong to this call
  }
  bool copy_tokens(int from, int to, int64_t length) override { return model_.copy_tokens(from, to, length); }
  bool samples_on_device(const SlotSample& s) const override { return DeviceModel::samples(*s.options); }
  std::vector<SlotSampled> sample_on_device(std::span<const SlotSample> samples) override {
    return model_.sample(samples);
  }
  std::vector<std::vector<SlotSampled> > sample_drafts_on_device(std::span<const DraftStep> steps) override {
    return model_.sample_drafts(steps);
  }
  std::vector<int32_t> guess_after(int slot, int32_t pending, int64_t most) override {
    return model_.guess(slot, pending, most);
  }
  void copy_logits_to_host(int slot, const Take& take) override {
    logits_.resize(size_t(vocab()));
    model_.logits(1, logits_.data(), slot);
    take(cached_length(slot) - 1, Tensor(logits_.data(), {1, vocab()}));
  }

  // The second token is traced, because the first launch loads the code. Both tokens are removed afterwards.
  std::string trace_token(int slot) override {
    const uint32_t blocks = uint32_t(gpu::device_info().sms);
    const int64_t length = cached_length(slot);
    std::vector<decode::StageSpan> spans;
    for (int round = 0; round < 2; ++round) {
      spans = model_.trace_token(blocks, slot);
      model_.rewind(length, slot);
    }
    return decode::perfetto_json(spans, ingot::detail::concat("A token after ", length, " of context"));
  }

  RankedModel model_;
  int64_t batch_, columns_;
  std::vector<float> logits_;
};

}  // namespace

std::string gpu_missing_paths(const DecoderSpec& c) {
  const gpu::Limits& limits = gpu::current_limits();
  if (!decode::prefers_token_kernel(limits)) return "tokens by a launch for each phase, as INGOT_MEGAKERNEL=0 asks";
  if (decode::token_kernel_form(limits).copies == decode::TokenCopies::warps &&
      megakernel_path(c) == DecodePath::family_megakernel && unsupported_reason(c, megakernel_path(c)).empty())
    return "tokens by a launch for each phase, because the token kernel without the copy engine is GPT-OSS's alone";
  return {};
}
std::string gpus_unsupported_reason(const DecoderSpec& c, const DecoderOptions& o) {
  if (std::string unsupported_reason = decode::ranks_unsupported_reason(int(o.gpus)); !unsupported_reason.empty())
    return unsupported_reason;
  try {
    check(c, "decode");
    if (std::string reason = unsupported_reason(c, DecodePath::phased); !reason.empty()) return reason;
    decode::check_supported(c);
    if (c.e4m3_inputs && o.gpus > 1) return ingot::detail::concat("found --quant on ", o.gpus, " GPUs, expected one");
    if (o.gpus > 1 && (c.norm.post || c.logit_softcap > 0))
      return ingot::detail::concat("found ", o.gpus, " GPUs, expected one for a model with ",
                                   c.norm.post ? "norms after attention and MLP" : "a softcap of logits");
    (void)decode::slices_of(c, int(o.gpus), o.split);
  } catch (const Error& e) { return e.what(); }
  return {};
}
namespace {
// As many slots and tokens as fit into the memory of the GPUs. Graphs and the code of kernels take memory later.
DecoderOptions with_slots(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o,
                          const draft::DraftHead* head) {
  constexpr int64_t kSpare = int64_t(3) << 29;
  std::vector<int64_t> free;
  for (int r = 0; r < int(o.gpus); ++r) free.push_back(gpu::device_memory(r).available());
  return choose_slots(o, c.context, [&](int64_t slots, int64_t context) {
    DecoderOptions some = o;
    some.slots = slots, some.context = context;
    for (int r = 0; r < int(o.gpus); ++r)
      if (free[size_t(r)] >= 0 && DeviceModel::bytes(c, w, some, r, head) + kSpare > free[size_t(r)]) return false;
    return true;
  });
}
}  // namespace

std::string gpu_unsupported_reason(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& asked,
                                   const draft::DraftHead* head) {
  decode::check_megakernel_variable();  // before weights are read
  if (std::string unsupported_reason = gpus_unsupported_reason(c, asked); !unsupported_reason.empty())
    return unsupported_reason;
  if (head != nullptr && !head->weights.head &&
      decode::slices_of(c, int(asked.gpus), asked.split)[0].ids.size() < c.vocab)
    return ingot::detail::concat("found a draft head without an output matrix of its own over ", asked.gpus,
                                 " GPUs, of which each has a part of the model's, expected one GPU or --split "
                                 "attention-experts");
  if (head != nullptr)
    if (std::string reason = decode::DeviceHead::unsupported_reason(head->config); !reason.empty()) return reason;
  const DecoderOptions o = with_slots(c, w, asked, head);
  for (int r = 0; r < int(o.gpus); ++r) {
    DecoderOptions least = o;
    least.int8_prefilter = false;
    const int64_t needed = DeviceModel::bytes(c, w, least, r, head), free = gpu::device_memory(r).available();
    if (free >= 0 && needed > free)
      return ingot::detail::concat(
          "found ", free, " bytes free on ", gpu::device_info(r).name,
          o.gpus > 1 ? ingot::detail::concat(", cuda:", r) : std::string(), ", expected ", needed,
          head != nullptr ? " for weights, a draft head and a context of " : " for weights and a context of ",
          o.context > 0 ? o.context : c.context, " tokens");
  }
  return {};
}

namespace {
std::unique_ptr<Decoder> make(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& asked,
                              const uint64_t* seed, const draft::DraftHead* head) {
  if (const std::string unsupported_reason = gpu_unsupported_reason(c, w, asked, head); !unsupported_reason.empty())
    fail(ErrorCode::unsupported, "device cuda: ", unsupported_reason);
  const DecoderOptions o = with_slots(c, w, asked, head);
  return std::make_unique<GpuDecoder>(c, w, o, seed, head);
}
}  // namespace

std::unique_ptr<Decoder> make_gpu_decoder(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o,
                                          const draft::DraftHead* head) {
  return make(c, w, o, nullptr, head);
}
std::unique_ptr<Decoder> make_synthetic_gpu_decoder(const DecoderSpec& c, const DecoderWeights& w,
                                                    const DecoderOptions& o, uint64_t seed,
                                                    const draft::DraftHead* head) {
  return make(c, w, o, &seed, head);
}

#endif

}  // namespace ingot
