#pragma once
// Several processes that train or score one model: starting them, and the communication between a started process and
// its parent.
#include <functional>
#include <memory>
#include <string>

#include "ingot/core/comm/communicator.h"
#include "ingot/core/comm/rendezvous.h"
#include "ingot/models/gpt/config/config.h"
#include "ingot/models/options.h"

namespace ingot::cli {

// Starts `count` processes of this program with the same arguments and a rank in the environment, and returns when all
// have ended successfully. The first SIGINT or SIGTERM asks the processes to save and stop, the second one ends the
// processes at once. If a rank fails, all ranks end, and one Error names the rank; `advice` is added to the message if
// a rank was lost.
void start_ranks(int count, const std::function<std::string()>& advice);

// For a process that start_ranks started; in other processes these functions do nothing.
bool was_started();
int inherited_listener();      // of rank 0; -1: none
int inherited_counter();       // a SharedCounter of all ranks; -1: none
void report_training_begun();  // from now on a signal lets the run save
bool asked_to_stop();
// The device of a rank's model: each rank of a host has its own GPU, or all ranks run on the CPU. `place` is null for a
// process without other ranks.
Device device_of_rank(const GptConfig& config, DeviceChoice device, const RankPlace* place);
// Sends an error to the parent process, which reports the error, and ends this process.
void hand_over(const Error& e, bool lost);

}  // namespace ingot::cli
