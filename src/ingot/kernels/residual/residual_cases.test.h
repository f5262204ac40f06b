#pragma once
// The ops of residual streams as cases: a test of any backend runs all cases, and compares with the CPU in fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/lane_write/lane_write.h"
#include "ingot/kernels/mix/mix.h"
#include "ingot/kernels/scaled_add/scaled_add.h"
#include "ingot/kernels/skip_merge/skip_merge.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::residual_cases {

struct Size {
  int64_t rows, cols, gap;
};
// tails, rows apart, several blocks of rows, more than a chunk of columns
const Size kSizes[] = {{0, 5, 0}, {1, 1, 0}, {1, 7, 2}, {5, 8, 0}, {3, 67, 1}, {300, 130, 3}, {2100, 9, 0}};

// A call's tensors in the order of the op's case: read, accumulated, written.
struct Views {
  std::vector<Tensor> inputs, sums, outputs;
  Tensor workspace;
};
struct OpCase {
  const char* name;
  std::string inputs, sums, outputs;  // a letter per operand: m matrix, c channels, 2 a pair, 4 two by two
  std::function<void(const Views&)> call;
};

// The public functions of the ops.
struct PublicOps {
  static void axpby(const Axpby& a, Stream s) { ingot::axpby(a, s); }
  static void mix(const Mix& a, Stream s) { ingot::mix(a, s); }
  static void mix_backward(const MixBackward& a, Stream s) { ingot::mix_backward(a, s); }
  static void scaled_add(const ScaledAdd& a, Stream s) { ingot::scaled_add(a, s); }
  static void scaled_add_backward(const ScaledAddBackward& a, Stream s) { ingot::scaled_add_backward(a, s); }
  static void skip_merge(const SkipMerge& a, Stream s) { ingot::skip_merge(a, s); }
  static void skip_merge_backward(const SkipMergeBackward& a, Stream s) { ingot::skip_merge_backward(a, s); }
  static void lane_write(const LaneWrite& a, Stream s) { ingot::lane_write(a, s); }
  static void lane_write_backward(const LaneWriteBackward& a, Stream s) { ingot::lane_write_backward(a, s); }
};

template <class Ops = PublicOps> std::vector<OpCase> forward_cases() {
  return {
      {"mix", "mmcc", "", "m",
       [](const Views& o) {
         Ops::mix({.x = o.inputs[0], .x0 = o.inputs[1], .a = o.inputs[2], .b = o.inputs[3], .y = o.outputs[0]}, {});
       }},
      {"scaled_add", "mmc", "", "m",
       [](const Views& o) {
         Ops::scaled_add({.x = o.inputs[0], .branch = o.inputs[1], .scale = o.inputs[2], .y = o.outputs[0]}, {});
       }},
      {"scaled_add without a scale", "mm", "", "m",
       [](const Views& o) { Ops::scaled_add({.x = o.inputs[0], .branch = o.inputs[1], .y = o.outputs[0]}, {}); }},
      {"skip_merge", "mmcc", "", "m",
       [](const Views& o) {
         Ops::skip_merge(
             {.x = o.inputs[0], .skip = o.inputs[1], .w = o.inputs[2], .gate = o.inputs[3], .y = o.outputs[0]}, {});
       }},
      {"skip_merge without a gate", "mmc", "", "m",
       [](const Views& o) {
         Ops::skip_merge({.x = o.inputs[0], .skip = o.inputs[1], .w = o.inputs[2], .y = o.outputs[0]}, {});
       }},
      {"lane_write", "mmmmcc24", "", "mm",
       [](const Views& o) {
         Ops::lane_write({.lane0 = o.inputs[0],
                          .lane1 = o.inputs[1],
                          .a = o.inputs[2],
                          .b = o.inputs[3],
                          .scale_a = o.inputs[4],
                          .scale_b = o.inputs[5],
                          .r = o.inputs[6],
                          .p = o.inputs[7],
                          .out0 = o.outputs[0],
                          .out1 = o.outputs[1]},
                         {});
       }},
      {"lane_write without scales", "mmmm24", "", "mm",
       [](const Views& o) {
         Ops::lane_write({.lane0 = o.inputs[0],
                          .lane1 = o.inputs[1],
                          .a = o.inputs[2],
                          .b = o.inputs[3],
                          .r = o.inputs[4],
                          .p = o.inputs[5],
                          .out0 = o.outputs[0],
                          .out1 = o.outputs[1]},
                         {});
       }},
      {"axpby", "m", "m", "",
       [](const Views& o) { Ops::axpby({.x = o.inputs[0], .y = o.sums[0], .alpha = 0.3, .beta = -2}, {}); }},
  };
}

