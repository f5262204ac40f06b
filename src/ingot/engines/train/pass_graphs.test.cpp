// Tests when a pass is recorded and when it runs directly; trainer.cuda.test.cpp compares replays with direct passes.
#include "ingot/engines/train/pass_graphs.h"

#include <gtest/gtest.h>

#include "ingot/core/check.h"

namespace ingot {
namespace {

TEST(SegmentBucket, HoldsAllSegmentsAndFewNumbersOccur) {
  for (int64_t n = 0; n <= 3000; ++n) {
    const int64_t bucket = segment_bucket(n, 98304);
    EXPECT_GE(bucket, n);
    EXPECT_LE(bucket, std::max(n + n / 4, (n + 7) / 8 * 8)) << n;
    EXPECT_EQ(segment_bucket(bucket, 98304), bucket) << n;
    if (n > 0) { EXPECT_GE(bucket, segment_bucket(n - 1, 98304)); }
  }
  EXPECT_EQ(segment_bucket(195, 98304), 224);
  EXPECT_EQ(segment_bucket(3, 4), 4);  // no more segments than tokens, the size of the memory
  EXPECT_EQ(segment_bucket(9, 4), 9);
}

TEST(PassGraphs, TurnedOffEveryPassRuns) {
  PassGraphs graphs({}, false);
  int runs = 0;
  for (int i = 0; i < 4; ++i) graphs.run({128, 8}, [&] { ++runs; });
  EXPECT_EQ(runs, 4);
  EXPECT_EQ(graphs.replays(), 0);
}

// Without a GPU no pass can be recorded: the first pass is not tried, a later pass is, and every pass runs exactly
// once.
TEST(PassGraphs, WhereNothingCanBeRecordedEveryPassRunsOnce) {
  if (gpu::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  PassGraphs graphs({}, true);
  ::testing::internal::CaptureStderr();
  int runs = 0;
  for (int i = 0; i < 4; ++i) {
    graphs.run({128, 8}, [&] { ++runs; });
    EXPECT_EQ(runs, i + 1);
  }
  graphs.run({128, 16}, [&] { ++runs; });
  EXPECT_EQ(runs, 5);
  EXPECT_EQ(graphs.replays(), 0);
  const std::string said = ::testing::internal::GetCapturedStderr();
  const size_t at = said.find("without CUDA graphs");
  EXPECT_NE(at, std::string::npos) << said;
  EXPECT_EQ(said.find("without CUDA graphs", at + 1), std::string::npos) << said;
}

// An error of the pass itself reaches the caller, whether or not the pass is being recorded.
TEST(PassGraphs, AFailedPassIsReported) {
  PassGraphs graphs({}, true);
  const auto bad = [] { fail(ErrorCode::bad_data, "a bad pass"); };
  for (int i = 0; i < 3; ++i) EXPECT_THROW(graphs.run({1, 1}, bad), Error);
}

}  // namespace
}  // namespace ingot
