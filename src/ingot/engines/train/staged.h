#pragma once
// Pinned host memory used in turns: the host writes one turn while the GPU's stream still reads the previous turns.
#include <array>
#include <memory>

#include "ingot/core/memory/arena.h"
#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"

namespace ingot {

class Staged {
 public:
  static constexpr size_t kTurns = 4;

  Staged() = default;
  explicit Staged(int64_t bytes)
      : step_(Arena::aligned(bytes)), memory_(int64_t(kTurns) * step_, gpu::pinned_memory()) {}
  // Begins a turn. Waits if the GPU has not yet read this turn's memory as it was written kTurns turns ago.
  void begin() {
    turn_ = (turn_ + 1) % kTurns, used_ = 0;
    if (read_[turn_])
      read_[turn_]->synchronize();
    else
      read_[turn_] = std::make_unique<gpu::Event>();
  }
  Tensor take(DType dtype, Shape shape) {
    const Tensor t = memory_.at(int64_t(turn_) * step_ + used_, dtype, shape);
    used_ += Arena::aligned(dtype, shape);
    return t;
  }
  // Call when all copies from this turn's memory are queued on the stream.
  void end(Stream stream) { read_[turn_]->record(stream); }

 private:
  int64_t step_ = 0, used_ = 0;
  Arena memory_;
  std::array<std::unique_ptr<gpu::Event>, kTurns> read_;  // null: this turn was never used
  size_t turn_ = 0;
};

}  // namespace ingot
