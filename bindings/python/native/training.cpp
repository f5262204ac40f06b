#include "training.h"

#include "ingot/core/check.h"
#include "ingot/kernels/muon/muon.h"
#include "tensors.h"

namespace ingot::python {
namespace {

// Without the interpreter lock, as in ops.cpp.
template <class Op> void run(Op&& op) {
  nb::gil_scoped_release unlocked;
  op();
}

}  // namespace

void run_muon(nb::handle p, nb::handle g, nb::handle momentum, nb::handle rates, double lr, double mu,
              double weight_decay, double grad_scale, bool nesterov, bool row_normalise, int steps, double a, double b,
              double c, int products) {
  const char* op = "muon";
  INGOT_CHECK(products >= 0 && products <= int(Products::tf32), op, ": products: found ", products,
              ", expected 0 to 2");
  Muon m{.p = floats(op, "p", bank(op, "p", p)),
         .g = bank(op, "g", g),
         .momentum = bank(op, "momentum", momentum),
         .lr = lr,
         .mu = mu,
         .weight_decay = weight_decay,
         .grad_scale = grad_scale,
         .rates = vector(op, "rates", rates),
         .nesterov = nesterov,
         .row_normalise = row_normalise,
         .steps = steps,
         .a = a,
         .b = b,
         .c = c,
         .products = Products(products)};
  nb::object workspace;
  if (m.p.numel() > 0)
    if (const int64_t bytes = muon_workspace_bytes(m.p.size(0), m.p.size(1), m.p.size(2), m.p.dtype, m.p.device))
      workspace = empty_vector(p, m.p.device, DType::u8, bytes, m.workspace);
  const Stream stream = stream_of(m.p);
  run([&] { muon(m, stream); });
}

}  // namespace ingot::python
