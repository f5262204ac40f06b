#include "ingot/models/checkpoint/archive.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>
#include <span>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/memory/memory.h"
#include "ingot/core/rng.h"
#include "ingot/io/formats/archive.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/io/json.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/sentencepiece.h"

namespace ingot {
namespace {

constexpr int64_t kPieceRows = 1024;  // rows of a step of a conversion; a multiple of a row tile's
constexpr int64_t kMaxAttached = 256 << 20;
const char* const kFiles = "files/";

enum class Role { plain, router, dense, expert };

// Every part of a model once, in the order of the file: vector(name, tensor, shape) and
// matrix(name, matrix, experts or 0, rows, columns, role).
template <class Visit>
void visit_layer(DecoderLayer& l, const DecoderSpec& c, bool experts, const std::string& n, Visit& visit) {
  const int64_t bank = experts ? c.experts : 0;  // a dense MLP has no bank
  const Role role = experts ? Role::expert : Role::dense;
  const auto per_expert = [&](int64_t width) { return experts ? Shape{c.experts, width} : Shape{width}; };
  visit.vector(n + "attn_norm", l.attn_norm, Shape{c.hidden});
  visit.matrix(n + "qkv", l.qkv, 0, c.qkv_width(), c.hidden, Role::dense);
  if (c.qkv_bias) visit.vector(n + "b_qkv", l.b_qkv, Shape{c.qkv_width()});
  if (c.qk_norm) visit.vector(n + "q_norm", l.q_norm, Shape{c.head_dim});
  if (c.qk_norm) visit.vector(n + "k_norm", l.k_norm, Shape{c.head_dim});
  if (c.sinks) visit.vector(n + "sinks", l.sinks, Shape{c.heads});
  visit.matrix(n + "o", l.o, 0, c.hidden, c.q_width(), Role::dense);
  if (c.output_bias) visit.vector(n + "b_o", l.b_o, Shape{c.hidden});
  if (c.norm.post) visit.vector(n + "attn_post_norm", l.attn_post_norm, Shape{c.hidden});
  visit.vector(n + "mlp_norm", l.mlp_norm, Shape{c.hidden});
  if (experts) visit.matrix(n + "router", l.router, 0, c.experts, c.hidden, Role::router);
  if (experts && c.mlp_bias) visit.vector(n + "b_router", l.b_router, Shape{c.experts});
  visit.matrix(n + "gate_up", l.gate_up, bank, 2 * c.intermediate, c.hidden, role);
  if (c.mlp_bias) visit.vector(n + "b_gate_up", l.b_gate_up, per_expert(2 * c.intermediate));
  visit.matrix(n + "down", l.down, bank, c.hidden, c.intermediate, role);
  if (c.mlp_bias) visit.vector(n + "b_down", l.b_down, per_expert(c.hidden));
  if (c.norm.post) visit.vector(n + "mlp_post_norm", l.mlp_post_norm, Shape{c.hidden});
}
template <class Visit> void visit_parts(DecoderWeights& w, const DecoderSpec& c, int64_t layers, Visit&& visit) {
  w.layers.resize(size_t(layers));
  visit.matrix("embed", w.embed, 0, c.vocab, c.hidden, Role::plain);
  for (int64_t i = 0; i < layers; ++i)
    visit_layer(w.layers[size_t(i)], c, c.layer[size_t(i)].experts, "layers." + std::to_string(i) + ".", visit);
  visit.vector("norm", w.norm, Shape{c.hidden});
  visit.matrix("head", w.head, 0, c.vocab, c.hidden, Role::dense);
}

std::vector<int64_t> sizes_of(const Shape& s) { return {s.dim, s.dim + s.rank}; }
std::vector<int64_t> sizes_of(int64_t experts, int64_t rows, int64_t cols) {
  return experts > 0 ? std::vector{experts, rows, cols} : std::vector{rows, cols};
}
constexpr const char* kTiled = "granules";  // version 1 of the format calls the layout of weight tiles so
int64_t weight_tiles_bytes(WeightFormat f, int64_t experts, int64_t rows, int64_t cols) {
  return std::max<int64_t>(1, experts) * row_tile_count(rows) * row_tile_bytes(f, cols);
}

// --- writing -----------------------------------------------------------------------------------------------------

// The archive's parts in order, with where their numbers come from.
struct Part {
  ArchiveEntry entry;
  Tensor vector;
  WeightMatrix matrix;
  WeightFormat to = WeightFormat::f32;
};
struct Plan {
  const ArchiveForms& forms;
  std::vector<Part> parts;

