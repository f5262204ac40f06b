#pragma once
// The same test of a kernel for the emulator and the GPU: the differences between a Buffer and a DeviceBuffer.
#include <gtest/gtest.h>

#include "ingot/testing/testing.h"

namespace ingot::testing {

// The host's copy, for filling in and reading.
template <class B> Tensor host_of(const B& b) {
  if constexpr (requires { b.host(); })
    return b.host();
  else
    return b.tensor();
}
template <class B> void send(B& b) {
  if constexpr (requires { b.upload(); }) b.upload();
}
// After a kernel: brings the buffer to the host, and expects no writes outside its elements.
template <class B> void fetch(B& b) {
  if constexpr (requires { b.download(); }) {
    b.download();
    EXPECT_TRUE(b.untouched());
  } else {
    EXPECT_TRUE(b.guards_intact());
  }
}
template <class B> B normal(DType type, Shape shape, uint64_t seed, double scale = 1) {
  B b(type, shape);
  fill_normal(host_of(b), seed, scale);
  send(b);
  return b;
}
template <class B> B poisoned(DType type, Shape shape) {
  B b(type, shape);
  send(b);
  return b;
}
template <class B> B holding(DType type, Shape shape, const std::vector<double>& v) {
  B b(type, shape);
  assign(host_of(b), v);
  send(b);
  return b;
}
// The same numbers in fp64 in the host's memory.
template <class B> Buffer exact(const B& b) {
  Buffer e(DType::f64, host_of(b).shape);
  assign(e, values(host_of(b)));
  return e;
}
template <class B> void expect_close(B& got, const std::vector<double>& want, double absolute, double relative) {
  fetch(got);
  const Comparison r = compare(host_of(got), want, absolute, relative);
  EXPECT_TRUE(r.ok) << r.message;
}

}  // namespace ingot::testing
