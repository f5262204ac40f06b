// ingot export: writes a trained model as a small file of quantised weights.
#include <chrono>
#include <cmath>
#include <optional>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/data/documents.h"
#include "ingot/engines/export/gptq.h"
#include "ingot/engines/export/hessian.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/artifact/artifact.h"
#include "ingot/models/gpt/generate/device_weights.h"

namespace ingot::cli {
namespace {

struct ExportCommand {
  std::string run, out, data, matrices = "int6", embedding = "int8", rounding = "gptq", coder = "range",
                              device = "auto";
  double matrix_sigmas = 12.85, embedding_sigmas = 20, damping = 0.01;
  int64_t batches = 64, batch_tokens = 4096, fp16_below = 65536, limit = 16'000'000;
  uint64_t seed = 1;
  bool json = false;
};

// OUT must be new or an artifact; any other file there (a text, an archive, notes) is not replaced.
void require_place(const ExportCommand& o) {
  require_directory_of(o.out);
  if (exists(o.out) && File::open(o.out).size() > 0 && !is_artifact(o.out))
    fail(ErrorCode::usage, o.out, ": found a file that is no artifact, expected a new name or an artifact to replace");
  refuse_to_replace(artifact_tokenizer(o.out), {o.data});
}

// The artifact and its tokenizer. A failed write leaves the earlier files. Only a kill between the two renames can
// leave a new tokenizer beside an old artifact, which then refuses the tokenizer by its hash.
void write_both(const ExportCommand& o, const std::string& bytes, const std::string& tokenizer) {
  AtomicFile model(o.out), beside(artifact_tokenizer(o.out));
  model.write(bytes);
  beside.write(tokenizer);
  beside.commit();  // the tokenizer comes first, so that a new artifact can be read as soon as it exists
  model.commit();
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The run's text, split into training and held-out parts as the run did.
struct Text {
  std::shared_ptr<const TokenSource> train, held_out;
};
Text text_of(const std::string& path, const TrainedModel& model) {
  if (holds_shards(path)) {
    const ShardPaths shards = find_shards(path);
    if (shards.train.empty() || shards.held_out.empty())
      fail(ErrorCode::not_found, path, ": found ", shards.train.size(), " training and ", shards.held_out.size(),
           " held-out shards (val_*.bin), expected both");
    return {open_shards(shards.train, *model.tokenizer), open_shards(shards.held_out, *model.tokenizer)};
  }
  const TrainOptions train = run_config_from_json(model.run_config, model.checkpoint).train;
  const DocumentSplit split = split_documents(documents_of(path), split_options(train));
  return {tokenize_documents(*model.tokenizer, split.train), tokenize_documents(*model.tokenizer, split.held_out)};
}

GptqOptions options_of(const ExportCommand& o, ParameterKind kind) {
  const bool matrix = kind == ParameterKind::matrix;
  return {.bits = (matrix ? o.matrices : o.embedding)[3] - '0',
          .clip_sigmas = matrix ? o.matrix_sigmas : o.embedding_sigmas,
          .damping = o.damping};
}

ArtifactTensor as_fp16(const Parameter& p, std::span<const float> numbers) {
  ArtifactTensor t;
  for (const float x : numbers) {
    t.numbers.push_back(f16(x));
    if (!std::isfinite(float(t.numbers.back())))
      fail(ErrorCode::numeric, "export: ", p.name, ": found ", x, ", expected numbers that fp16 holds");
  }
  return t;
}

ArtifactTensor quantized(const ExportCommand& o, const Parameter& p, std::span<const float> numbers,
                         std::span<const double> hessian) {
  if (p.kind == ParameterKind::scalar || p.shape.numel() < o.fp16_below) return as_fp16(p, numbers);
  const GptqOptions options = options_of(o, p.kind);
  // An embedding that is not the head is not multiplied with anything, so its weights are rounded independently.
  const std::vector<double> none(hessian.empty() ? size_t(p.shape[1] * p.shape[1]) : 0);
  const GptqMatrix m{p.name, p.shape[0], p.shape[1], numbers, hessian.empty() ? std::span(none) : hessian};
  QuantizedMatrix q =
      o.rounding == "nearest" || hessian.empty() ? quantize_to_nearest(m, options) : quantize_gptq(m, options);
  return {.bits = q.bits, .numbers = std::move(q.scales), .values = std::move(q.values)};
}

// The part of the run's configuration that reading and scoring need.
std::string kept_config(const TrainedModel& model) {
  const TrainOptions t = run_config_from_json(model.run_config, model.checkpoint).train;
  return write_json(Json{{"model", parse_json(to_json(model.config), "model")},
                         {"train",
                          {{"products", t.products},
                           {"held_out_every", t.held_out_every},
                           {"held_out_tail", t.held_out_tail},
                           {"split_seed", t.split_seed}}}});
}

Score score_of(const TrainedModel& model, const GptWeights& weights, const Text& text, int64_t batch_tokens) {
  return score(model.config, weights, *model.tokenizer, text.held_out,
               {.batch_tokens = batch_tokens, .looping = model.looping, .products = model.products});
}

void check_finite(const TrainedModel& model, const ParameterLayout& layout) {
  for (const Parameter& p : layout.all()) {
    const float* at = layout.view(model.weights, p).ptr<float>();
    for (int64_t i = 0; i < p.shape.numel(); ++i)
      if (!std::isfinite(at[i]))
        fail(ErrorCode::numeric, "export: ", p.name, ": found ", at[i], " at number ", i, ", expected finite weights");
  }
}

void require_within(const ExportCommand& o, const std::string& bytes) {
  if (int64_t(bytes.size()) > o.limit)
    fail(ErrorCode::usage, o.out, ": found a model of ", with_commas(int64_t(bytes.size())),
         " bytes, expected at most ", with_commas(o.limit), " (--limit); nothing was written; fewer bits take less");
}
std::string size_lines(const ExportCommand& o, const std::string& bytes, const std::string& beside) {
  return o.out + "\n  model      " + with_commas(int64_t(bytes.size())) + " bytes of at most " + with_commas(o.limit) +
         " (" + beside + ")\n";
}

// Writes an artifact again, with its integers in another entropy coder.
void recode(const ExportCommand& o) {
  require_place(o);
  const double started = now_seconds();
  const std::string before = read_file(o.run);
  Artifact a = parse_artifact(before, o.run);
  const double opened = now_seconds();
  a.coder = artifact_coder_named(o.coder);
  const std::string bytes = artifact_bytes(a);
  const double coded = now_seconds();
  require_within(o, bytes);
  write_both(o, bytes, read_file(artifact_tokenizer(o.run)));
  if (o.json)
    return write_out(show_json(OrderedJson{{"artifact", o.out},
                                           {"model_bytes", bytes.size()},
                                           {"code_bytes", 0},
                                           {"total_bytes", bytes.size()},
                                           {"limit", o.limit},
                                           {"coder", o.coder},
                                           {"seconds", {{"read", opened - started}, {"code", coded - opened}}}}) +
                     "\n");
  write_out(size_lines(o, bytes, with_commas(int64_t(before.size())) + " before"));
}

void export_run(const ExportCommand& o) {
  const double started = now_seconds();
  if (o.data.empty())
    fail(ErrorCode::usage, "found no --data, expected the text or shards that the run was trained on");
  require_no_gpt_oss(o.run);
  const TrainedModel model = load_trained(o.run);
  require_place(o);
  const ArtifactCoder coder = artifact_coder_named(o.coder);
  const ParameterLayout layout(model.config);
  check_finite(model, layout);
  const Text text = text_of(o.data, model);
  const Device device = training_device(model.config, o.device);
  const DeviceWeights there(model.weights, device, {});
  const double opened = now_seconds();
  const bool calibrates = o.rounding == "gptq";
  std::optional<Hessians> hessians;
  if (calibrates)
    hessians.emplace(capture_hessians(
        model.config, there.weights(), text.train,
        {.batches = o.batches, .batch_tokens = o.batch_tokens, .seed = o.seed, .looping = model.looping}));
  const double captured = now_seconds();
  Artifact a{.run_config = kept_config(model),
             .config = model.config,
             .looping = model.looping,
             .step = model.step,
             .tokenizer_hash = model.tokenizer->hash(),
             .coder = coder};
  for (const Parameter& p : layout.all())
    a.tensors.push_back(quantized(o, p, {layout.view(model.weights, p).ptr<float>(), size_t(p.shape.numel())},
                                  hessians ? hessians->of(p.name) : std::span<const double>()));
  const double rounded = now_seconds();
  const std::string bytes = artifact_bytes(a);
  const double coded = now_seconds();
  require_within(o, bytes);
  // The score is made before the file is written, so that a model without a score leaves no file.
  const Score before = score_of(model, there.weights(), text, o.batch_tokens);
  const double scored = now_seconds();
  write_both(o, bytes, read_file(model.tokenizer_file));
  const double written = now_seconds();

  const TrainedModel again = load_trained(o.out);
  const DeviceWeights again_there(again.weights, device, {});
  const Score after = score_of(again, again_there.weights(), text, o.batch_tokens);
  const int64_t f32 = 4 * layout.count();
  if (o.json)
    return write_out(show_json(OrderedJson{{"artifact", o.out},
                                           {"model_bytes", bytes.size()},
                                           {"code_bytes", 0},
                                           {"total_bytes", bytes.size()},
                                           {"limit", o.limit},
                                           {"f32_bytes", f32},
                                           {"matrices", o.matrices},
                                           {"embedding", o.embedding},
                                           {"rounding", o.rounding},
                                           {"coder", o.coder},
                                           {"device", device.kind == Device::cpu ? "cpu" : "cuda"},
                                           {"bits_per_byte_before", before.bits_per_byte},
                                           {"bits_per_byte_after", after.bits_per_byte},
                                           {"loss_before", before.loss},
                                           {"loss_after", after.loss},
                                           {"seconds",
                                            {{"read", opened - started},
                                             {"calibrate", captured - opened},
                                             {"round", rounded - captured},
                                             {"code", coded - rounded},
                                             {"write", written - scored},
                                             {"score", now_seconds() - written + scored - coded}}}}) +
                     "\n");
  write_out(size_lines(o, bytes, with_commas(f32) + " in fp32") + "  as trained " + score_line(before) +
            "\n  read back  " + score_line(after) + "\n");
}

}  // namespace

void add_export(Command& root) {
  Command& c = root.add("export", "Quantises a run's model and writes it as one small file");
  auto o = std::make_shared<ExportCommand>();
  const std::vector<std::string> forms = {"int4", "int5", "int6", "int7", "int8"};
  c.text("RUN", o->run, "a run's directory, one of its checkpoints, or an artifact, which is only encoded again")
      .require();
  c.text("OUT", o->out, "the artifact; its tokenizer is written beside it as OUT.tokenizer").require();
  c.text("--data PATH", o->data,
         "the run's text or shards: the training part is for calibration, the held-out part for the score");
  c.choice("--matrices FORM", o->matrices, forms, "format of matrices (default: int6)");
  c.choice("--embedding FORM", o->embedding, forms, "format of embeddings and the head (default: int8)");
  add_device(c, o->device);
  c.choice("--rounding HOW", o->rounding, {"gptq", "nearest"},
           "gptq: weights compensate for the rounding errors of earlier weights; nearest: each weight by itself, "
           "without calibration (default: gptq)");
  c.number("--matrix-sigmas X", o->matrix_sigmas, 0.1, 1000,
           "value of the largest integer, in standard deviations of a matrix row (default: 12.85)");
  c.number("--embedding-sigmas X", o->embedding_sigmas, 0.1, 1000,
           "value of the largest integer, in standard deviations of an embedding row (default: 20)");
  c.number("--damping X", o->damping, 0, 1000,
           "damping of GPTQ's Hessians, as a share of their mean diagonal (default: 0.01)");
  c.integer("--batches N", o->batches, 1, 1 << 30, "batches of training text for calibration (default: 64)");
  c.integer("--batch-tokens N", o->batch_tokens, 1, 1 << 30, "tokens per batch (default: 4096)");
  c.unsigned_integer("--seed N", o->seed, "seed of the order of the training text (default: 1)");
  c.integer("--fp16-below N", o->fp16_below, 0, 1 << 30,
            "matrices with fewer than N numbers stay fp16 (default: 65536)");
  c.choice("--coder HOW", o->coder, {"range", "brotli", "lzma"},
           "range: Ingot's range coder; brotli (quality 11) and lzma (preset 6): general compressors (default: range)");
  c.integer("--limit BYTES", o->limit, 1, INT64_C(1) << 53,
            "largest size of the artifact; a larger one is an error (default: 16000000)");
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot export runs/a a.ingot --data corpus/
  ingot export runs/a a.ingot --data corpus/ --matrices int5 --embedding int7 --json
  ingot export runs/a rounded.ingot --data corpus/ --rounding nearest
  ingot export a.ingot b.ingot --coder brotli
  ingot eval a.ingot --data corpus/)");
  c.run([o, &c] {
    if (exists(o->run) && is_artifact(o->run)) {
      c.refuse_given({"data", "matrices", "embedding", "rounding", "matrix-sigmas", "embedding-sigmas", "damping",
                      "batches", "batch-tokens", "seed", "fp16-below", "device"},
                     "an artifact, whose integers stay as they are");
      return recode(*o);
    }
    if (o->rounding == "nearest") c.refuse_given({"batches", "damping", "seed"}, "--rounding nearest");
    export_run(*o);
  });
}

}  // namespace ingot::cli
