// Copies and fills on a GPU, and between GPU and host. Without a GPU these cases skip.
#include "ingot/kernels/copy/copy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "ingot/core/memory/arena.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/copy_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/poisoned_memory.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::DeviceBuffer;
using testing::values;

class CopyCuda : public testing::GpuTest<> {};

TEST_F(CopyCuda, ConvertsBetweenFloatingTypesAndWritesNothingElse) {
  for (DType s : kFloats)
    for (DType d : kFloats)
      for (const CopyCase& c : kCopyCases) {
        SCOPED_TRACE(::testing::Message() << s << " to " << d << ' ' << c.rows << 'x' << c.cols << " gaps "
                                          << c.gap_from << ' ' << c.gap_to << " shift " << c.shift);
        DeviceBuffer from(s, {c.rows, c.cols}, c.cols + c.gap_from, c.shift),
            to(d, {c.rows, c.cols}, c.cols + c.gap_to, c.shift);
        testing::fill_normal(from.host(), 1, 3);
        from.upload(), to.upload();
        copy({.from = from, .to = to}, {});
        from.download(), to.download();
        auto want = values(from.host());
        for (double& x : want) x = rounded(x, d);
        EXPECT_EQ(values(to.host()), want);
        EXPECT_TRUE(from.untouched(true) && to.untouched());
      }
}

TEST_F(CopyCuda, MovesAnyTypeAndAnyStrides) {
  DeviceBuffer from(DType::i64, {4, 6}), to(DType::i64, {6, 4});
  for (int64_t i = 0; i < 24; ++i) from.host().ptr<int64_t>()[i] = (int64_t(1) << 40) + i;
  from.upload(), to.upload();
  Tensor turned = from.tensor();
  std::swap(turned.shape.dim[0], turned.shape.dim[1]), std::swap(turned.stride[0], turned.stride[1]);
  copy({.from = turned, .to = to}, {});
  to.download();
  for (int64_t r = 0; r < 6; ++r)
    for (int64_t c = 0; c < 4; ++c) EXPECT_EQ(to.host().ptr<int64_t>()[r * 4 + c], (int64_t(1) << 40) + c * 6 + r);
}

TEST_F(CopyCuda, FillsAnyTypeAndWritesNothingElse) {
  for (DType t :
       {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u32, DType::u16, DType::u8})
    for (const CopyCase& c : kCopyCases) {
      DeviceBuffer to(t, {c.rows, c.cols}, c.cols + c.gap_to, c.shift);
      to.upload();
      fill({.to = to, .value = 37}, {});
      to.download();
      EXPECT_EQ(values(to.host()), std::vector<double>(size_t(c.rows * c.cols), 37.0)) << t;
      EXPECT_TRUE(to.untouched());
    }
}

TEST_F(CopyCuda, MovesAndFillsSlicesThatLieApart) {
  copies_and_fills_slices<DeviceBuffer>([](const Copy& c) { copy(c, {}); }, [](const Fill& f) { fill(f, {}); });
}

TEST_F(CopyCuda, GoesFromTheHostToTheGpuAndBack) {
  for (DType t : {DType::f32, DType::bf16, DType::i32, DType::u8})
    for (const CopyCase& c : kCopyCases) {
      SCOPED_TRACE(::testing::Message() << t << ' ' << c.rows << 'x' << c.cols << " gaps " << c.gap_from << ' '
                                        << c.gap_to);
      Buffer from(t, {c.rows, c.cols}, c.cols + c.gap_from), back(t, {c.rows, c.cols}, c.cols + c.gap_from);
      testing::fill_ids(from, 1, 1000);
      DeviceBuffer there(t, {c.rows, c.cols}, c.cols + c.gap_to, c.shift);
      there.upload();
      copy({.from = from, .to = there}, {});
      copy({.from = there, .to = back}, {});
      there.download();
      EXPECT_EQ(values(there.host()), values(from));
      EXPECT_EQ(values(back), values(from));
      EXPECT_TRUE(there.untouched() && back.guards_intact());
    }
}

