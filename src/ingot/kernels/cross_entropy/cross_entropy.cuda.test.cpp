#include "ingot/gpu/limits.h"
#include "ingot/kernels/cross_entropy/cross_entropy_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::DeviceBuffer;
using testing::values;

class CrossEntropyCuda : public testing::GpuTest<> {
 protected:
  // The products, and the pass that ends a capped product, need compute capability 8.0. Losses over logits do not.
  bool has_products() const { return gpu::current_limits().capability >= 80; }
};

TEST_F(CrossEntropyCuda, AgreesWithTheCpuInFp64Small) {
  const auto call = [](const CrossEntropy& a) { cross_entropy(a, {}); };
  cross_entropy_cases::agrees_with_fp64<DeviceBuffer>(call);
  cross_entropy_cases::a_target_outside_gives_a_nan<DeviceBuffer>(call);
  cross_entropy_cases::the_ignored_index_may_be_a_tokens<DeviceBuffer>(call);
  cross_entropy_cases::exponentials_agree_with_fp64<DeviceBuffer>(
      [](const cuda::Exponentials& e, const CrossEntropy& a) { cuda::cross_entropy_of(e, a, {}); });
}
TEST_F(CrossEntropyCuda, OfCappedProductsAgreesWithTheCpuInFp64Small) {
  if (!has_products()) GTEST_SKIP() << "needs compute capability 8.0";
  cross_entropy_cases::capped_agrees_with_fp64<DeviceBuffer>(
      [](const cuda::Capped& in, const Tensor& x, const CrossEntropy& a) { cuda::finish_capped(in, x, a, {}); });
}

