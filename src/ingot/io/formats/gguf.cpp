#include "ingot/io/formats/gguf.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <tuple>

namespace ingot {
namespace {

constexpr char kMagic[] = "GGUF";
constexpr uint32_t kVersion = 3;
constexpr int64_t kMaxTensors = 1 << 20, kMaxKeys = 1 << 16, kMaxKey = 65535, kMaxName = 255;
constexpr int64_t kMaxText = 64 << 20, kMaxElements = 1 << 22;  // limits of one text, and of all lists together
constexpr int64_t kDefaultAlign = 32, kMaxAlign = 1 << 20;
constexpr uint32_t kMaxRank = 4;

struct Type {
  uint32_t number;
  const char* name;
  GgufBlock block;
};
constexpr Type kTypes[] = {
    {0, "F32", {1, 4}},         {1, "F16", {1, 2}},         {2, "Q4_0", {32, 18}},      {3, "Q4_1", {32, 20}},
    {6, "Q5_0", {32, 22}},      {7, "Q5_1", {32, 24}},      {8, "Q8_0", {32, 34}},      {9, "Q8_1", {32, 40}},
    {10, "Q2_K", {256, 84}},    {11, "Q3_K", {256, 110}},   {12, "Q4_K", {256, 144}},   {13, "Q5_K", {256, 176}},
    {14, "Q6_K", {256, 210}},   {15, "Q8_K", {256, 292}},   {16, "IQ2_XXS", {256, 66}}, {17, "IQ2_XS", {256, 74}},
    {18, "IQ3_XXS", {256, 98}}, {19, "IQ1_S", {256, 50}},   {20, "IQ4_NL", {32, 18}},   {21, "IQ3_S", {256, 110}},
    {22, "IQ2_S", {256, 82}},   {23, "IQ4_XS", {256, 136}}, {24, "I8", {1, 1}},         {25, "I16", {1, 2}},
    {26, "I32", {1, 4}},        {27, "I64", {1, 8}},        {28, "F64", {1, 8}},        {29, "IQ1_M", {256, 56}},
    {30, "BF16", {1, 2}},       {34, "TQ1_0", {256, 54}},   {35, "TQ2_0", {256, 66}},   {39, "MXFP4", {32, 17}},
    {40, "NVFP4", {64, 36}},
};

enum Kind : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text, list, u64, i64, f64 };
int64_t bytes_of(uint32_t kind) {
  switch (kind) {
    case u8:
    case i8:
    case boolean: return 1;
    case u16:
    case i16: return 2;
    case u32:
    case i32:
    case f32: return 4;
    case u64:
    case i64:
    case f64: return 8;
    case text: return 8;  // at least
    default: return 0;
  }
}

// Reads the part before the tensors, value by value. Every length is first checked against the rest of the file.
class Reader {
 public:
  Reader(const File& file, int64_t size) : file_(file), size_(size) {}
  int64_t at() const { return at_; }
  int64_t left() const { return size_ - at_; }
  const std::string& path() const { return file_.path(); }

  template <class T> T number(const std::string& what) {
    require(int64_t(sizeof(T)), what);
    T n;
    take(&n, int64_t(sizeof n));
    return n;
  }
  std::string string(int64_t most, const std::string& what) {
    const auto n = number<uint64_t>(what);
    if (n > uint64_t(most))
      fail(ErrorCode::bad_data, path(), ": ", what, ": found a text of ", n, " bytes, expected at most ", most);
    require(int64_t(n), what);
    std::string s(size_t(n), '\0');
    take(s.data(), int64_t(n));
    return s;
  }
  void require(int64_t bytes, const std::string& what) const {
    if (bytes > left())
      fail(ErrorCode::bad_data, path(), ": ", what, ": found the file's end, expected ", bytes, " bytes from byte ",
           at_, " on: cut short, or damaged");
  }

