#pragma once
// A module's whole call in a single step. Each function returns None where the call must go through the dispatcher
// (route() returns kDispatch).
#include <nanobind/nanobind.h>

namespace ingot::python {

namespace nb = nanobind;

// Returns y. If eps is None, it is the machine epsilon of the dtype of sums.
nb::object rms_norm_call(nb::handle x, nb::handle w, nb::handle eps, nb::handle unit_offset);
nb::object rms_norm_of_module(nb::handle x, nb::handle attributes);  // an RMSNorm's __dict__
// autograd.Function.forward; eps and unit_offset are rms_norm_call's.
nb::object rms_norm_forward(nb::handle ctx, nb::handle x, nb::handle w);

// Returns y. `parameters` are in the order of layers_of() (mlp_arguments.h); mlp_of_module takes the parameters of the
// layers in a FusedMLP's
// __dict__. `options` are MlpFlags and the number of the activation. mlp_of_module also returns None under autocast and
// for a parametrised module.
enum MlpFlags : int { kBias = 1 << 8, kWeightNorm = 1 << 9, kActivateLast = 1 << 10, kSave = 1 << 11 };
nb::object mlp_call(nb::handle x, nb::sequence parameters, nb::handle options);
// Returns (y, saved or None), for the operator and the Python functions. Returns None if the caller has to make
// operands contiguous and aligned first.
nb::object mlp_dense(nb::handle x, nb::sequence parameters, nb::handle options, bool save);
nb::object mlp_of_module(nb::handle x, nb::handle attributes);
nb::object mlp_forward(nb::args context_x_and_parameters);
// called where mlp_of_module has found an Edge
nb::object mlp_edge_forward(nb::handle ctx, nb::handle x, nb::handle edge);

// The __call__ of either module. It also returns None if nn.Module.__call__ does more than call forward.
nb::object module_call(nb::handle self, nb::handle positional, nb::handle named);

// Makes the class type(name, bases, own), whose attributes in `own` are found by a fast lookup (see _op.eager). The
// class must not change afterwards.
nb::object quick_class(nb::handle name, nb::handle bases, nb::dict own);

// Sets the Python functions for these calls, once: autograd.Function.apply, and the functions for operands without
// dense layout.
void attach_calls(nb::handle rms_norm_apply, nb::handle rms_norm_run, nb::handle rms_norm_save, nb::handle mlp_apply,
                  nb::handle mlp_edge_apply, nb::handle mlp_run);
// The modules' forward, as defined by their classes.
void attach_modules(nb::handle rms_norm_forward, nb::handle mlp_forward);

}  // namespace ingot::python
