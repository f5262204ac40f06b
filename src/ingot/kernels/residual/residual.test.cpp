#include <gtest/gtest.h>

#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/residual/residual_cases.test.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::values;

using namespace residual_cases;

// The tensors of a call in the order of the op's case.
struct Operands {
  std::vector<Buffer> inputs;   // read
  std::vector<Buffer> sums;     // accumulated
  std::vector<Buffer> outputs;  // written
};
Views views_of(const Operands& o) {
  return {{o.inputs.begin(), o.inputs.end()}, {o.sums.begin(), o.sums.end()}, {o.outputs.begin(), o.outputs.end()}, {}};
}
void run(const OpCase& c, const Operands& o) { c.call(views_of(o)); }

Buffer make(char kind, DType dtype, const Size& s, int64_t extra) {
  switch (kind) {
    case 'm': return Buffer(dtype, {s.rows, s.cols}, s.cols + s.gap * extra);
    case 'c': return Buffer(dtype, {s.cols});
    case '2': return Buffer(dtype, {2});
    default: return Buffer(dtype, {2, 2});
  }
}
Operands make(const OpCase& c, DType dtype, const Size& s) {
  Operands o;
  uint64_t seed = 1;
  for (char k : c.inputs) testing::fill_normal(o.inputs.emplace_back(make(k, dtype, s, 1)), seed++);
  for (char k : c.sums) testing::fill_normal(o.sums.emplace_back(make(k, dtype, s, 2)), seed++);
  for (char k : c.outputs) o.outputs.emplace_back(make(k, dtype, s, 3));
  return o;
}

const std::vector<OpCase> kForward = forward_cases();
const std::vector<BackwardCase> kBackward = backward_cases();

template <class Use> void for_each_op(Use&& use) {
  for (const OpCase& c : kForward) use(c);
  for (const BackwardCase& b : kBackward) use(b.op);
}

// The formulas of the headers, element by element.
TEST(Residual, ForwardsFollowTheirFormulas) {
  const Size s{6, 11, 2};
  const auto each = [&](int op, auto&& formula) {
    const Operands o = make(kForward[op], DType::f64, s);
    std::vector<std::vector<double>> in;
    for (const Buffer& b : o.inputs) in.push_back(values(b));
    run(kForward[op], o);
    std::vector<std::vector<double>> want(o.outputs.size());
    for (size_t i = 0; i < size_t(s.rows * s.cols); ++i) {
      const auto y = formula(in, i, i % size_t(s.cols));
      for (size_t k = 0; k < want.size(); ++k) want[k].push_back(y[k]);
    }
    for (size_t k = 0; k < want.size(); ++k) {
      const auto r =
          testing::compare(o.outputs[k], want[k], 1e-14, 1e-14);  // a few fp64 roundings of numbers of size 10
      EXPECT_TRUE(r.ok) << kForward[op].name << ": " << r.message;
    }
  };
  using In = const std::vector<std::vector<double>>&;
  using Out = std::vector<double>;
  const auto gate = [](double x) { return 1 / (1 + std::exp(-x)); };
  each(0, [](In v, size_t i, size_t c) { return Out{v[2][c] * v[0][i] + v[3][c] * v[1][i]}; });
  each(1, [](In v, size_t i, size_t c) { return Out{v[0][i] + v[2][c] * v[1][i]}; });
  each(2, [](In v, size_t i, size_t) { return Out{v[0][i] + v[1][i]}; });
  each(3, [&](In v, size_t i, size_t c) {
    const double a = v[2][c] * v[1][i];
    return Out{a + gate(v[3][c]) * (v[0][i] - a)};
  });
  each(4, [](In v, size_t i, size_t c) { return Out{v[0][i] + v[2][c] * v[1][i]}; });
  each(5, [](In v, size_t i, size_t c) {
    const double a = v[4][c] * v[2][i], b = v[5][c] * v[3][i];
    return Out{v[6][0] * v[0][i] + v[7][0] * a + v[7][2] * b, v[6][1] * v[1][i] + v[7][1] * a + v[7][3] * b};
  });
  each(6, [](In v, size_t i, size_t) {
    return Out{v[4][0] * v[0][i] + v[5][0] * v[2][i] + v[5][2] * v[3][i],
               v[4][1] * v[1][i] + v[5][1] * v[2][i] + v[5][3] * v[3][i]};
  });
}

