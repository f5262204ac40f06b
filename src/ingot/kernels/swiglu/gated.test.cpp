// gated_linear in pieces on the CPU: against plain loops in fp64, by finite differences, and what it refuses.
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

// Weights as a case lays them out; transposed (C, H).
struct Weights {
  Weights(const GatedCase& c, uint64_t seed, int width)
      : memory(c.type, c.transposed ? Shape{c.channels, 2 * c.hidden} : Shape{2 * c.hidden, c.channels}) {
    if (seed != 0) testing::fill_normal(memory, seed, 1 / std::sqrt(double(width)));
    const Tensor all = memory;
    if (c.transposed) {
      gate = all.slice(1, 0, c.hidden), up = all.slice(1, c.hidden, 2 * c.hidden);
    } else if (c.weights == GatedCase::even_and_odd_rows) {
      gate = up = Tensor(all.data, all.dtype, {c.hidden, c.channels});
      gate.stride[0] = up.stride[0] = 2 * c.channels;
      up.data = static_cast<char*>(up.data) + c.channels * size_of(all.dtype);
    } else {
      gate = all.slice(0, 0, c.hidden), up = all.slice(0, c.hidden, 2 * c.hidden);
    }
  }
  Buffer memory;
  Tensor gate, up;
};
// (H, C) values of either layout.
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
        for (bool bias : {false, true})
          all.push_back({.rows = 19,
                         .channels = 24,
                         .hidden = 33,
                         .options = o,
                         .bias = bias,
                         .keeps = keeps,
                         .transposed = transposed,
                         .overwrite = bias,
                         .weights = bias ? GatedCase::even_and_odd_rows : GatedCase::packed});
  all.push_back({.rows = 0, .channels = 8, .hidden = 16});
  all.push_back({.rows = 1, .channels = 1, .hidden = 1, .keeps = false});
  return all;
}

// Sums of some 60 terms of size 10 in fp64.
constexpr double kTolerance = 1e-11;

TEST(GatedLinear, AgreesWithPlainLoopsForwardAndBackward) {
  for (const GatedCase& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const Buffer x(c.type, {c.rows, c.channels}), dh(c.type, {c.rows, c.hidden}), bg(c.type, {c.hidden}),
        bu(c.type, {c.hidden}), h(c.type, {c.rows, c.hidden}), gate(c.type, {c.rows, c.hidden}),
        up(c.type, {c.rows, c.hidden}), dx(c.type, {c.rows, c.channels}), dbg(c.type, {c.hidden}),
        dbu(c.type, {c.hidden});
    testing::fill_normal(x, 1), testing::fill_normal(dh, 2), testing::fill_normal(bg, 3), testing::fill_normal(bu, 4);
    const Weights w(c, 5, int(c.channels)), dw(c, c.overwrite ? 0 : 6, 1);
    if (!c.overwrite) testing::fill_normal(dbg, 7), testing::fill_normal(dbu, 8);
    const std::vector<double> dwg_before = values(dw.gate), dwu_before = values(dw.up), dbg_before = values(dbg);
    const Tensor none;
    GatedLinear forward{.x = x,
                        .w_gate = w.gate,
                        .w_up = w.up,
                        .b_gate = c.bias ? bg.tensor() : none,
                        .b_up = c.bias ? bu.tensor() : none,
                        .h = h,
                        .gate = c.keeps ? gate.tensor() : none,
                        .up = c.keeps ? up.tensor() : none,
                        .options = c.options,
                        .transposed = c.transposed};
    const Buffer room(DType::u8, {gated_linear_workspace_bytes(forward)});
    EXPECT_EQ(room.tensor().numel() == 0, c.keeps || c.rows == 0);
    forward.workspace = room;
    gated_linear(forward, {});
    const Buffer back(DType::u8, {gated_linear_backward_workspace_bytes(c.rows, c.hidden, c.type, {})});
    gated_linear_backward({.dh = dh,
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
                           .workspace = back,
                           .options = c.options,
                           .transposed = c.transposed,
                           .overwrite = c.overwrite},
                          {});
    if (c.overwrite) testing::fill_normal(dbu, 8);  // looked at below through dbg only
    const GatedTruth t = testing::gated_truth(
        c, {values(x), rows_of(w.gate, c.transposed), rows_of(w.up, c.transposed),
            c.bias ? values(bg) : std::vector<double>(), c.bias ? values(bu) : std::vector<double>(), values(dh)});
    expect_near("h", h, t.h, kTolerance);
    if (c.keeps) expect_near("gate", gate, t.gate, kTolerance), expect_near("up", up, t.up, kTolerance);
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
    EXPECT_TRUE(h.guards_intact() && gate.guards_intact() && up.guards_intact() && dx.guards_intact() &&
                dw.memory.guards_intact() && room.guards_intact() && back.guards_intact());
    if (HasFailure()) return;
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
    const Buffer dw(c.type, {12, 7}), back(DType::u8, {gated_linear_backward_workspace_bytes(5, 6, c.type, {})});
    const Tensor dwg = dw.tensor().slice(0, 0, 6), dwu = dw.tensor().slice(0, 6, 12);
    gated_linear_backward({.dh = dh,
                           .x = x,
                           .w_gate = w.gate,
                           .w_up = w.up,
                           .gate = gate,
                           .up = up,
                           .dx = dx,
                           .dw_gate = dwg,
                           .dw_up = dwu,
                           .workspace = back,
                           .options = o,
                           .overwrite = true},
                          {});
    EXPECT_LT(testing::gradient_error(loss, x, dx, 1), 1e-6);
    EXPECT_LT(testing::gradient_error(loss, w.gate, dwg, 2), 1e-6);
    EXPECT_LT(testing::gradient_error(loss, w.up, dwu, 3), 1e-6);
  }
}

// dh may lie in the workspace's second half.
TEST(GatedLinear, DhMayBeWhereDupWillBe) {
  const GatedCase c{.rows = 6, .channels = 5, .hidden = 8};
  const Buffer x(c.type, {6, 5}), dh(c.type, {6, 8}), gate(c.type, {6, 8}), up(c.type, {6, 8}), dx(c.type, {6, 5}),
      again(c.type, {6, 5});
  for (const Buffer* b : {&x, &dh, &gate, &up}) testing::fill_normal(*b, uint64_t(b - &x + 1));
  const Weights w(c, 5, 5);
  const int64_t bytes = gated_linear_backward_workspace_bytes(6, 8, c.type, {});
  const Buffer apart(DType::u8, {bytes}), room(DType::u8, {bytes});
  GatedLinearBackward b{.dh = dh, .w_gate = w.gate, .w_up = w.up, .gate = gate, .up = up, .dx = dx, .workspace = apart};
  gated_linear_backward(b, {});
  const Tensor inside(static_cast<char*>(room.tensor().data) + bytes / 2, c.type, {6, 8});
  testing::assign(inside, values(dh));
  b.dh = inside, b.dx = again, b.workspace = room;
  gated_linear_backward(b, {});
  EXPECT_EQ(values(again), values(dx));
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
}

TEST(GatedLinear, CountsItsWork) {
  const Buffer x(DType::f32, {4, 6}), w(DType::f32, {8, 6}), h(DType::f32, {4, 8});
  const GatedLinear g{.x = x, .w_gate = w, .w_up = w, .h = h};
  EXPECT_EQ(flops(g), 4 * 4 * 6 * 8);
  EXPECT_EQ(bytes(g), 4 * (4 * 6 + 2 * 8 * 6 + 4 * 8));
}

}  // namespace
}  // namespace ingot
