#pragma once
// What an exchange between GPUs costs (exchange.cuh), in the surroundings it has in a persistent kernel: every block
// publishes its share of the numbers, a grid barrier follows, every block reads all.
#include <cstdint>

namespace ingot::megakernel {

struct ExchangeTimes {  // microseconds
  // From a store on one GPU to the poll on another that sees it: half of there and back, as GPUs' clocks differ.
  double one_way = 0;
  double both_ways = 0;  // the same where the other GPU sends words of its own at the same time
  double local = 0;      // of a grid barrier within a GPU
  double exchange = 0;   // of one that adds the numbers of all GPUs on the way
};
// What the other warps of all SMs do meanwhile, as fast as they can: nothing, read memory, read the next GPU's memory.
enum class ExchangeLoad { none, memory, link };
// Of `numbers` numbers over cuda:0 to cuda:(ranks - 1), which reach each other's memory. Waits are bounded:
// Error(interrupted).
ExchangeTimes measure_exchange(int ranks, uint32_t numbers, ExchangeLoad load);

}  // namespace ingot::megakernel
