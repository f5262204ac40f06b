// gated_linear without fused kernels, on the CPU: compared with plain loops in fp64 and with finite differences, and
// the operands that it refuses.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "ingot/kernels/swiglu/gated_case.test.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::GatedCase;
using testing::GatedInputs;
using testing::GatedTruth;
using testing::values;

// Weights in the layout of a case.
struct Weights {
  Weights(const GatedCase& c, uint64_t seed, int width) : memory(c.type, testing::gated_weights_shape(c)) {
    if (seed != 0) testing::fill_normal(memory, seed, 1 / std::sqrt(double(width)));
    gate = testing::gated_weights_half(c, memory, 0), up = testing::gated_weights_half(c, memory, 1);
  }
  Buffer memory;
  Tensor gate, up;
};
// The (H, C) values of either layout.
std::vector<double> rows_of(const Tensor& w, bool transposed) {
  const std::vector<double> v = values(w);
  if (!transposed) return v;
  const size_t C = size_t(w.size(0)), H = size_t(w.size(1));
  std::vector<double> out(v.size());
  for (size_t i = 0; i < C; ++i)
    for (size_t j = 0; j < H; ++j) out[j * C + i] = v[i * H + j];
  return out;
}
std::vector<double> turned(const std::vector<double>& v, int64_t rows, int64_t cols) {
  std::vector<double> out(v.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) out[size_t(j * rows + i)] = v[size_t(i * cols + j)];
  return out;
}

void expect_near(const char* name, const Tensor& got, const std::vector<double>& want, double tolerance) {
  const auto result = testing::compare(got, want, tolerance, tolerance);
  EXPECT_TRUE(result.ok) << name << ": " << result.message;
}

std::vector<GatedCase> cases() {
  std::vector<GatedCase> all;
  for (const GateOptions& o : testing::gate_kinds())
    for (bool transposed : {false, true})
      for (bool keeps : {false, true})
        for (bool in_place : {false, true})
          for (auto weights : {GatedCase::apart, GatedCase::packed, GatedCase::even_and_odd_rows}) {
            if (in_place && !keeps) continue;
            const bool other = all.size() % 2 == 0;
            all.push_back({.rows = 19,
                           .channels = 24,
                           .hidden = 33,
                           .options = o,
                           .bias = other,
                           .keeps = keeps,
                           .transposed = transposed,
                           .overwrite = other,
                           .weights = weights,
                           .in_place = in_place,
                           .up_first = all.size() % 3 == 0});
          }
  for (bool in_place : {false, true}) {
    all.push_back({.rows = 0, .channels = 8, .hidden = 16, .in_place = in_place});
    all.push_back({.rows = 1, .channels = 1, .hidden = 1, .keeps = in_place, .in_place = in_place});
    all.push_back({.rows = 1, .channels = 5, .hidden = 7, .weights = GatedCase::packed, .in_place = in_place});
  }
  return all;
}

// The tolerance for sums of about 60 terms of size 10 in fp64.
constexpr double kTolerance = 1e-11;

