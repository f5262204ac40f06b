#include "ingot/gpu/cublaslt.h"

#ifdef INGOT_CUDA_BUILD
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "ingot/gpu/device.h"

namespace ingot::gpu {
namespace {

// --- the part of the library's interface in use here, equal in versions 12 and 13
using Handle = struct LtHandle*;
using Desc = struct LtDesc*;
using Layout = struct LtLayout*;
using Preference = struct LtPreference*;
struct Algo {
  uint64_t data[8];
};
struct HeuristicResult {
  Algo algo;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96, "as the library lays it out");

// attributes of a product
enum : int { kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8, kBiasType = 26 };
// attributes of a matrix
enum : int { kBatchCount = 5, kBatchStep = 6 };
enum : int { kMaxWorkspace = 1, kReductions = 3, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8 };
enum : uint32_t { kPlain = 1, kWithBias = 4 };
constexpr uint32_t kInTypeOfSums =
    2;  // value of kReductions: partial products over k are added in fp32, not in d's type
constexpr int kNotSupported = 15;

struct Library {
  int (*create)(Handle*) = nullptr;
  int (*matmul)(Handle, Desc, const void*, const void*, Layout, const void*, Layout, const void*, const void*, Layout,
                void*, Layout, const Algo*, void*, size_t, cudaStream_t) = nullptr;
  int (*heuristic)(Handle, Desc, Layout, Layout, Layout, Layout, Preference, int, HeuristicResult*, int*) = nullptr;
  int (*desc_create)(Desc*, int, int) = nullptr;
  int (*desc_set)(Desc, int, const void*, size_t) = nullptr;
  int (*desc_destroy)(Desc) = nullptr;
  int (*layout_create)(Layout*, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*layout_set)(Layout, int, const void*, size_t) = nullptr;
  int (*layout_destroy)(Layout) = nullptr;
  int (*preference_create)(Preference*) = nullptr;
  int (*preference_set)(Preference, int, const void*, size_t) = nullptr;
  int (*preference_destroy)(Preference) = nullptr;
  size_t (*version)() = nullptr;
  std::string problem;  // empty where the library and all functions were found
};

template <class F> void find(Library& lib, void* from, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(from, name));
  if (function == nullptr && lib.problem.empty()) lib.problem = std::string("cuBLASLt: found no ") + name;
}

Library open_library() {
  Library lib;
  void* from = nullptr;
  const char* const given = std::getenv("INGOT_CUBLASLT");
  if (given != nullptr && *given != 0)
    from = dlopen(given, RTLD_LAZY | RTLD_LOCAL);
  else
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"})
      if ((from = dlopen(name, RTLD_LAZY | RTLD_LOCAL)) != nullptr) break;
  if (from == nullptr) {
    lib.problem = given != nullptr && *given != 0
                      ? std::string("cuBLASLt: found no library at INGOT_CUBLASLT=") + given
                      : std::string("cuBLASLt: found no libcublasLt.so.13 or .12; INGOT_CUBLASLT may name one");
    return lib;
  }
  find(lib, from, lib.create, "cublasLtCreate");
  find(lib, from, lib.matmul, "cublasLtMatmul");
  find(lib, from, lib.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(lib, from, lib.desc_create, "cublasLtMatmulDescCreate");
  find(lib, from, lib.desc_set, "cublasLtMatmulDescSetAttribute");
  find(lib, from, lib.desc_destroy, "cublasLtMatmulDescDestroy");
  find(lib, from, lib.layout_create, "cublasLtMatrixLayoutCreate");
  find(lib, from, lib.layout_set, "cublasLtMatrixLayoutSetAttribute");
  find(lib, from, lib.layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(lib, from, lib.preference_create, "cublasLtMatmulPreferenceCreate");
  find(lib, from, lib.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(lib, from, lib.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(lib, from, lib.version, "cublasLtGetVersion");
  return lib;
}
const Library& library() {
  static const Library lib = open_library();
  return lib;
}

void check_lt(int status, const char* what) {
  INGOT_CHECK(status == 0, "cuBLASLt: ", what, ": found status ", status, ", expected 0");
}

// The device's handle, made at its first use.
Handle handle_of(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, Handle> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  Handle& handle = handles[device];
  if (handle == nullptr) check_lt(library().create(&handle), "creating a handle");
  return handle;
}

int type_code(DType t) {
  switch (t) {
    case DType::f32: return 0;
    case DType::f16: return 2;
    case DType::bf16: return 14;
    default: fail(ErrorCode::unsupported, "cuBLASLt: found dtype ", t, ", expected f32, bf16 or f16");
  }
}
// Sums are kept in fp32.
int compute_code(const LtProduct& p) {
  if (p.type == DType::f32 && p.round == LtProduct::Round::tf32) return 77;
  if (p.type == DType::f32 && p.round == LtProduct::Round::bf16) return 75;
  return 68;
}

uint32_t alignment_of(const void* p) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p) | 256;
  return uint32_t(at & (~at + 1));
}

// Everything a plan depends on. The struct has no padding, because all members have the same size.
struct Key {
  std::array<int64_t, 20> of;
  bool operator==(const Key&) const = default;
};
struct Hash {
  size_t operator()(const Key& k) const {
    uint64_t h = 0;
    for (int64_t v : k.of) h = (h ^ uint64_t(v)) * 0x9e3779b97f4a7c15 + (h >> 29);
    return size_t(h);
  }
};
Key key_of(const LtProduct& p, int device) {
  return {{p.m,
           p.n,
           p.k,
           p.batch,
           int64_t(p.type) * 16 + int64_t(p.out),
           p.transpose_a * 8 + p.transpose_b * 4 + (p.bias != nullptr) * 2 + (p.beta != 0),
           p.a.ld,
           p.a.step,
           p.b.ld,
           p.b.step,
           p.c.ld,
           p.c.step,
           p.d.ld,
           p.d.step,
           int64_t(p.round),
           p.workspace_bytes,
           device,
           alignment_of(p.a.data) * 512 + alignment_of(p.b.data),
           alignment_of(p.c.data) * 512 + alignment_of(p.d.data),
           int64_t(p.c.data == p.d.data)}};
}

// The library stores matrices by columns and therefore sees a row-major matrix as its transpose. The call therefore
// computes D^T = op(B)^T op(A)^T: the library's first operand is B, its second operand is A.
class Plan {
 public:
  Plan(const LtProduct& p, Handle handle) {
    const Library& lib = library();
    check_lt(lib.desc_create(&desc_, compute_code(p), type_code(DType::f32)), "describing a product");
    set(kTransposeA, int(p.transpose_b)), set(kTransposeB, int(p.transpose_a));
    if (p.bias != nullptr) {
      set(kEpilogue, uint32_t(kWithBias)), set(kBiasPointer, p.bias), set(kBiasType, type_code(p.out));
    }
    describe(a_, p.type, p.transpose_b ? p.k : p.n, p.transpose_b ? p.n : p.k, p.b, p.batch);
    describe(b_, p.type, p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m, p.a, p.batch);
    describe(c_, p.out, p.n, p.m, p.beta != 0 ? p.c : p.d, p.batch);
    describe(d_, p.out, p.n, p.m, p.d, p.batch);
    choose(p, handle);
  }
  ~Plan() {
    const Library& lib = library();
    for (Layout layout : {a_, b_, c_, d_})
      if (layout != nullptr) lib.layout_destroy(layout);
    if (desc_ != nullptr) lib.desc_destroy(desc_);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  bool found() const { return found_; }
  bool run(const LtProduct& p, Handle handle, Stream stream) {
    if (p.bias != nullptr) set(kBiasPointer, p.bias);
    const float alpha = float(p.alpha), beta = float(p.beta);
    const int status =
        library().matmul(handle, desc_, &alpha, p.b.data, a_, p.a.data, b_, &beta, p.beta != 0 ? p.c.data : p.d.data,
                         c_, const_cast<void*>(p.d.data), d_, &algo_, p.workspace, size_t(p.workspace_bytes),
                         static_cast<cudaStream_t>(stream.handle));
    if (status == kNotSupported) return false;
    check_lt(status, "a product");
    return true;
  }

 private:
  template <class V> void set(int attribute, const V& value) {
    check_lt(library().desc_set(desc_, attribute, &value, sizeof value), "describing a product");
  }
  static void describe(Layout& layout, DType t, int64_t rows, int64_t cols, const LtMatrix& of, int64_t batch) {
    const Library& lib = library();
    check_lt(lib.layout_create(&layout, type_code(t), uint64_t(rows), uint64_t(cols), std::max(of.ld, rows)),
             "describing a matrix");
    if (batch == 1) return;
    const int32_t count = int32_t(batch);
    check_lt(lib.layout_set(layout, kBatchCount, &count, sizeof count), "describing a batch");
    check_lt(lib.layout_set(layout, kBatchStep, &of.step, sizeof of.step), "describing a batch");
  }
  void choose(const LtProduct& p, Handle handle) {
    const Library& lib = library();
    Preference preference = nullptr;
    check_lt(lib.preference_create(&preference), "a preference");
    const uint64_t workspace = uint64_t(p.workspace_bytes);
    lib.preference_set(preference, kMaxWorkspace, &workspace, sizeof workspace);
    if (p.out != DType::f32) lib.preference_set(preference, kReductions, &kInTypeOfSums, sizeof kInTypeOfSums);
    const uint32_t alignment[] = {alignment_of(p.b.data), alignment_of(p.a.data),
                                  alignment_of(p.beta != 0 ? p.c.data : p.d.data), alignment_of(p.d.data)};
    for (int i = 0; i < 4; ++i) lib.preference_set(preference, kAlignmentA + i, &alignment[i], sizeof alignment[i]);
    HeuristicResult result;
    int count = 0;
    const int status = lib.heuristic(handle, desc_, a_, b_, c_, d_, preference, 1, &result, &count);
    lib.preference_destroy(preference);
    found_ = status == 0 && count > 0 && result.state == 0;
    if (found_) algo_ = result.algo;
  }

  Desc desc_ = nullptr;
  Layout a_ = nullptr, b_ = nullptr, c_ = nullptr, d_ = nullptr;
  Algo algo_ = {};
  bool found_ = false;
};

// The library's choice takes tens of microseconds, so each thread keeps earlier choices. The table has a limit, because
// training may have a different number of rows in every call.
Plan& plan_of(const LtProduct& p, int device, Handle handle) {
  constexpr size_t kMost = 1024;
  thread_local std::unordered_map<Key, Plan, Hash> plans;
  const Key key = key_of(p, device);
  if (const auto at = plans.find(key); at != plans.end()) return at->second;
  if (plans.size() >= kMost) plans.clear();
  return plans.try_emplace(key, p, handle).first->second;
}

}  // namespace

bool lt_available() { return library().problem.empty(); }
std::string lt_version() {
  if (!lt_available()) return library().problem;
  const size_t v = library().version();
  return std::to_string(v / 10000) + '.' + std::to_string(v % 10000 / 100) + '.' + std::to_string(v % 100);
}

bool lt_product(const LtProduct& p, int device, Stream stream) {
  if (!lt_available()) return false;
  const DeviceGuard guard(device);
  const Handle handle = handle_of(device);
  Plan& plan = plan_of(p, device, handle);
  return plan.found() && plan.run(p, handle, stream);
}

}  // namespace ingot::gpu

#else

namespace ingot::gpu {
bool lt_available() { return false; }
std::string lt_version() { return "cuBLASLt: Ingot was built without CUDA"; }
bool lt_product(const LtProduct&, int, Stream) { return false; }
}  // namespace ingot::gpu
#endif
