#pragma once
// Functions shared by the commands that adapt a model to a text.
#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/comm/socket_communicator.h"
#include "ingot/engines/ttt/ttt.h"

namespace ingot::cli {

struct AdaptationCommand {
  bool on = false;
  AdaptationOptions options;
  int64_t documents = 0, window = 0;  // 0: a default that depends on the device, or on the model
  std::string log, adapters, inexact = "none";
  int64_t ranks = 1;
  RankPlace place;
  std::shared_ptr<SocketCommunicator> others;  // only if this process is one of several
  bool is_first() const { return others == nullptr || others->rank() == 0; }
};
void add_constants(Command& c, AdaptationCommand& o);
// The option --ttt, its constants, and the further options of scores.
void add_options(Command& c, AdaptationCommand& o);
void refuse_without_ttt(const Command& c);

// The checked options for a model.
AdaptationOptions options_for(const AdaptationCommand& o, const TrainedModel& model);

// The tokens of a text, after bos if the tokenizer has one.
Adapted adapt(const AdaptationCommand& o, const TrainedModel& model, Device device, const std::string& text,
              const std::string& from, int64_t passes = 1);

AdaptedScore score_adapted(const AdaptationCommand& o, const TrainedModel& model, DeviceChoice device,
                           std::shared_ptr<const TokenSource> source, std::vector<DocumentScore>* documents);

}  // namespace ingot::cli