TEST(GatedLinear, AgreesWithPlainLoopsForwardAndBackward) {
  for (const GatedCase& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const Buffer x(c.type, {c.rows, c.channels}), dh(c.type, {c.rows, c.hidden}), bg(c.type, {c.hidden}),
        bu(c.type, {c.hidden}), h(c.type, {c.rows, c.hidden}), kept(c.type, {c.rows, 2 * c.hidden}),
        dx(c.type, {c.rows, c.channels}), db(c.type, {2 * c.hidden});
    const Tensor gate = testing::gated_half(c, kept, 0), up = testing::gated_half(c, kept, 1),
                 dbg = testing::gated_half(c, db, 0), dbu = testing::gated_half(c, db, 1);
    testing::fill_normal(x, 1), testing::fill_normal(dh, 2), testing::fill_normal(bg, 3), testing::fill_normal(bu, 4);
    const Weights w(c, 5, int(c.channels)), dw(c, c.overwrite ? 0 : 6, 1);
    if (!c.overwrite) testing::fill_normal(db, 7);
    const std::vector<double> dwg_before = values(dw.gate), dwu_before = values(dw.up), dbg_before = values(dbg),
                              dbu_before = values(dbu);
    const Tensor none;
    GatedLinear forward{.x = x,
                        .w_gate = w.gate,
                        .w_up = w.up,
                        .b_gate = c.bias ? bg.tensor() : none,
                        .b_up = c.bias ? bu.tensor() : none,
                        .h = h,
                        .gate = c.keeps ? gate : none,
                        .up = c.keeps ? up : none,
                        .options = c.options,
                        .transposed = c.transposed};
    const Buffer room(DType::u8, {gated_linear_workspace_bytes(forward)});
    EXPECT_EQ(room.tensor().numel() == 0, c.keeps || c.rows == 0);
    forward.workspace = room;
    gated_linear(forward, {});
    const GatedTruth t = testing::gated_truth(
        c, {values(x), rows_of(w.gate, c.transposed), rows_of(w.up, c.transposed),
            c.bias ? values(bg) : std::vector<double>(), c.bias ? values(bu) : std::vector<double>(), values(dh)});
    expect_near("h", h, t.h, kTolerance);
    if (c.keeps) expect_near("gate", gate, t.gate, kTolerance), expect_near("up", up, t.up, kTolerance);
    if (c.in_place)
      swiglu_gate_backward({.gate = gate, .up = up, .dh = dh, .dgate = gate, .dup = up, .options = c.options}, {});
    GatedLinearBackward backward{.dh = c.in_place ? none : dh.tensor(),
                                 .x = x,
                                 .w_gate = w.gate,
                                 .w_up = w.up,
                                 .gate = forward.gate,
                                 .up = forward.up,
                                 .b_gate = forward.b_gate,
                                 .b_up = forward.b_up,
                                 .dx = dx,
                                 .dw_gate = dw.gate,
                                 .dw_up = dw.up,
                                 .db_gate = dbg,
                                 .db_up = dbu,
                                 .options = c.options,
                                 .transposed = c.transposed,
                                 .overwrite = c.overwrite};
    const Buffer back(DType::u8, {gated_linear_backward_workspace_bytes(backward)});
    EXPECT_EQ(back.tensor().numel() == 0, c.in_place || c.rows == 0);
    backward.workspace = back;
    gated_linear_backward(backward, {});
    if (c.in_place)
      expect_near("dgate", gate, t.dgate, kTolerance), expect_near("dup", up, t.dup, kTolerance);
    else if (c.keeps)
      expect_near("gate", gate, t.gate, kTolerance), expect_near("up", up, t.up, kTolerance);
    expect_near("dx", dx, t.dx, kTolerance);
    const auto expect_sum = [&](const char* name, const Tensor& got, std::vector<double> want,
                                const std::vector<double>& before, bool turns) {
      if (turns) want = turned(want, c.hidden, c.channels);
      for (size_t i = 0; i < want.size() && !c.overwrite; ++i) want[i] += before[i];
      expect_near(name, got, want, kTolerance);
    };
    expect_sum("dw_gate", dw.gate, t.dw_gate, dwg_before, c.transposed);
    expect_sum("dw_up", dw.up, t.dw_up, dwu_before, c.transposed);
    expect_sum("db_gate", dbg, t.db_gate, dbg_before, false);
    expect_sum("db_up", dbu, t.db_up, dbu_before, false);
    EXPECT_TRUE(h.guards_intact() && kept.guards_intact() && dx.guards_intact() && dw.memory.guards_intact() &&
                db.guards_intact() && room.guards_intact() && back.guards_intact());
    if (HasFailure()) return;
  }
}

// All gradients that follow from the gradients of gate and up, where these are the halves of `dkept` in the order of
// `kept`.
GatedLinearBackward backward_of_halves(const GatedCase& c, const GatedCase& kept, const Buffer& dkept, const Buffer& x,
                                       const Weights& w, const Buffer& dx, const Weights& dw, const Buffer& db) {
  return {.x = x,
          .w_gate = w.gate,
          .w_up = w.up,
          .gate = testing::gated_half(kept, dkept, 0),
          .up = testing::gated_half(kept, dkept, 1),
          .dx = dx,
          .dw_gate = dw.gate,
          .dw_up = dw.up,
          .db_gate = testing::gated_half(c, db, 0),
          .db_up = testing::gated_half(c, db, 1),
          .transposed = c.transposed,
          .overwrite = true};
}

