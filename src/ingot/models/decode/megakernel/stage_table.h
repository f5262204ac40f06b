#pragma once
// The stages of a token in their order, and the properties of each.
#include <cstdint>

#include "ingot/core/hd.h"

namespace ingot::decode {

enum class Stage { qkv, attention, output, gate_up, down, head };

struct StageTraits {
  bool normed = false;    // multiplies the normalized residual stream
  bool experts = false;   // multiplies by the matrices of the chosen experts
  bool residual = false;  // its rows are added to the residual stream
  bool last = false;      // is the last stage of a layer
  bool logits = false;    // its rows are the logits
};
constexpr StageTraits kStageTable[] = {
    {.normed = true},                                   // qkv
    {},                                                 // attention
    {.residual = true},                                 // output
    {.normed = true, .experts = true},                  // gate_up
    {.experts = true, .residual = true, .last = true},  // down
    {.normed = true, .logits = true},                   // head
};
constexpr uint32_t kStageCount = sizeof(kStageTable) / sizeof(kStageTable[0]);
static_assert(uint32_t(Stage::head) + 1 == kStageCount, "the table has a row for each stage");

// Whether a stage has a property. The compiler turns this function into comparisons with the stages that have the
// property, because the stage is known only at run time, and a table in memory would be read again at each use.
// The remaining comparisons with attention, output, and gate and up in the kernels are deliberate: nvcc 13.0 compiles a
// property in their place to other machine code, with 128 registers and a spill in place of 120 registers.
template <bool StageTraits::*kTrait, uint32_t kFirst = 0> INGOT_HD constexpr bool has(Stage stage) {
  if constexpr (kFirst == kStageCount)
    return false;
  else if constexpr (kStageTable[kFirst].*kTrait)
    return stage == Stage(kFirst) || has<kTrait, kFirst + 1>(stage);
  else
    return has<kTrait, kFirst + 1>(stage);
}
INGOT_HD constexpr bool is_normed(Stage stage) { return has<&StageTraits::normed>(stage); }
INGOT_HD constexpr bool uses_experts(Stage stage) { return has<&StageTraits::experts>(stage); }
INGOT_HD constexpr bool adds_to_residual(Stage stage) { return has<&StageTraits::residual>(stage); }
INGOT_HD constexpr bool yields_logits(Stage stage) { return has<&StageTraits::logits>(stage); }
INGOT_HD constexpr bool ends_layer(Stage stage) { return has<&StageTraits::last>(stage); }

}  // namespace ingot::decode
