// The gate's CUDA kernels against the fp64 loop. Without a GPU the numeric cases skip; the choice of configuration is
// plain C++.
#include "ingot/kernels/swiglu/swiglu.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/gpu/device.h"
#include "ingot/kernels/swiglu/swiglu_config.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::compare;
using testing::DeviceBuffer;
using testing::roundoff;
using testing::values;

TEST(SwigluGateConfig, TakesVectorsWhereTheyFitAndLeavesNoSmIdle) {
  for (DType dtype : {DType::f32, DType::bf16})
    for (int64_t cols : {1, 4, 7, 8, 12, 64, 1000, 11008})
      for (int64_t rows : {1, 100, 100000})
        for (bool aligned : {false, true})
          for (bool pairs : {false, true})
            for (const gpu::Limits& limits : {gpu::Limits{.sms = 28}, gpu::Limits{}}) {
              const auto c = cuda::pick_swiglu_gate_config(
                  {.rows = rows, .cols = cols, .dtype = dtype, .aligned = aligned, .interleaved = pairs}, limits);
              EXPECT_EQ(c.vectors, aligned && (pairs ? 2 : 1) * cols % (16 / size_of(dtype)) == 0);
              EXPECT_TRUE(c.threads % 32 == 0 && c.threads <= cuda::kSwigluMaxThreads);
              EXPECT_TRUE(c.units_per_thread == 1 || rows * cols >= int64_t(limits.sms) * 2048);
            }
}

// The tests below need a GPU.
class SwigluGateCuda : public testing::GpuTest<> {};

enum class Layout { two_tensors, gate_first, up_first, interleaved };
struct Case {
  int64_t rows, hidden;
  DType type = DType::bf16;
  Layout layout = Layout::two_tensors;
  GateOptions options;
  int64_t gap = 0, shift = 0;  // elements between rows; elements off an aligned address
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << "x" << c.hidden << ' ' << c.type << " layout " << int(c.layout) << " limit "
             << c.options.limit << " alpha " << c.options.alpha << " up_offset " << c.options.up_offset << " gap "
             << c.gap << " shift " << c.shift;
}

constexpr Layout kLayouts[] = {Layout::two_tensors, Layout::gate_first, Layout::up_first, Layout::interleaved};
const GateOptions kOptions[] = {{}, {.limit = 1.5, .alpha = 1.702, .up_offset = 1}, {.alpha = 0.5}};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (Layout layout : kLayouts) {
      for (const GateOptions& o : kOptions)
        all.push_back({.rows = 37, .hidden = 72, .type = t, .layout = layout, .options = o});
      for (const auto& [rows, hidden] :
           {std::pair<int64_t, int64_t>{1, 1}, {1, 4096}, {5, 33}, {301, 4}, {9, 20}, {130, 1032}})
        all.push_back({.rows = rows, .hidden = hidden, .type = t, .layout = layout});
      // vectors with gaps between rows
      all.push_back({.rows = 11, .hidden = 64, .type = t, .layout = layout, .gap = 8});
      all.push_back({.rows = 11, .hidden = 64, .type = t, .layout = layout, .gap = 3});    // stride breaks alignment
      all.push_back({.rows = 11, .hidden = 64, .type = t, .layout = layout, .shift = 1});  // address breaks alignment
    }
  all.push_back({.rows = 700, .hidden = 4096});  // enough for several vectors per thread
  return all;
}

