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

}  // namespace ingot::python
