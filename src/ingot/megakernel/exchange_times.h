#pragma once
// What an exchange between GPUs costs (exchange.cuh), in the surroundings it has in a persistent kernel: every block
// publishes its share of the numbers, a grid barrier follows, every block reads all.
#include <cstdint>

namespace ingot::megakernel {

struct ExchangeTimes {  // microseconds
  double one_way = 0;   // from a store on one GPU to the poll on another that sees it
  double local = 0;     // of a hand-off within a GPU
  double exchange = 0;  // of one that adds the numbers of all GPUs on the way
};
// Of `numbers` numbers over cuda:0 to cuda:(ranks - 1), which reach each other's memory; `loaded`: while the other
// warps of all SMs read memory as fast as they can. Waits are bounded: Error(interrupted).
ExchangeTimes measure_exchange(int ranks, uint32_t numbers, bool loaded);

}  // namespace ingot::megakernel