TEST_F(CopyCuda, FollowsItsStreamAndIsReplayedByAGraph) {
  const gpu::OwnedStream stream;
  Arena host(1 << 16, gpu::pinned_memory());
  const Tensor in = host.take(DType::f32, {1000}), out = host.take(DType::f32, {1000});
  DeviceBuffer there(DType::f32, {1000}), again(DType::f32, {1000});
  gpu::Graph graph(stream, [&] {
    copy({.from = in, .to = there}, stream);
    copy({.from = there, .to = again}, stream);
    fill({.to = there}, stream);
    copy({.from = again, .to = out}, stream);
  });
  for (double v : {1.0, 2.0}) {
    fill({.to = in, .value = v}, {});
    graph.launch(stream);
    gpu::synchronize({Device::cuda, 0}, stream);
    EXPECT_EQ(values(out), std::vector<double>(1000, v));
  }
}

TEST_F(CopyCuda, RefusesTransfersThatConvertOrOverlapOrHaveStrides) {
  Buffer wide(DType::f64, {4, 8}), same(DType::f32, {8, 4});
  DeviceBuffer there(DType::f32, {4, 8}), other(DType::f32, {4, 8});
  const auto error_of = [](const Tensor& from, const Tensor& to) -> std::string {
    try {
      copy({.from = from, .to = to}, {});
    } catch (const Error& e) { return e.what(); }
    return "no error";
  };
  EXPECT_NE(error_of(wide, there).find("dtype between cpu and cuda:0"), std::string::npos);
  Tensor turned = same;
  std::swap(turned.shape.dim[0], turned.shape.dim[1]), std::swap(turned.stride[0], turned.stride[1]);
  EXPECT_NE(error_of(turned, there).find("expected rows one stride apart"), std::string::npos);
  EXPECT_NE(error_of(there, there).find("share memory"), std::string::npos);
  Tensor elsewhere = other.tensor();
  elsewhere.device.index = 1;
  EXPECT_NE(error_of(there, elsewhere).find("cuda:0 and cuda:1"), std::string::npos);
}

TEST_F(CopyCuda, AnArenaServesDeviceMemoryPoisonedOnDemand) {
  testing::PoisonedMemory poisoned(gpu::device_memory(0));
  {
    Arena arena(1 << 20, poisoned);
    const Tensor t = arena.take(DType::f32, {64, 3}), u = arena.take(DType::f32, {64, 3});
    EXPECT_EQ(t.device, (Device{Device::cuda, 0}));
    EXPECT_EQ(poisoned.taken(), 1 << 20);
    Buffer back(DType::f32, {64, 3});
    fill({.to = u, .value = 3}, {});
    copy({.from = t, .to = back}, {});
    gpu::synchronize();
    for (double x : values(back)) EXPECT_TRUE(std::isnan(x));
    copy({.from = u, .to = back}, {});
    gpu::synchronize();
    EXPECT_EQ(values(back), std::vector<double>(192, 3.0));
  }
  EXPECT_EQ(poisoned.taken(), 0);
}

TEST_F(CopyCuda, RowsGoWhereANumberSays) { copies_rows_at_a_place<DeviceBuffer>(); }

TEST_F(CopyCuda, AnAllocationBeyondTheDeviceMemoryIsRefusedWithBothFigures) {
  try {
    Arena arena(int64_t(1) << 50, gpu::device_memory(0));
    FAIL() << "a petabyte was given";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("1125899906842624 bytes"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("free"), std::string::npos) << e.what();
  }
  DeviceBuffer fine(DType::f32, {4});  // the refusal left no error behind
  fine.upload();
  EXPECT_NO_THROW(fill({.to = fine}, {}));
}

}  // namespace
}  // namespace ingot
