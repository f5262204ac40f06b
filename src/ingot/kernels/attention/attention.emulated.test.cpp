// The entry points of attention on a GPU, with the portable kernels on the CPU: rows of no segment, neighbouring
// segments, refused operands, and the choice of a variant.
#include <gtest/gtest.h>

#include <cmath>

#include "ingot/kernels/attention/emulated_memory.test.h"
#include "ingot/kernels/attention/variant.h"

namespace ingot {
namespace {

using Operands = testing::AttentionOperands<testing::OnEmulator>;
using Gradients = testing::AttentionGradients<testing::OnEmulator>;
using testing::values;

TEST(AttentionVariantOnGpu, IsTheHopperVariantIfItsCodeRunsAndPortableFromCapability8On) {
  using cuda::attention_variant, cuda::AttentionVariant;
  EXPECT_EQ(attention_variant(gpu::limits_of("9.0")), AttentionVariant::hopper);
  for (const char* capability : {"8.0", "8.6", "8.9", "10.0", "12.0"})
    EXPECT_EQ(attention_variant(gpu::limits_of(capability)), AttentionVariant::portable) << capability;
  gpu::Limits limits = gpu::limits_of("9.0");
  limits.hopper = false;  // as if the driver compiled the PTX
  EXPECT_EQ(attention_variant(limits), AttentionVariant::portable);
  limits = gpu::limits_of("8.0");
  limits.capability = 75;
  EXPECT_EQ(attention_variant(limits), AttentionVariant::none);
}

// Padding after the last segment and the neighbour hold NaN; results hold NaN before the call.
TEST(AttentionEmulated, RowsOfNoSegmentAreZeroAndNeighboursDoNotMatter) {
  for (int64_t d : {64, 128, 256}) {
    SCOPED_TRACE(d);
    Operands alone({.queries = {37}, .keys = {45}, .heads = 2, .kv_heads = 1, .d = d});
    Operands beside({.queries = {9, 37, 11, 6}, .keys = {9, 45, 11, 6}, .heads = 2, .kv_heads = 1, .d = d});
    Gradients one(alone), four(beside);
    const auto surround = [&](const Tensor& from, const Tensor& to) {
      std::vector<double> x(size_t(to.numel()), NAN);
      const auto part = values(from);
      std::copy(part.begin(), part.end(), x.begin() + 9 * to.size(1) * d);
      testing::assign(to, x);
    };
    surround(alone.q, beside.q), surround(alone.k, beside.k), surround(alone.v, beside.v);
    surround(one.dout, four.dout);
    const auto run = [](Operands& a, Gradients& g, int64_t segments) {
      Attention op = a.op();
      op.cu_q = op.cu_q.slice(0, 0, segments + 1), op.cu_k = op.cu_k.slice(0, 0, segments + 1);
      cuda::attention(op, {});
      AttentionBackward back = g.op();
      back.cu_q = op.cu_q, back.cu_k = op.cu_k, back.workspace = g.workspace;
      cuda::attention_backward(back, {});
    };
    run(alone, one, 1), run(beside, four, 3);
    EXPECT_EQ(values(beside.out.host().slice(0, 9, 46)), values(alone.out));
    EXPECT_EQ(values(four.dq.host().slice(0, 9, 46)), values(one.dq));
    EXPECT_EQ(values(four.dk.host().slice(0, 9, 54)), values(one.dk));
    EXPECT_EQ(values(four.dv.host().slice(0, 9, 54)), values(one.dv));
    for (auto [t, covered] : {std::pair<Tensor, int64_t>{beside.out, 57}, {four.dq, 57}, {four.dk, 65}, {four.dv, 65}})
      for (double x : values(t.slice(0, covered, t.size(0)))) ASSERT_EQ(x, 0);
    for (double x : values(beside.lse.host().slice(1, 57, 63))) ASSERT_EQ(x, -HUGE_VAL);
  }
}

// Rounded sums are added to rounded values, and a delta that is already in the workspace is used. The results are those
// of a first call, bit for bit.
TEST(AttentionEmulated, AddsToTheValuesGradientAndUsesAGivenDelta) {
  for (int64_t d : {64, 256}) {
    Operands a({.queries = {40, 7, 0, 30}, .keys = {40, 7, 0, 30}, .heads = 4, .kv_heads = 2, .d = d, .gap = 8});
    cuda::attention(a.op(), {});
    Gradients b(a);
    b.run();
    const auto alone = values(b.dv), dq = values(b.dq);
    testing::fill_normal(b.dv, 9);
    const auto there = values(b.dv);
    AttentionBackward op = b.op();
    op.add_dv = op.has_delta = true;
    op.workspace = b.workspace;
    cuda::attention_backward(op, {});
    const auto got = values(b.dv);
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], double(float(bf16(float(there[i]) + float(alone[i]))))) << d << ", element " << i;
    EXPECT_EQ(values(b.dq), dq);
    EXPECT_TRUE(b.dv.untouched());
  }
}

TEST(AttentionEmulated, RefusesOperandsThatAreNotWhole16Bytes) {
  Operands a({.queries = {20}, .keys = {20}});
  testing::Buffer odd(DType::bf16, {20, 2, 64}, 67);
  Attention op = a.op();
  op.q = odd;
  try {
    cuda::attention(op, {});
    FAIL() << "expected an Error";
  } catch (const Error& e) { EXPECT_NE(std::string(e.what()).find("attention: q: found rows at "), std::string::npos); }
}

TEST(AttentionEmulated, EmptyTensorsAreAccepted) {
  Operands none({.queries = {0}, .keys = {0}}), no_segments({.queries = {}, .keys = {}});
  for (Operands* a : {&none, &no_segments}) {
    cuda::attention(a->op(), {});
    cuda::attention_backward(Gradients(*a).op(), {});
  }
  // No query sees the keys: their gradients are zero.
  Operands unseen({.queries = {0}, .keys = {70}});
  Gradients b(unseen);
  b.run();
  for (const testing::EmulatedBuffer* x : {&b.dk, &b.dv})
    for (double value : values(*x)) ASSERT_EQ(value, 0);
}

}  // namespace
}  // namespace ingot
