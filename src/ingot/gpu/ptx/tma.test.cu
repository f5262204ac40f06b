// The copy engine: linear and tensor copies, multicast, copies between blocks of a cluster, and the barriers of their
// completion.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/testing/device_array.h"
#include "ingot/testing/hopper_test.h"

namespace ingot {
namespace {

using testing::counting;
using testing::DeviceArray;
using tile::Swizzle;

class TmaCuda : public testing::HopperTest<> {};

__device__ void start_barrier(uint64_t* barrier, uint32_t arrivals) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, arrivals);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

// --- mbarriers

__global__ void mbarrier_phases(uint32_t* answers) {
  __shared__ uint64_t barrier;
  start_barrier(&barrier, 2);
  if (threadIdx.x != 0) return;
  answers[0] = ptx::mbarrier_try_wait(&barrier, 1);  // the phase before the first phase counts as complete
  answers[1] = ptx::mbarrier_try_wait(&barrier, 0);
  ptx::mbarrier_arrive(&barrier);
  answers[2] = ptx::mbarrier_try_wait(&barrier, 0);
  ptx::mbarrier_arrive(&barrier);
  answers[3] = ptx::mbarrier_try_wait(&barrier, 0);
  answers[4] = ptx::mbarrier_try_wait(&barrier, 0);
  answers[5] = ptx::mbarrier_try_wait(&barrier, 1);
  ptx::mbarrier_arrive(&barrier);
  ptx::mbarrier_arrive(&barrier);
  answers[6] = ptx::mbarrier_try_wait(&barrier, 1);
  answers[7] = ptx::mbarrier_try_wait(&barrier, 0);
}

TEST_F(TmaCuda, BarriersCompleteAPhaseWhenAllHaveArrivedSmall) {
  DeviceArray<uint32_t> answers(8);
  gpu::launch("mbarrier_phases", mbarrier_phases, {.grid = 1, .block = 32}, {}, answers.device());
  answers.download();
  EXPECT_EQ(answers.host, (std::vector<uint32_t>{1, 0, 0, 1, 1, 0, 1, 0}));
}

// --- linear copies

constexpr int kWords = 256;

__global__ void linear_copies(uint32_t* to, const uint32_t* from, uint64_t* policy) {
  __shared__ alignas(128) uint32_t tile[2][kWords];
  __shared__ uint64_t barrier;
  start_barrier(&barrier, 1);
  if (threadIdx.x == 0) {
    ptx::mbarrier_expect_tx(&barrier, sizeof(tile) / 2);
    ptx::bulk_load(tile[0], from, sizeof(tile) / 2, &barrier);
    ptx::mbarrier_arrive_expect_tx(&barrier, sizeof(tile) / 2);
    ptx::bulk_load(tile[1], from + kWords, sizeof(tile) / 2, &barrier, ptx::kEvictFirst);
    *policy = ptx::evict_first_policy();
  }
  tile::wait_or_trap(&barrier, 0);
  for (int i = threadIdx.x; i < 2 * kWords; i += blockDim.x) to[i] = tile[i / kWords][i % kWords];
}

TEST_F(TmaCuda, CopiesLinesSmall) {
  const DeviceArray<uint32_t> from(counting(2 * kWords));
  DeviceArray<uint32_t> to(2 * kWords);
  DeviceArray<uint64_t> policy(1);
  gpu::launch("linear_copies", linear_copies, {.grid = 1, .block = 64}, {}, to.device(), from.device(),
              policy.device());
  to.download();
  policy.download();
  EXPECT_EQ(to.host, from.host);
  EXPECT_EQ(policy.host[0], ptx::kEvictFirst) << "the constant is what createpolicy makes";
}

// --- tensor copies

// One box from (x, y, z) to shared memory and, unswizzled by plain code, to `out`.
__global__ void load_box(const __grid_constant__ CUtensorMap map, uint32_t rank, int x, int y, int z, uint32_t rows,
                         uint32_t row_bytes, Swizzle swizzle, uint64_t hint, uint32_t* out) {
  extern __shared__ __align__(1024) char tile[];
  __shared__ uint64_t barrier;
  start_barrier(&barrier, 1);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&map);
    if (rank == 2) ptx::tensor_prefetch(&map, x, y);
    ptx::mbarrier_arrive_expect_tx(&barrier, rows * row_bytes);
    if (rank == 3 && hint != 0)
      ptx::tensor_load_3d(tile, &map, x, y, z, &barrier, hint);
    else if (rank == 3)
      ptx::tensor_load_3d(tile, &map, x, y, z, &barrier);
    else if (hint != 0)
      ptx::tensor_load(tile, &map, x, y, &barrier, hint);
    else
      ptx::tensor_load(tile, &map, x, y, &barrier);
  }
  tile::wait_or_trap(&barrier, 0);
  for (uint32_t i = threadIdx.x; i < rows * row_bytes / 4; i += blockDim.x)
    out[i] = *reinterpret_cast<const uint32_t*>(tile + tile::swizzled(swizzle, i * 4));
}

