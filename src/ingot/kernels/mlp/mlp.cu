#include "ingot/gpu/generation.h"
#include "ingot/kernels/mlp/parts/backward_plan.h"
#include "ingot/kernels/mlp/parts/formed_weights.h"

namespace ingot::cuda {
namespace {

// Up to this number of rows the few-rows forms are faster. Saving costs the forward form for many rows more.
constexpr int64_t kFewRows = 2048, kFewRowsSaved = 4096, kFewRowsBackward = 8192;
constexpr int64_t kFewRowsBackwardTo256 = 2048, kFewRowsBackwardTo512 = 4096;
// From this number of rows on the forms for many rows are as fast as the portable form or faster: where no layer is
// wider than 128; and where slopes are computed from x.
constexpr int64_t kStreamedBackwardRowsTo128 = 4096, kFormedSlopesRows = 1536;

// 64 to each pair of SMs: 4,224 on an H100 or H200.
int64_t few_rows_to_512(const gpu::Limits& limits) { return 64 * (limits.sms / 2); }

int64_t fewest_backward_rows(const MlpBackward& m) {
  if (mlp_widest(m) <= kMlpTo128) return kStreamedBackwardRowsTo128;
  if (mlp_has_norms(m.layers)) return 1;  // with weight norm, every block of the portable form computes the scales
  return !m.saved && mlp_backward_values(m) > 0 && !slope_follows_from_value(m.act) ? kFormedSlopesRows : 1;
}
// Beyond 128 columns the form for few rows is the fastest up to this number of rows (docs/mlp-kernels.md).
bool takes_few_rows_to_512(const MlpBackward& m) {
  const int64_t most = mlp_widest(m) <= kMlpTo256 ? kFewRowsBackwardTo256 : kFewRowsBackwardTo512;
  return m.x.rows() <= most && mlp_widest(m) > kMlpTo128 && mlp_takes(m, MlpForm::to_512_few_rows);
}

[[noreturn]] void no_such_form(const char* op, MlpForm form) {
  fail(ErrorCode::unsupported, op, ": found form ", int(form), ", expected one that takes these operands");
}

}  // namespace

bool mlp_takes(const Mlp& m, MlpForm form) {
  switch (form) {
    case MlpForm::portable: return true;
    case MlpForm::to_128_few_rows: return mlp_to_128_few_rows_takes(m);
    case MlpForm::to_128: return mlp_to_128_takes(m);
    case MlpForm::to_256: return mlp_to_256_takes(m);
    case MlpForm::to_512: return mlp_to_512_takes(m);
    case MlpForm::to_512_few_rows: return mlp_to_512_few_rows_takes(m);
    default: return false;
  }
}
bool mlp_takes(const MlpBackward& m, MlpForm form) {
  switch (form) {
    case MlpForm::portable: return true;
    case MlpForm::to_128_few_rows: return mlp_backward_to_128_few_rows_takes(m);
    case MlpForm::to_128: return mlp_backward_to_128_takes(m);
    case MlpForm::to_256: return mlp_backward_to_256_takes(m);
    case MlpForm::to_512: return mlp_backward_to_512_takes(m);
    case MlpForm::to_512_few_rows: return mlp_backward_to_512_few_rows_takes(m);
    default: return false;
  }
}

// All further forms contain instructions of sm_90a; every older or newer GPU runs the portable form from its PTX.
MlpForm pick_mlp_form(const Mlp& m, const gpu::Limits& limits) {
  gpu::check_generation("mlp", limits);
  if (!limits.hopper) return MlpForm::portable;
  if (m.x.rows() <= (m.saved ? kFewRowsSaved : kFewRows) && mlp_takes(m, MlpForm::to_128_few_rows))
    return MlpForm::to_128_few_rows;
  if (mlp_takes(m, MlpForm::to_128)) return MlpForm::to_128;
  if (mlp_takes(m, MlpForm::to_256)) return MlpForm::to_256;
  if (m.x.rows() <= few_rows_to_512(limits) && mlp_takes(m, MlpForm::to_512_few_rows)) return MlpForm::to_512_few_rows;
  return mlp_takes(m, MlpForm::to_512) ? MlpForm::to_512 : MlpForm::portable;
}
MlpForm pick_mlp_form(const MlpBackward& m, const gpu::Limits& limits) {
  gpu::check_generation("mlp_backward", limits);
  if (!limits.hopper) return MlpForm::portable;
  if (m.x.rows() <= kFewRowsBackward && mlp_takes(m, MlpForm::to_128_few_rows)) return MlpForm::to_128_few_rows;
  if (mlp_takes(m, MlpForm::to_128)) return MlpForm::to_128;
  if (takes_few_rows_to_512(m)) return MlpForm::to_512_few_rows;
  if (m.x.rows() < fewest_backward_rows(m)) return MlpForm::portable;
  if (mlp_takes(m, MlpForm::to_256)) return MlpForm::to_256;
  return mlp_takes(m, MlpForm::to_512) ? MlpForm::to_512 : MlpForm::portable;
}

void mlp_with(const Mlp& m, MlpForm form, Stream stream) {
  switch (form) {
    case MlpForm::portable: return mlp_portable(m, stream);
    case MlpForm::to_128_few_rows: return mlp_to_128_few_rows(m, stream);
    case MlpForm::to_128: return mlp_to_128(m, stream);
    case MlpForm::to_256: return mlp_to_256(m, stream);
    case MlpForm::to_512: return mlp_to_512(m, stream);
    case MlpForm::to_512_few_rows: return mlp_to_512_few_rows(m, stream);
    default: no_such_form("mlp", form);
  }
}
void mlp_backward_with(const MlpBackward& m, MlpForm form, Stream stream) {
  switch (form) {
    case MlpForm::portable: return mlp_backward_portable(m, stream);
    case MlpForm::to_128_few_rows: return mlp_backward_to_128_few_rows(m, stream);
    case MlpForm::to_128: return mlp_backward_to_128(m, stream);
    case MlpForm::to_256: return mlp_backward_to_256(m, stream);
    case MlpForm::to_512: return mlp_backward_to_512(m, stream);
    case MlpForm::to_512_few_rows: return mlp_backward_to_512_few_rows(m, stream);
    default: no_such_form("mlp_backward", form);
  }
}
int64_t mlp_backward_workspace_bytes_with(const MlpBackward& m, MlpForm form) {
  switch (form) {
    case MlpForm::portable: return mlp_backward_portable_workspace_bytes(m);
    case MlpForm::to_128_few_rows: return mlp_backward_to_128_few_rows_workspace_bytes(m);
    case MlpForm::to_128: return mlp_backward_to_128_workspace_bytes(m);
    case MlpForm::to_256: return mlp_backward_to_256_workspace_bytes(m);
    case MlpForm::to_512: return mlp_backward_to_512_workspace_bytes(m);
    case MlpForm::to_512_few_rows: return mlp_backward_to_512_few_rows_workspace_bytes(m);
    default: no_such_form("mlp_backward", form);
  }
}

void mlp(const Mlp& m, Stream stream) {
  if (m.x.rows() > 0) mlp_with(m, pick_mlp_form(m, gpu::limits(m.x.device.index)), stream);
}
void mlp_backward(const MlpBackward& m, Stream stream) {
  if (m.x.rows() > 0) mlp_backward_with(m, pick_mlp_form(m, gpu::limits(m.x.device.index)), stream);
}
int64_t mlp_workspace_bytes(const Mlp& m) {
  // The portable form and the forms to 128 compute a weight-normalised W inside their blocks, without a workspace.
  const bool is_portable = m.x.dtype == DType::f32 || mlp_widest(m) <= kMlpTo128;
  return is_portable ? 0 : mlp_formed_weights_bytes(m.layers);
}
int64_t mlp_backward_workspace_bytes(const MlpBackward& m) {
  return mlp_backward_workspace_bytes_with(m, pick_mlp_form(m, gpu::limits(m.x.device.index)));
}

}  // namespace ingot::cuda