// The inputs are the forward's, then the gradients of its outputs. Where `sums` and `outputs` hold each input's
// gradient.
struct BackwardCase {
  OpCase op;
  int forward;                             // in forward_cases()
  std::vector<std::pair<int, int>> grads;  // (input, gradient): gradient i of sums, then of outputs
};
// With all inputs and no sums over tokens.
inline SkipMergeBackward skip_merge_backward_of(const Views& o) {
  return {.x = o.inputs[0],
          .skip = o.inputs[1],
          .w = o.inputs[2],
          .gate = o.inputs[3],
          .dy = o.inputs[4],
          .dx = o.outputs[0],
          .workspace = o.workspace};
}
inline LaneWriteBackward lane_write_backward_of(const Views& o) {
  return {.lane0 = o.inputs[0],
          .lane1 = o.inputs[1],
          .a = o.inputs[2],
          .b = o.inputs[3],
          .scale_a = o.inputs[4],
          .scale_b = o.inputs[5],
          .r = o.inputs[6],
          .p = o.inputs[7],
          .dout0 = o.inputs[8],
          .dout1 = o.inputs[9],
          .dlane0 = o.outputs[0],
          .dlane1 = o.outputs[1],
          .da = o.outputs[2],
          .db = o.outputs[3],
          .workspace = o.workspace};
}

template <class Ops = PublicOps> std::vector<BackwardCase> backward_cases() {
  return {
      {{"mix_backward", "mmccm", "mcc", "m",
        [](const Views& o) {
          Ops::mix_backward({.x = o.inputs[0],
                             .x0 = o.inputs[1],
                             .a = o.inputs[2],
                             .b = o.inputs[3],
                             .dy = o.inputs[4],
                             .dx = o.outputs[0],
                             .dx0 = o.sums[0],
                             .da = o.sums[1],
                             .db = o.sums[2],
                             .workspace = o.workspace},
                            {});
        }},
       0,
       {{0, 3}, {1, 0}, {2, 1}, {3, 2}}},
      {{"scaled_add_backward", "mmcm", "c", "m",
        [](const Views& o) {
          Ops::scaled_add_backward({.dy = o.inputs[3],
                                    .branch = o.inputs[1],
                                    .scale = o.inputs[2],
                                    .dbranch = o.outputs[0],
                                    .dscale = o.sums[0],
                                    .workspace = o.workspace},
                                   {});
        }},
       1,
       {{1, 1}, {2, 0}}},
      {{"scaled_add_backward without a scale", "mmm", "", "m",
        [](const Views& o) {
          Ops::scaled_add_backward(
              {.dy = o.inputs[2], .branch = o.inputs[1], .dbranch = o.outputs[0], .workspace = o.workspace}, {});
        }},
       2,
       {{1, 0}}},
      {{"skip_merge_backward", "mmccm", "mcc", "m",
        [](const Views& o) {
          SkipMergeBackward b = skip_merge_backward_of(o);
          b.dskip = o.sums[0], b.dw = o.sums[1], b.dgate = o.sums[2];
          Ops::skip_merge_backward(b, {});
        }},
       3,
       {{0, 3}, {1, 0}, {2, 1}, {3, 2}}},
      {{"skip_merge_backward without a gate", "mmcm", "mc", "m",
        [](const Views& o) {
          Ops::skip_merge_backward({.x = o.inputs[0],
                                    .skip = o.inputs[1],
                                    .w = o.inputs[2],
                                    .dy = o.inputs[3],
                                    .dx = o.outputs[0],
                                    .dskip = o.sums[0],
                                    .dw = o.sums[1],
                                    .workspace = o.workspace},
                                   {});
        }},
       4,
       {{0, 2}, {1, 0}, {2, 1}}},
      {{"lane_write_backward", "mmmmcc24mm", "cc24", "mmmm",
        [](const Views& o) {
          LaneWriteBackward b = lane_write_backward_of(o);
          b.dscale_a = o.sums[0], b.dscale_b = o.sums[1], b.dr = o.sums[2], b.dp = o.sums[3];
          Ops::lane_write_backward(b, {});
        }},
       5,
       {{0, 4}, {1, 5}, {2, 6}, {3, 7}, {4, 0}, {5, 1}, {6, 2}, {7, 3}}},
      {{"lane_write_backward without scales", "mmmm24mm", "24", "mmmm",
        [](const Views& o) {
          Ops::lane_write_backward({.lane0 = o.inputs[0],
                                    .lane1 = o.inputs[1],
                                    .a = o.inputs[2],
                                    .b = o.inputs[3],
                                    .r = o.inputs[4],
                                    .p = o.inputs[5],
                                    .dout0 = o.inputs[6],
                                    .dout1 = o.inputs[7],
                                    .dlane0 = o.outputs[0],
                                    .dlane1 = o.outputs[1],
                                    .da = o.outputs[2],
                                    .db = o.outputs[3],
                                    .dr = o.sums[0],
                                    .dp = o.sums[1],
                                    .workspace = o.workspace},
                                   {});
        }},
       6,
       {{0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 0}, {5, 1}}},
      {{"skip_merge_backward of frozen factors", "mmccm", "m", "m",
        [](const Views& o) {
          SkipMergeBackward b = skip_merge_backward_of(o);
          b.dskip = o.sums[0];
          Ops::skip_merge_backward(b, {});
        }},
       3,
       {{0, 1}, {1, 0}}},
      {{"lane_write_backward of frozen factors", "mmmmcc24mm", "", "mmmm",
        [](const Views& o) { Ops::lane_write_backward(lane_write_backward_of(o), {}); }},
       5,
       {{0, 0}, {1, 1}, {2, 2}, {3, 3}}},
      {{"skip_merge_backward that writes", "mmccm", "cc", "mm",
        [](const Views& o) {
          SkipMergeBackward b = skip_merge_backward_of(o);
          b.dskip = o.outputs[1], b.dw = o.sums[0], b.dgate = o.sums[1], b.write_dskip = true;
          Ops::skip_merge_backward(b, {});
        }},
       3,
       {{0, 2}, {1, 3}, {2, 0}, {3, 1}}},
  };
}

