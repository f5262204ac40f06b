// Losses and gradients of a linear layer's logits, by chunks of rows.
#include <algorithm>

#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/gemm/operands.h"
#include "ingot/gpu/gemm/variant.h"
#include "ingot/gpu/generation.h"
#include "ingot/kernels/cross_entropy/capped.h"
#include "ingot/kernels/cross_entropy/exponentials.h"
#include "ingot/kernels/linear/cuda/core_product.h"

namespace ingot::cuda {
namespace {

// Products of few rows waste tiles, and the gradient of the weights is read and written once per chunk. A chunk
// therefore has as many rows as this memory holds, but no more than the longest products need. A chunk's logits exceed
// L2 in any case.
constexpr int64_t kChunkBytes = 1'300'000'000, kLeastChunkRows = 128;

// The most rows of a chunk for which the workspace suffices: a workspace for many rows also serves calls with fewer
// rows.
int64_t most_rows(int64_t row_bytes, int64_t most) {
  return std::clamp(kChunkBytes / row_bytes / 128 * 128, kLeastChunkRows, most);
}
// Equal chunks, but for the last, of rows in whole tiles.
int64_t equal_chunks(int64_t rows, int64_t most) {
  const int64_t chunks = std::max<int64_t>(1, (rows + most - 1) / most);
  return std::min(most, ((rows + chunks - 1) / chunks + 127) / 128 * 128);
}
int64_t most_chunk_rows(int64_t vocab, DType type) {
  return most_rows(std::max<int64_t>(1, vocab) * (4 + (type == DType::f32 ? 0 : size_of(type))), 8192);
}
// Room for a chunk of logits, for their gradients where their type differs, and for the products.
struct Room {
  int64_t logits, dlogits, product;
  int64_t bytes() const { return logits + dlogits + product; }
};
Room room_of(int64_t rows, int64_t vocab, DType type, Device device) {
  const int64_t n = std::min(rows, most_chunk_rows(vocab, type)), padded = (vocab + 7) / 8 * 8;
  const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  return {aligned(n * padded * 4), type == DType::f32 ? 0 : aligned(n * padded * size_of(type)),
          linear_workspace_bytes(device)};
}

#ifdef INGOT_HAS_CUDA_LINEAR  // not in a build that emulates the linear layer's kernels

// --- where the core multiplies, memory holds the exponentials of logits instead of the logits (exponentials.h)

int64_t tiles_of(int64_t vocab) { return (vocab + kExponentialColumns - 1) / kExponentialColumns; }
int64_t most_exponential_rows(int64_t vocab) { return most_rows(2 * vocab + tiles_of(vocab) * 8 + 4, 16384); }
struct ExponentialRoom {
  int64_t e, parts, at_target, product;
  int64_t bytes() const { return e + parts + at_target + product; }
};
ExponentialRoom exponential_room(int64_t rows, int64_t vocab, Device device) {
  const int64_t n = std::min(rows, most_exponential_rows(vocab));
  const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  return {aligned(n * vocab * 2), aligned(n * tiles_of(vocab) * 8), aligned(n * 4), linear_workspace_bytes(device)};
}
// Depends on the sizes alone, so that the size of the workspace does not depend on other options of the call. The
// workspace suffices with exponentials and with logits.
bool may_take_exponentials(int64_t rows, int64_t vocab, DType type) {
  return (type == DType::bf16 || type == DType::f16) && vocab % 8 == 0 && rows >= 128;
}
bool takes_rows(const LinearCrossEntropy& a) {
  return may_take_exponentials(a.x.size(0), a.w.size(0), a.x.dtype) && !a.x2 && a.label_smoothing == 0 &&
         a.x.size(1) > 0 &&
         core_refuses({.a = a.x, .b = a.w, .c = Tensor(a.workspace.data, a.x.dtype, {8, 8})}) == nullptr;
}

// The slope of the cap is computed from an exponential of 16 bits, which amounts to a logit with this rounding error.
// The error of the slope is 2 / cap times the error of the logit.
bool takes_exponentials(const LinearCrossEntropy& a) { return takes_rows(a) && (a.softcap == 0 || a.softcap >= 1); }

// The losses of some of the rows, where `rows` slices a tensor.
template <class Rows> CrossEntropy losses_of(const LinearCrossEntropy& a, Rows&& rows) {
  return {.targets = rows(a.targets),
          .loss = rows(a.loss),
          .lse = rows(a.lse),
          .dloss = rows(a.dloss),
          .softcap = a.softcap,
          .z_loss = a.z_loss,
          .ignore_index = a.ignore_index};
}

void by_exponentials(const LinearCrossEntropy& a, Stream stream) {
  const int64_t T = a.x.size(0), V = a.w.size(0), step = equal_chunks(T, most_exponential_rows(V));
  const ExponentialRoom room = exponential_room(T, V, a.x.device);
  char* const memory = static_cast<char*>(a.workspace.data);
  const Tensor product(memory + room.bytes() - room.product, DType::u8, {room.product}, a.x.device);
  for (int64_t begin = 0; begin < T; begin += step) {
    const int64_t end = std::min(T, begin + step), n = end - begin;
    const auto rows = [&](const Tensor& t) { return t ? t.slice(0, begin, end) : Tensor(); };
    const auto at = [&](int64_t offset, DType type, Shape shape) {
      return Tensor(memory + offset, type, shape, a.x.device);
    };
    const Exponentials chunk{
        .e = a.dloss ? at(0, a.x.dtype, {n, V}) : Tensor(),
        .parts = at(room.e, DType::f32, {n, tiles_of(V), 2}),
        .at_target = at(room.e + room.parts, DType::f32, {n}),
        .vocab = V,
    };
    const Tensor targets = rows(a.targets), x = rows(a.x);
    gemm::with_core(x.device.index, [&](auto core) {
      using Core = typename decltype(core)::type;
      gemm::with_16_bit_type(x.dtype, [&](auto type) {
        launch_exponentials<Core, decltype(type)>(x, a.w, targets, a.softcap, chunk, stream);
      });
    });
    cross_entropy_of(chunk, losses_of(a, rows), stream);
    if (a.dx || a.dw)
      linear_backward(
          {.dy = chunk.e, .x = x, .w = a.w, .dx = rows(a.dx), .dw = a.dw, .products = a.products, .workspace = product},
          stream);
  }
}

// --- for logits with a low cap, in bf16, no gradients are written to memory either (capped.h)

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }
int64_t capped_tiles(int64_t vocab) { return (vocab + kCappedColumns - 1) / kCappedColumns; }
int64_t most_capped_rows(int64_t features, int64_t vocab) {
  return most_rows(2 * vocab + capped_tiles(vocab) * 4 + 8 + 6 * features, 16384);
}
struct CappedRoom {
  int64_t u, x, dx, sums, at_target, factor, product;
  int64_t bytes() const { return u + x + dx + sums + at_target + factor + product; }
};
CappedRoom capped_room(int64_t rows, int64_t features, int64_t vocab, Device device) {
  const int64_t n = std::min(rows, most_capped_rows(features, vocab));
  return {aligned(n * vocab * 2),
          aligned(n * features * 2),
          aligned(n * features * 4),
          aligned(n * capped_tiles(vocab) * 4),
          aligned(n * 4),
          aligned(n * 4),
          linear_workspace_bytes(device)};
}
bool takes_capped(const LinearCrossEntropy& a) {
  return takes_rows(a) && a.x.dtype == DType::bf16 && a.x.size(1) % 8 == 0 && a.softcap > 0 && a.softcap <= kMostCap &&
         a.z_loss >= 0 && a.z_loss <= kMostCappedZ &&
         (!a.dx || core_refuses({.a = a.x, .b = a.w, .c = a.dx}) == nullptr);
}

void by_capped(const LinearCrossEntropy& a, Stream stream) {
  const int64_t T = a.x.size(0), C = a.x.size(1), V = a.w.size(0), step = equal_chunks(T, most_capped_rows(C, V));
  const CappedRoom room = capped_room(T, C, V, a.x.device);
  char* const memory = static_cast<char*>(a.workspace.data);
  for (int64_t begin = 0; begin < T; begin += step) {
    const int64_t end = std::min(T, begin + step), n = end - begin;
    const auto rows = [&](const Tensor& t) { return t ? t.slice(0, begin, end) : Tensor(); };
    int64_t at = 0;
    const auto take = [&](int64_t bytes, DType type, Shape shape) {
      const Tensor t(memory + at, type, shape, a.x.device);
      at += bytes;
      return t;
    };
    Capped chunk{.vocab = V};
    chunk.u = take(room.u, DType::bf16, {n, V});
    chunk.x = take(room.x, DType::bf16, {n, C});
    const Tensor of_dx = take(room.dx, DType::f32, {n, C});
    chunk.sums = take(room.sums, DType::f32, {n, capped_tiles(V)});
    chunk.at_target = take(room.at_target, DType::f32, {n});
    chunk.factor = take(room.factor, DType::f32, {n});
    const Tensor product = take(room.product, DType::u8, {room.product});
    if (!a.dloss) chunk.u = chunk.factor = Tensor();
    if (!a.dloss || !a.dw) chunk.x = Tensor();
    const Tensor targets = rows(a.targets), x = rows(a.x), dx = rows(a.dx);
    gemm::with_core(x.device.index, [&](auto core) {
      launch_capped<typename decltype(core)::type>(x, a.w, targets, a.softcap, chunk, stream);
    });
    finish_capped(chunk, x, losses_of(a, rows), stream);
    if (a.dx) {  // rounded once, after multiplication by its factor
      matmul({.a = chunk.u, .b = a.w, .c = of_dx, .products = a.products, .workspace = product}, stream);
      multiply_rows(chunk.factor, of_dx, dx, stream);
    }
    if (a.dw)
      linear_backward({.dy = chunk.u, .x = chunk.x, .dw = a.dw, .products = a.products, .workspace = product}, stream);
  }
}

#endif

// The end of the chunk that begins at a row: after `step` rows, or with pairs of segments at the last end of a segment
// within these rows.
int64_t chunk_end(const LinearCrossEntropy& a, int64_t begin, int64_t step) {
  const int64_t most = std::min(a.x.size(0), begin + step);
  const auto after = std::upper_bound(a.cu2.begin(), a.cu2.end(), most);
  return after != a.cu2.begin() && *(after - 1) > begin ? *(after - 1) : most;
}
// Neighbouring segments with equal numbers of rows in a chunk.
struct Run {
  int64_t first, count, begin, length;
  Tensor of(const Tensor& t) const {
    Tensor rows = t.slice(0, begin, begin + count * length);
    rows.shape = {count, length, t.cols()};
    rows.stride[2] = 1, rows.stride[1] = t.row_stride(), rows.stride[0] = length * t.row_stride();
    return rows;
  }
};
template <class Use> void for_each_run(std::span<const int32_t> cu, int64_t begin, int64_t end, Use&& use) {
  const auto length = [&](size_t s) { return std::min<int64_t>(cu[s + 1], end) - std::max<int64_t>(cu[s], begin); };
  for (size_t s = 0, next; s + 1 < cu.size() && cu[s] < end; s = next) {
    next = s + 1;
    if (length(s) <= 0) continue;
    while (next + 1 < cu.size() && length(next) == length(s)) ++next;
    use(Run{int64_t(s), int64_t(next - s), std::max<int64_t>(cu[s], begin), length(s)});
  }
}

// A chunk of rows whose logits are stored in fp32, even where the operands have 16 bits, because a rounding of the
// logits would enter the loss.
struct LogitChunk {
  const LinearCrossEntropy& a;
  Stream stream;
  int64_t begin, end;
  Tensor logits, dlogits;    // (rows, V); dlogits: none without a gradient
  Tensor product_workspace;  // of the products

