#pragma once

namespace ingot::gpu {

int current_device();  // of this thread; -1 without CUDA in the build

}  // namespace ingot::gpu
