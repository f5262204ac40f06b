#include "ingot/engines/train/trainer.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/engines/train/run/small_run.test.h"
#include "ingot/engines/train/run/train_checkpoint.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/config/presets.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/text/char_tokenizer.h"

namespace ingot {
namespace {

using testing::data_for;
using testing::small_run;
using testing::some_text;
using testing::TemporaryDirectory;

std::string expect_error(ErrorCode code, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(int(e.code), int(code)) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "expected an Error";
  return "";
}

TEST(trainer, the_loss_falls_and_the_score_is_in_bits_per_byte) {
  for (bool golf : {true, false}) {
    TemporaryDirectory dir;
    RunConfig c = small_run(golf);
    c.train.steps = 60;
    c.train.accumulation = 2;
    RunData data = data_for(c, dir);
    Trainer trainer(c, std::move(data), dir.path() + "/run");
    double first = 0;
    bool looped = false;
    const TrainResult r = trainer.run({.on_step = [&](const TrainStatus& s) {
      if (s.step == 1) first = s.loss;
      looped |= s.looping;
    }});
    EXPECT_EQ(int(r.end), int(TrainEnd::finished));
    EXPECT_LT(r.status.loss, 0.75 * first);
    EXPECT_LT(r.score.loss, 0.8 * first);
    EXPECT_NEAR(r.score.bits_per_byte, r.score.loss / std::log(2.0), 1e-9);  // a byte per character
    EXPECT_EQ(looped, golf);
    EXPECT_EQ(load_trained(dir.path() + "/run").parameter_hash, r.parameter_hash);
  }
}

float largest_difference(const Tensor& a, const Tensor& b) {
  float most = 0;
  for (int64_t i = 0; i < a.numel(); ++i) most = std::max(most, std::abs(a.ptr<float>()[i] - b.ptr<float>()[i]));
  return most;
}

TEST(trainer, a_resumed_run_ends_with_the_same_bits_for_any_number_of_threads) {
  const int before = thread_count();
  std::string hashes[3];
  for (int variant = 0; variant < 3; ++variant) {
    TemporaryDirectory dir;
    RunConfig c = small_run();
    c.train.schedule.ema_horizon = 0.5;  // the average, which is the result, differs from the weights
    set_thread_count(1 + variant);
    const std::string run = dir.path() + "/run";
    if (variant > 0) {  // interrupted twice: at step 5 (loop off) and 9 (loop on)
      for (int64_t stop : {5, 9}) {
        RunConfig again = c;
        Trainer part(again, data_for(again, dir), run);
        int64_t done = part.step();
        const TrainResult r = part.run(
            {.on_step = [&](const TrainStatus& s) { done = s.step; }, .should_stop = [&] { return done >= stop; }});
        EXPECT_EQ(int(r.end), int(TrainEnd::stopped));
        set_thread_count(1 + (variant + int(stop)) % 3);
      }
    }
    Trainer trainer(c, data_for(c, dir), run);
    EXPECT_EQ(trainer.step(), variant > 0 ? 9 : 0);
    hashes[variant] = trainer.run().parameter_hash;
    EXPECT_GT(largest_difference(trainer.result_weights(), trainer.weights()), 1e-4);
  }
  set_thread_count(before);
  EXPECT_EQ(hashes[0], hashes[1]);
  EXPECT_EQ(hashes[0], hashes[2]);
}

// The memory of its average is shorter than a step, so the average equals the weights.
TEST(trainer, a_short_run_has_its_weights_as_the_result) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  ASSERT_LT(c.train.schedule.ema_horizon * double(c.train.steps), 1);
  RunData data = data_for(c, dir);
  Trainer trainer(c, std::move(data), "");
  ASSERT_NE(trainer.result_weights().data, trainer.weights().data);
  const TrainResult r = trainer.run();
  const float *average = trainer.result_weights().ptr<float>(), *w = trainer.weights().ptr<float>();
  float most = 0;
  for (int64_t i = 0; i < trainer.weights().numel(); ++i) most = std::max(most, std::abs(w[i]));
  // a + (w - a): two roundings of numbers of at most twice the largest weight.
  for (int64_t i = 0; i < trainer.weights().numel(); ++i) ASSERT_NEAR(average[i], w[i], 4 * 0x1p-24f * most) << i;
  EXPECT_NEAR(r.score.loss, r.status.loss, 0.5);
}

TEST(trainer, measuring_the_speed_changes_no_result) {
  std::string hashes[2];
  for (const bool measured : {false, true}) {
    TemporaryDirectory dir;
    RunConfig c = small_run();
    RunData data = data_for(c, dir);
    Trainer trainer(c, std::move(data), "");
    if (measured) { EXPECT_GT(trainer.measure_tokens_per_second(0.05), 0); }
    hashes[measured] = trainer.run().parameter_hash;
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

TEST(trainer, a_second_trainer_on_the_same_directory_is_refused) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  Trainer first(c, data_for(c, dir), dir.path() + "/run");
  const std::string message =
      expect_error(ErrorCode::busy, [&] { Trainer second(c, data_for(c, dir), dir.path() + "/run"); });
  EXPECT_NE(message.find("/run"), std::string::npos) << message;
}

TEST(trainer, another_configuration_in_the_same_directory_is_refused_by_its_first_difference) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  { Trainer first(c, data_for(c, dir), dir.path() + "/run"); }
  RunConfig other = c;
  other.model.softcap = 20;
  const std::string message =
      expect_error(ErrorCode::usage, [&] { Trainer second(other, data_for(other, dir), dir.path() + "/run"); });
  EXPECT_NE(message.find("softcap"), std::string::npos) << message;
}

TEST(trainer, a_configuration_written_before_an_option_existed_is_the_same_configuration) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  c.train.steps = 1;
  const std::string run = dir.path() + "/run", file = run + "/config.json";
  { Trainer(c, data_for(c, dir), run).run(); }
  std::string text = read_file(file);
  const std::string option = "\"max_bad_steps\": 5,";
  ASSERT_NE(text.find(option), std::string::npos) << text;
  write_file(file, text.erase(text.find(option), option.size()));
  EXPECT_EQ(Trainer(c, data_for(c, dir), run).step(), 1);
  // An invalid configuration is refused by name.
  for (const char* damaged : {"[]", "{", R"({"train": 3})", R"({"model": {"dim": 32}})"}) {
    write_file(file, damaged);
    const std::string error = testing::error_of([&] { Trainer(c, data_for(c, dir), run); });
    EXPECT_NE(error.find(file), std::string::npos) << error;
  }
}

