#pragma once
// Models opened by path, for answers: ingot.engine.
#include <nanobind/nanobind.h>

namespace ingot::python {

void define_engine(nanobind::module_& m);

}  // namespace ingot::python
