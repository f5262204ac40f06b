// gated_linear and its backward on a GPU, fused and in pieces, against fp64.
#include <gtest/gtest.h>

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

// A pair of weights (or their gradients) as a case lays them out.
struct Weights {
  Weights(const GatedCase& c, DType t)
      : transposed(c.transposed),
        memory(t, c.transposed ? Shape{c.channels, 2 * c.hidden} : Shape{2 * c.hidden, c.channels}),
        c(c) {}
  Tensor half(const Tensor& all, int which) const {
    if (transposed) return all.slice(1, which * c.hidden, (which + 1) * c.hidden);
    if (c.weights != GatedCase::even_and_odd_rows) return all.slice(0, which * c.hidden, (which + 1) * c.hidden);
    Tensor t(static_cast<char*>(all.data) + which * c.channels * size_of(all.dtype), all.dtype, {c.hidden, c.channels},
             all.device);
    t.stride[0] = 2 * c.channels;
    return t;
  }
  Tensor gate() const { return half(memory.tensor(), 0); }
  Tensor up() const { return half(memory.tensor(), 1); }
  // (H, C) values.
  std::vector<double> rows(int which) const {
    const std::vector<double> v = values(half(memory.host(), which));
    if (!transposed) return v;
    std::vector<double> out(v.size());
    for (int64_t i = 0; i < c.channels; ++i)
      for (int64_t j = 0; j < c.hidden; ++j) out[size_t(j * c.channels + i)] = v[size_t(i * c.hidden + j)];
    return out;
  }
  bool transposed;
  DeviceBuffer memory;
  GatedCase c;
};

// |got - want| <= allowed(i) everywhere; the first few that are not.
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
      gate(c.type, {T, H}), up(c.type, {T, H}), dx(c.type, {T, C}), dbg(c.sums, {H}), dbu(c.sums, {H});
  testing::fill_normal(x.host(), 1), testing::fill_normal(dh.host(), 2), testing::fill_normal(bg.host(), 3),
      testing::fill_normal(bu.host(), 4);
  Weights w(c, c.type), dw(c, c.sums);
  testing::fill_normal(w.memory.host(), 5, 1 / std::sqrt(double(C)));
  if (!c.overwrite)
    testing::fill_normal(dw.memory.host(), 6), testing::fill_normal(dbg.host(), 7), testing::fill_normal(dbu.host(), 8);
  const std::vector<double> dw_before[] = {dw.rows(0), dw.rows(1)},
                            db_before[] = {values(dbg.host()), values(dbu.host())};
  for (DeviceBuffer* b : {&x, &dh, &bg, &bu, &h, &gate, &up, &dx, &dbg, &dbu, &w.memory, &dw.memory}) b->upload();

  const Tensor none;
  GatedLinear forward{.x = x,
                      .w_gate = w.gate(),
                      .w_up = w.up(),
                      .b_gate = c.bias ? bg.tensor() : none,
                      .b_up = c.bias ? bu.tensor() : none,
                      .h = h,
                      .gate = c.keeps ? gate.tensor() : none,
                      .up = c.keeps ? up.tensor() : none,
                      .options = c.options,
                      .transposed = c.transposed};
  DeviceBuffer room(DType::u8, {gated_linear_workspace_bytes(forward)});
  forward.workspace = room;
  gated_linear(forward, {});
  DeviceBuffer back(DType::u8, {gated_linear_backward_workspace_bytes(T, H, c.type, {Device::cuda, 0})});
  gated_linear_backward({.dh = dh,
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
                         .db_gate = dbg,
                         .db_up = dbu,
                         .workspace = back,
                         .options = c.options,
                         .transposed = c.transposed,
                         .overwrite = c.overwrite},
                        {});
  for (DeviceBuffer* b : {&x, &dh, &h, &gate, &up, &dx, &dbg, &dbu, &dw.memory}) {
    b->download();
    EXPECT_TRUE(b->untouched()) << "written outside of a result";
  }
  EXPECT_TRUE(x.untouched(true) && dh.untouched(true)) << "an input was written";

  const GatedTruth t = testing::gated_truth(
      c, {values(x.host()), w.rows(0), w.rows(1), c.bias ? values(bg.host()) : std::vector<double>(),
          c.bias ? values(bu.host()) : std::vector<double>(), values(dh.host())});
  // u: one rounding to the type. Sums are off by K 2^-23 of their terms' size; gate and up are rounded where they go
  // through memory. The gate's slopes are below 1.2 (of g sigmoid) times |up| and below |g|: both below 8 here, and
  // below 3 (|up'| <= limit + 1) where clamped, where a value at the limit may fall on either side of it: its
  // gradient is then not compared.
  const double u = roundoff(c.type), sum = double(C + 4) * 0x1p-23;
  const auto gate_error = [&](size_t i) { return 1.01 * u * std::fabs(t.gate[i]) + sum * t.size_gate[i]; };
  const auto up_error = [&](size_t i) { return 1.01 * u * std::fabs(t.up[i]) + sum * t.size_up[i]; };
  if (c.keeps) {
    expect_near("gate", values(gate.host()), t.gate, gate_error);
    expect_near("up", values(up.host()), t.up, up_error);
  }
  const double limit = c.options.limit > 0 ? c.options.limit : HUGE_VAL;
  const auto factors = [&](size_t i) {  // of the gate's and of up's errors in h
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
                1e-5 * std::fabs(d[i]) * of_gate;
    e_up[i] = std::fabs(d[i]) * 1.2 * gate_error(i) + 1.02 * u * std::fabs(t.dup[i]) + 1e-6;
    // Either side of the limit.
    if (std::fabs(t.gate[i] - limit) <= gate_error(i)) e_gate[i] += std::fabs(d[i]) * of_gate * 2;
    if (std::fabs(std::fabs(t.up[i]) - limit) <= up_error(i)) e_up[i] += std::fabs(d[i]) * of_up * 2;
  }
  std::vector<double> wg = w.rows(0), wu = w.rows(1), ax = values(x.host());
  const std::vector<double> dx_gate = testing::plain_product(e_gate, wg, T, C, H, false, false, true),
                            dx_up = testing::plain_product(e_up, wu, T, C, H, false, false, true);
  const double rounded = c.type == DType::f32 ? 0 : 3.03 * u;  // in pieces: dx of the gate is rounded, then the sum
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
  const auto biases = [&](const char* name, DeviceBuffer& got, int which, std::vector<double> want,
                          const std::vector<double>& e, const std::vector<double>& of) {
    std::vector<double> allowed(want.size());
    for (size_t i = 0; i < e.size(); ++i) allowed[i % size_t(H)] += e[i] + double(T + 1) * 0x1p-24 * std::fabs(of[i]);
    for (size_t i = 0; i < want.size(); ++i) {
      if (!c.overwrite) want[i] += db_before[which][i];
      allowed[i] += 1.01 * roundoff(c.sums) * std::fabs(want[i]) + 1e-6;
    }
    expect_near(name, values(got.host()), want, [&](size_t i) { return allowed[i]; });
  };
  biases("db_gate", dbg, 0, t.db_gate, e_gate, t.dgate);
  biases("db_up", dbu, 1, t.db_up, e_up, t.dup);
}