// --- another backend beside the CPU in fp64

template <class B> struct DeviceOperands {
  std::vector<B> inputs, sums, outputs;
  std::vector<B> workspace;
};
inline Shape shape_of(char kind, const Size& s) {
  return kind == 'm' ? Shape{s.rows, s.cols} : kind == 'c' ? Shape{s.cols} : kind == '2' ? Shape{2} : Shape{2, 2};
}
template <class B> B make_on_device(char kind, DType matrices, const Size& s, int64_t extra) {
  const Shape shape = shape_of(kind, s);
  return kind == 'm' ? B(matrices, shape, s.cols + s.gap * extra) : B(DType::f32, shape);
}

// Runs a case on matrices of `type` through buffers B and compares with PublicOps on the CPU in fp64.
template <class B> void expect_agrees(const OpCase& device, const OpCase& host, DType type, const Size& s) {
  SCOPED_TRACE(::testing::Message() << device.name << ' ' << type << ' ' << s.rows << " x " << s.cols);
  DeviceOperands<B> o;
  std::vector<testing::Buffer> exact;  // inputs, sums, outputs
  uint64_t seed = 1;
  const auto add = [&](std::vector<B>& to, const std::string& kinds, int64_t extra, bool filled) {
    for (char k : kinds) {
      B& b = to.emplace_back(make_on_device<B>(k, type, s, extra));
      testing::Buffer& e = exact.emplace_back(DType::f64, shape_of(k, s));
      if (filled)
        testing::fill_normal(testing::host_of(b), seed++), testing::assign(e, testing::values(testing::host_of(b)));
      testing::send(b);
    }
  };
  add(o.inputs, device.inputs, 1, true), add(o.sums, device.sums, 2, true), add(o.outputs, device.outputs, 3, false);
  const int64_t bytes = residual_workspace_bytes(s.rows, s.cols, {Device::cuda, 0});
  o.workspace.emplace_back(DType::u8, Shape{bytes});
  const Views there{{o.inputs.begin(), o.inputs.end()},
                    {o.sums.begin(), o.sums.end()},
                    {o.outputs.begin(), o.outputs.end()},
                    o.workspace[0]};
  const auto first = exact.begin(), second = first + int64_t(o.inputs.size()), third = second + int64_t(o.sums.size());
  device.call(there);
  host.call({{first, second}, {second, third}, {third, exact.end()}, {}});
  // Up to eight fp32 roundings of sums of three products of three factors below 5, then a rounding to the type; sums
  // over tokens are random walks of terms of size 2, in fp32 within a block's rows.
  const double unit = testing::roundoff(DType::f32), stored = type == DType::f32 ? 4 * unit : testing::roundoff(type);
  const auto check = [&](B& got, const testing::Buffer& want, double absolute, double relative) {
    testing::expect_close(got, testing::values(want), absolute, relative);
  };
  for (size_t i = 0; i < o.sums.size(); ++i) {
    const char kind = device.sums[i];
    const double terms = kind == 'm' ? 1 : kind == 'c' ? double(s.rows) : double(s.rows * s.cols);
    check(o.sums[i], second[int64_t(i)], kind == 'm' ? 200 * unit : (20 + 30 * std::sqrt(terms)) * 4 * unit,
          kind == 'm' ? stored : 4 * unit);
  }
  for (size_t i = 0; i < o.outputs.size(); ++i) check(o.outputs[i], third[int64_t(i)], 200 * unit, stored * 1.01);
}

}  // namespace ingot::residual_cases
