#include "ingot/io/formats/archive.h"

#include <sys/mman.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/progress.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

constexpr char kMagic[] = "INGOTARC";
constexpr int64_t kHead = 40, kSum = 64;  // bytes of the head; bytes of the sum at the end
constexpr int64_t kMaxIndex = 64 << 20;
constexpr int64_t kPiece = 8 << 20;  // bytes of one read ahead
const std::string kNoSum(size_t(kSum), '0');

int64_t aligned(int64_t n) { return (n + kArchiveAlign - 1) / kArchiveAlign * kArchiveAlign; }

template <class T> T number_at(std::string_view bytes, size_t at) {
  T n;
  std::memcpy(&n, bytes.data() + at, sizeof n);
  return n;
}

// Reads the pages of the mapping that hold [begin, end) into memory. Returns an error where the file has become
// shorter, where an access to the mapping would raise a signal.
bool read_pages(char* begin, char* end) {
#ifdef MADV_POPULATE_READ
  constexpr int kPopulate = MADV_POPULATE_READ;
#else
  constexpr int kPopulate = 22;
#endif
  while (::madvise(begin, size_t(end - begin), kPopulate) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EFAULT || errno == EIO || errno == EHWPOISON) return false;
    for (volatile const char* p = begin; p < end; p += kArchiveAlign) (void)*p;  // a kernel before 5.14
    return true;
  }
  return true;
}

}  // namespace

// --- reading -----------------------------------------------------------------------------------------------------

bool ArchiveFile::is_one(const std::string& path) { return begins_with(path, {kMagic, 8}); }

ArchiveFile::ArchiveFile(const std::string& path) : path_(path), file_(path) {
  const std::string_view all = file_.bytes();
  const int64_t size = int64_t(all.size());
  if (size < kHead || all.substr(0, 8) != kMagic)
    fail(ErrorCode::bad_data, path, ": found no INGOTARC at the beginning: this is not an .ingot archive");
  if (const auto version = number_at<uint32_t>(all, 8); version != uint32_t(kArchiveVersion))
    fail(ErrorCode::unsupported, path, ": found version ", version, ", expected ", kArchiveVersion);
  if (const auto zero = number_at<uint32_t>(all, 12); zero != 0)
    fail(ErrorCode::bad_data, path, ": byte 12: found ", zero, ", expected 0");
  const auto whole = number_at<uint64_t>(all, 16);
  if (whole != uint64_t(size))
    fail(ErrorCode::bad_data, path, ": found ", size, " bytes, expected ", whole, ": cut short, or changed");
  const auto offset = number_at<uint64_t>(all, 24), bytes = number_at<uint64_t>(all, 32);
  if (bytes > uint64_t(kMaxIndex) || size < kArchiveAlign + kSum || bytes > uint64_t(size - kArchiveAlign - kSum) ||
      offset != uint64_t(size - kSum) - bytes || offset % uint64_t(kArchiveAlign) != 0)
    fail(ErrorCode::bad_data, path, ": found an index of ", bytes, " bytes at ", offset, ", expected it before byte ",
         size - kSum, ", on a multiple of ", kArchiveAlign);
  Sha256 sum;
  sum.update(all.substr(0, size_t(kHead)));
  sum.update(all.substr(size_t(offset), size_t(bytes)));
  if (const std::string found = sum.hex(); found != all.substr(size_t(size - kSum)))
    fail(ErrorCode::bad_data, path, ": the index does not match its sum ", found.substr(0, 12),
         "...: the file is damaged");
  read_index();
}