 private:
  void take(void* to, int64_t bytes) {
    char* p = static_cast<char*>(to);
    while (bytes > 0) {
      if (at_ < begin_ || at_ >= begin_ + int64_t(buffer_.size())) {
        buffer_.resize(size_t(std::min<int64_t>(1 << 16, left())));
        begin_ = at_;
        file_.read_at(begin_, buffer_.data(), int64_t(buffer_.size()));
      }
      const int64_t n = std::min(bytes, begin_ + int64_t(buffer_.size()) - at_);
      std::memcpy(p, buffer_.data() + (at_ - begin_), size_t(n));
      p += n, at_ += n, bytes -= n;
    }
  }
  const File& file_;
  int64_t size_, at_ = 0, begin_ = 0;
  std::vector<char> buffer_;
};

int64_t read_integer(Reader& r, uint32_t kind, const std::string& what) {
  switch (kind) {
    case u8: return r.number<uint8_t>(what);
    case i8: return r.number<int8_t>(what);
    case u16: return r.number<uint16_t>(what);
    case i16: return r.number<int16_t>(what);
    case u32: return r.number<uint32_t>(what);
    case i32: return r.number<int32_t>(what);
    case i64: return r.number<int64_t>(what);
    default: break;
  }
  const auto n = r.number<uint64_t>(what);
  if (n > uint64_t(INT64_MAX))
    fail(ErrorCode::bad_data, r.path(), ": ", what, ": found ", n, ", expected at most ", INT64_MAX);
  return int64_t(n);
}
// The shortest decimal that rounds to the float: 1e-5 is read as 1e-5, not as the exact value of the nearest float.
double read_float(Reader& r, uint32_t kind, const std::string& what) {
  if (kind == f64) return r.number<double>(what);
  const auto narrow = r.number<float>(what);
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, narrow).ptr;
  double wide = double(narrow);
  if (std::isfinite(narrow)) std::from_chars(text, end, wide);
  return wide;
}
bool read_bool(Reader& r, const std::string& what) {
  const auto n = r.number<uint8_t>(what);
  if (n > 1) fail(ErrorCode::bad_data, r.path(), ": ", what, ": found ", int(n), ", expected 0 or 1 for a boolean");
  return n == 1;
}

template <class T, class Read> GgufValue read_list(int64_t count, Read&& read) {
  std::vector<T> values;  // grows as values are read, so that a false count cannot ask for memory
  for (int64_t i = 0; i < count; ++i) values.push_back(read());
  return values;
}

// `elements` is the number of further list elements that are allowed.
GgufValue read_value(Reader& r, const std::string& what, int64_t& elements) {
  uint32_t kind = r.number<uint32_t>(what);
  const bool is_list = kind == list;
  int64_t count = 0;
  if (is_list) {
    kind = r.number<uint32_t>(what);
    const auto n = r.number<uint64_t>(what);
    if (kind == list) fail(ErrorCode::unsupported, r.path(), ": ", what, ": found a list of lists");
    if (bytes_of(kind) > 0 && n > uint64_t(r.left() / bytes_of(kind)))
      fail(ErrorCode::bad_data, r.path(), ": ", what, ": found a list of ", n, " elements, expected at most ",
           r.left() / bytes_of(kind), ", what is left of the file: cut short, or damaged");
    if (n > uint64_t(elements))
      fail(ErrorCode::bad_data, r.path(), ": ", what, ": found a list of ", n, " elements, expected at most ",
           kMaxElements, " in all lists");
    count = int64_t(n);
    elements -= count;
  }
  switch (kind) {
    case f32:
    case f64:
      if (is_list) return read_list<double>(count, [&] { return read_float(r, kind, what); });
      return read_float(r, kind, what);
    case boolean:
      if (is_list) return read_list<bool>(count, [&] { return read_bool(r, what); });
      return read_bool(r, what);
    case text:
      if (is_list) return read_list<std::string>(count, [&] { return r.string(kMaxText, what); });
      return r.string(kMaxText, what);
    case u8:
    case i8:
    case u16:
    case i16:
    case u32:
    case i32:
    case u64:
    case i64:
      if (is_list) return read_list<int64_t>(count, [&] { return read_integer(r, kind, what); });
      return read_integer(r, kind, what);
    default: fail(ErrorCode::bad_data, r.path(), ": ", what, ": found type ", kind, ", expected 0 to 12");
  }
}

