#pragma once
// Models that are opened by path and answer: ingot.engine.
#include <nanobind/nanobind.h>

namespace ingot::python {

void define_engine(nanobind::module_& m);

}  // namespace ingot::python
