#include "ingot/kernels/cross_entropy/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/cross_entropy/cross_entropy_cases.test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::values;

struct Case {
  int64_t rows, vocab, gap;
  double softcap, z_loss, scale, smoothing = 0;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << " rows of " << c.vocab << ", softcap " << c.softcap << ", z-loss " << c.z_loss << ", scale "
             << c.scale << ", smoothing " << c.smoothing;
}
// tails of every kind, more than a single fp32 run of the sum, logits well beyond the softcap, softcaps of 1 and less
const Case kCases[] = {{0, 5, 0, 0, 0, 2},
                       {1, 1, 0, 0, 0, 2},
                       {1, 7, 0, 30, 1e-4, 3},
                       {3, 8, 1, 0, 1e-4, 4},
                       {5, 65, 3, 30, 0, 40},
                       {4, 1031, 0, 0, 0, 3},
                       {3, 2500, 5, 15, 1e-3, 10},
                       {9, 100, 0, 0, 0, 60},
                       {40, 997, 0, 30, 1e-4, 3},
                       {7, 9, 2, 0, 0, 2, 0.1},
                       {6, 2500, 3, 30, 1e-3, 10, 0.3},
                       {5, 1031, 0, 0, 1e-4, 3, 1},
                       {6, 65, 3, 1, 1e-3, 3},
                       {5, 100, 0, 0.25, 1e-4, 1},
                       {4, 1031, 2, 0.01, 0, 0.02},
                       {3, 9, 0, 1e-3, 0, 10, 0.1}};

// Targets over the vocabulary, every fifth ignored.
void fill_targets(const Tensor& t, int64_t vocab) {
  testing::fill_ids(t, 7, vocab);
  for (int64_t i = 4; i < t.size(0); i += 5) t.ptr<int32_t>()[i] = -1;
}

struct Plain {
  Plain(const Case& c, DType dtype)
      : logits(dtype, {c.rows, c.vocab}, c.vocab + c.gap),
        dlogits(dtype, {c.rows, c.vocab}, c.vocab + 2 * c.gap),
        loss(dtype, {c.rows}),
        lse(dtype, {c.rows}),
        dloss(dtype, {c.rows}),
        targets(DType::i32, {c.rows}),
        args{.logits = logits,
             .targets = targets,
             .loss = loss,
             .lse = lse,
             .dloss = dloss,
             .dlogits = dlogits,
             .softcap = c.softcap,
             .z_loss = c.z_loss,
             .label_smoothing = c.smoothing} {
    testing::fill_normal(logits, 1, c.scale);
    testing::fill_normal(dloss, 2);
    fill_targets(targets, c.vocab);
  }
  Buffer logits, dlogits, loss, lse, dloss, targets;
  CrossEntropy args;
};

TEST(CrossEntropy, Fp32IsAsCloseToFp64AsItsRoundingsAllow) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c);
    Plain fast(c, DType::f32), exact(c, DType::f64);
    testing::assign(exact.logits, values(fast.logits));
    testing::assign(exact.dloss, values(fast.dloss));
    cross_entropy(fast.args, {});
    cross_entropy(exact.args, {});
    const double unit = testing::roundoff(DType::f32);
    // A capped logit of size s carries s roundings of tanh, and the exponential turns these roundings into relative
    // errors of p.
    const double size = c.softcap > 0 ? c.softcap : 5 * c.scale, off = (8 + 4 * size) * unit;
    EXPECT_TRUE(testing::compare(fast.lse, values(exact.lse), off, unit).ok)
        << testing::compare(fast.lse, values(exact.lse), off, unit).message;
    const auto loss = testing::compare(fast.loss, values(exact.loss), 3 * off, 2 * unit);
    EXPECT_TRUE(loss.ok) << loss.message;
    const auto d = testing::compare(fast.dlogits, values(exact.dlogits), 3 * off, 3 * off);
    EXPECT_TRUE(d.ok) << d.message;
    EXPECT_TRUE(fast.dlogits.guards_intact() && fast.loss.guards_intact() && fast.lse.guards_intact());
    EXPECT_TRUE(exact.dlogits.guards_intact() && exact.logits.guards_intact());
  }
}

