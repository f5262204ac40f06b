// The kernels of the GPU's variant against the fp64 loop, under bounds derived from the roundings. Without a GPU the
// numeric cases skip; the division into tiles is plain C++.
#include "ingot/kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/attention/attention_fp64.test.h"
#include "ingot/kernels/attention/claim_slots.h"
#include "ingot/kernels/attention/hopper/score_panels.h"
#include "ingot/kernels/attention/parts/tiles.h"
#include "ingot/kernels/attention/variant.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace cuda {
uint32_t claim_slot(Stream stream, Device device);  // called by every launch
}
namespace {

using Case = testing::AttentionCase;
using testing::Buffer;
using testing::compare;
using testing::Definition;
using testing::DeviceBuffer;
using testing::expect_gradients;
using testing::expect_output;
using testing::Lengths;
using testing::offsets;
using testing::Order;
using testing::roundoff;
using testing::total;
using testing::values;

struct OnGpu {
  using Storage = DeviceBuffer;
  static void run(const Attention& a) { attention(a, {}); }
  static void run(const AttentionBackward& a) { attention_backward(a, {}); }
  static int64_t workspace_bytes(const AttentionBackward& a) { return attention_backward_workspace_bytes(a); }
};

TEST(AttentionTiles, EveryRowOfEverySegmentHasOnePlace) {
  const std::vector<Lengths> all = {
      {0}, {1}, {64}, {65}, {0, 0, 5, 0, 700, 1, 1, 63, 0}, {191, 193, 192, 1, 2}, Lengths(300, 7)};
  for (const Lengths& n : all)
    for (int rows : {64, 128, 192}) {
      const auto cu = offsets(n);
      std::vector<int> seen(size_t(total(n)), 0);
      for (int64_t place = 0; place < detail::tile_places(total(n), int64_t(n.size()), rows); ++place) {
        const auto at = detail::tile_place(cu.data(), int(n.size()), rows, place);
        ASSERT_GE(at.first, 0);
        for (int64_t i = at.first; i < std::min(at.first + rows, n[size_t(at.segment)]); ++i)
          ++seen[size_t(cu[size_t(at.segment)] + i)];
      }
      EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; })) << rows;
    }
}

TEST(AttentionTiles, RangesHoldExactlyWhatRowsSee) {
  for (int64_t queries : {1, 5, 40})
    for (int64_t keys : {0, 1, 11, 40, 90})
      for (int64_t window : {0, 1, 7, 100})
        for (bool causal : {true, false}) {
          if (!causal && window > 0) continue;
          const auto sees = [&](int64_t i, int64_t j) {
            return !causal || (j <= i + keys - queries && (window == 0 || j > i + keys - queries - window));
          };
          for (int64_t i = 0; i < queries; ++i) {
            const auto r = detail::keys_seen(i, i + 1, queries, keys, causal, window);
            for (int64_t j = 0; j < keys; ++j) EXPECT_EQ(sees(i, j), j >= r.begin && j < r.end) << i << ' ' << j;
          }
          for (int64_t j = 0; j < keys; ++j) {
            const auto r = detail::queries_seeing(j, j + 1, queries, keys, causal, window);
            for (int64_t i = 0; i < queries; ++i) EXPECT_EQ(sees(i, j), i >= r.begin && i < r.end) << i << ' ' << j;
          }
        }
}

using cuda::attention_hopper::panels_of;
using cuda::attention_hopper::plan_scores;

// dQ's kernel reads all 16 panels of each tile of 128 queries that sees a key of a tile of 128 keys.
TEST(AttentionScores, EveryTileOfQueriesThatSeesAKeyHasPanels) {
  for (int64_t queries : {1, 100, 128, 700})
    for (int64_t keys : {1, 128, 300, 900})
      for (int64_t window : {0, 1, 129, 600})
        for (bool causal : {true, false}) {
          if (!causal && window > 0) continue;
          int64_t sum = 0;
          for (int64_t first = 0; first < keys; first += 128) {
            const auto panels = panels_of(first, queries, keys, causal, window);
            sum += panels.end - panels.begin;
            EXPECT_EQ(panels.begin % 16, 0);
            EXPECT_EQ(panels.end % 16, 0);
            for (int64_t row = 0; row < queries; row += 128) {
              const auto seen = detail::keys_seen(row, std::min(row + 128, queries), queries, keys, causal, window);
              const bool sees = seen.end > first && seen.begin < std::min(first + 128, keys) && seen.end > seen.begin;
              EXPECT_EQ(row / 8 >= panels.begin && row / 8 + 16 <= panels.end, sees)
                  << queries << ' ' << keys << ' ' << window << ' ' << causal << ' ' << first << ' ' << row;
            }
          }
          EXPECT_EQ(sum, cuda::attention_hopper::panels_of_segment(queries, keys, causal, window));
        }
}

