// gated_linear and its backward on a GPU, fused and in pieces, against fp64.
#include <gtest/gtest.h>

#include <memory>

#include "ingot/gpu/cublaslt.h"
#include "ingot/kernels/swiglu/gated_case.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::DeviceBuffer;
using testing::GatedCase;
using testing::GatedTruth;
using testing::roundoff;
using testing::values;

class GatedLinearCuda : public testing::GpuTest<> {};

// A pair of weights (or their gradients) in the layout of a case.
struct Weights {
  Weights(const GatedCase& c, DType t) : memory(t, testing::gated_weights_shape(c)), c(c) {}
  Tensor gate() const { return testing::gated_weights_half(c, memory.tensor(), 0); }
  Tensor up() const { return testing::gated_weights_half(c, memory.tensor(), 1); }
  // (H, C) values.
  std::vector<double> rows(int which) const {
    const std::vector<double> v = values(testing::gated_weights_half(c, memory.host(), which));
    if (!c.transposed) return v;
    std::vector<double> out(v.size());
    for (int64_t i = 0; i < c.channels; ++i)
      for (int64_t j = 0; j < c.hidden; ++j) out[size_t(j * c.channels + i)] = v[size_t(i * c.hidden + j)];
    return out;
  }
  DeviceBuffer memory;
  GatedCase c;
};

// |got - want| <= allowed(i) everywhere; prints the first few violations.
template <class Allowed>
void expect_near(const char* name, const std::vector<double>& got, const std::vector<double>& want, Allowed&& allowed) {
  ASSERT_EQ(got.size(), want.size()) << name;
  int wrong = 0;
  for (size_t i = 0; i < got.size() && wrong < 3; ++i)
    if (!(std::fabs(got[i] - want[i]) <= allowed(i))) {
      ++wrong;
      ADD_FAILURE() << name << " element " << i << ": found " << got[i] << ", expected " << want[i] << " within "
                    << allowed(i);
    }
}

