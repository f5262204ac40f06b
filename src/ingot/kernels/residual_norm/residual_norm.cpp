#include "ingot/kernels/residual_norm/residual_norm.h"

#include "ingot/core/check.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/mix/mix.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/scaled_add/scaled_add.h"

namespace ingot {

namespace cuda {
// Whether a single kernel computes the whole operation; all further cases call the separate operations.
bool residual_norm(const ResidualNorm& r, Stream stream);
bool residual_norm_backward(const ResidualNormBackward& r, Stream stream);
}  // namespace cuda

namespace {
void check(const char* op, const Tensor& t, const Tensor& like, const char* name) {
  INGOT_CHECK(t.shape == like.shape && t.dtype == like.dtype && t.device == like.device && t.rank() == 2, op, ": ",
              name, ": found ", t.shape, " of ", t.dtype, " on ", t.device, ", expected ", like.shape, " of ",
              like.dtype, " on ", like.device);
}
void check_all(const char* op, const Tensor& like, std::initializer_list<std::pair<const char*, const Tensor*>> all) {
  for (const auto& [name, t] : all)
    if (*t) check(op, *t, like, name);
}
}  // namespace

void residual_norm(const ResidualNorm& r, Stream stream) {
  check_all("residual_norm", r.y,
            {{"x", &r.x}, {"branch", &r.branch}, {"sum", &r.sum}, {"x0", &r.x0}, {"mixed", &r.mixed}});
  INGOT_CHECK(bool(r.x) && bool(r.branch) == bool(r.sum) && bool(r.x0) == bool(r.mixed),
              "residual_norm: found a branch without sum, or x0 without mixed, expected both or neither");
  if constexpr (INGOT_HAS_CUDA(RESIDUAL_NORM))
    if (r.x.device.kind == Device::cuda && cuda::residual_norm(r, stream)) return;
  Tensor rows = r.x;
  if (r.branch) scaled_add({.x = rows, .branch = r.branch, .scale = r.scale, .y = r.sum}, stream), rows = r.sum;
  if (r.x0) mix({.x = rows, .x0 = r.x0, .a = r.a, .b = r.b, .y = r.mixed}, stream), rows = r.mixed;
  rmsnorm({.x = rows, .w = r.w, .y = r.y, .rstd = r.rstd, .eps = r.eps, .scale = r.norm_scale}, stream);
}

void residual_norm_backward(const ResidualNormBackward& r, Stream stream) {
  check_all("residual_norm_backward", r.dy,
            {{"m", &r.m},
             {"dsum", &r.dsum},
             {"x", &r.x},
             {"x0", &r.x0},
             {"dx0", &r.dx0},
             {"dx", &r.dx},
             {"more", &r.more},
             {"spare", &r.spare},
             {"branch", &r.branch},
             {"dbranch", &r.dbranch}});
  INGOT_CHECK(bool(r.dx) && bool(r.x) == bool(r.x0) && bool(r.dx0) == bool(r.x0) && bool(r.branch) == bool(r.dbranch),
              "residual_norm_backward: found rows without their gradients, expected both or neither");
  const bool in_place = r.more && r.more.data == r.dx.data;
  INGOT_CHECK(!r.more || (!r.branch && (!in_place || r.spare)),
              "residual_norm_backward: found more with a branch, or in dx without spare memory");
  if constexpr (INGOT_HAS_CUDA(RESIDUAL_NORM))
    if (r.dy.device.kind == Device::cuda && cuda::residual_norm_backward(r, stream)) return;
  if (r.more) {
    ResidualNormBackward without = r;
    without.more = Tensor(), without.dx = in_place ? r.spare : r.dx;
    residual_norm_backward(without, stream);
    return axpby({.x = in_place ? r.spare : r.more, .y = r.dx}, stream);
  }
  rmsnorm_backward({.dy = r.dy,
                    .s = r.m,
                    .w = r.w,
                    .rstd = r.rstd,
                    .dsum = r.dsum,
                    .dx = r.dx,
                    .dw = r.dw,
                    .workspace = r.norm_workspace,
                    .eps = r.eps,
                    .scale = r.norm_scale},
                   stream);
  if (r.a && !r.x0) scaled_add_backward({.dy = r.dx, .scale = r.a, .dbranch = r.dx}, stream);
  if (r.x0)
    mix_backward({.x = r.x,
                  .x0 = r.x0,
                  .a = r.a,
                  .b = r.b,
                  .dy = r.dx,
                  .dx = r.dx,
                  .dx0 = r.dx0,
                  .da = r.da,
                  .db = r.db,
                  .workspace = r.workspace},
                 stream);
  if (r.branch)
    scaled_add_backward({.dy = r.dx,
                         .branch = r.branch,
                         .scale = r.scale,
                         .dbranch = r.dbranch,
                         .dscale = r.dscale,
                         .workspace = r.workspace},
                        stream);
}

}  // namespace ingot