TEST(CrossEntropy, TheLargestLogitIsFoundInEveryPosition) {
  constexpr int64_t kVocab = 150;  // two strides of four vectors of the widest level, and tails
  Plain p({kVocab, kVocab, 0, 0, 0, 1}, DType::f32);
  float* logits = p.logits.tensor().ptr<float>();
  for (int64_t r = 0; r < kVocab; ++r) {
    for (int64_t v = 0; v < kVocab; ++v) logits[r * kVocab + v] = v == r ? 200 : -200;  // e^400 would overflow
    p.targets.tensor().ptr<int32_t>()[r] = int32_t(r);
  }
  cross_entropy(p.args, {});
  for (int64_t r = 0; r < kVocab; ++r) {
    EXPECT_EQ(values(p.lse)[size_t(r)], 200) << r;
    EXPECT_EQ(values(p.loss)[size_t(r)], 0) << r;
  }
}

TEST(CrossEntropy, GradientsAreTheDerivativesOfLosses) {
  for (const Case& c : kCases) {
    // Beyond the softcap every slope is far below the loss's roundings.
    if (c.rows == 0 || c.scale > 20 || (c.softcap > 0 && c.scale > 10 * c.softcap)) continue;
    Plain run(c, DType::f64);
    cross_entropy(run.args, {});
    auto losses_only = run.args;
    losses_only.dloss = losses_only.dlogits = Tensor();
    const double error = testing::gradient_error(
        [&] {
          cross_entropy(losses_only, {});
          return testing::dot(run.loss, run.dloss);
        },
        run.logits, run.dlogits, 3);
    EXPECT_LT(error, 1e-6) << c;
  }
}

TEST(CrossEntropy, GradientsMayReplaceTheLogitsAndLossesNeedNoGradient) {
  for (DType dtype : {DType::f64, DType::f32}) {
    for (const Case& c : kCases) {
      Plain run(c, dtype);
      cross_entropy(run.args, {});
      const auto loss = values(run.loss), d = values(run.dlogits);
      auto losses_only = run.args;
      losses_only.dloss = losses_only.dlogits = losses_only.lse = Tensor();
      run.loss.poison();
      cross_entropy(losses_only, {});
      EXPECT_EQ(values(run.loss), loss) << c;
      auto in_place = run.args;
      in_place.dlogits = run.logits;
      cross_entropy(in_place, {});
      EXPECT_EQ(values(run.logits), d) << c;
      EXPECT_EQ(values(run.loss), loss) << c;
    }
  }
}

TEST(CrossEntropy, IgnoredRowsAreZeroEvenWhereTheLogitsAreNot) {
  for (DType dtype : {DType::f64, DType::f32}) {
    Plain run({3, 10, 0, 30, 1e-4, 1}, dtype);
    for (int i = 0; i < 3; ++i) run.targets.tensor().ptr<int32_t>()[i] = -1;
    auto v = values(run.logits);
    v[13] = NAN;
    testing::assign(run.logits, v);
    cross_entropy(run.args, {});
    EXPECT_EQ(values(run.loss), std::vector<double>(3, 0));
    EXPECT_EQ(values(run.dlogits), std::vector<double>(30, 0));
  }
}

TEST(CrossEntropy, ANanLogitShowsInTheLoss) {
  for (DType dtype : {DType::f64, DType::f32})
    for (int64_t vocab : {5, 8, 100}) {
      Plain run({1, vocab, 0, 0, 0, 1}, dtype);
      auto v = values(run.logits);
      v[size_t(vocab - 2)] = NAN;
      testing::assign(run.logits, v);
      cross_entropy(run.args, {});
      EXPECT_TRUE(std::isnan(values(run.loss)[0])) << vocab;
    }
}

TEST(CrossEntropy, ASmoothedLossIsTheMeanOverATargetThatIsPartlyEveryLogit) {
  constexpr int64_t kRows = 4, kVocab = 37;
  constexpr double kCap = 5, kZ = 1e-3, kSmoothing = 0.2;
  Plain run({kRows, kVocab, 0, kCap, kZ, 4, kSmoothing}, DType::f64);
  cross_entropy(run.args, {});
  const auto logits = values(run.logits);
  for (int64_t t = 0; t < kRows; ++t) {
    double sum = 0, expected = 0;
    const int64_t target = run.targets.tensor().ptr<int32_t>()[t];
    for (int64_t v = 0; v < kVocab; ++v) {
      const double c = kCap * std::tanh(logits[size_t(t * kVocab + v)] / kCap);
      sum += std::exp(c);
      expected += c * (kSmoothing / double(kVocab) + (v == target ? 1 - kSmoothing : 0));
    }
    const double lse = std::log(sum);
    EXPECT_NEAR(values(run.loss)[size_t(t)], lse - expected + kZ * lse * lse, 1e-12) << t;
  }
}