// Gate and up as one memory or two; a tensor of 2H columns holds the layout of the case.
struct Halves {
  explicit Halves(const Case& k)
      : c(k),
        both(k.type, {k.rows, width()}, width() + k.gap, k.shift),
        other(k.type, {two() ? k.rows : 0, k.hidden}, k.hidden + 2 * k.gap, k.shift) {}
  bool two() const { return c.layout == Layout::two_tensors; }
  int64_t width() const { return two() ? c.hidden : 2 * c.hidden; }
  Tensor gate(const Tensor& both_columns) const {
    if (c.layout == Layout::gate_first) return both_columns.slice(1, 0, c.hidden);
    if (c.layout == Layout::up_first) return both_columns.slice(1, c.hidden, 2 * c.hidden);
    return both_columns;
  }
  Tensor up(const Tensor& both_columns, const Tensor& other_tensor) const {
    if (c.layout == Layout::gate_first) return both_columns.slice(1, c.hidden, 2 * c.hidden);
    if (c.layout == Layout::up_first) return both_columns.slice(1, 0, c.hidden);
    return two() ? other_tensor : Tensor();
  }
  Tensor gate() const { return gate(both.tensor()); }
  Tensor up() const { return up(both.tensor(), other.tensor()); }
  void upload() { both.upload(), other.upload(); }
  void download() { both.download(), other.download(); }
  bool untouched(bool elements_too = false) const {
    return both.untouched(elements_too) && other.untouched(elements_too);
  }
  Case c;
  DeviceBuffer both, other;
};

struct Operands {
  explicit Operands(const Case& k)
      : c(k),
        in(k),
        d(k),
        h(k.type, {k.rows, k.hidden}, k.hidden + k.gap, k.shift),
        dh(k.type, {k.rows, k.hidden}, k.hidden + k.gap, k.shift) {
    c.options.interleaved = k.layout == Layout::interleaved;
    testing::fill_normal(in.both.host(), 1, 3);
    testing::fill_normal(in.other.host(), 2, 3);
    testing::fill_normal(dh.host(), 3);
  }
  void upload() { in.upload(), d.upload(), h.upload(), dh.upload(); }
  void download() { in.download(), d.download(), h.download(), dh.download(); }
  SwigluGate op() const { return {.gate = in.gate(), .up = in.up(), .h = h, .options = c.options}; }
  SwigluGateBackward backward_op() const {
    return {.gate = in.gate(), .up = in.up(), .dh = dh, .dgate = d.gate(), .dup = d.up(), .options = c.options};
  }
  Case c;
  Halves in, d;
  DeviceBuffer h, dh;
};

// The same computation in fp64 on the CPU, from the uploaded operands.
struct Oracle {
  explicit Oracle(const Operands& o)
      : both(DType::f64, {o.c.rows, o.in.width()}),
        other(DType::f64, {o.c.rows, o.c.hidden}),
        h(DType::f64, {o.c.rows, o.c.hidden}),
        dh(DType::f64, {o.c.rows, o.c.hidden}),
        dboth(DType::f64, both.tensor().shape),
        dother(DType::f64, {o.c.rows, o.c.hidden}) {
    testing::assign(both, values(o.in.both.host()));
    if (o.in.two()) testing::assign(other, values(o.in.other.host()));
    testing::assign(dh, values(o.dh.host()));
    const Tensor gate = o.in.gate(both), up = o.in.up(both, other);
    swiglu_gate({.gate = gate, .up = up, .h = h, .options = o.c.options}, {});
    swiglu_gate_backward({.gate = gate,
                          .up = up,
                          .dh = dh,
                          .dgate = o.in.gate(dboth),
                          .dup = o.in.up(dboth, dother),
                          .options = o.c.options},
                         {});
  }
  Buffer both, other, h, dh, dboth, dother;
};

// Products of the gate (below 17), its sigmoid and up (below 17), all relatively accurate: 40 roundings of f32 with the
// hardware's exp2 of an argument below 30 (its error grows with the argument). The gate's slope is a difference that
// may cancel: the bound is then the rounding of its two terms, |dh| (5) * |up| (18) * 2.
void check_against_fp64(Operands& o) {
  EXPECT_TRUE(o.in.untouched(true) && o.dh.untouched(true)) << "an input was written";
  EXPECT_TRUE(o.h.untouched() && o.d.untouched()) << "written outside of an output";
  const Oracle want(o);
  const DType t = o.c.type;
  const double u = roundoff(DType::f32), relative = (t == DType::f32 ? 0 : 1.01 * roundoff(t)) + 40 * u;
  const double smallest = t == DType::f16 ? 0x1p-25 : 1e-37;
  const auto near = [&](const char* name, const Tensor& got, const Buffer& wanted, double absolute) {
    const auto result = compare(got, values(wanted), absolute + smallest, relative);
    EXPECT_TRUE(result.ok) << name << ": " << result.message;
  };
  near("h", o.h.host(), want.h, 0);
  near("dgate and dup", o.d.both.host(), want.dboth, 5 * 18 * 2 * 4 * u);
  if (o.in.two()) near("dup", o.d.other.host(), want.dother, 0);
}