TEST_F(GatedLinearCuda, EveryGateLayoutAndTypeAgreesWithFp64) {
  int turn = 0;
  for (DType type : {DType::bf16, DType::f16, DType::f32})
    for (const GateOptions& o : testing::gate_kinds())
      for (bool transposed : {false, true})
        for (bool keeps : {false, true}) {
          if (type == DType::f32 && !gpu::lt_available()) continue;
          ++turn;
          run({.rows = 300,
               .channels = 200,
               .hidden = 264,
               .type = type,
               .sums = turn % 2 ? DType::f32 : type,
               .options = o,
               .bias = turn % 3 == 0,
               .keeps = keeps,
               .transposed = transposed,
               .overwrite = turn % 4 < 2,
               .weights = turn % 5 < 2 ? GatedCase::even_and_odd_rows : GatedCase::packed});
          if (HasFailure()) return;
        }
}
// Tiles enough for the fused kernels where cuBLASLt is there too.
TEST_F(GatedLinearCuda, LargeSizesAgreeWithFp64) {
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
    if (HasFailure()) return;
  }
}
TEST_F(GatedLinearCuda, RaggedSizesAgreeWithFp64Small) {
  for (const auto& [T, C, H] :
       {std::array<int64_t, 3>{1, 8, 8}, {129, 72, 72}, {7, 13, 5}, {64, 64, 100}, {0, 64, 64}}) {
    if ((C % 8 != 0 || H % 8 != 0) && !gpu::lt_available()) continue;
    for (bool keeps : {false, true})
      run({.rows = T, .channels = C, .hidden = H, .type = DType::bf16, .sums = DType::f32, .keeps = keeps});
    if (HasFailure()) return;
  }
}
TEST_F(GatedLinearCuda, FrozenInputAndFrozenWeights) {
  const GatedCase c{.rows = 140, .channels = 72, .hidden = 136, .type = DType::bf16};
  DeviceBuffer x(c.type, {140, 72}), dh(c.type, {140, 136}), gate(c.type, {140, 136}), up(c.type, {140, 136}),
      dx(c.type, {140, 72}), same(c.type, {140, 72}),
      room(DType::u8, {gated_linear_backward_workspace_bytes(140, 136, c.type, {Device::cuda, 0})});
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
                        .workspace = room,
                        .overwrite = true};
  gated_linear_backward(b, {});
  GatedLinearBackward frozen_weights = b, frozen_input = b;
  frozen_weights.x = frozen_weights.dw_gate = frozen_weights.dw_up = {}, frozen_weights.dx = same;
  gated_linear_backward(frozen_weights, {});
  frozen_input.w_gate = frozen_input.w_up = frozen_input.dx = {}, frozen_input.dw_gate = again.gate(),
  frozen_input.dw_up = again.up();
  gated_linear_backward(frozen_input, {});
  for (DeviceBuffer* d : {&dx, &same, &dw.memory, &again.memory}) d->download();
  EXPECT_EQ(values(same.host()), values(dx.host()));
  EXPECT_EQ(values(again.memory.host()), values(dw.memory.host()));
}
TEST_F(GatedLinearCuda, WorksInAGraph) {
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

// Rows so far apart that their offsets are beyond 2^31: what the same rows give side by side.
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