// Chunks have equal rows, so a chunk may need less memory where the number of chunks grows by one.
TEST_F(CrossEntropyCuda, RoomOfManyRowsServesFewer) {
  for (DType type : {DType::bf16, DType::f32})
    for (const auto& [features, vocab] :
         {std::pair<int64_t, int64_t>{8192, 1000}, {4096, 128256}, {512, 8192}, {16, 41}}) {
      int64_t before = 0;
      for (int64_t rows = 0; rows < 100'000; rows += rows < 300 ? 1 : 61) {
        const int64_t bytes =
            linear_cross_entropy_workspace_bytes(rows, features, vocab, type, Products::bf16, {Device::cuda, 0});
        ASSERT_GE(bytes, before) << type << ' ' << rows << " x " << features << " x " << vocab;
        ASSERT_LE(bytes, 1'500'000'000);
        before = bytes;
      }
    }
}

#ifdef INGOT_HAS_CUDA_LINEAR
// Several chunks of rows, a vocabulary that is no multiple of a vector, a second pair: as logits, as exponentials (no
// cap or a high one), and as exponentials times slopes; caps and z-losses on either side of the limits of the last way.
TEST_F(CrossEntropyCuda, OfALinearLayerAgreesWithTheCpuInFp64) {
  if (!has_products()) GTEST_SKIP() << "needs compute capability 8.0";
  struct Case {
    int64_t rows, features, vocab, rank;
    double softcap = 20, z_loss = 1e-4;
    std::vector<int32_t> cu2{};
  };
  for (DType type : {DType::bf16, DType::f16, DType::f32})
    for (const Case& c : {Case{9, 16, 40, 0},
                          {140, 40, 200, 0, 0},
                          {140, 40, 200, 0, 30},
                          {140, 40, 200, 0, 50},
                          {200, 64, 70000, 0},
                          {8300, 16, 41, 8},
                          {300, 64, 1001, 8},
                          {0, 8, 8, 0},
                          {300, 96, 1000, 0, 0},
                          {300, 96, 1000, 0, 50},
                          {300, 96, 1000, 0, 40},
                          {300, 96, 1000, 0, 1},
                          {300, 96, 1000, 0, 0.5},
                          {300, 64, 1001, 0, 0.5},
                          {300, 96, 1000, 0, 0.02},
                          {300, 96, 1000, 0, 20, cuda::kMostCappedZ},
                          {300, 96, 1000, 0, 20, 0.1},
                          {16600, 16, 136, 0},
                          {300, 64, 1001, 8, 20, 1e-4, {0, 32, 64, 96, 96, 196, 300}},
                          {17000, 16, 41, 8, 20, 1e-4, {0, 100, 5000, 8292, 17000}}}) {
      if (testing::kEmulated && (c.rows * c.vocab > 40000 || type == DType::f32)) continue;
      const int64_t pairs = std::max<int64_t>(1, int64_t(c.cu2.size()) - 1);
      SCOPED_TRACE(::testing::Message() << type << ' ' << c.rows << ' ' << c.vocab << ' ' << pairs);
      const double weight = 1 / std::sqrt(double(c.features));
      DeviceBuffer x = testing::normal<DeviceBuffer>(type, {c.rows, c.features}, 1),
                   w = testing::normal<DeviceBuffer>(type, {c.vocab, c.features}, 2, weight),
                   x2 = testing::normal<DeviceBuffer>(type, {c.rows, c.rank}, 3),
                   w2 = testing::normal<DeviceBuffer>(type, {pairs * c.vocab, c.rank}, 4, weight),
                   dloss = testing::normal<DeviceBuffer>(DType::f32, {c.rows}, 5),
                   loss = testing::poisoned<DeviceBuffer>(DType::f32, {c.rows}),
                   dx = testing::poisoned<DeviceBuffer>(type, {c.rows, c.features}),
                   dw = testing::normal<DeviceBuffer>(DType::f32, {c.vocab, c.features}, 6),
                   dx2 = testing::poisoned<DeviceBuffer>(type, {c.rows, c.rank}),
                   dw2 = testing::normal<DeviceBuffer>(DType::f32, {pairs * c.vocab, c.rank}, 7);
      DeviceBuffer targets = cross_entropy_cases::targets_for<DeviceBuffer>(c.rows, c.vocab);
      Buffer x64 = exact(x), w64 = exact(w), x264 = exact(x2), w264 = exact(w2), dloss64 = exact(dloss),
             loss64(DType::f64, {c.rows}), dx64(DType::f64, {c.rows, c.features}), dw64 = exact(dw),
             dx264(DType::f64, {c.rows, c.rank}), dw264 = exact(dw2), targets64(DType::i32, {c.rows});
      cross_entropy_cases::assign_ids(targets64, targets.host());
      const auto call = [&](LinearCrossEntropy a) {
        const int64_t bytes =
            linear_cross_entropy_workspace_bytes(c.rows, c.features, c.vocab, a.x.dtype, a.products, a.x.device);
        a.softcap = c.softcap, a.z_loss = c.z_loss;
        if (a.x.device.kind == Device::cpu) {
          Buffer room(DType::u8, {bytes});
          a.workspace = room;
          linear_cross_entropy(a, {});
        } else {
          DeviceBuffer room(DType::u8, {bytes});
          a.workspace = room;
          linear_cross_entropy(a, {});
          gpu::synchronize();
        }
      };
      const bool second = c.rank > 0;
      const auto of_pairs = [&](const Tensor& t) {
        if (!second) return Tensor();
        return c.cu2.empty() ? t : t.reshape({pairs, c.vocab, c.rank});
      };
      call({.x = x,
            .w = w,
            .x2 = second ? x2 : Tensor(),
            .w2 = of_pairs(w2),
            .targets = targets,
            .loss = loss,
            .dloss = dloss,
            .dx = dx,
            .dx2 = second ? dx2 : Tensor(),
            .dw = dw,
            .dw2 = of_pairs(dw2),
            .cu2 = c.cu2});
      call({.x = x64,
            .w = w64,
            .x2 = second ? x264 : Tensor(),
            .w2 = of_pairs(w264),
            .targets = targets64,
            .loss = loss64,
            .dloss = dloss64,
            .dx = dx64,
            .dx2 = second ? dx264 : Tensor(),
            .dw = dw64,
            .dw2 = of_pairs(dw264),
            .cu2 = c.cu2});
      // Logits are fp32 sums of exact products (f32 operands: to fp32 roundings); the operands of the gradients'
      // products are rounded to the type once, relative to entries of size dloss: dx sums vocab of them against
      // weights, dw rows.
      const double u = testing::roundoff(type), sums = (double(c.features) + 100) * testing::roundoff(DType::f32);
      testing::expect_close(loss, values(loss64), 40 * sums, 1e-6);
      testing::expect_close(dx, values(dx64), 8 * (u + sums) * weight * 3, 2 * u);
      testing::expect_close(dw, values(dw64), 8 * (u + 4 * sums) * std::sqrt(double(c.rows) + 1), 1e-5);
      // Without gradients the losses are the same.
      DeviceBuffer alone = testing::poisoned<DeviceBuffer>(DType::f32, {c.rows});
      call({.x = x,
            .w = w,
            .x2 = second ? x2 : Tensor(),
            .w2 = of_pairs(w2),
            .targets = targets,
            .loss = alone,
            .cu2 = c.cu2});
      testing::expect_close(alone, values(loss64), 40 * sums, 1e-6);
      if (!second) continue;
      testing::expect_close(dx2, values(dx264), 8 * (u + sums) * weight * 3, 2 * u);
      testing::expect_close(dw2, values(dw264), 8 * (u + 4 * sums) * std::sqrt(double(c.rows) + 1), 1e-5);
    }
}
#endif

}  // namespace
}  // namespace ingot
