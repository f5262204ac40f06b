#pragma once
// For tests. While it is on, fp32 products with operands rounded to bf16 run by tiles on every CPU, a plain loop in
// place of the instruction: packing, cuts and edges are then those of a CPU with AMX.
namespace ingot::detail {
void emulate_tiles(bool on);
}
