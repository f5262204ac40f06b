#include "ingot/engines/train/evaluate.h"

#include <algorithm>
#include <chrono>

namespace ingot {

TokenBatch as_tensors(Batch& b) {
  const int64_t T = b.size();
  return {Tensor(b.tokens.data(), {T}), Tensor(b.targets.data(), {T}), Tensor(b.positions.data(), {T}),
          Tensor(b.cu_seqlens.data(), {int64_t(b.cu_seqlens.size())})};
}

Score score(const GptConfig& config, const Tensor& weights, const Tokenizer& tokenizer,
            std::shared_ptr<const TokenSource> source, const ScoreOptions& options,
            std::vector<DocumentScore>* documents) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t context = options.context > 0 ? options.context : config.context;
  const int64_t capacity = std::max(options.batch_tokens, context);
  const EvaluationBatches batches(
      std::move(source), {.tokens = capacity, .context = context, .stride = options.stride, .flat = options.flat});
  Gpt model(config, weights.dtype,
            {.capacity = capacity,
             .looping = options.looping,
             .products = options.products,
             .max_positions = std::max(context, config.context)});
  if (documents != nullptr) documents->assign(size_t(batches.documents()), {});
  Score total;
  double sum = 0;
  Batch batch;
  std::vector<double> memory(static_cast<size_t>(capacity));  // holds f32 or f64 losses
  for (int64_t i = 0; i < batches.count(); ++i) {
    batches.fill(i, batch);
    const Tensor loss(memory.data(), weights.dtype, {batch.size()});
    model.losses(weights, as_tensors(batch), loss);
    for (int64_t s = 0; s < batch.segments(); ++s)
      for (int64_t t = batch.cu_seqlens[size_t(s)]; t < batch.cu_seqlens[size_t(s) + 1]; ++t) {
        const int32_t target = batch.targets[size_t(t)];
        if (target < 0) continue;
        const double nll = loss.dtype == DType::f64 ? loss.ptr<double>()[t] : double(loss.ptr<float>()[t]);
        const int64_t bytes = tokenizer.bytes(batch.tokens[size_t(t)], target);
        sum += nll;
        total.targets += 1;
        total.bytes += bytes;
        if (documents != nullptr) {
          DocumentScore& d = documents->at(size_t(batch.documents.at(size_t(s))));
          d.loss_sum += nll;
          d.targets += 1;
          d.bytes += bytes;
        }
      }
  }
  total.loss = total.targets > 0 ? sum / double(total.targets) : 0;
  total.bits_per_byte = total.bytes > 0 ? bits_per_byte(sum, total.bytes) : 0;
  total.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return total;
}

}  // namespace ingot