TEST(CrossEntropy, MaskedLogitsOfMinusInfinityHaveNoProbability) {
  for (DType dtype : {DType::f64, DType::f32}) {
    Plain run({1, 9, 0, 0, 0, 1}, dtype);
    testing::assign(run.logits, {1, -HUGE_VAL, 1, -HUGE_VAL, -HUGE_VAL, -HUGE_VAL, -HUGE_VAL, -HUGE_VAL, -HUGE_VAL});
    testing::assign(run.dloss, {1});
    testing::assign(run.targets, {0});
    cross_entropy(run.args, {});
    EXPECT_NEAR(values(run.loss)[0], std::log(2), 1e-6);
    EXPECT_NEAR(values(run.dlogits)[2], 0.5, 1e-6);
    EXPECT_EQ(values(run.dlogits)[1], 0);
  }
}

// --- fused with the linear layer

struct Fused {
  Fused(DType dtype, int64_t T, int64_t C, int64_t V, int64_t R, double softcap = 30, double z_loss = 1e-4,
        double smoothing = 0)
      : x(dtype, {T, C}, C + 2),
        w(dtype, {V, C}),
        dx(dtype, {T, C}, C + 1),
        dw(dtype, {V, C}),
        x2(dtype, {T, R}),
        w2(dtype, {V, R}),
        dx2(dtype, {T, R}),
        dw2(dtype, {V, R}),
        loss(dtype, {T}),
        lse(dtype, {T}),
        dloss(dtype, {T}),
        targets(DType::i32, {T}),
        workspace(DType::u8, {linear_cross_entropy_workspace_bytes(T, C, V, dtype, Products::fp32, {})}),
        args{.x = x,
             .w = w,
             .targets = targets,
             .loss = loss,
             .lse = lse,
             .dloss = dloss,
             .dx = dx,
             .dw = dw,
             .workspace = workspace,
             .softcap = softcap,
             .z_loss = z_loss,
             .label_smoothing = smoothing} {
    if (R > 0) args.x2 = x2, args.w2 = w2, args.dx2 = dx2, args.dw2 = dw2;
    testing::fill_normal(x, 1);
    testing::fill_normal(w, 2, 2 / std::sqrt(double(C)));
    testing::fill_normal(x2, 3);
    testing::fill_normal(w2, 4);
    testing::fill_normal(dloss, 5, 1 / std::sqrt(double(T + 1)));
    testing::fill_normal(dw, 6);
    testing::fill_normal(dw2, 7);
    fill_targets(targets, V);
  }
  Buffer x, w, dx, dw, x2, w2, dx2, dw2, loss, lse, dloss, targets, workspace;
  LinearCrossEntropy args;
};

struct FusedCase {
  int64_t T, C, V, R;
};
const FusedCase kFused[] = {{0, 4, 5, 0}, {1, 3, 7, 2}, {19, 8, 33, 0}, {37, 12, 50, 3}};

TEST(LinearCrossEntropy, EqualsTheProductFollowedByTheLoss) {
  for (const FusedCase& c : kFused) {
    Fused f(DType::f64, c.T, c.C, c.V, c.R);
    const auto dw_before = values(f.dw);
    linear_cross_entropy(f.args, {});
    // the plain computation
    const auto x = values(f.x), w = values(f.w), x2 = values(f.x2), w2 = values(f.w2);
    Buffer logits(DType::f64, {c.T, c.V}), loss(DType::f64, {c.T});
    std::vector<double> l(size_t(c.T * c.V), 0);
    for (int64_t t = 0; t < c.T; ++t)
      for (int64_t v = 0; v < c.V; ++v) {
        for (int64_t k = 0; k < c.C; ++k) l[size_t(t * c.V + v)] += x[size_t(t * c.C + k)] * w[size_t(v * c.C + k)];
        for (int64_t k = 0; k < c.R; ++k) l[size_t(t * c.V + v)] += x2[size_t(t * c.R + k)] * w2[size_t(v * c.R + k)];
      }
    testing::assign(logits, l);
    cross_entropy({.logits = logits,
                   .targets = f.targets,
                   .loss = loss,
                   .dloss = f.dloss,
                   .dlogits = logits,
                   .softcap = 30,
                   .z_loss = 1e-4},
                  {});
    const auto d = values(logits);
    std::vector<double> dx(x.size(), 0), dw = dw_before;
    for (int64_t t = 0; t < c.T; ++t)
      for (int64_t v = 0; v < c.V; ++v)
        for (int64_t k = 0; k < c.C; ++k) {
          dx[size_t(t * c.C + k)] += d[size_t(t * c.V + v)] * w[size_t(v * c.C + k)];
          dw[size_t(v * c.C + k)] += d[size_t(t * c.V + v)] * x[size_t(t * c.C + k)];
        }
    // sums of at most 50 terms of size 1, in another order
    for (const auto& r : {testing::compare(f.loss, values(loss), 1e-13, 1e-13),
                          testing::compare(f.dx, dx, 1e-13, 1e-13), testing::compare(f.dw, dw, 1e-13, 1e-13)})
      EXPECT_TRUE(r.ok) << r.message;
    EXPECT_TRUE(f.dx.guards_intact() && f.dw.guards_intact() && f.workspace.guards_intact() && f.loss.guards_intact());
  }
}

