// The smallest program that trains, saves and resumes like `ingot train`, so that tests/crash/crash_test.py can be
// tried in seconds on the checkpoint code alone.
//   save_driver train OUT STEPS EVERY     resumes where OUT's newest checkpoint ends
//   save_driver info OUT                  {"parameter_hash": "...", "step": N}
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ingot/core/log.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/codecs/sha256.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"

namespace {

using namespace ingot;

struct State {
  std::vector<uint32_t> numbers = std::vector<uint32_t>(3000, 1);
  std::vector<float> momentum = std::vector<float>(1000, 0);
  int64_t step = 0;

  CheckpointContent content() {
    return {{{"numbers", Tensor(numbers.data(), {30, 100})}},
            {{"momentum", Tensor(momentum.data(), {1000})}},
            write_json(Json{{"step", step}})};
  }
  void load(const Checkpoint& checkpoint) {
    const CheckpointContent into = content();
    checkpoint.load_model(into.model);
    checkpoint.load_optimizer(into.optimizer);
    const Json json = parse_json(checkpoint.state_json(), checkpoint.path());
    Fields fields(json, checkpoint.path());
    fields.require("step", step);
    fields.finish();
  }
  // Depends on every earlier step, so that a wrong resume shows.
  void advance() {
    ++step;
    for (size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = numbers[i] * 1664525u + uint32_t(step) + uint32_t(i);
      momentum[i % momentum.size()] = 0.9f * momentum[i % momentum.size()] + float(numbers[i] >> 8) * 0x1p-24f;
    }
  }
};

int train(const std::string& out, int64_t steps, int64_t every) {
  create_directories(out);
  const Lock lock(out);
  State state;
  if (const auto checkpoint = latest_checkpoint(out)) state.load(*checkpoint);
  bool saved = true;
  while (state.step < steps) {
    state.advance();
    if (state.step % every != 0 && state.step != steps) continue;
    try {
      save_checkpoint(out, state.step, state.content(), 2);
      saved = true;
    } catch (const Error& e) {
      log_error(e.what());
      saved = false;
    }
  }
  return saved ? 0 : exit_status(ErrorCode::io);
}

int info(const std::string& out) {
  State state;
  state.load(open_checkpoint(out));
  Sha256 hash;
  hash.update(state.numbers.data(), int64_t(state.numbers.size()) * 4);
  hash.update(state.momentum.data(), int64_t(state.momentum.size()) * 4);
  std::printf("%s\n", write_json(Json{{"parameter_hash", hash.hex()}, {"step", state.step}}).c_str());
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  ::signal(SIGXFSZ, SIG_IGN);
  ::signal(SIGPIPE, SIG_IGN);
  try {
    if (count == 5 && std::strcmp(arguments[1], "train") == 0)
      return train(arguments[2], std::atoll(arguments[3]), std::atoll(arguments[4]));
    if (count == 3 && std::strcmp(arguments[1], "info") == 0) return info(arguments[2]);
    std::fprintf(stderr, "usage: save_driver train OUT STEPS EVERY | info OUT\n");
    return 2;
  } catch (const Error& e) {
    std::fprintf(stderr, "save_driver: %s\n", e.what());
    return exit_status(e.code);
  }
}