bool is_plain(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 127; });
}

// Reads the description of a tensor; its `begin` still counts from the first tensor.
SafetensorsEntry read_entry(Reader& r, int64_t i) {
  const std::string where = detail::concat("tensor ", i);
  SafetensorsEntry e;
  e.name = r.string(kMaxName, where);
  if (!is_plain(e.name))
    fail(ErrorCode::bad_data, r.path(), ": ", where, ": found a name that is empty or not plain text");
  const std::string what = "tensor \"" + e.name + "\"";
  const auto rank = r.number<uint32_t>(what);
  if (rank == 0 || rank > kMaxRank)
    fail(ErrorCode::bad_data, r.path(), ": ", what, ": found ", rank, " dimensions, expected 1 to ", kMaxRank);
  bool overflow = false;
  int64_t numbers = 1;
  for (uint32_t d = 0; d < rank; ++d) {
    const auto n = r.number<uint64_t>(what);
    if (n == 0 || n > uint64_t(INT64_MAX)) overflow = true;
    overflow |= __builtin_mul_overflow(numbers, int64_t(n), &numbers);
    e.shape.insert(e.shape.begin(), int64_t(n));
  }
  const auto number = r.number<uint32_t>(what);
  const Type* type =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Type& t) { return t.number == number; });
  if (type == std::end(kTypes))
    fail(ErrorCode::unsupported, r.path(), ": ", what, ": found type ", number, " of ggml, which is not known here");
  e.dtype = type->name;
  int64_t bytes = 0;
  if (!overflow && e.shape.back() % type->block.numbers != 0)
    fail(ErrorCode::bad_data, r.path(), ": ", what, ": found rows of ", e.shape.back(),
         " numbers, expected a multiple of ", type->block.numbers, " for ", e.dtype);
  overflow = overflow || __builtin_mul_overflow(numbers / type->block.numbers, type->block.bytes, &bytes);
  const auto offset = r.number<uint64_t>(what);
  if (overflow || bytes > r.left() || offset > uint64_t(r.left() - bytes))
    fail(ErrorCode::bad_data, r.path(), ": ", what, ": found shape ", shape_text(e.shape), " of ", e.dtype, " at ",
         offset, ", expected it within the file: cut short, or damaged");
  e.begin = int64_t(offset);
  e.end = e.begin + bytes;
  return e;
}

