#pragma once
// What the commands that adapt a model to a text share.
#include "ingot/apps/cli/cli.h"
#include "ingot/apps/cli/runs.h"
#include "ingot/engines/ttt/ttt.h"

namespace ingot::cli {

struct AdaptationCommand {
  bool on = false;
  AdaptationOptions options;
  int64_t documents = 0;  // 0: by the device
  std::string log, adapters;
};
// --ttt and its constants.
void add_options(Command& c, AdaptationCommand& o);
void refuse_without_ttt(const Command& c);

AdaptedScore score_adapted(const AdaptationCommand& o, const TrainedModel& model, const std::string& device,
                           std::shared_ptr<const TokenSource> source, std::vector<DocumentScore>* documents);

}  // namespace ingot::cli
