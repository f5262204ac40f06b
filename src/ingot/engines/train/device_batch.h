#pragma once
#include "ingot/core/arena.h"
#include "ingot/data/packer.h"
#include "ingot/models/gpt/call.h"

namespace ingot {

// Brings packed batches to where a model reads them.
class DeviceBatch {
 public:
  DeviceBatch(Device device, Stream stream, int64_t most_tokens);
  // Views of the batch itself on the CPU; else copies, valid until the next call, with the batch as the host's twins.
  TokenBatch put(Batch& b) const;

 private:
  Stream stream_;
  Arena memory_;
  Tensor tokens_, targets_, positions_, cu_seqlens_;  // of the most that fits; empty on the CPU
};

}  // namespace ingot