TEST(AttentionScores, HeadsAreTakenTogetherAsMemoryAndBalanceAllow) {
  // 8,192 queries: 33,280 panels, of 2 KB, per segment
  EXPECT_EQ(plan_scores(1, 8192, 8192, 1, 1, true, 0).panels, 33280);
  EXPECT_EQ(plan_scores(2, 8192, 8192, 16, 1, true, 0).key_heads, 6);  // 7 have room: 6, 6 and 4
  EXPECT_EQ(plan_scores(1, 8192, 8192, 10, 1, true, 0).key_heads, 10);
  EXPECT_EQ(plan_scores(1, 8192, 8192, 32, 1, true, 0).key_heads, 11);  // 15 have room
  EXPECT_EQ(plan_scores(1, 8192, 8192, 8, 4, true, 0).key_heads, 0);    // 3 heads of 64 tiles at a time
  EXPECT_EQ(plan_scores(1, 65536, 65536, 8, 1, true, 0).key_heads, 0);  // not a single head
  EXPECT_EQ(plan_scores(1, 65536, 65536, 8, 1, true, 256).key_heads, 8);
  EXPECT_EQ(plan_scores(3, 0, 100, 8, 1, true, 0).key_heads, 0);
  EXPECT_EQ(plan_scores(3, 100, 0, 8, 1, true, 0).key_heads, 0);
}

// Everything below needs a GPU.
class AttentionCuda : public testing::GpuTest<> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    if (testing::kEmulated && !name.ends_with("Small")) GTEST_SKIP() << "too large for the emulator";
  }
};

// Cases of the same width and type; d = 0: of several widths.
struct Group {
  int64_t d = 0;
  DType type = DType::bf16;
};
std::vector<Case> cases(const Group& group) {
  std::vector<Case> all;
  const auto [d, type] = group;
  if (d > 0) {
    const Case some[] = {
        {.queries = {64}, .heads = 1, .causal = false},
        {.queries = {128}, .heads = 1},
        {.queries = {1}, .heads = 1},
        {.queries = {300}},
        {.queries = {0, 5, 0, 700, 1, 129, 64}, .heads = 4, .kv_heads = 2, .gap = 8},
        {.queries = {475, 130, 33}, .heads = 4, .kv_heads = 4, .softcap = 20},
        {.queries = {300, 500}, .window = 128, .sinks = true},
        {.queries = {300, 77}, .window = 5},
        {.queries = {700}, .softcap = 10, .window = 1, .sinks = true},
        {.queries = {5, 140}, .keys = {390, 170}, .heads = 4, .kv_heads = 4, .sinks = true},
        {.queries = {240, 9}, .keys = {111, 9}},  // the first queries see nothing
        // the first queries see nothing but the sink
        {.queries = {240, 9}, .keys = {111, 9}, .window = 30, .sinks = true},
        {.queries = {133, 20}, .keys = {250, 0}, .causal = false},
        {.queries = {133, 20}, .keys = {250, 0}, .causal = false, .sinks = true},
        {.queries = {10, 20}, .keys = {0, 0}, .sinks = true},
        {.queries = {200}, .size = 12},  // huge scores
        {.queries = {200}, .scale = -0.1},
        {.queries = {200}, .scale = 0},
        {.queries = Lengths(40, 17), .heads = 3, .kv_heads = 3},
    };
    for (Case c : some) {
      c.d = d, c.type = type;
      all.push_back(c);
    }
  } else {
    for (int64_t width : {8, 40, 72, 96, 120, 136, 192, 248})
      all.push_back({.queries = {150, 7}, .heads = 4, .kv_heads = 2, .d = width});
  }
  for (Case& c : all)
    if (c.keys.empty()) c.keys = c.queries;
  return all;
}

using Operands = testing::AttentionOperands<OnGpu>;
using Gradients = testing::AttentionGradients<OnGpu>;

class AttentionCudaNumbers : public testing::GpuTest<::testing::TestWithParam<Group>> {};
INSTANTIATE_TEST_SUITE_P(, AttentionCudaNumbers,
                         ::testing::Values(Group{64, DType::bf16}, Group{64, DType::f16}, Group{128, DType::bf16},
                                           Group{128, DType::f16}, Group{256, DType::bf16}, Group{256, DType::f16},
                                           Group{}),
                         [](const auto& info) {
                           return info.param.d == 0 ? std::string("other_widths")
                                                    : ingot::detail::concat(info.param.d, "_wide_", info.param.type);
                         });

TEST_P(AttentionCudaNumbers, MatchFp64) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  double closest = 0;
  for (const Case& c : cases(GetParam())) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands a(c);
    expect_output(a, closest);
  }
  std::cout << "largest error of out: " << closest << " of what is allowed\n";
}

