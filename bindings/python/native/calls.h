#pragma once
// A module's whole call in one step. Each returns None where only the dispatcher will do (route() says kDispatch).
#include <nanobind/nanobind.h>

namespace ingot::python {

namespace nb = nanobind;

// y. eps None: the epsilon of the type that sums are kept in.
nb::object rms_norm_call(nb::handle x, nb::handle w, nb::handle eps, nb::handle unit_offset);
nb::object rms_norm_of_module(nb::handle x, nb::handle attributes);  // an RMSNorm's __dict__
// autograd.Function.forward; eps and unit_offset are rms_norm_call's.
nb::object rms_norm_forward(nb::handle ctx, nb::handle x, nb::handle w);

// y. `parameters` as ops.cpp has them; of a FusedMLP's __dict__ those of its layers. `options`: MlpFlags and the number
// of the activation. Under autocast mlp_of_module returns None too, and both do of a parametrised module.
enum MlpFlags : int { kBias = 1 << 8, kWeightNorm = 1 << 9, kActivateLast = 1 << 10, kSave = 1 << 11 };
nb::object mlp_call(nb::handle x, nb::sequence parameters, nb::handle options);
// (y, saved or None), for the operator and the Python functions; None where these have to make operands contiguous and
// aligned first.
nb::object mlp_dense(nb::handle x, nb::sequence parameters, nb::handle options, bool save);
nb::object mlp_of_module(nb::handle x, nb::handle attributes);
nb::object mlp_forward(nb::args context_x_and_parameters);
nb::object mlp_edge_forward(nb::handle ctx, nb::handle x, nb::handle edge);  // where mlp_of_module found an Edge

// __call__ of either module; None too where nn.Module.__call__ has more to do than to call forward.
nb::object module_call(nb::handle self, nb::handle positional, nb::handle named);

// type(name, bases, own), a class that finds what it was given at once: see _op.eager. It stays what it is, for good.
nb::object quick_class(nb::handle name, nb::handle bases, nb::dict own);

// Python's side, called once: autograd.Function.apply, and what runs on operands that are not dense.
void attach_calls(nb::handle rms_norm_apply, nb::handle rms_norm_run, nb::handle rms_norm_save, nb::handle mlp_apply,
                  nb::handle mlp_edge_apply, nb::handle mlp_run);
// The modules' forward, as their classes define it.
void attach_modules(nb::handle rms_norm_forward, nb::handle mlp_forward);

}  // namespace ingot::python
