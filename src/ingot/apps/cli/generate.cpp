// ingot generate: text from a trained model.
#include <unistd.h>

#include "ingot/apps/cli/cli.h"
#include "ingot/apps/cli/runs.h"

namespace ingot::cli {
namespace {

struct GenerateCommand {
  std::string run, prompt, file;
  int64_t tokens = 200, seed = 1;
  SamplingOptions sampling;
  bool only_new = false, past_end = false;
};

void generate(const GenerateCommand& o) {
  if (!o.prompt.empty() && !o.file.empty()) fail(ErrorCode::usage, "found --prompt and --file, expected one of them");
  std::string prompt = o.prompt;
  if (!o.file.empty() || (prompt.empty() && isatty(STDIN_FILENO) == 0)) prompt = read_input(o.file);
  const TrainedModel model = load_trained(o.run);
  Generator generator(model.config.model, model.weights, model.looping, products_of(model.config.train));
  Interrupt interrupt;
  Continuation c;
  c.prompt = prompt;
  c.options = {
      .tokens = o.tokens, .sampling = o.sampling, .seed = uint64_t(o.seed), .stop_at_document_end = !o.past_end};
  c.show = [](std::string_view piece) { write_out(piece); };
  c.stop = [&] { return interrupt.asked(); };
  if (!o.only_new) write_out(prompt);
  const std::string text = continue_text(generator, *model.tokenizer, c);
  if (text.empty() || text.back() != '\n') write_out("\n");
  if (interrupt.asked()) fail(ErrorCode::interrupted, "stopped by a signal");
}

}  // namespace

void add_generate(Command& root) {
  Command& c = root.add("generate", "Continues a prompt with a trained model");
  auto o = std::make_shared<GenerateCommand>();
  c.text("RUN", o->run, "a run's directory, or one of its checkpoints").require();
  c.text("--prompt TEXT", o->prompt, "the beginning (default: standard input, or nothing on a terminal)");
  c.text("--file FILE", o->file, "a file with the beginning");
  c.integer("--tokens N", o->tokens, 0, 1 << 30, "most tokens to add (default: 200)");
  c.number("--temperature X", o->sampling.temperature, 0, 100, "0 takes the likeliest token each time (default: 1)");
  c.integer("--top-k N", o->sampling.top_k, 0, 1 << 30, "draw among the N likeliest; 0: all (default: 0)");
  c.number("--top-p X", o->sampling.top_p, 1e-9, 1, "draw among the likeliest that together reach X (default: 1)");
  c.number("--min-p X", o->sampling.min_p, 0, 0.999999,
           "drop tokens less than X times as likely as the likeliest (default: 0)");
  c.integer("--seed N", o->seed, 0, int64_t(1) << 53, "the same seed gives the same text (default: 1)");
  c.flag("--only-new", o->only_new, "do not repeat the prompt");
  c.flag("--past-end", o->past_end, "go on where the model ends its document");
  c.examples(R"(  ingot generate runs/a --prompt "ROMEO:" --tokens 200 --temperature 0.8 --seed 1
  echo -n "template <class T>" | ingot generate runs/a --top-p 0.9
  ingot generate runs/a --prompt "The" --temperature 0)");
  c.run([o] { generate(*o); });
}

}  // namespace ingot::cli