// The bound holds for any order of additions: the order of fp32 partial sums changes a sum by 2^-24 of the terms' size,
// which is thousands of times less than dS's rounding.
void expect_gradients_of(const std::vector<Case>& all) {
  double closest[3] = {};
  for (const Case& c : all) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands a(c);
    attention(a.op(), {});
    a.out.download(), a.lse.download();
    std::optional<Definition> want;
    for (Order order : {Order::fixed, Order::any}) expect_gradients(a, order, want, closest);
  }
  std::cout << "largest errors of dq, dk, dv: " << closest[0] << ' ' << closest[1] << ' ' << closest[2]
            << " of what is allowed\n";
}
TEST_P(AttentionCudaNumbers, OfGradientsMatchFp64) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  expect_gradients_of(cases(GetParam()));
}

// Segments of equal lengths, whose backward pass stores dS: the ends of tiles of queries and of keys, queries without a
// visible key, keys without a query, windows, several heads of a key head.
TEST_F(AttentionCuda, GradientsOfRegularSegmentsMatchFp64) {
  std::vector<Case> regular = {
      {.queries = {64}, .keys = {64}, .heads = 1, .causal = false},
      {.queries = {1}, .keys = {1}, .heads = 1},
      {.queries = {300}, .keys = {300}, .d = 72},
      {.queries = {300, 300}, .keys = {300, 300}, .heads = 4, .kv_heads = 2, .gap = 8},
      {.queries = {300, 300}, .keys = {300, 300}, .window = 128, .sinks = true},
      {.queries = {300, 300, 300}, .keys = {300, 300, 300}, .window = 5},
      {.queries = {700}, .keys = {700}, .d = 96, .window = 1},
      {.queries = {140, 140}, .keys = {390, 390}, .heads = 4, .kv_heads = 4},
      {.queries = {240, 240}, .keys = {111, 111}, .sinks = true},
      {.queries = {240, 240}, .keys = {111, 111}, .window = 30},
      {.queries = {133, 133}, .keys = {250, 250}, .causal = false},
      {.queries = Lengths(40, 17), .keys = Lengths(40, 17), .heads = 3, .kv_heads = 3, .type = DType::f16},
      {.queries = {900}, .keys = {900}, .heads = 6, .kv_heads = 2, .type = DType::f16},
      {.queries = {20, 20}, .keys = {0, 0}},
  };
  for (Case& c : regular) {
    if (c.d == 64) c.d = 128;
    c.regular = true;
  }
  expect_gradients_of(regular);
}

// A segment among others that hold NaN has the bits that the segment has alone; so does every repetition.
TEST_F(AttentionCuda, RegularSegmentsRepeatBitForBitBesideOthers) {
  for (int64_t window : {0, 100}) {
    Operands alone(
        {.queries = {300}, .keys = {300}, .heads = 4, .kv_heads = 2, .d = 128, .window = window, .regular = true});
    Operands beside({.queries = {300, 300, 300},
                     .keys = {300, 300, 300},
                     .heads = 4,
                     .kv_heads = 2,
                     .d = 128,
                     .window = window,
                     .regular = true});
    const auto between_nans = [](DeviceBuffer& from, DeviceBuffer& to) {
      std::vector<double> x(size_t(to.host().numel()), NAN);
      const auto part = values(from.host());
      std::copy(part.begin(), part.end(), x.begin() + ptrdiff_t(part.size()));
      testing::assign(to.host(), x);
      to.upload();
    };
    for (auto [from, to] : {std::pair{&alone.q, &beside.q}, {&alone.k, &beside.k}, {&alone.v, &beside.v}})
      between_nans(*from, *to);
    attention(alone.op(), {});
    attention(beside.op(), {});
    Gradients one(alone), three(beside);
    between_nans(one.dout, three.dout);
    one.run();
    for (int repeat = 0; repeat < 3; ++repeat) {
      three.run();
      EXPECT_EQ(values(three.dq.host().slice(0, 300, 600)), values(one.dq.host()));
      EXPECT_EQ(values(three.dk.host().slice(0, 300, 600)), values(one.dk.host()));
      EXPECT_EQ(values(three.dv.host().slice(0, 300, 600)), values(one.dv.host()));
    }
  }
}

// Long segments, whose heads are taken a few at a time: dk and dv have the bits of the form that computes the scores
// twice, and dq differs by the order of its sums.
TEST_F(AttentionCuda, RegularSegmentsMatchTheFormWithoutStoredScores) {
  if (cuda::attention_variant(gpu::limits(0)) != cuda::AttentionVariant::hopper)
    GTEST_SKIP() << "the portable variant has one form, which stores no scores";
  const int64_t heads = 17;
  Case c{.queries = {8192}, .keys = {8192}, .heads = heads, .kv_heads = heads, .d = 128};
  Operands twice(c);
  c.regular = true;
  Operands stored(c);
  attention(twice.op(), {});
  attention(stored.op(), {});
  Gradients want(twice), got(stored);
  want.run(), got.run();
  EXPECT_EQ(values(got.dk.host()), values(want.dk.host()));
  EXPECT_EQ(values(got.dv.host()), values(want.dv.host()));
  const auto x = values(want.dq.host());
  double sum = 0;
  for (double y : x) sum += y * y;
  const auto seen = compare(got.dq.host(), x, 1e-3 * std::sqrt(sum / double(x.size())), 2.1 * roundoff(DType::bf16));
  EXPECT_TRUE(seen.ok) << seen.message;
}

