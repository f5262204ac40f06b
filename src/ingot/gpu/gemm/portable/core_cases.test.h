#pragma once
// The portable core with every order of the operands in memory, every pair and every kind of output, against the
// product in fp64. A translation unit calls the cases with DeviceBuffer, or with EmulatedBuffer on the CPU.
#include "ingot/gpu/gemm/gemm_cases.test.h"
#include "ingot/gpu/gemm/portable/core.cuh"

namespace ingot::gemm::cases {

template <class T, Major kMajorA, Major kMajorB, class Out, class Order = Grid, Pair kPairA = Pair::none,
          Pair kPairB = Pair::none>
struct PortableProduct {
  using Type = T;
  static constexpr Tile kTile = kPortableTile;
  using A = PortableCore::Operand<T, kMajorA, kTileM, false, kPairA>;
  using B = PortableCore::Operand<T, kMajorB, kTile.n, true, kPairB>;
  using Schedule = Order;
  using Epilogue = Store<Out, AsIs, 1, 2, PortableCore>;
};

// Tiles of a block, one above the other: the cases run with both. PortableCore::launch() chooses by the sizes.
inline int tiles_of_block = 1;
template <class Case> void with_both_heights(Case&& run) {
  for (tiles_of_block = 1; tiles_of_block <= 2; ++tiles_of_block) {
    SCOPED_TRACE(::testing::Message() << tiles_of_block << " tiles per block");
    run();
  }
}

template <class P, class Storage>
void launch_portable(const typename P::A::Params& a, const typename P::B::Params& b,
                     const typename P::Schedule& schedule, const Storage& c, bool add = false) {
  portable::Arguments<P> p{
      .a = a, .b = b, .schedule = schedule, .epilogue = P::Epilogue::params("gemm_test: c", c, add)};
  if constexpr (std::is_same_v<typename P::Schedule, Grid>) {
    const gpu::Limits& limits = gpu::device_limits({Device::cuda, 0});
    if (tiles_of_block == 2 && sizeof(portable::Memory<P, 2>) <= size_t(limits.smem_per_block))
      return portable::launch_pairs<P>("gemm_test", p, 0, {});
  }
  static_assert(sizeof(portable::Memory<P, 1>) <= 99 * 1024, "a block of one tile fits every GPU");
  portable::launch<P, 1>("gemm_test", p, 0, {}, schedule.tiles);
}

template <class P, class Out, class Storage> void portable_product(const Problem& s, bool add = false) {
  SCOPED_TRACE(::testing::Message() << s.batch << " x " << s.m << " x " << s.n << " x " << s.k << ", majors "
                                    << int(P::A::kMajor) << int(P::B::kMajor));
  constexpr DType kType = dtype_of<typename P::Type>;
  const Matrix<Storage> a(kType, P::A::kMajor, s.batch, s.m, s.k, 1), b(kType, P::B::kMajor, s.batch, s.n, s.k, 2);
  Storage c(dtype_of<Out>, {s.batch, s.m, s.n}, s.n + 8);
  std::vector<double> before(size_t(s.batch * s.m * s.n), 0);
  if (add) {
    testing::fill_normal(c.host(), 3);
    before = testing::values(c.host());
  }
  c.upload();
  launch_portable<P>(P::A::params("gemm_test: a", a.stored), P::B::params("gemm_test: b", b.stored),
                     P::Schedule::of(s, P::kTile), c, add);
  // A sum in 16 bits is rounded before it is added to the old value, and the result once more.
  const double rounding = add ? 1.01 * testing::roundoff(dtype_of<Out>) : 0;
  check(c, s.k, [&](int64_t batch, int64_t m, int64_t n) {
    const Expected e = dot(a, b, batch, m, n);
    const double old = before[size_t((batch * s.m + m) * s.n + n)];
    return Expected{e.sum + old, e.size + std::fabs(old) + rounding * std::fabs(e.sum) / (double(s.k) * 0x1p-23)};
  });
}

constexpr Problem kPortableShapes[] = {{128, 128, 128},     // a single tile, four steps, the last in the first stage
                                       {8, 8, 8},           // the smallest
                                       {300, 136, 72, 2}};  // ragged everywhere, two products
template <class T, Major kA, Major kB, class Out, class Storage> void portable_products() {
  for (const Problem& s : kPortableShapes) portable_product<PortableProduct<T, kA, kB, Out>, Out, Storage>(s);
}
template <class Storage> void portable_majors_and_types() {
  portable_products<bf16, Major::k, Major::k, float, Storage>();
  portable_products<bf16, Major::k, Major::mn, bf16, Storage>();
  portable_products<f16, Major::mn, Major::k, f16, Storage>();
  portable_products<f16, Major::mn, Major::mn, float, Storage>();
  // Rows that end anywhere are written element by element.
  portable_product<PortableProduct<bf16, Major::k, Major::k, float>, float, Storage>({20, 27, 24});
  portable_product<PortableProduct<bf16, Major::k, Major::k, bf16>, bf16, Storage>({20, 27, 24});
  // The ring of stages wraps around.
  portable_product<PortableProduct<bf16, Major::k, Major::mn, float>, float, Storage>({40, 24, 456});
}
template <class Storage> void portable_adds() {
  portable_product<PortableProduct<bf16, Major::mn, Major::mn, float>, float, Storage>({140, 72, 40}, true);
  portable_product<PortableProduct<bf16, Major::k, Major::mn, bf16>, bf16, Storage>({140, 72, 40}, true);
  portable_product<PortableProduct<f16, Major::k, Major::k, f16>, f16, Storage>({140, 72, 40}, true);
  portable_product<PortableProduct<bf16, Major::k, Major::k, float>, float, Storage>({20, 27, 24}, true);
  portable_product<PortableProduct<f16, Major::k, Major::k, f16>, f16, Storage>({20, 27, 24}, true);
}
template <class Storage> void portable_without_k() {
  using P = PortableProduct<bf16, Major::k, Major::k, float>;
  const Matrix<Storage> a(DType::bf16, Major::k, 1, 30, 64, 1), b(DType::bf16, Major::k, 1, 24, 64, 2);
  Storage c(DType::f32, {1, 30, 24});
  c.upload();
  launch_portable<P>(P::A::params("a", a.stored), P::B::params("b", b.stored), Grid::of({30, 24, 0}, P::kTile), c);
  check(c, 0, [](int64_t, int64_t, int64_t) { return Expected{0, 0}; });
}
// Only tiles on or below the diagonal are written.
template <class Storage> void portable_triangle() {
  using P = PortableProduct<bf16, Major::k, Major::k, float, Triangle>;
  const Matrix<Storage> a(DType::bf16, Major::k, 2, 200, 40, 1);
  Storage c(DType::f32, {2, 200, 200});
  testing::fill_normal(c.host(), 3);
  const std::vector<double> before = testing::values(c.host());
  c.upload();
  launch_portable<P>(P::A::params("a", a.stored), P::B::params("b", a.stored),
                     Triangle::of({200, 200, 40, 2}, P::kTile), c);
  check(c, 40, [&](int64_t batch, int64_t m, int64_t n) {
    if (n / 128 <= m / 128) return dot(a, a, batch, m, n);
    const double old = before[size_t((batch * 200 + m) * 200 + n)];
    return Expected{old, std::fabs(old)};
  });
}
// Columns 0 to 63 of each tile belong to the first matrix B, the rest to the second.
template <Major kB, class Storage> void portable_stacked(int64_t k) {
  using P = PortableProduct<bf16, Major::k, kB, float, Grid, Pair::none, Pair::stacked>;
  constexpr int64_t kHalf = kPortableTile.n / 2, kRows = kHalf + 24, kColumns = 2 * kPortableTile.n;
  const Matrix<Storage> a(DType::bf16, Major::k, 1, 20, k, 1), first(DType::bf16, kB, 1, kRows, k, 2),
      second(DType::bf16, kB, 1, kRows, k, 3);
  Storage c(DType::f32, {1, 20, kColumns});
  c.upload();
  launch_portable<P>(P::A::params("a", a.stored), P::B::params("b", first.stored, second.stored),
                     Grid::of({20, kColumns, k}, P::kTile), c);
  check(c, k, [&](int64_t, int64_t m, int64_t n) {
    const int64_t row = n / kPortableTile.n * kHalf + n % kHalf;
    return row < kRows ? dot(n % kPortableTile.n < kHalf ? first : second, a, 0, row, m) : Expected{0, 0};
  });
}
template <class Storage> void portable_chained(int64_t k) {
  using P = PortableProduct<bf16, Major::k, Major::mn, float, Grid, Pair::chained, Pair::chained>;
  const Matrix<Storage> a0(DType::bf16, Major::k, 1, 140, k, 1), a1(DType::bf16, Major::k, 1, 140, k, 2),
      b0(DType::bf16, Major::mn, 1, 40, k, 3), b1(DType::bf16, Major::mn, 1, 40, k, 4);
  Storage c(DType::f32, {1, 140, 40});
  c.upload();
  Grid schedule = Grid::of({140, 40, k}, P::kTile);
  schedule.k_steps *= 2;
  launch_portable<P>(P::A::params("a", a0.stored, a1.stored), P::B::params("b", b0.stored, b1.stored), schedule, c);
  check(c, 2 * k, [&](int64_t, int64_t m, int64_t n) {
    const Expected x = dot(a0, b0, 0, m, n), y = dot(a1, b1, 0, m, n);
    return Expected{x.sum + y.sum, x.size + y.size};
  });
}
template <class Storage> void portable_by_batch(int64_t k) {
  using P = PortableProduct<bf16, Major::mn, Major::mn, float, Grid, Pair::by_batch, Pair::same>;
  const Matrix<Storage> a0(DType::bf16, Major::mn, 1, 140, k, 1), a1(DType::bf16, Major::mn, 1, 140, k, 2),
      b(DType::bf16, Major::mn, 1, 40, k, 3);
  Storage c(DType::f32, {2, 140, 40});
  c.upload();
  launch_portable<P>(P::A::params("a", a0.stored, a1.stored), P::B::params("b", b.stored),
                     Grid::of({140, 40, k, 2}, P::kTile), c);
  check(c, k, [&](int64_t batch, int64_t m, int64_t n) { return dot((batch ? a1 : a0).row(0, m), b.row(0, n), k); });
}
// K ends within a step, and is long enough for the loop over whole steps.
template <class Storage> void portable_pairs() {
  for (int64_t k : {40, 168}) {
    SCOPED_TRACE(k);
    portable_stacked<Major::k, Storage>(k);
    portable_stacked<Major::mn, Storage>(k);
    portable_by_batch<Storage>(k);
  }
  for (int64_t k : {72, 128}) portable_chained<Storage>(k);  // of whole steps the second matrix follows without a gap
}
template <class Storage> void portable_refuses_unaligned_operands() {
  using P = PortableProduct<bf16, Major::k, Major::k, float>;
  Storage odd(DType::bf16, {4, 60}, 61);
  try {
    P::A::params("gemm_test: a", odd);
    FAIL() << "nothing was refused";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("gemm_test: a: found rows at"), std::string::npos) << e.what();
  }
}

}  // namespace ingot::gemm::cases
