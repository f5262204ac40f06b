#include "ingot/models/gpt_oss/weights.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "ingot/core/memory.h"
#include "ingot/core/thread_pool.h"
#include "ingot/io/safetensors_set.h"

namespace ingot {
namespace {

constexpr int64_t kPiece = 8 << 20;  // bytes of one read: disks give their best from some MB on
constexpr uint8_t kNanScale = 255;

// --- what has to be read -----------------------------------------------------------------------------------------

enum class Change { none, widen, turn, scales };  // to f32; (E, K, N) to (E, N, K); none, but no byte may be 255
struct Read {
  SafetensorsSet::Place from;
  char* to;
  Change change;
};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

// Goes through every tensor of the model once. Without an arena it checks and counts bytes; with one it places the
// weights and lists the reads that fill them.
class Layout {
 public:
  Layout(const SafetensorsSet& set, const GptOssConfig& config, int64_t layers, Arena* arena)
      : set_(set), c_(config), arena_(arena), own_(bool(set.find("embedding.weight"))) {
    weights.embed = matrix({own_ ? "embedding.weight" : "model.embed_tokens.weight"}, {c_.vocab}, c_.hidden);
    for (int64_t l = 0; l < layers; ++l) weights.layers.push_back(layer(l));
    weights.norm = vector({own_ ? "norm.scale" : "model.norm.weight"}, {c_.hidden});
    weights.head = c_.tied_embeddings ? weights.embed
                                      : matrix({own_ ? "unembedding.weight" : "lm_head.weight"}, {c_.vocab}, c_.hidden);
    report_missing();
    refuse_others(layers);
  }
  GptOssWeights weights;
  std::vector<Read> reads;
  int64_t bytes = 0;  // as an arena takes them

 private:
  using Names = std::vector<std::string>;

  GptOssLayer layer(int64_t l) {
    const std::string n = own_ ? "block." + std::to_string(l) + "." : "model.layers." + std::to_string(l) + ".";
    const auto pick = [&](const char* hf, const char* own) { return n + (own_ ? own : hf); };
    const auto qkv_names = [&](const std::string& what) {
      if (own_) return Names{n + "attn.qkv." + what};
      return Names{n + "self_attn.q_proj." + what, n + "self_attn.k_proj." + what, n + "self_attn.v_proj." + what};
    };
    const std::vector<int64_t> widths =
        own_ ? std::vector{c_.qkv_width()} : std::vector{c_.q_width(), c_.kv_width(), c_.kv_width()};
    GptOssLayer w;
    w.attn_norm = vector({pick("input_layernorm.weight", "attn.norm.scale")}, {c_.hidden});
    w.qkv = matrix(qkv_names("weight"), widths, c_.hidden);
    w.o = matrix({pick("self_attn.o_proj.weight", "attn.out.weight")}, {c_.hidden}, c_.q_width());
    if (c_.attention_bias) {
      w.b_qkv = vector(qkv_names("bias"), widths);
      w.b_o = vector({pick("self_attn.o_proj.bias", "attn.out.bias")}, {c_.hidden});
    }
    w.sinks = vector({pick("self_attn.sinks", "attn.sinks")}, {c_.heads});
    w.mlp_norm = vector({pick("post_attention_layernorm.weight", "mlp.norm.scale")}, {c_.hidden});
    w.router = matrix({pick("mlp.router.weight", "mlp.gate.weight")}, {c_.experts}, c_.hidden);
    w.b_router = vector({pick("mlp.router.bias", "mlp.gate.bias")}, {c_.experts});
    const std::string gate_up = pick("mlp.experts.gate_up_proj", "mlp.mlp1_weight");
    const std::string down = pick("mlp.experts.down_proj", "mlp.mlp2_weight");
    w.gate_up = bank(gate_up, 2 * c_.intermediate, c_.hidden);
    w.b_gate_up = table(pick("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias"), 2 * c_.intermediate);
    w.down = bank(down, c_.hidden, c_.intermediate);
    w.b_down = table(pick("mlp.experts.down_proj_bias", "mlp.mlp2_bias"), c_.hidden);
    return w;
  }