TEST(LinearCrossEntropy, GradientsAreTheDerivativesOfLosses) {
  for (const FusedCase& c : kFused) {
    if (c.T == 0) continue;
    Fused f(DType::f64, c.T, c.C, c.V, c.R, 30, 1e-4, 0.1);
    for (const Tensor& t : {f.dw.tensor(), f.dw2.tensor()}) fill_zero(t);
    linear_cross_entropy(f.args, {});
    auto losses_only = f.args;
    losses_only.dloss = losses_only.dx = losses_only.dw = losses_only.dx2 = losses_only.dw2 = Tensor();
    const auto run = [&] {
      linear_cross_entropy(losses_only, {});
      return testing::dot(f.loss, f.dloss);
    };
    EXPECT_LT(testing::gradient_error(run, f.x, f.dx, 11), 1e-6);
    EXPECT_LT(testing::gradient_error(run, f.w, f.dw, 12), 1e-6);
    if (c.R == 0) continue;
    EXPECT_LT(testing::gradient_error(run, f.x2, f.dx2, 13), 1e-6);
    EXPECT_LT(testing::gradient_error(run, f.w2, f.dw2, 14), 1e-6);
  }
}

TEST(LinearCrossEntropy, Fp32IsAsCloseToFp64AsItsRoundingsAllowOverManyChunks) {
  // 3000 columns make chunks of some 350 rows in fp32 and of 256 in fp64, 1024 of 1024 and 512, a page apart.
  for (const FusedCase& c : {FusedCase{1000, 8, 3000, 0}, {37, 65, 129, 4}, {50, 16, 4096, 0}, {2050, 5, 1024, 2}}) {
    Fused fast(DType::f32, c.T, c.C, c.V, c.R), exact(DType::f64, c.T, c.C, c.V, c.R);
    const std::pair<Tensor, Tensor> inputs[] = {{fast.x, exact.x},    {fast.w, exact.w},         {fast.x2, exact.x2},
                                                {fast.w2, exact.w2},  {fast.dloss, exact.dloss}, {fast.dw, exact.dw},
                                                {fast.dw2, exact.dw2}};
    for (const auto& [from, to] : inputs) testing::assign(to, values(from));
    linear_cross_entropy(fast.args, {});
    linear_cross_entropy(exact.args, {});
    // Logits of size 4 or less from sums of C + R terms, then as in cross_entropy; dw sums over the rows.
    const double unit = testing::roundoff(DType::f32), off = (100 + 4 * std::sqrt(double(c.C + c.R))) * unit;
    for (const auto& r : {testing::compare(fast.loss, values(exact.loss), 2 * off, off),
                          testing::compare(fast.dx, values(exact.dx), off, off),
                          testing::compare(fast.dw, values(exact.dw), 4 * off, off)})
      EXPECT_TRUE(r.ok) << r.message << " for " << c.T << " rows";
    if (c.R == 0) continue;
    for (const auto& r : {testing::compare(fast.dx2, values(exact.dx2), 4 * off, off),
                          testing::compare(fast.dw2, values(exact.dw2), 4 * off, off)})
      EXPECT_TRUE(r.ok) << r.message;
  }
}

