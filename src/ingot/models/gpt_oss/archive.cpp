#include "ingot/models/gpt_oss/archive.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "ingot/core/memory.h"
#include "ingot/io/archive.h"
#include "ingot/io/json.h"
#include "ingot/kernels/quant/granules.h"
#include "ingot/models/gpt_oss/checkpoint.h"

namespace ingot {
namespace {

constexpr int64_t kPieceRows = 1024;  // of one step of a conversion; a multiple of a band's
constexpr int64_t kMaxAttached = 256 << 20;
const char* const kFiles = "files/";

enum class Role { plain, router, dense, expert };

// Every part of a model once, in the order of the file: vector(name, tensor, shape) and
// matrix(name, matrix, experts or 0, rows, columns, role).
template <class Visit> void visit_parts(GptOssWeights& w, const GptOssConfig& c, int64_t layers, Visit&& visit) {
  w.layers.resize(size_t(layers));
  visit.matrix("embed", w.embed, 0, c.vocab, c.hidden, Role::plain);
  for (int64_t i = 0; i < layers; ++i) {
    GptOssLayer& l = w.layers[size_t(i)];
    const std::string n = "layers." + std::to_string(i) + ".";
    visit.vector(n + "attn_norm", l.attn_norm, Shape{c.hidden});
    visit.matrix(n + "qkv", l.qkv, 0, c.qkv_width(), c.hidden, Role::dense);
    if (c.attention_bias) visit.vector(n + "b_qkv", l.b_qkv, Shape{c.qkv_width()});
    visit.vector(n + "sinks", l.sinks, Shape{c.heads});
    visit.matrix(n + "o", l.o, 0, c.hidden, c.q_width(), Role::dense);
    if (c.attention_bias) visit.vector(n + "b_o", l.b_o, Shape{c.hidden});
    visit.vector(n + "mlp_norm", l.mlp_norm, Shape{c.hidden});
    visit.matrix(n + "router", l.router, 0, c.experts, c.hidden, Role::router);
    visit.vector(n + "b_router", l.b_router, Shape{c.experts});
    visit.matrix(n + "gate_up", l.gate_up, c.experts, 2 * c.intermediate, c.hidden, Role::expert);
    visit.vector(n + "b_gate_up", l.b_gate_up, Shape{c.experts, 2 * c.intermediate});
    visit.matrix(n + "down", l.down, c.experts, c.hidden, c.intermediate, Role::expert);
    visit.vector(n + "b_down", l.b_down, Shape{c.experts, c.hidden});
  }
  visit.vector("norm", w.norm, Shape{c.hidden});
  visit.matrix("head", w.head, 0, c.vocab, c.hidden, Role::dense);
}

std::vector<int64_t> sizes_of(const Shape& s) { return {s.dim, s.dim + s.rank}; }
std::vector<int64_t> sizes_of(int64_t experts, int64_t rows, int64_t cols) {
  return experts > 0 ? std::vector{experts, rows, cols} : std::vector{rows, cols};
}
int64_t granules_bytes(WeightFormat f, int64_t experts, int64_t rows, int64_t cols) {
  return std::max<int64_t>(1, experts) * granule_bands(rows) * band_bytes(f, cols);
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
  const GptOssForms& forms;
  std::vector<Part> parts;

  void vector(const std::string& name, Tensor& t, const Shape& shape) {
    parts.push_back({{name, "f32", "plain", sizes_of(shape), shape.numel() * 4}, t, {}, WeightFormat::f32});
  }
  void matrix(const std::string& name, WeightMatrix& w, int64_t experts, int64_t rows, int64_t cols, Role role) {
    const WeightFormat f = role == Role::dense    ? forms.dense
                           : role == Role::expert ? forms.experts
                                                  : WeightFormat::bf16;
    const int64_t bytes = role == Role::plain ? rows * cols * 2 : granules_bytes(f, experts, rows, cols);
    parts.push_back(
        {{name, name_of(f), role == Role::plain ? "plain" : "granules", sizes_of(experts, rows, cols), bytes},
         {},
         w,
         f});
  }
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
  // --- pieces of the checkpoint, in memory only while they are used
  void bring(const WeightMatrix& w) {
    detail::read_range(reads_, w.data.data, w.data.bytes());
    if (w.scales) detail::read_range(reads_, w.scales.data, w.scales.bytes());
  }
  // Whole pages: what else is on them has been written, or is read when its turn comes.
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
      const WeightMatrix stored = in_format(piece, part.to);
      if (part.entry.layout == "plain") {
        put(stored.data.data, stored.data.bytes());
      } else {
        out_.resize(size_t(granules_bytes(part.to, 0, piece.rows(), piece.cols())));
        pack_granules(stored, granules_at(out_.data(), part.to, 0, piece.rows(), piece.cols()));
        put(out_.data(), int64_t(out_.size()));
      }
      if (piecewise) release(piece);
    }
  }
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
  void put(const void* bytes, int64_t n) {
    writer_.write(bytes, n);
    done_ += n;
    if (options_.progress) options_.progress(done_, writer_.file_bytes());
  }

  const std::vector<detail::Read>& reads_;
  ArchiveWriter& writer_;
  const ConvertOptions& options_;
  int64_t done_ = 0;
  std::vector<float> wide_;
  std::vector<uint8_t> narrow_, scales_, out_;
};