void ArchiveFile::read_index() {
  const std::string_view all = file_.bytes();
  const auto offset = int64_t(number_at<uint64_t>(all, 24)), bytes = int64_t(number_at<uint64_t>(all, 32));
  const std::string where = path_ + ": index";
  const Json root = parse_json(all.substr(size_t(offset), size_t(bytes)), where, {.bytes = kMaxIndex});
  Fields fields(root, where);
  fields.require("kind", kind_);
  const Json* about = fields.take("about");
  about_ = about == nullptr ? "{}" : write_json(*about);
  const Json* blobs = fields.take("blobs");
  if (blobs == nullptr || !blobs->is_array()) fields.wrong("blobs", "a list");
  fields.finish();
  int64_t at = kArchiveAlign;
  for (const Json& blob : *blobs) {
    ArchiveEntry e;
    Fields f(blob, detail::concat(where, ": blob ", entries_.size()));
    f.require("name", e.name);
    f.require("format", e.format);
    f.require("layout", e.layout);
    f.require("shape", e.shape);
    f.require("offset", e.offset);
    f.require("bytes", e.bytes);
    f.require("sha256", e.sha256);
    f.finish();
    if (e.offset != at || e.bytes < 0 || e.bytes > offset - at)
      fail(ErrorCode::bad_data, f.where(), ": found ", e.bytes, " bytes at ", e.offset, ", expected them at ", at,
           " and before the index at ", offset);
    if (e.shape.size() > 8 || std::any_of(e.shape.begin(), e.shape.end(), [](int64_t n) { return n < 0; }))
      fail(ErrorCode::bad_data, f.where(), ": found a shape of ", e.shape.size(),
           " sizes, expected at most 8, none below 0");
    if (e.name.empty() || !index_.emplace(e.name, entries_.size()).second)
      fail(ErrorCode::bad_data, f.where(), ": found the name \"", e.name.substr(0, 200), "\", which is ",
           e.name.empty() ? "empty" : "there twice");
    at = aligned(at + e.bytes);
    entries_.push_back(std::move(e));
  }
  if (at != offset)
    fail(ErrorCode::bad_data, where, ": found the last blob's end at ", at, ", expected ", offset,
         ", where the index begins");
}

const ArchiveEntry* ArchiveFile::find(const std::string& name) const {
  const auto at = index_.find(name);
  return at == index_.end() ? nullptr : &entries_[at->second];
}

void ArchiveFile::prefetch(const std::vector<const ArchiveEntry*>& wanted) const {
  struct Range {
    int64_t begin, end;
  };
  std::vector<const ArchiveEntry*> in_order = wanted;
  std::sort(in_order.begin(), in_order.end(), [](const auto* a, const auto* b) { return a->offset < b->offset; });
  std::vector<Range> ranges;  // adjacent ranges are joined, then cut into pieces
  for (const ArchiveEntry* e : in_order) {
    const int64_t end = std::min(aligned(e->offset + e->bytes), file_bytes());
    if (!ranges.empty() && ranges.back().end >= e->offset)
      ranges.back().end = std::max(ranges.back().end, end);
    else
      ranges.push_back({e->offset, end});
  }
  std::vector<Range> pieces;
  for (const Range& r : ranges)
    for (int64_t at = r.begin; at < r.end; at += kPiece) pieces.push_back({at, std::min(r.end, at + kPiece)});
  char* base = const_cast<char*>(file_.bytes().data());
  std::atomic<bool> lost = false;
  parallel_tasks(int64_t(pieces.size()), [&](int64_t i) {
    const Range& r = pieces[size_t(i)];
    // The operating system reads the next pieces ahead during the wait for this piece, which keeps the disk busy.
    const size_t ahead = std::min(pieces.size() - 1, size_t(i + 2 * thread_count()));
    const Range& next = pieces[ahead];
    ::madvise(base + next.begin, size_t(next.end - next.begin), MADV_WILLNEED);
    if (!read_pages(base + r.begin, base + r.end)) lost = true;
  });
  if (lost) fail(ErrorCode::io, path_, ": cannot read: the file has become shorter, or its disk failed");
}

void ArchiveFile::verify(const std::function<void(int64_t)>& done) const {
  for (const ArchiveEntry& e : entries_) {
    prefetch({&e});
    Sha256 sum;
    for (int64_t at = 0; at < e.bytes; at += kPiece) {
      const int64_t n = std::min(kPiece, e.bytes - at);
      sum.update(data(e) + at, n);
      if (done) done(n);
    }
    compare(e, sum.hex());
  }
}

void ArchiveFile::compare(const ArchiveEntry& e, const std::string& found) const {
  if (found != e.sha256)
    fail(ErrorCode::bad_data, path_, ": blob \"", e.name, "\": found the sum ", found.substr(0, 12), "..., expected ",
         e.sha256.substr(0, 12), "...: the file is damaged");
}

