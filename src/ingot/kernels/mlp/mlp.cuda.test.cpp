// Every CUDA form is compared with the fp64 loop, on all problems supported by the form. A form's error may be 1.5
// times that of a chain of correctly rounded operations in the same type: each layer's result is rounded once; sums are
// exact for 16-bit types, and plain fp32 sums for f32. Without a GPU the numeric cases skip.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

#ifdef INGOT_HAS_CUDA_MLP
#include <cuda_runtime_api.h>
#endif

#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/mlp/cuda_chain.test.h"
#include "ingot/kernels/mlp/to_512/forward.h"
#include "ingot/testing/gpu_test.h"

#ifdef INGOT_HAS_CUDA_MLP
namespace ingot {
namespace {

using namespace mlp_cuda_test;

struct Forms {
  const char* name;
  MlpForm forward, backward;
  DType dtype;
};
std::ostream& operator<<(std::ostream& out, const Forms& f) { return out << f.name; }

class MlpCuda : public testing::GpuTest<::testing::TestWithParam<Forms>> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    const bool portable = GetParam().forward == MlpForm::portable && GetParam().backward == MlpForm::portable;
    if (!IsSkipped() && !portable && !gpu::current_limits().hopper) GTEST_SKIP() << "needs Hopper's machine code";
  }
  static bool taken(const Case& c) {
    // Asked with null pointers: whether a form takes a problem depends on shapes, types and options only.
    const DType t = GetParam().dtype;
    const Device gpu{Device::cuda, 0};
    Mlp f{.x = Tensor(nullptr, t, {c.rows, c.widths.front()}, gpu),
          .y = Tensor(nullptr, t, {c.rows, c.widths.back()}, gpu),
          .act = c.act,
          .activate_last = c.activate_last};
    MlpBackward b{.dy = f.y, .x = f.x, .dx = f.x, .act = c.act, .activate_last = c.activate_last};
    for (size_t l = 0; l < c.depth(); ++l) {
      const Shape shape = {c.widths[l + 1], c.widths[l]}, vector = {c.widths[l + 1]};
      f.layers.push_back({Tensor(nullptr, t, shape, gpu), c.bias ? Tensor(nullptr, t, vector, gpu) : Tensor(),
                          c.weight_norm ? Tensor(nullptr, t, vector, gpu) : Tensor()});
      b.grads.push_back({Tensor(nullptr, DType::f32, shape, gpu),
                         c.bias ? Tensor(nullptr, DType::f32, vector, gpu) : Tensor(),
                         c.weight_norm ? Tensor(nullptr, DType::f32, vector, gpu) : Tensor()});
    }
    b.layers = f.layers;
    if (c.keep != Keep::nothing)
      f.saved = b.saved = Tensor(nullptr, c.keep == Keep::f32 ? DType::f32 : t,
                                 {mlp_saved_elements(c.rows, f.layers, c.activate_last)}, gpu);
    return cuda::mlp_takes(f, GetParam().forward) && cuda::mlp_takes(b, GetParam().backward);
  }
};

std::map<std::string, Vector> gradients_now(const Problem& p) {
  std::map<std::string, Vector> all;
  for (size_t l = 0; l < p.c.depth(); ++l) {
    all["dw" + std::to_string(l)] = values(p.dw[l].host());
    all["db" + std::to_string(l)] = values(p.db[l].host());
    all["dg" + std::to_string(l)] = values(p.dg[l].host());
  }
  return all;
}
void check_case(const Case& c, const Forms& forms) {
  SCOPED_TRACE(::testing::Message() << c << ' ' << forms);
  Problem p(c, forms.dtype, forms.backward);
  p.fill(1);
  const auto before = gradients_now(p);
  const Chain want(p, DType::f64);
  p.run(forms.forward, forms.backward);
  expect_only_outputs_written(p);
  compare_all(p, want, Chain(p, forms.dtype), before);
}