TEST(LinearCrossEntropy, FrozenWeightsAndLossesOnlyGiveTheSameNumbers) {
  Fused f(DType::f32, 37, 12, 50, 3);
  linear_cross_entropy(f.args, {});
  const auto loss = values(f.loss), dx = values(f.dx), dw = values(f.dw), dx2 = values(f.dx2);
  auto frozen = f.args;
  frozen.dw = frozen.dw2 = frozen.lse = Tensor();
  f.dx.poison(), f.dx2.poison(), f.loss.poison();
  linear_cross_entropy(frozen, {});
  EXPECT_EQ(values(f.loss), loss);
  EXPECT_EQ(values(f.dx), dx);
  EXPECT_EQ(values(f.dx2), dx2);
  EXPECT_EQ(values(f.dw), dw);
  auto losses_only = frozen;
  losses_only.dloss = losses_only.dx = losses_only.dx2 = Tensor();
  f.loss.poison();
  linear_cross_entropy(losses_only, {});
  EXPECT_EQ(values(f.loss), loss);
}

TEST(LinearCrossEntropy, ABatchOfIgnoredTargetsHasNoLossAndNoGradient) {
  for (DType dtype : {DType::f64, DType::f32}) {
    Fused f(dtype, 20, 6, 30, 2);
    for (int i = 0; i < 20; ++i) f.targets.tensor().ptr<int32_t>()[i] = -1;
    const auto dw = values(f.dw);
    linear_cross_entropy(f.args, {});
    EXPECT_EQ(values(f.loss), std::vector<double>(20, 0));
    EXPECT_EQ(values(f.dx), std::vector<double>(120, 0));
    EXPECT_EQ(values(f.dw), dw);
  }
}

TEST(LinearCrossEntropy, AWorkspaceServesFewerRowsToo) {
  for (int64_t V : {50, 1024, 8192})
    for (Products products : {Products::fp32, Products::bf16}) {
      int64_t before = 0;
      for (int64_t T = 0; T < 3000; T += 7) {
        const int64_t bytes = linear_cross_entropy_workspace_bytes(T, 24, V, DType::f32, products, {});
        EXPECT_GE(bytes, before) << T << " rows of " << V;
        before = bytes;
      }
    }
}

TEST(LinearCrossEntropy, ASegmentHasSecondWeightsOfItsOwnAndTheBitsOfACallAlone) {
  const std::vector<int32_t> cu{0, 5, 5, 19, 37};
  constexpr int64_t kVocab = 50, kRank = 3;
  const int64_t segments = int64_t(cu.size()) - 1;
  struct Operands : Fused {
    Buffer banks, dbanks;
    explicit Operands(int64_t segments)
        : Fused(DType::f32, 37, 12, kVocab, kRank),
          banks(DType::f32, {segments, kVocab, kRank}),
          dbanks(DType::f32, {segments, kVocab, kRank}) {
      testing::fill_normal(banks, 8);
      testing::fill_normal(dbanks, 9);
    }
  } together(segments), apart(segments);
  together.args.w2 = together.banks, together.args.dw2 = together.dbanks, together.args.cu2 = cu;
  linear_cross_entropy(together.args, {});
  for (int64_t s = 0; s < segments; ++s) {
    LinearCrossEntropy one = apart.args;
    for (Tensor* t : {&one.x, &one.x2, &one.targets, &one.loss, &one.lse, &one.dloss, &one.dx, &one.dx2})
      *t = t->slice(0, cu[size_t(s)], cu[size_t(s) + 1]);
    one.w2 = apart.banks.tensor().row(s), one.dw2 = apart.dbanks.tensor().row(s);
    linear_cross_entropy(one, {});
  }
  EXPECT_EQ(values(together.loss), values(apart.loss));
  EXPECT_EQ(values(together.lse), values(apart.lse));
  EXPECT_EQ(values(together.dx), values(apart.dx));
  EXPECT_EQ(values(together.dx2), values(apart.dx2));
  EXPECT_EQ(values(together.dw), values(apart.dw));
  EXPECT_EQ(values(together.dbanks), values(apart.dbanks));
}

TEST(LinearCrossEntropy, ThreadsDoNotChangeABit) {
  const int before = thread_count();
  std::vector<double> first;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    Fused f(DType::f32, 700, 9, 2000, 0);
    linear_cross_entropy(f.args, {});
    auto all = values(f.loss);
    for (const Tensor& t : {f.lse.tensor(), f.dx.tensor(), f.dw.tensor()}) {
      const auto v = values(t);
      all.insert(all.end(), v.begin(), v.end());
    }
    if (threads == 1) first = all;
    EXPECT_EQ(all, first);
  }
  set_thread_count(before);
}