  void vector(const std::string& name, Tensor& t, const Shape& shape) {
    parts.push_back({{name, "f32", "plain", sizes_of(shape), shape.numel() * 4}, t, {}, WeightFormat::f32});
  }
  void matrix(const std::string& name, WeightMatrix& w, int64_t experts, int64_t rows, int64_t cols, Role role) {
    const WeightFormat f = role == Role::dense    ? forms.dense
                           : role == Role::expert ? forms.experts
                                                  : WeightFormat::bf16;
    const int64_t bytes = role == Role::plain ? rows * cols * 2 : weight_tiles_bytes(f, experts, rows, cols);
    parts.push_back(
        {{name, name_of(f), role == Role::plain ? "plain" : kTiled, sizes_of(experts, rows, cols), bytes}, {}, w, f});
  }
};

// A piece of a matrix in the archive's form.
class Pieces {
 public:
  std::span<const char> bytes_of(const WeightMatrix& piece, const Part& part) {
    const WeightMatrix stored = in_format(piece, part.to);
    if (part.entry.layout == "plain") return {static_cast<const char*>(stored.data.data), size_t(stored.data.bytes())};
    out_.resize(size_t(weight_tiles_bytes(part.to, 0, piece.rows(), piece.cols())));
    pack_weight_tiles(stored, weight_tiles_at(out_.data(), part.to, 0, piece.rows(), piece.cols()));
    return {reinterpret_cast<const char*>(out_.data()), out_.size()};
  }

 private:
  WeightMatrix in_format(const WeightMatrix& w, WeightFormat f) {
    if (w.format == f) return w;
    const int64_t rows = w.rows(), cols = w.cols();
    wide_.resize(size_t(rows * cols));
    narrow_.resize(size_t(rows * cols * 2));
    scales_.resize(size_t(rows * std::max<int64_t>(4, cols / kMxBlock)));
    const Tensor wide(wide_.data(), {rows, cols});
    dequantise(w, wide, {});
    const WeightMatrix to =
        f == WeightFormat::bf16 ? WeightMatrix(Tensor(narrow_.data(), DType::bf16, {rows, cols}))
        : f == WeightFormat::fp8
            ? WeightMatrix(f, Tensor(narrow_.data(), {rows, cols}), Tensor(scales_.data(), DType::f32, {rows}))
            : WeightMatrix(f, Tensor(narrow_.data(), {rows, cols / kMxBlock, kMxBlock / 2}),
                           Tensor(scales_.data(), {rows, cols / kMxBlock}));
    quantise(wide, to, {});
    return to;
  }
  std::vector<float> wide_;
  std::vector<uint8_t> narrow_, scales_, out_;
};

class Converter {
 public:
  Converter(const std::vector<detail::Read>& reads, ArchiveWriter& writer, const ConvertOptions& options)
      : reads_(reads), writer_(writer), options_(options) {}

  void write(const Part& part) {
    try {
      if (part.vector) return write_vector(part.vector);
      if (!part.matrix.is_bank()) return write_rows(part, part.matrix, true);
      for (int64_t e = 0; e < part.matrix.data.size(0); ++e) {
        const WeightMatrix one = part.matrix.at(e);
        bring(one);
        write_rows(part, one, false);
        release(one);
      }
    } catch (const Error& e) { fail(e.code, "\"", part.entry.name, "\": ", e.what()); }
  }
  void write_bytes(const std::string& bytes) { put(bytes.data(), int64_t(bytes.size())); }

