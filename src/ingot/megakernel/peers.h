#pragma once

namespace ingot::megakernel {

// After this call cuda:0 to cuda:(ranks - 1) reach each other's memory. Each pair is enabled once per process, because
// CUDA reports a second call as an error, visible in its tools.
void let_peers_reach(int ranks);

}  // namespace ingot::megakernel