TEST_P(MlpCuda, AgreesWithTheFp64LoopForwardAndBackward) {
  int taken_cases = 0, bad = 0;
  for (const Case& c : cases()) {
    if (!taken(c)) continue;
    ++taken_cases;
    check_case(c, GetParam());
    if (HasFailure() && ++bad == 4) return;
  }
  if (taken_cases == 0) GTEST_SKIP() << "this form is not part of the build";
  EXPECT_GT(taken_cases, 10) << "the form refuses nearly every case";
}

// Small enough for the sanitizers: a case for each separate kernel.
TEST_P(MlpCuda, EveryKernelSmall) {
  constexpr Act kSoftplus = act_of<Softplus>, kGelu = act_of<Gelu>, kSilu = act_of<Silu>;
  int taken_cases = 0;
  const auto check = [&](const std::vector<int64_t>& widths, Act act, bool weight_norm, Keep keep) {
    const Case c{.widths = widths, .rows = 140, .act = act, .weight_norm = weight_norm, .keep = keep};
    if (!taken(c)) return;
    ++taken_cases;
    check_case(c, GetParam());
  };
  for (Keep keep : {Keep::nothing, Keep::f32})
    for (int64_t width : {128, 256, 328}) check(equal_widths(2, width), kSoftplus, keep == Keep::nothing, keep);
  for (Keep keep : {Keep::nothing, Keep::own_type})
    for (int64_t width : {128, 256, 328}) check(equal_widths(2, width), kGelu, keep == Keep::own_type, keep);
  for (bool weight_norm : {false, true}) check(equal_widths(7, 128), kSoftplus, weight_norm, Keep::own_type);
  check(equal_widths(3, 128), kSoftplus, true, Keep::own_type);
  check(equal_widths(2, 264), kSoftplus, false, Keep::own_type);
  check(equal_widths(2, 448), kSoftplus, true, Keep::own_type);
  check({72, 512, 40}, kSilu, false, Keep::f32);
  if (taken_cases == 0) GTEST_SKIP() << "this form is not part of the build";
}

// The bits of all outputs of a run.
std::vector<Vector> outputs(const Problem& p) {
  std::vector<Vector> all = {values(p.y.host()), values(p.dx.host())};
  if (p.c.keep != Keep::nothing) all.push_back(values(p.saved.host()));
  for (size_t l = 0; l < p.c.depth(); ++l)
    for (const auto* group : {&p.dw, &p.db, &p.dg}) all.push_back(values((*group)[l].host()));
  return all;
}
// The bytes of all outputs of a run; no rows lie apart.
std::vector<std::string> bytes_of_outputs(const Problem& p) {
  std::vector<Tensor> all = {p.y.host(), p.dx.host()};
  if (p.c.keep != Keep::nothing) all.push_back(p.saved.host());
  for (size_t l = 0; l < p.c.depth(); ++l)
    for (const auto* group : {&p.dw, &p.db, &p.dg}) all.push_back((*group)[l].host());
  std::vector<std::string> bytes;
  for (const Tensor& t : all) bytes.emplace_back(static_cast<const char*>(t.data), size_t(t.bytes()));
  return bytes;
}
TEST_P(MlpCuda, RepeatsBitForBitAlsoFromAGraph) {
  for (const Case& c :
       {Case{.widths = equal_widths(3, 128), .rows = 4097}, Case{.widths = {256, 256, 136, 256}, .rows = 9000},
        Case{.widths = {512, 320, 512}, .rows = 9000}, Case{.widths = {384, 264, 384}, .rows = 9000},
        Case{.widths = {512, 320, 512}, .rows = 9000, .weight_norm = true, .keep = Keep::nothing},
        Case{.widths = {384, 264, 384}, .rows = 9000, .act = act_of<Silu>, .keep = Keep::f32},
        Case{.widths = {64, 128, 64}, .rows = 700, .weight_norm = true, .keep = Keep::nothing}}) {
    if (!taken(c)) continue;
    Problem p(c, GetParam().dtype, GetParam().backward);
    p.fill(7);
    const Problem& start = p;
    const auto before = gradients_now(start);
    p.run(GetParam().forward, GetParam().backward);
    const auto first = bytes_of_outputs(p);
    const gpu::OwnedStream side;
    const gpu::Graph graph(side, [&] {
      cuda::mlp_with(p.forward(), GetParam().forward, side);
      cuda::mlp_backward_with(p.backward(), GetParam().backward, side);
    });
    for (int i = 0; i < 10; ++i) {
      for (size_t l = 0; l < c.depth(); ++l) {
        testing::assign(p.dw[l].host(), before.at("dw" + std::to_string(l)));
        testing::assign(p.db[l].host(), before.at("db" + std::to_string(l)));
        testing::assign(p.dg[l].host(), before.at("dg" + std::to_string(l)));
      }
      p.upload();  // the workspace has the contents of the last run
      graph.launch(side);
      side.synchronize();
      p.download();
      const auto again = bytes_of_outputs(p);
      for (size_t k = 0; k < first.size(); ++k)
        ASSERT_TRUE(again[k] == first[k]) << c << " output " << k << " run " << i;
    }
  }
}

