#include "ingot/models/decode/model/no_megakernel.h"

#include <gtest/gtest.h>

namespace ingot::decode {
namespace {

TEST(NoMegakernel, TheReasonIsTheOneThatAppliesToTheModel) {
  const MegakernelModel taken{.head_dim = 128, .cache_dim = 128};
  const auto reason = [&](auto change) {
    MegakernelModel m = taken;
    change(m);
    return no_megakernel_reason(m);
  };
  EXPECT_EQ(reason([](auto& m) { m.shared_by_gpus = true; }), "a model shared by several GPUs");
  EXPECT_EQ(reason([](auto& m) { m.one_format = false; }), "matrices in several formats");
  EXPECT_EQ(reason([](auto& m) { m.head_dim = 256, m.cache_dim = 256; }), "heads of 256 numbers");
  EXPECT_EQ(reason([](auto& m) { m.head_dim = 126; }), "heads of 126 numbers");
  EXPECT_EQ(reason([](auto& m) { m.head_dim = 64, m.cache_dim = 64, m.dense_mlp = false; }),
            "heads of 64 numbers beside experts");
  EXPECT_EQ(reason([](auto& m) { m.head_dim = 64, m.cache_dim = 64; }),
            "rows that are too long for the memory of a multiprocessor");
}

}  // namespace
}  // namespace ingot::decode
