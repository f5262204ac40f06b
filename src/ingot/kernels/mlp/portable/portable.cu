#include <algorithm>

#include "ingot/gpu/limits.h"
#include "ingot/kernels/mlp/portable/plan.h"

namespace ingot::cuda {
namespace {

template <class Use> void with_portable_type(DType t, Use&& use) {
  switch (t) {
    case DType::f16: return use(f16{});
    case DType::bf16: return use(bf16{});
    case DType::f32: return use(float{});
    default: fail(ErrorCode::unsupported, "mlp: found dtype ", t, " on a GPU, expected f16, bf16 or f32");
  }
}

}  // namespace

void mlp_portable(const Mlp& m, Stream stream) {
  if (m.x.rows() == 0) return;
  int scales = 0;
  PortableRows p = portable_rows(m, scales);
  p.y = m.y.data, p.y_stride = m.y.row_stride();
  const int size = int(size_of(m.x.dtype));
  const PortableConfig c = pick_portable(p.rows, p.stride, size, scales, gpu::limits(m.x.device.index), 0);
  with_portable_type(m.x.dtype,
                     [&](auto type) { launch_portable_forward<decltype(type)>(p, c, m.x.device.index, stream); });
}

void mlp_backward_portable(const MlpBackward& m, Stream stream) {
  const PortableBackward b(m);
  if (m.x.rows() == 0 || b.rows.first == b.rows.depth) return;
  const int size = int(size_of(m.x.dtype));
  const PortableConfig c = pick_portable(b.rows.rows, b.rows.stride, size, b.scales, gpu::limits(m.x.device.index),
                                         portable_backward_height(size));
  const bool trained = std::any_of(m.grads.begin(), m.grads.end(), mlp_trained);
  with_portable_type(m.x.dtype, [&](auto type) {
    launch_portable_chain<decltype(type)>(b.rows, c, m.x.device.index, stream);
    if (trained) launch_portable_grad<decltype(type)>(b.grad, m.x.device.index, stream);
  });
}

int64_t mlp_backward_portable_workspace_bytes(const MlpBackward& m) {
  MlpBackward shapes = m;
  shapes.workspace = {};
  return PortableBackward(shapes).bytes;
}

}  // namespace ingot::cuda
