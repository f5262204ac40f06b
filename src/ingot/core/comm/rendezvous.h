#pragma once
// Rendezvous: the ranks of a run find each other through torchrun's environment variables and connect over TCP.
#include <string>
#include <vector>

namespace ingot {

struct RankPlace {
  int rank = 0, world = 1, local_rank = 0, local_world = 1;  // local_*: counted on this host
  std::string address = "127.0.0.1";                         // rank 0's listening address
  int port = 0;
  // Identifies the run: two runs on neighbouring ports refuse each other's ranks by this value.
  std::string run;
  int listener = -1;     // a listening socket inherited and owned by rank 0, or -1
  double seconds = 300;  // time limit for all ranks to connect
};

// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and LOCAL_WORLD_SIZE (without the last variable, all
// ranks are assumed to be on the same host). The world is 1 where RANK and WORLD_SIZE are not set. Where torchrun's own
// store listens on MASTER_PORT, the ranks use the following ports.
RankPlace rank_place_from_environment();

// Opens a listening socket on a free port of the loopback interface.
struct LocalListener {
  int descriptor = -1, port = 0;
};
LocalListener listen_locally();

// Returns one connected socket per rank, and -1 in place of this rank. Throws an error with the ranks that did not
// connect in time.
std::vector<int> connect_ranks(const RankPlace& place);

}  // namespace ingot
