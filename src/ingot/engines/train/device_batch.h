#pragma once
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/data/packer.h"
#include "ingot/engines/train/staged.h"
#include "ingot/models/gpt/call.h"

namespace ingot {

// Brings packed batches to where a model reads them.
class DeviceBatch {
 public:
  DeviceBatch(Device device, Stream stream, int64_t most_tokens);
  // Views of the batch itself on the CPU; else copies at the same addresses in every call, made when the stream comes
  // to them and valid until the next call's are, with the batch as the host's twins. Nothing waits for the GPU, unless
  // it is Staged::kTurns calls behind. Empty segments are added on a GPU, so that few numbers of segments occur
  // (segment_bucket): they change no result.
  TokenBatch put(Batch& b);

 private:
  Stream stream_;
  Arena memory_;
  Staged staged_;
  std::vector<int32_t> cuts_, last_;                  // of the latest batch, in host memory
  Tensor tokens_, targets_, positions_, cu_seqlens_;  // of the most that fits; empty on the CPU
};

}  // namespace ingot
