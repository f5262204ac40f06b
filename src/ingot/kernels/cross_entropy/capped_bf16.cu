#include "ingot/kernels/cross_entropy/capped.cuh"

namespace ingot::cuda {

void launch_capped(const Tensor& x, const Tensor& w, const Tensor& targets, double softcap, const Capped& out,
                   Stream stream) {
  using namespace capped_detail;
  const char* const name = "linear_cross_entropy";
  const gemm::Grid schedule = gemm::Grid::of({x.rows(), w.rows(), x.cols()}, kTile);
  Weigh::Params to{.sums = out.sums.ptr<float>(),
                   .at_target = out.at_target.ptr<float>(),
                   .targets = targets.ptr<int32_t>(),
                   .rows = uint32_t(x.rows()),
                   .columns = uint32_t(w.rows()),
                   .tiles = uint32_t(out.sums.size(1)),
                   .softcap = float(softcap),
                   .keeps = bool(out.u)};
  if (out.u) to.u = gemm::store_map<bf16>(name, out.u);
  gemm::launch<Product>(name,
                        {.a = Product::A::params<kTile.cluster>(name, x),
                         .b = Product::B::params<kTile.cluster>(name, w),
                         .schedule = schedule,
                         .epilogue = to},
                        x.device.index, stream, schedule.tiles);
}

}  // namespace ingot::cuda
