#include "ingot/models/checkpoint/stored_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/io/formats/gguf_blocks.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/kernels/quant/quant.h"

namespace ingot {

namespace {
bool has_safetensors(const std::string& directory) {
  const auto names = list_directory(directory);
  return std::any_of(names.begin(), names.end(), [](const std::string& n) { return n.ends_with(".safetensors"); });
}
}  // namespace

std::string checkpoint_source(const std::string& given) {
  const std::string path = snapshot_of(given);
  if (!is_directory(path) || has_safetensors(path)) return path;
  const std::string gguf = gguf_in(path);
  return gguf.empty() ? path : gguf;
}

namespace detail {

Checkpoint::Checkpoint(const std::string& given) : path_(checkpoint_source(given)) {
  const std::string& path = path_;
  const auto add = [&](const File& file, const SafetensorsEntry& e, int64_t data_begin) {
    tensors_[e.name] = {&file, e.name, e.dtype, e.shape, data_begin + e.begin, e.bytes()};
  };
  if (IrisFile::is_one(path)) {
    iris_ = std::make_unique<IrisFile>(path);
    for (const SafetensorsEntry& e : iris_->entries()) add(iris_->file(), e, 0);
    return;
  }
  if (GgufFile::is_one(path)) {
    gguf_ = std::make_unique<GgufSet>(path);
    for (const auto& file : gguf_->files())
      for (const SafetensorsEntry& e : file->entries()) add(file->file(), e, 0);
    return;
  }
  set_ = std::make_unique<SafetensorsSet>(path);
  for (const auto& [name, place] : set_->tensors())
    add(place.file->file(), *place.entry, place.file->header().data_begin);
}

const StoredTensor* Checkpoint::find(const std::string& name) const {
  const auto at = tensors_.find(name);
  return at == tensors_.end() ? nullptr : &at->second;
}

Naming Checkpoint::naming() const {
  if (gguf_) return Naming::gguf;
  if (iris_) return Naming::iris;
  return find("embedding.weight") != nullptr ? Naming::openai : Naming::hugging_face;
}

namespace {

constexpr int64_t kPiece = 8 << 20;  // bytes of a read: disks reach full speed from some MB on
constexpr uint8_t kMostScale = 252;  // 6 * 2^(253 - 127) is more than fp32 holds

// Checks the bytes read from `offset` of a tensor on: a number whose exponent is all ones is NaN or infinity.
template <class Bits> void refuse_not_finite(const StoredTensor& t, const void* read, int64_t offset, int64_t bytes) {
  constexpr Bits kExponent = sizeof(Bits) == 2 ? 0x7f80 : 0x7f800000, kMantissa = sizeof(Bits) == 2 ? 0x7f : 0x7fffff;
  const Bits* numbers = static_cast<const Bits*>(read);
  const int64_t n = bytes / int64_t(sizeof(Bits));
  bool bad = false;
  for (int64_t i = 0; i < n; ++i) bad |= (numbers[i] & kExponent) == kExponent;
  if (!bad) return;
  int64_t i = 0;
  while ((numbers[i] & kExponent) != kExponent) ++i;
  fail(ErrorCode::numeric, t.file->path(), ": tensor \"", t.name, "\": found ",
       (numbers[i] & kMantissa) != 0 ? "NaN" : "infinity", " at number ", offset / int64_t(sizeof(Bits)) + i,
       ", expected finite numbers");
}
// All numbers are read by this function, piece by piece, which refuses infinities and NaN.
void read_numbers(const StoredTensor& t, int64_t offset, void* to, int64_t bytes) {
  t.file->read_at(t.begin + offset, to, bytes);
  if (t.dtype == "BF16") refuse_not_finite<uint16_t>(t, to, offset, bytes);
  if (t.dtype == "F32") refuse_not_finite<uint32_t>(t, to, offset, bytes);
}

void widen(const Read& r) {
  float* to = reinterpret_cast<float*>(r.to);
  if (r.from->dtype == "F32") return read_numbers(*r.from, 0, to, r.from->bytes);
  std::vector<bf16> narrow(static_cast<size_t>(r.from->bytes / 2));
  read_numbers(*r.from, 0, narrow.data(), r.from->bytes);
  std::copy(narrow.begin(), narrow.end(), to);
}

// Transposes an expert's (K, N) to (N, K), in squares that stay in cache.
template <class T> void turn(const T* from, int64_t K, int64_t N, T* to) {
  constexpr int64_t kSide = 32;
  for (int64_t k0 = 0; k0 < K; k0 += kSide)
    for (int64_t n0 = 0; n0 < N; n0 += kSide)
      for (int64_t n = n0; n < std::min(N, n0 + kSide); ++n)
        for (int64_t k = k0; k < std::min(K, k0 + kSide); ++k) to[n * K + k] = from[k * N + n];
}
void turn_expert(const Read& r, int64_t expert) {
  const std::vector<int64_t>& shape = r.from->shape;
  const int64_t bytes = r.from->bytes / shape[0];
  char* memory = static_cast<char*>(thread_scratch(0, bytes));
  read_numbers(*r.from, expert * bytes, memory, bytes);
  char* to = r.to + expert * bytes;
  if (r.from->dtype == "F32")
    turn(reinterpret_cast<const float*>(memory), shape[1], shape[2], reinterpret_cast<float*>(to));
  else
    turn(reinterpret_cast<const bf16*>(memory), shape[1], shape[2], reinterpret_cast<bf16*>(to));
}

void refuse_large_scales(const Read& r, const char* begin, const char* end) {
  const char* at = std::find_if(begin, end, [](char c) { return uint8_t(c) > kMostScale; });
  if (at != end)
    fail(ErrorCode::numeric, r.from->file->path(), ": tensor \"", r.from->name, "\": found scale ", int(uint8_t(*at)),
         " at byte ", at - r.to, uint8_t(*at) == 255 ? ", which stands for NaN" : ", which makes infinities",
         "; expected at most ", int(kMostScale));
}

// --- blocks of ggml

// In a block of 32 numbers of ggml, numbers i and i + 16 share byte i; number i is in its low half.
int mx_code(const uint8_t* codes, int i) { return i < 16 ? codes[i] & 15 : codes[i - 16] >> 4; }

// Converts a row to floats. The result is finite unless the file contains infinities or NaN.
void to_floats(const std::string& dtype, const uint8_t* p, int64_t cols, float* out) {
  if (dtype != "MXFP4") return dequantize_gguf(dtype, p, cols, out);
  for (int64_t k = 0; k < cols; k += 32, p += 17)
    for (int i = 0; i < 32; ++i) out[k + i] = e2m1_value(mx_code(p + 1, i)) * e8m0_value(p[0]);
}
// Converts ggml's blocks to the order of a checkpoint in MXFP4, where numbers 2 i and 2 i + 1 share byte i.
void to_mx_blocks(const uint8_t* p, int64_t cols, uint8_t* out) {
  for (int64_t k = 0; k < cols; k += 32, p += 17)
    for (int i = 0; i < 32; i += 2) *out++ = uint8_t(mx_code(p + 1, i) | mx_code(p + 1, i + 1) << 4);
}
void to_mx_scales(const Read& r, const uint8_t* p, int64_t row, int64_t cols, uint8_t* out) {
  for (int64_t k = 0; k < cols; k += 32, p += 17, ++out) {
    *out = *p;
    if (*p > kMostScale)
      fail(ErrorCode::numeric, r.from->file->path(), ": tensor \"", r.from->name, "\": found scale ", int(*p),
           " at number ", row* cols + k, *p == 255 ? ", which stands for NaN" : ", which makes infinities",
           "; expected at most ", int(kMostScale));
  }
}

int64_t bytes_of_row(const Read& r) {
  const GgufBlock block = gguf_block(r.from->dtype);
  return r.cols / block.numbers * block.bytes;
}
// The bytes of a written row.
int64_t bytes_into(const Read& r) {
  switch (r.into) {
    case Into::f32: return r.cols * 4;
    case Into::bf16: return r.cols * 2;
    case Into::mx_blocks: return r.cols / 2;
    case Into::mx_scales: return r.cols / kMxBlock;
  }
  return 0;
}
void decode_row(const Read& r, const uint8_t* from, int64_t row, std::vector<float>& wide) {
  char* to = r.to + row * r.stride;
  if (r.into == Into::mx_blocks) return to_mx_blocks(from, r.cols, reinterpret_cast<uint8_t*>(to));
  if (r.into == Into::mx_scales) return to_mx_scales(r, from, row, r.cols, reinterpret_cast<uint8_t*>(to));
  to_floats(r.from->dtype, from, r.cols, wide.data());
  if (r.into == Into::bf16)  // rounding can make an infinity too
    for (float& x : wide) x = float(bf16(x));
  for (int64_t k = 0; k < r.cols; ++k)
    if (!std::isfinite(wide[size_t(k)]))
      fail(ErrorCode::numeric, r.from->file->path(), ": tensor \"", r.from->name, "\": found ",
           std::isnan(wide[size_t(k)]) ? "NaN" : "infinity", " at number ", row * r.cols + k,
           ", expected finite numbers");
  if (r.into == Into::f32)
    std::copy(wide.begin(), wide.end(), reinterpret_cast<float*>(to));
  else
    std::transform(wide.begin(), wide.end(), reinterpret_cast<bf16*>(to), [](float x) { return bf16(x); });
}
// The row of the file that becomes row `row` in memory.
int64_t source_row(const Read& r, int64_t row) {
  if (r.paired_head == 0) return row;
  const int64_t in_head = row % r.paired_head, half = r.paired_head / 2;
  return row - in_head + (in_head < half ? 2 * in_head : 2 * (in_head - half) + 1);
}
void decode_rows(const Read& r, int64_t begin, int64_t end) {
  const int64_t bytes = bytes_of_row(r), together = r.paired_head == 0 ? end - begin : 1;
  auto* memory = static_cast<uint8_t*>(thread_scratch(0, together * bytes));
  std::vector<float> wide(static_cast<size_t>(r.cols));
  for (int64_t row = begin; row < end; ++row) {
    if ((row - begin) % together == 0)
      r.from->file->read_at(r.from->begin + source_row(r, row) * bytes, memory, together * bytes);
    decode_row(r, memory + (row - begin) % together * bytes, row, wide);
  }
}

// The number of bytes that a read writes.
int64_t written(const Read& r) {
  if (r.change == Change::decode) return (r.rows - 1) * r.stride + bytes_into(r);
  return r.change == Change::widen && r.from->dtype == "BF16" ? 2 * r.from->bytes : r.from->bytes;
}

}  // namespace

// Each read is cut into pieces, so that all threads take part in reading a large tensor.
void read_range(const std::vector<Read>& reads, const void* begin, int64_t bytes) {
  struct Task {
    const Read* read;
    int64_t from, to;  // bytes of the tensor; an expert's number for transposed experts; rows for decoding
  };
  const char *first = static_cast<const char*>(begin), *last = first + bytes;
  std::vector<Task> tasks;
  for (const Read& r : reads) {
    const int64_t size = written(r);
    if (r.to + size <= first || r.to >= last) continue;
    if (r.change == Change::widen) {
      tasks.push_back({&r, 0, size});
    } else if (r.change == Change::decode) {
      const int64_t before = std::max<int64_t>(0, first - r.to), behind = last - r.to - bytes_into(r);
      const int64_t from = (before + r.stride - 1) / r.stride, to = std::min(r.rows, behind / r.stride + 1);
      const int64_t piece = std::max<int64_t>(1, kPiece / bytes_of_row(r));
      if (behind < 0) continue;
      for (int64_t row = from; row < to; row += piece) tasks.push_back({&r, row, std::min(to, row + piece)});
    } else if (r.change == Change::turn) {
      const int64_t experts = r.from->shape[0], expert = size / experts;
      for (int64_t e = 0; e < experts; ++e)
        if (r.to + e * expert >= first && r.to + (e + 1) * expert <= last) tasks.push_back({&r, e, e + 1});
    } else {
      const int64_t from = std::max<int64_t>(0, first - r.to), to = std::min<int64_t>(size, last - r.to);
      for (int64_t at = from; at < to; at += kPiece) tasks.push_back({&r, at, std::min(to, at + kPiece)});
    }
  }
  ingot::parallel_tasks(int64_t(tasks.size()), [&](int64_t i) {
    const Task& t = tasks[size_t(i)];
    const Read& r = *t.read;
    if (r.change == Change::widen) return widen(r);
    if (r.change == Change::turn) return turn_expert(r, t.from);
    if (r.change == Change::decode) return decode_rows(r, t.from, t.to);
    read_numbers(*r.from, t.from, r.to + t.from, t.to - t.from);
    if (r.change == Change::scales) refuse_large_scales(r, r.to + t.from, r.to + t.to);
  });
}

}  // namespace detail
}  // namespace ingot
