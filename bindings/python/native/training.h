#pragma once
// The wide MLP on torch.Tensor objects: the caller has allocated everything but workspaces.
#include <nanobind/nanobind.h>

namespace ingot::python {

namespace nb = nanobind;

// y = f(x w1^T + b1) w2^T + b2; h = f(x w1^T + b1). pre (the arguments of f) or signs are kept beside h, or neither.
void run_wide_mlp(nb::handle x, nb::handle w1, nb::handle b1, nb::handle w2, nb::handle b2, nb::handle h,
                  nb::handle pre, nb::handle signs, nb::handle y, int act);
// Gradients of parameters accumulate. With `pre`, h is written; with `signs`, h is read. dh is a workspace.
void run_wide_mlp_backward(nb::handle dy, nb::handle x, nb::handle w1, nb::handle w2, nb::handle h, nb::handle pre,
                           nb::handle signs, nb::handle dh, nb::handle dx, nb::handle dw1, nb::handle db1,
                           nb::handle dw2, nb::handle db2, int act);

}  // namespace ingot::python