int64_t aligned(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

GgufBlock gguf_block(const std::string& dtype) {
  for (const Type& t : kTypes)
    if (dtype == t.name) return t.block;
  fail(ErrorCode::invalid_argument, "gguf_block: found ", dtype, ", expected a type of ggml");
}

bool GgufFile::is_one(const std::string& path) { return begins_with(path, {kMagic, 4}); }

std::string GgufFile::architecture_of(const std::string& path) {
  try {
    const File file = File::open(path);
    Reader r(file, file.size());
    constexpr int64_t kBeforeKeys = 4 + 4 + 8;  // magic, version, number of tensors
    for (int64_t i = 0; i < kBeforeKeys; ++i) r.number<uint8_t>("the first bytes");
    int64_t elements = kMaxElements;
    for (auto keys = r.number<uint64_t>("number of keys"); keys > 0; --keys) {
      const std::string key = r.string(kMaxKey, "key");
      const GgufValue value = read_value(r, "key", elements);
      const auto* text = std::get_if<std::string>(&value);
      if (key == "general.architecture") return text == nullptr ? "" : *text;
    }
  } catch (const Error&) {}
  return "";
}

GgufFile::GgufFile(const std::string& path) : file_(File::open(path)) {
  const int64_t size = file_.size();
  Reader r(file_, size);
  char magic[5] = {};
  for (int i = 0; i < 4 && r.left() > 0; ++i) magic[i] = r.number<char>("the first bytes");
  if (std::memcmp(magic, kMagic, 4) != 0)
    fail(ErrorCode::bad_data, path, ": found no GGUF at the beginning: this is not a GGUF file");
  if (const auto version = r.number<uint32_t>("version"); version != kVersion)
    fail(ErrorCode::unsupported, path, ": found ",
         version == uint32_t(kVersion) << 24 ? std::string("numbers with the high byte first")
                                             : detail::concat("version ", version),
         ", expected version ", kVersion, ", little-endian");
  const auto tensors = r.number<uint64_t>("number of tensors"), keys = r.number<uint64_t>("number of keys");
  if (tensors > uint64_t(kMaxTensors) || keys > uint64_t(kMaxKeys))
    fail(ErrorCode::bad_data, path, ": found ", tensors, " tensors and ", keys, " keys, expected at most ", kMaxTensors,
         " and ", kMaxKeys);
  int64_t elements = kMaxElements;
  for (uint64_t i = 0; i < keys; ++i) {
    const std::string key = r.string(kMaxKey, detail::concat("key ", i));
    if (!is_plain(key)) fail(ErrorCode::bad_data, path, ": key ", i, ": found a name that is empty or not plain text");
    const std::string what = "key \"" + key.substr(0, 200) + "\"";
    if (metadata_.count(key) != 0) fail(ErrorCode::bad_data, path, ": found ", what, " twice");
    metadata_.emplace(key, read_value(r, what, elements));
  }
  const int64_t align = integer("general.alignment").value_or(kDefaultAlign);
  if (align < 1 || align > kMaxAlign || !std::has_single_bit(uint64_t(align)))
    fail(ErrorCode::bad_data, path, ": general.alignment: found ", align, ", expected a power of two up to ",
         kMaxAlign);
  std::set<std::string> names;
  for (uint64_t i = 0; i < tensors; ++i) {
    entries_.push_back(read_entry(r, int64_t(i)));
    if (!names.insert(entries_.back().name).second)
      fail(ErrorCode::bad_data, path, ": found tensor \"", entries_.back().name, "\" twice");
  }
  std::sort(entries_.begin(), entries_.end(),
            [](const auto& a, const auto& b) { return std::tie(a.begin, a.name) < std::tie(b.begin, b.name); });
  const int64_t begin = aligned(r.at(), align);
  int64_t at = begin;
  for (SafetensorsEntry& e : entries_) {
    e.begin += begin, e.end += begin;
    if (e.begin != at)
      fail(ErrorCode::bad_data, path, ": tensor \"", e.name, "\" begins at byte ", e.begin, ", expected ", at,
           ", where the one before it ends");
    at = aligned(e.end, align);
  }
  const int64_t end = entries_.empty() ? std::min(begin, r.at()) : entries_.back().end;
  if (size < end || size > at)
    fail(ErrorCode::bad_data, path, ": found ", size, " bytes, expected ", at, ": cut short, or changed");
}

template <class T> const T* GgufFile::value(const std::string& key, const char* kind) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) return nullptr;
  const T* v = std::get_if<T>(&found->second);
  if (v == nullptr) fail(ErrorCode::bad_data, path(), ": ", key, ": found a value of another type, expected ", kind);
  return v;
}
std::optional<int64_t> GgufFile::integer(const std::string& key) const {
  const int64_t* v = value<int64_t>(key, "an integer");
  return v == nullptr ? std::nullopt : std::optional(*v);
}
std::optional<double> GgufFile::number(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found != metadata_.end() && std::holds_alternative<int64_t>(found->second)) return double(*integer(key));
  const double* v = value<double>(key, "a number");
  return v == nullptr ? std::nullopt : std::optional(*v);
}
std::optional<std::string> GgufFile::text(const std::string& key) const {
  const std::string* v = value<std::string>(key, "a text");
  return v == nullptr ? std::nullopt : std::optional(*v);
}
const std::vector<std::string>* GgufFile::texts(const std::string& key) const {
  return value<std::vector<std::string>>(key, "a list of texts");
}
const std::vector<int64_t>* GgufFile::integers(const std::string& key) const {
  return value<std::vector<int64_t>>(key, "a list of integers");
}

