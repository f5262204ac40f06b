#include "ingot/kernels/swiglu/swiglu.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::assign;
using testing::Buffer;
using testing::fill_normal;
using testing::values;

struct Case {
  int64_t rows, hidden, pad = 0;
};
const std::vector<Case> kCases = {{0, 5}, {1, 1}, {1, 33, 2}, {2, 300, 1}, {7, 8}, {31, 65, 3}};
const std::vector<GateOptions> kOptions = {
    {}, {.limit = 1.5, .alpha = 1.702, .up_offset = 1}, {.alpha = 0.5}, gelu_gate()};

double reference(double gate, double up, const GateOptions& o) {
  if (o.limit > 0) {
    gate = std::min(gate, o.limit);
    up = std::max(-o.limit, std::min(up, o.limit));
  }
  return gate / (1 + std::exp(-o.alpha * gate - o.cubic * gate * gate * gate)) * (up + o.up_offset);
}
Buffer matrix(DType dtype, int64_t rows, int64_t cols, int64_t pad, uint64_t seed, double scale = 1) {
  Buffer b(dtype, {rows, cols}, cols + pad);
  fill_normal(b, seed, scale);
  return b;
}
// Joins gate and up into rows in the given layout.
std::vector<double> interleave(const std::vector<double>& gate, const std::vector<double>& up) {
  std::vector<double> both;
  for (size_t i = 0; i < gate.size(); ++i) {
    both.push_back(gate[i]);
    both.push_back(up[i]);
  }
  return both;
}

TEST(swiglu_gate, every_dtype_layout_and_clamp_follows_the_formula) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const GateOptions& plain : kOptions)
      for (const Case& c : kCases)
        for (bool interleaved : {false, true}) {
          GateOptions o = plain;
          o.interleaved = interleaved;
          const Buffer gate = matrix(dtype, c.rows, c.hidden, c.pad, 1, 2),
                       up = matrix(dtype, c.rows, c.hidden, 2 * c.pad, 2, 2);
          const Buffer both(dtype, {c.rows, 2 * c.hidden}, 2 * c.hidden + c.pad);
          Buffer h(dtype, {c.rows, c.hidden}, c.hidden + c.pad);
          const auto g = values(gate), u = values(up);
          assign(both, interleave(g, u));
          swiglu_gate(
              {.gate = interleaved ? both : gate, .up = interleaved ? Tensor() : up.tensor(), .h = h, .options = o},
              {});
          std::vector<double> want(g.size());
          for (size_t i = 0; i < g.size(); ++i) want[i] = reference(g[i], u[i], o);
          // One rounding of the result, and in f32 and below some ten of f32 on the way (the limit itself is rounded
          // too).
          // An argument of the exponential is rounded as a number of its own size, four times for a cubic argument,
          // which is below 67 for gates down to -9.
          const double own = testing::roundoff(dtype == DType::f64 ? DType::f64 : DType::f32);
          const double tolerance = testing::roundoff(dtype) + (o.cubic > 0 ? 10 + 4 * 67 : 10) * own;
          const auto result = testing::compare(h, want, dtype == DType::f16 ? 0x1p-24 : 1e-30, tolerance);
          EXPECT_TRUE(result.ok) << dtype << " " << result.message;
          EXPECT_TRUE(h.guards_intact());
        }
}

