#pragma once
// What tests read of a DeviceModel's memory.
#include <cstddef>
#include <vector>

#include "ingot/gpu/device.h"
#include "ingot/models/gpt_oss/decode/decode_cases.test.h"
#include "ingot/models/gpt_oss/decode/device_model.h"

namespace ingot::testing {

template <class T> std::vector<T> download(const T* from, int64_t n) {
  std::vector<T> host(static_cast<size_t>(n));
  gpu::copy_to_host(host.data(), from, n * int64_t(sizeof(T)));
  return host;
}
// The experts that token t of the last step with these buffers went to.
inline DecodeReference::Choices choices_of(const gpt_oss_decode::DeviceModel& m, gpt_oss_decode::Buffers b, size_t t) {
  const int64_t layers = m.config().layers, n = layers * b.entries;
  auto count = download(b.lists.count, layers);
  auto expert = download(b.lists.expert, n), row = download(b.lists.row, n * routing::kTokens);
  b.lists = {count.data(), expert.data(), nullptr, row.data()};
  return choices_of(b, layers, t);
}
inline DecodeReference::Choices choices_of(const gpt_oss_decode::DeviceModel& m, size_t t) {
  return choices_of(m, m.buffers(), t);
}

}  // namespace ingot::testing