// A pair stored in a single tensor turns two products into one. With any further operand left out, the results are the
// same numbers.
TEST(GatedLinear, FrozenPartsDoNotChangeTheRemainingGradients) {
  for (bool transposed : {false, true}) {
    const GatedCase c{.rows = 9,
                      .channels = 6,
                      .hidden = 10,
                      .transposed = transposed,
                      .weights = GatedCase::packed,
                      .up_first = true};
    const Buffer x(c.type, {9, 6}), dkept(c.type, {9, 20}), dx(c.type, {9, 6}), db(c.type, {20});
    testing::fill_normal(x, 1), testing::fill_normal(dkept, 2);
    const Weights w(c, 3, 6), dw(c, 0, 1);
    const GatedLinearBackward all = backward_of_halves(c, c, dkept, x, w, dx, dw, db);
    gated_linear_backward(all, {});
    const std::vector<double> want_dx = values(dx), want_dw = values(dw.memory), want_db = values(db);
    const auto clear = [&] { fill_zero(dx), fill_zero(dw.memory), fill_zero(db); };
    GatedLinearBackward frozen_weights = all, frozen_input = all, up_alone = all;
    frozen_weights.x = frozen_weights.dw_gate = frozen_weights.dw_up = {};
    frozen_weights.db_gate = frozen_weights.db_up = {};
    clear(), gated_linear_backward(frozen_weights, {});
    EXPECT_EQ(values(dx), want_dx);
    frozen_input.w_gate = frozen_input.w_up = frozen_input.dx = {};
    clear(), gated_linear_backward(frozen_input, {});
    EXPECT_EQ(values(dw.memory), want_dw);
    EXPECT_EQ(values(db), want_db);
    up_alone.dw_gate = up_alone.dx = up_alone.db_gate = {};
    clear(), gated_linear_backward(up_alone, {});
    for (const Tensor& left_out : {dx.tensor(), dw.gate, all.db_gate})
      for (double v : values(left_out)) EXPECT_EQ(v, 0);
    EXPECT_NE(values(all.db_up)[0], 0);
    const auto near = testing::compare(
        dw.up,
        [&] {
          const Buffer all_dw(c.type, dw.memory.tensor().shape);
          testing::assign(all_dw, want_dw);
          return values(testing::gated_weights_half(c, all_dw, 1));
        }(),
        kTolerance, kTolerance);
    EXPECT_TRUE(near.ok) << near.message;
  }
}

// Halves in the opposite order of the weights' halves cannot be joined into a single product.
TEST(GatedLinear, HalvesMayHaveAnotherOrderThanTheWeights) {
  for (bool transposed : {false, true})
    for (bool up_first : {false, true}) {
      const GatedCase c{.rows = 9,
                        .channels = 6,
                        .hidden = 10,
                        .transposed = transposed,
                        .weights = GatedCase::packed,
                        .up_first = up_first};
      GatedCase other = c;
      other.up_first = !up_first;
      const Buffer x(c.type, {9, 6}), same(c.type, {9, 20}), turned_round(c.type, {9, 20});
      testing::fill_normal(x, 1), testing::fill_normal(same, 2);
      for (int which : {0, 1})
        copy(testing::gated_half(c, same, which), testing::gated_half(other, turned_round, which));
      const Weights w(c, 3, 6);
      const auto gradients = [&](const GatedCase& order, const Buffer& dkept) {
        const Buffer dx(c.type, {9, 6}), db(c.type, {20});
        const Weights dw(c, 0, 1);
        gated_linear_backward(backward_of_halves(c, order, dkept, x, w, dx, dw, db), {});
        std::vector<double> all = values(dx);
        for (const Tensor& t : {dw.memory.tensor(), db.tensor()})
          for (double v : values(t)) all.push_back(v);
        return all;
      };
      const std::vector<double> want = gradients(c, same), got = gradients(other, turned_round);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], kTolerance) << i;
    }
}