// Files of the checkpoint that a user of the archive needs as well.
std::vector<std::string> attached_files(const std::string& from) {
  std::vector<std::string> names;
  if (is_directory(from))
    for (const std::string& name : list_directory(from))
      if (name == "tokenizer.json" || name.ends_with(".tiktoken")) names.push_back(name);
  return names;
}

}  // namespace

void check(const GptOssForms& forms, const GptOssConfig& c, const std::string& where) {
  for (const auto& [form, what] : {std::pair{forms.dense, "dense"}, {forms.experts, "experts"}}) {
    if (!has_granules(form))
      fail(ErrorCode::usage, where, ": ", what, ": found ", form, ", expected bf16, fp8 or mxfp4");
  }
  const auto refuse = [&](const char* what, int64_t cols) {
    if (cols % kMxBlock != 0)
      fail(ErrorCode::unsupported, where, ": found ", what, " rows of ", cols, " numbers, expected a multiple of ",
           kMxBlock, " for mxfp4");
  };
  if (forms.dense == WeightFormat::mxfp4) refuse("dense", c.hidden), refuse("attention output", c.q_width());
  if (forms.experts == WeightFormat::mxfp4) refuse("expert", c.hidden), refuse("expert", c.intermediate);
}

int64_t convert_gpt_oss(const std::string& from, const std::string& to, const ConvertOptions& options) {
  if (ArchiveFile::is_one(from))
    fail(ErrorCode::usage, from, ": found an .ingot archive, expected a checkpoint's directory or an .iris file");
  const GptOssConfig config = read_gpt_oss_config(from);
  check(options.forms, config, from);
  const detail::Checkpoint checkpoint(from);
  // Room in the address space for all of it; of memory only the piece that is being converted is taken.
  Arena arena(detail::lay_out(checkpoint, config, config.layers, nullptr).bytes);
  detail::CheckpointLayout layout = detail::lay_out(checkpoint, config, config.layers, &arena);
  Plan plan{options.forms, {}};
  visit_parts(layout.weights, config, config.layers, plan);
  std::vector<ArchiveEntry> entries;
  for (const Part& p : plan.parts) entries.push_back(p.entry);
  std::vector<std::string> files;
  for (const std::string& name : attached_files(from)) {
    files.push_back(read_file(join_path(from, name), kMaxAttached));
    const auto bytes = int64_t(files.back().size());
    entries.push_back({kFiles + name, "bytes", "plain", {bytes}, bytes});
  }
  const OrderedJson about = {{"model", OrderedJson::parse(to_json(config))},
                             {"dense", name_of(options.forms.dense)},
                             {"experts", name_of(options.forms.experts)}};
  ArchiveWriter writer(to, "gpt_oss", write_json(about), std::move(entries));
  Converter converter(layout.reads, writer, options);
  for (const Part& p : plan.parts) converter.write(p);
  for (const std::string& bytes : files) converter.write_bytes(bytes);
  writer.commit();
  return writer.file_bytes();
}

// --- reading -----------------------------------------------------------------------------------------------------
namespace {

void require_kind(const ArchiveFile& file) {
  if (file.kind() != "gpt_oss")
    fail(ErrorCode::unsupported, file.path(), ": found an archive of \"", file.kind().substr(0, 40),
         "\", expected gpt_oss");
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
  // Nothing writes through it: the mapping is read-only.
  void* memory(const ArchiveEntry& e) { return const_cast<char*>(file.data(e)); }

  void vector(const std::string& name, Tensor& t, const Shape& shape) {
    const ArchiveEntry& e = find(name, sizes_of(shape), "plain");
    if (e.format != "f32") wrong_format(e, "f32");
    require_bytes(e, shape.numel() * 4);
    t = Tensor(memory(e), DType::f32, shape);
  }
  void matrix(const std::string& name, WeightMatrix& w, int64_t experts, int64_t rows, int64_t cols, Role role) {
    const ArchiveEntry& e = find(name, sizes_of(experts, rows, cols), role == Role::plain ? "plain" : "granules");
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
    require_bytes(e, granules_bytes(f, experts, rows, cols));
    w = granules_at(memory(e), f, experts, rows, cols);
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

Finder find_parts(const ArchiveFile& file, const GptOssConfig& config, const GptOssLoad& load, GptOssWeights& w) {
  require_kind(file);
  Finder finder{file};
  const int64_t layers = detail::layers_of(config, load);
  visit_parts(w, config, layers, finder);
  finder.refuse_others(layers, config.layers);
  return finder;
}

}  // namespace

GptOssWeights load_gpt_oss_archive(const std::string& path, const GptOssConfig& config, const GptOssLoad& load) {
  auto file = std::make_shared<ArchiveFile>(path);
  GptOssWeights w;
  const Finder found = find_parts(*file, config, load, w);
  require_memory(found.bytes + load.other_bytes, path);
  file->prefetch(found.used);
  w.mapped_bytes = found.bytes;
  w.mapping = std::move(file);
  return w;
}

int64_t gpt_oss_archive_bytes(const std::string& path, const GptOssConfig& config, const GptOssLoad& load) {
  const ArchiveFile file(path);
  GptOssWeights w;
  return find_parts(file, config, load, w).bytes;
}

std::optional<std::string> gpt_oss_archived_file(const std::string& path, const std::string& name) {
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