void run(const GatedCase& c) {
  SCOPED_TRACE(::testing::Message() << c);
  const int64_t T = c.rows, C = c.channels, H = c.hidden;
  DeviceBuffer x(c.type, {T, C}, C + 8), dh(c.type, {T, H}), bg(c.type, {H}), bu(c.type, {H}), h(c.type, {T, H}, H + 8),
      kept(c.type, {T, 2 * H}), dx(c.type, {T, C}), db(c.sums, {2 * H});
  // Halves of one tensor, as Python keeps them.
  const auto gate_of = [&](const Tensor& both) { return testing::gated_half(c, both, 0); };
  const auto up_of = [&](const Tensor& both) { return testing::gated_half(c, both, 1); };
  const Tensor gate = gate_of(kept), up = up_of(kept);
  testing::fill_normal(x.host(), 1), testing::fill_normal(dh.host(), 2), testing::fill_normal(bg.host(), 3),
      testing::fill_normal(bu.host(), 4);
  Weights w(c, c.type), dw(c, c.sums);
  testing::fill_normal(w.memory.host(), 5, 1 / std::sqrt(double(C)));
  if (!c.overwrite) testing::fill_normal(dw.memory.host(), 6), testing::fill_normal(db.host(), 7);
  const std::vector<double> dw_before[] = {dw.rows(0), dw.rows(1)},
                            db_before[] = {values(gate_of(db.host())), values(up_of(db.host()))};
  for (DeviceBuffer* b : {&x, &dh, &bg, &bu, &h, &kept, &dx, &db, &w.memory, &dw.memory}) b->upload();

  const Tensor none;
  GatedLinear forward{.x = x,
                      .w_gate = w.gate(),
                      .w_up = w.up(),
                      .b_gate = c.bias ? bg.tensor() : none,
                      .b_up = c.bias ? bu.tensor() : none,
                      .h = h,
                      .gate = c.keeps ? gate : none,
                      .up = c.keeps ? up : none,
                      .options = c.options,
                      .transposed = c.transposed};
  DeviceBuffer room(DType::u8, {gated_linear_workspace_bytes(forward)});
  room.upload();
  forward.workspace = room;
  gated_linear(forward, {});
  kept.download();
  const std::vector<double> got_gate = values(gate_of(kept.host())), got_up = values(up_of(kept.host()));
  if (c.in_place)
    swiglu_gate_backward({.gate = gate, .up = up, .dh = dh, .dgate = gate, .dup = up, .options = c.options}, {});
  GatedLinearBackward backward{.dh = c.in_place ? none : dh.tensor(),
                               .x = x,
                               .w_gate = w.gate(),
                               .w_up = w.up(),
                               .gate = forward.gate,
                               .up = forward.up,
                               .b_gate = forward.b_gate,
                               .b_up = forward.b_up,
                               .dx = dx,
                               .dw_gate = dw.gate(),
                               .dw_up = dw.up(),
                               .db_gate = gate_of(db),
                               .db_up = up_of(db),
                               .options = c.options,
                               .transposed = c.transposed,
                               .overwrite = c.overwrite};
  const int64_t bytes = gated_linear_backward_workspace_bytes(backward);
  if (c.in_place) { EXPECT_EQ(bytes, linear_workspace_bytes({Device::cuda, 0})) << "no room for gradients"; }
  DeviceBuffer back(DType::u8, {bytes});
  back.upload();
  backward.workspace = back;
  gated_linear_backward(backward, {});
  for (DeviceBuffer* b : {&x, &dh, &h, &kept, &dx, &db, &dw.memory, &back}) {
    b->download();
    EXPECT_TRUE(b->untouched()) << "written outside of a result";
  }
  EXPECT_TRUE(x.untouched(true) && dh.untouched(true)) << "an input was written";

  const GatedTruth t = testing::gated_truth(
      c, {values(x.host()), w.rows(0), w.rows(1), c.bias ? values(bg.host()) : std::vector<double>(),
          c.bias ? values(bu.host()) : std::vector<double>(), values(dh.host())});
  // u: one rounding to the type. Sums are off by K 2^-23 of their terms' size; gate and up are rounded where they pass
  // through memory. The gate's slopes are below 1.2 (of g sigmoid) times |up| and below |g|: both below 8 here, and
  // below 3 (|up'| <= limit + 1) where clamped, where a value near the limit may fall on either side: its gradient is
  // then not compared.
  // Below 2^-14 fp16 rounds to a grid of 2^-24.
  const double u = roundoff(c.type), sum = double(C + 4) * 0x1p-23, grid = c.type == DType::f16 ? 0x1p-25 : 0;
  const auto gate_error = [&](size_t i) { return 1.01 * u * std::fabs(t.gate[i]) + sum * t.size_gate[i] + grid; };
  const auto up_error = [&](size_t i) { return 1.01 * u * std::fabs(t.up[i]) + sum * t.size_up[i] + grid; };
  if (c.keeps) {
    expect_near("gate", got_gate, t.gate, gate_error);
    expect_near("up", got_up, t.up, up_error);
  }
  const double limit = c.options.limit > 0 ? c.options.limit : HUGE_VAL;
  const auto factors = [&](size_t i) {  // the factors by which errors of the gate and of up enter h
    return std::pair(1.2 * (std::min(std::fabs(t.up[i]), limit) + c.options.up_offset) + 1e-3,
                     std::min(std::fabs(t.gate[i]), limit) + 1e-3);
  };
  expect_near("h", values(h.host()), t.h, [&](size_t i) {
    const auto [of_gate, of_up] = factors(i);
    return of_gate * gate_error(i) + of_up * up_error(i) + 1.02 * u * std::fabs(t.h[i]) + 1e-6;
  });
  // dgate and dup are rounded once more; their own errors come from gate and up through second derivatives (below 1).
  std::vector<double> e_gate(t.dgate.size()), e_up(t.dgate.size());
  const std::vector<double> d = values(dh.host());
  for (size_t i = 0; i < e_gate.size(); ++i) {
    const auto [of_gate, of_up] = factors(i);
    e_gate[i] = std::fabs(d[i]) * (of_gate * gate_error(i) + 1.2 * up_error(i)) + 1.02 * u * std::fabs(t.dgate[i]) +
                1e-5 * std::fabs(d[i]) * of_gate + grid;
    e_up[i] = std::fabs(d[i]) * 1.2 * gate_error(i) + 1.02 * u * std::fabs(t.dup[i]) + 1e-6;
    // The value may fall on either side of the limit.
    if (std::fabs(t.gate[i] - limit) <= gate_error(i)) e_gate[i] += std::fabs(d[i]) * of_gate * 2;
    if (std::fabs(std::fabs(t.up[i]) - limit) <= up_error(i)) e_up[i] += std::fabs(d[i]) * of_up * 2;
  }
  if (c.in_place) {
    expect_near("dgate", values(gate_of(kept.host())), t.dgate, [&](size_t i) { return e_gate[i]; });
    expect_near("dup", values(up_of(kept.host())), t.dup, [&](size_t i) { return e_up[i]; });
  } else if (c.keeps) {
    EXPECT_EQ(values(gate_of(kept.host())), got_gate) << "gate was written";
    EXPECT_EQ(values(up_of(kept.host())), got_up) << "up was written";
  }
  std::vector<double> wg = w.rows(0), wu = w.rows(1), ax = values(x.host());
  const std::vector<double> dx_gate = testing::plain_product(e_gate, wg, T, C, H, false, false, true),
                            dx_up = testing::plain_product(e_up, wu, T, C, H, false, false, true);
  // without the fused kernel, dx of the gate is rounded, then the sum
  const double rounded = c.type == DType::f32 ? 0 : 3.03 * u;
  expect_near("dx", values(dx.host()), t.dx, [&](size_t i) {
    return dx_gate[i] + dx_up[i] + rounded * t.size_dx[i] / 4 + 1.01 * u * std::fabs(t.dx[i]) +
           double(2 * H + 4) * 0x1p-23 * t.size_dx[i];
  });
  const auto weights = [&](const char* name, int which, const std::vector<double>& e, std::vector<double> want,
                           const std::vector<double>& size) {
    const std::vector<double> from = testing::plain_product(e, ax, H, C, T, true, false, true);
    for (size_t i = 0; i < want.size() && !c.overwrite; ++i) want[i] += dw_before[which][i];
    expect_near(name, dw.rows(which), want, [&](size_t i) {
      const double before = c.overwrite ? 0 : std::fabs(dw_before[which][i]);
      return from[i] + 2.02 * roundoff(c.sums) * (std::fabs(want[i]) + before) + double(T + 4) * 0x1p-23 * size[i];
    });
  };
  weights("dw_gate", 0, e_gate, t.dw_gate, t.size_dw_gate);
  weights("dw_up", 1, e_up, t.dw_up, t.size_dw_up);
  const auto biases = [&](const char* name, const Tensor& got, int which, std::vector<double> want,
                          const std::vector<double>& e, const std::vector<double>& of) {
    std::vector<double> allowed(want.size());
    for (size_t i = 0; i < e.size(); ++i) allowed[i % size_t(H)] += e[i] + double(T + 1) * 0x1p-24 * std::fabs(of[i]);
    for (size_t i = 0; i < want.size(); ++i) {
      if (!c.overwrite) want[i] += db_before[which][i];
      allowed[i] += 1.01 * roundoff(c.sums) * std::fabs(want[i]) + 1e-6;
    }
    expect_near(name, values(got), want, [&](size_t i) { return allowed[i]; });
  };
  biases("db_gate", gate_of(db.host()), 0, t.db_gate, e_gate, t.dgate);
  biases("db_up", up_of(db.host()), 1, t.db_up, e_up, t.dup);
}

