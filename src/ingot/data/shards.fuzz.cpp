// An accepted shard can be read to its end with ids inside the vocabulary and can be packed, and each of its targets is
// counted once.
#include "ingot/data/evaluation.h"
#include "ingot/testing/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int64_t kVocab = 1000;
  const ingot::testing::MemoryFile input(data, size);
  return ingot::testing::refuse_or_accept([&] {
    const auto source = ingot::open_shards({input.path()}, 1, kVocab);
    std::vector<int32_t> tokens(size_t(source->size()));
    source->read(0, tokens);
    for (const int32_t id : tokens) FUZZ_REQUIRE(id >= 0 && id < kVocab);
    ingot::Batch batch;
    for (const auto order : {ingot::BatchOrder::shuffled, ingot::BatchOrder::sequential}) {
      const ingot::Packer packer(source, {.order = order, .tokens = 7, .max_segment = 3});
      for (const int64_t k : {0, 1, 1000}) {
        packer.fill(k, batch);
        FUZZ_REQUIRE(batch.size() == 7 && batch.cu_seqlens.back() == 7);
      }
    }
    const ingot::EvaluationBatches evaluation(source, {.tokens = 16, .context = 8, .stride = 2});
    int64_t scored = 0;
    for (int64_t i = 0; i < evaluation.count(); ++i) {
      evaluation.fill(i, batch);
      for (const int32_t target : batch.targets) scored += target >= 0;
    }
    FUZZ_REQUIRE(scored == source->size() - 1);
  });
}
