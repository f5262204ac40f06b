#include "ingot/models/gpt_oss/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "ingot/core/thread_pool.h"

namespace ingot::detail {

Checkpoint::Checkpoint(const std::string& path) : path_(path) {
  const auto add = [&](const File& file, const SafetensorsEntry& e, int64_t data_begin) {
    tensors_[e.name] = {&file, e.name, e.dtype, e.shape, data_begin + e.begin, e.bytes()};
  };
  if (IrisFile::is_one(path)) {
    iris_ = std::make_unique<IrisFile>(path);
    for (const SafetensorsEntry& e : iris_->entries()) add(iris_->file(), e, 0);
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

namespace {

constexpr int64_t kPiece = 8 << 20;  // bytes of one read: disks give their best from some MB on
constexpr uint8_t kMostScale = 252;  // 6 * 2^(253 - 127) is more than fp32 holds

// --- what has to be read -----------------------------------------------------------------------------------------

// Goes through every tensor of the model once.
class Layout : public CheckpointLayout {
 public:
  Layout(const Checkpoint& set, const GptOssConfig& config, int64_t layers, Arena* arena)
      : set_(set), c_(config), arena_(arena), own_(set.find("embedding.weight") != nullptr), iris_(set.is_iris()) {
    weights.embed = matrix({pick("model.embed_tokens.weight", "embedding.weight", "embed")}, {c_.vocab}, c_.hidden);
    for (int64_t l = 0; l < layers; ++l) weights.layers.push_back(layer(l));
    weights.norm = vector({pick("model.norm.weight", "norm.scale", "final_norm")}, {c_.hidden});
    weights.head = c_.tied_embeddings
                       ? weights.embed
                       : matrix({pick("lm_head.weight", "unembedding.weight", "lm_head")}, {c_.vocab}, c_.hidden);
    report_missing();
    refuse_others(layers);
  }

 private:
  using Names = std::vector<std::string>;
  // Hugging Face's name, OpenAI's own, that of .iris.
  std::string pick(const char* hf, const char* own, const char* iris) const { return own_ ? own : iris_ ? iris : hf; }
  std::string layer_prefix() const { return pick("model.layers.", "block.", "L"); }

  GptOssLayer layer(int64_t l) {
    const std::string n = layer_prefix() + std::to_string(l) + ".";
    const auto of_layer = [&](const char* hf, const char* own, const char* iris) { return n + pick(hf, own, iris); };
    const auto qkv_names = [&](const std::string& what) {
      if (own_) return Names{n + "attn.qkv." + what};
      Names names;
      for (const char* part : {"q", "k", "v"})
        names.push_back(iris_ ? n + what[0] + "_" + part : n + "self_attn." + part + "_proj." + what);
      return names;
    };
    const std::vector<int64_t> widths =
        own_ ? std::vector{c_.qkv_width()} : std::vector{c_.q_width(), c_.kv_width(), c_.kv_width()};
    GptOssLayer w;
    w.attn_norm = vector({of_layer("input_layernorm.weight", "attn.norm.scale", "norm_attn")}, {c_.hidden});
    w.qkv = matrix(qkv_names("weight"), widths, c_.hidden);
    w.o = matrix({of_layer("self_attn.o_proj.weight", "attn.out.weight", "w_o")}, {c_.hidden}, c_.q_width());
    if (c_.attention_bias) {
      w.b_qkv = vector(qkv_names("bias"), widths);
      w.b_o = vector({of_layer("self_attn.o_proj.bias", "attn.out.bias", "b_o")}, {c_.hidden});
    }
    w.sinks = vector({of_layer("self_attn.sinks", "attn.sinks", "sinks")}, {c_.heads});
    w.mlp_norm = vector({of_layer("post_attention_layernorm.weight", "mlp.norm.scale", "norm_moe")}, {c_.hidden});
    w.router = matrix({of_layer("mlp.router.weight", "mlp.gate.weight", "router_w")}, {c_.experts}, c_.hidden);
    w.b_router = vector({of_layer("mlp.router.bias", "mlp.gate.bias", "router_b")}, {c_.experts});
    const std::string gate_up = of_layer("mlp.experts.gate_up_proj", "mlp.mlp1_weight", "gate_up");
    const std::string down = of_layer("mlp.experts.down_proj", "mlp.mlp2_weight", "down");
    w.gate_up = bank(gate_up, 2 * c_.intermediate, c_.hidden);
    w.b_gate_up = table(of_layer("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias", "gate_up_b"), 2 * c_.intermediate);
    w.down = bank(down, c_.hidden, c_.intermediate);
    w.b_down = table(of_layer("mlp.experts.down_proj_bias", "mlp.mlp2_bias", "down_b"), c_.hidden);
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

  // One vector out of several, one after the other.
  Tensor vector(const Names& names, const std::vector<int64_t>& widths) {
    int64_t all = 0;
    for (const int64_t n : widths) all += n;
    const Tensor t = take(DType::f32, {all});
    int64_t at = 0;
    for (size_t i = 0; i < names.size(); at += widths[i++])
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
    const std::string dot = own_ ? "." : "_";
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
    const std::vector<int64_t> shape = own_ ? std::vector{c_.experts, n, k} : std::vector{c_.experts, k, n};
    const StoredTensor* place = find(name, shape, {"BF16", "F32"});
    const Tensor t = take(type_of(place), {c_.experts, n, k});
    add(place, t, 0, own_ ? Change::none : Change::turn);
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
  bool own_, iris_;  // OpenAI's names, or those of .iris
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

// Bytes a read writes.
int64_t written(const Read& r) {
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
    int64_t from, to;  // bytes of the tensor; an expert's number where it is turned
  };
  const char *first = static_cast<const char*>(begin), *last = first + bytes;
  std::vector<Task> tasks;
  for (const Read& r : reads) {
    const int64_t size = written(r);
    if (r.to + size <= first || r.to >= last) continue;
    if (r.change == Change::widen) {
      tasks.push_back({&r, 0, size});
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
