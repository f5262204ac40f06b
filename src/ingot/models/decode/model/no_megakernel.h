#pragma once
// The reason, for a line of the log, why the megakernel of the families does not support a model all of whose
// operations the kernel has (supports_megakernel()).
#include <cstdint>
#include <string>

#include "ingot/core/check.h"

namespace ingot::decode {

struct MegakernelModel {
  int64_t head_dim = 0;
  uint32_t cache_dim = 0;  // cache_dim() of the model
  bool dense_mlp = true;
  bool shared_by_gpus = false;
  bool one_format = true;  // of all matrices of the layers and the head
};

inline std::string no_megakernel_reason(const MegakernelModel& m) {
  if (m.shared_by_gpus) return "a model shared by several GPUs";
  if (!m.one_format) return "matrices in several formats";
  // The kernel is compiled for rows of the cache of 128 numbers, and for dense MLPs also for rows of 64.
  const bool has_kernel = m.cache_dim == 128 || (m.cache_dim == 64 && m.dense_mlp);
  if (!has_kernel || m.head_dim % 4 != 0)
    return ingot::detail::concat("heads of ", m.head_dim, " numbers", m.dense_mlp ? "" : " beside experts");
  return "rows that are too long for the memory of a multiprocessor";
}

}  // namespace ingot::decode
