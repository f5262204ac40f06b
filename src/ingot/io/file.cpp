#include "ingot/io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "ingot/io/removed_on_signal.h"

namespace ingot {
namespace {

[[noreturn]] void fail_errno(const std::string& path, const char* what, int error) {
  const ErrorCode code = error == ENOENT || error == ENOTDIR ? ErrorCode::not_found : ErrorCode::io;
  fail(code, path, ": ", what, ": ", std::strerror(error));
}

template <class Call> auto retry(Call&& call) {
  decltype(call()) result;
  do result = call();
  while (result < 0 && errno == EINTR);
  return result;
}

int open_or_throw(const std::string& path, int flags, const char* what) {
  if (path.find('\0') != std::string::npos) fail(ErrorCode::invalid_argument, "a path contains a NUL byte");
  const int descriptor = retry([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); });
  if (descriptor < 0) fail_errno(path, what, errno);
  return descriptor;
}

struct stat stat_of(int descriptor, const std::string& path) {
  struct stat s;
  if (::fstat(descriptor, &s) != 0) fail_errno(path, "cannot stat", errno);
  return s;
}

// Whether the path still names the file behind the descriptor.
bool names(const std::string& path, int descriptor) {
  struct stat there;
  const struct stat here = stat_of(descriptor, path);
  return ::stat(path.c_str(), &there) == 0 && there.st_dev == here.st_dev && there.st_ino == here.st_ino;
}

// The file to be replaced by a rename to `path`: the file behind a link, not the link, and never a device, a pipe or a
// directory.
std::string destination(const std::string& path) {
  struct stat s;
  if (::stat(path.c_str(), &s) != 0) return path;
  if (!S_ISREG(s.st_mode))
    fail(ErrorCode::io, path, ": found a ", S_ISDIR(s.st_mode) ? "directory" : "special file",
         ", expected a regular file or a new name");
  if (::lstat(path.c_str(), &s) != 0 || !S_ISLNK(s.st_mode)) return path;
  const std::unique_ptr<char, decltype(&::free)> target(::realpath(path.c_str(), nullptr), &::free);
  if (!target) fail_errno(path, "cannot follow the link", errno);
  return target.get();
}

}  // namespace

File File::open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO without a writer must not hang. The flag has no effect on regular files.
  File file(path, open_or_throw(path, O_RDONLY | O_NONBLOCK, "cannot open"));
  const struct stat s = stat_of(file.descriptor_, path);
  if (!S_ISREG(s.st_mode))
    fail(ErrorCode::io, path, ": found a ", S_ISDIR(s.st_mode) ? "directory" : "special file",
         ", expected a regular file");
  return file;
}

File File::create(const std::string& path) {
  return File(path, open_or_throw(path, O_WRONLY | O_CREAT | O_TRUNC, "cannot create"));
}

File File::append(const std::string& path) {
  return File(path, open_or_throw(path, O_WRONLY | O_CREAT | O_APPEND, "cannot open to append"));
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), written_(other.written_) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(written_, other.written_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int64_t File::size() const { return int64_t(stat_of(descriptor_, path_).st_size); }

void File::read_at(int64_t offset, void* into, int64_t bytes) const {
  char* p = static_cast<char*>(into);
  for (int64_t done = 0; done < bytes;) {
    const ssize_t n = retry([&] { return ::pread(descriptor_, p + done, size_t(bytes - done), off_t(offset + done)); });
    if (n < 0) fail_errno(path_, "cannot read", errno);
    if (n == 0) fail(ErrorCode::bad_data, path_, ": found ", size(), " bytes, expected at least ", offset + bytes);
    done += n;
  }
}

void File::write(const void* from, int64_t bytes) {
  const char* p = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t n = retry([&] { return ::write(descriptor_, p, size_t(bytes)); });
    if (n <= 0)  // zero bytes and no error would loop for ever
      fail(ErrorCode::io, path_, ": cannot write at byte ", written_, ": ",
           n < 0 ? std::strerror(errno) : "nothing written");
    p += n;
    bytes -= n;
    written_ += n;
  }
}

void File::shorten(int64_t bytes) {
  if (retry([&] { return ::ftruncate(descriptor_, bytes); }) != 0) fail_errno(path_, "cannot shorten", errno);
}
void File::sync() {
  // Never retried after EIO: the kernel may have dropped the pages and would report success.
  if (retry([&] { return ::fsync(descriptor_); }) != 0) fail_errno(path_, "cannot sync", errno);
}

void File::close() {
  if (descriptor_ < 0) return;
  // After EINTR the descriptor is closed on Linux; a second close could hit another thread's file.
  if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) fail_errno(path_, "cannot close", errno);
}

