#pragma once
// Compares losses and gradients of another backend with the CPU's in fp64.
#include <gtest/gtest.h>

#include "ingot/kernels/cross_entropy/capped.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/cross_entropy/exponentials.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::cross_entropy_cases {

using testing::Buffer;

struct DeviceCase {
  int64_t rows, vocab, gap;
  double softcap, z_loss, scale, smoothing = 0;
};
// Vectors and no vectors, rows that stay in registers and longer rows, empty; softcaps of 1 and less.
constexpr DeviceCase kDeviceCases[] = {{0, 5, 0, 0, 0, 1},
                                       {3, 1, 0, 0, 0, 1},
                                       {7, 13, 2, 30, 1e-4, 1},
                                       {5, 16, 4, 15, 0, 20},
                                       {3, 2052, 0, 30, 1e-4, 10},
                                       {2, 8192, 0, 0, 0, 3},
                                       {2, 9000, 0, 30, 0, 3},
                                       {3, 2052, 0, 30, 0, 3, 0.1},
                                       {2, 13, 0, 0, 0, 1, 1},
                                       {3, 13, 2, 1, 1e-4, 3},
                                       {4, 2052, 0, 0.25, 1e-4, 1},
                                       {2, 16, 0, 1e-3, 0, 10},
                                       {3, 2052, 0, 0.01, 0, 0.02, 0.1}};

template <class B> B targets_for(int64_t rows, int64_t vocab) {
  B targets(DType::i32, {rows});
  testing::fill_ids(testing::host_of(targets), 9, vocab);
  if (rows > 1) testing::host_of(targets).template ptr<int32_t>()[1] = -1;  // ignored
  testing::send(targets);
  return targets;
}
inline void assign_ids(const Tensor& to, const Tensor& from) {
  for (int64_t i = 0; i < to.numel(); ++i) to.ptr<int32_t>()[i] = from.ptr<int32_t>()[i];
}

template <class B, class Call> void agrees_with_fp64(Call&& call) {
  using testing::values;
  const std::pair<DType, DType> types[] = {{DType::f32, DType::f32},
                                           {DType::f32, DType::bf16},
                                           {DType::f32, DType::f16},
                                           {DType::bf16, DType::bf16},
                                           {DType::f16, DType::f16}};
  for (auto [from, to] : types)
    for (const DeviceCase& c : kDeviceCases)
      for (bool in_place : {false, true}) {
        if (in_place && from != to) continue;
        SCOPED_TRACE(::testing::Message() << from << " to " << to << ' ' << c.rows << " x " << c.vocab);
        B logits(from, {c.rows, c.vocab}, c.vocab + c.gap), dlogits(to, {c.rows, c.vocab}, c.vocab + 2 * c.gap);
        testing::fill_normal(testing::host_of(logits), 1, c.scale);
        testing::send(logits), testing::send(dlogits);
        B targets = targets_for<B>(c.rows, c.vocab);
        B loss = testing::poisoned<B>(DType::f32, {c.rows}), lse = testing::poisoned<B>(DType::f32, {c.rows});
        B dloss = testing::normal<B>(DType::f32, {c.rows}, 3);
        Buffer logits64 = testing::exact(logits), dloss64 = testing::exact(dloss), loss64(DType::f64, {c.rows}),
               lse64(DType::f64, {c.rows}), targets64(DType::i32, {c.rows});
        assign_ids(targets64, testing::host_of(targets));
        CrossEntropy a{.logits = logits,
                       .targets = targets,
                       .loss = loss,
                       .lse = lse,
                       .dloss = dloss,
                       .dlogits = in_place ? logits : dlogits,
                       .softcap = c.softcap,
                       .z_loss = c.z_loss,
                       .label_smoothing = c.smoothing};
        call(a);
        cross_entropy({.logits = logits64,
                       .targets = targets64,
                       .loss = loss64,
                       .lse = lse64,
                       .dloss = dloss64,
                       .dlogits = logits64,
                       .softcap = c.softcap,
                       .z_loss = c.z_loss,
                       .label_smoothing = c.smoothing},
                      {});
        // A logit of size s carries s roundings into the exponent, two approximate functions 2^-21 of the cap; p has
        // these as relative errors, and the slope, 1 - (c / cap)^2, twice the cap's. The rounding to the result's type
        // comes on top.
        const double u = testing::roundoff(DType::f32), size = c.softcap > 0 ? c.softcap : 5 * c.scale;
        const double off = (8 + 4 * size) * u + c.softcap * 1e-6;
        testing::expect_close(lse, values(lse64), off, 2 * u);
        testing::expect_close(loss, values(loss64), 3 * off, 2 * u);
        const double subnormal = to == DType::f16 ? 6e-8 : 0;
        const double of_slope = c.softcap > 0 ? 2e-6 : 0;
        testing::expect_close(in_place ? logits : dlogits, values(logits64), 9 * off + 3 * of_slope + subnormal,
                              3 * off + 1.01 * testing::roundoff(to));
      }
}

