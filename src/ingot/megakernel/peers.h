#pragma once

namespace ingot::megakernel {

// From now on cuda:0 to cuda:(ranks - 1) reach each other's memory. Each pair is told once a process: a second time
// would be an error of CUDA's, which its tools report.
void let_peers_reach(int ranks);

}  // namespace ingot::megakernel
