#include "ingot/gpu/nccl.h"

#include <dlfcn.h>
#include <glob.h>

#include <cstdlib>
#include <vector>

#ifdef INGOT_CUDA_BUILD
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <thread>

#include "ingot/core/clock.h"
#include "ingot/core/log.h"
#include "ingot/gpu/device.h"
#endif

namespace ingot::gpu {
namespace {

// --- the part of the library's interface in use here, the same since version 2.10
using Comm = struct NcclComm*;
struct UniqueId {
  char bytes[128];
};
enum : int { kSuccess = 0, kInProgress = 7 };
enum : int { kFloat32 = 7, kFloat64 = 8, kSum = 0 };
using CudaStream = void*;

struct Library {
  int (*version)(int*) = nullptr;
  int (*unique_id)(UniqueId*) = nullptr;
  int (*init_rank)(Comm*, int, UniqueId, int) = nullptr;
  int (*destroy)(Comm) = nullptr;
  int (*abort)(Comm) = nullptr;
  int (*async_error)(Comm, int*) = nullptr;
  const char* (*error_text)(int) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*all_reduce)(const void*, void*, size_t, int, int, Comm, CudaStream) = nullptr;
  int (*reduce_scatter)(const void*, void*, size_t, int, int, Comm, CudaStream) = nullptr;
  int (*all_gather)(const void*, void*, size_t, int, Comm, CudaStream) = nullptr;
  int (*reduce)(const void*, void*, size_t, int, int, int, Comm, CudaStream) = nullptr;
  int (*broadcast)(const void*, void*, size_t, int, int, Comm, CudaStream) = nullptr;
  std::string problem;  // empty where everything was found
};

template <class F> void find(Library& lib, void* from, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(from, name));
  if (function == nullptr && lib.problem.empty())
    lib.problem = std::string("NCCL: found a library without ") + name + ", expected version 2.10 or later";
}

// The directories of Python's packages, of the active environment and of the system.
std::vector<std::string> packaged_libraries() {
  std::vector<std::string> roots;
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"})
    if (const char* root = std::getenv(variable); root != nullptr && *root != 0) roots.emplace_back(root);
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != 0)
    roots.push_back(std::string(home) + "/.local");
  roots.insert(roots.end(), {"/usr/local", "/usr", "/opt/conda"});
  std::vector<std::string> all;
  for (const std::string& root : roots)
    for (const char* packages : {"site-packages", "dist-packages"}) {
      glob_t found{};
      const std::string pattern = root + "/lib/python3*/" + packages + "/nvidia/nccl/lib/libnccl.so.2";
      if (::glob(pattern.c_str(), 0, nullptr, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc; ++i) all.emplace_back(found.gl_pathv[i]);
      ::globfree(&found);
    }
  return all;
}

void* open_file(std::string& problem) {
  const char* const given = std::getenv("INGOT_NCCL");
  if (given != nullptr && *given != 0) {
    void* const from = dlopen(given, RTLD_NOW | RTLD_LOCAL);
    if (from == nullptr) problem = std::string("NCCL: found no library at INGOT_NCCL=") + given;
    return from;
  }
  if (void* from = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL); from != nullptr) return from;
  for (const std::string& path : packaged_libraries())
    if (void* from = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); from != nullptr) return from;
  problem =
      "NCCL: found no libnccl.so.2, expected it for several GPUs: pip install nvidia-nccl-cu13, or INGOT_NCCL names "
      "the "
      "file";
  return nullptr;
}

Library open_library() {
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  Library lib;
  void* const from = open_file(lib.problem);
  if (from == nullptr) return lib;
  find(lib, from, lib.version, "ncclGetVersion");
  find(lib, from, lib.unique_id, "ncclGetUniqueId");
  find(lib, from, lib.init_rank, "ncclCommInitRank");
  find(lib, from, lib.destroy, "ncclCommDestroy");
  find(lib, from, lib.abort, "ncclCommAbort");
  find(lib, from, lib.async_error, "ncclCommGetAsyncError");
  find(lib, from, lib.error_text, "ncclGetErrorString");
  find(lib, from, lib.group_start, "ncclGroupStart");
  find(lib, from, lib.group_end, "ncclGroupEnd");
  find(lib, from, lib.all_reduce, "ncclAllReduce");
  find(lib, from, lib.reduce_scatter, "ncclReduceScatter");
  find(lib, from, lib.all_gather, "ncclAllGather");
  find(lib, from, lib.reduce, "ncclReduce");
  find(lib, from, lib.broadcast, "ncclBroadcast");
  return lib;
}
const Library& library() {
  static const Library lib = open_library();
  return lib;
}

}  // namespace

