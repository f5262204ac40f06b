#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/early_reads.cuh"
#include "ingot/gpu/tile/early_start.h"
#include "ingot/gpu/tile/keeping.cuh"
#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/kernels/swiglu/gate.cuh"
#include "ingot/kernels/swiglu/swiglu.h"
#include "ingot/kernels/swiglu/swiglu_config.h"

namespace ingot::cuda {
namespace {

struct Params : GateNumbers {
  tile::Rows gate, up, h, dgate, dup;  // h: or dh. Interleaved: gate and dgate hold both, up and dup are unused.
  tile::Rows again;                    // h computed again by a backward pass, or none
  tile::RowUnits units;
  uint32_t early_blocks;  // blocks that prefetch their operands while earlier kernels end
  bool large, early;
};

// --- vectors: a thread takes K vectors, a block's width apart --------------------------------------------------------

// Calls use(unit) for each of a thread's K units.
template <int K, class Use> __device__ inline void for_each_unit(const Params& p, Use&& use) {
  const uint32_t first = blockIdx.x * blockDim.x * K + threadIdx.x;
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (const uint32_t i = first + k * blockDim.x; i < p.units.units) use(k, tile::place_of(p.units, i));
}
// The same for loads: load(unit, place, from memory to registers). Loads of large tensors carry the hint to stay in L2,
// so that written lines leave L2 first.
template <int K, class Use> __device__ inline void load_units(const Params& p, Use&& use) {
  if (p.large)
    for_each_unit<K>(
        p, [&](int k, tile::Division at) { use(k, at, [](auto& v, auto* from) { tile::load_keeping_l2(v, from); }); });
  else
    for_each_unit<K>(p,
                     [&](int k, tile::Division at) { use(k, at, [](auto& v, auto* from) { tile::load(v, from); }); });
}

// The part of gate, and of up and dh where given, that a block will read: N and M elements to a unit.
template <class T, int K, int N, int M> __device__ inline void start(const Params& p, bool up, bool dh) {
  if (p.early) ptx::let_next_kernel_start();
  if (blockIdx.x < p.early_blocks && threadIdx.x == 0) {
    const uint32_t count = K * blockDim.x, first = blockIdx.x * count;
    tile::ask_early<T, N>(p.gate, p.units, first, count);
    if (up) tile::ask_early<T, N>(p.up, p.units, first, count);
    if (dh) tile::ask_early<T, M>(p.h, p.units, first, count);
  }
  ptx::wait_for_earlier_kernels();
}

// kCubic is a template argument, because a test for a cubic part at each element would cost 4 to 10 % of a backward
// pass.
template <class T, int K, bool kPlain, bool kCubic>
__global__ void __launch_bounds__(kSwigluMaxThreads) gate_halves(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(T));
  start<T, K, N, N>(p, true, false);
  tile::Vec<T, N> gate[K], up[K];
  load_units<K>(p, [&](int k, tile::Division at, auto load) {
    load(gate[k], tile::at<const T, N>(p.gate, at));
    load(up[k], tile::at<const T, N>(p.up, at));
  });
  for_each_unit<K>(p, [&](int k, tile::Division at) {
    float g[N], u[N];
    tile::to_float(gate[k], g);
    tile::to_float(up[k], u);
#pragma unroll
    for (int n = 0; n < N; ++n) g[n] = gated<is_exact<T>, kPlain, kCubic>(p, g[n], u[n]);
    tile::store(tile::at<T, N>(p.h, at), tile::from_float<T>(g), p.large);
  });
}

// A vector of alternating gates and ups gives half a vector of h.
template <class T, int K, bool kCubic>
__global__ void __launch_bounds__(kSwigluMaxThreads) gate_interleaved(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(T));
  if (p.early) ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();  // requesting the reads earlier is 1 % slower
  tile::Vec<T, N> both[K];
  load_units<K>(p, [&](int k, tile::Division at, auto load) { load(both[k], tile::at<const T, N>(p.gate, at)); });
  for_each_unit<K>(p, [&](int k, tile::Division at) {
    float x[N], h[N / 2];
    tile::to_float(both[k], x);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) h[n] = gated<is_exact<T>, false, kCubic>(p, x[2 * n], x[2 * n + 1]);
    tile::store(tile::at<T, N / 2>(p.h, at), tile::from_float<T>(h), p.large);
  });
}