TEST_F(GatedLinearCuda, EveryGateLayoutAndTypeAgreesWithFp64) {
  int turn = 0;
  for (DType type : {DType::bf16, DType::f16, DType::f32})
    for (const GateOptions& o : testing::gate_kinds())
      for (bool transposed : {false, true})
        for (int form : {0, 1, 2}) {  // gate and up are formed again, kept, kept and overwritten
          if (type == DType::f32 && !gpu::lt_available()) continue;
          ++turn;
          if (testing::kEmulated && turn % 5 != 0) continue;
          run({.rows = testing::kEmulated ? 140 : 300,
               .channels = testing::kEmulated ? 72 : 200,
               .hidden = testing::kEmulated ? 136 : 264,
               .type = type,
               .sums = turn % 2 ? DType::f32 : type,
               .options = o,
               .bias = turn % 3 == 0,
               .keeps = form > 0,
               .transposed = transposed,
               .overwrite = turn % 4 < 2,
               .weights = turn % 5 < 2   ? GatedCase::even_and_odd_rows
                          : turn % 5 < 4 ? GatedCase::packed
                                         : GatedCase::apart,
               .in_place = form == 2,
               .up_first = turn % 7 < 3});
          if (HasFailure()) return;
        }
}
// Sizes with enough tiles for the fused kernels even where cuBLASLt is present.
TEST_F(GatedLinearCuda, LargeSizesAgreeWithFp64) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  for (bool transposed : {false, true}) {
    run({.rows = 1536,
         .channels = 136,
         .hidden = 712,
         .type = DType::bf16,
         .sums = DType::f32,
         .transposed = transposed});
    run({.rows = 1400,
         .channels = 1544,
         .hidden = 712,
         .type = DType::bf16,
         .sums = DType::bf16,
         .bias = true,
         .keeps = false,
         .transposed = transposed,
         .overwrite = true});
    for (DType sums : {DType::f32, DType::bf16})
      run({.rows = 1400,
           .channels = 1544,
           .hidden = 712,
           .type = DType::bf16,
           .sums = sums,
           .transposed = transposed,
           .overwrite = sums == DType::bf16,
           .weights = GatedCase::packed,
           .in_place = true,
           .up_first = transposed});
    if (HasFailure()) return;
  }
}
TEST_F(GatedLinearCuda, RaggedSizesAgreeWithFp64Small) {
  for (const auto& [T, C, H] :
       {std::array<int64_t, 3>{1, 8, 8}, {129, 72, 72}, {7, 13, 5}, {64, 64, 100}, {0, 64, 64}}) {
    if ((C % 8 != 0 || H % 8 != 0) && !gpu::lt_available()) continue;
    for (bool keeps : {false, true})
      for (auto weights : {GatedCase::apart, GatedCase::packed})
        run({.rows = T,
             .channels = C,
             .hidden = H,
             .type = DType::bf16,
             .sums = DType::f32,
             .keeps = keeps,
             .weights = weights,
             .in_place = keeps});
    if (HasFailure()) return;
  }
}
// At most 64 rows: two blocks divide K, which may be shorter than a step, and every part of a tile may be outside.
TEST_F(GatedLinearCuda, FewRowsAgreeWithFp64) {
  if (testing::kEmulated) GTEST_SKIP() << "Hopper's kernel";
  int turn = 0;
  for (const auto& [C, H] : {std::array<int64_t, 2>{8, 8}, {64, 64}, {136, 72}, {712, 200}, {1096, 136}})
    for (int64_t T : {1, 8, 17, 33, 64})
      for (bool transposed : {false, true}) {
        ++turn;
        run({.rows = T,
             .channels = C,
             .hidden = H,
             .type = turn % 3 == 0 ? DType::f16 : DType::bf16,
             .sums = DType::f32,
             .options = testing::gate_kinds()[size_t(turn) % 3],
             .bias = turn % 4 < 2,
             .keeps = turn % 5 > 0,
             .transposed = transposed,
             .weights = turn % 2 ? GatedCase::packed : GatedCase::apart,
             .in_place = turn % 5 > 2,
             .up_first = turn % 7 < 3});
        if (HasFailure()) return;
      }
}
// A row's results do not depend on the other rows.
TEST_F(GatedLinearCuda, AFewRowsResultsAreThoseOfOneRow) {
  if (testing::kEmulated) GTEST_SKIP() << "Hopper's kernel";
  const GatedCase c{.rows = 64, .channels = 712, .hidden = 200, .type = DType::bf16};
  DeviceBuffer x(c.type, {c.rows, c.channels}), all(c.type, {c.rows, c.hidden}), one(c.type, {c.rows, c.hidden});
  Weights w(c, c.type);
  testing::fill_normal(x.host(), 1), testing::fill_normal(w.memory.host(), 2, 0.05);
  for (DeviceBuffer* b : {&x, &all, &one, &w.memory}) b->upload();
  const auto product = [&](const Tensor& from, const Tensor& to) {
    GatedLinear g{.x = from, .w_gate = w.gate(), .w_up = w.up(), .h = to};
    const DeviceBuffer room(DType::u8, {gated_linear_workspace_bytes(g)});
    g.workspace = room;
    gated_linear(g, {});
    gpu::synchronize();
  };
  product(x, all);
  for (int64_t r = 0; r < c.rows; ++r) product(x.tensor().slice(0, r, r + 1), one.tensor().slice(0, r, r + 1));
  all.download(), one.download();
  EXPECT_EQ(values(one.host()), values(all.host()));
}
TEST_F(GatedLinearCuda, FrozenInputAndFrozenWeights) {
  const GatedCase c{.rows = 140, .channels = 72, .hidden = 136, .type = DType::bf16};
  DeviceBuffer x(c.type, {140, 72}), dh(c.type, {140, 136}), gate(c.type, {140, 136}), up(c.type, {140, 136}),
      dx(c.type, {140, 72}), same(c.type, {140, 72});
  Weights w(c, c.type), dw(c, DType::f32), again(c, DType::f32);
  uint64_t seed = 1;
  for (DeviceBuffer* b : {&x, &dh, &gate, &up, &w.memory}) testing::fill_normal(b->host(), seed++), b->upload();
  for (DeviceBuffer* b : {&dx, &same, &dw.memory, &again.memory}) b->upload();
  GatedLinearBackward b{.dh = dh,
                        .x = x,
                        .w_gate = w.gate(),
                        .w_up = w.up(),
                        .gate = gate,
                        .up = up,
                        .dx = dx,
                        .dw_gate = dw.gate(),
                        .dw_up = dw.up(),
                        .overwrite = true};
  const DeviceBuffer room(DType::u8, {gated_linear_backward_workspace_bytes(b)});
  b.workspace = room;
  gated_linear_backward(b, {});
  GatedLinearBackward frozen_weights = b, frozen_input = b;
  frozen_weights.x = frozen_weights.dw_gate = frozen_weights.dw_up = {}, frozen_weights.dx = same;
  gated_linear_backward(frozen_weights, {});
  frozen_input.w_gate = frozen_input.w_up = frozen_input.dx = {}, frozen_input.dw_gate = again.gate(),
  frozen_input.dw_up = again.up();
  gated_linear_backward(frozen_input, {});
  for (DeviceBuffer* d : {&dx, &same, &dw.memory, &again.memory}) d->download();
  EXPECT_EQ(values(same.host()), values(dx.host()));
  for (int half : {0, 1}) EXPECT_EQ(again.rows(half), dw.rows(half));  // the rows between are never written: NaN
}
// swiglu and swiglu_backward against the same functions in fp64 on a CPU. Every stored tensor is rounded once, and at
// most eight roundings lie on the way to a result, so the norm of its error is at most eight roundings of its norm.
TEST_F(GatedLinearCuda, AGatedMlpIsTheCpus) {
  struct Sizes {
    int64_t rows, channels, hidden, out;
  };
  for (const Sizes s : {Sizes{5, 24, 40, 16}, {300, 136, 712, 72}})
    for (const DType type : {DType::bf16, DType::f16}) {
      SCOPED_TRACE(::testing::Message() << s.rows << " rows in " << type);
      const Shape shapes[] = {{s.rows, s.channels},   {s.hidden, s.channels}, {s.hidden, s.channels},
                              {s.out, s.hidden},      {s.rows, s.out},        {s.out, s.hidden},
                              {s.hidden, s.channels}, {s.rows, s.channels},   {s.rows, s.out},
                              {s.rows, s.hidden},     {s.rows, s.hidden}};
      enum { x, w_gate, w_up, w_down, dy, dw_down, dw_gate, dx, y, gate, up };
      constexpr int kGiven = 7;  // up to dw_gate, to which the gradient is added
      std::vector<std::unique_ptr<DeviceBuffer>> got;
      std::vector<std::unique_ptr<testing::Buffer>> want;
      for (int i = 0; i <= up; ++i) {
        got.push_back(std::make_unique<DeviceBuffer>(type, shapes[i]));
        want.push_back(std::make_unique<testing::Buffer>(DType::f64, shapes[i]));
        if (i >= kGiven) {
          got[i]->upload();  // NaN everywhere
          continue;
        }
        testing::fill_normal(got[i]->host(), uint64_t(i + 1),
                             i == x || i >= dy ? 1 : 1 / std::sqrt(double(shapes[i][-1])));
        const std::vector<double> v = values(got[i]->host());
        std::copy(v.begin(), v.end(), want[i]->tensor().ptr<double>());
        got[i]->upload();
      }
      const auto run = [&](const auto& t, const Tensor& workspace) {
        swiglu({.x = *t[x],
                .w_gate = *t[w_gate],
                .w_up = *t[w_up],
                .w_down = *t[w_down],
                .y = *t[y],
                .gate = *t[gate],
                .up = *t[up],
                .workspace = workspace},
               {});
        swiglu_backward({.dy = *t[dy],
                         .x = *t[x],
                         .w_gate = *t[w_gate],
                         .w_up = *t[w_up],
                         .w_down = *t[w_down],
                         .gate = *t[gate],
                         .up = *t[up],
                         .dx = *t[dx],
                         .dw_gate = *t[dw_gate],
                         .dw_down = *t[dw_down],
                         .workspace = workspace},
                        {});
      };
      const DeviceBuffer room(DType::u8, {swiglu_workspace_bytes(s.rows, s.hidden, type, {Device::cuda, 0})});
      testing::Buffer there(DType::u8, {swiglu_workspace_bytes(s.rows, s.hidden, DType::f64, {})});
      run(got, room);
      run(want, there);
      for (const int i : {int(y), int(dx), int(dw_gate), int(dw_down)}) {
        got[i]->download();
        const std::vector<double> a = values(got[i]->host()), b = values(*want[i]);
        double error = 0, norm = 0;
        for (size_t n = 0; n < a.size(); ++n) error += (a[n] - b[n]) * (a[n] - b[n]), norm += b[n] * b[n];
        EXPECT_LE(std::sqrt(error / norm), 8 * roundoff(type)) << "result " << i;
        EXPECT_TRUE(got[i]->untouched()) << "result " << i;
      }
    }
}