TEST(swiglu_gate, gradients_match_finite_differences_away_from_the_kinks) {
  for (const GateOptions& plain : kOptions)
    for (const Case& c : kCases)
      for (bool interleaved : {false, true}) {
        if (c.rows == 0) continue;
        GateOptions o = plain;
        o.interleaved = interleaved;
        const int64_t n = c.hidden;
        const Buffer both(DType::f64, {c.rows, 2 * n}), dh = matrix(DType::f64, c.rows, n, c.pad, 3);
        fill_normal(both, 4, 2);
        auto v = values(both);
        for (double& x : v)
          if (o.limit > 0 && std::abs(std::abs(x) - o.limit) < 1e-2) x += 0.1;
        assign(both, v);
        const Tensor gate = interleaved ? both.tensor() : both.tensor().slice(1, 0, n);
        const Tensor up = interleaved ? Tensor() : both.tensor().slice(1, n, 2 * n);
        Buffer h(DType::f64, {c.rows, n}), dboth(DType::f64, {c.rows, 2 * n});
        const Tensor dgate = interleaved ? dboth.tensor() : dboth.tensor().slice(1, 0, n);
        const Tensor dup = interleaved ? Tensor() : dboth.tensor().slice(1, n, 2 * n);
        swiglu_gate_backward({.gate = gate, .up = up, .dh = dh, .dgate = dgate, .dup = dup, .options = o}, {});
        const auto loss = [&] {
          swiglu_gate({.gate = gate, .up = up, .h = h, .options = o}, {});
          return testing::dot(h, dh);
        };
        EXPECT_LT(testing::gradient_error(loss, both, dboth, 7), 1e-6);
        EXPECT_TRUE(dboth.guards_intact());
      }
}

TEST(swiglu_gate, f32_and_narrow_gradients_follow_f64) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const GateOptions& o : kOptions)
      for (const Case& c : kCases) {
        const Buffer gate = matrix(dtype, c.rows, c.hidden, c.pad, 1, 2), up = matrix(dtype, c.rows, c.hidden, 0, 2, 2),
                     dh = matrix(dtype, c.rows, c.hidden, 1, 3);
        Buffer dgate(dtype, {c.rows, c.hidden}), dup(dtype, {c.rows, c.hidden}, c.hidden + 1);
        swiglu_gate_backward({.gate = gate, .up = up, .dh = dh, .dgate = dgate, .dup = dup, .options = o}, {});
        Buffer wide[5] = {Buffer(DType::f64, {c.rows, c.hidden}), Buffer(DType::f64, {c.rows, c.hidden}),
                          Buffer(DType::f64, {c.rows, c.hidden}), Buffer(DType::f64, {c.rows, c.hidden}),
                          Buffer(DType::f64, {c.rows, c.hidden})};
        assign(wide[0], values(gate));
        assign(wide[1], values(up));
        assign(wide[2], values(dh));
        swiglu_gate_backward(
            {.gate = wide[0], .up = wide[1], .dh = wide[2], .dgate = wide[3], .dup = wide[4], .options = o}, {});
        // sigmoid + z slope cancels where silu's slope changes sign, so the allowance is absolute too: values are
        // below 30.
        const double unit = testing::roundoff(DType::f32);
        EXPECT_TRUE(testing::compare(dgate, values(wide[3]), 300 * unit, testing::roundoff(dtype)).ok)
            << testing::compare(dgate, values(wide[3]), 300 * unit, testing::roundoff(dtype)).message;
        EXPECT_TRUE(testing::compare(dup, values(wide[4]), 300 * unit, testing::roundoff(dtype)).ok);
        EXPECT_TRUE(dup.guards_intact() && dgate.guards_intact());
      }
}

TEST(swiglu_gate, a_backward_pass_computes_h_again_in_place_of_dh) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const GateOptions& plain : kOptions)
      for (bool interleaved : {false, true}) {
        GateOptions o = plain;
        o.interleaved = interleaved;
        const int64_t rows = 5, n = 300;  // more than the columns that are converted at a time
        const Buffer both(dtype, {rows, 2 * n}), dh = matrix(dtype, rows, n, 3, 3);
        fill_normal(both, 4, 2);
        const Tensor gate = interleaved ? both.tensor() : both.tensor().slice(1, 0, n);
        const Tensor up = interleaved ? Tensor() : both.tensor().slice(1, n, 2 * n);
        Buffer h(dtype, {rows, n}), dboth(dtype, {rows, 2 * n});
        const Tensor dgate = interleaved ? dboth.tensor() : dboth.tensor().slice(1, 0, n);
        const Tensor dup = interleaved ? Tensor() : dboth.tensor().slice(1, n, 2 * n);
        swiglu_gate({.gate = gate, .up = up, .h = h, .options = o}, {});
        swiglu_gate_backward({.gate = gate, .up = up, .dh = dh, .dgate = dgate, .dup = dup, .options = o}, {});
        swiglu_gate_backward({.gate = gate, .up = up, .dh = dh, .dgate = gate, .dup = up, .options = o, .h = dh}, {});
        EXPECT_EQ(values(dh), values(h));
        EXPECT_EQ(values(both), values(dboth));
        EXPECT_TRUE(dh.guards_intact() && both.guards_intact());
      }
}