// From a product's exponentials, here made of given logits in fp64: whole and partial tiles, several vectors a thread,
// an ignored row, f16's few exponents.
template <class B, class Call> void exponentials_agree_with_fp64(Call&& call) {
  using testing::values;
  struct Case {
    int64_t rows, vocab, gap;
    double softcap, z_loss, scale;
  };
  constexpr int64_t kColumns = cuda::kExponentialColumns;
  for (DType type : {DType::bf16, DType::f16})
    for (const Case& c : {Case{3, 8, 0, 0, 0, 1},
                          {5, 136, 8, 15, 1e-4, 10},
                          {4, 20488, 0, 30, 0, 4},
                          {4, 1024, 0, 0, 1e-4, 4},
                          {4, 136, 0, 1, 1e-4, 4}})
      for (bool gradient : {true, false}) {
        SCOPED_TRACE(::testing::Message() << type << ' ' << c.rows << " x " << c.vocab);
        Buffer logits64(DType::f64, {c.rows, c.vocab}), loss64(DType::f64, {c.rows}), lse64(DType::f64, {c.rows});
        testing::fill_normal(logits64, 1, c.scale);
        const int64_t tiles = (c.vocab + kColumns - 1) / kColumns;
        B e(type, {c.rows, c.vocab}, c.vocab + c.gap), parts(DType::f32, {c.rows, tiles, 2}),
            at_target = testing::poisoned<B>(DType::f32, {c.rows});
        B targets = targets_for<B>(c.rows, c.vocab);
        Buffer targets64(DType::i32, {c.rows});
        assign_ids(targets64, testing::host_of(targets));
        std::vector<double> logits = values(logits64), exponentials(logits.size());
        const auto capped = [&](int64_t r, int64_t v) {
          const double l = logits[r * c.vocab + v];
          return c.softcap > 0 ? c.softcap * std::tanh(l / c.softcap) : l;
        };
        for (int64_t r = 0; r < c.rows; ++r) {
          for (int64_t t = 0; t < tiles; ++t) {
            float* const part = testing::host_of(parts).template ptr<float>() + (r * tiles + t) * 2;
            const int64_t begin = t * kColumns, end = std::min(c.vocab, begin + kColumns);
            double high = capped(r, begin), sum = 0;
            for (int64_t v = begin; v < end; ++v) high = std::max(high, capped(r, v));
            for (int64_t v = begin; v < end; ++v) sum += exponentials[r * c.vocab + v] = std::exp(capped(r, v) - high);
            part[0] = float(high), part[1] = float(sum);
          }
          const int32_t target = Tensor(targets64).ptr<int32_t>()[r];
          if (target >= 0) testing::host_of(at_target).template ptr<float>()[r] = float(capped(r, target));
        }
        testing::assign(testing::host_of(e), exponentials);
        testing::send(e), testing::send(parts), testing::send(at_target);
        B loss = testing::poisoned<B>(DType::f32, {c.rows}), lse = testing::poisoned<B>(DType::f32, {c.rows});
        B dloss = testing::normal<B>(DType::f32, {c.rows}, 3);
        Buffer dloss64 = testing::exact(dloss);
        call(
            cuda::Exponentials{
                .e = gradient ? Tensor(e) : Tensor(), .parts = parts, .at_target = at_target, .vocab = c.vocab},
            CrossEntropy{.targets = targets,
                         .loss = loss,
                         .lse = lse,
                         .dloss = gradient ? Tensor(dloss) : Tensor(),
                         .softcap = c.softcap,
                         .z_loss = c.z_loss});
        cross_entropy({.logits = logits64,
                       .targets = targets64,
                       .loss = loss64,
                       .lse = lse64,
                       .dloss = dloss64,
                       .dlogits = logits64,
                       .softcap = c.softcap,
                       .z_loss = c.z_loss},
                      {});
        // As above, for the two fp32 numbers of a tile. The gradient adds the exponential's rounding and its own; the
        // slope comes from a logit known up to its exponential's rounding, and is off by at most 2 / cap of this
        // rounding.
        const double u = testing::roundoff(DType::f32), size = c.softcap > 0 ? c.softcap : 5 * c.scale;
        const double off = (8 + 4 * size) * u;
        testing::expect_close(lse, values(lse64), off, 2 * u);
        testing::expect_close(loss, values(loss64), 3 * off, 2 * u);
        if (!gradient) continue;
        const double of_slope = c.softcap > 0 ? 2 / c.softcap * testing::roundoff(type) : 0;
        const double subnormal = type == DType::f16 ? 6e-8 : 0;
        testing::expect_close(e, values(logits64), 9 * off + 3 * (of_slope + subnormal),
                              3 * off + 2.02 * testing::roundoff(type));
      }
}

