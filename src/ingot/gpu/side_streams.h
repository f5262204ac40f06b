#pragma once
// Streams beside a caller's stream, for tasks that do not depend on each other: kernels that are too small for the
// whole GPU, or wait for its memory, then run at the same time. Inside a graph's capture the tasks become parallel
// branches.
#include <functional>
#include <vector>

#include "ingot/core/tensor.h"

namespace ingot::gpu {

class SideStreams {
 public:
  // On a CPU and in emulation there are none: a call there returns when its work is done.
  SideStreams(Device device, int count);
  ~SideStreams();
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  // Calls work(task, stream) for each of the tasks, in order, which launches the task on that stream: `stream` itself
  // or a side stream, in turn. All tasks begin after earlier work of `stream`, and later work of `stream` after all
  // tasks.
  void run(int tasks, Stream stream, const std::function<void(int task, Stream stream)>& work);

 private:
  void fork(Stream stream);
  void join(Stream stream);

  struct Side {
    void *stream = nullptr, *done = nullptr;  // the event after the tasks
  };
  std::vector<Side> sides_;
  void* begin_ = nullptr;  // the event before the tasks
};

}  // namespace ingot::gpu
