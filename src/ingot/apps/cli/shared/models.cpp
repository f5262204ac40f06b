#include "ingot/apps/cli/shared/models.h"

#include <algorithm>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/gpu/device.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/models/families/family.h"
#include "ingot/models/gpt_oss/config.h"
#include "ingot/models/gpt_oss/synthetic.h"

namespace ingot::cli {

void add_options(Command& c, DecoderOptions& o) {
  c.integer("--layers N", o.layers, 0, 1 << 20, "run the first N layers of a published model; 0: all (default: 0)");
  add_quant(c, o.e4m3_experts);
  add_device(c, o.device);
}

void add_quant(Command& c, bool& e4m3_experts) {
  c.flag(
      "--quant", e4m3_experts,
      "round the inputs of GPT-OSS's experts to e4m3, with a scale per 32 numbers (on a GPU: without the megakernel)");
}

namespace {
constexpr int64_t kMostGpus = 8;

void add_split(Command& c, Split& split) {
  c.choice<Split>(
      "--split HOW", split,
      {{name_of(Split::tensor), Split::tensor}, {name_of(Split::attention_experts), Split::attention_experts}},
      "how the GPUs share the model: a part of every layer on each GPU, or attention on the first GPU and the experts "
      "on the others (default: tensor)");
}
}  // namespace

void add_gpus(Command& c, int64_t& gpus, Split& split) {
  c.integer("--gpus N", gpus, 1, kMostGpus,
            "share a published model other than Gemma among the first N GPUs (default: 1)");
  add_split(c, split);
}
void add_gpu_counts(Command& c, std::string& list, Split& split) {
  c.text("--gpus LIST", list, "also share the model among the first N GPUs, for each N in LIST, such as 2 or 2,4,8");
  add_split(c, split);
}
std::vector<int> gpu_counts(const std::string& list) {
  std::vector<int> counts;
  for (const int64_t n : numbers_in("--gpus", list)) {
    if (n > kMostGpus) fail(ErrorCode::usage, "--gpus: found ", n, ", expected numbers from 1 to ", kMostGpus);
    if (n > 1) counts.push_back(int(n));
  }
  return counts;
}

void refuse_split_of_one(const Command& c, int64_t gpus) {
  if (gpus == 1) c.refuse_given({"split"}, "one GPU (--gpus shares a model)");
}

void add_gpu_options(Command& c, DecoderOptions& o) {
  add_gpus(c, o.gpus, o.split);
  c.flag("--whole-head", o.int8_prefilter,
         "read the whole head in bf16 for every token (default: on GPUs with enough memory an int8 prefilter "
         "selects the rows to read; the tokens are the same)")
      .negated();
}

OpenedModel open_model(const std::string& path, int64_t tokens, const std::string& given_by, const DecoderOptions& o) {
  if (o.e4m3_experts && exists(path) && (is_family(path) || !is_gpt_oss(path)))
    fail(ErrorCode::usage, "--quant: found ", path, ", which is not GPT-OSS, expected a GPT-OSS model");
  if (const int64_t room = context_of(path, 0, tokens); tokens > room)
    fail(ErrorCode::usage, given_by, ": found ", tokens, " tokens, expected at most ", room, ", the model's context");
  DecoderOptions options = o;
  options.context = tokens;
  OpenedModel m = ingot::open_model(path, options);
  if (!m.note.empty()) log_info(path, ": ", m.note);
  if (m.decoder->device().kind == Device::cuda)
    log_info(path, ": on ", o.gpus > 1 ? std::to_string(o.gpus) + " of " : "",
             gpu::device_info(m.decoder->device().index).name);
  if (m.load_seconds > 1)
    log_info(path, ": ", format_bytes(double(m.weight_bytes)), " of weights in ", fixed(m.load_seconds, 1), " s");
  return m;
}

// A step of the engines has at most 8 rows, one of them for the pending token.
constexpr int64_t kMostDraft = 7;
void add_options(Command& c, DraftLengths& o) {
  c.integer("--draft-max N", o.most, 1, kMostDraft, "the most tokens of a draft (default: 7)");
  c.text("--draft-costs LIST", o.costs,
         "relative times of steps of 1, 2, ... tokens, such as 100,110,120, which determine the lengths of drafts "
         "(default: measured before the first answer with drafts)");
}
draft::Options draft_options(const DraftLengths& o) {
  const std::vector<int64_t> costs = numbers_in("--draft-costs", o.costs);
  if (costs.size() == 1)
    fail(ErrorCode::usage, "--draft-costs: found ", o.costs,
         " alone, expected the times of steps of 1, 2 and more tokens, such as 100,110,120");
  return {.most = o.most, .step_costs = {costs.begin(), costs.end()}};
}
void add_draft_options(Command& c, DraftCommand& o, const char* help) {
  c.text("--draft HOW", o.how, help);
  add_options(c, o.lengths);
  c.text("--draft-layers LIST", o.layers,
         "the numbers of layers after which the draft head reads the model's hidden states, such as 2,18,33 "
         "(default: the layers in the head's config.json)");
  c.integer("--draft-window N", o.window, 0, 1 << 30,
            "the latest tokens that the draft head attends to; 0: all (default: 0)");
  c.choice("--draft-dense FORM", o.dense, {"bf16", "fp8", "mxfp4"},
           "format in memory of the draft head's matrices (default: as stored)");
  c.flag(
      "--draft-exact", o.exact,
      "on a GPU, compute every token of an answer with drafts by a draft step, even a token without a draft, so that "
      "the answer does not depend on the drafts; a token without a draft then takes longer. On a CPU, answers never "
      "depend on drafts");
}
void add_options(Command& c, DraftCommand& o) {
  add_draft_options(c, o,
                    "how to guess the next tokens, which the model then checks in one step: none; lookup, from earlier "
                    "places of the same text; or the directory of a published EAGLE-3 head, which guesses in "
                    "addition to lookup. On a CPU the answer stays the same; on a GPU the answer may differ where two "
                    "tokens are almost equally likely, see --draft-exact (default: none)");
}
void choose_draft_head(const Command& c, const DraftCommand& o, DecoderOptions& on,
                       const std::vector<std::string>& words) {
  if (!o.any()) c.refuse_given({"draft-max", "draft-costs", "draft-exact"}, "an answer without --draft");
  (void)draft_options(o.lengths);  // so that a wrong list is found before the model is loaded
  if (std::find(words.begin(), words.end(), o.how) != words.end())
    return c.refuse_given({"draft-layers", "draft-window", "draft-dense"}, "an answer without a draft head");
  std::string known;
  for (const std::string& word : words) known += word + ", ";
  if (!exists(o.how))
    fail(ErrorCode::usage, "--draft: found '", o.how, "', expected ", known, "or the directory of a draft head");
  on.draft_head = o.how;
  on.draft_window = o.window;
  on.draft_dense = o.dense;
  if (!o.layers.empty()) on.draft_layers = numbers_in("--draft-layers", o.layers, false, 0);
}
void require_drafts(const Decoder& decoder) {
  if (decoder.draft_rows() <= 1)
    fail(ErrorCode::unsupported, "--draft: found a model on ", decoder.device(),
         " whose engine computes no drafts, expected a published model, on a GPU one with at least 163 KB of shared "
         "memory per block");
}
draft::Options lookup_options(const DraftCommand& o) {
  draft::Options options = draft_options(o.lengths);
  options.make = draft::make_lookup;
  options.exact = o.exact;
  return options;
}
draft::Options draft_options(const DraftCommand& o, const Decoder& decoder) {
  if (!o.any()) return {};
  require_drafts(decoder);
  return lookup_options(o);
}

namespace {
bool is_run(const std::string& path) {
  try {
    open_checkpoint(path);
    return true;
  } catch (const Error&) { return false; }
}
}  // namespace

namespace {
[[noreturn]] void refuse_other_than(const char* kind, const std::string& path) {
  if (is_run(path))
    fail(ErrorCode::unsupported, path, ": found a run of `ingot train`, expected ", kind,
         "; `ingot generate`, `eval` and `serve` take runs");
  fail(exists(path) ? ErrorCode::unsupported : ErrorCode::not_found, path, ": found ", found_instead(path),
       ", expected ", kind, ": a directory with config.json and safetensors, an archive, a GGUF or an .iris file");
}
}  // namespace

void require_gpt_oss(const std::string& path) {
  if (is_family(path)) fail(ErrorCode::unsupported, path, ": found a model of another family, expected GPT-OSS");
  if (!is_gpt_oss(path)) refuse_other_than("GPT-OSS", path);
}
// Only `convert` and `bench decode`, which have --synthetic and --dense, call this with a name of random weights.
void require_published(const std::string& path) {
  if (const auto random = synthetic_model(path))
    fail(ErrorCode::usage, path, ": found the name of random weights, expected a path, or --synthetic ", random->size,
         " --dense ", random->dense, " in its place");
  if (!is_gpt_oss(path) && !is_family(path))
    refuse_other_than("GPT-OSS, Llama, Mistral, Qwen or Gemma (docs/models.md)", path);
}

bool chats(const std::string& path) {
  const std::vector<ModelKind> kinds = model_kinds();
  return std::any_of(kinds.begin(), kinds.end(), [&](const ModelKind& k) { return k.chats && k.holds(path); });
}

// The published models are the kinds that chat.
void require_chat(const std::string& path) {
  if (!chats(path)) require_published(path);
}

int64_t context_of(const std::string& path, int64_t asked, int64_t fallback) {
  if (asked > 0) return asked;
  const ModelKind& kind = model_kind_of(path);
  return kind.context == nullptr ? fallback : std::min(fallback, kind.context(path));
}

void require_no_gpt_oss(const std::string& path) {
  if (chats(path))
    fail(ErrorCode::unsupported, path,
         ": found a published model, expected a run of `ingot train`, a checkpoint or an artifact of one");
}

void add_model(Command& c, std::string& run, std::string& model) {
  c.text("RUN", run,
         "a run of `ingot train`, one of its checkpoints, an artifact of `ingot export`, or a published model (a "
         "checkpoint's directory, an archive, a GGUF or an .iris file)");
  c.text("--model PATH", model, "the same as RUN");
}
std::string chosen_model(const std::string& run, const std::string& model, const char* positional) {
  if (run.empty() == model.empty())
    fail(ErrorCode::usage, "found ", run.empty() ? "neither " : "", positional, run.empty() ? " nor" : " and",
         " --model, expected one of them");
  return run.empty() ? model : run;
}

void add_synthetic(Command& c, SyntheticOptions& o, const std::string& model) {
  const std::string help = "in place of " + model +
                           ": random weights in GPT-OSS's shapes, made on the GPU; answers are random text. small "
                           "also runs on a CPU, for tests";
  c.choice("--synthetic SIZE", o.size, {"20b", "120b", "small"}, help.c_str());
  add_dense(c, o.dense);
}
void add_dense(Command& c, std::string& dense) {
  c.choice("--dense FORM", dense, {"bf16", "fp8", "mxfp4"},
           "format in memory of the matrices of attention, dense MLPs and the head (default: as stored in a "
           "checkpoint; bf16 "
           "for GGUF's blocks and for random weights)");
}
std::string chosen_model(const std::string& run, const std::string& model, const SyntheticOptions& o) {
  if (o.size.empty()) return chosen_model(run, model);
  if (!run.empty() || !model.empty())
    fail(ErrorCode::usage, "found --synthetic and ", run.empty() ? "--model" : "RUN", ", expected one of them");
  return o.dense.empty() || o.dense == "bf16" ? "synthetic:" + o.size : "synthetic:" + o.size + ":" + o.dense;
}

std::vector<std::vector<int32_t>> read_ids(const std::string& path) {
  const std::string text = read_input(path);
  std::vector<std::vector<int32_t>> lists;
  int64_t line = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view row = std::string_view(text).substr(at, end - at);
    at = end + 1;
    ++line;
    if (row.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = detail::concat(path, ": line ", line);
    const Json json = parse_json(row, where);
    const auto wrong = [&](const std::string& found) {
      fail(ErrorCode::bad_data, where, ": found ", found, ", expected a list of token ids");
    };
    if (!json.is_array()) wrong(describe_json(json));
    if (json.empty()) wrong("an empty list");
    std::vector<int32_t>& ids = lists.emplace_back();
    for (const Json& id : json) {
      if (!id.is_number_integer() || id < 0 || id > INT32_MAX) wrong(describe_json(id) + " in it");
      ids.push_back(id.get<int32_t>());
    }
  }
  if (lists.empty()) fail(ErrorCode::bad_data, path, ": found no line, expected one list of token ids a line");
  return lists;
}

void check_ids(const std::vector<std::vector<int32_t>>& lists, int64_t vocab, const std::string& path) {
  for (size_t i = 0; i < lists.size(); ++i)
    for (const int32_t id : lists[i])
      if (id >= vocab)
        fail(ErrorCode::bad_data, path, ": found id ", id, " in list ", i + 1, ", expected 0 to ", vocab - 1,
             ", the model's vocabulary");
}

}  // namespace ingot::cli