// --- writing -----------------------------------------------------------------------------------------------------

namespace {
void require_space(const std::string& path, int64_t bytes) {
  struct statvfs s;
  if (::statvfs(parent_path(path).c_str(), &s) != 0) return;  // creating the file will report the error
  const int64_t available = int64_t(s.f_bavail) * int64_t(s.f_frsize);
  if (bytes > available)
    fail(ErrorCode::io, path, " needs ", format_bytes(double(bytes)), " of disk space, found ",
         format_bytes(double(available)), " available");
}
}  // namespace

ArchiveWriter::ArchiveWriter(const std::string& path, std::string kind, std::string about,
                             std::vector<ArchiveEntry> entries)
    : path_(path), kind_(std::move(kind)), about_(std::move(about)), entries_(std::move(entries)), file_(path) {
  int64_t at = kArchiveAlign;
  for (ArchiveEntry& e : entries_) {
    INGOT_CHECK(e.bytes >= 0, "archive: \"", e.name, "\": found ", e.bytes, " bytes, expected at least 0");
    e.offset = at;
    e.sha256 = kNoSum;
    at = aligned(at + e.bytes);
  }
  index_offset_ = at;
  // the placeholders of the sums have the same length as the sums
  const int64_t index_bytes = int64_t(index_text().size());
  file_bytes_ = index_offset_ + index_bytes + kSum;
  require_space(path, file_bytes_);
  const uint32_t version[2] = {uint32_t(kArchiveVersion), 0};
  const uint64_t sizes[3] = {uint64_t(file_bytes_), uint64_t(index_offset_), uint64_t(index_bytes)};
  head_ = kMagic;
  head_.append(reinterpret_cast<const char*>(version), sizeof version);
  head_.append(reinterpret_cast<const char*>(sizes), sizeof sizes);
  file_.write(head_);
  at_ = kHead;
  pad_to(kArchiveAlign);
  finish_entry();
}

std::string ArchiveWriter::index_text() const {
  OrderedJson blobs = OrderedJson::array();
  for (const ArchiveEntry& e : entries_)
    blobs.push_back({{"name", e.name},
                     {"format", e.format},
                     {"layout", e.layout},
                     {"shape", e.shape},
                     {"offset", e.offset},
                     {"bytes", e.bytes},
                     {"sha256", e.sha256}});
  return write_json(OrderedJson{{"kind", kind_}, {"about", OrderedJson::parse(about_)}, {"blobs", blobs}});
}

void ArchiveWriter::pad_to(int64_t offset) {
  static const char zeros[kArchiveAlign] = {};
  file_.write(zeros, offset - at_);
  at_ = offset;
}

// Advances beyond the entry that was just completed, and beyond empty entries that follow.
void ArchiveWriter::finish_entry() {
  while (next_ < entries_.size() && in_ == entries_[next_].bytes) {
    entries_[next_].sha256 = sum_.hex();
    sum_ = Sha256();
    in_ = 0;
    pad_to(next_ + 1 < entries_.size() ? entries_[next_ + 1].offset : index_offset_);
    ++next_;
  }
}

void ArchiveWriter::write(const void* from, int64_t bytes) {
  const char* p = static_cast<const char*>(from);
  while (bytes > 0) {
    INGOT_CHECK(next_ < entries_.size(), "archive: found ", bytes, " bytes after the last blob, expected none");
    const int64_t n = std::min(bytes, entries_[next_].bytes - in_);
    file_.write(p, n);
    sum_.update(p, n);
    p += n, bytes -= n, in_ += n, at_ += n;
    finish_entry();
  }
}

void ArchiveWriter::commit() {
  INGOT_CHECK(next_ == entries_.size(), "archive: found blob \"", entries_[next_].name, "\" incomplete with ", in_,
              " bytes, expected ", entries_[next_].bytes);
  const std::string index = index_text();
  Sha256 sum;
  sum.update(head_);
  sum.update(index);
  file_.write(index);
  file_.write(sum.hex());
  file_.commit();
}

}  // namespace ingot