// A small case for slow tools such as sanitizers: blocks with several tiles, tiles of several steps, rows after a
// segment's end.
TEST_F(AttentionCuda, MatchesFp64Small) {
  const Case some[] = {
      {.queries = {300, 7}, .keys = {300, 7}, .heads = 4, .kv_heads = 2, .d = 64, .sinks = true},
      {.queries = {5, 140}, .keys = {200, 150}, .d = 128, .softcap = 20, .window = 100},
      {.queries = {150, 150}, .keys = {150, 150}, .d = 128, .regular = true},
  };
  for (const Case& c : some) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands a(c);
    double of_output = 0, of_gradients[3] = {};
    expect_output(a, of_output);
    std::optional<Definition> want;
    for (Order order : {Order::fixed, Order::any}) expect_gradients(a, order, want, of_gradients);
  }
}

// The old and the new value are both rounded, added, and the sum is rounded again, once for each element.
TEST_F(AttentionCuda, AddsToTheValuesGradientWhereAsked) {
  for (int64_t d : {64, 128, 256}) {
    Operands a({.queries = {300, 7, 0, 130}, .keys = {300, 7, 0, 130}, .heads = 4, .kv_heads = 2, .d = d, .gap = 8});
    attention(a.op(), {});
    Gradients b(a);
    b.run();
    const auto alone = values(b.dv.host());
    testing::fill_normal(b.dv.host(), 9);
    const auto there = values(b.dv.host());
    b.dv.upload();
    AttentionBackward op = b.op();
    op.add_dv = true;
    op.workspace = b.workspace;
    attention_backward(op, {});
    b.dv.download();
    const auto got = values(b.dv.host());
    op.add_dv = false, op.has_delta = true;  // the last call left the sums in the workspace
    attention_backward(op, {});
    b.dv.download();
    EXPECT_EQ(values(b.dv.host()), alone);
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], double(float(bf16(float(there[i]) + float(alone[i]))))) << d << ", element " << i;
    EXPECT_TRUE(b.dv.untouched());
  }
}

TEST_F(AttentionCuda, RepeatsBitForBitAndSegmentsDoNotDependOnTheirNeighbours) {
  for (int64_t d : {64, 128}) {
    Operands alone({.queries = {300}, .keys = {300}, .heads = 4, .kv_heads = 2, .d = d});
    Operands beside({.queries = {77, 300, 500}, .keys = {77, 300, 500}, .heads = 4, .kv_heads = 2, .d = d});
    // The second segment holds the first operand's numbers, its neighbours NaN.
    for (auto [from, to] : {std::pair{&alone.q, &beside.q}, {&alone.k, &beside.k}, {&alone.v, &beside.v}}) {
      to->host();
      std::vector<double> x(size_t(to->host().numel()), NAN);
      const auto part = values(from->host());
      std::copy(part.begin(), part.end(), x.begin() + 77 * to->host().size(1) * d);
      testing::assign(to->host(), x);
      to->upload();
    }
    attention(alone.op(), {});
    alone.out.download();
    const auto want = values(alone.out.host());
    Gradients one(alone), three(beside), any_order(beside, Order::any);
    std::vector<double> x(size_t(three.dout.host().numel()), NAN);
    const auto part = values(one.dout.host());
    std::copy(part.begin(), part.end(), x.begin() + 77 * 4 * d);
    testing::assign(three.dout.host(), x);
    testing::assign(any_order.dout.host(), x);
    for (Gradients* b : {&three, &any_order}) b->dout.upload();
    one.run();
    for (int repeat = 0; repeat < 3; ++repeat) {
      attention(beside.op(), {});
      beside.out.download();
      EXPECT_EQ(values(beside.out.host().slice(0, 77, 377)), want) << d;
      three.run();
      EXPECT_EQ(values(three.dq.host().slice(0, 77, 377)), values(one.dq.host())) << d;
      EXPECT_EQ(values(three.dk.host().slice(0, 77, 377)), values(one.dk.host())) << d;
      EXPECT_EQ(values(three.dv.host().slice(0, 77, 377)), values(one.dv.host())) << d;
      any_order.run();
      for (double value : values(any_order.dq.host().slice(0, 77, 377))) ASSERT_FALSE(std::isnan(value)) << d;
      EXPECT_EQ(values(any_order.dk.host().slice(0, 77, 377)), values(one.dk.host())) << d;
      EXPECT_EQ(values(any_order.dv.host().slice(0, 77, 377)), values(one.dv.host())) << d;
    }
  }
}