TEST(trainer, a_run_goes_on_from_an_earlier_checkpoint_to_the_same_end) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  c.train.checkpoint_every = 3;
  c.train.keep_checkpoints = 9;
  const std::string run = dir.path() + "/run";
  const std::string hash = Trainer(c, data_for(c, dir), run).run().parameter_hash;
  {
    Trainer back(c, data_for(c, dir), run, "", {.name = "step-6"});
    EXPECT_EQ(back.step(), 6);
    EXPECT_EQ(back.run().parameter_hash, hash);
  }
  // The newest checkpoint is damaged: it is refused, and skipped when the newest complete one is requested.
  const std::string newest = run + "/step-00000012/model.safetensors";
  write_file(newest, "damaged");
  const std::string error = expect_error(ErrorCode::bad_data, [&] { Trainer(c, data_for(c, dir), run); });
  EXPECT_NE(error.find("step-00000009 before it is whole"), std::string::npos) << error;
  Trainer good(c, data_for(c, dir), run, "", {.last_good = true});
  EXPECT_EQ(good.step(), 9);
  EXPECT_EQ(good.run().parameter_hash, hash);
  EXPECT_EQ(read_file(run + "/aside-step-00000012-2/model.safetensors"), "damaged");
}

TEST(trainer, a_finished_run_is_scored_again_and_not_saved_again) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  const std::string run = dir.path() + "/run";
  const auto saves = [&] {
    const std::string log = read_file(run + "/log.jsonl");
    int found = 0;
    for (size_t at = 0; (at = log.find(R"("event":"checkpoint")", at)) != std::string::npos; ++at) ++found;
    return found;
  };
  const TrainResult first = Trainer(c, data_for(c, dir), run).run();
  EXPECT_EQ(saves(), 1);
  const TrainResult again = Trainer(c, data_for(c, dir), run).run();
  EXPECT_EQ(saves(), 1);
  EXPECT_EQ(again.checkpoint, first.checkpoint);
  EXPECT_EQ(again.score.loss, first.score.loss);
}

