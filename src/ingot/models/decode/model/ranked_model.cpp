#include "ingot/models/decode/model/ranked_model.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <thread>

#include "ingot/core/check.h"
#include "ingot/gpu/limits.h"
#include "ingot/megakernel/peers.h"

namespace ingot::decode {

#ifdef INGOT_HAS_CUDA_DECODE

std::string ranks_unsupported_reason(int ranks) {
  const auto text = [](const auto&... parts) { return ingot::detail::concat(parts...); };
  if (ranks < 1 || ranks > int(megakernel::kMostRanks))
    return text("found ", ranks, " GPUs, expected 1 to ", megakernel::kMostRanks);
  const int count = gpu::device_count();
  if (count == 0) return "found no GPU, expected one and its driver";
  if (ranks > count) return text("found ", count, count == 1 ? " GPU" : " GPUs", ", expected ", ranks);
  for (int r = 0; r < ranks; ++r) {
    const gpu::Limits& limits = gpu::limits(r);
    if (limits.capability < 80 || (ranks > 1 && !limits.hopper))
      return text("found ", gpu::device_info(r).name, " of compute capability ", limits.capability / 10, ".",
                  limits.capability % 10, ranks > 1 ? ", expected 9.0 for several GPUs" : ", expected 8.0 or later");
    for (int q = 0; q < ranks; ++q)
      if (q != r && !gpu::can_access_peer(r, q))
        return text("found no peer access from cuda:", r, " to cuda:", q,
                    ", expected GPUs that reach each other's memory (NVLink, or PCIe without isolation)");
  }
  return {};
}

RankedModel::RankedModel(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o,
                         const draft::DraftHead* head)
    : RankedModel(c, w, o, nullptr, head) {}
RankedModel::RankedModel(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o, uint64_t seed)
    : RankedModel(c, w, o, &seed, nullptr) {}
RankedModel::RankedModel(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o, const uint64_t* seed,
                         const draft::DraftHead* head)
    : sampled_by_first_(size_t(o.slots)) {
  if (const std::string unsupported_reason = ranks_unsupported_reason(int(o.gpus)); !unsupported_reason.empty())
    fail(ErrorCode::unsupported, "decode on GPUs: ", unsupported_reason);
  (void)slices_of(c, int(o.gpus), o.split);
  DecoderOptions of_rank = o;
  if (head != nullptr) of_rank.megakernel = false;  // all ranks compute the same stages
  for (int r = 0; r < int(o.gpus); ++r)
    ranks_.push_back(std::make_unique<DeviceModel>(c, w, of_rank, r, seed, r == 0 ? head : nullptr));
  if (o.gpus == 1) return;
  megakernel::let_peers_reach(int(o.gpus));
  for (const auto& rank : ranks_) rank->connect(ranks_);
}

int64_t RankedModel::weight_bytes() const {
  int64_t bytes = 0;
  for (const auto& rank : ranks_) bytes += rank->weight_bytes();
  return bytes;
}

// Calls `call` for every rank, which starts work on the rank's stream. With `side_by_side` each rank has a thread,
// because ranks would otherwise wait for each other during long calls. A rank whose call fails ends the waits of the
// other ranks.
template <class Call> void RankedModel::on_each(bool side_by_side, Call&& call) {
  if (ranks() == 1) return call(*ranks_[0]);
  std::vector<std::exception_ptr> failed(ranks_.size());
  const auto start = [&](size_t r) {
    try {
      call(*ranks_[r]);
    } catch (...) {
      failed[r] = std::current_exception();
      for (const auto& rank : ranks_) rank->request_stop();
    }
  };
#ifdef INGOT_EMULATED_DEVICE
  side_by_side = true;  // in the emulator a launch returns when the kernel is done
#endif
  std::vector<std::thread> threads;
  // The first rank comes last: the launches of its draft head may load code, which waits for kernels that wait for the
  // kernels of the other ranks.
  for (size_t r = ranks_.size(); r-- > 0;)
    if (side_by_side)
      threads.emplace_back(start, r);
    else
      start(r);
  for (std::thread& t : threads) t.join();
  const auto first = std::find_if(failed.begin(), failed.end(), [](const auto& e) { return e != nullptr; });
  if (first == failed.end()) return;
  (void)wait();
  for (const auto& rank : ranks_) rank->reset();
  std::rethrow_exception(*first);
}

std::string RankedModel::wait() {
  std::string found;
  std::optional<ErrorCode> broken;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    std::string of_rank;
    try {
      of_rank = ranks_[r]->wait();
    } catch (const Error& e) { broken = e.code, of_rank = e.what(); }
    if (!of_rank.empty()) found += ingot::detail::concat(found.empty() ? "" : "; ", "GPU ", r, ": ", of_rank);
  }
  if (broken) fail(*broken, "decode: ", found);
  return found;
}