// The order of sums may depend on the number of rows.
void expect_same_sums(const Vector& got, const Vector& want, bool bit_for_bit, const char* what, size_t layer) {
  if (bit_for_bit) {
    EXPECT_EQ(got, want) << what << layer;
    return;
  }
  const Errors e = errors(got, want);
  EXPECT_LE(e.rms, 1e-5 * e.size) << what << layer;
}
TEST_P(MlpCuda, FrozenGradientsStayUntouchedAndTheRemainingGradientsAreUnchanged) {
  for (int64_t width : {64, 200, 328})
    for (Keep keep : {Keep::own_type, Keep::nothing})
      for (bool weight_norm : {false, true}) {
        const Case c{.widths = equal_widths(3, width), .rows = 300, .weight_norm = weight_norm, .keep = keep};
        if (!taken(c)) continue;
        std::vector<Vector> all_trained;
        for (int frozen = 0; frozen < 16; ++frozen) {  // bit l: layer l; bit 3: the input
          SCOPED_TRACE(::testing::Message() << c << ' ' << GetParam() << " frozen " << frozen);
          Problem p(c, GetParam().dtype, GetParam().backward);
          p.fill(3);
          for (size_t l = 0; l < 3; ++l) p.frozen[l] = frozen >> l & 1;
          p.need_dx = !(frozen & 8);
          p.run(GetParam().forward, GetParam().backward);
          expect_only_outputs_written(p);
          const auto now = outputs(p);
          if (frozen == 0) all_trained = now;
          if (p.need_dx) { EXPECT_EQ(now[1], all_trained[1]); }
          const size_t first = now.size() - 9;
          for (size_t l = 0; l < 3; ++l)
            for (size_t k = 0; k < 3; ++k)
              if (!p.frozen[l])
                expect_same_sums(now[first + 3 * l + k], all_trained[first + 3 * l + k], true, "gradient of layer ", l);
          if (HasFailure()) return;
        }
      }
}

TEST_P(MlpCuda, ANanStaysInItsRow) {
  for (size_t width : {64, 256, 328}) {
    const Case c{.widths = equal_widths(3, int64_t(width)), .rows = 130};
    if (!taken(c)) continue;
    Problem p(c, GetParam().dtype, GetParam().backward);
    p.fill(5);
    Vector x = values(p.x.host());
    x[77 * width + 5] = NAN;
    testing::assign(p.x.host(), x);
    p.run(GetParam().forward, GetParam().backward);
    const Vector y = values(p.y.host());
    for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(std::isnan(y[i]), i / width == 77) << i;
  }
}