TEST(trainer, a_finished_run_goes_on_with_more_steps_and_not_with_fewer) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  const std::string run = dir.path() + "/run";
  { Trainer(c, data_for(c, dir), run).run(); }
  c.train.steps = 40;
  {
    Trainer more(c, data_for(c, dir), run);
    EXPECT_EQ(more.step(), 12);
    EXPECT_TRUE(more.looping());  // although 12 of 40 steps are less than loop_from
    EXPECT_EQ(more.run().status.step, 40);
  }
  EXPECT_EQ(run_config_from_json(load_trained(run).run_config, run).train.steps, 40);
  c.train.steps = 39;
  const std::string error = expect_error(ErrorCode::usage, [&] { Trainer(c, data_for(c, dir), run); });
  EXPECT_NE(error.find("found 40 steps done"), std::string::npos) << error;
}

TEST(trainer, fine_tuning_begins_with_another_run_s_weights) {
  TemporaryDirectory dir;
  RunConfig c = small_run(false);
  c.train.steps = 60;
  const std::string first = dir.path() + "/first", tuned = dir.path() + "/tuned";
  const TrainResult before = Trainer(c, data_for(c, dir), first).run();
  RunConfig t = c;
  t.train.init_from = first;
  t.train.steps = 3;
  t.train.seed = 9;
  t.train.schedule.warmup_steps = 100;
  {
    Trainer trainer(t, data_for(t, dir), tuned);
    EXPECT_EQ(parameter_hash(ParameterLayout(t.model), trainer.result_weights()), before.parameter_hash);
    EXPECT_NEAR(trainer.run().score.loss, before.score.loss, 0.1 * before.score.loss);
  }
  EXPECT_EQ(Trainer(t, data_for(t, dir), tuned).step(), 3);  // resumed: its own weights
  // A model that does not fit is refused and leaves no run behind.
  RunConfig wide = t;
  wide.model.mlp_hidden = 64;
  const std::string other = dir.path() + "/other";
  std::string error = expect_error(ErrorCode::usage, [&] { Trainer(wide, data_for(wide, dir), other); });
  EXPECT_NE(error.find("found the tensor blocks.0.mlp."), std::string::npos) << error;
  EXPECT_FALSE(exists(other + "/config.json"));
  write_file(dir.path() + "/text2.txt", some_text() + "?");
  error = expect_error(ErrorCode::usage, [&] {
    RunConfig u = t;
    RunData data = load_run_data(dir.path() + "/text2.txt", u);
    u.model.vocab = t.model.vocab;
    Trainer(u, std::move(data), other);
  });
  EXPECT_NE(error.find("another tokenizer"), std::string::npos) << error;
}

TEST(trainer, the_best_checkpoint_by_held_out_score_is_kept) {
  TemporaryDirectory dir;
  RunConfig c = small_run(false);
  c.train.steps = 30;
  c.train.eval_every = 2;
  c.train.keep_checkpoints = 1;
  c.train.schedule.ema_horizon = 0;
  c.train.optimizer.matrix_lr = c.train.optimizer.embed_lr = c.train.optimizer.scalar_lr = 1;
  c.train.schedule.warmup_steps = 100;  // the model learns, and then the rate is too high
  c.train.schedule.warmdown = 0;
  const std::string run = dir.path() + "/run";
  std::vector<std::pair<double, int64_t>> scores;
  const TrainResult result =
      Trainer(c, data_for(c, dir), run).run({.on_score = [&](const TrainStatus& s, const Score& x) {
        scores.emplace_back(x.loss, s.step);
      }});
  const auto best = *std::min_element(scores.begin(), scores.end());
  ASSERT_LT(best.first, result.score.loss) << "the end is the best: this tests nothing";
  EXPECT_EQ(best_checkpoint(run)->step, best.second);
  EXPECT_EQ(best_checkpoint(run)->loss, best.first);
  EXPECT_EQ(load_trained(run + "/best").step, best.second);
  EXPECT_EQ(load_trained(run).step, 30);
  int64_t checkpoints = 0;
  for (const std::string& name : list_directory(run)) checkpoints += name.starts_with("step-");
  EXPECT_EQ(checkpoints, 2);
}

TEST(trainer, a_flipped_byte_in_the_newest_checkpoint_is_named) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  c.train.steps = 2;
  std::string checkpoint;
  {
    Trainer t(c, data_for(c, dir), dir.path() + "/run");
    checkpoint = t.run().checkpoint;
  }
  std::fstream file(checkpoint + "/model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-5, std::ios::end);
  const char byte = char(file.get() ^ 1);
  file.seekp(-5, std::ios::end);
  file.put(byte);
  file.close();
  const std::string message =
      expect_error(ErrorCode::bad_data, [&] { Trainer t(c, data_for(c, dir), dir.path() + "/run"); });
  EXPECT_NE(message.find("model.safetensors"), std::string::npos) << message;
  expect_error(ErrorCode::bad_data, [&] { load_trained(dir.path() + "/run"); });
}