TEST_F(GatedLinearCuda, WorksInAGraph) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  const GatedCase c{.rows = 1536, .channels = 136, .hidden = 712, .type = DType::bf16};
  DeviceBuffer x(c.type, {c.rows, c.channels}), h(c.type, {c.rows, c.hidden});
  Weights w(c, c.type);
  testing::fill_normal(x.host(), 1), testing::fill_normal(w.memory.host(), 2);
  for (DeviceBuffer* b : {&x, &h, &w.memory}) b->upload();
  GatedLinear g{.x = x, .w_gate = w.gate(), .w_up = w.up(), .h = h};
  const DeviceBuffer room(DType::u8, {gated_linear_workspace_bytes(g)});
  g.workspace = room;
  gated_linear(g, {});
  h.download();
  const std::vector<double> first = values(h.host());
  gpu::fill_bytes(h.tensor().data, 0, h.tensor().bytes(), {});
  gpu::synchronize();
  const gpu::OwnedStream stream;
  const gpu::Graph graph(stream, [&] { gated_linear(g, stream); });
  graph.launch(stream);
  h.download();
  EXPECT_EQ(values(h.host()), first);
}

// Rows so far apart that their offsets exceed 2^31 give the same results as adjacent rows.
TEST_F(GatedLinearCuda, MoreThanTwoToThe31Elements) {
  if (gpu::device_info().memory_bytes < int64_t(24) << 30) GTEST_SKIP() << "needs 24 GiB of device memory";
  constexpr int64_t kStride = (int64_t(1) << 21) + 8;
  const GatedCase c{.rows = 1536, .channels = 136, .hidden = 712, .type = DType::bf16};
  const Device device{Device::cuda, 0};
  const gpu::DeviceMemory far_x(c.rows * kStride * 2), far_h(c.rows * kStride * 2);
  Tensor x(far_x.data(), c.type, {c.rows, c.channels}, device), h(far_h.data(), c.type, {c.rows, c.hidden}, device);
  x.stride[0] = h.stride[0] = kStride;
  DeviceBuffer near_x(c.type, {c.rows, c.channels}), near_h(c.type, {c.rows, c.hidden}),
      got(c.type, {c.rows, c.hidden});
  Weights w(c, c.type);
  testing::fill_normal(near_x.host(), 1), testing::fill_normal(w.memory.host(), 2);
  for (DeviceBuffer* b : {&near_x, &near_h, &got, &w.memory}) b->upload();
  const auto run = [&](const Tensor& from, const Tensor& to) {
    GatedLinear g{.x = from, .w_gate = w.gate(), .w_up = w.up(), .h = to};
    const DeviceBuffer room(DType::u8, {gated_linear_workspace_bytes(g)});
    g.workspace = room;
    gated_linear(g, {});
    gpu::synchronize();
  };
  for (int64_t r = 0; r < c.rows; ++r)
    gpu::copy_on_device(x.row(r).data, near_x.tensor().row(r).data, c.channels * 2, {});
  run(near_x, near_h), run(x, h);
  for (int64_t r = 0; r < c.rows; ++r) gpu::copy_on_device(got.tensor().row(r).data, h.row(r).data, c.hidden * 2, {});
  near_h.download(), got.download();
  EXPECT_EQ(values(got.host()), values(near_h.host()));
}

}  // namespace
}  // namespace ingot