  Tensor rows(const Tensor& t) const { return t ? t.slice(0, begin, end) : Tensor(); }

  // Writes the logits.
  void multiply() const {
    add_product(rows(a.x), a.w, 0);
    if (!a.cu2.empty())
      each_pair(logits, [&](const Run& run, const Tensor& of_logits) {
        multiply_each(run.of(a.x2), false, pair_of(a.w2, run), true, of_logits, 1);
      });
    else if (a.x2)
      add_product(rows(a.x2), a.w2, 1);
  }
  void compute_losses() const {
    ingot::cross_entropy({.logits = logits,
                          .targets = rows(a.targets),
                          .loss = rows(a.loss),
                          .lse = rows(a.lse),
                          .dloss = rows(a.dloss),
                          .dlogits = dlogits,
                          .softcap = a.softcap,
                          .z_loss = a.z_loss,
                          .ignore_index = a.ignore_index,
                          .label_smoothing = a.label_smoothing},
                         stream);
  }
  void add_gradients() const {
    backward(rows(a.x), a.w, rows(a.dx), a.dw);
    if (!a.cu2.empty())
      each_pair(dlogits, [&](const Run& run, const Tensor& of_logits) {
        if (a.dx2) multiply_each(of_logits, false, pair_of(a.w2, run), false, run.of(a.dx2), 0);
        if (a.dw2) multiply_each(of_logits, true, run.of(a.x2), false, pair_of(a.dw2, run), 1);
      });
    else if (a.x2)
      backward(rows(a.x2), a.w2, rows(a.dx2), a.dw2);
  }