TEST(trainer, a_save_that_fails_does_not_stop_training) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  c.train.checkpoint_every = 3;
  std::signal(SIGXFSZ, SIG_IGN);
  Trainer trainer(c, data_for(c, dir), dir.path() + "/run");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const TrainResult r = trainer.run({.on_step = [&](const TrainStatus& s) {
    rlimit limit = before;
    if (s.step >= 5 && s.step < 8) limit.rlim_cur = 1000;  // the save of step 6 meets a full disk
    setrlimit(RLIMIT_FSIZE, &limit);
  }});
  EXPECT_EQ(r.failed_saves, 1);
  EXPECT_EQ(r.status.step, 12);
  EXPECT_EQ(load_trained(dir.path() + "/run").step, 12);
}

TEST(trainer, a_save_that_blocks_training_is_logged_with_its_bytes_and_rate) {
  std::vector<float> numbers(3'000'000);
  const Tensor all(numbers.data(), {3'000'000});
  CheckpointContent content;
  content.model = {{"a", all.slice(0, 0, 1'000'000)}};
  content.optimizer = {{"b", all}, {"c", all.slice(0, 0, 1'000'000)}};
  EXPECT_EQ(note_of_slow_save(7, content, 4.9), "");
  EXPECT_EQ(note_of_slow_save(7, content, 8),
            "saving step 7 took 8.0s, 20.0 MB at 2.5 MB/s, for which training waited");
}

TEST(trainer, numbers_that_diverge_end_the_run_and_leave_the_last_checkpoint) {
  TemporaryDirectory dir;
  RunConfig c = small_run(false);
  c.train.steps = 40;
  c.train.checkpoint_every = 1;
  c.train.optimizer.matrix_lr = c.train.optimizer.embed_lr = 1e20;
  Trainer trainer(c, data_for(c, dir), dir.path() + "/run");
  const std::string message = expect_error(ErrorCode::numeric, [&] { trainer.run(); });
  EXPECT_NE(message.find("not finite"), std::string::npos) << message;
  EXPECT_NE(message.find("the last time in the "), std::string::npos) << message;
}

// The inputs of the layer's second matrix are huge, and so is the factor of its product; the matrix itself is zero. So
// the huge numbers do not reach the loss, and only the matrix's own gradient overflows.
TEST(trainer, a_tensor_whose_gradient_is_not_finite_is_named) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  c.train.max_bad_steps = 1;
  Trainer trainer(c, data_for(c, dir), dir.path() + "/run");
  const std::string message = expect_error(ErrorCode::numeric, [&] {
    trainer.run({.on_step = [&](const TrainStatus& s) {
      EXPECT_TRUE(std::isfinite(s.loss));
      if (s.step != 2) return;
      const auto each = [&](const std::string& name, auto&& change) {
        const Tensor t = ParameterLayout(trainer.config().model).view(trainer.weights(), "blocks.0." + name);
        for (int64_t i = 0; i < t.numel(); ++i) t.ptr<float>()[i] = change(t.ptr<float>()[i]);
      };
      each("mlp.up.weight", [](float w) { return 1e18f * w; });
      each("mlp.down.weight", [](float) { return 0.0f; });
      each("mlp_scale", [](float) { return 1e10f; });
    }});
  });
  EXPECT_NE(message.find("found 1 steps in a row whose gradient is not finite, the last time in the gradient of "
                         "blocks.0.mlp.down.weight; expected"),
            std::string::npos)
      << message;
}

TEST(trainer, steps_without_a_finite_gradient_end_a_run_only_in_a_row) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  c.train.max_bad_steps = 2;
  Trainer trainer(c, data_for(c, dir), dir.path() + "/run");
  float& weight = trainer.weights().ptr<float>()[0];
  const float finite = weight;
  int bad = 0;
  const TrainResult r = trainer.run({.on_step = [&](const TrainStatus& s) {
    bad += !std::isfinite(s.loss);
    weight = s.step % 2 == 1 ? std::numeric_limits<float>::quiet_NaN() : finite;
  }});
  EXPECT_EQ(int(r.end), int(TrainEnd::finished));
  EXPECT_EQ(bad, 6);
}

