#include "ingot/io/formats/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <numeric>
#include <set>

#include "ingot/io/json.h"

namespace ingot {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are written as they lie in memory: little-endian");

constexpr int kMaxFileRank = 8;

struct FileType {
  const char* name;
  int bits;
  int core;  // a DType, or -1
};
constexpr FileType kTypes[] = {{"F64", 64, int(DType::f64)},
                               {"F32", 32, int(DType::f32)},
                               {"BF16", 16, int(DType::bf16)},
                               {"F16", 16, int(DType::f16)},
                               {"I64", 64, int(DType::i64)},
                               {"I32", 32, int(DType::i32)},
                               {"U32", 32, int(DType::u32)},
                               {"U16", 16, int(DType::u16)},
                               {"U8", 8, int(DType::u8)},
                               {"U64", 64, -1},
                               {"I16", 16, -1},
                               {"I8", 8, -1},
                               {"BOOL", 8, -1},
                               {"F8_E4M3", 8, -1},
                               {"F8_E5M2", 8, -1},
                               {"F8_E8M0", 8, -1},
                               {"F6_E2M3", 6, -1},
                               {"F6_E3M2", 6, -1},
                               {"F4", 4, -1}};

const FileType* find_type(const std::string& name) {
  for (const FileType& t : kTypes)
    if (name == t.name) return &t;
  return nullptr;
}
const char* file_name_of(DType t) {
  for (const FileType& type : kTypes)
    if (type.core == int(t)) return type.name;
  return "?";
}

// The bytes of a tensor of this shape. Throws where the number does not fit into 64 bits.
int64_t bytes_of(const SafetensorsEntry& e, int bits, const std::string& where) {
  int64_t total = bits;
  bool overflow = false, empty = false;
  for (const int64_t n : e.shape) {
    if (n == 0)
      empty = true;
    else
      overflow |= __builtin_mul_overflow(total, n, &total);
  }
  if (overflow)
    fail(ErrorCode::bad_data, where, ": shape ", shape_text(e.shape), " has more bits than 64 bits can count");
  if (empty) return 0;
  if (total % 8 != 0) fail(ErrorCode::bad_data, where, ": ", total, " bits, expected a whole number of bytes");
  return total / 8;
}

SafetensorsEntry parse_entry(const std::string& name, const Json& value, int64_t buffer_bytes,
                             const std::string& where) {
  SafetensorsEntry e;
  e.name = name;
  std::vector<int64_t> offsets;
  Fields fields(value, where);
  fields.require("dtype", e.dtype);
  fields.require("shape", e.shape);
  fields.require("data_offsets", offsets);
  fields.finish();
  const FileType* type = find_type(e.dtype);
  if (type == nullptr) fail(ErrorCode::bad_data, where, ": unknown dtype \"", e.dtype.substr(0, 20), "\"");
  if (e.shape.size() > size_t(kMaxFileRank))
    fail(ErrorCode::bad_data, where, ": found ", e.shape.size(), " dimensions, expected at most ", kMaxFileRank);
  for (const int64_t n : e.shape)
    if (n < 0)
      fail(ErrorCode::bad_data, where, ": found shape ", shape_text(e.shape), ", expected sizes of at least 0");
  if (offsets.size() != 2)
    fail(ErrorCode::bad_data, where, ": data_offsets: found ", offsets.size(), " numbers, expected 2");
  e.begin = offsets[0];
  e.end = offsets[1];
  if (e.begin < 0 || e.begin > e.end || e.end > buffer_bytes)
    fail(ErrorCode::bad_data, where, ": data_offsets [", e.begin, ", ", e.end, "] lie outside the buffer of ",
         buffer_bytes, " bytes");
  if (const int64_t needed = bytes_of(e, type->bits, where); needed != e.bytes())
    fail(ErrorCode::bad_data, where, ": found ", e.bytes(), " bytes, expected ", needed, " for ", e.dtype, " ",
         shape_text(e.shape));
  return e;
}

void check_tiling(const SafetensorsHeader& header, int64_t buffer_bytes, const std::string& where) {
  int64_t at = 0;
  for (const SafetensorsEntry& e : header.entries) {
    if (e.begin != at)
      fail(ErrorCode::bad_data, where, ": tensor \"", e.name, "\" begins at byte ", e.begin, ", expected ", at,
           e.begin > at ? " (a hole)" : " (an overlap)");
    at = e.end;
  }
  if (at != buffer_bytes)
    fail(ErrorCode::bad_data, where, ": the tensors end at byte ", at, ", but the buffer has ", buffer_bytes, " bytes");
}

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

DType SafetensorsEntry::core_dtype() const {
  const FileType* type = find_type(dtype);
  if (type == nullptr || type->core < 0)
    fail(ErrorCode::unsupported, "tensor \"", name, "\": found dtype ", dtype, ", expected one Ingot computes with");
  return DType(type->core);
}

Shape SafetensorsEntry::core_shape() const {
  if (shape.size() > size_t(kMaxRank))
    fail(ErrorCode::unsupported, "tensor \"", name, "\": found ", shape.size(), " dimensions, expected at most ",
         kMaxRank);
  Shape s;
  for (const int64_t n : shape) s.dim[s.rank++] = n;
  return s;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t buffer_bytes, const std::string& where) {
  if (json.empty() || json[0] != '{')
    fail(ErrorCode::bad_data, where, ": the header does not begin with '{': this is not a safetensors file");
  const size_t last = json.find_last_not_of(' ');
  if (json[last] != '}') fail(ErrorCode::bad_data, where, ": the header does not end with '}' and spaces");
  const Json root = parse_json(json.substr(0, last + 1), where, {.depth = 8, .bytes = kSafetensorsMaxHeader});
  SafetensorsHeader header;
  for (const auto& [name, value] : root.items()) {
    if (name != "__metadata__") {
      header.entries.push_back(
          parse_entry(name, value, buffer_bytes, where + ": tensor \"" + name.substr(0, 200) + "\""));
      continue;
    }
    if (!value.is_object())
      fail(ErrorCode::bad_data, where, ": __metadata__: found ", describe_json(value), ", expected an object");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string())
        fail(ErrorCode::bad_data, where, ": __metadata__: \"", key, "\": found ", describe_json(text),
             ", expected a string");
      header.metadata[key] = text.get<std::string>();
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end, a.name) <
           std::tie(b.begin, b.end, b.name);  // empty tensors come before the tensor at the same place
  });
  check_tiling(header, buffer_bytes, where);
  return header;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(File::open(path)) {
  const int64_t size = file_.size();
  if (size < 8) fail(ErrorCode::bad_data, path, ": found ", size, " bytes, expected a safetensors file of at least 8");
  uint64_t length;
  file_.read_at(0, &length, 8);
  if (length > uint64_t(kSafetensorsMaxHeader) || length > uint64_t(size - 8))
    fail(ErrorCode::bad_data, path, ": found a header of ", length, " bytes, expected at most ",
         std::min(kSafetensorsMaxHeader, size - 8), ": cut short, or not a safetensors file");
  std::string json(size_t(length), '\0');
  file_.read_at(8, json.data(), int64_t(length));
  header_ = parse_safetensors_header(json, size - 8 - int64_t(length), path);
  header_.data_begin = 8 + int64_t(length);
  for (size_t i = 0; i < header_.entries.size(); ++i) index_[header_.entries[i].name] = i;
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto at = index_.find(name);
  return at == index_.end() ? nullptr : &header_.entries[at->second];
}