 private:
  // --- pieces of the checkpoint, in memory only during their use
  void bring(const WeightMatrix& w) {
    detail::read_range(reads_, w.data.data, w.data.bytes());
    if (w.scales) detail::read_range(reads_, w.scales.data, w.scales.bytes());
  }
  // Releases whole pages: further data on these pages has been written, or is read again later.
  static void release(const void* begin, int64_t bytes) {
    constexpr uintptr_t kPage = 4096;
    const uintptr_t first = uintptr_t(begin) / kPage * kPage, last = uintptr_t(begin) + uintptr_t(bytes);
    ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
  static void release(const WeightMatrix& w) {
    release(w.data.data, w.data.bytes());
    if (w.scales) release(w.scales.data, w.scales.bytes());
  }

  void write_vector(const Tensor& t) {
    detail::read_range(reads_, t.data, t.bytes());
    put(t.data, t.bytes());
    release(t.data, t.bytes());
  }
  void write_rows(const Part& part, const WeightMatrix& w, bool piecewise) {
    for (int64_t begin = 0; begin < w.rows(); begin += kPieceRows) {
      const WeightMatrix piece = w.row_range(begin, std::min(w.rows(), begin + kPieceRows));
      if (piecewise) bring(piece);
      const std::span<const char> bytes = pieces_.bytes_of(piece, part);
      put(bytes.data(), int64_t(bytes.size()));
      if (piecewise) release(piece);
    }
  }
  void put(const void* bytes, int64_t n) {
    writer_.write(bytes, n);
    done_ += n;
    if (options_.progress) options_.progress(done_, writer_.file_bytes());
  }

  const std::vector<detail::Read>& reads_;
  ArchiveWriter& writer_;
  const ConvertOptions& options_;
  int64_t done_ = 0;
  Pieces pieces_;
};

std::string about(const ArchivedModel& model, const ArchiveForms& forms) {
  return write_json(OrderedJson{{"model", OrderedJson::parse(model.description)},
                                {"dense", name_of(forms.dense)},
                                {"experts", name_of(forms.experts)}});
}

}  // namespace

WeightFormat archive_format_named(const std::string& name) {
  for (const WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    if (name == name_of(f)) return f;
  fail(ErrorCode::usage, "format of weights: found \"", name, "\", expected bf16, fp8 or mxfp4");
}

void check(const ArchiveForms& forms, const DecoderSpec& c, const std::string& where) {
  for (const auto& [form, what] : {std::pair{forms.dense, "dense"}, {forms.experts, "experts"}}) {
    if (!has_weight_tiles(form))
      fail(ErrorCode::usage, where, ": ", what, ": found ", form, ", expected bf16, fp8 or mxfp4");
  }
  const auto refuse = [&](const char* what, int64_t cols) {
    if (cols % kMxBlock != 0)
      fail(ErrorCode::unsupported, where, ": found ", what, " rows of ", cols, " numbers, expected a multiple of ",
           kMxBlock, " for mxfp4");
  };
  if (forms.dense == WeightFormat::mxfp4) refuse("dense", c.hidden), refuse("attention output", c.q_width());
  for (const LayerSpec& l : c.layer)
    if ((l.experts ? forms.experts : forms.dense) == WeightFormat::mxfp4)
      refuse(l.experts ? "expert" : "dense", c.hidden), refuse(l.experts ? "expert" : "dense", c.intermediate);
}

namespace {

int64_t convert_archive(const std::string& from, const std::string& to, const ArchivedModel& model,
                        const ConvertOptions& options);

// A mistyped name must not cost a shard of the checkpoint, or anything else.
void require_replaceable(const std::string& from, const std::string& to) {
  std::error_code absent;
  if (!from.empty() && std::filesystem::equivalent(checkpoint_source(from), to, absent))
    fail(ErrorCode::usage, to, ": found the checkpoint itself, expected another name for the archive");
  if (std::filesystem::is_regular_file(to, absent) && file_size(to) > 0 && !ArchiveFile::is_one(to))
    fail(ErrorCode::usage, to, ": found a file that is no archive, expected a new name or an archive to replace");
}

}  // namespace

std::vector<AttachedFile> tokenizer_files(const std::string& from) {
  std::vector<AttachedFile> files;
  if (const std::string path = checkpoint_source(from); GgufFile::is_one(path)) {
    const GgufFile file(path);
    if (file.metadata().count("tokenizer.ggml.tokens") == 0) return files;
    if (SentencePiece::is_in(file)) return {{"tokenizer.model", SentencePiece::from_gguf(file).to_model()}};
    return {{"tokenizer.json", ByteBpe::from_gguf(file).to_json()}};
  }
  const std::string directory = snapshot_of(from), tokenizer = is_directory(directory) ? tokenizer_in(directory) : "";
  if (!tokenizer.empty()) files.push_back({base_name(tokenizer), read_file(tokenizer, kMaxAttached)});
  return files;
}

int64_t write_model_archive(const std::string& from, const std::string& to, const ArchivedModel& model,
                            const LayOutModel& lay_out, const std::vector<AttachedFile>& files,
                            const ConvertOptions& options) {
  check(options.forms, model.spec, from);
  require_replaceable(from, to);
  if (ArchiveFile::is_one(from)) return convert_archive(from, to, model, options);
  const detail::Checkpoint checkpoint(from);
  // Address space for the whole checkpoint; only the piece in conversion takes memory.
  Arena arena(lay_out(checkpoint, nullptr).bytes);
  detail::CheckpointLayout layout = lay_out(checkpoint, &arena);
  Plan plan{options.forms, {}};
  visit_parts(layout.weights, model.spec, model.spec.layers, plan);
  std::vector<ArchiveEntry> entries;
  for (const Part& p : plan.parts) entries.push_back(p.entry);
  for (const auto& [name, content] : files) {
    const auto bytes = int64_t(content.size());
    entries.push_back({kFiles + name, "bytes", "plain", {bytes}, bytes});
  }
  ArchiveWriter writer(to, model.kind, about(model, options.forms), std::move(entries));
  Converter converter(layout.reads, writer, options);
  for (const Part& p : plan.parts) converter.write(p);
  for (const auto& [name, content] : files) converter.write_bytes(content);
  writer.commit();
  return writer.file_bytes();
}

// --- made up -----------------------------------------------------------------------------------------------------
namespace {

// The standard deviation of a part's numbers, chosen so that logits have a standard deviation of about 2 and every
// branch matters.
struct Spread {
  double mean = 0, std = 1;
};
Spread spread_of(const std::string& name, int64_t cols) {
  const auto is = [&](const char* end) { return name.ends_with(end); };
  const double unit = 1 / std::sqrt(double(cols));
  if (is("norm")) return {1, 0.1};
  if (is("sinks")) return {0, 1};
  if (is("embed")) return {0, 1};
  if (is("head") || is("router")) return {0, 2 * unit};
  if (name.find(".b_") != std::string::npos) return {0, 0.05};
  return {0, is(".o") || is(".down") ? 0.5 * unit : unit};
}

class Inventor {
 public:
  Inventor(ArchiveWriter& writer, uint64_t seed, const ConvertOptions& options)
      : writer_(writer), seed_(seed), options_(options) {}

  void write(const Part& part) {
    const std::vector<int64_t>& shape = part.entry.shape;
    const int64_t cols = shape.back();
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    const bool is_vector = part.entry.format == "f32";
    // Experts lie in order, each from a weight tile's first row.
    const int64_t one = shape.size() == 3 ? shape[1] : rows;
    for (int64_t row = 0; row < rows;) {
      const int64_t n = std::min({kPieceRows, rows - row, one - row % one});
      if (is_vector) {
        normals(part.entry.name, n, cols);
        put(wide_.data(), n * cols * 4);
      } else {
        const auto bytes = pieces_.bytes_of(
            part.to == WeightFormat::mxfp4 ? codes(part.entry.name, n, cols) : normals(part.entry.name, n, cols), part);
        put(bytes.data(), int64_t(bytes.size()));
      }
      row += n;
    }
    ++part_;
  }

 private:
  void put(const void* bytes, int64_t n) {
    writer_.write(bytes, n);
    done_ += n;
    if (options_.progress) options_.progress(done_, writer_.file_bytes());
  }
  Rng rng() const { return Rng(seed_, Purpose::init, part_); }

  // Four uniform numbers added up and scaled to a variance of 1: a sixth of the time of an exact normal.
  static double nearly_normal(uint32_t a, uint32_t b) {
    const uint32_t sum = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16);
    return (double(sum) * 0x1p-16 - 2) * 1.7320508075688772;
  }
  WeightMatrix normals(const std::string& name, int64_t rows, int64_t cols) {
    const Spread s = spread_of(name, cols);
    const int64_t numbers = rows * cols, pairs = (numbers + 1) / 2;
    wide_.resize(size_t(2 * pairs));
    parallel_for(pairs, 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto words = rng().block(uint64_t(at_ + i));
        wide_[size_t(2 * i)] = float(s.mean + s.std * nearly_normal(words[0], words[1]));
        wide_[size_t(2 * i + 1)] = float(s.mean + s.std * nearly_normal(words[2], words[3]));
      }
    });
    at_ += pairs;
    return WeightMatrix(Tensor(wide_.data(), {rows, cols}));
  }
  // All codes equally likely, at one of two scales: rounding normals for billions of weights would take minutes.
  WeightMatrix codes(const std::string& name, int64_t rows, int64_t cols) {
    constexpr double kCodes = 2.926;  // root of the mean square of e2m1's numbers
    const int exponent = int(std::lround(std::log2(spread_of(name, cols).std / kCodes)));
    const int64_t blocks = rows * cols / kMxBlock;
    codes_.resize(size_t(blocks * 16));
    scales_.resize(size_t(blocks));
    parallel_for(blocks, 1 << 12, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const auto words = rng().block(uint64_t(at_ + 2 * b));
        std::memcpy(&codes_[size_t(b * 16)], words.data(), 16);
        scales_[size_t(b)] = uint8_t(127 + exponent - int(rng().block(uint64_t(at_ + 2 * b + 1))[0] & 1));
      }
    });
    at_ += 2 * blocks;
    return WeightMatrix(WeightFormat::mxfp4, Tensor(codes_.data(), {rows, cols / kMxBlock, kMxBlock / 2}),
                        Tensor(scales_.data(), {rows, cols / kMxBlock}));
  }

  ArchiveWriter& writer_;
  uint64_t seed_;
  const ConvertOptions& options_;
  uint32_t part_ = 0;
  int64_t at_ = 0, done_ = 0;
  std::vector<float> wide_;
  std::vector<uint8_t> codes_, scales_;
  Pieces pieces_;
};

}  // namespace