void expect_agreement(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message() << c);
    Operands o(c);
    o.upload();
    swiglu_gate(o.op(), {});
    swiglu_gate_backward(o.backward_op(), {});
    o.download();
    check_against_fp64(o);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(SwigluGateCuda, AgreesWithTheFp64LoopInEveryLayout) { expect_agreement(cases()); }

// Cases that a sanitizer runs in seconds.
TEST_F(SwigluGateCuda, AgreesWithTheFp64LoopWhenSmall) {
  std::vector<Case> small = cases();
  std::erase_if(small, [](const Case& c) { return c.rows * c.hidden > 800 || c.type == DType::f16; });
  expect_agreement(small);
}

#ifdef INGOT_HAS_CUDA_SWIGLU
TEST_F(SwigluGateCuda, GivesTheSameUnderEveryConfigurationThatFits) {
  for (DType t : {DType::f32, DType::bf16})
    for (Layout layout : kLayouts)
      for (int64_t gap : {0, 8})
        for (bool vectors : {false, true})
          for (int units : {1, 2, 4})
            for (int threads : {32, 256, 512}) {
              const Case c{.rows = 19, .hidden = 264, .type = t, .layout = layout, .options = kOptions[1], .gap = gap};
              SCOPED_TRACE(::testing::Message()
                           << c << " vectors " << vectors << " units " << units << " threads " << threads);
              const cuda::SwigluGateTuning tuning{
                  .config = {.vectors = vectors, .units_per_thread = units, .threads = threads},
                  .overlap = gap == 0,
                  .large = gap == 0};
              Operands o(c);
              o.upload();
              cuda::swiglu_gate_with(o.op(), tuning, {});
              cuda::swiglu_gate_backward_with(o.backward_op(), tuning, {});
              o.download();
              check_against_fp64(o);
              if (HasFailure()) return;
            }
}
#endif

TEST_F(SwigluGateCuda, OutputsMayReplaceInputs) {
  for (int64_t hidden : {256, 257}) {
    const Case c{.rows = 40, .hidden = hidden};
    Operands apart(c);
    apart.upload();
    swiglu_gate(apart.op(), {});
    swiglu_gate_backward(apart.backward_op(), {});
    apart.download();
    for (int which = 0; which < 4; ++which) {
      Operands o(c);
      o.upload();
      SwigluGate forward = o.op();
      SwigluGateBackward backward = o.backward_op();
      if (which < 2) {
        forward.h = which == 0 ? forward.gate : forward.up;
        swiglu_gate(forward, {});
      } else {
        backward.dup = backward.up;
        backward.dgate = which == 2 ? backward.gate : backward.dh;
        swiglu_gate_backward(backward, {});
      }
      o.download();
      if (which < 2) {
        EXPECT_EQ(values(which == 0 ? o.in.both.host() : o.in.other.host()), values(apart.h.host()));
      } else {
        EXPECT_EQ(values(o.in.other.host()), values(apart.d.other.host()));
        EXPECT_EQ(values(which == 2 ? o.in.both.host() : o.dh.host()), values(apart.d.both.host()));
      }
    }
    // dgate and dup over the interleaved columns of gate and up.
    const Case pairs{.rows = 40, .hidden = hidden, .layout = Layout::interleaved};
    Operands other(pairs), same(pairs);
    for (Operands* o : {&other, &same}) o->upload();
    swiglu_gate_backward(other.backward_op(), {});
    SwigluGateBackward over = same.backward_op();
    over.dgate = over.gate;
    swiglu_gate_backward(over, {});
    other.download(), same.download();
    EXPECT_EQ(values(same.in.both.host()), values(other.d.both.host()));
  }
}