// The same in the opposite direction, as a store or an addition.
__global__ void store_box(const __grid_constant__ CUtensorMap map, uint32_t rank, int x, int y, int z, uint32_t rows,
                          uint32_t row_bytes, Swizzle swizzle, bool add, uint64_t hint, const uint32_t* in) {
  extern __shared__ __align__(1024) char tile[];
  for (uint32_t i = threadIdx.x; i < rows * row_bytes / 4; i += blockDim.x)
    *reinterpret_cast<uint32_t*>(tile + tile::swizzled(swizzle, i * 4)) = in[i];
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (add)
    ptx::tensor_add_3d(&map, x, y, z, tile);
  else if (rank == 3)
    ptx::tensor_store_3d(&map, x, y, z, tile);
  else if (hint != 0)
    ptx::tensor_store(&map, x, y, tile, hint);
  else
    ptx::tensor_store(&map, x, y, tile);
  ptx::bulk_commit_group();
  ptx::bulk_wait_group<0>();
}

struct BoxCase {
  DType dtype;
  Swizzle swizzle;
  int x, y, z = -1;  // z < 0: rank 2
  uint64_t hint = 0;
};
// Inside, over every edge, and wholly outside.
std::vector<BoxCase> box_cases() {
  std::vector<BoxCase> all;
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (Swizzle s : {Swizzle::none, Swizzle::b32, Swizzle::b64, Swizzle::b128})
      for (int z : {-1, 1, 2}) {
        all.push_back({dtype, s, 8, 3, z});
        all.push_back({dtype, s, -8, -2, z, ptx::kEvictLast});
        all.push_back({dtype, s, 56, 30, z});
      }
  all.push_back({DType::bf16, Swizzle::b128, 200, 100, -1, ptx::kEvictFirst});
  return all;
}
std::ostream& operator<<(std::ostream& out, const BoxCase& c) {
  return out << c.dtype << " swizzle " << int(c.swizzle) << " at " << c.x << ", " << c.y << ", " << c.z;
}

// A (3, 37, 68 or as told) tensor inside rows of 72 and planes of 40 rows, elements as raw integers; boxes of 2 x 16 x
// one swizzle row.
struct Boxes {
  static constexpr int kOuter = 3, kRows = 37, kStride = 72, kPlane = 40 * kStride, kBoxRows = 16;
  explicit Boxes(const BoxCase& c, int tensor_cols = 68)
      : tensor_cols(tensor_cols),
        size(int(size_of(c.dtype))),
        cols(int(tile::row_bytes(c.swizzle)) / size),
        planes(c.z < 0 ? 1 : 2) {}
  int tensor_cols, size, cols, planes;
  int rows() const { return planes * kBoxRows; }
  Tensor tensor(void* data, const BoxCase& c) const {
    Tensor t(data, c.dtype, {kOuter, kRows, tensor_cols}, Device{Device::cuda, 0});
    t.stride[0] = kPlane;
    t.stride[1] = kStride;
    return c.z < 0 ? t.select(0, 0) : t;
  }
  CUtensorMap map(void* data, const BoxCase& c) const {
    return gpu::tensor_map("boxes", tensor(data, c),
                           {.rows = kBoxRows, .cols = cols, .swizzle = c.swizzle, .outer = planes});
  }
  // The element's index in memory, or -1 outside.
  int64_t at(const BoxCase& c, int row, int col) const {
    const int z = (c.z < 0 ? 0 : c.z) + row / kBoxRows, y = c.y + row % kBoxRows, x = c.x + col;
    if (z >= kOuter || y < 0 || y >= kRows || x < 0 || x >= tensor_cols) return -1;
    return int64_t(z) * kPlane + y * kStride + x;
  }
};
uint32_t element(const std::vector<uint32_t>& words, int64_t i, int size) {
  return size == 4 ? words[size_t(i)] : words[size_t(i / 2)] >> (i % 2 * 16) & 0xffff;
}

