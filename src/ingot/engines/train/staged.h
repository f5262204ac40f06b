#pragma once
// Pinned host memory in turns: the host writes a turn while the GPU's stream still reads the previous turns.
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
  // Memory for a turn. Waits if the GPU has not yet read this memory's last turn, kTurns turns ago.
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
  // All copies from this turn's memory are in the stream.
  void end(Stream stream) { read_[turn_]->record(stream); }

 private:
  int64_t step_ = 0, used_ = 0;
  Arena memory_;
  std::array<std::unique_ptr<gpu::Event>, kTurns> read_;  // null: this turn was never used
  size_t turn_ = 0;
};

}  // namespace ingot
