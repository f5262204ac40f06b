#include <span>
#include <tuple>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/models/gpt/adapters/adapter.h"
#include "ingot/models/gpt/gpt_impl.h"

namespace ingot {

void Gpt::Impl::check_types() const {
  const DType m = types.master, c = types.compute, a = types.activations;
  INGOT_CHECK(m == DType::f32 || m == DType::f64, "gpt: found weights of ", m, ", expected f32 or f64");
  const bool one = c == m && a == m;
  if (options.device.kind == Device::cpu)
    INGOT_CHECK(one, "gpt: found weights of ", m, " computed with as ", c, " and activations of ", a, " on ",
                options.device, ", expected one type");
  else
    INGOT_CHECK(one || (m == DType::f32 && c == a && (a == DType::bf16 || a == DType::f16)), "gpt: found weights of ",
                m, " computed with as ", c, " and activations of ", a, " on ", options.device,
                ", expected one type, or f32 weights and bf16 or f16 for the other two");
}

void Gpt::Impl::check_call(const GptWeights& weights, const TokenBatch& batch, bool needs_targets) const {
  const int64_t tokens = batch.tokens.numel();
  INGOT_CHECK_EQ(weights.master.numel(), layout.padded_count(), "gpt: length of the flat weights");
  INGOT_CHECK_EQ(weights.master.dtype, types.master, "gpt: dtype of the weights");
  INGOT_CHECK(bool(weights.compute) == (types.compute != types.master), "gpt: found ",
              weights.compute ? "a copy" : "no copy", " of the weights in ", types.compute, " beside weights in ",
              types.master, ", expected ", weights.compute ? "none" : "one");
  if (weights.compute) {
    INGOT_CHECK_EQ(weights.compute.numel(), layout.padded_count(), "gpt: length of the weights' copy");
    INGOT_CHECK_EQ(weights.compute.dtype, types.compute, "gpt: dtype of the weights' copy");
  }
  INGOT_CHECK_LE(tokens, options.capacity, "gpt: tokens in the batch");
  INGOT_CHECK_EQ(batch.positions.numel(), tokens, "gpt: positions");
  INGOT_CHECK_GE(batch.cu_seqlens.numel(), int64_t(1), "gpt: cu_seqlens");
  if (needs_targets) INGOT_CHECK_EQ(batch.targets.numel(), batch.scored(), "gpt: targets");
  for (const Tensor* t : {&weights.master, &batch.tokens, &batch.positions, &batch.cu_seqlens})
    INGOT_CHECK_EQ(t->device, options.device, "gpt: device of the weights and the batch");
  check_on_host(batch);
}

// Checks the numbers for the host's decisions, which are in host memory for every device of the batch.
void Gpt::Impl::check_on_host(const TokenBatch& batch) const {
  const int64_t tokens = batch.tokens.numel();
  for (const auto& [there, here, name] : {std::tuple(&batch.positions, &batch.positions_on_host(), "positions"),
                                          std::tuple(&batch.cu_seqlens, &batch.cu_on_host(), "cu_seqlens")}) {
    INGOT_CHECK(here->device.kind == Device::cpu, "gpt: found a batch on ", there->device, " without host_", name,
                ", expected its ", name, " in host memory too");
    INGOT_CHECK_EQ(here->numel(), there->numel(), "gpt: length of host_", name);
  }
  const std::span<const int32_t> cu = batch.cu();
  INGOT_CHECK_EQ(cu.front(), 0, "gpt: start of cu_seqlens");
  for (size_t s = 0; s + 1 < cu.size(); ++s) INGOT_CHECK_LE(cu[s], cu[s + 1], "gpt: cu_seqlens at segment ", s);
  INGOT_CHECK_EQ(int64_t(cu.back()), tokens, "gpt: end of cu_seqlens");
  if (!batch.last.empty()) {
    INGOT_CHECK_GT(options.most_scored, 0, "gpt: numbers of scored tokens need most_scored in the options");
    INGOT_CHECK_EQ(batch.last.size(), cu.size() - 1, "gpt: numbers of scored tokens, one per segment");
  }
  for (size_t s = 0; s < batch.last.size(); ++s)
    INGOT_CHECK(batch.last[s] >= 0 && batch.last[s] <= cu[s + 1] - cu[s], "gpt: found ", batch.last[s],
                " scored tokens of segment ", s, ", expected 0 to its ", cu[s + 1] - cu[s]);
  if (options.most_scored > 0) INGOT_CHECK_LE(batch.scored(), options.most_scored, "gpt: scored tokens of the batch");
  const int64_t limit = config.learned_positions ? config.context : options.max_positions;
  const int32_t* at = batch.positions_on_host().ptr<int32_t>();
  if (config.learned_positions || config.rotary_dim > 0)
    for (int64_t t = 0; t < tokens; ++t)
      INGOT_CHECK(at[t] >= 0 && at[t] < limit, "gpt: found position ", at[t], " at token ", t, ", expected 0 to ",
                  limit - 1);
}

void Gpt::Impl::check_adapters(const TokenBatch& batch, const GptAdapters* adapters) const {
  if (adapters == nullptr) return;
  INGOT_CHECK_EQ(adapters->layer_calls.size(), program.layer_calls.size(), "gpt: adapters, one set per layer call");
  INGOT_CHECK_GT(options.max_adapter_rank, 0, "gpt: adapters need max_adapter_rank in the options");
  const std::span<const int32_t> cu = batch.cu();
  int64_t segments = int64_t(cu.size()) - 1;
  while (segments > 0 && cu[size_t(segments) - 1] == cu[size_t(segments)])
    --segments;  // empty segments have no adapters
  const auto fits = [&](const AdapterPair& p, const char* name) {
    if (!p.a) return;
    INGOT_CHECK_GE(p.a.size(0), segments, "gpt: ", name, " adapters, one per segment");
    INGOT_CHECK_LE(p.a.size(1), options.max_adapter_rank, "gpt: rank of the ", name, " adapter");
    INGOT_CHECK_EQ(p.a.size(1), p.b.size(2), "gpt: ranks of the ", name, " adapter's two matrices");
  };
  for (const LayerCallAdapters& a : adapters->layer_calls) {
    fits(a.q, "q");
    fits(a.k, "k");
    fits(a.v, "v");
    fits(a.o, "o");
    fits(a.mlp, "mlp");
  }
  fits(adapters->head, "head");
}

void Gpt::Impl::check_cached(const TokenBatch& batch, const CachedSegments& cached) const {
  const std::span<const int32_t> cu = batch.cu();
  const std::vector<int64_t>& sequences = cached.sequences;
  INGOT_CHECK_EQ(cached.cache.device(), options.device, "gpt: device of the cache");
  INGOT_CHECK(sequences.size() < cu.size(), "gpt: found ", sequences.size(), " cached sequences for ", cu.size() - 1,
              " segments");
  INGOT_CHECK_EQ(cu[sequences.size()], cu.back(),
                 "gpt: tokens of the segments with a cached sequence");  // segments without one are empty
  for (size_t s = 0; s < sequences.size(); ++s) {
    INGOT_CHECK(sequences[s] >= 0 && sequences[s] < cached.cache.sequences(), "gpt: found cached sequence ",
                sequences[s], ", expected 0 to ", cached.cache.sequences() - 1);
    for (size_t r = 0; r < s; ++r)
      INGOT_CHECK(sequences[r] != sequences[s], "gpt: cached sequence ", sequences[s], " appears twice");
    const int64_t length = cached.cache.length(sequences[s]), added = cu[s + 1] - cu[s];
    INGOT_CHECK_LE(length + added, cached.cache.capacity(), "gpt: tokens of cached sequence ", sequences[s]);
    if (options.training)
      INGOT_CHECK_LE(detail::cached_keys(cached, s, added), options.most_keys, "gpt: keys of cached sequence ",
                     sequences[s], ", expected at most the most_keys of the options");
    for (int64_t t = 0; t < added; ++t)
      INGOT_CHECK_EQ(int64_t(batch.positions_on_host().ptr<int32_t>()[cu[s] + t]), length + t,
                     "gpt: position that continues sequence ", sequences[s]);
  }
}

}  // namespace ingot
