#pragma once
// Several processes that train or score one model: how they are started, and how a started one talks with who started
// it.
#include <functional>
#include <memory>
#include <string>

#include "ingot/core/comm/communicator.h"
#include "ingot/core/comm/rendezvous.h"
#include "ingot/models/gpt/config/config.h"
#include "ingot/models/options.h"

namespace ingot::cli {

// Starts `count` processes of this program with the same words, each with its place in the environment, and returns
// when all have ended well. The first SIGINT or SIGTERM asks them to save and stop, the second ends them at once. A
// rank that ends otherwise ends all, with one Error that names it; `advice` is added to it where a rank was lost.
void start_ranks(int count, const std::function<std::string()>& advice);

// In a process that start_ranks started; elsewhere none of these does anything.
bool was_started();
int inherited_listener();  // of rank 0; -1: none
int inherited_counter();   // a SharedCounter of all ranks; -1: none
void tell_training();      // from here on a signal lets the run save
bool asked_to_stop();
// Where a rank's model runs: each rank of a host has a GPU of its own, or all are on the CPU. `place`: null where there
// are no others.
Device device_of_rank(const GptConfig& config, DeviceChoice device, const RankPlace* place);
// Hands an error to who started this process, which says it, and ends this one.
void hand_over(const Error& e, bool lost);

}  // namespace ingot::cli
