#include "ingot/io/formats/iris.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

namespace ingot {
namespace {

constexpr char kMagic[] = "IRISMDL1";
constexpr int64_t kName = 128, kRecord = kName + 8 + 8 + 4 + 4 + 64, kFirst = 16, kMaxTensors = 1 << 20;
constexpr int64_t kHeaderAlign = 4096, kBlobAlign = 256;
constexpr int kSizes = 8;
struct Type {
  const char* name;
  int64_t bytes;
};
constexpr Type kTypes[] = {{"BF16", 2}, {"F32", 4}, {"U8", 1}, {"I32", 4}};

template <class T> T number_at(const char* p) {
  T n;
  std::memcpy(&n, p, sizeof n);
  return n;
}

SafetensorsEntry entry_at(const char* p, int64_t file_bytes, const std::string& where) {
  SafetensorsEntry e;
  const char* end = static_cast<const char*>(std::memchr(p, 0, size_t(kName)));
  e.name.assign(p, end == nullptr ? size_t(kName) : size_t(end - p));
  const bool plain = std::all_of(e.name.begin(), e.name.end(), [](char c) { return c > ' ' && c < 127; });
  if (e.name.empty() || !plain) fail(ErrorCode::bad_data, where, ": found a name that is empty or not plain text");
  const auto offset = number_at<uint64_t>(p + kName), bytes = number_at<uint64_t>(p + kName + 8);
  const auto type = number_at<uint32_t>(p + kName + 16), rank = number_at<uint32_t>(p + kName + 20);
  if (type >= std::size(kTypes)) fail(ErrorCode::bad_data, where, ": found type ", type, ", expected 0 to 3");
  if (rank > uint32_t(kSizes))
    fail(ErrorCode::bad_data, where, ": found ", rank, " dimensions, expected at most ", kSizes);
  e.dtype = kTypes[type].name;
  int64_t total = kTypes[type].bytes;
  bool overflow = false;
  for (uint32_t i = 0; i < uint32_t(kSizes); ++i) {
    const auto n = number_at<uint64_t>(p + kName + 24 + 8 * i);
    if (i >= rank) {
      if (n != 0) fail(ErrorCode::bad_data, where, ": found size ", n, " in unused dimension ", i, ", expected 0");
      continue;
    }
    if (n == 0 || n > uint64_t(INT64_MAX)) overflow = true;
    overflow |= __builtin_mul_overflow(total, int64_t(n), &total);
    e.shape.push_back(int64_t(n));
  }
  if (overflow || uint64_t(total) != bytes)
    fail(ErrorCode::bad_data, where, ": found ", bytes, " bytes, expected what type and shape make");
  if (offset % uint64_t(kBlobAlign) != 0 || offset > uint64_t(file_bytes) || bytes > uint64_t(file_bytes) - offset)
    fail(ErrorCode::bad_data, where, ": found ", bytes, " bytes at ", offset, ", expected them within ", file_bytes,
         " and on a multiple of ", kBlobAlign);
  e.begin = int64_t(offset);
  e.end = e.begin + int64_t(bytes);
  return e;
}

}  // namespace

bool IrisFile::is_one(const std::string& path) { return begins_with(path, {kMagic, 8}); }

IrisFile::IrisFile(const std::string& path) : file_(File::open(path)) {
  const int64_t size = file_.size();
  char head[kFirst] = {};
  if (size >= kFirst) file_.read_at(0, head, kFirst);
  if (std::memcmp(head, kMagic, 8) != 0)
    fail(ErrorCode::bad_data, path, ": found no IRISMDL1 at the beginning: this is not an .iris archive");
  if (const auto version = number_at<uint32_t>(head + 8); version != 1)
    fail(ErrorCode::unsupported, path, ": found version ", version, ", expected 1");
  const int64_t count = number_at<uint32_t>(head + 12);
  const int64_t header = (kFirst + count * kRecord + kHeaderAlign - 1) / kHeaderAlign * kHeaderAlign;
  if (count > kMaxTensors || header > size)
    fail(ErrorCode::bad_data, path, ": found ", count, " tensors in ", size, " bytes: cut short, or damaged");
  std::string table(size_t(count * kRecord), '\0');
  file_.read_at(kFirst, table.data(), int64_t(table.size()));
  std::set<std::string> names;
  for (int64_t i = 0; i < count; ++i) {
    entries_.push_back(entry_at(table.data() + i * kRecord, size, detail::concat(path, ": tensor ", i)));
    if (!names.insert(entries_.back().name).second)
      fail(ErrorCode::bad_data, path, ": found tensor \"", entries_.back().name, "\" twice");
  }
  std::sort(entries_.begin(), entries_.end(),
            [](const auto& a, const auto& b) { return std::tie(a.begin, a.name) < std::tie(b.begin, b.name); });
  int64_t at = header;
  for (const SafetensorsEntry& e : entries_) {
    if (e.begin < at)
      fail(ErrorCode::bad_data, path, ": tensor \"", e.name, "\" begins at byte ", e.begin, ", expected at least ", at,
           " (an overlap)");
    at = e.end;
  }
  if (at != size)
    fail(ErrorCode::bad_data, path, ": the tensors end at byte ", at, ", but the file has ", size, " bytes");
}

}  // namespace ingot
