#include "ingot/io/checkpoint.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ingot/io/file.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::TemporaryDirectory;

struct Weights {
  float w[6] = {1, 2, 3, 4, 5, 6};
  double m[2] = {7, 8};
  CheckpointContent content(const std::string& state) {
    return {{{"a", Tensor(w, {2, 2})}, {"b", Tensor(w + 4, {2})}}, {{"m", Tensor(m, {2})}}, state};
  }
};

std::string save(const TemporaryDirectory& dir, int64_t step, int keep = 3) {
  Weights weights;
  weights.w[0] = float(step);
  return save_checkpoint(dir.path(), step, weights.content("{\"step\": " + std::to_string(step) + "}"), keep);
}

TEST(checkpoint, saved_checkpoints_are_loaded_unchanged) {
  const TemporaryDirectory dir;
  EXPECT_EQ(latest_checkpoint(dir.path()), std::nullopt);
  EXPECT_EQ(latest_checkpoint(dir / "absent"), std::nullopt);
  EXPECT_EQ(save(dir, 12), dir / "step-00000012");
  const Checkpoint c = latest_checkpoint(dir.path()).value();
  EXPECT_EQ(c.step(), 12);
  EXPECT_EQ(c.state_json(), "{\"step\": 12}");
  EXPECT_EQ(c.run_directory(), dir.path());
  Weights back{};
  back.w[0] = back.w[5] = 0;
  back.m[1] = 0;
  const CheckpointContent into = back.content("");
  c.load_model(into.model);
  c.load_optimizer(into.optimizer);
  EXPECT_EQ(back.w[0], 12);
  EXPECT_EQ(back.w[5], 6);
  EXPECT_EQ(back.m[1], 8);
  EXPECT_THROW(c.load_model(into.optimizer), Error);
  EXPECT_EQ(open_checkpoint(dir.path()).step(), 12);
  EXPECT_EQ(open_checkpoint(c.path()).step(), 12);
  EXPECT_EQ(error_of([&] { open_checkpoint(dir / "absent"); }).substr(0, 9), "not found");
}

TEST(checkpoint, the_newest_few_are_kept) {
  const TemporaryDirectory dir;
  for (const int64_t step : {1, 2, 10, 9, 100000000}) save(dir, step, 3);
  EXPECT_EQ(list_directory(dir.path()), (std::vector<std::string>{"step-00000009", "step-00000010", "step-100000000"}));
  EXPECT_EQ(latest_checkpoint(dir.path())->step(), 100000000);
  save(dir, 3, 1);  // the checkpoint just saved stays, at any number
  EXPECT_EQ(list_directory(dir.path()), (std::vector<std::string>{"step-00000003", "step-100000000"}));
}

TEST(checkpoint, a_checkpoint_of_the_same_step_is_replaced_as_a_whole) {
  const TemporaryDirectory dir;
  Weights weights;
  save_checkpoint(dir.path(), 5, weights.content("{\"first\": true}"), 2);
  save_checkpoint(dir.path(), 5, weights.content("{\"second\": true}"), 2);
  EXPECT_EQ(latest_checkpoint(dir.path())->state_json(), "{\"second\": true}");
  File::create(dir / "step-00000005/model.safetensors").write("x");  // a damaged checkpoint too
  save_checkpoint(dir.path(), 5, weights.content("{\"third\": true}"), 2);
  EXPECT_EQ(latest_checkpoint(dir.path())->state_json(), "{\"third\": true}");
  EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"step-00000005"});
}

TEST(checkpoint, leftovers_of_an_interrupted_save_are_removed_and_never_loaded) {
  const TemporaryDirectory dir;
  save(dir, 1);
  create_directories(dir / ".tmp-step-00000002");
  File::create(dir / ".tmp-step-00000002/model.safetensors").write("half");
  EXPECT_EQ(latest_checkpoint(dir.path())->step(), 1);
  EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"step-00000001"});
}