// Repeating rows, more than all blocks take at once: every tile passes the same weights.
TEST_P(MlpCuda, ARowsResultDoesNotDependOnItsPosition) {
  constexpr int64_t kPeriod = 333, kRows = 27000;
  const auto check = [](size_t depth, int64_t width, bool weight_norm) {
    const Case c{.widths = equal_widths(depth, width),
                 .rows = kRows,
                 .bias = depth % 2 == 1,
                 .weight_norm = weight_norm,
                 .keep = depth % 4 == 0 ? Keep::own_type : Keep::nothing};
    if (!taken(c)) return;
    SCOPED_TRACE(::testing::Message() << c << ' ' << GetParam());
    Problem p(c, GetParam().dtype, MlpForm::portable);
    p.fill(17);
    const int64_t row_bytes = width * size_of(GetParam().dtype);
    const auto row = [&](const Tensor& t, int64_t r) { return static_cast<char*>(t.data) + r * row_bytes; };
    const Tensor x = p.x.host();
    for (int64_t r = kPeriod; r < kRows; ++r) std::memcpy(row(x, r), row(x, r - kPeriod), size_t(row_bytes));
    p.upload();
    cuda::mlp_with(p.forward(), GetParam().forward, {});
    p.download();
    const Tensor y = p.y.host();
    for (double v : values(y.slice(0, 0, kPeriod))) ASSERT_FALSE(std::isnan(v));
    for (int64_t r = kPeriod; r < kRows; ++r)
      ASSERT_EQ(std::memcmp(row(y, r), row(y, r - kPeriod), size_t(row_bytes)), 0) << "row " << r;
  };
  for (bool weight_norm : {false, true}) {
    for (size_t depth : {2, 5, 7, 8}) check(depth, 128, weight_norm);
    for (size_t depth : {3, 8}) check(depth, 256, weight_norm);
    for (size_t depth : {3, 4}) check(depth, 512, weight_norm);
    for (int64_t width : {264, 384}) check(3, width, weight_norm);
  }
}

// Different numbers of rows use different numbers of warpgroups, and of blocks per row; the rows are copies of a few
// rows.
TEST_P(MlpCuda, ARowsResultIsTheSameInABatchOfAnySize) {
  struct Sizes {
    int64_t width = 0, some = 0, copies = 0;
  };
  const std::map<MlpForm, Sizes> of_form = {
      {MlpForm::portable, {200, 100, 400}}, {MlpForm::to_128_few_rows, {128, 100, 40}},
      {MlpForm::to_128, {128, 2100, 128}},  {MlpForm::to_256, {256, 2100, 40}},
      {MlpForm::to_512, {512, 2100, 20}},   {MlpForm::to_512_few_rows, {512, 200, 20}}};
  const auto [width, some, copies] = of_form.at(GetParam().forward);
  const DType t = GetParam().dtype;
  constexpr size_t kDepths[] = {1, 2, 5};
  for (int k = 0; k < 6; ++k) {
    const Case c{.widths = equal_widths(kDepths[k % 3], width),
                 .rows = some,
                 .bias = false,
                 .weight_norm = k >= 3,
                 .keep = Keep::nothing};
    SCOPED_TRACE(::testing::Message() << c << ' ' << GetParam());
    Problem p(c, t, MlpForm::portable);
    p.fill(19);
    p.upload();
    cuda::mlp_with(p.forward(), GetParam().forward, {});
    p.download();
    const Tensor alone = p.y.host();
    const int64_t bytes = alone.bytes();
    gpu::DeviceMemory x(copies * bytes), y(copies * bytes);
    for (int64_t i = 0; i < copies; ++i)
      gpu::copy_to_device(static_cast<char*>(x.data()) + i * bytes, p.x.host().data, bytes);
    Buffer copy(t, {some, width});
    for (int64_t of : {int64_t(5), copies / 8, copies / 3, copies}) {
      Mlp many = p.forward();
      const Shape all{of * some, width};
      many.x = Tensor(x.data(), t, all, {Device::cuda, 0}), many.y = Tensor(y.data(), t, all, {Device::cuda, 0});
      cuda::mlp_with(many, GetParam().forward, {});
      for (int64_t i = 0; i < of; ++i) {
        gpu::copy_to_host(copy.tensor().data, static_cast<const char*>(y.data()) + i * bytes, bytes);
        ASSERT_EQ(std::memcmp(copy.tensor().data, alone.data, size_t(bytes)), 0) << i << " of " << of;
      }
    }
  }
}

