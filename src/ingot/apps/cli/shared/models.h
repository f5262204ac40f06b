#pragma once
// Opens a model named on the command line, of any kind: a run of `ingot train`, or a published checkpoint.
#include <string>
#include <vector>

#include "ingot/models/draft/answer_drafts.h"
#include "ingot/models/registry.h"

namespace ingot::cli {

class Command;

// Adds --layers, --quant and --device.
void add_options(Command& c, DecoderOptions& o);
void add_quant(Command& c, bool& e4m3_experts);
void add_gpus(Command& c, int64_t& gpus, Split& split);
// Adds --gpus to a command that tries several numbers of GPUs, one after the other: a list like "2,4". Returns the
// numbers above 1.
void add_gpu_counts(Command& c, std::string& list, Split& split);
std::vector<int> gpu_counts(const std::string& list);
// Throws where --split was given for a single GPU.
void refuse_split_of_one(const Command& c, int64_t gpus);
// Calls add_gpus(), and adds --whole-head.
void add_gpu_options(Command& c, DecoderOptions& o);
// `tokens` is the length of the longest sequence that will be needed; `given_by` names what it follows from, such as
// "--context", for the error where the model's context is shorter. Reports the loading time where it is noticeable.
OpenedModel open_model(const std::string& path, int64_t tokens, const std::string& given_by, const DecoderOptions& o);
// --draft-max and --draft-costs: the lengths of drafts (docs/speculation.md).
struct DraftLengths {
  int64_t most = 7;
  std::string costs;  // a list like "100,110,120"; empty: measured
};
void add_options(Command& c, DraftLengths& o);
// Options with these lengths, and without a drafter.
draft::Options draft_options(const DraftLengths& o);
// --draft, the lengths of drafts, the layers and tokens that the draft head reads, the format of its matrices, and
// draft::Options::exact.
struct DraftCommand {
  std::string how = "none";  // none, lookup or prediction, or the directory of a draft head
  DraftLengths lengths;
  std::string layers;  // a list like "2,18,33"
  int64_t window = 0;
  std::string dense;
  bool exact = false;
  bool any() const { return how != "none"; }
};
// Adds --draft, --draft-max, --draft-costs, --draft-layers, --draft-window, --draft-dense and --draft-exact.
void add_options(Command& c, DraftCommand& o);
// The same options, with another help text for --draft.
void add_draft_options(Command& c, DraftCommand& o, const char* help);
// If --draft is not one of `words`, the value is the directory of a draft head, which becomes an option of the model.
// Throws where the directory does not exist, where --draft-costs is no list of costs, and where options of drafts were
// given without drafts.
void choose_draft_head(const Command& c, const DraftCommand& o, DecoderOptions& on,
                       const std::vector<std::string>& words = {"none", "lookup"});
draft::Options lookup_options(const DraftCommand& o);  // of drafts by lookup
// The options of an answer. Error{unsupported} where drafts were asked for and the decoder computes none.
draft::Options draft_options(const DraftCommand& o, const Decoder& decoder);
void require_drafts(const Decoder& decoder);
// Whether a path holds a model of a kind that chats.
bool chats(const std::string& path);
// Throws unless the model chats, for commands that need a chat format.
void require_chat(const std::string& path);
// The context to open a model with: `asked`; where `asked` is 0, `fallback`, or the model's own context if that is
// smaller.
int64_t context_of(const std::string& path, int64_t asked, int64_t fallback);
// Throws unless the model is GPT-OSS, for commands that support no other model.
void require_gpt_oss(const std::string& path);
// Throws unless the model is GPT-OSS or of a family of models/families.
void require_published(const std::string& path);
// Throws for GPT-OSS, for commands that adapt, quantise or train further.
void require_no_gpt_oss(const std::string& path);
// Adds RUN and --model, two ways to name a run or a published model.
void add_model(Command& c, std::string& run, std::string& model);
// RUN or --model, of which exactly one must be given; `positional` is the name of RUN in the command's help.
std::string chosen_model(const std::string& run, const std::string& model, const char* positional = "RUN");

// --dense: the format of a checkpoint's dense matrices in memory.
void add_dense(Command& c, std::string& dense);
// --synthetic and --dense: random weights of GPT-OSS in place of a model's path, and DecoderOptions::dense of a model.
struct SyntheticOptions {
  std::string size, dense;
};
void add_synthetic(Command& c, SyntheticOptions& o, const std::string& model = "RUN");
// The name of the random model (models/gpt_oss/synthetic.h), or chosen_model() where --synthetic was not given.
std::string chosen_model(const std::string& run, const std::string& model, const SyntheticOptions& o);
// The format to which a model's file is converted at loading; random weights need no conversion.
inline std::string dense_at_loading(const SyntheticOptions& o) { return o.size.empty() ? o.dense : ""; }

// Reads a file with one JSON list of ids per line; "-" is standard input.
std::vector<std::vector<int32_t>> read_ids(const std::string& path);
// Checks all lists before the first is used, so that an invalid last list is found before any work.
void check_ids(const std::vector<std::vector<int32_t>>& lists, int64_t vocab, const std::string& path);

}  // namespace ingot::cli