int64_t write_random_archive(const ArchivedModel& model, const std::string& to, uint64_t seed,
                             const ConvertOptions& options) {
  check(model.spec, "synthetic");
  check(options.forms, model.spec, "synthetic");
  require_replaceable("", to);
  DecoderWeights none;
  Plan plan{options.forms, {}};
  visit_parts(none, model.spec, model.spec.layers, plan);
  std::vector<ArchiveEntry> entries;
  for (const Part& p : plan.parts) entries.push_back(p.entry);
  ArchiveWriter writer(to, model.kind, about(model, options.forms), std::move(entries));
  Inventor inventor(writer, seed, options);
  for (const Part& p : plan.parts) inventor.write(p);
  writer.commit();
  return writer.file_bytes();
}

// --- reading -----------------------------------------------------------------------------------------------------
namespace {

void require_kind(const ArchiveFile& file, const std::string& kind) {
  if (file.kind() != kind)
    fail(ErrorCode::unsupported, file.path(), ": found an archive of \"", file.kind().substr(0, 40), "\", expected ",
         kind);
}

struct Finder {
  const ArchiveFile& file;
  std::vector<const ArchiveEntry*> used = {};
  int64_t bytes = 0;

  const ArchiveEntry& find(const std::string& name, const std::vector<int64_t>& shape, const char* layout) {
    const ArchiveEntry* e = file.find(name);
    if (e == nullptr) fail(ErrorCode::bad_data, file.path(), ": blob \"", name, "\" is missing");
    if (e->shape != shape)
      fail(ErrorCode::bad_data, file.path(), ": blob \"", name, "\": found shape ", shape_text(e->shape), ", expected ",
           shape_text(shape));
    if (e->layout != layout)
      fail(ErrorCode::bad_data, file.path(), ": blob \"", name, "\": found layout \"", e->layout.substr(0, 40),
           "\", expected ", layout);
    used.push_back(e);
    bytes += e->bytes;
    return *e;
  }
  void require_bytes(const ArchiveEntry& e, int64_t expected) {
    if (e.bytes != expected)
      fail(ErrorCode::bad_data, file.path(), ": blob \"", e.name, "\": found ", e.bytes, " bytes, expected ", expected,
           " for its shape and format");
  }
  [[noreturn]] void wrong_format(const ArchiveEntry& e, const char* expected) {
    fail(ErrorCode::bad_data, file.path(), ": blob \"", e.name, "\": found format \"", e.format.substr(0, 40),
         "\", expected ", expected);
  }
  // The mapping is read-only, and no caller writes through this pointer.
  void* memory(const ArchiveEntry& e) { return const_cast<char*>(file.data(e)); }

