#pragma once
// Operations of training steps on torch.Tensor objects, as ops.cpp has the others: the caller has allocated everything
// but workspaces.
#include <nanobind/nanobind.h>

namespace ingot::python {

namespace nb = nanobind;

// y = f(x w1^T + b1) w2^T + b2; h: what is between. pre or signs are kept beside it, or neither.
void run_wide_mlp(nb::handle x, nb::handle w1, nb::handle b1, nb::handle w2, nb::handle b2, nb::handle h,
                  nb::handle pre, nb::handle signs, nb::handle y, int act);
// Gradients of parameters accumulate. Beside pre, h is written, beside signs it is read; dh is scratch.
void run_wide_mlp_backward(nb::handle dy, nb::handle x, nb::handle w1, nb::handle w2, nb::handle h, nb::handle pre,
                           nb::handle signs, nb::handle dh, nb::handle dx, nb::handle dw1, nb::handle db1,
                           nb::handle dw2, nb::handle db2, int act);

}  // namespace ingot::python
