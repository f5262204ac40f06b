#pragma once
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/data/packer.h"
#include "ingot/engines/train/staged.h"
#include "ingot/models/gpt/call.h"

namespace ingot {

// Copies packed batches to the device of a model.
class DeviceBatch {
 public:
  DeviceBatch(Device device, Stream stream, int64_t most_tokens);
  // Puts a batch on the device. On the CPU the result consists of views of the batch. On a GPU it consists of copies,
  // at the same addresses in every call, made in stream order and valid until the next call's copies; the batch itself
  // holds the same numbers in host memory. The call waits for the GPU only if the GPU is Staged::kTurns calls behind.
  // On a GPU empty segments are added, without an effect on results, so that few different numbers of segments occur
  // (segment_bucket).
  TokenBatch put(Batch& b);

 private:
  Stream stream_;
  Arena memory_;
  Staged staged_;
  std::vector<int32_t> cuts_, last_;                  // of the latest batch, in host memory
  Tensor tokens_, targets_, positions_, cu_seqlens_;  // of the largest batch; empty on the CPU
};

}  // namespace ingot