  void vector(const std::string& name, Tensor& t, const Shape& shape) {
    const ArchiveEntry& e = find(name, sizes_of(shape), "plain");
    if (e.format != "f32") wrong_format(e, "f32");
    require_bytes(e, shape.numel() * 4);
    t = Tensor(memory(e), DType::f32, shape);
  }
  void matrix(const std::string& name, WeightMatrix& w, int64_t experts, int64_t rows, int64_t cols, Role role) {
    const ArchiveEntry& e = find(name, sizes_of(experts, rows, cols), role == Role::plain ? "plain" : kTiled);
    if (role == Role::plain) {
      if (e.format != "bf16") wrong_format(e, "bf16");
      require_bytes(e, rows * cols * 2);
      w = WeightMatrix(Tensor(memory(e), DType::bf16, {rows, cols}));
      return;
    }
    const WeightFormat f = e.format == "bf16"    ? WeightFormat::bf16
                           : e.format == "fp8"   ? WeightFormat::fp8
                           : e.format == "mxfp4" ? WeightFormat::mxfp4
                                                 : WeightFormat::f64;
    if (f == WeightFormat::f64 || (f == WeightFormat::mxfp4 && cols % kMxBlock != 0))
      wrong_format(e, f == WeightFormat::f64 ? "bf16, fp8 or mxfp4" : "one for rows of no whole mxfp4 block");
    require_bytes(e, weight_tiles_bytes(f, experts, rows, cols));
    w = weight_tiles_at(memory(e), f, experts, rows, cols);
  }