TEST_P(MlpCuda, AcceptsNoRows) {
  const Case c{.widths = equal_widths(3, 64), .rows = 0};
  Problem p(c, GetParam().dtype, MlpForm::portable);
  p.upload();
  EXPECT_NO_THROW(mlp(p.forward(), {}));
  const int64_t bytes = mlp_backward_workspace_bytes(p.backward());
  DeviceBuffer workspace(DType::u8, {bytes});
  MlpBackward b = p.backward();
  b.workspace = workspace;
  EXPECT_NO_THROW(mlp_backward(b, {}));
  p.download();
  for (size_t l = 0; l < 3; ++l) EXPECT_TRUE(p.dw[l].untouched(true));
}

// A batch of sequences equals its rows: every form, as chosen by the entry points.
TEST_P(MlpCuda, TakesLeadingDimensionsAsRows) {
  for (int64_t rows : {90, 9000}) {
    const Case c{.widths = {128, 64, 8}, .rows = rows};
    Problem p(c, GetParam().dtype, MlpForm::portable);
    const auto run = [&](bool in_two) {
      p.fill(19);
      DeviceBuffer workspace(DType::u8, {mlp_backward_workspace_bytes(p.backward())});
      Mlp f = p.forward();
      MlpBackward b = p.backward();
      b.workspace = workspace;
      if (in_two)
        for (Tensor* t : {&f.x, &f.y, &b.dy, &b.x, &b.dx}) *t = t->reshape({2, rows / 2, t->cols()});
      p.upload();
      workspace.upload();
      mlp(f, {});
      mlp_backward(b, {});
      p.download();
      return outputs(p);
    };
    const auto want = run(false), got = run(true);
    for (size_t k = 0; k < want.size(); ++k) EXPECT_EQ(got[k], want[k]) << c << " output " << k;
  }
}

TEST_P(MlpCuda, TheEntryPointsChooseAFormThatAgrees) {
  for (const Case& c : {Case{.widths = equal_widths(3, 128), .rows = 100}, Case{.widths = {128, 64, 8}, .rows = 9000},
                        Case{.widths = {64, 256, 200}, .rows = 9000}, Case{.widths = {64, 256, 200}, .rows = 300},
                        Case{.widths = {64, 512, 264}, .rows = 2000}}) {
    Problem p(c, GetParam().dtype, MlpForm::portable);
    p.fill(11);
    const auto before = gradients_now(p);
    const Chain want(p, DType::f64);
    DeviceBuffer workspace(DType::u8, {mlp_backward_workspace_bytes(p.backward())});
    p.upload();
    workspace.upload();
    MlpBackward b = p.backward();
    b.workspace = workspace;
    mlp(p.forward(), {});
    mlp_backward(b, {});
    p.download();
    workspace.download();
    EXPECT_TRUE(workspace.untouched());
    SCOPED_TRACE(::testing::Message() << c);
    compare_all(p, want, Chain(p, GetParam().dtype), before);
  }
}

// All work on a stream: launches, copies, fills.
size_t nodes_of(const std::function<void(Stream)>& work) {
  const gpu::OwnedStream side;
  const auto stream = static_cast<cudaStream_t>(Stream(side).handle);
  cudaGraph_t graph = nullptr;
  size_t n = 0;
  gpu::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  work(side);
  gpu::check_cuda(cudaStreamEndCapture(stream, &graph), "end of capture");
  gpu::check_cuda(cudaGraphGetNodes(graph, nullptr, &n), "nodes");
  gpu::check_cuda(cudaGraphDestroy(graph), "graph");
  return n;
}
// Beyond 128 columns, and in the backward forms for these widths, an additional launch where W of a weight norm is
// formed first; backward a further launch where values or slopes are formed first.
TEST_P(MlpCuda, IsOneLaunchForwardAndTwoBackward) {
  for (int64_t rows : {1, 100, 2000, 3000, 20000})
    for (Keep keep : {Keep::own_type, Keep::nothing, Keep::f32})
      for (int64_t width : {64, 128, 256, 512}) {
        const Case c{.widths = equal_widths(3, width),
                     .rows = rows,
                     .act = rows == 3000 ? act_of<Gelu> : act_of<Softplus>,
                     .weight_norm = rows != 100 && rows != 2000,
                     .keep = keep};
        if (!taken(c)) continue;
        SCOPED_TRACE(::testing::Message() << c);
        Problem p(c, GetParam().dtype, GetParam().backward);
        const MlpForm backward = GetParam().backward;
        const bool streams = backward == MlpForm::to_256 || backward == MlpForm::to_512;
        const size_t norm = c.weight_norm && (width > 128 || streams),
                     values = keep != Keep::own_type || c.act == act_of<Gelu>;
        EXPECT_LE(nodes_of([&](Stream s) { cuda::mlp_with(p.forward(), GetParam().forward, s); }), 1 + norm);
        EXPECT_LE(nodes_of([&](Stream s) { cuda::mlp_backward_with(p.backward(), backward, s); }), 2 + values + norm);
      }
}