TEST(Residual, GradientsAreTheDerivativesOfForwards) {
  for (const BackwardCase& b : kBackward)
    for (const Size& s : {Size{1, 1, 0}, Size{7, 13, 2}, Size{2100, 9, 0}}) {
      const OpCase& forward = kForward[b.forward];
      Operands o = make(b.op, DType::f64, s);
      for (const Buffer& sum : o.sums) fill_zero(sum);
      run(b.op, o);
      for (auto [input, grad] : b.grads) {
        const Buffer& gradient =
            grad < int(o.sums.size()) ? o.sums[size_t(grad)] : o.outputs[size_t(grad) - o.sums.size()];
        const Operands moved = make(forward, DType::f64, s);
        for (size_t i = 0; i < forward.inputs.size(); ++i) testing::assign(moved.inputs[i], values(o.inputs[i]));
        const auto f = [&] {
          run(forward, moved);
          double sum = 0;
          for (size_t k = 0; k < moved.outputs.size(); ++k)
            sum += testing::dot(moved.outputs[k], o.inputs[forward.inputs.size() + k]);
          return sum;
        };
        EXPECT_LT(testing::gradient_error(f, moved.inputs[size_t(input)], gradient, 5, s.rows > 100 ? 1 : 3), 1e-6)
            << b.op.name << ", input " << input;
      }
    }
}

TEST(Residual, Fp32IsAsCloseToFp64AsItsRoundingsAllowAndStaysInsideItsOutputs) {
  for_each_op([](const OpCase& c) {
    for (const Size& s : kSizes) {
      const Operands fast = make(c, DType::f32, s), exact = make(c, DType::f64, s);
      for (size_t i = 0; i < fast.inputs.size(); ++i) testing::assign(exact.inputs[i], values(fast.inputs[i]));
      for (size_t i = 0; i < fast.sums.size(); ++i) testing::assign(exact.sums[i], values(fast.sums[i]));
      run(c, fast);
      run(c, exact);
      const double unit = testing::roundoff(DType::f32);
      for (size_t i = 0; i < fast.outputs.size(); ++i) {  // three products of three factors below 5
        const auto r = testing::compare(fast.outputs[i], values(exact.outputs[i]), 200 * unit, 4 * unit);
        EXPECT_TRUE(r.ok) << c.name << ": " << r.message;
      }
      for (size_t i = 0; i < fast.sums.size(); ++i) {
        // Terms of size 2 whose sums are random walks: each of the (rows, or rows times columns) roundings is of a sum
        // no larger than a block's.
        const double terms = c.sums[i] == '2' || c.sums[i] == '4' ? double(s.rows * s.cols) : double(s.rows);
        const auto r =
            testing::compare(fast.sums[i], values(exact.sums[i]), (20 + 30 * std::sqrt(terms)) * 4 * unit, 4 * unit);
        EXPECT_TRUE(r.ok) << c.name << " sum " << i << ": " << r.message;
      }
      for (const auto* group : {&fast.inputs, &fast.sums, &fast.outputs})
        for (const Buffer& b : *group) EXPECT_TRUE(b.guards_intact()) << c.name;
    }
  });
}

TEST(Residual, ThreadsDoNotChangeABit) {
  const int before = thread_count();
  for_each_op([](const OpCase& c) {
    for (const Size& s : {Size{300, 130, 3}, Size{2100, 9, 0}}) {
      std::vector<std::vector<double>> first;
      for (int threads : {1, 2, 3}) {
        set_thread_count(threads);
        const Operands o = make(c, DType::f32, s);
        run(c, o);
        std::vector<std::vector<double>> all;
        for (const auto* group : {&o.sums, &o.outputs})
          for (const Buffer& b : *group) all.push_back(values(b));
        if (threads == 1) first = all;
        EXPECT_EQ(all, first) << c.name;
      }
    }
  });
  set_thread_count(before);
}

// (output, input) pairs that may be the same tensor according to the headers.
struct AliasCase {
  const OpCase& op;
  std::vector<std::pair<size_t, size_t>> same;
};