TEST_F(TmaCuda, LoadsBoxesWithZerosOutsideSmall) {
  for (const BoxCase& c : box_cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const Boxes b(c);
    const DeviceArray<uint32_t> from(counting(Boxes::kOuter * Boxes::kPlane, 0x10001));
    DeviceArray<uint32_t> out(size_t(b.rows() * b.cols * b.size / 4));
    const uint32_t bytes = uint32_t(b.cols * b.size);
    gpu::launch("load_box", load_box, {.grid = 1, .block = 64, .smem = b.rows() * bytes}, {}, b.map(from.device(), c),
                uint32_t(c.z < 0 ? 2 : 3), c.x, c.y, c.z, uint32_t(b.rows()), bytes, c.swizzle, c.hint, out.device());
    out.download();
    for (int r = 0; r < b.rows(); ++r)
      for (int k = 0; k < b.cols; ++k) {
        const int64_t i = b.at(c, r, k);
        ASSERT_EQ(element(out.host, r * b.cols + k, b.size), i < 0 ? 0 : element(from.host, i, b.size))
            << "row " << r << " column " << k;
      }
  }
}

TEST_F(TmaCuda, StoresBoxesAndDropsWhatIsOutsideSmall) {
  for (const BoxCase& c : box_cases()) {
    if (c.x < 0 || c.y < 0) continue;  // stores must not begin before 0
    SCOPED_TRACE(::testing::Message() << c);
    const Boxes b(c, 64);  // stores write whole 16 bytes even over the inner edge
    DeviceArray<uint32_t> to(std::vector<uint32_t>(Boxes::kOuter * Boxes::kPlane, 0xabcdabcd));
    const DeviceArray<uint32_t> in(counting(size_t(b.rows() * b.cols * b.size / 4), 0x20002));
    const uint32_t bytes = uint32_t(b.cols * b.size);
    gpu::launch("store_box", store_box, {.grid = 1, .block = 64, .smem = b.rows() * bytes}, {}, b.map(to.device(), c),
                uint32_t(c.z < 0 ? 2 : 3), c.x, c.y, c.z, uint32_t(b.rows()), bytes, c.swizzle, false, c.hint,
                in.device());
    std::vector<uint32_t> want = to.host;
    to.download();
    for (int r = 0; r < b.rows(); ++r)
      for (int k = 0; k < b.cols; ++k)
        if (const int64_t i = b.at(c, r, k); i >= 0) {
          const uint32_t v = element(in.host, r * b.cols + k, b.size);
          if (b.size == 4)
            want[size_t(i)] = v;
          else
            want[size_t(i / 2)] = (want[size_t(i / 2)] & (0xffff0000u >> (i % 2 * 16))) | v << (i % 2 * 16);
        }
    const auto [found, expected] = std::mismatch(to.host.begin(), to.host.end(), want.begin());
    const int64_t word = found - to.host.begin();
    ASSERT_TRUE(found == to.host.end()) << "row " << word * 4 / b.size / Boxes::kStride << " column "
                                        << word * 4 / b.size % Boxes::kStride << ": found 0x" << std::hex << *found
                                        << ", expected 0x" << *expected;
  }
}