// --- several files -----------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kMaxFiles = 1000;

// The end of a part's name: "-00002-of-00005.gguf".
std::string part_ending(int64_t i, int64_t count) {
  char text[64];
  std::snprintf(text, sizeof text, "-%05lld-of-%05lld.gguf", static_cast<long long>(i + 1),
                static_cast<long long>(count));
  return text;
}

// Whether a name belongs to a part after the first.
bool is_later_part(const std::string& name) {
  const size_t ending = part_ending(0, 1).size();
  long long part = 1, parts = 1;
  return name.size() > ending &&
         std::sscanf(name.c_str() + name.size() - ending, "-%5lld-of-%5lld.gguf", &part, &parts) == 2 && part != 1;
}

}  // namespace

std::string gguf_in(const std::string& directory) {
  if (!is_directory(directory)) return "";
  std::vector<std::string> models, later;
  for (const std::string& name : list_directory(directory))
    if (name.ends_with(".gguf")) (is_later_part(name) ? later : models).push_back(join_path(directory, name));
  if (models.size() > 1)
    fail(ErrorCode::usage, directory, ": found ", models.size(),
         " GGUF models, expected one of them by its name, such as ", models[0]);
  if (models.empty()) models = later;  // opening a later part reports that the first is missing
  return models.empty() ? "" : models[0];
}

GgufSet::GgufSet(const std::string& path) {
  files_.push_back(std::make_unique<GgufFile>(path));
  const int64_t count = first().integer("split.count").value_or(0);
  if (count <= 1) return;
  if (count > kMaxFiles)
    fail(ErrorCode::bad_data, path, ": split.count: found ", count, ", expected at most ", kMaxFiles);
  const int64_t number = first().integer("split.no").value_or(-1);
  if (number != 0)
    fail(ErrorCode::usage, path, ": found part ", number + 1, " of ", count,
         ", expected the first, whose name ends in ", part_ending(0, count));
  open_rest(path, count);
}

void GgufSet::open_rest(const std::string& path, int64_t count) {
  const std::string ending = part_ending(0, count);
  if (!path.ends_with(ending))
    fail(ErrorCode::bad_data, path, ": found the first of ", count, " parts, expected a name that ends in ", ending);
  for (int64_t i = 1; i < count; ++i) {
    const std::string other = path.substr(0, path.size() - ending.size()) + part_ending(i, count);
    if (!exists(other))
      fail(ErrorCode::not_found, path, ": found no part ", i + 1, " of ", count, ", expected ", other);
    files_.push_back(std::make_unique<GgufFile>(other));
    const GgufFile& file = *files_.back();
    if (file.integer("split.no") != i || file.integer("split.count") != count)
      fail(ErrorCode::bad_data, other, ": found part ", file.integer("split.no").value_or(-1) + 1, " of ",
           file.integer("split.count").value_or(-1), ", expected ", i + 1, " of ", count);
  }
  std::set<std::string> names;
  for (const auto& file : files_)
    for (const SafetensorsEntry& e : file->entries())
      if (!names.insert(e.name).second)
        fail(ErrorCode::bad_data, file->path(), ": found tensor \"", e.name, "\", which is also in another part");
  const int64_t tensors = first().integer("split.tensors.count").value_or(int64_t(names.size()));
  if (tensors != int64_t(names.size()))
    fail(ErrorCode::bad_data, path, ": split.tensors.count: found ", tensors, ", expected ", names.size(),
         ", those of all parts");
}

}  // namespace ingot
