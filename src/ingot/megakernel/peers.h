#pragma once

namespace ingot::megakernel {

// After this call cuda:0 to cuda:(ranks - 1) reach each other's memory. Each pair is enabled once per process, because
// CUDA reports a second time as an error, which its tools would show.
void let_peers_reach(int ranks);

}  // namespace ingot::megakernel