bool nccl_available() { return library().problem.empty(); }
std::string nccl_version() {
  const Library& lib = library();
  if (!lib.problem.empty()) return lib.problem;
  int v = 0;
  lib.version(&v);
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

#ifdef INGOT_CUDA_BUILD

namespace {
constexpr double kLookEvery = 0.02;   // seconds between two checks of the ranks
constexpr double kAbortSeconds = 10;  // NCCL's time to end its kernels

void check_nccl(int status, const char* what) {
  if (status != kSuccess)
    fail(ErrorCode::unsupported, "NCCL: ", what, ": found ", library().error_text(status), ", expected success");
}
int type_code(const Tensor& x) {
  INGOT_CHECK(x.dtype == DType::f32 || x.dtype == DType::f64, "NCCL: found dtype ", x.dtype, ", expected f32 or f64");
  INGOT_CHECK(x.rank() == 1 && x.contiguous(), "NCCL: found shape ", x.shape, ", expected one contiguous dimension");
  return x.dtype == DType::f64 ? kFloat64 : kFloat32;
}
// The length of the parts if all parts have the same length, else 0.
int64_t common_length(const Parts& parts) {
  for (size_t r = 0; r + 1 < parts.size(); ++r)
    if (parts[r + 1] - parts[r] != parts[1]) return 0;
  return parts[1];
}
}  // namespace

struct NcclCommunicator::Impl {
  Impl(SocketCommunicator& c, int d) : control(c), device(d) {}
  SocketCommunicator& control;
  int device;
  Comm comm = nullptr;

  // Runs a call that may wait for a rank for ever, in a thread that is abandoned if the call does not return.
  void with_deadline(const char* what, const std::function<void(Comm&)>& work) {
    struct Shared {
      std::atomic<bool> done{false};
      std::string error;
      Comm comm = nullptr;
    };
    const auto shared = std::make_shared<Shared>();
    shared->comm = comm;
    std::thread([shared, work, d = device] {
      try {
        const DeviceGuard guard(d);
        work(shared->comm);
      } catch (const Error& e) { shared->error = e.what(); }
      shared->done = true;
    }).detach();
    wait_until(what, [&] { return shared->done.load(); });
    comm = shared->comm;
    if (!shared->error.empty()) fail(ErrorCode::unsupported, shared->error);
  }
  // Polls `done` until it is true. Throws LostRank where a rank goes away or does not finish.
  void wait_until(const char* what, const std::function<bool()>& done) {
    const auto start = Clock::now();
    auto looked = start;
    while (!done()) {
      if (seconds_since(looked) > kLookEvery) {
        looked = Clock::now();
        look(what, seconds_since(start));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  void look(const char* what, double waited) {
    try {
      control.check_alive();
      int status = kSuccess;
      if (comm != nullptr && library().async_error(comm, &status) == kSuccess && status != kSuccess &&
          status != kInProgress)
        control.fail_by_roll_call(ingot::detail::concat("NCCL: ", what, ": found ", library().error_text(status)));
      if (waited > control.deadline())
        control.fail_by_roll_call(ingot::detail::concat("NCCL: ", what, ": found no end within ", control.deadline(),
                                                        " s although all ranks answer, expected one"));
    } catch (const LostRank& e) {
      call_back(e.what());
      throw;
    }
  }
  // Kernels that wait for a rank that has ended would keep this process from ending, so their communicator is aborted.
  void call_back(const char* reason) {
    if (comm == nullptr) return;
    const auto done = std::make_shared<std::atomic<bool>>(false);
    std::thread([done, c = std::exchange(comm, nullptr)] {
      library().abort(c);
      *done = true;
    }).detach();
    for (const auto start = Clock::now(); !*done;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (seconds_since(start) < kAbortSeconds) continue;
      log_error(reason);
      ::_exit(exit_status(ErrorCode::io));
    }
  }
};

NcclCommunicator::NcclCommunicator(SocketCommunicator& control, int device)
    : control_(control), impl_(std::make_unique<Impl>(control, device)) {
  // Each rank reports that its own host lacks the library before the ranks wait for each other.
  if (!nccl_available()) fail(ErrorCode::unsupported, library().problem);
  UniqueId id{};
  if (rank() == 0) check_nccl(library().unique_id(&id), "the run's number");
  control.broadcast_bytes(&id, sizeof id, 0);
  impl_->with_deadline("connecting the GPUs", [id, r = rank(), n = world(), device](Comm& comm) {
    check_nccl(library().init_rank(&comm, n, id, r), "connecting the GPUs");
    // NCCL's preparations at the first call are then done before training begins.
    DeviceMemory number(8);
    OwnedStream stream;
    fill_bytes(number.data(), 0, 8, stream);
    check_nccl(library().all_reduce(number.data(), number.data(), 1, kFloat64, kSum, comm, Stream(stream).handle),
               "the first sum");
    check_cuda(cudaStreamSynchronize(cudaStream_t(Stream(stream).handle)), "the first sum on cuda:", device);
  });
}
NcclCommunicator::~NcclCommunicator() {
  if (impl_->comm == nullptr) return;
  // At a normal end all ranks call this; a rank that fails alone must not wait.
  if (std::uncaught_exceptions() > 0)
    library().abort(impl_->comm);
  else
    library().destroy(impl_->comm);
}

void NcclCommunicator::all_reduce(const Tensor& x, Stream stream) {
  const int type = type_code(x);
  if (x.numel() == 0) return;
  check_nccl(library().all_reduce(x.data, x.data, size_t(x.numel()), type, kSum, impl_->comm, stream.handle),
             "all_reduce");
}
void NcclCommunicator::reduce_scatter(const Tensor& x, const Parts& parts, Stream stream) {
  const int type = type_code(x);
  const auto at = [&](int64_t i) { return static_cast<char*>(x.data) + i * int64_t(size_of(x.dtype)); };
  if (const int64_t n = common_length(parts); n > 0) {
    check_nccl(library().reduce_scatter(x.data, at(n * rank()), size_t(n), type, kSum, impl_->comm, stream.handle),
               "reduce_scatter");
    return;
  }
  check_nccl(library().group_start(), "reduce_scatter");
  for (int r = 0; r < world(); ++r)
    if (const int64_t begin = parts[size_t(r)], n = parts[size_t(r) + 1] - begin; n > 0)
      check_nccl(library().reduce(at(begin), at(begin), size_t(n), type, kSum, r, impl_->comm, stream.handle),
                 "reduce_scatter");
  check_nccl(library().group_end(), "reduce_scatter");
}
void NcclCommunicator::all_gather(const Tensor& x, const Parts& parts, Stream stream) {
  const int type = type_code(x);
  const auto at = [&](int64_t i) { return static_cast<char*>(x.data) + i * int64_t(size_of(x.dtype)); };
  if (const int64_t n = common_length(parts); n > 0) {
    check_nccl(library().all_gather(at(n * rank()), x.data, size_t(n), type, impl_->comm, stream.handle), "all_gather");
    return;
  }
  check_nccl(library().group_start(), "all_gather");
  for (int r = 0; r < world(); ++r)
    if (const int64_t begin = parts[size_t(r)], n = parts[size_t(r) + 1] - begin; n > 0)
      check_nccl(library().broadcast(at(begin), at(begin), size_t(n), type, r, impl_->comm, stream.handle),
                 "all_gather");
  check_nccl(library().group_end(), "all_gather");
}
void NcclCommunicator::broadcast(const Tensor& x, int root, Stream stream) {
  const int type = type_code(x);
  if (x.numel() == 0) return;
  check_nccl(library().broadcast(x.data, x.data, size_t(x.numel()), type, root, impl_->comm, stream.handle),
             "broadcast");
}
void NcclCommunicator::wait(Stream stream) {
  impl_->wait_until("a step", [&] {
    const cudaError_t status = cudaStreamQuery(cudaStream_t(stream.handle));
    if (status != cudaErrorNotReady) check_cuda(status, "a step");
    return status == cudaSuccess;
  });
}

#else

struct NcclCommunicator::Impl {};
NcclCommunicator::NcclCommunicator(SocketCommunicator& control, int) : control_(control) {
  fail(ErrorCode::unsupported, "NCCL: found a build without CUDA, expected one made with INGOT_CUDA=ON");
}
NcclCommunicator::~NcclCommunicator() = default;
void NcclCommunicator::all_reduce(const Tensor&, Stream) {}
void NcclCommunicator::reduce_scatter(const Tensor&, const Parts&, Stream) {}
void NcclCommunicator::all_gather(const Tensor&, const Parts&, Stream) {}
void NcclCommunicator::broadcast(const Tensor&, int, Stream) {}
void NcclCommunicator::wait(Stream) {}

#endif

}  // namespace ingot::gpu
