#pragma once
// The arguments of the calls of MLPs from Python, for declared.cpp.
#include <utility>
#include <vector>

#include "declare.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/mlp/mlp.h"

namespace ingot::python {

// The layers of `parameters`, which holds, layer after layer, the weight, then the bias if there are biases, then the
// gain if the weights are normalised.
inline std::vector<MlpLayer> layers_of(const char* op, nb::handle parameters, bool bias, bool weight_norm) {
  const size_t each = 1 + bias + weight_norm, count = nb::len(parameters);
  INGOT_CHECK(count > 0 && count % each == 0, op, ": parameters: found ", count, " tensors, expected ", each,
              " for every layer");
  std::vector<MlpLayer> layers(count / each);
  nb::sequence given = nb::borrow<nb::sequence>(parameters);
  size_t i = 0;
  for (MlpLayer& layer : layers) {
    Sizes sizes;
    INGOT_CHECK(dense_matrix(op, "weights", nb::object(given[i++]), layer.w, &sizes) && sizes.rank == 2, op,
                ": weights: found ", sizes.rank, " dimensions, expected 2, contiguous");
    if (bias) layer.b = vector(op, "biases", nb::object(given[i++]));
    if (weight_norm) layer.g = vector(op, "gains", nb::object(given[i++]));
  }
  return layers;
}

// Refuses parameters that do not fit x or each other, by their names in ingot.functional.fused_mlp.
[[gnu::cold, gnu::noinline]] inline void refuse_layers(const char* op, const Tensor& x,
                                                       const std::vector<MlpLayer>& layers) {
  int64_t width = x.cols();
  for (size_t l = 0; l < layers.size(); ++l) {
    const MlpLayer& layer = layers[l];
    const auto check = [&](const char* name, const Tensor& t) {
      INGOT_CHECK(t.dtype == x.dtype, op, ": ", name, "[", l, "]: found dtype ", torch_name(t.dtype), ", expected x's ",
                  torch_name(x.dtype), " (or autocast)");
      INGOT_CHECK(t.device == x.device, op, ": ", name, "[", l, "]: found a tensor on ", t.device, ", expected x's ",
                  x.device);
    };
    check("weights", layer.w);
    INGOT_CHECK(l > 0 || layer.w.cols() == width, op, ": x: found ", width, " columns, expected ", layer.w.cols(),
                ", as many as weights[0] of shape ", layer.w.shape);
    INGOT_CHECK(layer.w.cols() == width, op, ": weights[", l, "]: found shape ", layer.w.shape, ", expected (N, ",
                width, ") for the rows of the weights before");
    width = layer.w.rows();
    for (const auto& [name, t] : {std::pair{"biases", &layer.b}, std::pair{"gains", &layer.g}}) {
      if (!*t) continue;
      check(name, *t);
      INGOT_CHECK(t->numel() == width, op, ": ", name, "[", l, "]: found ", t->numel(), " elements, expected ", width,
                  ", the rows of weights[", l, "]");
    }
  }
}

inline void check_layers(const char* op, const Tensor& x, const std::vector<MlpLayer>& layers) {
  bool fit = true;
  int64_t width = x.cols();
  for (const MlpLayer& layer : layers) {
    fit = fit && layer.w.cols() == width;
    width = layer.w.rows();
    for (const Tensor* t : {&layer.w, &layer.b, &layer.g})
      fit = fit && (!*t || (t->dtype == x.dtype && t->device == x.device && (t == &layer.w || t->numel() == width)));
  }
  if (!fit) [[unlikely]]
    refuse_layers(op, x, layers);
}

// `gradients` is a zeroed buffer with the gradients of the parameters in order; `wanted` lists the parameters with a
// place in the buffer.
struct MlpBackwardCall : MlpBackward {
  nb::object parameters, wanted;
  Tensor gradients;
  bool bias = false, weight_norm = false;
};
inline bool complete(const char* op, MlpBackwardCall& a) {
  a.layers = layers_of(op, a.parameters, a.bias, a.weight_norm);
  nb::sequence wanted = nb::borrow<nb::sequence>(a.wanted);
  INGOT_CHECK_EQ(nb::len(wanted), nb::len(a.parameters), op, ": length of wanted");
  a.grads.resize(a.layers.size());
  int64_t at = 0;
  size_t i = 0;
  auto place = [&](const Tensor& parameter) {
    if (!nb::cast<bool>(nb::object(wanted[i++]))) return Tensor{};
    const Tensor& flat = a.gradients;
    Tensor t(static_cast<char*>(flat.data) + at * size_of(flat.dtype), flat.dtype, parameter.shape, flat.device);
    at += parameter.numel();
    INGOT_CHECK_LE(at, flat.numel(), op, ": elements of gradients");
    return t;
  };
  for (size_t l = 0; l < a.layers.size(); ++l) {
    a.grads[l].w = place(a.layers[l].w);
    if (a.bias) a.grads[l].b = place(a.layers[l].b);
    if (a.weight_norm) a.grads[l].g = place(a.layers[l].g);
  }
  return true;
}

// y = act(x w1^T + b1) w2^T + b2. h: the value of the activation; pre or signs: kept for the backward pass.
struct WideMlpCall {
  Tensor x, w1, b1, w2, b2, h, pre, signs, y, workspace;
  Act act{};
};
inline void run_wide_mlp(const WideMlpCall& a, Stream stream) {
  linear({.x = a.x,
          .w = a.w1,
          .b = a.b1,
          .y = a.h,
          .pre = a.pre,
          .signs = a.signs,
          .act = a.act,
          .workspace = a.workspace},
         stream);
  linear({.x = a.h, .w = a.w2, .b = a.b2, .y = a.y, .workspace = a.workspace}, stream);
}
struct WideMlpBackwardCall {
  Tensor dy, x, w1, w2, h, pre, signs, dh, dx, dw1, db1, dw2, db2, workspace;
  Act act{};
};
inline void run_wide_mlp_backward(const WideMlpBackwardCall& a, Stream stream) {
  linear_backward({.dy = a.dy,
                   .x = a.h,
                   .w = a.w2,
                   .dx = a.dh,
                   .dw = a.dw2,
                   .db = a.db2,
                   .pre = a.pre,
                   .signs = a.signs,
                   .act = a.act,
                   .form_x = bool(a.pre),
                   .workspace = a.workspace},
                  stream);
  if (a.dh)
    linear_backward({.dy = a.dh, .x = a.x, .w = a.w1, .dx = a.dx, .dw = a.dw1, .db = a.db1, .workspace = a.workspace},
                    stream);
}

}  // namespace ingot::python
