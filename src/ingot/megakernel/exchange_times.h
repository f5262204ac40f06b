#pragma once
// Measures an exchange between GPUs (exchange.cuh) in the pattern of a persistent kernel: every block publishes its
// share of the numbers, a grid barrier follows, and every block reads all numbers.
#include <cstdint>

namespace ingot::megakernel {

struct ExchangeTimes {  // microseconds
  // The time from a store on a GPU until a poll on a second GPU sees the value: half of a round trip, because the
  // clocks of the GPUs differ.
  double one_way = 0;
  double both_ways = 0;  // the same while the second GPU also sends words
  double local = 0;      // a grid barrier within one GPU
  double exchange = 0;   // a grid barrier and the sum of the numbers of all GPUs
};
// The concurrent work of the remaining warps of all SMs, at full speed: nothing, read memory, or read the next GPU's
// memory.
enum class ExchangeLoad { none, memory, link };
// Exchanges `numbers` numbers between cuda:0 and cuda:(ranks - 1), which must reach each other's memory. Waits are
// bounded: Error(interrupted).
ExchangeTimes measure_exchange(int ranks, uint32_t numbers, ExchangeLoad load);

}  // namespace ingot::megakernel