// The output of a product of softcapped logits, here made in fp64: the rows' factors times this output are the
// gradient. An ignored row holds no numbers.
template <class B, class Call> void capped_agrees_with_fp64(Call&& call) {
  using testing::values;
  struct Case {
    int64_t rows, vocab, features;
    double softcap, z_loss, scale;
  };
  constexpr int64_t kColumns = cuda::kCappedColumns;
  for (const Case& c : {Case{3, 8, 8, 30, 0, 1},
                        {5, 136, 1032, 15, 1e-4, 10},
                        {4, 20488, 16, 40, cuda::kMostCappedZ, 30},
                        {4, 136, 16, 0.5, 1e-4, 1},
                        {4, 136, 16, 0.01, 0, 10}})
    for (bool gradient : {true, false}) {
      SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.vocab << (gradient ? "" : ", losses alone"));
      Buffer logits64(DType::f64, {c.rows, c.vocab}), loss64(DType::f64, {c.rows}), lse64(DType::f64, {c.rows});
      testing::fill_normal(logits64, 1, c.scale);
      const int64_t tiles = (c.vocab + kColumns - 1) / kColumns;
      B u(DType::bf16, {c.rows, c.vocab}), sums(DType::f32, {c.rows, tiles}),
          at_target = testing::poisoned<B>(DType::f32, {c.rows}), factor = testing::poisoned<B>(DType::f32, {c.rows}),
          x = testing::normal<B>(DType::bf16, {c.rows, c.features}, 5),
          scaled = testing::poisoned<B>(DType::bf16, {c.rows, c.features});
      B targets = targets_for<B>(c.rows, c.vocab);
      Buffer targets64(DType::i32, {c.rows});
      assign_ids(targets64, testing::host_of(targets));
      std::vector<double> logits = values(logits64), weighed(logits.size());
      for (int64_t r = 0; r < c.rows; ++r) {
        const int32_t target = Tensor(targets64).ptr<int32_t>()[r];
        for (int64_t t = 0; t < tiles; ++t) {
          double sum = 0;
          for (int64_t v = t * kColumns; v < std::min(c.vocab, (t + 1) * kColumns); ++v) {
            const double th = std::tanh(logits[r * c.vocab + v] / c.softcap), e = std::exp(c.softcap * th);
            sum += e;
            weighed[r * c.vocab + v] = target < 0 ? NAN : e * (1 - th * th);
            if (v == target) testing::host_of(at_target).template ptr<float>()[r] = float(c.softcap * th);
          }
          testing::host_of(sums).template ptr<float>()[r * tiles + t] = target < 0 ? NAN : float(sum);
        }
      }
      testing::assign(testing::host_of(u), weighed);
      testing::send(u), testing::send(sums), testing::send(at_target);
      B loss = testing::poisoned<B>(DType::f32, {c.rows}), lse = testing::poisoned<B>(DType::f32, {c.rows});
      B dloss = testing::normal<B>(DType::f32, {c.rows}, 3);
      Buffer dloss64 = testing::exact(dloss);
      call(cuda::Capped{.u = gradient ? Tensor(u) : Tensor(),
                        .sums = sums,
                        .at_target = at_target,
                        .factor = gradient ? Tensor(factor) : Tensor(),
                        .x = gradient ? Tensor(scaled) : Tensor(),
                        .vocab = c.vocab},
           x,
           CrossEntropy{.targets = targets,
                        .loss = loss,
                        .lse = lse,
                        .dloss = gradient ? Tensor(dloss) : Tensor(),
                        .softcap = c.softcap,
                        .z_loss = c.z_loss});
      cross_entropy({.logits = logits64,
                     .targets = targets64,
                     .loss = loss64,
                     .lse = lse64,
                     .dloss = dloss64,
                     .dlogits = logits64,
                     .softcap = c.softcap,
                     .z_loss = c.z_loss},
                    {});
      // As above. A target's exponential and its slope come from c in fp32: c / cap squared has roundings of 1.
      const double off = (8 + 4 * c.softcap) * testing::roundoff(DType::f32);
      for (B* b : {&loss, &lse, &u, &factor, &scaled}) testing::fetch(*b);
      B of_dx = testing::normal<B>(DType::f32, {c.rows, c.features}, 6),
        dx = testing::poisoned<B>(DType::bf16, {c.rows, c.features});
      if (gradient) cuda::multiply_rows(factor, of_dx, dx, {});
      testing::fetch(dx);
      const auto got = [&](B& b) { return values(testing::host_of(b)); };
      const std::vector<double> losses = got(loss), lses = got(lse), want = values(logits64), us = got(u),
                                factors = got(factor), xs = got(x), scaleds = got(scaled), upstream = values(dloss64),
                                dx_sums = got(of_dx), dxs = got(dx);
      for (int64_t r = 0; r < c.rows; ++r) {
        const bool ignored = Tensor(targets64).ptr<int32_t>()[r] < 0;
        EXPECT_NEAR(losses[r], values(loss64)[r], ignored ? 0 : 3 * off + 1e-6 * std::fabs(values(loss64)[r]));
        if (!ignored) { EXPECT_NEAR(lses[r], values(lse64)[r], off + 1e-6 * std::fabs(values(lse64)[r])); }
        if (!gradient) continue;
        int wrong = 0;
        for (int64_t v = 0; v < c.vocab; ++v) {
          const double g = factors[r] * us[r * c.vocab + v], exact = want[r * c.vocab + v];
          const double allowed =
              std::fabs(exact) * (1.01 * testing::roundoff(DType::bf16) + 3 * off) + 9 * off * std::fabs(upstream[r]);
          if (!(std::fabs(g - exact) <= (ignored ? 0 : allowed)) && ++wrong <= 3)
            ADD_FAILURE() << "row " << r << ", " << v << ": found " << g << ", expected " << exact;
        }
        EXPECT_EQ(wrong, 0);
        for (int64_t i = 0; i < c.features; ++i)
          for (const auto& [from, to] : {std::pair(&xs, &scaleds), std::pair(&dx_sums, &dxs)}) {
            const double product = factors[r] * (*from)[r * c.features + i];
            EXPECT_NEAR((*to)[r * c.features + i], product, std::fabs(product) * 1.01 * testing::roundoff(DType::bf16));
          }
      }
    }
}