  static int64_t layer_of(const std::string& name) {
    const std::string prefix = "layers.";
    return name.rfind(prefix, 0) == 0 ? std::strtoll(name.c_str() + prefix.size(), nullptr, 10) : -1;
  }
  void refuse_others(int64_t layers, int64_t all_layers) const {
    std::set<const ArchiveEntry*> known(used.begin(), used.end());
    for (const ArchiveEntry& e : file.entries()) {
      if (known.count(&e) != 0 || e.name.rfind(kFiles, 0) == 0) continue;
      if (const int64_t l = layer_of(e.name); l >= layers && l < all_layers) continue;  // was not asked for
      fail(ErrorCode::bad_data, file.path(), ": found blob \"", e.name.substr(0, 200),
           "\", which a model with this config does not have");
    }
  }
};

Finder find_parts(const ArchiveFile& file, const ArchivedModel& model, int64_t layers, DecoderWeights& w) {
  require_kind(file, model.kind);
  Finder finder{file};
  visit_parts(w, model.spec, layers, finder);
  finder.refuse_others(layers, model.spec.layers);
  return finder;
}

// --- from archive to archive

// Unchanged blobs are copied, all further blobs converted; the checksums of both are verified on the way.
class Rewriter {
 public:
  Rewriter(const ArchiveFile& from, ArchiveWriter& writer, const ConvertOptions& options)
      : from_(from), writer_(writer), options_(options) {}

  void write(const Part& part) {
    const ArchiveEntry& e = *from_.find(part.entry.name);
    if (e.format == part.entry.format) return copy(e);
    from_.prefetch({&e});
    sum_ = Sha256();
    if (!part.matrix.is_bank()) write_rows(part, part.matrix);
    for (int64_t i = 0; part.matrix.is_bank() && i < part.matrix.data.size(0); ++i) write_rows(part, part.matrix.at(i));
    from_.compare(e, sum_.hex());
  }
  void copy(const ArchiveEntry& e) {
    constexpr int64_t kPiece = 8 << 20;
    from_.prefetch({&e});
    sum_ = Sha256();
    for (int64_t at = 0; at < e.bytes; at += kPiece) {
      const int64_t n = std::min(kPiece, e.bytes - at);
      sum_.update(from_.data(e) + at, n);
      put(from_.data(e) + at, n);
    }
    from_.compare(e, sum_.hex());
  }