// There are more tiles than a GPU has SMs. Sums in another order differ by a few roundings of the result and by fp32's
// rounding of the terms.
TEST_F(AttentionCuda, LongSegmentsInAnyOrderMatchAFixedOne) {
  for (auto [d, window] : {std::pair<int64_t, int64_t>{64, 0}, {128, 0}, {128, 5000}}) {
    const Lengths lengths{300, 23000, 77};
    Operands a({.queries = lengths, .keys = lengths, .heads = 2, .kv_heads = 1, .d = d, .window = window});
    attention(a.op(), {});
    Gradients fixed(a), any(a, Order::any);
    fixed.run(), any.run();
    const std::pair<const DeviceBuffer*, const DeviceBuffer*> results[] = {
        {&any.dq, &fixed.dq}, {&any.dk, &fixed.dk}, {&any.dv, &fixed.dv}};
    for (const auto& [got, want] : results) {
      const auto x = values(want->host());
      double sum = 0;
      for (double y : x) sum += y * y;
      const double typical = std::sqrt(sum / double(x.size()));
      const auto seen = compare(got->host(), x, 1e-3 * typical, 2.1 * roundoff(DType::bf16));
      EXPECT_TRUE(seen.ok) << d << ": " << seen.message;
    }
    const auto dq = values(fixed.dq.host()), dk = values(fixed.dk.host()), dv = values(fixed.dv.host());
    for (int repeat = 0; repeat < 3; ++repeat) {
      fixed.run();
      EXPECT_EQ(values(fixed.dq.host()), dq);
      EXPECT_EQ(values(fixed.dk.host()), dk);
      EXPECT_EQ(values(fixed.dv.host()), dv);
    }
  }
}

// Blocks claim their tiles from counters in global memory, and concurrent launches must not share a counter.
TEST_F(AttentionCuda, StreamsAndGraphsDoNotDisturbEachOther) {
  const Lengths lengths(60, 90);
  Operands one({.queries = lengths, .keys = lengths}), two({.queries = {2000}, .keys = {2000}}),
      three({.queries = lengths, .keys = lengths, .heads = 4, .kv_heads = 4});
  std::vector<double> want[3];
  Operands* const all[3] = {&one, &two, &three};
  for (int i = 0; i < 3; ++i) {
    attention(all[i]->op(), {});
    all[i]->out.download();
    want[i] = values(all[i]->out.host());
  }
  const auto backward = [](Gradients& b, Stream stream) {
    AttentionBackward op = b.op();
    op.workspace = b.workspace;
    attention_backward(op, stream);
  };
  std::optional<Gradients> gradients[3];
  std::vector<double> want_dq[3];
  for (int i = 0; i < 3; ++i) {
    gradients[i].emplace(*all[i]);
    gradients[i]->run();
    want_dq[i] = values(gradients[i]->dq.host());
    for (DeviceBuffer* b : {&all[i]->out, &gradients[i]->dq}) {
      testing::assign(b->host(), std::vector<double>(want[i].size(), 0));
      b->upload();
    }
  }
  gpu::synchronize();
  const gpu::OwnedStream streams[3];
  const auto step = [&](int i) { attention(all[i]->op(), streams[i]), backward(*gradients[i], streams[i]); };
  const gpu::Graph graph(streams[2], [&] {
    for (int i = 0; i < 20; ++i) step(2);
  });
  for (int i = 0; i < 20; ++i) {
    graph.launch(streams[2]);
    for (int j = 0; j < 10; ++j) step(0), step(1);
  }
  gpu::synchronize();
  for (int i = 0; i < 3; ++i) {
    all[i]->out.download(), gradients[i]->dq.download();
    EXPECT_EQ(values(all[i]->out.host()), want[i]) << i;
    EXPECT_EQ(values(gradients[i]->dq.host()), want_dq[i]) << i;
  }
}

#if defined(INGOT_HAS_CUDA_ATTENTION) && !defined(INGOT_EMULATED_DEVICE)
// The counters of launches recorded in turn into a graph, which is returned. A thread of CUDA's releases a counter
// after the last graph with this counter has ended, so a little later.
class RecordedCounters : public AttentionCuda {
 protected:
  static std::unique_ptr<gpu::Graph> record(Stream stream, std::vector<uint32_t>& slots, int launches = 1,
                                            bool fails = false) {
    DeviceBuffer node(DType::u8, {16});
    return std::make_unique<gpu::Graph>(stream, [&] {
      gpu::fill_bytes(Tensor(node).data, 0, 16, stream);
      for (int i = 0; i < launches; ++i) slots.push_back(cuda::claim_slot(stream, {Device::cuda, 0}));
      if (fails) fail(ErrorCode::unsupported, "a recording that fails");
    });
  }
  static bool holds(const std::vector<uint32_t>& slots, uint32_t slot) {
    return std::find(slots.begin(), slots.end(), slot) != slots.end();
  }
};