TEST(swiglu_gate, outputs_may_replace_inputs) {
  const Buffer gate = matrix(DType::f32, 5, 37, 0, 1), up = matrix(DType::f32, 5, 37, 0, 2),
               dh = matrix(DType::f32, 5, 37, 0, 3);
  Buffer h(DType::f32, {5, 37}), dgate(DType::f32, {5, 37}), dup(DType::f32, {5, 37});
  swiglu_gate({.gate = gate, .up = up, .h = h}, {});
  swiglu_gate_backward({.gate = gate, .up = up, .dh = dh, .dgate = dgate, .dup = dup}, {});
  const auto aliased = [&](int which) {
    const Buffer g = matrix(DType::f32, 5, 37, 0, 1), u = matrix(DType::f32, 5, 37, 0, 2),
                 d = matrix(DType::f32, 5, 37, 0, 3);
    if (which < 2) {
      swiglu_gate({.gate = g, .up = u, .h = which == 0 ? g : u}, {});
      EXPECT_EQ(values(which == 0 ? g : u), values(h));
    } else {
      swiglu_gate_backward({.gate = g, .up = u, .dh = d, .dgate = which == 2 ? g : d, .dup = u}, {});
      EXPECT_EQ(values(which == 2 ? g : d), values(dgate));
      EXPECT_EQ(values(u), values(dup));
    }
  };
  for (int which : {0, 1, 2, 3}) aliased(which);
}

TEST(swiglu_gate, huge_inputs_reach_their_limits_without_nan) {
  for (DType dtype : {DType::f32, DType::f64}) {
    Buffer gate(dtype, {1, 4}), up(dtype, {1, 4}), h(dtype, {1, 4});
    assign(gate, {-HUGE_VAL, -1e30, 1e30, -200});
    assign(up, {1, 1, 1, 1});
    swiglu_gate({.gate = gate, .up = up, .h = h}, {});
    const auto got = values(h);
    EXPECT_EQ(got[0], 0);
    EXPECT_EQ(got[1], 0);
    EXPECT_NEAR(got[2] / 1e30, 1, 1e-6);
    EXPECT_NEAR(got[3], 0, 1e-30);
  }
}

struct Unit {
  int64_t rows, channels, hidden, out;
};