  // --- tensors of the checkpoint
  SafetensorsSet::Place find(const std::string& name, const std::vector<int64_t>& shape,
                             std::initializer_list<const char*> dtypes) {
    const SafetensorsSet::Place place = set_.find(name);
    if (!place) {
      missing_.push_back(name);
      return {};
    }
    used_.insert(name);
    const auto refuse = [&](const auto& found, const auto& expected) {
      fail(ErrorCode::bad_data, place.file->path(), ": tensor \"", name, "\": found ", found, ", expected ", expected);
    };
    if (place.entry->shape != shape) refuse("shape " + shape_text(place.entry->shape), shape_text(shape));
    std::string known;
    for (const char* d : dtypes) {
      if (place.entry->dtype == d) return place;
      known += (known.empty() ? "" : " or ") + std::string(d);
    }
    refuse("dtype " + place.entry->dtype, known);
    return {};
  }
  Tensor take(DType dtype, Shape shape) {
    bytes += (shape.numel() * size_of(dtype) + 63) / 64 * 64;
    return arena_ != nullptr ? arena_->take(dtype, shape) : Tensor(nullptr, dtype, shape);
  }
  void add(const SafetensorsSet::Place& from, const Tensor& to, int64_t offset, Change change) {
    if (arena_ != nullptr && from) reads.push_back({from, static_cast<char*>(to.data) + offset, change});
  }
  static DType type_of(const SafetensorsSet::Place& place) {
    return place && place.entry->dtype == "F32" ? DType::f32 : DType::bf16;
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
    std::vector<SafetensorsSet::Place> places;
    int64_t all = 0;
    for (size_t i = 0; i < names.size(); ++i) {
      places.push_back(find(names[i], {rows[i], cols}, {"BF16", "F32"}));
      all += rows[i];
      if (places[i] && places[0] && places[i].entry->dtype != places[0].entry->dtype)
        fail(ErrorCode::bad_data, places[i].file->path(), ": tensor \"", names[i], "\": found dtype ",
             places[i].entry->dtype, ", expected ", places[0].entry->dtype, " as \"", names[0], "\" has");
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
    if (!set_.find(name)) {  // the published form; also what a missing tensor is reported as
      if (k % kMxBlock != 0 && set_.find(name + dot + "blocks"))
        fail(ErrorCode::unsupported, set_.directory(), ": found mxfp4 rows of ", k, " numbers in \"", name,
             "\", expected a multiple of ", kMxBlock);
      const int64_t blocks = k / kMxBlock;
      const Tensor data = take(DType::u8, {c_.experts, n, blocks, kMxBlock / 2});
      const Tensor scales = take(DType::u8, {c_.experts, n, blocks});
      add(find(name + dot + "blocks", {c_.experts, n, blocks, kMxBlock / 2}, {"U8"}), data, 0, Change::none);
      add(find(name + dot + "scales", {c_.experts, n, blocks}, {"U8"}), scales, 0, Change::scales);
      return {WeightFormat::mxfp4, data, scales};
    }
    const std::vector<int64_t> shape = own_ ? std::vector{c_.experts, n, k} : std::vector{c_.experts, k, n};
    const SafetensorsSet::Place place = find(name, shape, {"BF16", "F32"});
    const Tensor t = take(type_of(place), {c_.experts, n, k});
    add(place, t, 0, own_ ? Change::none : Change::turn);
    return WeightMatrix(t);
  }

  // --- what is missing or left over
  void report_missing() const {
    if (missing_.empty()) return;
    std::string list;
    for (size_t i = 0; i < std::min<size_t>(5, missing_.size()); ++i) list += (i ? ", " : "") + missing_[i];
    fail(ErrorCode::bad_data, set_.directory(), ": ", missing_.size(), " tensors are missing, such as ", list);
  }
  // The layer a name belongs to, or -1.
  int64_t layer_of(const std::string& name) const {
    const std::string prefix = own_ ? "block." : "model.layers.";
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

  const SafetensorsSet& set_;
  const GptOssConfig& c_;
  Arena* arena_;
  bool own_;  // OpenAI's names
  std::set<std::string> used_;
  std::vector<std::string> missing_;
};

// --- reading -----------------------------------------------------------------------------------------------------

int64_t file_offset(const SafetensorsSet::Place& p) { return p.file->header().data_begin + p.entry->begin; }

void widen(const Read& r) {
  const int64_t n = r.from.entry->bytes() / size_of(r.from.entry->core_dtype());
  float* to = reinterpret_cast<float*>(r.to);
  if (r.from.entry->dtype == "F32") return r.from.file->read(*r.from.entry, to);
  std::vector<bf16> narrow(static_cast<size_t>(n));
  r.from.file->read(*r.from.entry, narrow.data());
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
void turn_expert(const Read& r, const SafetensorsFile& file, int64_t expert) {
  const std::vector<int64_t>& shape = r.from.entry->shape;
  const int64_t bytes = r.from.entry->bytes() / shape[0];
  char* memory = static_cast<char*>(thread_scratch(0, bytes));
  file.read_bytes(file_offset(r.from) + expert * bytes, memory, bytes);
  char* to = r.to + expert * bytes;
  if (r.from.entry->dtype == "F32")
    turn(reinterpret_cast<const float*>(memory), shape[1], shape[2], reinterpret_cast<float*>(to));
  else
    turn(reinterpret_cast<const bf16*>(memory), shape[1], shape[2], reinterpret_cast<bf16*>(to));
}

void refuse_nan_scale(const Read& r) {
  const void* at = std::memchr(r.to, kNanScale, size_t(r.from.entry->bytes()));
  if (at != nullptr)
    fail(ErrorCode::bad_data, r.from.file->path(), ": tensor \"", r.from.entry->name, "\": found scale 255 at byte ",
         static_cast<const char*>(at) - r.to, ", which stands for NaN; expected at most 254");
}

// Cut into pieces, so that one large tensor keeps all threads reading.
void read_all(const std::vector<Read>& reads) {
  struct Task {
    const Read* read;
    int64_t part;
  };
  std::vector<Task> tasks;
  for (const Read& r : reads) {
    const int64_t bytes = r.from.entry->bytes();
    const int64_t parts = r.change == Change::turn    ? r.from.entry->shape[0]
                          : r.change == Change::widen ? 1
                                                      : (bytes + kPiece - 1) / kPiece;
    for (int64_t i = 0; i < parts; ++i) tasks.push_back({&r, i});
  }
  parallel_tasks(int64_t(tasks.size()), [&](int64_t i) {
    const Read& r = *tasks[size_t(i)].read;
    const int64_t part = tasks[size_t(i)].part, begin = part * kPiece;
    if (r.change == Change::widen) return widen(r);
    if (r.change == Change::turn) return turn_expert(r, *r.from.file, part);
    r.from.file->read_bytes(file_offset(r.from) + begin, r.to + begin, std::min(kPiece, r.from.entry->bytes() - begin));
  });
  for (const Read& r : reads)
    if (r.change == Change::scales) refuse_nan_scale(r);
}

int64_t layers_of(const GptOssConfig& config, const GptOssLoad& load) {
  if (load.layers < 0 || load.layers > config.layers)
    fail(ErrorCode::usage, "layers: found ", load.layers, ", expected 1 to ", config.layers, ", or 0 for all");
  return load.layers == 0 ? config.layers : load.layers;
}

}  // namespace

GptOssWeights load_gpt_oss(const std::string& directory, const GptOssConfig& config, const GptOssLoad& load) {
  const int64_t layers = layers_of(config, load);
  const SafetensorsSet set(directory);
  const int64_t bytes = Layout(set, config, layers, nullptr).bytes;
  require_memory(bytes + load.other_bytes, directory);
  Arena arena(bytes);
  Layout layout(set, config, layers, &arena);
  read_all(layout.reads);
  layout.weights.arena = std::move(arena);
  return std::move(layout.weights);
}

int64_t gpt_oss_weight_bytes(const std::string& directory, const GptOssConfig& config, const GptOssLoad& load) {
  return Layout(SafetensorsSet(directory), config, layers_of(config, load), nullptr).bytes;
}

}  // namespace ingot