TEST(GatedLinear, GradientsAgreeWithFiniteDifferences) {
  for (const GateOptions& o : {GateOptions{}, GateOptions{.alpha = 1.702, .up_offset = 1}, gelu_gate()}) {
    const GatedCase c{.rows = 5, .channels = 7, .hidden = 6, .options = o};
    const Buffer x(c.type, {5, 7}), dh(c.type, {5, 6}), h(c.type, {5, 6}), gate(c.type, {5, 6}), up(c.type, {5, 6}),
        dx(c.type, {5, 7});
    testing::fill_normal(x, 1), testing::fill_normal(dh, 2);
    const Weights w(c, 5, 7);
    const auto loss = [&] {
      gated_linear({.x = x, .w_gate = w.gate, .w_up = w.up, .h = h, .gate = gate, .up = up, .options = o}, {});
      return testing::dot(h, dh);
    };
    loss();
    const Buffer dw(c.type, {12, 7});
    const Tensor dwg = dw.tensor().slice(0, 0, 6), dwu = dw.tensor().slice(0, 6, 12);
    GatedLinearBackward backward{.dh = dh,
                                 .x = x,
                                 .w_gate = w.gate,
                                 .w_up = w.up,
                                 .gate = gate,
                                 .up = up,
                                 .dx = dx,
                                 .dw_gate = dwg,
                                 .dw_up = dwu,
                                 .options = o,
                                 .overwrite = true};
    const Buffer back(DType::u8, {gated_linear_backward_workspace_bytes(backward)});
    backward.workspace = back;
    gated_linear_backward(backward, {});
    EXPECT_LT(testing::gradient_error(loss, x, dx, 1), 1e-6);
    EXPECT_LT(testing::gradient_error(loss, w.gate, dwg, 2), 1e-6);
    EXPECT_LT(testing::gradient_error(loss, w.up, dwu, 3), 1e-6);
  }
}

TEST(GatedLinear, RefusesByName) {
  const auto message = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Error& e) { return e.what(); }
    return "nothing was refused";
  };
  const Buffer x(DType::f32, {4, 6}), w(DType::f32, {8, 6}), narrow(DType::f32, {8, 5}), h(DType::f32, {4, 8});
  const auto expect = [&](const GatedLinear& g, const char* what) {
    const std::string m = message([&] { gated_linear(g, {}); });
    EXPECT_TRUE(m.find("gated_linear") != m.npos && m.find(what) != m.npos && m.find("expected") != m.npos) << m;
  };
  expect({.x = x, .w_gate = w, .w_up = narrow, .h = h}, "w_up");
  expect({.x = x, .w_gate = w, .w_up = w}, "neither h");
  expect({.x = x, .w_gate = w, .w_up = w, .h = h, .gate = h}, "one of gate and up");
  expect({.x = x, .w_gate = w, .w_up = w, .h = x}, "h: found");
  expect({.x = x, .w_gate = w, .w_up = w, .h = h}, "workspace");
  expect({.x = x, .w_gate = w, .w_up = w, .h = h, .options = {.interleaved = true}}, "interleaved");
  const std::string m = message([&] { gated_linear_backward({.dh = h, .w_gate = w, .w_up = w, .dx = x}, {}); });
  EXPECT_TRUE(m.find("found no x") != m.npos) << m;
  const std::string n = message([&] { gated_linear_backward({.x = x, .w_gate = w, .w_up = w, .dx = x}, {}); });
  EXPECT_TRUE(n.find("neither dh nor gate and up") != n.npos) << n;
}

TEST(GatedLinear, CountsItsWork) {
  const Buffer x(DType::f32, {4, 6}), w(DType::f32, {8, 6}), h(DType::f32, {4, 8});
  const GatedLinear g{.x = x, .w_gate = w, .w_up = w, .h = h};
  EXPECT_EQ(flops(g), 4 * 4 * 6 * 8);
  EXPECT_EQ(bytes(g), 4 * (4 * 6 + 2 * 8 * 6 + 4 * 8));
}

}  // namespace
}  // namespace ingot