TEST(swiglu, gradients_of_every_operand_match_finite_differences) {
  for (const Unit& s : {Unit{1, 3, 5, 2}, Unit{6, 9, 17, 7}, Unit{33, 16, 31, 16}})
    for (const GateOptions& o : {GateOptions{}, GateOptions{.limit = 4, .alpha = 1.702, .up_offset = 1}}) {
      const DType d = DType::f64;
      const Buffer x = matrix(d, s.rows, s.channels, 2, 1, 0.5), wg = matrix(d, s.hidden, s.channels, 0, 2, 0.5),
                   wu = matrix(d, s.hidden, s.channels, 1, 3, 0.5), wd = matrix(d, s.out, s.hidden, 0, 4, 0.3),
                   bg = matrix(d, 1, s.hidden, 0, 5), bu = matrix(d, 1, s.hidden, 0, 6), bd = matrix(d, 1, s.out, 0, 7),
                   dy = matrix(d, s.rows, s.out, 0, 8);
      Buffer y(d, {s.rows, s.out}), gate(d, {s.rows, s.hidden}), up(d, {s.rows, s.hidden}),
          workspace(DType::u8, {swiglu_workspace_bytes(s.rows, s.hidden, d, {})});
      Buffer dx(d, {s.rows, s.channels}), dwg(d, {s.hidden, s.channels}), dwu(d, {s.hidden, s.channels}),
          dwd(d, {s.out, s.hidden}), dbg(d, {1, s.hidden}), dbu(d, {1, s.hidden}), dbd(d, {1, s.out});
      for (Buffer* b : {&dwg, &dwu, &dwd, &dbg, &dbu, &dbd}) fill_zero(*b);
      const auto loss = [&] {
        swiglu({.x = x,
                .w_gate = wg,
                .w_up = wu,
                .w_down = wd,
                .b_gate = bg.tensor().row(0),
                .b_up = bu.tensor().row(0),
                .b_down = bd.tensor().row(0),
                .y = y,
                .gate = gate,
                .up = up,
                .workspace = workspace,
                .options = o},
               {});
        return testing::dot(y, dy);
      };
      loss();
      swiglu_backward({.dy = dy,
                       .x = x,
                       .w_gate = wg,
                       .w_up = wu,
                       .w_down = wd,
                       .gate = gate,
                       .up = up,
                       .dx = dx,
                       .dw_gate = dwg,
                       .dw_up = dwu,
                       .dw_down = dwd,
                       .db_gate = dbg.tensor().row(0),
                       .db_up = dbu.tensor().row(0),
                       .db_down = dbd.tensor().row(0),
                       .workspace = workspace,
                       .options = o},
                      {});
      const std::pair<const Buffer*, const Buffer*> pairs[] = {{&x, &dx},   {&wg, &dwg}, {&wu, &dwu}, {&wd, &dwd},
                                                               {&bg, &dbg}, {&bu, &dbu}, {&bd, &dbd}};
      for (const auto& [input, grad] : pairs) {
        EXPECT_LT(testing::gradient_error(loss, *input, *grad, 11), 1e-6);
        EXPECT_TRUE(grad->guards_intact());
      }
      EXPECT_TRUE(workspace.guards_intact() && gate.guards_intact());
      // With frozen weights, dx alone is the same.
      const auto want = values(dx);
      dx.poison();
      swiglu_backward({.dy = dy,
                       .x = x,
                       .w_gate = wg,
                       .w_up = wu,
                       .w_down = wd,
                       .gate = gate,
                       .up = up,
                       .dx = dx,
                       .workspace = workspace,
                       .options = o},
                      {});
      EXPECT_EQ(values(dx), want);
    }
}

TEST(swiglu, no_rows_leave_parameters_alone) {
  const DType d = DType::f32;
  const Buffer x(d, {0, 3}), wg = matrix(d, 5, 3, 0, 2), wu = matrix(d, 5, 3, 0, 3), wd = matrix(d, 2, 5, 0, 4),
                             dy(d, {0, 2});
  Buffer y(d, {0, 2}), gate(d, {0, 5}), up(d, {0, 5}), workspace(DType::u8, {0}), dw(d, {5, 3});
  fill_normal(dw, 9);
  const auto before = values(dw);
  swiglu({.x = x, .w_gate = wg, .w_up = wu, .w_down = wd, .y = y, .gate = gate, .up = up, .workspace = workspace}, {});
  swiglu_backward({.dy = dy,
                   .x = x,
                   .w_gate = wg,
                   .w_up = wu,
                   .w_down = wd,
                   .gate = gate,
                   .up = up,
                   .dw_gate = dw,
                   .workspace = workspace},
                  {});
  EXPECT_EQ(values(dw), before);
}