// A row of the ignored index has no loss and no gradient, also where the index is a token's; the results of all further
// rows do not change.
template <class B, class Call> void the_ignored_index_may_be_a_tokens(Call&& call) {
  using testing::values;
  B targets(DType::i32, {3});
  testing::host_of(targets).template ptr<int32_t>()[0] = 3;
  testing::host_of(targets).template ptr<int32_t>()[1] = 5;
  testing::host_of(targets).template ptr<int32_t>()[2] = 0;
  testing::send(targets);
  B dloss = testing::normal<B>(DType::f32, {3}, 3);
  std::vector<double> losses[2], gradients[2];
  for (int i = 0; i < 2; ++i) {
    B logits = testing::normal<B>(DType::f32, {3, 8}, 1), loss = testing::poisoned<B>(DType::f32, {3}),
      dlogits = testing::poisoned<B>(DType::f32, {3, 8});
    call(CrossEntropy{.logits = logits,
                      .targets = targets,
                      .loss = loss,
                      .dloss = dloss,
                      .dlogits = dlogits,
                      .softcap = 0.5,
                      .z_loss = 0.1,
                      .ignore_index = i == 0 ? -1 : 3,
                      .label_smoothing = 0.2});
    testing::fetch(loss), testing::fetch(dlogits);
    losses[i] = values(testing::host_of(loss)), gradients[i] = values(testing::host_of(dlogits));
  }
  EXPECT_GT(losses[0][0], 0);
  losses[0][0] = 0;
  for (size_t v = 0; v < 8; ++v) {
    EXPECT_NE(gradients[0][v], 0);
    gradients[0][v] = 0;
  }
  EXPECT_EQ(losses[1], losses[0]);
  EXPECT_EQ(gradients[1], gradients[0]);
}

// On a GPU the kernel is the first reader of the targets.
template <class B, class Call> void a_target_outside_gives_a_nan(Call&& call) {
  B logits = testing::normal<B>(DType::f32, {2, 8}, 1), loss = testing::poisoned<B>(DType::f32, {2});
  B targets(DType::i32, {2});
  testing::host_of(targets).template ptr<int32_t>()[0] = 8;
  testing::host_of(targets).template ptr<int32_t>()[1] = 7;
  testing::send(targets);
  call(CrossEntropy{.logits = logits, .targets = targets, .loss = loss});
  testing::fetch(loss);
  const auto got = testing::values(testing::host_of(loss));
  EXPECT_TRUE(std::isnan(got[0]));
  EXPECT_TRUE(std::isfinite(got[1]));
}

}  // namespace ingot::cross_entropy_cases