// The last rows of a batch of more than 2^31 elements, everything before them zero, beside a batch of these rows alone.
TEST_P(MlpCuda, AddressesMoreThanTwoToThe31Elements) {
  const DType t = GetParam().dtype;
  if (t != DType::f16 || gpu::device_info().memory_bytes < (int64_t(60) << 30)) GTEST_SKIP();
  constexpr int64_t kTail = 168;
  Case c{.rows = kTail, .bias = false};
  for (int64_t width : {128, 256, 512}) {
    c.widths = equal_widths(3, width);
    if (taken(c)) break;
  }
  if (!taken(c)) GTEST_SKIP();
  const int64_t width = c.widths[0], all_rows = (int64_t(1) << 31) / width + 40;  // the tail begins a tile in both
  Problem p(c, t, GetParam().backward);
  p.fill(13);
  p.run(GetParam().forward, GetParam().backward);
  const auto alone = outputs(p);
  p.fill(13);
  p.upload();

  const int64_t tail_at = (all_rows - kTail) * width * size_of(t), tail_bytes = kTail * width * size_of(t);
  std::deque<gpu::DeviceMemory> memory;
  const auto zeros = [&](DType type, Shape shape) {
    memory.emplace_back(shape.numel() * size_of(type));
    gpu::fill_bytes(memory.back().data(), 0, memory.back().bytes(), {});
    return Tensor(memory.back().data(), type, shape, Device{Device::cuda, 0});
  };
  Mlp f = p.forward();
  MlpBackward b = p.backward();
  f.x = b.x = zeros(t, {all_rows, width}), f.y = zeros(t, {all_rows, width});
  b.dy = zeros(t, {all_rows, width}), b.dx = zeros(t, {all_rows, width});
  f.saved = b.saved = zeros(t, {mlp_saved_elements(all_rows, f.layers, false)});
  b.workspace = zeros(DType::u8, {cuda::mlp_backward_workspace_bytes_with(b, GetParam().backward)});
  gpu::synchronize();
  gpu::copy_to_device(static_cast<char*>(f.x.data) + tail_at, p.x.host().data, tail_bytes);
  gpu::copy_to_device(static_cast<char*>(b.dy.data) + tail_at, p.dy.host().data, tail_bytes);
  cuda::mlp_with(f, GetParam().forward, {});
  cuda::mlp_backward_with(b, GetParam().backward, {});
  p.download();
  const auto tail_of = [&](const Tensor& of) {
    Buffer tail(t, {kTail, width});
    gpu::copy_to_host(tail.tensor().data, static_cast<const char*>(of.data) + tail_at, tail_bytes);
    return values(tail);
  };
  EXPECT_EQ(tail_of(f.y), alone[0]);
  EXPECT_EQ(tail_of(b.dx), alone[1]);
  for (size_t l = 0; l < 3; ++l) { expect_same_sums(values(p.dw[l].host()), alone[3 + 3 * l], false, "dw", l); }
}

