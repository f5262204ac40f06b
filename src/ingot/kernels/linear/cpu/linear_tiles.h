#pragma once
// For tests. While this switch is on, every CPU computes fp32 products with operands rounded to bf16 by tiles, with a
// plain loop in place of the AMX instruction: packing, cuts and edges are then the same as on a CPU with AMX.
namespace ingot::detail {
void emulate_tiles(bool on);
bool tiles_emulated();
}  // namespace ingot::detail
