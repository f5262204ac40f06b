#include "ingot/engines/export/hessian.h"

#include "ingot/core/check.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/data/packer.h"
#include "ingot/engines/train/device_batch.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/copy/host_copy.h"

namespace ingot {
namespace {

// For each parameter that is a matrix of a product: which rows of which layer are the product's input.
std::map<std::string, std::pair<MatrixInput, int>> inputs_of(const GptConfig& c) {
  std::map<std::string, std::pair<MatrixInput, int>> all;
  for (int i = 0; i < int(c.layers); ++i) {
    const std::string block = "blocks." + std::to_string(i) + ".";
    for (const char* name : {"attn.q.weight", "attn.k.weight", "attn.v.weight"})
      all[block + name] = {MatrixInput::attention, i};
    all[block + "attn.o.weight"] = {MatrixInput::attention_output, i};
    all[block + "mlp.up.weight"] = {MatrixInput::mlp_up, i};
    all[block + "mlp.down.weight"] = {MatrixInput::mlp_down, i};
  }
  if (c.factorised()) {
    all["embed_proj.weight"] = {MatrixInput::embed_proj, 0};
    all["head_proj.weight"] = {MatrixInput::head_proj, 0};
  }
  all[c.tied_embeddings ? "tok_emb.weight" : "lm_head.weight"] = {MatrixInput::head, 0};
  return all;
}

}  // namespace

Hessians::Hessians(const GptConfig& config, const GptTypes& types, Device device, Stream stream)
    : stream_(stream), on_gpu_(device.kind == Device::cuda), of_parameter_(inputs_of(config)) {
  const ParameterLayout layout(config);
  std::map<std::pair<MatrixInput, int>, int64_t> widths;
  for (const auto& [name, input] : of_parameter_) widths[input] = layout.find(name).shape[-1];
  int64_t bytes = 0;
  for (const auto& [input, n] : widths) bytes += Arena::aligned(types.sums(), {n, n});
  memory_ = Arena(bytes, gpu::memory_of(device));
  for (const auto& [input, n] : widths) {
    Sum& s = sums_[input];
    s.batch = memory_.take(types.sums(), {n, n});
    s.total.resize(size_t(n * n));
    fill({.to = s.batch}, stream_);
  }
}

void Hessians::seen(MatrixInput which, int layer, const Tensor& x) {
  const auto found = sums_.find({which, layer});
  INGOT_CHECK(found != sums_.end(), "hessians: found rows of layer ", layer, ", expected one of the model's matrices");
  const Tensor& sum = found->second.batch;
  matmul({.a = x, .b = x, .c = sum, .transpose_a = true, .beta = 1, .symmetric = true}, stream_);
}

void Hessians::end_batch() {
  constexpr int64_t kBatches = 16;  // golf's sums (218 MB) are copied to the host after this many batches
  if (++batches_ >= (on_gpu_ ? kBatches : 1)) end();
}
void Hessians::end() {
  if (batches_ == 0) return;
  batches_ = 0;
  for (auto& [input, s] : sums_) {
    const HostCopy here(s.batch, stream_);
    const Tensor& sum = here.tensor();
    double* const total = s.total.data();
    parallel_for(int64_t(s.total.size()), 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        total[i] += sum.dtype == DType::f64 ? sum.ptr<double>()[i] : double(sum.ptr<float>()[i]);
    });
    fill({.to = s.batch}, stream_);
  }
}

std::span<const double> Hessians::of(const std::string& parameter) const {
  const auto found = of_parameter_.find(parameter);
  if (found == of_parameter_.end()) return {};
  return sums_.at(found->second).total;
}

Hessians capture_hessians(const GptConfig& config, const GptWeights& weights, std::shared_ptr<const TokenSource> text,
                          const CalibrationOptions& o) {
  INGOT_CHECK(o.batches >= 1 && o.batch_tokens >= 1, "hessians: found ", o.batches, " batches of ", o.batch_tokens,
              " tokens, expected at least one of one");
  // An additional token is needed as the last target. With this bound the product does not overflow.
  if (o.batches > (text->size() - 1) / o.batch_tokens)
    fail(ErrorCode::bad_data, text->name(), ": found ", text->size(), " tokens for calibration, expected ", o.batches,
         " batches of ", o.batch_tokens, " and one more; ask for fewer batches, or for fewer tokens per batch");
  const DType compute = weights.compute ? weights.compute.dtype : weights.master.dtype;
  const GptTypes types(weights.master.dtype, compute, compute);
  const Device device = weights.master.device;
  Gpt model(
      config, types,
      {.capacity = o.batch_tokens, .looping = o.looping, .products = o.products, .device = device, .stream = o.stream});
  const Packer packer(
      text, {.order = BatchOrder::shuffled, .tokens = o.batch_tokens, .max_segment = config.context, .seed = o.seed});
  Hessians hessians(config, types, device, o.stream);
  DeviceBatch on_device(device, o.stream, o.batch_tokens);
  Arena memory(Arena::aligned(types.sums(), {o.batch_tokens}), gpu::memory_of(device));
  const Tensor losses = memory.take(types.sums(), {o.batch_tokens});
  Batch batch;
  for (int64_t i = 0; i < o.batches; ++i) {
    packer.fill(i, batch);
    model.losses(weights, on_device.put(batch), losses, nullptr, &hessians);
    hessians.end_batch();
  }
  hessians.end();
  return hessians;
}

}  // namespace ingot