TEST(MlpCudaForms, AreChosenByShapesTypesAndGenerationAlone) {
  const Device device{Device::cuda, 0};
  const gpu::Limits hopper = gpu::limits_of("9.0"), ampere = gpu::limits_of("8.0");
  const auto problem = [&](DType t, int64_t rows, int64_t width) {
    return Mlp{.x = Tensor(nullptr, t, {rows, width}, device),
               .y = Tensor(nullptr, t, {rows, width}, device),
               .layers = {{.w = Tensor(nullptr, t, {width, width}, device)}}};
  };
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f32, 100000, 128), hopper), MlpForm::portable);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 100000, 256), hopper), MlpForm::to_256);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::bf16, 100000, 136), hopper), MlpForm::to_256);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 100000, 264), hopper), MlpForm::to_512);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::bf16, 4225, 512), hopper), MlpForm::to_512);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::bf16, 4224, 512), hopper), MlpForm::to_512_few_rows);
  gpu::Limits of_a_card = hopper;
  of_a_card.sms = 114;
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::bf16, 3649, 512), of_a_card), MlpForm::to_512);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::bf16, 3648, 512), of_a_card), MlpForm::to_512_few_rows);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::bf16, 1000, 512), ampere), MlpForm::portable);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 100000, 256), gpu::limits_of("10.0")), MlpForm::portable);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::bf16, 100000, 128), hopper), MlpForm::to_128);
  EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 500, 64), hopper), MlpForm::to_128_few_rows);
  const auto backward = [&](int64_t rows, int64_t width, DType saved) {
    const Mlp m = problem(DType::bf16, rows, width);
    return MlpBackward{.dy = m.y,
                       .x = m.x,
                       .layers = {m.layers[0], m.layers[0]},
                       .grads = {MlpLayer{}, MlpLayer{}},
                       .act = act_of<Softplus>,
                       .saved = Tensor(nullptr, saved, {rows * width}, device)};
  };
  EXPECT_EQ(cuda::pick_mlp_form(backward(8192, 128, DType::bf16), hopper), MlpForm::to_128_few_rows);
  EXPECT_EQ(cuda::pick_mlp_form(backward(8193, 128, DType::bf16), hopper), MlpForm::to_128);
  for (DType saved : {DType::bf16, DType::f32}) {
    for (int64_t width : {136, 256}) {
      EXPECT_EQ(cuda::pick_mlp_form(backward(1, width, saved), hopper), MlpForm::to_512_few_rows);
      EXPECT_EQ(cuda::pick_mlp_form(backward(2048, width, saved), hopper), MlpForm::to_512_few_rows);
      EXPECT_EQ(cuda::pick_mlp_form(backward(2049, width, saved), hopper), MlpForm::to_256);
    }
    for (int64_t width : {264, 512}) {
      EXPECT_EQ(cuda::pick_mlp_form(backward(1, width, saved), hopper), MlpForm::to_512_few_rows);
      EXPECT_EQ(cuda::pick_mlp_form(backward(4096, width, saved), hopper), MlpForm::to_512_few_rows);
      EXPECT_EQ(cuda::pick_mlp_form(backward(4097, width, saved), hopper), MlpForm::to_512);
    }
  }
  for (int64_t width : {256, 512}) {
    const MlpForm many_rows = width == 256 ? MlpForm::to_256 : MlpForm::to_512;
    MlpBackward of_gelu = backward(1535, width, DType::bf16);
    of_gelu.act = act_of<Gelu>;
    EXPECT_EQ(cuda::pick_mlp_form(of_gelu, hopper), MlpForm::to_512_few_rows);
    of_gelu.saved = {};
    EXPECT_EQ(cuda::pick_mlp_form(of_gelu, hopper), MlpForm::portable);
    of_gelu.act = act_of<Softplus>;
    EXPECT_EQ(cuda::pick_mlp_form(of_gelu, hopper), MlpForm::to_512_few_rows);
    MlpBackward normed = backward(1, width, DType::bf16);
    normed.layers[1].g = normed.layers[1].w;
    EXPECT_EQ(cuda::pick_mlp_form(normed, hopper), many_rows);
  }
  EXPECT_EQ(cuda::pick_mlp_form(backward(100, 128, DType::bf16), ampere), MlpForm::portable);
  for (const char* other : {"8.0", "8.6", "8.9", "10.0", "12.0"})
    EXPECT_EQ(cuda::pick_mlp_form(problem(DType::f16, 1000, 64), gpu::limits_of(other)), MlpForm::portable) << other;
  try {
    cuda::pick_mlp_form(problem(DType::f16, 1000, 64), {.capability = 75, .hopper = false});
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::unsupported);
    EXPECT_STREQ(e.what(), "mlp: found a GPU of compute capability 7.5, expected 8.0 or later");
  }
}