TEST_F(TmaCuda, AddsBoxesOfFloatsSmall) {
  const BoxCase c{DType::f32, Swizzle::b128, 52, 30, 0};
  const Boxes b(c);
  std::vector<float> start(Boxes::kOuter * Boxes::kPlane, 0.5f), box(size_t(b.rows() * b.cols));
  std::iota(box.begin(), box.end(), 1.f);
  DeviceArray<float> to(start);
  const DeviceArray<float> in(box);
  for (int twice = 0; twice < 2; ++twice)
    gpu::launch("store_box", store_box, {.grid = 1, .block = 64, .smem = b.rows() * 128}, {}, b.map(to.device(), c), 3u,
                c.x, c.y, c.z, uint32_t(b.rows()), 128u, c.swizzle, true, uint64_t(0),
                reinterpret_cast<const uint32_t*>(in.device()));
  to.download();
  for (int r = 0; r < b.rows(); ++r)
    for (int k = 0; k < b.cols; ++k)
      if (const int64_t i = b.at(c, r, k); i >= 0) start[size_t(i)] += 2 * box[size_t(r * b.cols + k)];
  EXPECT_EQ(to.host, start);
}

std::string refusal(const Tensor& t, const gpu::TmaBox& box) {
  try {
    (void)gpu::tensor_map("weights", t, box);
  } catch (const Error& e) { return e.what(); }
  return "";
}
TEST_F(TmaCuda, RefusesMapsByName) {
  DeviceArray<uint32_t> memory(4096);
  const Device gpu{Device::cuda, 0};
  const gpu::TmaBox box{.rows = 8, .cols = 64, .swizzle = Swizzle::b128};
  const Tensor t(memory.device(), DType::bf16, {16, 64}, gpu);
  EXPECT_EQ(refusal(t, box), "");
  EXPECT_NE(refusal(Tensor(memory.device(), DType::bf16, {16, 63}, gpu), box).find("stride of 63 elements"),
            std::string::npos);
  EXPECT_NE(refusal(Tensor(memory.device(), DType::i64, {16, 64}, gpu), box).find("i64"), std::string::npos);
  EXPECT_NE(refusal(Tensor(static_cast<void*>(memory.host.data()), DType::bf16, {16, 64}), box).find("on cpu"),
            std::string::npos);
  EXPECT_NE(refusal(t, {.rows = 8, .cols = 128, .swizzle = Swizzle::b128}).find("at most the swizzle's 128"),
            std::string::npos);
  EXPECT_NE(refusal(t, {.rows = 300, .cols = 64, .swizzle = Swizzle::b128}).find("1 to 256"), std::string::npos);
}

// A thread caches its latest maps: a request must not return the map of a different tensor at the same address.
TEST_F(TmaCuda, TellsMapsOfOneAddressApartSmall) {
  DeviceArray<uint32_t> memory(1 << 16);
  std::vector<std::vector<char>> maps;
  const auto make = [&](size_t i) {
    const int rows = 8 + int(i % 7), cols = 64 + 8 * int(i / 7 % 7), box_rows = 8 << (i / 49 % 3);
    const DType dtype = i / 147 % 2 ? DType::bf16 : DType::f16;
    Tensor t(memory.device() + 4 * (i / 294 % 2), dtype, {rows, 64}, Device{Device::cuda, 0});
    t.stride[0] = cols;
    const CUtensorMap map = gpu::tensor_map("kept", t, {.rows = box_rows, .cols = 64, .swizzle = Swizzle::b128});
    return std::vector<char>(reinterpret_cast<const char*>(&map), reinterpret_cast<const char*>(&map) + sizeof(map));
  };
  for (size_t i = 0; i < 588; ++i) maps.push_back(make(i));
  for (size_t i = 588; i-- > 0;) ASSERT_EQ(make(i), maps[i]) << i;
  std::sort(maps.begin(), maps.end());
  EXPECT_EQ(std::unique(maps.begin(), maps.end()), maps.end());
  make(0);
  Tensor apart(memory.device(), DType::f16, {8, 64}, Device{Device::cuda, 0});
  apart.stride[1] = 2;  // all other arguments equal those of the last map
  EXPECT_THROW(gpu::tensor_map("kept", apart, {.rows = 8, .cols = 64, .swizzle = Swizzle::b128}), Error);
}

// --- clusters

constexpr uint32_t kBlocks = 4;
constexpr uint16_t kMask = 0b1011;  // block 2 gets nothing

