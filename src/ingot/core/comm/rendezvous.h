#pragma once
// How the ranks of a run find each other: by torchrun's variables, over TCP.
#include <string>
#include <vector>

namespace ingot {

struct RankPlace {
  int rank = 0, world = 1, local_rank = 0, local_world = 1;  // local: of this host
  std::string address = "127.0.0.1";                         // where rank 0 listens
  int port = 0;
  // Two runs whose ports are neighbours refuse each other's ranks by this.
  std::string run;
  int listener = -1;     // rank 0's listening socket where it inherited one; it takes it over
  double seconds = 300;  // until all ranks must have come
};

// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and LOCAL_WORLD_SIZE (else all are on one host); world 1
// where RANK and WORLD_SIZE are not set. torchrun's own store may listen on MASTER_PORT: the ranks then take the next
// ports.
RankPlace rank_place_from_environment();

// A socket on the loopback interface and a free port of it.
struct LocalListener {
  int descriptor = -1, port = 0;
};
LocalListener listen_locally();

// One connected socket per rank, -1 at this one's own. Ranks that have not come in time are named.
std::vector<int> connect_ranks(const RankPlace& place);

}  // namespace ingot
