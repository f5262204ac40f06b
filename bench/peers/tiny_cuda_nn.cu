// tiny-cuda-nn's fully fused MLP behind C functions, for bench/peers/gpu_mlp.py: compiled for sm_90 with the options of
// tiny-cuda-nn's own build (fp16, --use_fast_math) and linked with its objects to libtiny_cuda_nn.so.
//
// The committed report's library holds common_host, object, reduce_sum, rtc_kernel and fully_fused_mlp, the last one
// compiled for the widths 64 and 128 and the activations None, ReLU and Softplus alone. The functions below do not use
// tiny-cuda-nn's compilation of kernels at run time, so the library was linked without it.
//
// x, y, dy, dx are (rows, width) f16 row-major, rows a multiple of 256; weights and their gradients, f16 too, lie layer
// after layer, (width, width) each. A network lives as long as the process. Every function returns nullptr or the text
// of an error.
#include <tiny-cuda-nn/gpu_matrix.h>
#include <tiny-cuda-nn/networks/fully_fused_mlp.h>

#include <exception>
#include <memory>
#include <string>

namespace {
using Half = tcnn::network_precision_t;
using Matrix = tcnn::GPUMatrixDynamic<Half>;

struct Mlp {
  std::unique_ptr<tcnn::Network<Half>> network;
  uint32_t width;
};
std::string error;

template <class F> const char* guarded(F f) {
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
// The matrices of tiny-cuda-nn are (features, rows) in column-major order: the same memory.
Matrix matrix(const Mlp& m, void* data, int rows) {
  return Matrix(static_cast<Half*>(data), m.width, uint32_t(rows), tcnn::CM);
}
}  // namespace

extern "C" {
const char* tiny_create(int width, int layers, const char* activation, void* weights, void* gradients, void** out) {
  return guarded([&] {
    auto m = std::make_unique<Mlp>();
    m->width = uint32_t(width);
    const auto act = tcnn::string_to_activation(activation);
    if (width == 128) {
      m->network = std::make_unique<tcnn::FullyFusedMLP<Half, 128>>(128, 128, layers - 1, act, tcnn::Activation::None);
    } else if (width == 64) {
      m->network = std::make_unique<tcnn::FullyFusedMLP<Half, 64>>(64, 64, layers - 1, act, tcnn::Activation::None);
    } else {
      throw std::runtime_error("found a width of " + std::to_string(width) + ", expected 64 or 128");
    }
    if (m->network->n_params() != size_t(layers) * width * width) throw std::runtime_error("padded weights");
    m->network->set_params(static_cast<Half*>(weights), static_cast<Half*>(weights), static_cast<Half*>(gradients));
    *out = m.release();
  });
}
const char* tiny_forward(void* mlp, void* x, void* y, int rows, void* stream) {
  return guarded([&] {
    const Mlp& m = *static_cast<Mlp*>(mlp);
    Matrix out = matrix(m, y, rows);
    m.network->inference_mixed_precision(static_cast<cudaStream_t>(stream), matrix(m, x, rows), out);
  });
}
const char* tiny_train(void* mlp, void* x, void* y, void* dy, void* dx, int rows, void* stream) {
  return guarded([&] {
    const Mlp& m = *static_cast<Mlp*>(mlp);
    const auto s = static_cast<cudaStream_t>(stream);
    const Matrix in = matrix(m, x, rows), above = matrix(m, dy, rows);
    Matrix out = matrix(m, y, rows), below = matrix(m, dx, rows);
    const auto context = m.network->forward(s, in, &out, false, true);
    m.network->backward(s, *context, in, out, above, &below);
  });
}
}
