#include "ingot/kernels/mlp/parts/formed_weights.h"
#include "ingot/kernels/mlp/to_512/forward.h"

namespace ingot::cuda {

namespace {

template <class T, int kPass> void launch_with(const Mlp& m, Stream stream) {
  m.saved || m.activate_last ? launch_mlp_to_512<T, kPass, true>(m, stream)
                             : launch_mlp_to_512<T, kPass, false>(m, stream);
}
template <class T> void launch(const Mlp& m, Stream stream) {
  switch (mlp_to_512_pass(mlp_widest(m))) {
    case 160: return launch_with<T, 160>(m, stream);
    case 192: return launch_with<T, 192>(m, stream);
    case 224: return launch_with<T, 224>(m, stream);
    default: return launch_with<T, 256>(m, stream);
  }
}

}  // namespace

int mlp_to_512_pass(int64_t widest) {
  for (int pass : {160, 192, 224})
    if (widest <= 2 * pass) return pass;
  return 256;
}

// Eight blocks exchange more data and are faster than four only while SMs are idle. Clusters of four do not fill the
// GPU: of 132 SMs they use 120.
int mlp_to_512_cluster(int64_t rows, int sms) {
  const int64_t tiles = (rows + 63) / 64;
  if (tiles * 8 <= sms / 4) return 8;
  return tiles * 4 <= sms * 10 / 11 ? 4 : 2;
}

// The copy engine counts rows in 31 bits.
bool mlp_to_512_takes(const Mlp& m) {
  const int64_t width = mlp_widest(m);
  return (m.x.dtype == DType::f16 || m.x.dtype == DType::bf16) && width > kMlpTo256 && width <= kMlpTo512 &&
         m.layers.size() <= kMlpMaxLayers && m.x.rows() <= INT32_MAX;
}
void mlp_to_512(const Mlp& given, Stream stream) {
  const Mlp m = mlp_with_formed_weights(given, stream);
  m.x.dtype == DType::f16 ? launch<f16>(m, stream) : launch<bf16>(m, stream);
}

bool mlp_to_512_few_rows_takes(const Mlp& m) { return mlp_to_512_takes(m); }
void mlp_to_512_few_rows(const Mlp& m, Stream stream) {
  const int cluster = mlp_to_512_cluster(m.x.rows(), sm_count(m.x.device.index));
  m.x.dtype == DType::f16 ? launch_mlp_to_512_few_rows<f16>(m, cluster, stream)
                          : launch_mlp_to_512_few_rows<bf16>(m, cluster, stream);
}

}  // namespace ingot::cuda