template <class T, int K, bool kCubic, bool kAgain>
__global__ void __launch_bounds__(kSwigluMaxThreads) gate_halves_backward(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(T));
  start<T, K, N, N>(p, true, true);
  tile::Vec<T, N> gate[K], up[K], dh[K];
  load_units<K>(p, [&](int k, tile::Division at, auto load) {
    load(gate[k], tile::at<const T, N>(p.gate, at));
    load(up[k], tile::at<const T, N>(p.up, at));
    load(dh[k], tile::at<const T, N>(p.h, at));
  });
  for_each_unit<K>(p, [&](int k, tile::Division at) {
    float g[N], u[N], d[N];
    tile::to_float(gate[k], g);
    tile::to_float(up[k], u);
    tile::to_float(dh[k], d);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Gradient moved = gradient<is_exact<T>, kCubic>(p, g[n], u[n], d[n]);
      if constexpr (kAgain) d[n] = gated<is_exact<T>, false, kCubic>(p, g[n], u[n]);
      g[n] = moved.gate, u[n] = moved.up;
    }
    if constexpr (kAgain) tile::store(tile::at<T, N>(p.again, at), tile::from_float<T>(d), p.large);
    tile::store(tile::at<T, N>(p.dgate, at), tile::from_float<T>(g), p.large);
    tile::store(tile::at<T, N>(p.dup, at), tile::from_float<T>(u), p.large);
  });
}

template <class T, int K, bool kCubic>
__global__ void __launch_bounds__(kSwigluMaxThreads) gate_interleaved_backward(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(T));
  start<T, K, N, N / 2>(p, false, true);
  tile::Vec<T, N> both[K];
  tile::Vec<T, N / 2> dh[K];
  load_units<K>(p, [&](int k, tile::Division at, auto load) {
    load(both[k], tile::at<const T, N>(p.gate, at));
    load(dh[k], tile::at<const T, N / 2>(p.h, at));
  });
  for_each_unit<K>(p, [&](int k, tile::Division at) {
    float x[N], d[N / 2];
    tile::to_float(both[k], x);
    tile::to_float(dh[k], d);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      const Gradient moved = gradient<is_exact<T>, kCubic>(p, x[2 * n], x[2 * n + 1], d[n]);
      if (p.again.data != nullptr) d[n] = gated<is_exact<T>, false, kCubic>(p, x[2 * n], x[2 * n + 1]);
      x[2 * n] = moved.gate, x[2 * n + 1] = moved.up;
    }
    if (p.again.data != nullptr) tile::store(tile::at<T, N / 2>(p.again, at), tile::from_float<T>(d), p.large);
    tile::store(tile::at<T, N>(p.dgate, at), tile::from_float<T>(x), p.large);
  });
}

// --- element by element: any alignment, any length -------------------------------------------------------------------

// The addresses of gate and up of element `place` of h; interleaved rows hold both.
template <class T> struct GateAndUp { T *gate, *up; };
template <class T>
__device__ inline GateAndUp<T> elements(const tile::Rows& gate, const tile::Rows& up, tile::Division place) {
  if (up.data != nullptr) return {tile::at<T, 1>(gate, place), tile::at<T, 1>(up, place)};
  T* both = tile::at<T, 2>(gate, place);
  return {both, both + 1};
}

template <class T, int K>
__global__ void __launch_bounds__(kSwigluMaxThreads) gate_elements(const __grid_constant__ Params p) {
  if (p.early) ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  for_each_unit<K>(p, [&](int, tile::Division at) {
    const auto in = elements<const T>(p.gate, p.up, at);
    *tile::at<T, 1>(p.h, at) =
        tile::from_float<T>(gated<is_exact<T>, false>(p, tile::to_float(*in.gate), tile::to_float(*in.up)));
  });
}

