#include "ingot/models/gpt_oss/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/io/formats/gguf_blocks.h"

namespace ingot::detail {

Checkpoint::Checkpoint(const std::string& given) : path_(gpt_oss_source(given)) {
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

constexpr int64_t kPiece = 8 << 20;  // bytes of one read: disks give their best from some MB on
constexpr uint8_t kMostScale = 252;  // 6 * 2^(253 - 127) is more than fp32 holds

// --- what has to be read -----------------------------------------------------------------------------------------

// Goes through every tensor of the model once.
class Layout : public CheckpointLayout {
 public:
  Layout(const Checkpoint& set, const GptOssConfig& config, int64_t layers, Arena* arena)
      : set_(set), c_(config), arena_(arena), naming_(set.naming()) {
    weights.embed = matrix({pick("model.embed_tokens.weight", "embedding.weight", "embed", "token_embd.weight")},
                           {c_.vocab}, c_.hidden);
    for (int64_t l = 0; l < layers; ++l) weights.layers.push_back(layer(l));
    weights.norm = vector({pick("model.norm.weight", "norm.scale", "final_norm", "output_norm.weight")}, {c_.hidden});
    weights.head =
        c_.tied_embeddings
            ? weights.embed
            : matrix({pick("lm_head.weight", "unembedding.weight", "lm_head", "output.weight")}, {c_.vocab}, c_.hidden);
    report_missing();
    refuse_others(layers);
  }

 private:
  using Names = std::vector<std::string>;
  bool own() const { return naming_ == Naming::openai; }
  bool gguf() const { return naming_ == Naming::gguf; }
  // Hugging Face's name, OpenAI's own, that of .iris, llama.cpp's.
  std::string pick(const char* hf, const char* own, const char* iris, const char* gguf) const {
    const char* const names[] = {hf, own, iris, gguf};
    return names[size_t(naming_)];
  }
  std::string layer_prefix() const { return pick("model.layers.", "block.", "L", "blk."); }

  GptOssLayer layer(int64_t l) {
    const std::string n = layer_prefix() + std::to_string(l) + ".";
    const auto of_layer = [&](auto... names) { return n + pick(names...); };
    const auto qkv_names = [&](const std::string& what) {
      if (own()) return Names{n + "attn.qkv." + what};
      Names names;
      for (const std::string part : {"q", "k", "v"})
        names.push_back(n + (naming_ == Naming::iris ? what[0] + ("_" + part)
                             : gguf()                ? "attn_" + part + "." + what
                                                     : "self_attn." + part + "_proj." + what));
      return names;
    };
    const std::vector<int64_t> widths =
        own() ? std::vector{c_.qkv_width()} : std::vector{c_.q_width(), c_.kv_width(), c_.kv_width()};
    GptOssLayer w;
    w.attn_norm =
        vector({of_layer("input_layernorm.weight", "attn.norm.scale", "norm_attn", "attn_norm.weight")}, {c_.hidden});
    w.qkv = matrix(qkv_names("weight"), widths, c_.hidden);
    w.o = matrix({of_layer("self_attn.o_proj.weight", "attn.out.weight", "w_o", "attn_output.weight")}, {c_.hidden},
                 c_.q_width());
    if (c_.attention_bias) {
      w.b_qkv = vector(qkv_names("bias"), widths);
      w.b_o = vector({of_layer("self_attn.o_proj.bias", "attn.out.bias", "b_o", "attn_output.bias")}, {c_.hidden});
    }
    w.sinks = vector({of_layer("self_attn.sinks", "attn.sinks", "sinks", "attn_sinks.weight")}, {c_.heads});
    w.mlp_norm = vector(
        {of_layer("post_attention_layernorm.weight", "mlp.norm.scale", "norm_moe", "post_attention_norm.weight")},
        {c_.hidden});
    w.router = matrix({of_layer("mlp.router.weight", "mlp.gate.weight", "router_w", "ffn_gate_inp.weight")},
                      {c_.experts}, c_.hidden);
    w.b_router = vector({of_layer("mlp.router.bias", "mlp.gate.bias", "router_b", "ffn_gate_inp.bias")}, {c_.experts});
    if (gguf()) {
      w.gate_up = blocks({n + "ffn_gate_exps.weight", n + "ffn_up_exps.weight"}, c_.intermediate, c_.hidden);
      w.b_gate_up = taking_turns({n + "ffn_gate_exps.bias", n + "ffn_up_exps.bias"}, c_.intermediate);
      w.down = blocks({n + "ffn_down_exps.weight"}, c_.hidden, c_.intermediate);
      w.b_down = taking_turns({n + "ffn_down_exps.bias"}, c_.hidden);
      return w;
    }
    const std::string gate_up = of_layer("mlp.experts.gate_up_proj", "mlp.mlp1_weight", "gate_up", "");
    const std::string down = of_layer("mlp.experts.down_proj", "mlp.mlp2_weight", "down", "");
    w.gate_up = bank(gate_up, 2 * c_.intermediate, c_.hidden);
    w.b_gate_up =
        table(of_layer("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias", "gate_up_b", ""), 2 * c_.intermediate);
    w.down = bank(down, c_.hidden, c_.intermediate);
    w.b_down = table(of_layer("mlp.experts.down_proj_bias", "mlp.mlp2_bias", "down_b", ""), c_.hidden);
    return w;
  }

  // --- tensors of the checkpoint
  const StoredTensor* find(const std::string& name, const std::vector<int64_t>& shape,
                           std::initializer_list<const char*> dtypes) {
    const StoredTensor* place = set_.find(name);
    if (place == nullptr) {
      missing_.push_back(name);
      return nullptr;
    }
    used_.insert(name);
    const auto refuse = [&](const auto& found, const auto& expected) {
      fail(ErrorCode::bad_data, place->file->path(), ": tensor \"", name, "\": found ", found, ", expected ", expected);
    };
    if (place->shape != shape) refuse("shape " + shape_text(place->shape), shape_text(shape));
    std::string known;
    for (const char* d : dtypes) {
      if (place->dtype == d) return place;
      known += (known.empty() ? "" : " or ") + std::string(d);
    }
    refuse("dtype " + place->dtype, known);
    return nullptr;
  }
  Tensor take(DType dtype, Shape shape) {
    // Bounded: a config may ask for more than 64 bits can count, of tensors that will turn out to be missing.
    bytes = std::min(bytes + Arena::aligned(dtype, shape), int64_t(1) << 60);
    return arena_ != nullptr ? arena_->take(dtype, shape) : Tensor(nullptr, dtype, shape);
  }
  void add(const StoredTensor* from, const Tensor& to, int64_t offset, Change change) {
    if (arena_ != nullptr && from != nullptr) reads.push_back({from, static_cast<char*>(to.data) + offset, change});
  }
  static DType type_of(const StoredTensor* place) {
    return place != nullptr && place->dtype == "F32" ? DType::f32 : DType::bf16;
  }

  // --- tensors of a GGUF file
  static constexpr std::initializer_list<const char*> kNumbers = {"F32", "F16", "BF16"};
  static constexpr std::initializer_list<const char*> kBlocks = {"F32",  "F16",  "BF16", "Q4_0", "Q4_1", "Q5_0",
                                                                 "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"};

  void decode(const StoredTensor* from, const Tensor& to, int64_t offset, Into into, int64_t rows, int64_t cols,
              int64_t stride) {
    if (arena_ != nullptr && from != nullptr)
      reads.push_back({from, static_cast<char*>(to.data) + offset, Change::decode, into, rows, cols, stride});
  }
  // A type that holds the numbers of all: what is stored in fewer bits becomes bf16.
  static DType type_of(const std::vector<const StoredTensor*>& places) {
    return std::any_of(places.begin(), places.end(), [](auto* p) { return type_of(p) == DType::f32; }) ? DType::f32
                                                                                                       : DType::bf16;
  }
  static Into into(DType dtype) { return dtype == DType::f32 ? Into::f32 : Into::bf16; }
  WeightMatrix matrix_of_blocks(const Names& names, const std::vector<int64_t>& rows, int64_t cols) {
    std::vector<const StoredTensor*> places;
    int64_t all = 0, at = 0;
    for (size_t i = 0; i < names.size(); all += rows[i++]) places.push_back(find(names[i], {rows[i], cols}, kBlocks));
    const DType dtype = type_of(places);
    const Tensor t = take(dtype, {all, cols});
    const int64_t row = cols * size_of(dtype);
    for (size_t i = 0; i < names.size(); at += rows[i++])
      decode(places[i], t, at * row, into(dtype), rows[i], cols, row);
    return WeightMatrix(t);
  }
  // The experts' matrices (E, N, K) of one tensor, or of two whose rows take turns.
  WeightMatrix blocks(const Names& names, int64_t n, int64_t k) {
    std::vector<const StoredTensor*> places;
    for (const std::string& name : names) places.push_back(find(name, {c_.experts, n, k}, kBlocks));
    const auto turns = int64_t(names.size());
    const bool mxfp4 =
        std::all_of(places.begin(), places.end(), [](auto* p) { return p != nullptr && p->dtype == "MXFP4"; });
    const int64_t rows = c_.experts * n;
    if (!mxfp4) {
      const DType dtype = type_of(places);
      const Tensor t = take(dtype, {c_.experts, turns * n, k});
      const int64_t row = k * size_of(dtype);
      for (int64_t i = 0; i < turns; ++i) decode(places[size_t(i)], t, i * row, into(dtype), rows, k, turns * row);
      return WeightMatrix(t);
    }
    const int64_t groups = k / kMxBlock, row = k / 2;
    const Tensor data = take(DType::u8, {c_.experts, turns * n, groups, kMxBlock / 2});
    const Tensor scales = take(DType::u8, {c_.experts, turns * n, groups});
    for (int64_t i = 0; i < turns; ++i) {
      decode(places[size_t(i)], data, i * row, Into::mx_blocks, rows, k, turns * row);
      decode(places[size_t(i)], scales, i * groups, Into::mx_scales, rows, k, turns * groups);
    }
    return {WeightFormat::mxfp4, data, scales};
  }
  // Their biases, (E, N) of one tensor or the numbers of two in turn.
  Tensor taking_turns(const Names& names, int64_t width) {
    const auto turns = int64_t(names.size());
    const Tensor t = take(DType::f32, {c_.experts, turns * width});
    for (int64_t i = 0; i < turns; ++i)
      decode(find(names[size_t(i)], {c_.experts, width}, kNumbers), t, i * 4, Into::f32, c_.experts * width, 1,
             turns * 4);
    return t;
  }

  // --- tensors of the others

  // One vector out of several, one after the other.
  Tensor vector(const Names& names, const std::vector<int64_t>& widths) {
    int64_t all = 0;
    for (const int64_t n : widths) all += n;
    const Tensor t = take(DType::f32, {all});
    int64_t at = 0;
    for (size_t i = 0; i < names.size(); at += widths[i++])
      if (gguf())
        decode(find(names[i], {widths[i]}, kNumbers), t, at * 4, Into::f32, 1, widths[i], widths[i] * 4);
      else
        add(find(names[i], {widths[i]}, {"BF16", "F32"}), t, at * 4, Change::widen);
    return t;
  }
  // A bias of every expert.
  Tensor table(const std::string& name, int64_t width) {
    const Tensor t = take(DType::f32, {c_.experts, width});
    add(find(name, {c_.experts, width}, {"BF16", "F32"}), t, 0, Change::widen);
    return t;
  }
  // One matrix out of several with the same columns, one below the other.
  WeightMatrix matrix(const Names& names, const std::vector<int64_t>& rows, int64_t cols) {
    if (gguf()) return matrix_of_blocks(names, rows, cols);
    std::vector<const StoredTensor*> places;
    int64_t all = 0;
    for (size_t i = 0; i < names.size(); ++i) {
      places.push_back(find(names[i], {rows[i], cols}, {"BF16", "F32"}));
      all += rows[i];
      if (places[i] != nullptr && places[0] != nullptr && places[i]->dtype != places[0]->dtype)
        fail(ErrorCode::bad_data, places[i]->file->path(), ": tensor \"", names[i], "\": found dtype ",
             places[i]->dtype, ", expected ", places[0]->dtype, " as \"", names[0], "\" has");
    }
    const DType dtype = type_of(places[0]);
    const Tensor t = take(dtype, {all, cols});
    int64_t at = 0;
    for (size_t i = 0; i < names.size(); at += rows[i++]) add(places[i], t, at * cols * size_of(dtype), Change::none);
    return WeightMatrix(t);
  }
  // The experts' matrices (E, N, K).
  WeightMatrix bank(const std::string& name, int64_t n, int64_t k) {
    const std::string dot = own() ? "." : "_";
    if (set_.find(name) == nullptr) {  // the published form; also what a missing tensor is reported as
      if (k % kMxBlock != 0 && set_.find(name + dot + "blocks") != nullptr)
        fail(ErrorCode::unsupported, set_.path(), ": found mxfp4 rows of ", k, " numbers in \"", name,
             "\", expected a multiple of ", kMxBlock);
      const int64_t blocks = k / kMxBlock;
      const Tensor data = take(DType::u8, {c_.experts, n, blocks, kMxBlock / 2});
      const Tensor scales = take(DType::u8, {c_.experts, n, blocks});
      add(find(name + dot + "blocks", {c_.experts, n, blocks, kMxBlock / 2}, {"U8"}), data, 0, Change::none);
      add(find(name + dot + "scales", {c_.experts, n, blocks}, {"U8"}), scales, 0, Change::scales);
      return {WeightFormat::mxfp4, data, scales};
    }
    const std::vector<int64_t> shape = own() ? std::vector{c_.experts, n, k} : std::vector{c_.experts, k, n};
    const StoredTensor* place = find(name, shape, {"BF16", "F32"});
    const Tensor t = take(type_of(place), {c_.experts, n, k});
    add(place, t, 0, own() ? Change::none : Change::turn);
    return WeightMatrix(t);
  }

  // --- what is missing or left over
  void report_missing() const {
    if (missing_.empty()) return;
    std::string list;
    for (size_t i = 0; i < std::min<size_t>(5, missing_.size()); ++i) list += (i ? ", " : "") + missing_[i];
    fail(ErrorCode::bad_data, set_.path(), ": ", missing_.size(), " tensors are missing, such as ", list);
  }
  // The layer a name belongs to, or -1.
  int64_t layer_of(const std::string& name) const {
    const std::string prefix = layer_prefix();
    if (name.rfind(prefix, 0) != 0) return -1;
    int64_t n = 0;
    size_t i = prefix.size();
    for (; i < name.size() && name[i] >= '0' && name[i] <= '9' && n < 1 << 20; ++i) n = n * 10 + (name[i] - '0');
    return i > prefix.size() && i < name.size() && name[i] == '.' ? n : -1;
  }
  void refuse_others(int64_t layers) const {
    for (const auto& [name, place] : set_.tensors()) {
      if (used_.count(name) != 0) continue;
      if (const int64_t l = layer_of(name); l >= layers && l < c_.layers) continue;  // was not asked for
      fail(ErrorCode::bad_data, place.file->path(), ": found tensor \"", name, "\", which a model of ", c_.layers,
           " layers with this config does not have");
    }
  }

  const Checkpoint& set_;
  const GptOssConfig& c_;
  Arena* arena_;
  Naming naming_;
  std::set<std::string> used_;
  std::vector<std::string> missing_;
};

// --- reading -----------------------------------------------------------------------------------------------------

// Bytes that were read from `offset` of a tensor on: a number whose exponent is all ones is NaN or infinity.
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
// All reading of numbers goes through here, in pieces: nothing that is not finite gets past it.
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

// One expert's (K, N) as (N, K), in squares that stay in cache.
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

// A block of 32 numbers lies 0 with 16, 1 with 17, ...: the first in the low halves.
int mx_code(const uint8_t* codes, int i) { return i < 16 ? codes[i] & 15 : codes[i - 16] >> 4; }

// A row as floats, all of them finite unless the file says otherwise.
void to_floats(const std::string& dtype, const uint8_t* p, int64_t cols, float* out) {
  if (dtype != "MXFP4") return dequantize_gguf(dtype, p, cols, out);
  for (int64_t k = 0; k < cols; k += 32, p += 17)
    for (int i = 0; i < 32; ++i) out[k + i] = e2m1_value(mx_code(p + 1, i)) * e8m0_value(p[0]);
}
// The blocks of a checkpoint: 0 with 1, 2 with 3, ...
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
// Of a row that is written.
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
void decode_rows(const Read& r, int64_t begin, int64_t end) {
  const int64_t bytes = bytes_of_row(r);
  auto* memory = static_cast<uint8_t*>(thread_scratch(0, (end - begin) * bytes));
  r.from->file->read_at(r.from->begin + begin * bytes, memory, (end - begin) * bytes);
  std::vector<float> wide(static_cast<size_t>(r.cols));
  for (int64_t row = begin; row < end; ++row) decode_row(r, memory + (row - begin) * bytes, row, wide);
}

// Bytes a read writes.
int64_t written(const Read& r) {
  if (r.change == Change::decode) return (r.rows - 1) * r.stride + bytes_into(r);
  return r.change == Change::widen && r.from->dtype == "BF16" ? 2 * r.from->bytes : r.from->bytes;
}

}  // namespace

CheckpointLayout lay_out(const Checkpoint& checkpoint, const GptOssConfig& config, int64_t layers, Arena* arena) {
  return Layout(checkpoint, config, layers, arena);
}

// Cut into pieces, so that one large tensor keeps all threads reading.
void read_range(const std::vector<Read>& reads, const void* begin, int64_t bytes) {
  struct Task {
    const Read* read;
    int64_t from, to;  // bytes of the tensor; an expert's number where it is turned; rows that are decoded
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

int64_t layers_of(const GptOssConfig& config, const GptOssLoad& load) {
  if (load.layers < 0 || load.layers > config.layers)
    fail(ErrorCode::usage, "layers: found ", load.layers, ", expected 1 to ", config.layers, ", or 0 for all");
  return load.layers == 0 ? config.layers : load.layers;
}

}  // namespace ingot::detail