// Block 0 loads a box of 8 x 32 floats for the blocks of kMask.
__global__ void multicast(const __grid_constant__ CUtensorMap map, uint64_t hint, uint32_t* out) {
  __shared__ alignas(1024) uint32_t box[8 * 32];
  __shared__ uint64_t barrier;
  for (int i = threadIdx.x; i < 8 * 32; i += blockDim.x) box[i] = 7;
  ptx::fence_proxy_async_shared();
  start_barrier(&barrier, 1);
  const uint32_t rank = ptx::cluster_rank();
  const bool mine = kMask >> rank & 1;
  if (threadIdx.x == 0 && mine) ptx::mbarrier_arrive_expect_tx(&barrier, sizeof(box));
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (rank == 0 && threadIdx.x == 0) {
    if (hint != 0)
      ptx::tensor_load_multicast(box, &map, 0, 8, &barrier, kMask, hint);
    else
      ptx::tensor_load_multicast(box, &map, 0, 8, &barrier, kMask);
  }
  if (mine) tile::wait_or_trap(&barrier, 0);
  for (int i = threadIdx.x; i < 8 * 32; i += blockDim.x) out[rank * 256 + i] = box[i];
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

TEST_F(TmaCuda, MulticastReachesTheBlocksOfTheMaskSmall) {
  for (uint64_t hint : {uint64_t(0), ptx::kEvictLast}) {
    const DeviceArray<uint32_t> from(counting(32 * 32));
    DeviceArray<uint32_t> out(kBlocks * 256);
    const CUtensorMap map =
        gpu::tensor_map("multicast", Tensor(from.device(), DType::f32, {32, 32}, Device{Device::cuda, 0}),
                        {.rows = 8, .cols = 32, .swizzle = Swizzle::none});
    gpu::launch("multicast", multicast, {.grid = kBlocks, .block = 32, .cluster = kBlocks}, {}, map, hint,
                out.device());
    out.download();
    for (uint32_t rank = 0; rank < kBlocks; ++rank)
      for (uint32_t i = 0; i < 256; ++i)
        ASSERT_EQ(out.host[rank * 256 + i], kMask >> rank & 1 ? from.host[8 * 32 + i] : 7)
            << "block " << rank << " word " << i;
  }
}

// A (outer, rows, cols) box into two blocks.
__global__ void multicast_3d(const __grid_constant__ CUtensorMap map, uint32_t* out) {
  __shared__ alignas(128) uint32_t box[2 * 4 * 8];
  __shared__ uint64_t barrier;
  start_barrier(&barrier, 1);
  if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(&barrier, sizeof(box));
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (ptx::cluster_rank() == 1 && threadIdx.x == 0)
    ptx::tensor_load_3d_multicast(box, &map, 0, 4, 1, &barrier, ptx::multicast_mask(0, 2));
  tile::wait_or_trap(&barrier, 0);
  for (int i = threadIdx.x; i < 64; i += blockDim.x) out[ptx::cluster_rank() * 64 + i] = box[i];
  ptx::cluster_arrive();
  ptx::cluster_wait();
}
TEST_F(TmaCuda, MulticastOfThreeDimensionsSmall) {
  const DeviceArray<uint32_t> from(counting(4 * 8 * 8));
  DeviceArray<uint32_t> out(2 * 64);
  const CUtensorMap map =
      gpu::tensor_map("multicast_3d", Tensor(from.device(), DType::f32, {4, 8, 8}, Device{Device::cuda, 0}),
                      {.rows = 4, .cols = 8, .swizzle = Swizzle::none, .outer = 2});
  gpu::launch("multicast_3d", multicast_3d, {.grid = 2, .block = 32, .cluster = 2}, {}, map, out.device());
  out.download();
  for (uint32_t i = 0; i < 128; ++i) {
    const uint32_t z = 1 + i % 64 / 32, y = 4 + i % 32 / 8, x = i % 8;
    ASSERT_EQ(out.host[i], from.host[(z * 8 + y) * 8 + x]) << i;
  }
}

// Every block sends its tile to the next block by the copy engine, its rank by stores, and arrives at block 0.
__global__ void pass_on(uint32_t* all) {
  __shared__ alignas(128) uint32_t mine[64], theirs[64];
  __shared__ alignas(16) uint32_t stored[8];
  __shared__ uint64_t filled, everybody;
  uint32_t* out = all + ptx::cluster_index() * kBlocks * 128;
  const uint32_t rank = ptx::cluster_rank(), size = ptx::cluster_size(), next = (rank + 1) % size;
  for (uint32_t i = threadIdx.x; i < 64; i += blockDim.x) mine[i] = rank * 1000 + i;
  ptx::fence_proxy_async_shared();
  if (threadIdx.x == 0) ptx::mbarrier_init(&everybody, 2 * size);
  start_barrier(&filled, 1);
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx_remote(ptx::cluster_address(&filled, next), sizeof(mine));
    ptx::bulk_copy_to_cluster(ptx::cluster_address(theirs, next), mine, sizeof(mine),
                              ptx::cluster_address(&filled, next));
    const uint32_t four[4] = {rank, rank + 10, rank + 20, rank + 30}, one[1] = {rank + 40};
    ptx::cluster_store(ptx::cluster_address(stored, next), four);
    ptx::cluster_store(ptx::cluster_address(stored + 4, next), one);
    for (int twice = 0; twice < 2; ++twice) ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(&everybody, 0));
  }
  tile::wait_or_trap(&filled, 0);
  if (rank == 0) tile::wait_or_trap(&everybody, 0);
  for (uint32_t i = threadIdx.x; i < 64; i += blockDim.x) out[rank * 128 + i] = theirs[i];
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x < 5) out[rank * 128 + 64 + threadIdx.x] = stored[threadIdx.x];
  if (threadIdx.x == 0) {
    out[rank * 128 + 70] = size;
    out[rank * 128 + 71] = ptx::cluster_index();
  }
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