TEST(swiglu, the_number_of_threads_changes_no_bit) {
  const int before = thread_count();
  const DType d = DType::f32;
  const Buffer x = matrix(d, 130, 70, 0, 1), wg = matrix(d, 90, 70, 0, 2, 0.1), wu = matrix(d, 90, 70, 0, 3, 0.1),
               wd = matrix(d, 33, 90, 0, 4, 0.1), dy = matrix(d, 130, 33, 0, 5);
  std::vector<double> first;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    Buffer y(d, {130, 33}), gate(d, {130, 90}), up(d, {130, 90}),
        workspace(DType::u8, {swiglu_workspace_bytes(130, 90, d, {})}), dx(d, {130, 70}), dw(d, {90, 70});
    fill_zero(dw);
    swiglu({.x = x, .w_gate = wg, .w_up = wu, .w_down = wd, .y = y, .gate = gate, .up = up, .workspace = workspace},
           {});
    swiglu_backward({.dy = dy,
                     .x = x,
                     .w_gate = wg,
                     .w_up = wu,
                     .w_down = wd,
                     .gate = gate,
                     .up = up,
                     .dx = dx,
                     .dw_up = dw,
                     .workspace = workspace},
                    {});
    auto all = values(y);
    for (const Buffer* b : {&dx, &dw}) {
      const auto v = values(*b);
      all.insert(all.end(), v.begin(), v.end());
    }
    if (threads == 1) first = all;
    EXPECT_EQ(all, first);
  }
  set_thread_count(before);
}

TEST(swiglu, errors_name_the_found_and_the_expected_value) {
  const Buffer gate(DType::f32, {2, 6}), up(DType::f32, {2, 5});
  Buffer h(DType::f32, {2, 6});
  try {
    swiglu_gate({.gate = gate, .up = up, .h = h}, {});
    FAIL();
  } catch (const Error& e) { EXPECT_STREQ(e.what(), "swiglu_gate: up: found (2, 5), expected 2 rows of 6"); }
  try {
    swiglu_gate({.gate = gate, .up = gate, .h = h, .options = {.limit = -1}}, {});
    FAIL();
  } catch (const Error& e) { EXPECT_STREQ(e.what(), "swiglu_gate: limit: found -1, expected 0 (no clamp) or more"); }
}

TEST(swiglu, operands_on_different_devices_are_refused) {
  using F = Swiglu;
  using B = SwigluBackward;
  const DType d = DType::f32;
  Buffer x(d, {4, 3}), w(d, {5, 3}), down(d, {2, 5}), b(d, {5}), b_down(d, {2}), y(d, {4, 2}), hidden(d, {4, 5}),
      workspace(DType::u8, {swiglu_workspace_bytes(4, 5, d, {})});
  const F a{.x = x,
            .w_gate = w,
            .w_up = w,
            .w_down = down,
            .b_gate = b,
            .b_up = b,
            .b_down = b_down,
            .y = y,
            .gate = hidden,
            .up = hidden,
            .workspace = workspace};
  EXPECT_EQ(testing::device_not_checked(a,
                                        {&F::x, &F::w_gate, &F::w_up, &F::w_down, &F::b_gate, &F::b_up, &F::b_down,
                                         &F::y, &F::gate, &F::up, &F::workspace},
                                        [](const F& s, Stream stream) { swiglu(s, stream); }),
            "");
  const B back{.dy = y,
               .x = x,
               .w_gate = w,
               .w_up = w,
               .w_down = down,
               .gate = hidden,
               .up = hidden,
               .dx = x,
               .dw_gate = w,
               .dw_up = w,
               .dw_down = down,
               .db_gate = b,
               .db_up = b,
               .db_down = b_down,
               .workspace = workspace};
  EXPECT_EQ(testing::device_not_checked(
                back,
                {&B::dy, &B::x, &B::w_gate, &B::w_up, &B::w_down, &B::gate, &B::up, &B::dx, &B::dw_gate, &B::dw_up,
                 &B::dw_down, &B::db_gate, &B::db_up, &B::db_down, &B::workspace},
                swiglu_backward),
            "");
}

}  // namespace
}  // namespace ingot