// --- files begun and not committed: a fixed list, readable by a signal handler at any moment
namespace {
constexpr int kFree = -1, kTaken = -2;  // taken: the slot's path is not there yet
constexpr int kAnyFile = -3;            // the path is this process's own, so that any file there is removed
struct Unfinished {
  std::atomic<int> descriptor{kFree};
  std::atomic<const char*> path{nullptr};
};
std::array<Unfinished, 64> unfinished;

int note_unfinished(const std::string& path, int descriptor) {
  for (size_t i = 0; i < unfinished.size(); ++i) {
    int free = kFree;
    if (!unfinished[i].descriptor.compare_exchange_strong(free, kTaken)) continue;
    unfinished[i].path = path.c_str();
    unfinished[i].descriptor = descriptor;
    return int(i);
  }
  return -1;  // the list is full: this file stays behind after a signal
}
void forget_unfinished(int& slot) {
  if (slot >= 0) unfinished[size_t(slot)].descriptor = kFree;
  slot = -1;
}
}  // namespace

void remove_unfinished_files() {
  for (const Unfinished& u : unfinished) {
    const int descriptor = u.descriptor;
    struct stat here, there;
    if (descriptor == kAnyFile) ::unlink(u.path);
    // After a rename the name may already be another process's.
    if (descriptor >= 0 && ::fstat(descriptor, &here) == 0 && ::lstat(u.path, &there) == 0 &&
        here.st_dev == there.st_dev && here.st_ino == there.st_ino)
      ::unlink(u.path);
  }
}

RemovedOnSignal::RemovedOnSignal(std::string path) : path_(std::move(path)), slot_(note_unfinished(path_, kAnyFile)) {}
RemovedOnSignal::~RemovedOnSignal() { forget_unfinished(slot_); }

AtomicFile::AtomicFile(const std::string& path) : path_(destination(path)) {
  const std::string partial = path_ + ".partial";
  for (;;) {
    // A different user's link of this name, in a directory writable for all, must not redirect the file.
    // Without the directory the message names the file that the caller wants, not its temporary name.
    if (const std::string parent = parent_path(path_); !is_directory(parent))
      fail(ErrorCode::not_found, path, ": found no directory ", parent, ", expected one to write to");
    File file(partial, open_or_throw(partial, O_WRONLY | O_CREAT | O_NOFOLLOW, "cannot create"));
    if (retry([&] { return ::flock(file.descriptor_, LOCK_EX | LOCK_NB); }) != 0) {
      if (errno == EWOULDBLOCK) fail(ErrorCode::busy, path, ": another process is writing this file");
      fail_errno(partial, "cannot lock", errno);
    }
    if (!names(partial, file.descriptor_)) continue;  // its previous writer finished between open and flock
    if (::ftruncate(file.descriptor_, 0) != 0) fail_errno(partial, "cannot truncate", errno);
    file_ = std::move(file);
    slot_ = note_unfinished(file_.path_, file_.descriptor_);
    return;
  }
}

AtomicFile::~AtomicFile() {
  forget_unfinished(slot_);
  if (file_) ::unlink(file_.path_.c_str());
}

void AtomicFile::commit() {
  file_.sync();
  // A write with a wrong count shows in the size, while the file still has a temporary name.
  if (file_.size() != file_.written_)
    fail(ErrorCode::io, file_.path_, ": found ", file_.size(), " bytes, expected the ", file_.written_,
         " whose writing was reported done");
  rename_path(file_.path_, path_);
  sync_directory(parent_path(path_));
  if (!names(path_, file_.descriptor_))
    fail(ErrorCode::io, path_, ": the rename was reported done, but the file is not there");
  forget_unfinished(slot_);
  file_.close();
}

Lock::Lock(const std::string& directory) {
  const std::string path = join_path(directory, ".lock");
  File file = File::append(path);
  if (retry([&] { return ::flock(file.descriptor(), LOCK_EX | LOCK_NB); }) != 0) {
    if (errno != EWOULDBLOCK) fail_errno(path, "cannot lock", errno);
    std::string holder;
    try {
      holder = read_file(path, 64);
    } catch (const Error&) {}  // the holder's number is a courtesy
    while (!holder.empty() && (holder.back() < '0' || holder.back() > '9')) holder.pop_back();
    fail(ErrorCode::busy, directory, ": in use by process ", holder.empty() ? "(unknown)" : holder,
         ", expected no other process in this directory");
  }
  // Only informative, so a full disk is no reason to refuse.
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(file.descriptor(), 0) == 0) [[maybe_unused]]
    const ssize_t n = ::write(file.descriptor(), pid.data(), pid.size());
  file_ = std::move(file);
}

MappedFile::MappedFile(const std::string& path) {
  const File file = File::open(path);
  size_ = file.size();
  if (size_ == 0) return;
  memory_ = ::mmap(nullptr, size_t(size_), PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (memory_ == MAP_FAILED) {
    memory_ = nullptr;
    fail_errno(path, "cannot map", errno);
  }
}
MappedFile::MappedFile(MappedFile&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)), size_(std::exchange(other.size_, 0)) {}
MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(size_, other.size_);
  return *this;
}
MappedFile::~MappedFile() {
  if (memory_ != nullptr) ::munmap(memory_, size_t(size_));
}

std::string read_file(const std::string& path, int64_t max_bytes) {
  const File file = File::open(path);
  const int64_t size = file.size();
  if (size > max_bytes) fail(ErrorCode::bad_data, path, ": found ", size, " bytes, expected at most ", max_bytes);
  std::string bytes(size_t(size), '\0');
  file.read_at(0, bytes.data(), size);
  return bytes;
}