TEST_F(TmaCuda, BlocksOfAClusterReachEachOthersMemorySmall) {
  constexpr uint32_t kClusters = 3;
  DeviceArray<uint32_t> out(kClusters * kBlocks * 128);
  gpu::launch("pass_on", pass_on, {.grid = kClusters * kBlocks, .block = 32, .cluster = kBlocks}, {}, out.device());
  out.download();
  for (uint32_t block = 0; block < kClusters * kBlocks; ++block) {
    const uint32_t rank = block % kBlocks, before = (rank + kBlocks - 1) % kBlocks;
    const uint32_t* o = out.host.data() + block * 128;
    for (uint32_t i = 0; i < 64; ++i) ASSERT_EQ(o[i], before * 1000 + i);
    for (uint32_t i = 0; i < 5; ++i) ASSERT_EQ(o[64 + i], before + 10 * i);
    ASSERT_EQ(o[70], kBlocks);
    ASSERT_EQ(o[71], block / kBlocks);
  }
}

// Words with their own ready flag pass around the cluster; each is answered by an arrival without a release.
__global__ void pass_words(uint32_t* all) {
  __shared__ uint64_t received, answered;
  const uint32_t rank = ptx::cluster_rank(), size = ptx::cluster_size(), next = (rank + 1) % size;
  uint32_t* out = all + blockIdx.x * 4;
  received = 0;
  if (threadIdx.x == 0) ptx::mbarrier_init(&answered, 1);
  ptx::fence_mbarrier_init();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x == 0) {
    ptx::cluster_store_relaxed(&received, next, uint64_t(rank + 1) << 32 | 77);
    uint64_t word = 0;
    for (int polls = 0; word == 0 && polls < 10'000'000; ++polls) word = ptx::cluster_load_relaxed(&received);
    ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(&answered, (rank + size - 1) % size));
    out[0] = uint32_t(word >> 32);
    out[1] = uint32_t(word);
  }
  tile::wait_or_trap(&answered, 0);
  tile::wait_warp_or_trap(&answered, 0);  // and again, by the warp
  if (threadIdx.x == 0) out[2] = 1;
  ptx::cluster_arrive();
  ptx::cluster_wait();
}
TEST_F(TmaCuda, WordsPassThroughACluster) {
  DeviceArray<uint32_t> out(std::vector<uint32_t>(3 * kBlocks * 4));
  gpu::launch("pass_words", pass_words, {.grid = 3 * kBlocks, .block = 32, .cluster = kBlocks}, {}, out.device());
  out.download();
  for (uint32_t block = 0; block < 3 * kBlocks; ++block) {
    const uint32_t before = (block + kBlocks - 1) % kBlocks, *o = out.host.data() + block * 4;
    EXPECT_EQ(o[0], before + 1) << block;
    EXPECT_EQ(o[1], 77u);
    EXPECT_EQ(o[2], 1u);
  }
}

