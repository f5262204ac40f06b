#include <algorithm>

#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/mlp/to_128/few_rows_maps.h"

namespace ingot::cuda {
namespace to_128_few_rows {

Maps make_maps(const Mlp& m, const MlpForwardParams& p, int block_rows, int panels) {
  const gpu::TmaBox rows{.rows = block_rows, .cols = kPanel, .swizzle = tile::Swizzle::b128};
  const gpu::TmaBox weights{.rows = kPanel * panels, .cols = kPanel, .swizzle = tile::Swizzle::b128};
  Maps maps{};
  maps.x = gpu::tensor_map("mlp: x", mlp_matrix(m.x), rows);
  maps.y = gpu::tensor_map("mlp: y", mlp_matrix(m.y), rows);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    maps.w[l] = gpu::tensor_map("mlp: w", m.layers[l].w, weights);
    if (p.layer[l].saved != nullptr && !p.saved_f32)
      maps.saved[l] = gpu::tensor_map(
          "mlp: saved", Tensor(p.layer[l].saved, m.x.dtype, {p.rows, m.layers[l].w.rows()}, m.x.device), rows);
  }
  return maps;
}

}  // namespace to_128_few_rows

// Tensor copies count rows in 31 bits.
bool mlp_to_128_few_rows_takes(const Mlp& m) {
  return mlp_is_to_128(m) && m.layers.size() <= size_t(kMlpMaxLayers) && m.x.rows() <= int64_t(1) << 30;
}
void mlp_to_128_few_rows(const Mlp& m, Stream stream) {
  const bool norms = std::any_of(m.layers.begin(), m.layers.end(), [](const MlpLayer& layer) { return bool(layer.g); });
  if (m.x.dtype == DType::f16)
    norms ? launch_mlp_to_128_few_rows<f16, true>(m, stream) : launch_mlp_to_128_few_rows<f16, false>(m, stream);
  else
    norms ? launch_mlp_to_128_few_rows<bf16, true>(m, stream) : launch_mlp_to_128_few_rows<bf16, false>(m, stream);
}

}  // namespace ingot::cuda
