#include "ingot/engines/train/evaluate.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/clock.h"
#include "ingot/engines/train/device_batch.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/host_copy.h"

namespace ingot {

Score mean_score(const DocumentScore& sums) {
  return {.loss = sums.targets > 0 ? sums.loss_sum / double(sums.targets) : 0,
          .bits_per_byte = sums.bytes > 0 ? bits_per_byte(sums.loss_sum, sums.bytes) : 0,
          .targets = sums.targets,
          .bytes = sums.bytes};
}

Score score(const GptConfig& config, const GptWeights& weights, const Tokenizer& tokenizer,
            std::shared_ptr<const TokenSource> source, const ScoreOptions& options,
            std::vector<DocumentScore>* documents) {
  const auto start = Clock::now();
  const std::string name = source->name();
  const int64_t context = options.context > 0 ? options.context : config.context;
  const int64_t capacity = std::max(options.batch_tokens, context);
  const EvaluationBatches batches(
      std::move(source), {.tokens = capacity, .context = context, .stride = options.stride, .flat = options.flat});
  const Device device = weights.master.device;
  const GptTypes types = types_of(weights);
  Gpt model(config, types,
            {.capacity = capacity,
             .looping = options.looping,
             .products = options.products,
             .max_positions = std::max(context, config.context),
             .device = device,
             .stream = options.stream});
  if (documents != nullptr) documents->assign(size_t(batches.documents()), {});
  // The sums of one batch. Batches are added in their order, whichever rank scored them.
  struct Sums {
    double loss = 0;
    int64_t targets = 0, bytes = 0;
  };
  std::vector<Sums> sums(size_t(batches.count()));
  const int64_t rank = options.ranks != nullptr ? options.ranks->rank() : 0;
  const int64_t world = options.ranks != nullptr ? options.ranks->world() : 1;
  INGOT_CHECK(world == 1 || documents == nullptr, "score: found documents and ", world, " ranks, expected one of them");
  Batch batch;
  DeviceBatch on_device(device, options.stream, capacity);
  Arena memory(capacity * size_of(types.sums()), gpu::memory_of(device));
  for (int64_t i = rank; i < batches.count(); i += world) {
    batches.fill(i, batch);
    const Tensor losses = memory.at(0, types.sums(), {batch.size()});
    model.losses(weights, on_device.put(batch), losses);
    const HostCopy here(losses, options.stream);
    const Tensor& loss = here.tensor();
    Sums& of_batch = sums[size_t(i)];
    for (int64_t s = 0; s < batch.segments(); ++s)
      for (int64_t t = batch.cu_seqlens[size_t(s)]; t < batch.cu_seqlens[size_t(s) + 1]; ++t) {
        if (batch.targets[size_t(t)] < 0) continue;
        const double nll = loss.dtype == DType::f64 ? loss.ptr<double>()[t] : double(loss.ptr<float>()[t]);
        const int64_t bytes = target_bytes(tokenizer, batch, s, t);
        of_batch.loss += nll;
        of_batch.targets += 1;
        of_batch.bytes += bytes;
        if (documents != nullptr) {
          DocumentScore& d = documents->at(size_t(batch.documents.at(size_t(s))));
          d.loss_sum += nll;
          d.targets += 1;
          d.bytes += bytes;
        }
      }
  }
  if (world > 1) {
    std::vector<Sums> all(sums.size() * size_t(world));
    options.ranks->gather_bytes(sums.data(), int64_t(sums.size() * sizeof(Sums)), all.data());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = all[i % size_t(world) * sums.size() + i];
  }
  DocumentScore sum;
  for (const Sums& s : sums) {
    sum.loss_sum += s.loss;
    sum.targets += s.targets;
    sum.bytes += s.bytes;
  }
  if (!std::isfinite(sum.loss_sum))
    fail(ErrorCode::numeric, "scoring ", name, ": found a loss of ", sum.loss_sum, ", expected a finite number");
  Score total = mean_score(sum);
  total.seconds = seconds_since(start);
  return total;
}

}  // namespace ingot
