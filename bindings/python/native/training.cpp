#include "training.h"

#include "ingot/core/check.h"
#include "ingot/kernels/linear/linear.h"
#include "tensors.h"

namespace ingot::python {

namespace {
// The workspace for products on a GPU, from torch's allocator.
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