TEST(MlpCudaForms, APassHasTheFewestColumnsWithWhichTwoPassesSuffice) {
  EXPECT_EQ(cuda::mlp_to_512_pass(264), 160);
  EXPECT_EQ(cuda::mlp_to_512_pass(320), 160);
  EXPECT_EQ(cuda::mlp_to_512_pass(328), 192);
  EXPECT_EQ(cuda::mlp_to_512_pass(384), 192);
  EXPECT_EQ(cuda::mlp_to_512_pass(392), 224);
  EXPECT_EQ(cuda::mlp_to_512_pass(448), 224);
  EXPECT_EQ(cuda::mlp_to_512_pass(456), 256);
  EXPECT_EQ(cuda::mlp_to_512_pass(512), 256);
}

TEST(MlpCudaForms, ClustersOfFewRowsAllRunAtOnce) {
  EXPECT_EQ(cuda::mlp_to_512_cluster(1, 132), 8);
  EXPECT_EQ(cuda::mlp_to_512_cluster(256, 132), 8);
  EXPECT_EQ(cuda::mlp_to_512_cluster(257, 132), 4);
  EXPECT_EQ(cuda::mlp_to_512_cluster(1920, 132), 4);
  EXPECT_EQ(cuda::mlp_to_512_cluster(100000, 132), 2);
  EXPECT_EQ(cuda::mlp_to_512_cluster(1921, 132), 2);
  EXPECT_EQ(cuda::mlp_to_512_cluster(256, 114), 4);
}

constexpr MlpForm kPortable = MlpForm::portable, kFew = MlpForm::to_128_few_rows, kTo128 = MlpForm::to_128,
                  kTo256 = MlpForm::to_256, kTo512 = MlpForm::to_512, kTo512Few = MlpForm::to_512_few_rows;
INSTANTIATE_TEST_SUITE_P(, MlpCuda,
                         ::testing::Values(Forms{"portable_f16", kPortable, kPortable, DType::f16},
                                           Forms{"portable_bf16", kPortable, kPortable, DType::bf16},
                                           Forms{"portable_f32", kPortable, kPortable, DType::f32},
                                           Forms{"few_rows_f16", kFew, kPortable, DType::f16},
                                           Forms{"few_rows_bf16", kFew, kPortable, DType::bf16},
                                           Forms{"to_128_forward_f16", kTo128, kPortable, DType::f16},
                                           Forms{"to_128_forward_bf16", kTo128, kPortable, DType::bf16},
                                           Forms{"to_256_forward_f16", kTo256, kPortable, DType::f16},
                                           Forms{"to_256_forward_bf16", kTo256, kPortable, DType::bf16},
                                           Forms{"to_512_forward_f16", kTo512, kPortable, DType::f16},
                                           Forms{"to_512_forward_bf16", kTo512, kPortable, DType::bf16},
                                           Forms{"to_512_few_rows_f16", kTo512Few, kTo512Few, DType::f16},
                                           Forms{"to_512_few_rows_bf16", kTo512Few, kTo512Few, DType::bf16},
                                           Forms{"few_rows_backward_f16", kPortable, kFew, DType::f16},
                                           Forms{"few_rows_backward_bf16", kPortable, kFew, DType::bf16},
                                           Forms{"to_128_backward_f16", kPortable, kTo128, DType::f16},
                                           Forms{"to_128_backward_bf16", kPortable, kTo128, DType::bf16},
                                           Forms{"to_256_backward_f16", kPortable, kTo256, DType::f16},
                                           Forms{"to_256_backward_bf16", kPortable, kTo256, DType::bf16},
                                           Forms{"to_512_backward_f16", kPortable, kTo512, DType::f16},
                                           Forms{"to_512_backward_bf16", kPortable, kTo512, DType::bf16}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace ingot
#endif
