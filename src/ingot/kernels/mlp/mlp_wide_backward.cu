// The wide backward form: what it takes, how the work is cut, its two launches.
#include <cuda_runtime.h>

#include <algorithm>

#include "ingot/gpu/device.h"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/mlp/mlp_backward.h"
#include "ingot/kernels/mlp/mlp_wide_backward.h"

namespace ingot::cuda {
namespace wide_backward {
namespace {

int sm_count(Device device) {
  int sms = 0;
  gpu::check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device.index), "mlp_backward: SMs of ",
                  device);
  return sms;
}

// Of dz of the top layer there is dy, unless that layer is activated.
bool keeps_dz(const MlpBackward& m, size_t l) { return mlp_trained(m.grads[l]) && mlp_activated(m, l); }

// Where the sums' parts and counters lie in the workspace, behind every layer's dz.
struct Place {
  int splits = 1;
  int64_t part = 0, bias_part = 0, counters = 0, bytes = 0;
};
// The rows are cut by their number, the depth and the GPU's size alone, so that frozen layers change no other's sums.
Place place_sums(const MlpBackward& m) {
  Place at;
  const int layers = int(m.layers.size());
  const int64_t chunks = std::max<int64_t>((m.x.rows() + kChunk - 1) / kChunk, 1);
  const int wanted = int(std::clamp<int64_t>(sm_count(m.x.device) / (kPair * layers), 1, chunks));
  const int64_t each = (chunks + wanted - 1) / wanted;
  at.splits = int((chunks + each - 1) / each);
  int64_t columns = 0;
  for (size_t l = 0; l < m.layers.size(); ++l)
    if (mlp_activated(m, l)) columns += m.layers[l].w.rows();
  const auto take = [&](int64_t bytes) {
    const int64_t begin = at.bytes;
    at.bytes += (bytes + 127) / 128 * 128;
    return begin;
  };
  take(m.x.rows() * columns * size_of(m.x.dtype));
  const int64_t parts = int64_t(layers) * at.splits * kPair;
  at.part = take(parts * kPartFloats * int64_t(sizeof(float)));
  at.bias_part = take(parts * kSquare * int64_t(sizeof(float)));
  at.counters = take(int64_t(layers) * kPair * int64_t(sizeof(uint32_t)));
  return at;
}

Slope slope_of(Act act, float (&number)[3]) {
  const auto is = [&](float a, float b, float c, Slope slope) {
    number[0] = a, number[1] = b, number[2] = c;
    return slope;
  };
  if (act == act_of<Softplus>) return Slope::softplus;
  if (act == act_of<Tanh>) return is(1, 0, -1, Slope::quadratic);
  if (act == act_of<Sigmoid>) return is(0, 1, -1, Slope::quadratic);
  if (act == act_of<Relu>) return is(1, 0, 0, Slope::step);
  if (act == act_of<LeakyRelu>) return is(1, 0.01f, 0, Slope::step);
  return is(1, 1, 0, Slope::step);  // identity
}
// Those that slope_of() knows. An activation that the list gains runs in the portable form until it does.
bool knows_slope(Act act) {
  return act == act_of<Softplus> || act == act_of<Tanh> || act == act_of<Sigmoid> || act == act_of<Relu> ||
         act == act_of<LeakyRelu> || act == act_of<Identity>;
}

ChainMaps make_chain_maps(const MlpBackward& m, const Chain& a) {
  const gpu::TmaBox rows{.rows = kGroupRows, .cols = kMlpPanel, .swizzle = tile::Swizzle::b128};
  const gpu::TmaBox weights{.rows = 32, .cols = kMlpPanel, .swizzle = tile::Swizzle::b128};
  ChainMaps maps{};
  maps.dy = gpu::tensor_map("mlp_backward: dy", mlp_matrix(m.dy), rows);
  if (m.dx) maps.dx = gpu::tensor_map("mlp_backward: dx", mlp_matrix(m.dx), rows);
  for (size_t l = size_t(a.lowest); l < m.layers.size(); ++l)
    maps.w[l] = gpu::tensor_map("mlp_backward: w", m.layers[l].w, weights);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    if (mlp_activated(m, l)) maps.h[l] = gpu::tensor_map("mlp_backward: saved", mlp_layer_part(m, m.saved, l), rows);
    if (keeps_dz(m, l))
      maps.dz[l] = gpu::tensor_map("mlp_backward: workspace", mlp_layer_part(m, m.workspace, l), rows);
  }
  return maps;
}
Chain make_chain(const MlpBackward& m, const Place& place) {
  Chain a{.layers = int(m.layers.size()),
          .lowest = m.dx ? 0 : int(mlp_first_layer(m)) + 1,
          .activate_last = m.activate_last};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer& layer = m.layers[l];
    a.layer[l] = {.v = layer.w.data,
                  .g = layer.g ? layer.g.data : nullptr,
                  .n = int(layer.w.rows()),
                  .k = int(layer.w.cols()),
                  .keeps_dz = keeps_dz(m, l)};
    a.has_gain = a.has_gain || layer.g;
  }
  if (a.lowest < a.layers || a.activate_last) a.units = int((m.x.rows() + kUnitRows - 1) / kUnitRows);
  a.counters = reinterpret_cast<uint32_t*>(static_cast<char*>(m.workspace.data) + place.counters);
  a.counter_count = a.layers * kPair;
  return a;
}