template <class T, int K>
__global__ void __launch_bounds__(kSwigluMaxThreads) gate_elements_backward(const __grid_constant__ Params p) {
  if (p.early) ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  for_each_unit<K>(p, [&](int, tile::Division at) {
    const auto in = elements<const T>(p.gate, p.up, at);
    const auto out = elements<T>(p.dgate, p.dup, at);
    const float g = tile::to_float(*in.gate), u = tile::to_float(*in.up);
    const Gradient moved = gradient<is_exact<T>>(p, g, u, tile::to_float(*tile::at<const T, 1>(p.h, at)));
    if (p.again.data != nullptr) *tile::at<T, 1>(p.again, at) = tile::from_float<T>(gated<is_exact<T>, false>(p, g, u));
    *out.gate = tile::from_float<T>(moved.gate);
    *out.up = tile::from_float<T>(moved.up);
  });
}

// --- host ------------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Params);

template <class T, int K, bool kCubic> Kernel pick_forward(const SwigluGateConfig& c, const GateOptions& o) {
  if (!c.vectors) return gate_elements<T, K>;
  if (o.interleaved) return gate_interleaved<T, K, kCubic>;
  if constexpr (!is_exact<T> && !kCubic)
    if (is_plain(o)) return gate_halves<T, K, true, false>;
  return gate_halves<T, K, false, kCubic>;
}
template <class T, int K, bool kCubic>
Kernel pick_backward(const SwigluGateConfig& c, const GateOptions& o, bool again) {
  if (!c.vectors) return gate_elements_backward<T, K>;
  if (o.interleaved) return gate_interleaved_backward<T, K, kCubic>;
  return again ? gate_halves_backward<T, K, kCubic, true> : gate_halves_backward<T, K, kCubic, false>;
}
enum class Pass { forward, backward, backward_again };  // backward_again: h is computed again
template <class T, int K, bool kCubic> Kernel pick_pass(const SwigluGateConfig& c, const GateOptions& o, Pass pass) {
  if (pass == Pass::forward) return pick_forward<T, K, kCubic>(c, o);
  return pick_backward<T, K, kCubic>(c, o, pass == Pass::backward_again);
}
template <class T, int K> Kernel pick_kernel_of(const SwigluGateConfig& c, const GateOptions& o, Pass pass) {
  return o.cubic == 0 ? pick_pass<T, K, false>(c, o, pass) : pick_pass<T, K, true>(c, o, pass);
}
template <class T> Kernel pick_kernel(const SwigluGateConfig& c, const GateOptions& o, Pass pass) {
  switch (c.units_per_thread) {
    case 1: return pick_kernel_of<T, 1>(c, o, pass);
    case 2: return pick_kernel_of<T, 2>(c, o, pass);
    case 4: return pick_kernel_of<T, 4>(c, o, pass);
  }
  fail(ErrorCode::unsupported, "swiglu_gate: found ", c.units_per_thread, " units a thread, expected 1, 2 or 4");
}
Kernel pick_kernel(const char* op, DType t, const SwigluGateConfig& c, const GateOptions& o, Pass pass) {
  switch (t) {
    case DType::f32: return pick_kernel<float>(c, o, pass);
    case DType::bf16: return pick_kernel<bf16>(c, o, pass);
    case DType::f16: return pick_kernel<f16>(c, o, pass);
    default: fail(ErrorCode::unsupported, op, ": found dtype ", t, " on a GPU, expected f32, bf16 or f16");
  }
}

struct Operands {
  Tensor gate, up, h, dgate, dup;
  GateOptions options;
  Tensor again;
};
Operands operands_of(const SwigluGate& s) { return {s.gate, s.up, s.h, {}, {}, s.options, {}}; }
Operands operands_of(const SwigluGateBackward& s) { return {s.gate, s.up, s.dh, s.dgate, s.dup, s.options, s.h}; }

SwigluGateShape shape_of(const Operands& o) {
  const bool pairs = o.options.interleaved;
  bool aligned = tile::rows_start_aligned(o.h, pairs ? 8 : 16) && tile::rows_start_aligned(o.again, pairs ? 8 : 16);
  for (const Tensor* t : {&o.gate, &o.up, &o.dgate, &o.dup}) aligned = aligned && tile::rows_start_aligned(*t, 16);
  return {.rows = o.h.rows(),
          .cols = o.h.cols(),
          .dtype = o.h.dtype,
          .aligned = aligned,
          .interleaved = pairs,
          .backward = bool(o.dgate)};
}