TEST(checkpoint, a_byte_changed_anywhere_in_any_file_is_refused_by_name) {
  const TemporaryDirectory dir;
  const std::string path = save(dir, 7);
  save(dir, 3);
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}) {
    const std::string file = join_path(path, name), whole = read_file(file);
    for (size_t bit = 0; bit < whole.size() * 8; bit += 9) {  // every byte, every bit of the byte
      std::string flipped = whole;
      flipped[bit / 8] = char(flipped[bit / 8] ^ (1 << bit % 8));
      File::create(file).write(flipped);
      const std::string error = error_of([&] { latest_checkpoint(dir.path()); });
      ASSERT_NE(error.find("bad data: "), std::string::npos) << name << " bit " << bit;
      ASSERT_NE(error.find(path), std::string::npos) << error;
      ASSERT_EQ(error.find('\n'), std::string::npos) << error;
    }
    File::create(file).write(whole);
  }
  EXPECT_EQ(latest_checkpoint(dir.path())->step(), 7);
  EXPECT_EQ(open_checkpoint(dir / "step-00000003").step(), 3);  // an older checkpoint, on request
}

TEST(checkpoint, messages_name_the_value_found_and_the_value_expected) {
  const TemporaryDirectory dir;
  const std::string path = save(dir, 7), model = path + "/model.safetensors";
  const std::string whole = read_file(model);
  File::create(model).write(whole.substr(0, whole.size() - 1) + "?");
  EXPECT_EQ(error_of([&] { latest_checkpoint(dir.path()); }),
            "bad data: " + model + ": found SHA-256 " + sha256(whole.substr(0, whole.size() - 1) + "?") +
                ", expected " + sha256(whole) + ": the file was changed");
  File::create(model).write("x");
  EXPECT_NE(error_of([&] { latest_checkpoint(dir.path()); }).find("found 1 bytes, expected "), std::string::npos);
  remove_file(model);
  EXPECT_NE(error_of([&] { latest_checkpoint(dir.path()); }).find(model + ": the file is missing"), std::string::npos);
  remove_file(path + "/manifest.json");
  EXPECT_NE(error_of([&] { latest_checkpoint(dir.path()); }).find("not a whole checkpoint"), std::string::npos);
  rename_path(save(dir, 8), dir / "step-00000009");
  EXPECT_NE(error_of([&] { latest_checkpoint(dir.path()); }).find("found step 8 in manifest.json, expected 9"),
            std::string::npos);
}

TEST(checkpoint, a_save_that_runs_out_of_room_leaves_the_earlier_one_and_nothing_else) {
  const TemporaryDirectory dir;
  save(dir, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100, 100};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string error = error_of([&] { save(dir, 2); });
    ::_exit(error.find("input/output: checkpoint of step 2 not saved: ") == 0 &&
                    error.find("File too large") != std::string::npos
                ? 0
                : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"step-00000001"});
  EXPECT_EQ(latest_checkpoint(dir.path())->step(), 1);
}

void damage(const std::string& checkpoint) {
  const std::string file = join_path(checkpoint, "model.safetensors"), whole = read_file(file);
  File::create(file).write(whole.substr(0, whole.size() / 2));
}

TEST(checkpoint, a_damaged_newest_checkpoint_is_an_error_that_names_the_last_undamaged_one) {
  const TemporaryDirectory dir;
  for (int64_t step : {10, 20, 30, 40}) save(dir, step, 4);
  damage(dir / "step-00000030");
  damage(dir / "step-00000040");
  for (const auto& open : {std::function<void()>([&] { latest_checkpoint(dir.path()); }),
                           std::function<void()>([&] { open_checkpoint(dir.path()); })}) {
    const std::string error = error_of(open);
    EXPECT_NE(error.find("step-00000040/model.safetensors: found "), std::string::npos) << error;
    EXPECT_NE(error.find("; " + dir / "step-00000020" + " before it is whole"), std::string::npos) << error;
  }
  EXPECT_THROW(latest_checkpoint(dir.path()), DamagedCheckpoint);
  EXPECT_EQ(last_good_checkpoint(dir.path())->step(), 20);
  damage(dir / "step-00000010");
  damage(dir / "step-00000020");
  EXPECT_EQ(last_good_checkpoint(dir.path()), std::nullopt);
  EXPECT_EQ(error_of([&] { latest_checkpoint(dir.path()); }).find("whole"), std::string::npos);
}