TEST(trainer, the_log_goes_on_after_a_loss_that_is_not_finite) {
  TemporaryDirectory dir;
  RunConfig c = small_run(false);
  c.train.optimizer.matrix_lr = c.train.optimizer.embed_lr = 1e38;
  c.train.max_bad_steps = 4;
  c.train.log_every = 1;
  const std::string run = dir.path() + "/run";
  Trainer trainer(c, data_for(c, dir), run);
  std::vector<TrainStatus> steps;
  const std::string message = expect_error(
      ErrorCode::numeric, [&] { trainer.run({.on_step = [&](const TrainStatus& s) { steps.push_back(s); }}); });
  ASSERT_FALSE(steps.empty() || std::isfinite(steps.back().loss));
  EXPECT_EQ(message.find("training stopped at step " + std::to_string(steps.back().step + 1) + ": "), 0u) << message;
  const std::string log = read_file(run + "/log.jsonl");
  for (const TrainStatus& s : steps) {
    const std::string line = R"({"event":"step","step":)" + std::to_string(s.step) + R"(,"loss":)";
    const size_t at = log.find(line);
    ASSERT_NE(at, std::string::npos) << line << log;
    EXPECT_EQ(log.compare(at + line.size(), 5, "null,") == 0, !std::isfinite(s.loss)) << log.substr(at, 60);
  }
}

TEST(trainer, a_batch_that_does_not_fit_is_refused_with_a_size_that_fits) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  RunData data = data_for(c, dir);
  c.train.batch_tokens = int64_t(1) << 27;
  const std::string message =
      expect_error(ErrorCode::unsupported, [&] { Trainer trainer(c, data, dir.path() + "/run"); });
  EXPECT_EQ(message.find("training on 134217728 tokens at once needs "), 0u) << message;
  const size_t at = message.find("expected train.batch_tokens of at most ");
  ASSERT_NE(at, std::string::npos) << message;
  const int64_t fit = std::stoll(message.substr(at + std::string("expected train.batch_tokens of at most ").size()));
  EXPECT_EQ(fit % c.model.context, 0);
  EXPECT_GT(fit, 1 << 16);
  EXPECT_LT(fit, c.train.batch_tokens);
  EXPECT_FALSE(exists(dir.path() + "/run"));
}

TEST(trainer, too_little_memory_is_reported_before_any_is_taken) {
  TemporaryDirectory dir;
  RunConfig c = small_run(false);
  const RunData data = data_for(c, dir);
  c.model.layers = 1024;
  c.model.dim = 8192;
  c.model.heads = c.model.kv_heads = 1024;
  const std::string message =
      expect_error(ErrorCode::unsupported, [&] { Trainer trainer(c, data, dir.path() + "/run"); });
  EXPECT_NE(message.find("parameters needs "), std::string::npos) << message;
  EXPECT_NE(message.find(" of memory, found "), std::string::npos) << message;
}

TEST(trainer, a_run_by_time_stops_within_its_budget) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  c.train.seconds = 0.6;
  c.train.reserve_seconds = 0.1;
  Trainer trainer(c, data_for(c, dir), dir.path() + "/run");
  std::vector<double> seconds;  // at the end of each step
  const TrainResult r = trainer.run({.on_step = [&](const TrainStatus& s) { seconds.push_back(s.seconds); }});
  EXPECT_EQ(int(r.end), int(TrainEnd::finished));
  EXPECT_GE(r.status.seconds, 0.5);
  EXPECT_GT(r.status.step, 1);
  // no step begins after the budget has ended
  for (size_t i = 0; i + 1 < seconds.size(); ++i) EXPECT_LT(seconds[i], 0.5);
}

TEST(run_config, survives_json_and_merges_key_by_key) {
  RunConfig c = small_run();
  EXPECT_EQ(to_json(run_config_from_json(to_json(c), "test")), to_json(c));
  const std::string merged = merge_json(to_json(c), R"({"train": {"optimizer": {"matrix_lr": 0.5}}})", "test");
  EXPECT_EQ(run_config_from_json(merged, "test").train.optimizer.matrix_lr, 0.5);
  EXPECT_EQ(run_config_from_json(merged, "test").train.optimizer.embed_lr, c.train.optimizer.embed_lr);
  EXPECT_TRUE(run_config_from_json(merged, "test").train.cuda_graphs);
  const std::string off = merge_json(to_json(c), R"({"train": {"cuda_graphs": false}})", "test");
  EXPECT_FALSE(run_config_from_json(off, "test").train.cuda_graphs);
  const std::string wrong = merge_json(to_json(c), R"({"train": {"stepz": 3}})", "test");
  EXPECT_NE(expect_error(ErrorCode::usage, [&] { run_config_from_json(wrong, "test"); }).find("stepz"),
            std::string::npos);
}

