#pragma once
// Runs the ranks of a test as threads of a process, communicating over real sockets.
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ingot/core/comm/socket_communicator.h"

namespace ingot::testing {

// Runs `body` on every rank. Returns the error message of each rank, empty for a rank without an error.
inline std::vector<std::string> run_ranks(int world, double deadline,
                                          const std::function<void(SocketCommunicator&)>& body) {
  const LocalListener meet = listen_locally();
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r)
    threads.emplace_back([&, r] {
      try {
        SocketCommunicator ranks({.rank = r,
                                  .world = world,
                                  .local_rank = r,
                                  .port = meet.port,
                                  .listener = r == 0 ? meet.descriptor : -1,
                                  .seconds = 20},
                                 deadline);
        body(ranks);
      } catch (const std::exception& e) { errors[size_t(r)] = e.what(); }
    });
  for (std::thread& t : threads) t.join();
  return errors;
}

}  // namespace ingot::testing
