// Data parallel training: ranks as threads, over real sockets.
#include "ingot/core/comm/ranks.test.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/engines/train/optimizer/shards.h"
#include "ingot/engines/train/run/small_run.test.h"
#include "ingot/engines/train/trainer.h"
#include "ingot/io/checkpoint.h"

namespace ingot {
namespace {

using testing::data_for;
using testing::run_ranks;
using testing::small_run;
using testing::TemporaryDirectory;

constexpr double kDeadline = 60;  // seconds; only a failing test comes near this time

struct Course {
  std::vector<double> losses, norms;
  TrainResult result;
  std::vector<float> weights;
};
void note_weights(const Trainer& t, Course& c) {
  const Tensor w = t.weights();
  c.weights.assign(w.ptr<float>(), w.ptr<float>() + w.numel());
}
TrainHooks noting(Course& c) {
  return {.on_step = [&c](const TrainStatus& s) {
    c.losses.push_back(s.loss);
    c.norms.push_back(s.grad_norm);
  }};
}
Course run_alone(RunConfig config, const TemporaryDirectory& dir, const std::string& directory = "") {
  Course c;
  RunData data = data_for(config, dir);
  Trainer trainer(config, std::move(data), directory);
  c.result = trainer.run(noting(c));
  note_weights(trainer, c);
  return c;
}
std::vector<Course> run_shared(const RunConfig& config, int world, const TemporaryDirectory& dir,
                               const std::string& directory = "") {
  std::vector<Course> courses(static_cast<size_t>(world));
  {
    RunConfig first = config;
    data_for(first, dir);  // writes the text before the ranks' reads
  }
  const std::vector<std::string> errors = run_ranks(world, kDeadline, [&](SocketCommunicator& ranks) {
    Course& c = courses[size_t(ranks.rank())];
    RunConfig mine = config;
    RunData data = data_for(mine, dir);
    Trainer trainer(mine, std::move(data), directory, "", {}, {}, &ranks);
    c.result = trainer.run(noting(c));
    note_weights(trainer, c);
  });
  for (size_t r = 0; r < errors.size(); ++r) EXPECT_EQ(errors[r], "") << "rank " << r;
  return courses;
}
RunConfig run_of(bool golf, int64_t passes) {
  RunConfig c = small_run(golf);
  c.train.accumulation = passes;
  c.train.optimizer.clip = 0;  // the only number with a different order of additions on several ranks
  return c;
}

// A pass's gradient begins at zero and passes are added in their order, so with a pass per rank the sums equal a single
// process's sums bit for bit, through Muon, AdamW, the average, both layer programs and the score.
TEST(ranks, train_as_one_process_does_bit_for_bit) {
  for (const bool golf : {true, false})
    for (const int world : {2, 3}) {
      TemporaryDirectory dir;
      const RunConfig config = run_of(golf, world);
      const Course alone = run_alone(config, dir);
      ASSERT_EQ(alone.losses.size(), 12u);
      for (const Course& c : run_shared(config, world, dir)) {
        EXPECT_EQ(c.losses, alone.losses) << world << " ranks";
        EXPECT_EQ(c.weights, alone.weights) << world << " ranks";
        EXPECT_EQ(c.result.parameter_hash, alone.result.parameter_hash);
        EXPECT_EQ(c.result.score.loss, alone.result.score.loss);
        EXPECT_EQ(c.result.score.bytes, alone.result.score.bytes);
        // Added up in f64, matrix by matrix in a different order: an error of some 2^-53 for each of the few partial
        // sums.
        for (size_t i = 0; i < c.norms.size(); ++i)
          EXPECT_NEAR(c.norms[i], alone.norms[i], 64 * 0x1p-53 * alone.norms[i]);
      }
    }
}

// Two passes a rank: (p0 + p1) + (p2 + p3) in place of ((p0 + p1) + p2) + p3. Each sum of four fp32 numbers is within 3
// * 2^-24 of its terms' sizes of the exact sum, and nothing else differs in the first step, so the norm of the gradient
// moves by at most 6 * 2^-24 of the norm of the terms' sizes. This norm is at most the sum of the passes' norms, each
// at most a few times the mean's; 16 is generous here and far below the effect of a lost or doubled pass.
TEST(ranks, several_passes_per_rank_differ_by_the_order_of_sums_alone) {
  TemporaryDirectory dir;
  const RunConfig config = run_of(true, 4);
  const Course alone = run_alone(config, dir);
  const std::vector<Course> shared = run_shared(config, 2, dir);
  EXPECT_EQ(shared[0].weights, shared[1].weights);
  for (const Course& c : shared) {
    EXPECT_EQ(c.losses[0], alone.losses[0]);  // before any update
    EXPECT_NEAR(c.norms[0], alone.norms[0], 16 * 6 * 0x1p-24 * alone.norms[0]);
  }
}

// The factor of clipping comes from a norm with a different order of its f64 sum; all ranks still have the same bits of
// this factor.
TEST(ranks, clip_by_the_norm_of_the_whole_gradient) {
  TemporaryDirectory dir;
  RunConfig config = run_of(true, 2);
  config.train.optimizer.clip = 0.1;
  config.train.optimizer.matrix_optimizer = "adamw";  // Muon does not see the gradient's scale
  config.train.steps = 2;
  const Course alone = run_alone(config, dir);
  ASSERT_GT(alone.norms[0], 0.2);
  const std::vector<Course> shared = run_shared(config, 2, dir);
  EXPECT_EQ(shared[0].weights, shared[1].weights);
  EXPECT_NEAR(shared[0].losses[1], alone.losses[1], 1e-6 * alone.losses[1]);
}

TEST(ranks, a_run_goes_on_with_another_number_of_ranks) {
  TemporaryDirectory dir;
  const RunConfig config = run_of(true, 6);
  const std::string run = dir.path() + "/run";
  for (const auto& [world, steps] : {std::pair<int, int64_t>{3, 4}, {2, 8}, {1, 12}}) {
    RunConfig part = config;
    part.train.steps = steps;
    const std::vector<Course> shared =
        world > 1 ? run_shared(part, world, dir, run) : std::vector<Course>{run_alone(part, dir, run)};
    for (const Course& c : shared) EXPECT_EQ(c.losses.size(), 4u);
    EXPECT_EQ(latest_checkpoint(run)->step(), steps);
  }
}

// Also after a stop by a single rank, in the middle, with all of Muon's momentum in the checkpoint.
TEST(ranks, a_stopped_run_goes_on_bit_for_bit) {
  TemporaryDirectory dir, other;
  const RunConfig config = run_of(true, 3);
  const std::string run = dir.path() + "/run";
  RunConfig first = config;
  data_for(first, dir);
  const std::vector<std::string> errors = run_ranks(3, kDeadline, [&](SocketCommunicator& ranks) {
    RunConfig mine = config;
    RunData data = data_for(mine, dir);
    Trainer trainer(mine, std::move(data), run, "", {}, {}, &ranks);
    int64_t done = 0;
    const TrainResult r = trainer.run({.on_step = [&](const TrainStatus& s) { done = s.step; },
                                       .should_stop = [&] { return ranks.rank() == 2 && done == 5; }});
    EXPECT_EQ(int(r.end), int(TrainEnd::stopped));
    EXPECT_EQ(r.status.step, 5);
  });
  for (const std::string& e : errors) EXPECT_EQ(e, "");
  const std::vector<Course> rest = run_shared(config, 3, dir, run);
  for (const Course& c : rest) {
    EXPECT_EQ(c.losses.size(), 7u);
    EXPECT_EQ(c.result.parameter_hash, run_alone(config, other).result.parameter_hash);
  }
}

TEST(ranks, end_together_when_the_time_is_over) {
  TemporaryDirectory dir;
  RunConfig config = run_of(true, 3);
  config.train.seconds = 0.6;
  config.train.reserve_seconds = 0.1;
  const std::vector<Course> shared = run_shared(config, 3, dir);
  EXPECT_GT(shared[0].losses.size(), 0u);
  for (const Course& c : shared) {
    EXPECT_EQ(c.losses, shared[0].losses);
    EXPECT_EQ(c.result.parameter_hash, shared[0].result.parameter_hash);
  }
}

TEST(ranks, passes_that_do_not_divide_are_refused) {
  TemporaryDirectory dir;
  RunConfig config = run_of(true, 3);
  data_for(config, dir);
  for (const std::string& e : run_ranks(2, kDeadline, [&](SocketCommunicator& ranks) {
         RunConfig mine = config;
         RunData data = data_for(mine, dir);
         Trainer trainer(mine, std::move(data), "", "", {}, {}, &ranks);
       }))
    EXPECT_EQ(e,
              "train.accumulation: found 3 passes per step, expected a multiple of 2, the number of ranks that share "
              "them");
}

TEST(ranks, another_configuration_on_one_rank_is_refused_before_the_first_step) {
  TemporaryDirectory dir;
  RunConfig config = run_of(true, 2);
  data_for(config, dir);
  const std::vector<std::string> errors = run_ranks(2, kDeadline, [&](SocketCommunicator& ranks) {
    RunConfig mine = config;
    if (ranks.rank() == 1) mine.train.optimizer.scalar_lr *= 2;
    RunData data = data_for(mine, dir);
    Trainer trainer(mine, std::move(data), dir.path() + "/run", "", {}, {}, &ranks);
  });
  for (const std::string& e : errors)
    EXPECT_EQ(e, "rank 1: found another configuration than rank 0's, expected the same on every rank");
  EXPECT_FALSE(exists(dir.path() + "/run/config.json"));
}

TEST(ranks, weights_that_differ_between_ranks_are_found) {
  TemporaryDirectory dir;
  const RunConfig config = run_of(true, 2);
  RunConfig first = config;
  data_for(first, dir);
  const std::vector<std::string> errors = run_ranks(2, kDeadline, [&](SocketCommunicator& ranks) {
    RunConfig mine = config;
    RunData data = data_for(mine, dir);
    Trainer trainer(mine, std::move(data), ranks.rank() == 0 ? dir.path() + "/run" : "", "", {}, {}, &ranks);
    trainer.run({.on_step = [&](const TrainStatus& s) {
      // The smallest possible difference: a bit of a number sent by this rank alone.
      if (s.step == 11 && ranks.rank() == 1) {
        float& last = trainer.weights().ptr<float>()[trainer.parameter_count() - 1];
        last = std::nextafter(last, 2.0f);
      }
    }});
  });
  for (const std::string& e : errors)
    EXPECT_NE(e.find("rank 1: found weights that are not rank 0's"), std::string::npos) << e;
  EXPECT_FALSE(latest_checkpoint(dir.path() + "/run").has_value());  // no checkpoint of doubtful weights
}

TEST(ranks, leave_out_a_step_whose_gradient_is_not_finite_and_give_up_together) {
  TemporaryDirectory dir;
  RunConfig config = run_of(true, 2);
  config.train.optimizer.embed_lr = config.train.optimizer.scalar_lr = 1e38;
  config.train.max_bad_steps = 2;
  data_for(config, dir);
  for (const std::string& e : run_ranks(2, kDeadline, [&](SocketCommunicator& ranks) {
         RunConfig mine = config;
         RunData data = data_for(mine, dir);
         Trainer trainer(mine, std::move(data), "", "", {}, {}, &ranks);
         trainer.run();
       }))
    EXPECT_NE(e.find("found 2 steps in a row whose gradient is not finite, the last time in the "), std::string::npos)
        << e;
}

TEST(ranks, a_rank_that_dies_ends_all_ranks_and_the_run_continues_from_its_checkpoint) {
  TemporaryDirectory dir, other;
  RunConfig config = run_of(true, 3);
  config.train.checkpoint_every = 4;
  RunConfig first = config;
  data_for(first, dir);
  const std::string run = dir.path() + "/run";
  const std::vector<std::string> errors = run_ranks(3, kDeadline, [&](SocketCommunicator& ranks) {
    RunConfig mine = config;
    RunData data = data_for(mine, dir);
    Trainer trainer(mine, std::move(data), run, "", {}, {}, &ranks);
    trainer.run({.on_step = [&](const TrainStatus& s) {
      if (ranks.rank() == 1 && s.step == 6) throw Error(ErrorCode::io, "this rank's end");
    }});
  });
  EXPECT_EQ(errors[1], "this rank's end");
  for (const int r : {0, 2})
    EXPECT_NE(errors[size_t(r)].find("rank 1 went away"), std::string::npos) << errors[size_t(r)];
  EXPECT_EQ(latest_checkpoint(run)->step(), 4);
  const std::vector<Course> rest = run_shared(config, 3, dir, run);
  EXPECT_EQ(rest[0].losses.size(), 8u);
  EXPECT_EQ(rest[0].result.parameter_hash, run_alone(config, other).result.parameter_hash);
}

TEST(shards, every_matrix_is_dealt_once_and_evenly) {
  const std::vector<MatrixBank> banks{{0, 22, 512, 512}, {0, 11, 2048, 512}, {0, 11, 512, 2048}, {0, 1, 8, 8}};
  for (const int world : {1, 2, 3, 8, 16}) {
    const std::vector<Parts> dealt = deal_matrices(banks, world);
    std::vector<double> work(static_cast<size_t>(world));
    double largest = 0;
    for (size_t i = 0; i < banks.size(); ++i) {
      ASSERT_EQ(dealt[i].size(), size_t(world) + 1);
      EXPECT_EQ(dealt[i].front(), 0);
      EXPECT_EQ(dealt[i].back(), banks[i].count);
      const double one = double(banks[i].rows * banks[i].cols * std::min(banks[i].rows, banks[i].cols));
      largest = std::max(largest, one);
      for (int r = 0; r < world; ++r) {
        const int64_t n = dealt[i][size_t(r) + 1] - dealt[i][size_t(r)];
        EXPECT_GE(n, banks[i].count / world);
        EXPECT_LE(n, (banks[i].count + world - 1) / world);
        work[size_t(r)] += one * double(n);
      }
    }
    const auto [least, most] = std::minmax_element(work.begin(), work.end());
    EXPECT_LE(*most - *least, largest) << world;
  }
  EXPECT_EQ(in_numbers({0, 2, 3}, {0, 3, 4, 5}), (Parts{0, 40, 60}));
}

TEST(shards, the_most_tokens_that_fit_are_found) {
  const auto bytes = [](int64_t tokens) { return 1000 + 7 * tokens; };
  for (const int64_t available : {0, 1000, 1223, 1224, 1225, 50000, 1 << 30}) {
    const int64_t fit = tokens_that_fit(4096, 32, available, bytes);
    EXPECT_EQ(fit % 32, 0);
    EXPECT_LE(fit, 4096);
    if (fit > 0) { EXPECT_LE(bytes(fit), available); }
    if (fit < 4096) { EXPECT_GT(bytes(fit + 32), available); }
  }
}

TEST(shards, a_hash_sees_every_bit_and_no_number_of_threads) {
  std::vector<float> x(3 << 18, 1.5f);
  const Tensor t(x.data(), {int64_t(x.size())});
  const uint64_t before = hash_of_bits(t);
  EXPECT_EQ(hash_of_bits(t), before);
  for (const size_t i : {size_t(0), size_t(12345), x.size() - 1}) {
    const float kept = x[i];
    x[i] = std::nextafter(kept, 2.0f);
    EXPECT_NE(hash_of_bits(t), before) << i;
    x[i] = kept;
  }
  EXPECT_NE(hash_of_bits(t.slice(0, 0, t.numel() - 1)), before);
}

}  // namespace
}  // namespace ingot