// A removed option would be an unknown key in a preset, or missing here.
TEST(run_config, every_preset_and_every_option_is_read) {
  for (const std::string& name : preset_names()) {
    const RunConfig c = run_config_from_json(preset_text(name), name);
    EXPECT_EQ(to_json(run_config_from_json(to_json(c), name)), to_json(c)) << name;
  }
  const Json train = parse_json(to_json(RunConfig{}), "defaults")["train"];
  EXPECT_EQ(train.size(), 23u);  // including schedule and optimizer
  EXPECT_EQ(train["schedule"].size(), 8u);
  EXPECT_EQ(train["optimizer"].size(), 16u);
}

TEST(run_config, a_value_out_of_range_is_named_as_it_was_written) {
  const std::pair<const char*, const char*> cases[] = {
      {"train.batch_tokens", R"({"train": {"batch_tokens": 0}})"},
      {"train.batch_tokens", R"({"train": {"batch_tokens": 4294967296}})"},
      {"train.accumulation", R"({"train": {"accumulation": 4611686018427387904}})"},
      {"train.keep_checkpoints", R"({"train": {"keep_checkpoints": 4294967296}})"},
      {"train.held_out_tail", R"({"train": {"held_out_tail": 1}})"},
      {"train.max_bad_steps", R"({"train": {"max_bad_steps": 0}})"},
      {"train.optimizer.eps", R"({"train": {"optimizer": {"eps": 0}}})"},
      {"train.optimizer.beta2", R"({"train": {"optimizer": {"beta2": 1}}})"},
      {"train.optimizer.matrix_lr", R"({"train": {"optimizer": {"matrix_lr": -1}}})"},
      {"train.optimizer.matrix_optimizer", R"({"train": {"optimizer": {"matrix_optimizer": "sgd"}}})"},
      {"train.optimizer.muon_iterations", R"({"train": {"optimizer": {"muon_iterations": 0}}})"},
      {"train.schedule.warmup_steps", R"({"train": {"schedule": {"warmup_steps": -1}}})"},
      {"train.schedule.decay", R"({"train": {"schedule": {"decay": "step"}}})"},
      {"train.schedule.min_lr", R"({"train": {"schedule": {"min_lr": 2}}})"},
      {"model.heads", R"({"model": {"heads": 0}})"},
      {"model.rotary_dim", R"({"model": {"rotary_dim": 3}})"}};
  for (const auto& [key, over] : cases) {
    const std::string text = merge_json(to_json(small_run()), over, "test");
    const std::string error = expect_error(ErrorCode::usage, [&] { run_config_from_json(text, "test"); });
    EXPECT_EQ(error.rfind(std::string(key) + ": found ", 0), 0u) << error;
    EXPECT_NE(error.find(", expected "), std::string::npos) << error;
  }
}

TEST(schedule, warms_up_holds_and_falls_to_its_floor) {
  ScheduleOptions o{.warmup_steps = 9, .decay = "linear", .warmdown = 0.5, .min_lr = 0.1};
  EXPECT_DOUBLE_EQ(learning_rate_factor(o, 0, 0, 100), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate_factor(o, 0.3, 30, 100), 1);
  EXPECT_DOUBLE_EQ(learning_rate_factor(o, 0.75, 75, 100), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate_factor(o, 1, 100, 100), 0.1);
  o.decay = "cosine";
  EXPECT_NEAR(learning_rate_factor(o, 1, 100, 100), 0.1, 1e-12);
  EXPECT_NEAR(learning_rate_factor(o, (1 + 0.09) / 2, 55, 100), 0.55, 1e-12);
  EXPECT_DOUBLE_EQ(muon_momentum(o, 0), 0.92);
  EXPECT_DOUBLE_EQ(muon_momentum(o, 1), 0.97);
  EXPECT_DOUBLE_EQ(ema_decay({.ema_horizon = 0.1}, 1000), 0.99);
}

}  // namespace
}  // namespace ingot