// The copy engine reads from global memory the results of ordinary stores before a fence.
__global__ void read_what_was_stored(uint32_t* words, uint32_t* out) {
  __shared__ alignas(128) uint32_t tile[128];
  __shared__ uint64_t barrier;
  start_barrier(&barrier, 1);
  for (uint32_t round = 0; round < 20; ++round) {
    words[threadIdx.x] = 1000 * round + threadIdx.x;
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(&barrier, sizeof(tile));
      ptx::bulk_load(tile, words, sizeof(tile), &barrier);
    }
    tile::wait_or_trap(&barrier, round % 2);
    out[round * 128 + threadIdx.x] = tile[threadIdx.x];
    __syncthreads();
  }
}
TEST_F(TmaCuda, TheCopyEngineReadsWhatWasStoredBeforeAFenceSmall) {
  DeviceArray<uint32_t> words(std::vector<uint32_t>(128)), out(20 * 128);
  gpu::launch("read_what_was_stored", read_what_was_stored, {.grid = 1, .block = 128}, {}, words.device(),
              out.device());
  out.download();
  for (uint32_t i = 0; i < 20 * 128; ++i) ASSERT_EQ(out.host[i], 1000 * (i / 128) + i % 128);
}

// --- cp.async

__global__ void async_copies(const uint32_t* from, uint32_t* out) {
  __shared__ alignas(16) uint32_t tile[32 * 4 + 32 * 2 + 32];
  __shared__ alignas(16) uint32_t more[4];
  __shared__ uint64_t barrier;
  for (int i = threadIdx.x; i < 32 * 7; i += blockDim.x) tile[i] = 5;
  start_barrier(&barrier, 32);
  const uint32_t t = threadIdx.x;
  ptx::cp_async<16>(ptx::shared_address(tile + 4 * t), from + 4 * t, t % 3 == 0 ? 16 : t % 3 == 1 ? 6 : 0);
  ptx::cp_async_commit_group();
  ptx::cp_async<8>(ptx::shared_address(tile + 128 + 2 * t), from + 128 + 2 * t);
  ptx::cp_async<4>(ptx::shared_address(tile + 192 + t), from + 192 + t, t % 2 * 4);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<1>();
  __syncthreads();
  for (int i = t; i < 128; i += 32) out[i] = tile[i];
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  for (int i = 128 + t; i < 224; i += 32) out[i] = tile[i];
  if (t == 0) ptx::cp_async<16>(ptx::shared_address(more), from);
  ptx::cp_async_mbarrier_arrive(&barrier);
  tile::wait_or_trap(&barrier, 0);
  if (t < 4) out[224 + t] = more[t];
}

TEST_F(TmaCuda, AsyncCopiesFillWithZerosBeyondTheValidBytesSmall) {
  const DeviceArray<uint32_t> from(counting(224, 0x01020304));
  DeviceArray<uint32_t> out(228);
  gpu::launch("async_copies", async_copies, {.grid = 1, .block = 32}, {}, from.device(), out.device());
  out.download();
  for (uint32_t i = 0; i < 228; ++i) {
    uint32_t want = from.host[i < 224 ? i : i - 224];
    if (i < 128) {
      const uint32_t valid = i / 4 % 3 == 0 ? 16 : i / 4 % 3 == 1 ? 6 : 0, byte = i % 4 * 4;
      if (valid <= byte) want = 0;
      if (valid == byte + 2) want &= 0xffff;
    }
    if (i >= 192 && i < 224 && (i - 192) % 2 == 0) want = 0;
    ASSERT_EQ(out.host[i], want) << i;
  }
}

}  // namespace
}  // namespace ingot