void SafetensorsFile::read(const SafetensorsEntry& entry, void* into) const {
  file_.read_at(header_.data_begin + entry.begin, into, entry.bytes());
}

void SafetensorsFile::read(const std::string& name, const Tensor& into) const {
  INGOT_CHECK(into.contiguous() && into.device.kind == Device::cpu, "safetensors: \"", name,
              "\": expected a contiguous CPU tensor");
  const SafetensorsEntry* e = find(name);
  if (e == nullptr) fail(ErrorCode::bad_data, path(), ": tensor \"", name, "\" is missing");
  if (e->dtype != file_name_of(into.dtype))
    fail(ErrorCode::bad_data, path(), ": tensor \"", name, "\": found dtype ", e->dtype, ", expected ",
         file_name_of(into.dtype));
  const std::vector<int64_t> want(into.shape.dim, into.shape.dim + into.shape.rank);
  if (e->shape != want)
    fail(ErrorCode::bad_data, path(), ": tensor \"", name, "\": found shape ", shape_text(e->shape), ", expected ",
         shape_text(want));
  read(*e, into.data);
}

void SafetensorsFile::read_all(const std::vector<NamedTensor>& into) const {
  std::set<std::string> wanted;
  for (const NamedTensor& t : into) {
    wanted.insert(t.name);
    read(t.name, t.tensor);
  }
  for (const SafetensorsEntry& e : entries())
    if (wanted.count(e.name) == 0)
      fail(ErrorCode::bad_data, path(), ": found tensor \"", e.name, "\", which nothing here expects");
}

namespace {
// Calls put(bytes, count) with the whole file, in order.
void emit_safetensors(const std::vector<NamedTensor>& tensors, const std::map<std::string, std::string>& metadata,
                      const std::function<void(const void*, int64_t)>& put) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return size_of(tensors[a].tensor.dtype) > size_of(tensors[b].tensor.dtype);
  });
  std::string json = "{";
  if (!metadata.empty()) json += "\"__metadata__\":" + write_json(Json(metadata));
  int64_t at = 0;
  std::set<std::string> names;
  for (const size_t i : order) {
    const auto& [name, t] = tensors[i];
    INGOT_CHECK(t.contiguous() && t.device.kind == Device::cpu, "safetensors: \"", name,
                "\": expected a contiguous CPU tensor");
    INGOT_CHECK(name != "__metadata__" && names.insert(name).second, "safetensors: the name \"", name,
                "\" occurs twice or is reserved");
    const int64_t end = at + t.bytes();
    const OrderedJson entry = {{"dtype", file_name_of(t.dtype)},
                               {"shape", std::vector<int64_t>(t.shape.dim, t.shape.dim + t.shape.rank)},
                               {"data_offsets", {at, end}}};
    if (json.size() > 1) json += ',';
    json += detail::concat(write_json(Json(name)), ":", write_json(entry));
    at = end;
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');  // so that the tensors begin aligned
  INGOT_CHECK_LE(int64_t(json.size()), kSafetensorsMaxHeader, "safetensors: header");
  const uint64_t length = json.size();
  put(&length, 8);
  put(json.data(), int64_t(json.size()));
  for (const size_t i : order) put(tensors[i].tensor.data, tensors[i].tensor.bytes());
}
}  // namespace

std::string write_safetensors(File& file, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  Sha256 hash;
  emit_safetensors(tensors, metadata, [&](const void* bytes, int64_t n) {
    file.write(bytes, n);
    hash.update(bytes, n);
  });
  return hash.hex();
}

void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  AtomicFile file(path);
  emit_safetensors(tensors, metadata, [&](const void* bytes, int64_t n) { file.write(bytes, n); });
  file.commit();
}

}  // namespace ingot