void RankedModel::synchronize() {
  if (ranks() == 1) return ranks_[0]->synchronize();
  const std::string found = wait();
  if (found.empty()) return;
  int hung = 0;
  for (const auto& rank : ranks_) hung = std::max(hung, rank->reset());
  // One rank may have appended a token that another rank lacks: all ranks continue from the shortest sequence.
  for (int s = 0; s < int(sampled_by_first_.size()); ++s) {
    const auto& last = **std::min_element(ranks_.begin(), ranks_.end(),
                                          [&](const auto& a, const auto& b) { return a->length(s) < b->length(s); });
    State state;
    gpu::copy_to_host(&state, last.buffers(s).state, sizeof state);
    for (const auto& rank : ranks_) {
      if (rank->length(s) == last.length(s)) continue;
      rank->rewind(last.length(s), s);
      const gpu::DeviceGuard guard(rank->device());
      gpu::copy_to_device(rank->buffers(s).state->tokens, state.tokens, sizeof state.tokens);
    }
  }
  fail(ErrorCode::interrupted, "decode: the GPUs gave up after ", ranks_[0]->place_in(hung), ": ", found);
}

bool RankedModel::use_megakernel(bool wanted) {
  bool takes = true;
  for (const auto& rank : ranks_) takes &= rank->use_megakernel(wanted);
  return takes;
}

void RankedModel::prepare(int64_t tokens, uint32_t head_rows, int slot, uint32_t vocab, bool id_alone) {
  if (ranks() > 1)
    for (const auto& rank : ranks_) rank->prepare(tokens, head_rows, slot, vocab, id_alone);
}
void RankedModel::prepare_prompt(int64_t tokens, uint32_t head_rows, int slot) {
  if (ranks() == 1 || tokens <= batch() || tokens > prompt_batch() || length(slot) + tokens > context()) return;
  std::vector<int> kernels;
  for (const auto& rank : ranks_) {
    const std::vector<int> own = rank->kernels_of_prompt(tokens, head_rows);
    kernels.insert(kernels.end(), own.begin(), own.end());
  }
  if (warmed_up_.count(kernels) != 0) return;
  synchronize();
  on_each(true, [&](DeviceModel& m) { m.warm_up_prompt(tokens, head_rows, slot); });
  (void)wait();
  for (const auto& rank : ranks_) rank->reset();
  warmed_up_.insert(kernels);
}
void RankedModel::extend(std::span<const int32_t> ids, uint32_t head_rows, int slot, uint32_t vocab, bool id_alone,
                         const sampling::RowNoise& noise) {
  prepare_prompt(int64_t(ids.size()), head_rows, slot);
  prepare(int64_t(ids.size()), head_rows, slot, vocab, id_alone);
  on_each(int64_t(ids.size()) > batch(),
          [&](DeviceModel& m) { m.extend(ids, head_rows, slot, vocab, id_alone, noise); });
  sampled_by_first_[size_t(slot)] = false;
}

void RankedModel::share_sampled(int slot) {
  if (!sampled_by_first_[size_t(slot)]) return;
  const int32_t token = ranks_[0]->likeliest(slot);
  for (const auto& rank : ranks_) {
    const gpu::DeviceGuard guard(rank->device());
    gpu::copy_to_device(rank->buffers(slot).state->tokens, &token, sizeof token);
  }
  sampled_by_first_[size_t(slot)] = false;
}
void RankedModel::continue_sampling(int64_t n, const sampling::RowNoise& noise, int slot, bool id_alone) {
  if (ranks() == 1) return ranks_[0]->continue_sampling(n, noise, slot, id_alone);
  if (length(slot) + n > context())
    fail(ErrorCode::usage, "found ", length(slot) + n, " tokens, expected at most ", context(), ", the context");
  share_sampled(slot);
  prepare(1, 1, slot, 0, id_alone);
  // The ranks launch in turn: a stream accepts a limited number of launches, and a rank would wait for launches that
  // another rank has not yet received.
  for (sampling::RowNoise next = noise; n > 0; --n, ++next.step)
    on_each(false, [&](DeviceModel& m) { m.continue_sampling(1, next, slot, id_alone); });
}