TEST_F(SwigluGateCuda, HugeInputsReachTheirLimitsAndNanStaysNan) {
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (const GateOptions& o : {GateOptions{}, GateOptions{.limit = 7, .alpha = 1.702, .up_offset = 1}}) {
      DeviceBuffer gate(t, {1, 8}), up(t, {1, 8}), h(t, {1, 8});
      Buffer exact_gate(DType::f64, {1, 8}), exact_up(DType::f64, {1, 8}), want(DType::f64, {1, 8});
      const std::vector<double> g = {-HUGE_VAL, -3e4, 3e4, -200, HUGE_VAL, NAN, 1, 0},
                                u = {1, 1, 1, 1, 1, 1, NAN, -HUGE_VAL};
      testing::assign(gate.host(), g), testing::assign(up.host(), u);
      testing::assign(exact_gate, values(gate.host())), testing::assign(exact_up, values(up.host()));
      for (DeviceBuffer* b : {&gate, &up, &h}) b->upload();
      swiglu_gate({.gate = gate, .up = up, .h = h, .options = o}, {});
      swiglu_gate({.gate = exact_gate, .up = exact_up, .h = want, .options = o}, {});
      h.download();
      const auto got = compare(h.host(), values(want), 1e-30, 1.01 * roundoff(t) + 40 * roundoff(DType::f32));
      EXPECT_TRUE(got.ok) << t << " limit " << o.limit << ": " << got.message;
    }
}

TEST_F(SwigluGateCuda, ReachesRowsBeyondTwoToThe31Elements) {
  constexpr int64_t kRows = 3, kCols = 128, kStride = (int64_t(1) << 30) + 8;
  if (gpu::device_info().memory_bytes < int64_t(24) << 30) GTEST_SKIP() << "needs 24 GiB of device memory";
  const gpu::DeviceMemory big((2 * kStride + kCols) * 2);
  Tensor far(big.data(), DType::bf16, {kRows, kCols}, Device{Device::cuda, 0});
  far.stride[0] = kStride;
  Operands o({.rows = kRows, .hidden = kCols});
  o.upload();
  SwigluGate forward = o.op();
  forward.h = far;
  swiglu_gate(forward, {});
  for (int64_t t = 0; t < kRows; ++t) gpu::copy_on_device(o.h.tensor().row(t).data, far.row(t).data, kCols * 2, {});
  SwigluGateBackward backward = o.backward_op();
  for (int64_t t = 0; t < kRows; ++t) gpu::copy_on_device(far.row(t).data, o.dh.tensor().row(t).data, kCols * 2, {});
  backward.dh = far;
  swiglu_gate_backward(backward, {});
  o.download();
  check_against_fp64(o);
}

TEST_F(SwigluGateCuda, AcceptsNoRows) {
  Operands o({.rows = 0, .hidden = 64});
  EXPECT_NO_THROW(swiglu_gate(o.op(), {}));
  EXPECT_NO_THROW(swiglu_gate_backward(o.backward_op(), {}));
  gpu::synchronize();
}

TEST_F(SwigluGateCuda, RefusesUnsupportedOperandsByName) {
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& e) { return e.what(); }
    return "nothing was refused";
  };
  DeviceBuffer wide(DType::f64, {2, 8});
  std::string m = message([&] { swiglu_gate({.gate = wide, .up = wide, .h = wide}, {}); });
  EXPECT_TRUE(m.find("swiglu_gate") != m.npos && m.find("f64") != m.npos) << m;
  DeviceBuffer both(DType::bf16, {2, 16});
  Tensor h = both.tensor().slice(1, 0, 8);
  m = message([&] { swiglu_gate({.gate = both, .h = h, .options = {.interleaved = true}}, {}); });
  EXPECT_TRUE(m.find("interleaved") != m.npos) << m;
}

}  // namespace
}  // namespace ingot
