// Part of libingot_bench.so (testing/native.h).
#include "ingot/kernels/sampling/sampling.h"

#include "ingot/testing/native.h"

namespace ingot::testing {

EXPORT int ingot_bench_sample_workspace(int64_t rows, int64_t* bytes) {
  return guarded([&] { *bytes = sample_workspace_bytes(rows, kGpu); });
}
// logits (rows, vocab) f32, tokens (rows) i32. allowed (rows, (vocab + 31) / 32) u32, or null.
EXPORT int ingot_bench_sample(void* logits, void* tokens, int64_t rows, int64_t vocab, double temperature,
                              int64_t top_k, double top_p, double min_p, void* allowed, int64_t step, void* workspace,
                              int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    sample({.logits = Tensor(logits, DType::f32, {rows, vocab}, kGpu),
            .tokens = Tensor(tokens, DType::i32, {rows}, kGpu),
            .options = {.temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p},
            .seed = 1,
            .step = uint32_t(step),
            .allowed = allowed != nullptr ? Tensor(allowed, DType::u32, {rows, (vocab + 31) / 32}, kGpu) : Tensor(),
            .workspace = raw(workspace, workspace_bytes)},
           {stream});
  });
}

}  // namespace ingot::testing
