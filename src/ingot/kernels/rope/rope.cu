// Rotary embeddings on a GPU: the choice of a kernel and its launch. The kernels without a norm are in rotate.cuh, with
// a norm in norm_rotate.cuh, and those for any alignment in elements.cuh.
#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/early_start.h"
#include "ingot/kernels/rope/elements.cuh"
#include "ingot/kernels/rope/norm_rotate.cuh"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/rope/rope_config.h"
#include "ingot/kernels/rope/rotate.cuh"

namespace ingot::cuda {
namespace {

using namespace rope_kernels;

constexpr int64_t kMaxUnits = int64_t(1) << 30;  // threads of a launch; tile::divide needs less than 2^31

Heads heads_of(const Tensor& t) { return {t.data, t.stride[0], t.stride[1]}; }

bool heads_aligned(const Tensor& t) {
  if (!t) return true;
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  for (int d = 0; d < 2; ++d)
    if (t.shape.dim[d] > 1 && t.stride[d] * size_of(t.dtype) % 16 != 0) return false;
  return true;
}
bool table_aligned(const Tensor& t) { return !t || reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

bool same_rows(const Tensor& a, const Tensor& b) {
  return a.data == b.data && (a.size(0) <= 1 || a.stride[0] == b.stride[0]) &&
         (a.size(1) <= 1 || a.stride[1] == b.stride[1]);
}

template <class Op> RopeShape shape_of(const Op& a, const Tensor& y, const Tensor& dy) {
  return {.tokens = a.x.size(0),
          .heads = a.x.size(1),
          .head_dim = a.x.cols(),
          .half = a.cos ? a.cos.cols() : 0,
          .dtype = a.x.dtype,
          .aligned = heads_aligned(a.x) && heads_aligned(y) && heads_aligned(dy) && table_aligned(a.cos) &&
                     table_aligned(a.sin),
          .interleaved = a.interleaved};
}
RopeShape shape_of(const Rope& a) {
  RopeShape s = shape_of(a, a.y, {});
  s.in_place = same_rows(a.x, a.y);
  return s;
}
RopeShape shape_of(const QkNormRope& a) {
  RopeShape s = shape_of(a, a.y, {});
  s.norm = true;
  return s;
}
RopeShape shape_of(const QkNormRopeBackward& a) {
  RopeShape s = shape_of(a, a.dx, a.dy);
  s.norm = s.backward = true;
  return s;
}

using Kernel = void (*)(RopeParams);

template <class Use> auto with_cuda_float_type(const char* op, DType t, Use&& use) {
  switch (t) {
    case DType::f32: return use(float{});
    case DType::bf16: return use(bf16{});
    case DType::f16: return use(f16{});
    default: fail(ErrorCode::unsupported, op, ": found dtype ", t, " on a GPU, expected f32, bf16 or f16");
  }
}

template <class T> Kernel pick_kernel(const RopeShape& s, const RopeConfig& c) {
  if (!c.vectors) return s.backward ? backward_elements<T> : rotate_elements<T>;
  if (c.spread) return walk_heads<T, false, true, true>;
  if (s.backward) return s.interleaved ? walk_heads<T, true, true, false> : walk_heads<T, false, true, false>;
  if (!s.norm && c.per_lane == 1) return s.interleaved ? rotate_vectors<T, true> : rotate_vectors<T, false>;
  if (s.norm && c.once) return s.interleaved ? norm_heads<T, true> : norm_heads<T, false>;
  if (s.norm) return s.interleaved ? walk_heads<T, true, false, false> : walk_heads<T, false, false, false>;
  if (c.heads == 2) return s.interleaved ? rotate_heads<T, true, 2> : rotate_heads<T, false, 2>;
  return s.interleaved ? rotate_heads<T, true, 1> : rotate_heads<T, false, 1>;
}

void check_config(const char* op, const RopeConfig& c, const RopeShape& s) {
  const bool power = (c.lanes & (c.lanes - 1)) == 0 && c.lanes <= 32, rows = c.per_lane == 1;
  INGOT_CHECK(c.lanes >= 1 && c.lanes <= c.threads && ((c.vectors && !s.norm && !rows) || power), op, ": found ",
              c.lanes, " lanes, expected at most ", c.threads,
              ", and a power of two up to 32 where they exchange numbers");
  INGOT_CHECK(c.threads >= 32 && c.threads <= kRopeThreads && c.threads % 32 == 0, op, ": found ", c.threads,
              " threads, expected whole warps up to ", kRopeThreads);
  if (!c.vectors) return;
  const int64_t least = rows ? rope_row_vectors(s) : rope_head_lanes(s);
  INGOT_CHECK(rope_vector_lanes(s) > 0 && c.lanes >= least, op, ": found ", c.lanes, " lanes of vectors, expected ",
              least, " and operands that whole vectors reach");
  INGOT_CHECK(!c.spread || rope_may_spread(s, c.lanes), op, ": found vectors spread over ", c.lanes,
              " lanes, expected a backward pass with a norm, half-split pairs and all that turns in the first vectors");
  INGOT_CHECK(!rows || !s.norm, op, ": found one vector a lane, expected two with a norm");
  INGOT_CHECK(!c.once || (s.norm && !s.backward), op, ": found a head a thread, expected it forward with a norm only");
  INGOT_CHECK(c.heads == 1 || (c.heads == 2 && !rows && !s.norm && c.threads <= kRopePairThreads), op, ": found ",
              c.heads, " heads a lane in blocks of ", c.threads,
              ", expected 1, or 2 of two vectors each without a norm in up to ", kRopePairThreads, " threads");
}

// The parameters that all passes share.
template <class Op> RopeParams params_of(const Op& a, const Tensor& y, const RopeShape& s, const RopeTuning& tuning) {
  RopeParams p{};
  p.x = heads_of(a.x), p.y = heads_of(y);
  if (a.cos) {
    p.positions = static_cast<const int32_t*>(a.positions.data);
    p.last_row = uint32_t(a.cos.size(0) - 1);
    p.cos = static_cast<const float*>(a.cos.data), p.sin = static_cast<const float*>(a.sin.data);
  }
  const RopeConfig& c = tuning.config;
  p.tokens = s.tokens;
  p.heads = uint32_t(s.heads);
  p.inverse_dim = 1 / float(s.head_dim);
  p.head_dim = uint32_t(s.head_dim), p.half = uint32_t(s.half);
  p.lanes = uint32_t(c.lanes), p.rotating_lanes = c.vectors ? uint32_t(rope_rotating_lanes(s)) : 0;
  p.passing_lanes = c.vectors ? uint32_t(rope_head_lanes(s) - rope_rotating_lanes(s)) : 0;
  p.by_lanes = tile::Divisor(p.lanes);
  p.by_heads = tile::Divisor(uint32_t(c.vectors ? ceil_divide(s.heads, c.heads) : s.heads));
  p.sign = float(a.sign), p.interleaved = a.interleaved, p.in_place = s.in_place && !s.norm;
  const bool large = a.x.numel() * size_of(a.x.dtype) > gpu::beyond_l2_bytes(gpu::current_limits());
  const bool first = large && c.heads == 1;
  p.evict_first = tuning.evict_first < 0 ? first : tuning.evict_first > 0;
  return p;
}
template <class Op> void add_norm(RopeParams& p, const Op& a) {
  p.gain = a.gain ? static_cast<const float*>(a.gain.data) : nullptr;
  p.normalise = a.normalise, p.eps = float(a.eps);
}

void check_sizes(const char* op, const RopeShape& s) {
  constexpr int64_t kMost = kMaxUnits / kRopeThreads;
  if (s.heads * s.head_dim > kMost)
    fail(ErrorCode::unsupported, op, ": found ", s.heads, " heads of ", s.head_dim, ", expected at most ", kMost,
         " dimensions a token on a GPU");
}

// Used where all of x is read and x has no gaps.
tile::EarlyReads early_reads_of(const RopeParams& p, const RopeShape& s, int64_t grid) {
  const bool whole = !p.in_place || 2 * s.half == s.head_dim;
  if (!whole || !s.aligned || p.x.head != s.head_dim || p.x.token != s.heads * s.head_dim) return {};
  return tile::early_reads(s.tokens * s.heads * s.head_dim * size_of(s.dtype), grid);
}

void launch_walk(const char* op, Kernel kernel, RopeParams& p, const RopeShape& s, const RopeTuning& tuning, int device,
                 Stream stream) {
  const RopeSlices cut =
      pick_rope_slices(tuning.config, s.tokens, s.heads, p.partial != nullptr ? kRopeMaxSlices : kMaxUnits);
  p.slice_tokens = ceil_divide(s.tokens, cut.slices);
  p.slices = uint32_t(cut.slices), p.rows = uint32_t(cut.rows), p.iterations = uint32_t(cut.iterations);
  p.by_slots = tile::Divisor(uint32_t(cut.slots)), p.by_chunks = tile::Divisor(uint32_t(cut.chunks));
  p.by_rows = tile::Divisor(p.rows);
  for (Heads* r : {&p.x, &p.dy, &p.y}) r->step = r->token * cut.rows;
  const int64_t grid = cut.slices * cut.chunks;
  p.early = tuning.early != 0;
  if (!s.backward && cut.iterations == 1) p.early_reads = early_reads_of(p, s, grid);
  gpu::launch(op, kernel, {.grid = grid, .block = tuning.config.threads, .overlap = tuning.overlap, .device = device},
              stream, p);
}

void launch_forward(const char* op, RopeParams& p, const RopeShape& s, const RopeTuning& tuning, int device,
                    Stream stream) {
  check_sizes(op, s);
  if (s.tokens == 0 || s.heads == 0 || s.head_dim == 0) return;
  check_config(op, tuning.config, s);
  const Kernel kernel =
      with_cuda_float_type(op, s.dtype, [&](auto t) { return pick_kernel<decltype(t)>(s, tuning.config); });
  if (s.norm && tuning.config.vectors && !tuning.config.once)
    return launch_walk(op, kernel, p, s, tuning, device, stream);
  const int64_t per_token = int64_t(p.by_heads.value) * p.lanes, most = kMaxUnits / per_token;
  for (; p.first_token < s.tokens; p.first_token += most) {
    const int64_t units = std::min(most, s.tokens - p.first_token) * per_token;
    p.units = uint32_t(units);
    const int64_t grid = ceil_divide(units, tuning.config.threads);
    const int64_t bytes = 2 * s.tokens * s.heads * s.head_dim * size_of(s.dtype) / grid;
    p.early = tuning.early < 0 ? tuning.config.once || tile::starts_next_early(bytes) : tuning.early > 0;
    if (p.first_token == 0) p.early_reads = early_reads_of(p, s, grid);
    gpu::launch(op, kernel, {.grid = grid, .block = tuning.config.threads, .overlap = tuning.overlap, .device = device},
                stream, p);
  }
}

void launch_rope(const char* op, const Rope& a, int direction, const RopeTuning& tuning, Stream stream) {
  const RopeShape s = shape_of(a);
  with_cuda_float_type(op, s.dtype, [](auto) { return 0; });
  RopeParams p = params_of(a, a.y, s, tuning);
  p.sign *= float(direction);
  if (s.in_place && s.half == 0) return;
  launch_forward(op, p, s, tuning, a.x.device.index, stream);
}

}  // namespace

RopeTuning default_rope_tuning(const Rope& a) {
  return {.config = pick_rope_config(shape_of(a), gpu::current_limits())};
}
RopeTuning default_rope_tuning(const QkNormRope& a) {
  return {.config = pick_rope_config(shape_of(a), gpu::current_limits())};
}
RopeTuning default_rope_tuning(const QkNormRopeBackward& a) {
  return {.config = pick_rope_config(shape_of(a), gpu::current_limits())};
}

void rope_with(const Rope& a, const RopeTuning& tuning, Stream stream) { launch_rope("rope", a, +1, tuning, stream); }
void rope_backward_with(const Rope& a, const RopeTuning& tuning, Stream stream) {
  launch_rope("rope_backward", a, -1, tuning, stream);
}
void qk_norm_rope_with(const QkNormRope& a, const RopeTuning& tuning, Stream stream) {
  const RopeShape s = shape_of(a);
  with_cuda_float_type("qk_norm_rope", s.dtype, [](auto) { return 0; });
  RopeParams p = params_of(a, a.y, s, tuning);
  add_norm(p, a);
  launch_forward("qk_norm_rope", p, s, tuning, a.x.device.index, stream);
}

void qk_norm_rope_backward_with(const QkNormRopeBackward& a, const RopeTuning& tuning, Stream stream) {
  const char* op = "qk_norm_rope_backward";
  const RopeShape s = shape_of(a);
  const RopeConfig& c = tuning.config;
  const Kernel kernel = with_cuda_float_type(op, s.dtype, [&](auto t) { return pick_kernel<decltype(t)>(s, c); });
  check_sizes(op, s);
  if (s.tokens == 0 || s.heads == 0 || s.head_dim == 0) return;
  check_config(op, c, s);
  RopeParams p = params_of(a, a.dx, s, tuning);
  add_norm(p, a);
  p.dy = heads_of(a.dy);
  p.sign = -p.sign;
  p.partial = a.dgain ? static_cast<float*>(a.workspace.data) : nullptr;
  const int device = a.x.device.index;
  launch_walk(op, kernel, p, s, tuning, device, stream);
  if (a.dgain)
    gpu::launch(op, add_slices, {.grid = s.heads, .block = kSumThreads, .overlap = tuning.overlap, .device = device},
                stream, static_cast<float*>(a.dgain.data), static_cast<const float*>(p.partial), p.slices);
}

void rope(const Rope& a, Stream stream) { rope_with(a, default_rope_tuning(a), stream); }
void rope_backward(const Rope& a, Stream stream) { rope_backward_with(a, default_rope_tuning(a), stream); }
void qk_norm_rope(const QkNormRope& a, Stream stream) { qk_norm_rope_with(a, default_rope_tuning(a), stream); }
void qk_norm_rope_backward(const QkNormRopeBackward& a, Stream stream) {
  qk_norm_rope_backward_with(a, default_rope_tuning(a), stream);
}
int64_t qk_norm_rope_backward_workspace_bytes(int64_t tokens, int64_t heads) {
  return heads * std::min(tokens, kRopeMaxSlices) * int64_t(sizeof(float));
}

}  // namespace ingot::cuda
