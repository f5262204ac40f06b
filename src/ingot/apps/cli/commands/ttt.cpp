// ingot ttt: writes adapters that have learnt a text.
#include "ingot/apps/cli/shared/adaptation.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

struct TttCommand {
  std::string run, file, out, device = "auto";
  int64_t passes = 1;
  AdaptationCommand ttt;
  bool json = false;
};

// OUT must be new or a file of adapters; any other file there (a text, weights) is not replaced.
void require_place(const TttCommand& o) {
  require_directory_of(o.out);
  refuse_to_replace(o.out, {o.file});
  refuse_to_replace_run(o.out, o.run);
  if (!exists(o.out) || File::open(o.out).size() == 0) return;
  try {
    adapter_rank(SafetensorsFile(o.out));
  } catch (const Error& e) {
    if (e.code != ErrorCode::bad_data) throw;
    fail(ErrorCode::usage, o.out, ": found a file that holds no adapters, expected a new name or adapters to replace");
  }
}

void learn(const TttCommand& o) {
  require_no_gpt_oss(o.run);
  require_place(o);
  const TrainedModel model = load_trained(o.run);
  const Device device = training_device(model.config, o.device);
  const Adapted done = adapt(o.ttt, model, device, read_input(o.file), input_name(o.file), o.passes);
  const DocumentAdapters::Saved saved = done.adapters->saved(0);
  save_safetensors(o.out, saved.tensors, {{"format", "pt"}, {"parameter_hash", model.parameter_hash}});
  if (!o.json)
    return write_out(o.out + ": learnt " + with_commas(done.targets) + " tokens in " + counted(done.updates, "step") +
                     ", mean loss " + fixed(done.loss, 4) + ", each chunk scored before its step\n");
  write_out(show_json(OrderedJson{{"adapters", o.out},
                                  {"run", o.run},
                                  {"parameter_hash", model.parameter_hash},
                                  {"device", device.kind == Device::cpu ? "cpu" : "cuda"},
                                  {"targets", done.targets},
                                  {"updates", done.updates},
                                  {"loss", done.loss}}) +
            "\n");
}

}  // namespace

void add_ttt(Command& root) {
  Command& c = root.add("ttt", "Trains adapters on a text, for `generate --adapters` and `eval --ttt-adapters`");
  auto o = std::make_shared<TttCommand>();
  c.text("RUN", o->run, "a run's directory, one of its checkpoints, or an artifact").require();
  c.text("--file FILE", o->file, "the text (default: standard input)");
  c.text("--out FILE", o->out, "file for the adapters (safetensors)").require();
  c.integer("--passes N", o->passes, 1, 1 << 20, "number of passes over the text (default: 1)");
  add_constants(c, o->ttt);
  c.text("--ttt-adapters FILE", o->ttt.adapters, "adapters to start from");
  add_device(c, o->device);
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot ttt runs/a --file style.txt --out style.safetensors --passes 3
  ingot generate runs/a --adapters style.safetensors --prompt "Dear")");
  c.run([o] { learn(*o); });
}

}  // namespace ingot::cli