 private:
  void write_rows(const Part& part, const WeightMatrix& w) {
    for (int64_t begin = 0; begin < w.rows(); begin += kPieceRows) {
      const WeightMatrix piece = w.row_range(begin, std::min(w.rows(), begin + kPieceRows));
      sum_.update(piece.data.data, piece.data.bytes());
      const std::span<const char> bytes = pieces_.bytes_of(piece, part);
      put(bytes.data(), int64_t(bytes.size()));
    }
  }
  void put(const void* bytes, int64_t n) {
    writer_.write(bytes, n);
    done_ += n;
    if (options_.progress) options_.progress(done_, writer_.file_bytes());
  }

  const ArchiveFile& from_;
  ArchiveWriter& writer_;
  const ConvertOptions& options_;
  int64_t done_ = 0;
  Sha256 sum_;
  Pieces pieces_;
};

int64_t convert_archive(const std::string& from, const std::string& to, const ArchivedModel& model,
                        const ConvertOptions& options) {
  const ArchiveFile file(from);
  DecoderWeights views;
  find_parts(file, model, model.spec.layers, views);
  Plan plan{options.forms, {}};
  visit_parts(views, model.spec, model.spec.layers, plan);
  std::vector<ArchiveEntry> entries, attached;
  for (const ArchiveEntry& e : file.entries())
    if (e.name.starts_with(kFiles)) attached.push_back(e);
  for (const Part& p : plan.parts) entries.push_back(p.entry);
  entries.insert(entries.end(), attached.begin(), attached.end());
  ArchiveWriter writer(to, model.kind, about(model, options.forms), std::move(entries));
  Rewriter rewriter(file, writer, options);
  for (const Part& p : plan.parts) rewriter.write(p);
  for (const ArchiveEntry& e : attached) rewriter.copy(e);
  writer.commit();
  return writer.file_bytes();
}

}  // namespace

ArchiveForms archive_forms(const std::string& path, const ArchivedModel& model) {
  const ArchiveFile file(path);
  DecoderWeights views;
  find_parts(file, model, model.spec.layers, views);
  ArchiveForms forms{.dense = views.head.format};
  for (size_t l = 0; l < views.layers.size(); ++l)
    if (model.spec.layer[l].experts) forms.experts = views.layers[l].gate_up.format;
  return forms;
}

DecoderWeights map_model_archive(const std::string& path, const ArchivedModel& model, int64_t layers) {
  auto file = std::make_shared<ArchiveFile>(path);
  DecoderWeights w;
  w.mapped_bytes = find_parts(*file, model, layers, w).bytes;
  w.mapping = std::move(file);
  return w;
}
DecoderWeights load_model_archive(const std::string& path, const ArchivedModel& model, const ArchiveLoad& load) {
  auto file = std::make_shared<ArchiveFile>(path);
  DecoderWeights w;
  const Finder found = find_parts(*file, model, load.layers, w);
  const int64_t room = available_memory();
  require_memory((load.passed_on ? 0 : found.bytes) + load.other_bytes, path);
  // An archive larger than memory is read while the weights are passed to the device.
  if (room < 0 || found.bytes <= room) file->prefetch(found.used);
  w.mapped_bytes = found.bytes;
  w.mapping = std::move(file);
  return w;
}

std::vector<std::string> archived_files(const std::string& path) {
  const std::string prefix = kFiles;
  std::vector<std::string> names;
  const ArchiveFile file(path);
  for (const ArchiveEntry& e : file.entries())
    if (e.name.starts_with(prefix)) names.push_back(e.name.substr(prefix.size()));
  return names;
}

std::optional<std::string> archived_file(const std::string& path, const std::string& name) {
  const ArchiveFile file(path);
  const ArchiveEntry* e = file.find(kFiles + name);
  if (e == nullptr) return {};
  if (e->bytes > kMaxAttached)
    fail(ErrorCode::bad_data, path, ": blob \"", e->name, "\": found ", e->bytes, " bytes, expected at most ",
         kMaxAttached);
  file.prefetch({e});
  return std::string(file.data(*e), size_t(e->bytes));
}

}  // namespace ingot