TEST_F(RecordedCounters, BelongToAGraphUntilItEnds) {
  using std::chrono::steady_clock;
  const Lengths lengths(60, 90);
  Operands one({.queries = lengths, .keys = lengths});
  const gpu::OwnedStream stream;
  std::vector<uint32_t> own;
  auto graph = std::make_unique<gpu::Graph>(stream, [&] {
    own.push_back(cuda::claim_slot(stream, {Device::cuda, 0}));
    attention(one.op(), stream);
    own.push_back(cuda::claim_slot(stream, {Device::cuda, 0}));
  });
  EXPECT_NE(own[0], own[1]);
  for (int i = 0; i < 20; ++i) {
    graph->launch(stream);  // a completed launch does not end the graph
    std::vector<uint32_t> others;
    record(stream, others, 8);
    for (uint32_t slot : others) ASSERT_FALSE(holds(own, slot)) << slot;
  }
  gpu::synchronize();
  graph.reset();
  bool given_back = false;
  for (const auto begin = steady_clock::now(); !given_back && steady_clock::now() - begin < std::chrono::seconds(10);) {
    std::vector<uint32_t> others;
    record(stream, others, 8);
    for (uint32_t slot : others) given_back |= holds(own, slot);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(given_back) << "counters of a graph that has ended are not reused";
}
// Records more launches than there are counters, so that each counter must be reused, also after failed recordings.
TEST_F(RecordedCounters, AreReusedAfterGraphsEnd) {
  using namespace cuda::attention_hopper;
  constexpr int kLaunches = 1000, kGraphs = 2 * int(kSlots) / kLaunches;
  const gpu::OwnedStream stream;
  for (bool fails : {false, true})
    for (int i = 0; i < kGraphs; ++i) {
      std::vector<uint32_t> slots;
      if (fails)
        EXPECT_THROW(record(stream, slots, kLaunches, true), Error);
      else
        record(stream, slots, kLaunches);
      ASSERT_EQ(slots.size(), size_t(kLaunches));
      ASSERT_FALSE(holds(slots, kNoCounter)) << "graph " << i << (fails ? " of those that fail" : "");
      if (i % 16 == 15)
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // CUDA's thread releases the
                                                                     // counters
    }
}
#endif

// Launches without a counter claim nothing: launches of two such streams run at once. This is the last test of
// counters, because the test uses up all counters of this process's streams.
TEST_F(AttentionCuda, MoreStreamsThanCountersDoNotDisturbEachOther) {
  constexpr int kStreams = int(cuda::attention_hopper::kStreamSlots), kPairs = 16;
  Operands one({.queries = Lengths(60, 90), .keys = Lengths(60, 90)}), two({.queries = {2000}, .keys = {2000}}),
      small({.queries = {20}, .keys = {20}});
  Operands* const operands[2] = {&one, &two};
  std::optional<Gradients> gradients[2];
  std::vector<double> want[2], want_dq[2], want_dk[2];
  for (int i = 0; i < 2; ++i) {
    attention(operands[i]->op(), {});
    operands[i]->out.download();
    want[i] = values(operands[i]->out.host());
    gradients[i].emplace(*operands[i]);
    gradients[i]->run();
    want_dq[i] = values(gradients[i]->dq.host()), want_dk[i] = values(gradients[i]->dk.host());
    for (DeviceBuffer* b : {&operands[i]->out, &gradients[i]->dq, &gradients[i]->dk}) {
      testing::assign(b->host(), std::vector<double>(values(b->host()).size(), 0));
      b->upload();
    }
  }
  const auto streams = std::make_unique<gpu::OwnedStream[]>(kStreams + kPairs);
  for (int i = 0; i < kStreams + kPairs; ++i) attention(small.op(), streams[size_t(i)]);
  gpu::synchronize();
  for (int i = 0; i < kPairs; ++i) {
    for (int repeat = 0; repeat < 10; ++repeat)
      for (int j = 0; j < 2; ++j) {
        const gpu::OwnedStream& stream = streams[size_t(i + j * kStreams)];
        attention(operands[j]->op(), stream);
        AttentionBackward op = gradients[j]->op();
        op.workspace = gradients[j]->workspace;
        attention_backward(op, stream);
      }
    gpu::synchronize();
  }
  for (int i = 0; i < 2; ++i) {
    for (DeviceBuffer* b : {&operands[i]->out, &gradients[i]->dq, &gradients[i]->dk}) b->download();
    EXPECT_EQ(values(operands[i]->out.host()), want[i]) << i;
    EXPECT_EQ(values(gradients[i]->dq.host()), want_dq[i]) << i;
    EXPECT_EQ(values(gradients[i]->dk.host()), want_dk[i]) << i;
  }
}

std::string said(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "no error";
}

TEST_F(AttentionCuda, RefusesUnsupportedOperandsByName) {
  const Operands good({.queries = {20}, .keys = {20}});
  const auto with = [&](const std::function<void(Attention&)>& change) {
    return said([&] {
      Attention a = good.op();
      change(a);
      attention(a, {});
    });
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  DeviceBuffer wide(DType::f32, {20, 2, 64}), key(DType::f32, {20, 1, 64});
  EXPECT_TRUE(
      has(with([&](Attention& a) { a.q = wide, a.k = key, a.v = key, a.out = wide; }), "found dtype f32 on a GPU"));
  DeviceBuffer q20(DType::bf16, {20, 2, 20}), k20(DType::bf16, {20, 1, 20});
  EXPECT_TRUE(
      has(with([&](Attention& a) { a.q = q20, a.k = k20, a.v = k20, a.out = q20; }), "found a head size of 20"));
  DeviceBuffer q264(DType::bf16, {20, 2, 264}), k264(DType::bf16, {20, 1, 264});
  EXPECT_TRUE(
      has(with([&](Attention& a) { a.q = q264, a.k = k264, a.v = k264, a.out = q264; }), "found a head size of 264"));
  DeviceBuffer v32(DType::bf16, {20, 1, 32}), out32(DType::bf16, {20, 2, 32});
  EXPECT_TRUE(has(with([&](Attention& a) { a.v = v32, a.out = out32; }), "head size of v on a GPU"));
  DeviceBuffer odd(DType::bf16, {20, 2, 64}, 67), shifted(DType::bf16, {20, 2, 64}, 64, 1);
  EXPECT_TRUE(has(with([&](Attention& a) { a.out = odd; }), "expected an address of a multiple of 16 bytes"));
  EXPECT_TRUE(has(with([&](Attention& a) { a.out = shifted; }), "expected an address of a multiple of 16 bytes"));
  EXPECT_TRUE(has(with([&](Attention& a) { a.q = odd; }), "attention: q"));
  DeviceBuffer first(DType::i32, {1});
  EXPECT_TRUE(has(with([&](Attention& a) { a.ring = 20, a.k_first = first; }), "found a ring of 20 keys on a GPU"));
  Gradients b(good);
  EXPECT_TRUE(has(said([&] { attention_backward(b.op(), {}); }), "workspace: found "));
}

TEST_F(AttentionCuda, EmptyTensorsAreAccepted) {
  Operands none({.queries = {0}, .keys = {0}}), no_segments({.queries = {}, .keys = {}});
  for (Operands* a : {&none, &no_segments}) {
    attention(a->op(), {});
    attention_backward(Gradients(*a).op(), {});
  }
  gpu::synchronize();
  // No query sees the keys: their gradients are zero.
  Operands unseen({.queries = {0}, .keys = {70}});
  Gradients b(unseen);
  b.run();
  for (const DeviceBuffer* x : {&b.dk, &b.dv})
    for (double value : values(x->host())) ASSERT_EQ(value, 0);
}

// Padding after the last segment holds NaN; results hold NaN before the call.
TEST_F(AttentionCuda, RowsOfNoSegmentAreZeroAndTakeNoGradient) {
  for (int64_t d : {64, 128, 256})
    for (Order order : {Order::fixed, Order::any})
      for (int64_t padding : {1, 90, 3000}) {
        SCOPED_TRACE(::testing::Message() << d << ' ' << padding);
        Operands a({.queries = {77, 300, padding}, .keys = {77, 310, padding}, .heads = 4, .kv_heads = 2, .d = d});
        for (auto [b, covered] : {std::pair{&a.q, 377}, {&a.k, 387}, {&a.v, 387}}) {
          std::vector<double> x = values(b->host());
          std::fill(x.begin() + covered * b->host().size(1) * d, x.end(), NAN);
          testing::assign(b->host(), x);
          b->upload();
        }
        Attention op = a.op();
        op.cu_q = op.cu_q.slice(0, 0, 3), op.cu_k = op.cu_k.slice(0, 0, 3);
        attention(op, {});
        a.out.download(), a.lse.download();
        Gradients g(a, order);
        AttentionBackward back = g.op();
        back.cu_q = op.cu_q, back.cu_k = op.cu_k, back.workspace = g.workspace;
        attention_backward(back, {});
        for (DeviceBuffer* b : {&g.dq, &g.dk, &g.dv}) b->download();
        const auto expect_rows = [](const char* name, const Tensor& t, int64_t covered) {
          for (double x : values(t.slice(0, 0, covered))) ASSERT_TRUE(std::isfinite(x)) << name;
          for (double x : values(t.slice(0, covered, t.size(0)))) ASSERT_EQ(x, 0) << name;
        };
        expect_rows("out", a.out.host(), 377), expect_rows("dq", g.dq.host(), 377);
        expect_rows("dk", g.dk.host(), 387), expect_rows("dv", g.dv.host(), 387);
        for (double x : values(a.lse.host().slice(1, 377, 377 + padding))) ASSERT_EQ(x, -HUGE_VAL);
      }
}

// The gradients are linear in dlse: the difference between random dlse and none is p scale k for q, p scale q for k,
// and nothing for v.
TEST_F(AttentionCuda, LseHasAGradient) {
  for (int64_t d : {64, 128})
    for (Order order : {Order::fixed, Order::any}) {
      Operands a({.queries = {70, 33}, .keys = {70, 50}, .heads = 2, .kv_heads = 1, .d = d});
      attention(a.op(), {});
      a.lse.download();
      Gradients g(a, order);
      DeviceBuffer dlse(DType::f32, {2, 103});
      testing::fill_normal(dlse.host(), 8), dlse.upload();
      testing::assign(g.dout.host(), std::vector<double>(size_t(g.dout.host().numel()), 0)), g.dout.upload();
      AttentionBackward back = g.op();
      back.workspace = g.workspace, back.dlse = dlse;
      attention_backward(back, {});
      g.dq.download();
      const auto q = values(a.q64), k = values(a.k64), lse = values(a.lse.host()), of = values(dlse.host()),
                 got = values(g.dq.host());
      for (int64_t i = 0; i < 70; ++i)
        for (int64_t h = 0; h < 2; ++h) {
          std::vector<double> want(size_t(d), 0), size(size_t(d), 0);
          for (int64_t j = 0; j <= i; ++j) {
            double score = 0;
            for (int64_t x = 0; x < d; ++x) score += q[size_t((i * 2 + h) * d + x)] * k[size_t(j * d + x)];
            const double p = std::exp(a.scale() * score - lse[size_t(h * 103 + i)]);
            for (int64_t x = 0; x < d; ++x) {
              const double term = p * of[size_t(h * 103 + i)] * a.scale() * k[size_t(j * d + x)];
              want[size_t(x)] += term, size[size_t(x)] += std::abs(term);
            }
          }
          for (int64_t x = 0; x < d; ++x)  // dS and dQ are rounded to bf16 once
            ASSERT_NEAR(got[size_t((i * 2 + h) * d + x)], want[size_t(x)],
                        2.1 * roundoff(DType::bf16) * size[size_t(x)] + 1e-6)
                << d << ' ' << i;
        }
    }
}

TEST_F(AttentionCuda, ExcludesSelfAsTheCpuDoes) {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (auto [d, writes] : {std::pair<int64_t, bool>{64, false}, {64, true}, {128, false}, {40, true}}) {
      const Shape many{333, 8, d}, few{333, 4, d};
      DeviceBuffer y(type, many), v(type, few), z(type, many), dz(type, many), dy(type, many), dv(type, few);
      Buffer y64(DType::f64, many), v64(DType::f64, few), z64(DType::f64, many), dz64(DType::f64, many),
          dy64(DType::f64, many), dv64(DType::f64, few);
      uint64_t seed = 1;
      for (auto [gpu, cpu] : {std::pair{&y, &y64}, {&v, &v64}, {&dz, &dz64}, {&dv, &dv64}}) {
        testing::fill_normal(gpu->host(), seed++);
        testing::assign(*cpu, values(gpu->host()));
        gpu->upload();
      }
      DeviceBuffer delta(DType::f32, {8, 333});
      z.upload(), dy.upload(), delta.upload();
      exclude_self({.y = y, .v = v, .z = z}, {});
      exclude_self_backward({.y = y, .v = v, .dz = dz, .dy = dy, .dv = dv, .write_dv = writes, .delta = delta}, {});
      exclude_self({.y = y64, .v = v64, .z = z64}, {});
      if (writes) fill_zero(dv64);
      exclude_self_backward({.y = y64, .v = v64, .dz = dz64, .dy = dy64, .dv = dv64}, {});
      const double u = roundoff(type), sums = 64 * roundoff(DType::f32);
      for (auto [gpu, cpu] : {std::pair{&z, &z64}, {&dy, &dy64}, {&dv, &dv64}}) {
        gpu->download();
        const auto seen = compare(gpu->host(), values(*cpu), sums + (type == DType::f16 ? 1e-7 : 0), 1.01 * u + sums);
        EXPECT_TRUE(seen.ok) << seen.message;
        EXPECT_TRUE(gpu->untouched());
      }
      // The bound for dy as stored: sums of d products of two numbers of size 1.
      delta.download();
      const auto a = values(dy.host()), b = values(y.host()), got = values(delta.host());
      for (int64_t t = 0; t < 333; ++t)
        for (int64_t h = 0; h < 8; ++h) {
          double sum = 0;
          for (int64_t c = 0; c < d; ++c) sum += a[size_t((t * 8 + h) * d + c)] * b[size_t((t * 8 + h) * d + c)];
          EXPECT_NEAR(got[size_t(h * 333 + t)], sum, double(d) * roundoff(DType::f32) * 8);
        }
      EXPECT_TRUE(delta.untouched());
    }
}

}  // namespace
}  // namespace ingot