void launch(const char* op, const Operands& o, const SwigluGateTuning& tuning, Stream stream) {
  const SwigluGateConfig& c = tuning.config;
  const SwigluGateShape s = shape_of(o);
  const bool pairs = s.interleaved, backward = bool(o.dgate);
  const Pass pass = !backward ? Pass::forward : o.again ? Pass::backward_again : Pass::backward;
  const Kernel kernel = pick_kernel(op, s.dtype, c, o.options, pass);
  // h must not overwrite the interleaved columns of its row, which other threads still read.
  INGOT_CHECK(!pairs || s.rows == 0 || backward || o.h.data != o.gate.data, op,
              ": found h on the interleaved columns, expected memory of its own on a GPU");
  INGOT_CHECK(c.threads >= 32 && c.threads <= kSwigluMaxThreads && c.threads % 32 == 0, op, ": found ", c.threads,
              " threads, expected whole warps up to ", kSwigluMaxThreads);
  INGOT_CHECK(!c.vectors || swiglu_gate_takes_vectors(s), op,
              ": found vectors asked for, expected operands that whole vectors reach");
  bool one_row = true;
  for (const Tensor* t : {&o.gate, &o.up, &o.h, &o.dgate, &o.dup, &o.again})
    one_row = one_row && tile::without_gaps(*t);
  Params p{gate_numbers(o.options)};
  p.large = tuning.large < 0 ? swiglu_gate_is_large(s, gpu::current_limits()) : tuning.large > 0;

  // Elements of gate and of h in a unit.
  const int64_t per_vec = 16 / size_of(s.dtype), gate_step = c.vectors ? per_vec : pairs ? 2 : 1;
  const int64_t h_step = pairs ? gate_step / 2 : gate_step;
  tile::for_each_launch(s.rows, s.cols / h_step, one_row, [&](int64_t row, int64_t unit, const tile::RowUnits& units) {
    const auto from_here = [&](const Tensor& t, int64_t step) {
      return t ? tile::moved(tile::rows_of(t), row, unit * step, t.dtype) : tile::Rows{};
    };
    p.gate = from_here(o.gate, gate_step), p.up = from_here(o.up, gate_step), p.h = from_here(o.h, h_step);
    p.dgate = from_here(o.dgate, gate_step), p.dup = from_here(o.dup, gate_step);
    p.again = from_here(o.again, h_step);
    p.units = units;
    const int64_t per_block = int64_t(c.threads) * c.units_per_thread;
    const int64_t grid = (units.units + per_block - 1) / per_block;
    const int64_t bytes = per_block * h_step * size_of(s.dtype) * (pass == Pass::backward_again ? 6 : backward ? 5 : 3);
    if (c.vectors) p.early_blocks = tile::early_blocks(per_block * h_step * size_of(s.dtype) * (backward ? 3 : 2));
    p.early = tuning.early < 0 ? tile::starts_next_early(bytes) : tuning.early > 0;
    gpu::launch(op, kernel, {.grid = grid, .block = c.threads, .overlap = tuning.overlap, .device = o.h.device.index},
                stream, p);
  });
}

}  // namespace

SwigluGateTuning default_swiglu_gate_tuning(const SwigluGate& s) {
  return {.config = pick_swiglu_gate_config(shape_of(operands_of(s)), gpu::current_limits())};
}
SwigluGateTuning default_swiglu_gate_tuning(const SwigluGateBackward& s) {
  return {.config = pick_swiglu_gate_config(shape_of(operands_of(s)), gpu::current_limits())};
}
void swiglu_gate_with(const SwigluGate& s, const SwigluGateTuning& tuning, Stream stream) {
  launch("swiglu_gate", operands_of(s), tuning, stream);
}
void swiglu_gate_backward_with(const SwigluGateBackward& s, const SwigluGateTuning& tuning, Stream stream) {
  launch("swiglu_gate_backward", operands_of(s), tuning, stream);
}
void swiglu_gate(const SwigluGate& s, Stream stream) { swiglu_gate_with(s, default_swiglu_gate_tuning(s), stream); }
void swiglu_gate_backward(const SwigluGateBackward& s, Stream stream) {
  swiglu_gate_backward_with(s, default_swiglu_gate_tuning(s), stream);
}

}  // namespace ingot::cuda
