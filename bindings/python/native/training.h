#pragma once
// Operations of training steps on torch.Tensor objects, as ops.cpp has the others: the caller has allocated everything
// but workspaces.
#include <nanobind/nanobind.h>

namespace ingot::python {

namespace nb = nanobind;

// One step on a bank (B, R, C); rates: (lr, momentum, weight decay) as three of fp64 on the bank's device, or None.
void run_muon(nb::handle p, nb::handle g, nb::handle momentum, nb::handle rates, double lr, double mu,
              double weight_decay, double grad_scale, bool nesterov, bool row_normalise, int steps, double a, double b,
              double c, int products);

// x2 and w2: a second pair whose product is added, or None. dw and dw2 accumulate.
void run_linear_cross_entropy(nb::handle x, nb::handle w, nb::handle x2, nb::handle w2, nb::handle targets,
                              nb::handle loss, nb::handle dloss, nb::handle dx, nb::handle dw, nb::handle dw2,
                              double softcap, double z_loss, int ignore_index, double label_smoothing);

// y = f(x w1^T + b1) w2^T + b2; h: what is between. pre or signs are kept beside it, or neither.
void run_wide_mlp(nb::handle x, nb::handle w1, nb::handle b1, nb::handle w2, nb::handle b2, nb::handle h,
                  nb::handle pre, nb::handle signs, nb::handle y, int act);
// Gradients of parameters accumulate. Beside pre, h is written, beside signs it is read; dh is scratch.
void run_wide_mlp_backward(nb::handle dy, nb::handle x, nb::handle w1, nb::handle w2, nb::handle h, nb::handle pre,
                           nb::handle signs, nb::handle dh, nb::handle dx, nb::handle dw1, nb::handle db1,
                           nb::handle dw2, nb::handle db2, int act);

}  // namespace ingot::python
