// The module ingot._C: Ingot's operations on torch.Tensor objects whose memory the caller has allocated. Shapes, dtypes
// and devices are checked by the operations themselves; allocation, autograd and registration are in ingot/*.py. Ops
// whose call is a list of arguments stand in declared.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "calls.h"
#include "declare.h"
#include "edge.h"
#include "engine.h"
#include "ingot/core/check.h"
#include "ingot/core/version.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/rope/rope.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ingot::python {
namespace {

// --- rotary embedding ------------------------------------------------------------------------------------------------

void fill_rope_table(nb::handle cos, nb::handle sin, double base, const std::string& scaling, double factor,
                     double original_context, double beta_fast, double beta_slow, bool truncate,
                     double attention_factor) {
  const char* op = "rope_table";
  RopeScaling s{.factor = factor,
                .original_context = original_context,
                .beta_fast = beta_fast,
                .beta_slow = beta_slow,
                .truncate = truncate,
                .attention_factor = attention_factor};
  INGOT_CHECK(scaling == "none" || scaling == "ntk" || scaling == "yarn", op, ": scaling: found ", scaling,
              ", expected none, ntk or yarn");
  s.kind = scaling == "ntk" ? RopeScaling::ntk : scaling == "yarn" ? RopeScaling::yarn : RopeScaling::none;
  const Tensor c = matrix(op, "cos", cos);
  rope_table(rope_frequencies(2 * c.cols(), base, s), c, matrix(op, "sin", sin));
}

// --- activations -----------------------------------------------------------------------------------------------------

std::vector<std::string> activation_names() {
  std::vector<std::string> names;
  for_each_activation([&](auto f) { names.emplace_back(f.name); });
  return names;
}

// --- errors ----------------------------------------------------------------------------------------------------------

// An invalid argument is a ValueError; a file that is not there a FileNotFoundError; a kernel missing in this build or
// machine is a NotImplementedError, a subclass of RuntimeError; every further error is a RuntimeError.
PyObject* exception_type(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::usage: return PyExc_ValueError;
    case ErrorCode::not_found: return PyExc_FileNotFoundError;
    case ErrorCode::unsupported: return PyExc_NotImplementedError;
    default: return PyExc_RuntimeError;
  }
}
void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const Error& e) { PyErr_SetString(exception_type(e.code), e.what()); }
}

bool built_with_cuda() {
#ifdef INGOT_CUDA_BUILD
  return true;
#else
  return false;
#endif
}

// Every argument may be None, which means that the operand is absent.
template <size_t... I, class... Arguments, class Result>
void define(nb::module_& m, const char* name, Result (*f)(Arguments...), std::index_sequence<I...>) {
  m.def(name, f, (void(I), nb::arg().none())...);
}
template <class... Arguments, class Result> void define(nb::module_& m, const char* name, Result (*f)(Arguments...)) {
  define(m, name, f, std::index_sequence_for<Arguments...>{});
}

}  // namespace
}  // namespace ingot::python

NB_MODULE(_C, m) {
  using namespace ingot::python;
  nb::register_exception_translator(translate, nullptr);
  nb::set_leak_warnings(false);  // modules alive at the interpreter's end are no leak
  m.attr("version") = ingot::version();
  m.attr("commit") = ingot::commit();
  m.attr("cuda") = built_with_cuda();
  m.attr("DISPATCH") = int(kDispatch);
  m.attr("PLAIN") = int(kPlain);
  m.attr("DIFFERENTIATE") = int(kDifferentiate);
  m.def("attach", &attach);
  m.def("route", nb::overload_cast<nb::args>(&route));
  m.def("use_ways", &use_ways);
  m.def("has_exchange", &has_exchange);
  m.def("has_symbols", &has_symbols);
  m.def("device_count", &ingot::gpu::device_count);

  m.def("mlp", &mlp_dense);
  define(m, "rms_norm_call", &rms_norm_call);
  define(m, "rms_norm_of_module", &rms_norm_of_module);
  define(m, "rms_norm_forward", &rms_norm_forward);
  m.def("mlp_call", &mlp_call);
  define(m, "mlp_of_module", &mlp_of_module);
  m.def("module_call", &module_call);
  m.def("mlp_forward", &mlp_forward);
  m.def("mlp_edge_forward", &mlp_edge_forward);
  nb::class_<Edge>(m, "Edge").def(nb::init<>()).def("__reduce__", [](nb::handle self) {
    return nb::make_tuple(self.type(), nb::tuple());
  });
  m.def("attach_edges", &attach_edges);
  m.def("forget_edges", &forget_edges);
  m.def("attach_calls", &attach_calls);
  m.def("attach_modules", &attach_modules);
  m.def("quick_class", &quick_class);
  m.attr("BIAS") = int(kBias);
  m.attr("WEIGHT_NORM") = int(kWeightNorm);
  m.attr("ACTIVATE_LAST") = int(kActivateLast);
  m.attr("SAVE") = int(kSave);
  declare_ops(m);
  m.def("rope_table", &fill_rope_table);
  m.def("activation_names", &activation_names);
#ifndef INGOT_WITHOUT_ENGINE
  define_engine(m);
#endif
}
