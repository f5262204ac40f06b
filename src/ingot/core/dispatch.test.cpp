#include "ingot/core/dispatch.h"

#include <gtest/gtest.h>

#define INGOT_HAS_CUDA_ROOM_OF_THIS_TEST 1

namespace ingot {
namespace {

static_assert(INGOT_HAS_CUDA(ROOM_OF_THIS_TEST) == 1);
static_assert(INGOT_HAS_CUDA(NO_SUCH_ROOM) == 0);

std::string called;
namespace cpu {
void op(int) { called = "cpu"; }
void absent(int) { called = "cpu"; }
}  // namespace cpu
namespace cuda {
void op(int) { called = "cuda"; }
void absent(int);  // never linked
}  // namespace cuda

void run(Device device) { INGOT_DISPATCH(ROOM_OF_THIS_TEST, device, op, 1); }
void run_absent(Device device) { INGOT_DISPATCH(NO_SUCH_ROOM, device, absent, 1); }

TEST(Dispatch, GoesToTheDeviceOfTheOperandsWhereTheRoomHasKernelsForIt) {
  run({});
  EXPECT_EQ(called, "cpu");
  run({Device::cuda, 0});
  EXPECT_EQ(called, "cuda");
  run_absent({});
  EXPECT_EQ(called, "cpu");
  EXPECT_THROW(run_absent({Device::cuda, 0}), Error);
}

}  // namespace
}  // namespace ingot