template <class Call> std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "no error";
}

TEST(CrossEntropy, TheIgnoredIndexMayBeATokens) {
  cross_entropy_cases::the_ignored_index_may_be_a_tokens<Buffer>([](const CrossEntropy& a) { cross_entropy(a, {}); });
}

// The smallest and the largest softcap allowed: with the smallest, every logit is far beyond the cap; with the largest,
// fp64 sees no effect, and fp32 is as exact as its digits of the cap.
TEST(CrossEntropy, TheEndsOfSoftcapsAreNumbers) {
  for (DType dtype : {DType::f64, DType::f32})
    for (double softcap : {1e-30, 1e30}) {
      Plain run({4, 70, 0, softcap, 1e-4, 3}, dtype), none({4, 70, 0, 0, 1e-4, 3}, dtype);
      cross_entropy(run.args, {});
      cross_entropy(none.args, {});
      for (const Buffer* b : {&run.loss, &run.lse, &run.dlogits})
        for (double v : values(*b)) EXPECT_TRUE(std::isfinite(v)) << softcap << ' ' << dtype;
      if (softcap > 1) continue;
      for (double v : values(run.lse)) EXPECT_NEAR(v, std::log(70), 1e-5);  // all capped logits are 0
      for (double v : values(run.dlogits)) EXPECT_EQ(v, 0);                 // and so are the slopes
    }
}

TEST(CrossEntropy, ErrorsNameTheValueFoundAndTheValueExpected) {
  Plain run({3, 10, 0, 0, 0, 1}, DType::f32);
  run.targets.tensor().ptr<int32_t>()[2] = 10;
  const std::string target = message_of([&] { cross_entropy(run.args, {}); });
  for (const char* part : {"target 10", "position 2", "0 to 9"})
    EXPECT_NE(target.find(part), std::string::npos) << target;
  run.targets.tensor().ptr<int32_t>()[2] = -2;
  EXPECT_NE(message_of([&] { cross_entropy(run.args, {}); }).find("-2"), std::string::npos);
  run.args.label_smoothing = 1.5;
  EXPECT_NE(message_of([&] { cross_entropy(run.args, {}); }).find("found label_smoothing 1.5, expected 0 to 1"),
            std::string::npos);
  run.args.label_smoothing = 0;
  for (double softcap : {-1., 1e-31, 1e31, double(INFINITY), double(NAN)}) {
    run.args.softcap = softcap;
    EXPECT_NE(message_of([&] { cross_entropy(run.args, {}); }).find("expected 0 (none) or 1e-30 to 1e30"),
              std::string::npos)
        << softcap;
  }
  run.args.softcap = 0;
  for (double z_loss : {-1e-9, double(INFINITY), double(NAN)}) {
    run.args.z_loss = z_loss;
    EXPECT_NE(message_of([&] { cross_entropy(run.args, {}); }).find("z_loss"), std::string::npos) << z_loss;
  }
  run.args.z_loss = 0;
  for (double smoothing : {-1e-9, 1 + 1e-9, double(NAN)}) {
    run.args.label_smoothing = smoothing;
    EXPECT_NE(message_of([&] { cross_entropy(run.args, {}); }).find("label_smoothing"), std::string::npos) << smoothing;
  }
  Fused f(DType::f32, 20, 6, 30, 0);
  f.args.workspace = f.args.workspace.slice(0, 0, 5);
  const std::string small = message_of([&] { linear_cross_entropy(f.args, {}); });
  EXPECT_EQ(small, "linear_cross_entropy: workspace bytes: found 5, expected at least 3840");  // 32 rows of 30 floats
  Fused mixed(DType::f32, 20, 6, 30, 0);
  mixed.args.dloss = Tensor();
  EXPECT_NE(message_of([&] { linear_cross_entropy(mixed.args, {}); }).find("without dloss"), std::string::npos);
}

TEST(LinearCrossEntropy, EveryOperandLiesOnOneDevice) {
  using F = LinearCrossEntropy;
  const Fused f(DType::f32, 20, 6, 30, 2);
  EXPECT_EQ(testing::device_not_checked(f.args,
                                        {&F::x, &F::w, &F::x2, &F::w2, &F::targets, &F::loss, &F::lse, &F::dloss,
                                         &F::dx, &F::dx2, &F::dw, &F::dw2, &F::workspace},
                                        linear_cross_entropy),
            "");
}

}  // namespace
}  // namespace ingot
