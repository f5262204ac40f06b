#include "training.h"

#include "ingot/core/check.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/muon/muon.h"
#include "tensors.h"

namespace ingot::python {

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
  unlocked([&] { muon(m, stream); });
}

void run_linear_cross_entropy(nb::handle x, nb::handle w, nb::handle x2, nb::handle w2, nb::handle targets,
                              nb::handle loss, nb::handle dloss, nb::handle dx, nb::handle dw, nb::handle dw2,
                              double softcap, double z_loss, int ignore_index, double label_smoothing) {
  const char* op = "linear_cross_entropy";
  LinearCrossEntropy a{.x = floats(op, "x", matrix(op, "x", x)),
                       .w = matrix(op, "weight", w),
                       .x2 = matrix(op, "x2", x2),
                       .w2 = matrix(op, "w2", w2),
                       .targets = vector(op, "target", targets),
                       .loss = vector(op, "loss", loss),
                       .dloss = vector(op, "dloss", dloss),
                       .dx = matrix(op, "dx", dx),
                       .dw = matrix(op, "dw", dw),
                       .dw2 = matrix(op, "dw2", dw2),
                       .softcap = softcap,
                       .z_loss = z_loss,
                       .ignore_index = ignore_index,
                       .label_smoothing = label_smoothing};
  nb::object workspace;
  if (const int64_t bytes =
          linear_cross_entropy_workspace_bytes(a.x.rows(), a.x.cols(), a.w.rows(), a.x.dtype, a.products, a.x.device))
    workspace = empty_vector(x, a.x.device, DType::u8, bytes, a.workspace);
  const Stream stream = stream_of(a.x);
  unlocked([&] { linear_cross_entropy(a, stream); });
}

namespace {
// Room for products on a GPU, from torch's allocator.
nb::object product_workspace(nb::handle like, Device device, Tensor& view) {
  const int64_t bytes = linear_workspace_bytes(device);
  return bytes ? empty_vector(like, device, DType::u8, bytes, view) : nb::object();
}
}  // namespace

void run_wide_mlp(nb::handle x, nb::handle w1, nb::handle b1, nb::handle w2, nb::handle b2, nb::handle h,
                  nb::handle pre, nb::handle signs, nb::handle y, int act) {
  const char* op = "wide_mlp";
  Linear first{.x = floats(op, "x", matrix(op, "x", x)),
               .w = matrix(op, "w1", w1),
               .b = vector(op, "b1", b1),
               .y = matrix(op, "h", h),
               .pre = matrix(op, "pre", pre),
               .signs = vector(op, "signs", signs),
               .act = Act(act)};
  Linear second{.x = first.y, .w = matrix(op, "w2", w2), .b = vector(op, "b2", b2), .y = matrix(op, "y", y)};
  const nb::object memory = product_workspace(x, first.x.device, first.workspace);
  second.workspace = first.workspace;
  const Stream stream = stream_of(first.x);
  unlocked([&] {
    linear(first, stream);
    linear(second, stream);
  });
}

void run_wide_mlp_backward(nb::handle dy, nb::handle x, nb::handle w1, nb::handle w2, nb::handle h, nb::handle pre,
                           nb::handle signs, nb::handle dh, nb::handle dx, nb::handle dw1, nb::handle db1,
                           nb::handle dw2, nb::handle db2, int act) {
  const char* op = "wide_mlp_backward";
  LinearBackward second{.dy = matrix(op, "dy", dy),
                        .x = floats(op, "h", matrix(op, "h", h)),
                        .w = matrix(op, "w2", w2),
                        .dx = matrix(op, "dh", dh),
                        .dw = matrix(op, "dw2", dw2),
                        .db = vector(op, "db2", db2),
                        .pre = matrix(op, "pre", pre),
                        .signs = vector(op, "signs", signs),
                        .act = Act(act)};
  second.form_x = bool(second.pre);
  LinearBackward first{.dy = second.dx,
                       .x = matrix(op, "x", x),
                       .w = matrix(op, "w1", w1),
                       .dx = matrix(op, "dx", dx),
                       .dw = matrix(op, "dw1", dw1),
                       .db = vector(op, "db1", db1)};
  const nb::object memory = product_workspace(dy, second.dy.device, second.workspace);
  first.workspace = second.workspace;
  const Stream stream = stream_of(second.dy);
  unlocked([&] {
    linear_backward(second, stream);
    if (first.dy) linear_backward(first, stream);
  });
}

}  // namespace ingot::python