TEST(Residual, OutputsMayBeInputsWhereTheHeaderSaysSo) {
  const AliasCase cases[] = {
      {kForward[0], {{0, 0}}},     {kForward[1], {{0, 0}}},         {kForward[1], {{0, 1}}},
      {kForward[3], {{0, 0}}},     {kForward[5], {{0, 0}, {1, 1}}}, {kBackward[0].op, {{0, 4}}},
      {kBackward[1].op, {{0, 3}}}, {kBackward[3].op, {{0, 4}}},     {kBackward[5].op, {{0, 8}, {1, 9}}}};
  const Size s{37, 19, 0};
  for (DType dtype : {DType::f64, DType::f32})
    for (const AliasCase& c : cases) {
      const Operands apart = make(c.op, dtype, s), together = make(c.op, dtype, s);
      run(c.op, apart);
      Views views = views_of(together);
      for (auto [output, input] : c.same) views.outputs[output] = views.inputs[input];
      c.op.call(views);
      for (size_t i = 0; i < apart.outputs.size(); ++i)
        EXPECT_EQ(values(views.outputs[i]), values(apart.outputs[i])) << c.op.name;
      for (size_t i = 0; i < apart.sums.size(); ++i)
        EXPECT_EQ(values(views.sums[i]), values(apart.sums[i])) << c.op.name;
    }
}

TEST(Axpby, DoesNotReadYWhereBetaIsZero) {
  for (DType dtype : {DType::f64, DType::f32}) {
    Buffer x(dtype, {3, 5}), y(dtype, {3, 5});  // y is poison
    testing::fill_normal(x, 1);
    axpby({.x = x, .y = y, .alpha = 2, .beta = 0}, {});
    auto want = values(x);
    for (double& v : want) v *= 2;
    EXPECT_EQ(values(y), want);
    axpby({.x = x, .y = y, .alpha = 1, .beta = 0.5}, {});
    EXPECT_EQ(values(y), want);
  }
}

TEST(SkipMerge, ASaturatedGatePassesOneSideOnly) {
  for (DType dtype : {DType::f64, DType::f32}) {
    const Operands o = make(kForward[3], dtype, {4, 3, 0});
    testing::assign(o.inputs[3], {1000, -1000, 0});
    run(kForward[3], o);
    const auto x = values(o.inputs[0]), skip = values(o.inputs[1]), w = values(o.inputs[2]), y = values(o.outputs[0]);
    for (size_t t = 0; t < 4; ++t) {
      EXPECT_EQ(y[3 * t], x[3 * t]);
      EXPECT_NEAR(y[3 * t + 1], w[1] * skip[3 * t + 1], 1e-6);
    }
  }
}

template <class Call> std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "no error";
}

TEST(Residual, ErrorsNameTheValueFoundAndTheValueExpected) {
  Buffer x(DType::f32, {4, 3}), other(DType::f32, {4, 5}), c(DType::f32, {3}), wrong(DType::f32, {4}),
      wide(DType::f64, {4, 3});
  const std::string shape = message_of([&] { mix({.x = x, .x0 = other, .a = c, .b = c, .y = x}, {}); });
  for (const char* part : {"mix: x0", "(4, 5)", "(4, 3)"}) EXPECT_NE(shape.find(part), std::string::npos) << shape;
  const std::string channels = message_of([&] { mix({.x = x, .x0 = x, .a = c, .b = wrong, .y = x}, {}); });
  for (const char* part : {"mix: b", "(4)", "(3)"}) EXPECT_NE(channels.find(part), std::string::npos) << channels;
  const std::string dtype = message_of([&] { axpby({.x = x, .y = wide}, {}); });
  for (const char* part : {"f64", "f32"}) EXPECT_NE(dtype.find(part), std::string::npos) << dtype;
  const std::string gate = message_of(
      [&] { skip_merge_backward({.x = x, .skip = x, .w = c, .dy = x, .dx = x, .dskip = x, .dgate = c}, {}); });
  EXPECT_NE(gate.find("gate"), std::string::npos) << gate;
}

}  // namespace
}  // namespace ingot
