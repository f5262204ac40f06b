// Functions of libingot_bench.so (testing/native.h): the last error, and the kernels for measurements of memory.
#include "ingot/gpu/bandwidth.h"

#include "ingot/testing/native.h"

namespace ingot::testing {

EXPORT const char* ingot_bench_error() { return native_error.c_str(); }

EXPORT int ingot_bench_copy(void* to, const void* from, int64_t bytes, void* stream) {
  return guarded([&] { gpu::copy_kernel(to, from, bytes, {stream}); });
}
EXPORT int ingot_bench_read(const void* from, int64_t bytes, void* sink, void* stream) {
  return guarded([&] { gpu::read_kernel(from, bytes, sink, {stream}); });
}

}  // namespace ingot::testing