std::string read_standard_input(int64_t max_bytes) {
  std::string bytes;
  for (;;) {
    const size_t size = bytes.size(), step = std::max<size_t>(1 << 16, size);
    if (int64_t(size) > max_bytes)
      fail(ErrorCode::bad_data, "standard input: found more than ", max_bytes, " bytes, expected at most that many");
    bytes.resize(size + step);
    const ssize_t n = ::read(STDIN_FILENO, bytes.data() + size, step);
    bytes.resize(size + size_t(std::max<ssize_t>(n, 0)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("standard input", "cannot read", errno);
    if (n == 0) return bytes;
  }
}

void write_file(const std::string& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit();
}

int64_t file_size(const std::string& path) {
  struct stat s;
  if (::stat(path.c_str(), &s) != 0) fail_errno(path, "cannot stat", errno);
  return int64_t(s.st_size);
}

bool exists(const std::string& path) {
  struct stat s;
  return ::stat(path.c_str(), &s) == 0;
}

bool is_directory(const std::string& path) {
  struct stat s;
  return ::stat(path.c_str(), &s) == 0 && S_ISDIR(s.st_mode);
}

bool begins_with(const std::string& path, std::string_view bytes) {
  if (!exists(path) || is_directory(path)) return false;
  const File file = File::open(path);
  if (file.size() < int64_t(bytes.size())) return false;
  std::string head(bytes.size(), '\0');
  file.read_at(0, head.data(), int64_t(head.size()));
  return head == bytes;
}
void create_directories(const std::string& path) {
  if (path.empty() || is_directory(path)) return;
  if (const std::string parent = parent_path(path); parent != path) create_directories(parent);
  if (::mkdir(path.c_str(), 0777) != 0 && !(errno == EEXIST && is_directory(path)))
    fail_errno(path, "cannot create the directory", errno);
  // The new name must survive a power cut like the files inside the directory.
  sync_directory(parent_path(path));
}

void rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_errno(to, ("cannot rename from " + base_name(from)).c_str(), errno);
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail_errno(path, "cannot remove", errno);
}

void remove_tree(const std::string& path) {
  struct stat s;
  if (::lstat(path.c_str(), &s) != 0) {
    if (errno == ENOENT) return;
    fail_errno(path, "cannot stat", errno);
  }
  if (!S_ISDIR(s.st_mode)) return remove_file(path);
  for (const std::string& name : list_directory(path)) remove_tree(join_path(path, name));
  if (::rmdir(path.c_str()) != 0 && errno != ENOENT) fail_errno(path, "cannot remove", errno);
}

void sync_directory(const std::string& path) {
  const int descriptor = open_or_throw(path, O_RDONLY | O_DIRECTORY, "cannot open the directory");
  const int error = retry([&] { return ::fsync(descriptor); }) != 0 ? errno : 0;
  ::close(descriptor);
  // Some file systems (and FUSE) cannot sync a directory and say so.
  if (error != 0 && error != EINVAL && error != ENOTSUP) fail_errno(path, "cannot sync the directory", error);
}

std::vector<std::string> list_directory(const std::string& path) {
  DIR* directory = ::opendir(path.c_str());
  if (directory == nullptr) fail_errno(path, "cannot open the directory", errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(directory)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  const int error = errno;
  ::closedir(directory);
  if (error != 0) fail_errno(path, "cannot list the directory", error);
  std::sort(names.begin(), names.end());
  return names;
}

namespace {
void collect_files(const std::string& directory, std::vector<std::string>& found) {
  for (const std::string& name : list_directory(directory)) {
    if (name[0] == '.') continue;
    const std::string path = join_path(directory, name);
    struct stat self, target;
    if (::lstat(path.c_str(), &self) != 0 || ::stat(path.c_str(), &target) != 0) continue;  // gone, or a dangling link
    if (S_ISDIR(self.st_mode))
      collect_files(path, found);
    else if (S_ISREG(target.st_mode))
      found.push_back(path);
  }
}
}  // namespace

std::vector<std::string> list_files(const std::string& path) {
  std::vector<std::string> found;
  collect_files(path, found);
  std::sort(found.begin(), found.end());
  return found;
}

std::string join_path(const std::string& directory, const std::string& name) {
  if (directory.empty()) return name;
  return directory.back() == '/' ? directory + name : directory + "/" + name;
}

std::string parent_path(const std::string& path) {
  size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path.empty() ? "." : "/";
  const size_t slash = path.rfind('/', end);
  if (slash == std::string::npos) return ".";
  end = path.find_last_not_of('/', slash);
  return end == std::string::npos ? "/" : path.substr(0, end + 1);
}

std::string base_name(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path;
  const size_t slash = path.rfind('/', end);
  return path.substr(slash == std::string::npos ? 0 : slash + 1,
                     end - (slash == std::string::npos ? 0 : slash + 1) + 1);
}

}  // namespace ingot