 private:
  // logits = x w^T + beta logits
  void add_product(const Tensor& x, const Tensor& w, double beta) const {
    matmul({.a = x,
            .b = w,
            .c = logits,
            .transpose_b = true,
            .beta = beta,
            .products = a.products,
            .workspace = product_workspace},
           stream);
  }
  void backward(const Tensor& x, const Tensor& w, const Tensor& dx, const Tensor& dw) const {
    if (!dx && !dw) return;
    linear_backward(
        {.dy = dlogits, .x = x, .w = w, .dx = dx, .dw = dw, .products = a.products, .workspace = product_workspace},
        stream);
  }
  // Calls use(run, the run's rows of a tensor of the chunk) for the segments of the chunk, each of which has a pair
  // (x2, w2) of its own.
  template <class Use> void each_pair(const Tensor& of_chunk, Use&& use) const {
    for_each_run(a.cu2, begin, end, [&](const Run& run) {
      use(run, Run{0, run.count, run.begin - begin, run.length}.of(of_chunk));
    });
  }
  static Tensor pair_of(const Tensor& t, const Run& run) { return t.slice(0, run.first, run.first + run.count); }
  void multiply_each(const Tensor& x, bool transpose_x, const Tensor& w, bool transpose_w, const Tensor& y,
                     double beta) const {
    matmul_each({.a = x,
                 .b = w,
                 .c = y,
                 .transpose_a = transpose_x,
                 .transpose_b = transpose_w,
                 .beta = beta,
                 .products = a.products,
                 .workspace = product_workspace},
                stream);
  }
};

void by_logits(const LinearCrossEntropy& a, Stream stream) {
  const int64_t T = a.x.size(0), V = a.w.size(0), step = equal_chunks(T, most_chunk_rows(V, a.x.dtype)),
                padded = (V + 7) / 8 * 8;
  const Room room = room_of(T, V, a.x.dtype, a.x.device);
  char* const memory = static_cast<char*>(a.workspace.data);
  for (int64_t begin = 0, end; begin < T; begin = end) {
    end = chunk_end(a, begin, step);
    const auto matrix = [&](char* at, DType type) {
      Tensor t(at, type, {end - begin, V}, a.x.device);
      t.stride[0] = padded;
      return t;
    };
    LogitChunk chunk{.a = a, .stream = stream, .begin = begin, .end = end, .logits = matrix(memory, DType::f32)};
    chunk.product_workspace = Tensor(memory + room.logits + room.dlogits, DType::u8, {room.product}, a.x.device);
    if (a.dloss) chunk.dlogits = room.dlogits == 0 ? chunk.logits : matrix(memory + room.logits, a.x.dtype);
    chunk.multiply();
    chunk.compute_losses();
    if (a.dloss) chunk.add_gradients();
  }
}

}  // namespace

int64_t linear_cross_entropy_workspace_bytes(int64_t rows, int64_t features, int64_t vocab, DType dtype, Products,
                                             Device device) {
  const int64_t bytes = room_of(rows, vocab, dtype, device).bytes();
#ifdef INGOT_HAS_CUDA_LINEAR
  if (may_take_exponentials(rows, vocab, dtype))
    return std::max({bytes, exponential_room(rows, vocab, device).bytes(),
                     dtype == DType::bf16 ? capped_room(rows, features, vocab, device).bytes() : 0});
#endif
  return bytes;
}

void linear_cross_entropy(const LinearCrossEntropy& a, Stream stream) {
  gpu::check_generation("linear_cross_entropy", gpu::device_limits(a.x.device));
#ifdef INGOT_HAS_CUDA_LINEAR
  if (takes_capped(a)) return by_capped(a, stream);
  if (takes_exponentials(a)) return by_exponentials(a, stream);
#endif
  by_logits(a, stream);
}

}  // namespace ingot::cuda