SumMaps make_sum_maps(const MlpBackward& m) {
  const gpu::TmaBox box{.rows = kChunk, .cols = kMlpPanel, .swizzle = tile::Swizzle::b128};
  SumMaps maps{};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    if (!mlp_trained(m.grads[l])) continue;
    maps.h[l] =
        gpu::tensor_map("mlp_backward: input", l == 0 ? mlp_matrix(m.x) : mlp_layer_part(m, m.saved, l - 1), box);
    maps.dz[l] =
        gpu::tensor_map("mlp_backward: dz", keeps_dz(m, l) ? mlp_layer_part(m, m.workspace, l) : mlp_matrix(m.dy), box);
  }
  return maps;
}
Sums make_sums(const MlpBackward& m, const Place& place) {
  char* const base = static_cast<char*>(m.workspace.data);
  Sums a{.chunks = int((m.x.rows() + kChunk - 1) / kChunk),
         .splits = place.splits,
         .part = reinterpret_cast<float*>(base + place.part),
         .bias_part = reinterpret_cast<float*>(base + place.bias_part),
         .counters = reinterpret_cast<uint32_t*>(base + place.counters)};
  const auto at = [](const Tensor& t) { return t ? static_cast<float*>(t.data) : nullptr; };
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer &layer = m.layers[l], &grad = m.grads[l];
    a.layer[l] = {.v = layer.w.data,
                  .g = layer.g ? layer.g.data : nullptr,
                  .dw = at(grad.w),
                  .db = at(grad.b),
                  .dg = at(grad.g),
                  .n = int(layer.w.rows()),
                  .k = int(layer.w.cols())};
  }
  return a;
}

}  // namespace
}  // namespace wide_backward

using namespace wide_backward;

bool mlp_wide_backward_takes(const MlpBackward& m) {
  if (m.x.dtype != DType::f16 && m.x.dtype != DType::bf16) return false;
  if (m.layers.empty() || m.layers.size() > size_t(kMlpMaxLayers) || mlp_widest(m) > kWidth) return false;
  if (m.x.rows() > int64_t(1) << 30 || m.x.cols() % 8 != 0) return false;  // tensor copies: 31 bits, whole 16 bytes
  for (const MlpLayer& layer : m.layers)
    if (layer.w.rows() % 8 != 0) return false;
  return mlp_backward_values(m) == 0 || (knows_slope(m.act) && m.saved && m.saved.dtype == m.x.dtype);
}

void mlp_wide_backward(const MlpBackward& m, Stream stream) {
  if (m.x.rows() == 0 || mlp_first_layer(m) == m.layers.size()) return;
  const Place place = place_sums(m);
  Chain chain = make_chain(m, place);
  const Slope slope = slope_of(m.act, chain.number);
  const int device = m.x.device.index;
  const bool is_f16 = m.x.dtype == DType::f16;
  const ChainMaps maps = make_chain_maps(m, chain);
  const ChainLaunch at{.slope = slope,
                       .clusters = std::clamp(chain.units, 1, std::max(sm_count(m.x.device) / kPair, 1)),
                       .device = device};
  is_f16 ? launch_chain<f16>(maps, chain, at, stream) : launch_chain<bf16>(maps, chain, at, stream);
  if (std::none_of(m.grads.begin(), m.grads.end(), mlp_trained)) return;
  const SumMaps sum_maps = make_sum_maps(m);
  const Sums sums = make_sums(m, place);
  const SumLaunch of_sums{.layers = int(m.layers.size()), .device = device};
  is_f16 ? launch_sums<f16>(sum_maps, sums, of_sums, stream) : launch_sums<bf16>(sum_maps, sums, of_sums, stream);
}

int64_t mlp_wide_backward_workspace_bytes(const MlpBackward& m) { return place_sums(m).bytes; }

}  // namespace ingot::cuda
