#include "ingot/gpu/plain_launches.h"

#include <memory>
#include <vector>

#ifdef INGOT_CUDA_BUILD
#include <cuda_runtime_api.h>
#endif

#include "ingot/gpu/device.h"

namespace ingot::gpu {

#ifdef INGOT_CUDA_BUILD

struct PlainLaunches::Kernels {
  struct Kernel {
    cudaKernelNodeParams params;
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;  // of attributes
  };
  cudaGraph_t graph = nullptr;  // owns the kernels' arguments
  std::vector<Kernel> kernels;

  ~Kernels() {
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
  }
  void add(cudaGraphNode_t node) {
    cudaGraphNodeType type{};
    check_cuda(cudaGraphNodeGetType(node, &type), "plain launches: type of a node");
    if (type != cudaGraphNodeTypeKernel)
      fail(ErrorCode::unsupported, "plain launches: found other work after ", kernels.size(),
           " kernels, expected kernels alone");
    Kernel k{};
    check_cuda(cudaGraphKernelNodeGetParams(node, &k.params), "plain launches: arguments of a kernel");
    for (const cudaLaunchAttributeID id : {cudaLaunchAttributeClusterDimension, cudaLaunchAttributeCooperative}) {
      cudaLaunchAttribute& a = k.attributes[k.count];
      a.id = id;
      check_cuda(cudaGraphKernelNodeGetAttribute(node, id, &a.val), "plain launches: attribute of a kernel");
      const bool is_cluster = id == cudaLaunchAttributeClusterDimension;
      if (is_cluster ? a.val.clusterDim.x > 1 : a.val.cooperative != 0) ++k.count;
    }
    kernels.push_back(k);
  }
  void add_all() {
    size_t count = 1;
    cudaGraphNode_t node = nullptr;
    check_cuda(cudaGraphGetRootNodes(graph, nullptr, &count), "plain launches: first nodes");
    if (count == 1) check_cuda(cudaGraphGetRootNodes(graph, &node, &count), "plain launches: first nodes");
    while (count == 1) {
      add(node);
      const cudaGraphNode_t last = node;
      cudaGraphEdgeData edge{};  // a programmatic launch has an edge of its own kind
#if CUDART_VERSION >= 13000
      check_cuda(cudaGraphNodeGetDependentNodes(last, nullptr, nullptr, &count), "plain launches: next nodes");
      if (count == 1)
        check_cuda(cudaGraphNodeGetDependentNodes(last, &node, &edge, &count), "plain launches: next nodes");
#else
      check_cuda(cudaGraphNodeGetDependentNodes_v2(last, nullptr, nullptr, &count), "plain launches: next nodes");
      if (count == 1)
        check_cuda(cudaGraphNodeGetDependentNodes_v2(last, &node, &edge, &count), "plain launches: next nodes");
#endif
    }
    if (count > 1)
      fail(ErrorCode::unsupported, "plain launches: found ", count, " kernels at once, expected one order");
  }
};

PlainLaunches::PlainLaunches(Stream stream, const std::function<void()>& work) {
  auto kernels = std::make_unique<Kernels>();
  const auto s = static_cast<cudaStream_t>(stream.handle);
  check_cuda(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "plain launches: starting a capture");
  try {
    work();
  } catch (...) {
    (void)cudaStreamEndCapture(s, &kernels->graph);
    throw;
  }
  check_cuda(cudaStreamEndCapture(s, &kernels->graph), "plain launches: ending a capture");
  kernels->add_all();
  kernels_ = kernels.release();
}
PlainLaunches::~PlainLaunches() { delete kernels_; }
int64_t PlainLaunches::count() const { return int64_t(kernels_->kernels.size()); }
void PlainLaunches::launch(Stream stream) const {
  for (Kernels::Kernel& k : kernels_->kernels) {
    const cudaLaunchConfig_t config{.gridDim = k.params.gridDim,
                                    .blockDim = k.params.blockDim,
                                    .dynamicSmemBytes = k.params.sharedMemBytes,
                                    .stream = static_cast<cudaStream_t>(stream.handle),
                                    .attrs = k.attributes,
                                    .numAttrs = k.count};
    check_cuda(cudaLaunchKernelExC(&config, k.params.func, k.params.kernelParams), "plain launches: a launch");
  }
}

#else

PlainLaunches::PlainLaunches(Stream, const std::function<void()>&) : kernels_(nullptr) {
  fail(ErrorCode::unsupported, "plain launches: Ingot was built without CUDA; expected a build with INGOT_CUDA=ON");
}
PlainLaunches::~PlainLaunches() = default;
void PlainLaunches::launch(Stream) const {}
int64_t PlainLaunches::count() const { return 0; }

#endif

}  // namespace ingot::gpu