std::vector<StageSpan> RankedModel::trace_token(uint32_t blocks, int slot) {
  share_sampled(slot);
  std::vector<megakernel::Trace> traces;
  std::vector<std::unique_ptr<gpu::DeviceMemory>> memory;
  for (const auto& rank : ranks_) {
    const gpu::DeviceGuard guard(rank->device());
    megakernel::Trace t = trace_of(rank->model(slot), blocks, nullptr);
    memory.push_back(std::make_unique<gpu::DeviceMemory>(8 * int64_t(t.blocks) * t.words_of_block()));
    t.words = static_cast<uint64_t*>(memory.back()->data());
    traces.push_back(t);
    rank->prepare_trace(t, slot);
  }
  on_each(false, [&](DeviceModel& m) { m.continue_traced(slot); });
  likeliest(slot);  // waits, and throws the error of the step
  std::vector<std::vector<StageSpan>> found;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const gpu::DeviceGuard guard(ranks_[r]->device());
    std::vector<uint64_t> words(size_t(traces[r].blocks) * traces[r].words_of_block());
    gpu::copy_to_host(words.data(), traces[r].words, int64_t(words.size()) * 8);
    found.push_back(spans_of(traces[r], words));
  }
  return of_one_clock(std::move(found));
}

void RankedModel::extend_sequences(std::span<const int> slots, std::span<const int32_t> ids, uint32_t vocab) {
  ranks_[0]->extend_sequences(slots, ids, vocab);
}
int32_t RankedModel::likeliest(int slot) {
  if (ranks() > 1) synchronize();
  return ranks_[0]->likeliest(slot);
}
std::vector<SlotSampled> RankedModel::sample(std::span<const SlotSample> of) {
  if (ranks() == 1) return ranks_[0]->sample(of);
  synchronize();
  // Only the first rank samples. It must not start a step early, because all ranks would have to start that step.
  std::vector<SlotSample> alone(of.begin(), of.end());
  for (SlotSample& r : alone) r.goes_on = false, sampled_by_first_[size_t(r.slot)] = true;
  return ranks_[0]->sample(alone);
}
std::vector<std::vector<SlotSampled>> RankedModel::sample_drafts(std::span<const DraftStep> steps) {
  if (ranks() == 1) return ranks_[0]->sample_drafts(steps);
  for (const auto& rank : ranks_) rank->prepare_drafts(steps);
  on_each(false, [&](DeviceModel& m) { m.start_draft_rows(steps); });
  synchronize();
  std::vector<std::vector<SlotSampled>> sampled = ranks_[0]->sample_draft_rows(steps);
  for (size_t r = 1; r < ranks_.size(); ++r) ranks_[r]->keep_draft_rows(steps, sampled);
  for (const DraftStep& step : steps) sampled_by_first_[size_t(step.samples[0].slot)] = false;
  return sampled;
}
void RankedModel::logits(uint32_t rows, float* to, int slot) {
  if (ranks() > 1) synchronize();
  ranks_[0]->logits(rows, to, slot);
}
void RankedModel::rewind(int64_t length, int slot) {
  if (ranks() > 1) synchronize();
  for (const auto& rank : ranks_) rank->rewind(length, slot);
}
bool RankedModel::copy_tokens(int from, int to, int64_t length) {
  if (!can_rewind(length, from)) return false;
  if (ranks() > 1) synchronize();
  for (const auto& rank : ranks_) rank->copy_tokens(from, to, length);
  return true;
}
void RankedModel::fill_cache_with_random(int64_t length, int slot) {
  if (ranks() > 1) synchronize();
  for (const auto& rank : ranks_) rank->fill_cache_with_random(length, slot);
}

#endif

}  // namespace ingot::decode