TEST(checkpoint, a_checkpoint_has_three_spellings_of_its_name) {
  const TemporaryDirectory dir;
  save(dir, 10);
  save(dir, 20);
  for (const char* name : {"step-00000010", "step-10", "10"})
    EXPECT_EQ(named_checkpoint(dir.path(), name).step(), 10) << name;
  for (const char* name : {"11", "x", "", "step-", "-10", "100000000000000000000000"}) {
    const std::string error = error_of([&] { named_checkpoint(dir.path(), name); });
    EXPECT_NE(error.find("expected one of step-00000010, step-00000020"), std::string::npos) << error;
  }
}

TEST(checkpoint, checkpoints_set_aside_are_never_the_newest_and_never_lost) {
  const TemporaryDirectory dir;
  for (int again = 0; again < 2; ++again) {
    for (int64_t step : {10, 20, 30}) save(dir, step, 3);
    set_best_checkpoint(dir.path(), {.step = 20, .loss = 1, .bits_per_byte = 2}, 3);
    set_aside_after(dir.path(), 10);
    EXPECT_EQ(latest_checkpoint(dir.path())->step(), 10);
    EXPECT_FALSE(best_checkpoint(dir.path()));
  }
  save(dir, 40, 1);
  EXPECT_EQ(list_directory(dir.path()),
            (std::vector<std::string>{"aside-step-00000020", "aside-step-00000020-2", "aside-step-00000030",
                                      "aside-step-00000030-2", "step-00000040"}));
}

TEST(checkpoint, the_best_checkpoint_is_kept_until_a_better_one_exists) {
  const TemporaryDirectory dir;
  save(dir, 10);
  set_best_checkpoint(dir.path(), {.step = 10, .loss = 1.5, .bits_per_byte = 2.5}, 2);
  for (int64_t step : {20, 30, 40}) save(dir, step, 2);
  EXPECT_EQ(list_directory(dir.path()),
            (std::vector<std::string>{"best.json", "step-00000010", "step-00000030", "step-00000040"}));
  EXPECT_EQ(best_checkpoint(dir.path())->loss, 1.5);
  EXPECT_EQ(open_checkpoint(dir / "best").step(), 10);
  set_best_checkpoint(dir.path(), {.step = 40, .loss = 1.25, .bits_per_byte = 2}, 2);
  EXPECT_EQ(list_directory(dir.path()), (std::vector<std::string>{"best.json", "step-00000030", "step-00000040"}));
  EXPECT_EQ(open_checkpoint(dir / "best").step(), 40);
  remove_tree(dir / "step-00000040");
  EXPECT_FALSE(best_checkpoint(dir.path()));  // a missing checkpoint is not named
  EXPECT_THROW(open_checkpoint(dir / "best"), Error);
  set_aside_after(dir.path(), 30);
  EXPECT_FALSE(exists(dir / "best.json"));
  write_file(dir / "best.json", "{");  // damaged: an error on reading, no reason to lose a save
  EXPECT_THROW(open_checkpoint(dir / "best"), Error);
  save(dir, 50, 2);
  EXPECT_EQ(latest_checkpoint(dir.path())->step(), 50);
}

TEST(checkpoint, names_that_only_look_like_checkpoints_are_ignored) {
  const TemporaryDirectory dir;
  save(dir, 1);
  for (const char* name : {"step-1", "step-0000000x", "step-00000009x", "step-000000009", "old-step-00000009", "step-"})
    create_directories(dir / name);
  EXPECT_EQ(latest_checkpoint(dir.path())->step(), 1);
}

}  // namespace
}  // namespace ingot
