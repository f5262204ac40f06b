// The declared ops: a new op is an include and a list here, and a file in ../ingot/ops.
#include "declare.h"
#include "gate_arguments.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/expert_linear/expert_linear.h"
#include "ingot/kernels/muon/muon.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/scaled_add/scaled_add.h"
#include "mlp_arguments.h"
#include "norm_arguments.h"

namespace ingot::python {

void declare_ops(nb::module_& m) {
  int last_activation = -1;
  for_each_activation([&](auto) { ++last_activation; });
  declare(m, "activation", Native<Activate>{"ACTIVATION", INGOT_BUILT(ACTIVATION, &activate)}, rows("x", &Activate::x),
          rows("y", &Activate::y), choice("name", &Activate::act, last_activation));
  using DActivate = ActivateBackward;
  declare(m, "activation_backward", Native<DActivate>{"ACTIVATION", INGOT_BUILT(ACTIVATION, &activate_backward)},
          rows("dy", &DActivate::dy), rows("x", &DActivate::x), rows("dx", &DActivate::dx),
          choice("name", &DActivate::act, last_activation));

  declare(m, "rms_norm", Native<RmsNorm>{"RMSNORM", INGOT_BUILT(RMSNORM, &rmsnorm), nullptr, &complete},
          split_rows("x", &RmsNorm::x), numbers("weight", &RmsNorm::w), split_rows("residual", &RmsNorm::residual),
          split_rows("sum", &RmsNorm::sum), split_rows("y", &RmsNorm::y), numbers("rstd", &RmsNorm::rstd),
          option("eps", &RmsNorm::eps), option("unit_offset", &RmsNorm::unit_offset));
  using DNorm = RmsNormBackward;
  declare(m, "rms_norm_backward",
          Native<DNorm>{"RMSNORM", INGOT_BUILT(RMSNORM, &rmsnorm_backward),
                        INGOT_BUILT(
                            RMSNORM,
                            +[](const DNorm& a) -> int64_t {
                              if (!a.dw) return 0;
                              return rmsnorm_backward_workspace_bytes(a.s.rows(), a.s.cols(), a.s.dtype, a.s.device);
                            }),
                        &complete},
          split_rows("dy", &DNorm::dy), split_rows("s", &DNorm::s), numbers("weight", &DNorm::w),
          numbers("rstd", &DNorm::rstd), split_rows("dsum", &DNorm::dsum), split_rows("dx", &DNorm::dx),
          numbers("dw", &DNorm::dw), option("eps", &DNorm::eps), option("unit_offset", &DNorm::unit_offset));

  using Gate = GateCall;
  declare(m, "swiglu_gate",
          Native<Gate>{"SWIGLU",
                       INGOT_BUILT(
                           SWIGLU, +[](const Gate& a, Stream s) { swiglu_gate(a, s); }),
                       nullptr, &complete},
          rows("packed", &Gate::gate), rows("up", &Gate::up), rows("h", &Gate::h), option("order", &Gate::order),
          option("limit", &Gate::limit), option("alpha", &Gate::alpha), option("up_offset", &Gate::up_offset),
          option("cubic", &Gate::cubic));
  using DGate = GateBackwardCall;
  declare(m, "swiglu_gate_backward",
          Native<DGate>{"SWIGLU",
                        INGOT_BUILT(
                            SWIGLU, +[](const DGate& a, Stream s) { swiglu_gate_backward(a, s); }),
                        nullptr, &complete},
          rows("dh", &DGate::dh), rows("packed", &DGate::gate), rows("up", &DGate::up), rows("dpacked", &DGate::dgate),
          rows("dup", &DGate::dup), rows("h", &DGate::h), option("order", &DGate::order),
          option("limit", &DGate::limit), option("alpha", &DGate::alpha), option("up_offset", &DGate::up_offset),
          option("cubic", &DGate::cubic));
  using Gated = GatedLinearCall;
  declare(m, "gated_linear",
          Native<Gated>{"SWIGLU",
                        INGOT_BUILT(
                            SWIGLU, +[](const Gated& a, Stream s) { gated_linear(a, s); }),
                        INGOT_BUILT(
                            SWIGLU, +[](const Gated& a) { return gated_linear_workspace_bytes(a); }),
                        &complete},
          rows("x", &Gated::x), rows("w", &Gated::w_gate), rows("up", &Gated::w_up), numbers("bias", &Gated::b_gate),
          numbers("up_bias", &Gated::b_up), rows("h", &Gated::h), rows("kept", &Gated::gate),
          option("order", &Gated::order), option("columns", &Gated::transposed), option("limit", &Gated::limit),
          option("alpha", &Gated::alpha), option("up_offset", &Gated::up_offset), option("cubic", &Gated::cubic));
  using DGated = GatedLinearBackwardCall;
  declare(m, "gated_linear_backward",
          Native<DGated>{"SWIGLU",
                         INGOT_BUILT(
                             SWIGLU, +[](const DGated& a, Stream s) { gated_linear_backward(a, s); }),
                         INGOT_BUILT(
                             SWIGLU, +[](const DGated& a) { return gated_linear_backward_workspace_bytes(a); }),
                         &complete},
          rows("dkept", &DGated::gate), rows("x", &DGated::x), rows("w", &DGated::w_gate), rows("up", &DGated::w_up),
          rows("dx", &DGated::dx), rows("dw", &DGated::dw_gate), rows("dw_up", &DGated::dw_up),
          numbers("db", &DGated::db_gate), numbers("db_up", &DGated::db_up), option("order", &DGated::order),
          option("columns", &DGated::transposed));

  using DMlp = MlpBackwardCall;
  declare(m, "mlp_backward",
          Native<DMlp>{"MLP",
                       INGOT_BUILT(
                           MLP, +[](const DMlp& a, Stream s) { mlp_backward(a, s); }),
                       INGOT_BUILT(
                           MLP, +[](const DMlp& a) { return mlp_backward_workspace_bytes(a); }),
                       &complete},
          rows("dy", &DMlp::dy), rows("x", &DMlp::x), rows("dx", &DMlp::dx), object(&DMlp::parameters),
          numbers("gradients", &DMlp::gradients), object(&DMlp::wanted), option("bias", &DMlp::bias),
          option("weight_norm", &DMlp::weight_norm), choice("act", &DMlp::act, last_activation),
          option("activate_last", &DMlp::activate_last), numbers("saved", &DMlp::saved));
  using Wide = WideMlpCall;
  declare(m, "wide_mlp",
          Native<Wide>{"LINEAR", INGOT_BUILT(LINEAR, &run_wide_mlp),
                       INGOT_BUILT(
                           LINEAR, +[](const Wide& a) { return linear_workspace_bytes(a.x.device); })},
          rows("x", &Wide::x), rows("w1", &Wide::w1), numbers("b1", &Wide::b1), rows("w2", &Wide::w2),
          numbers("b2", &Wide::b2), rows("h", &Wide::h), rows("pre", &Wide::pre), numbers("signs", &Wide::signs),
          rows("y", &Wide::y), choice("act", &Wide::act, last_activation));
  using DWide = WideMlpBackwardCall;
  declare(m, "wide_mlp_backward",
          Native<DWide>{"LINEAR", INGOT_BUILT(LINEAR, &run_wide_mlp_backward),
                        INGOT_BUILT(
                            LINEAR, +[](const DWide& a) { return linear_workspace_bytes(a.dy.device); })},
          rows("dy", &DWide::dy), rows("x", &DWide::x), rows("w1", &DWide::w1), rows("w2", &DWide::w2),
          rows("h", &DWide::h), rows("pre", &DWide::pre), numbers("signs", &DWide::signs), rows("dh", &DWide::dh),
          rows("dx", &DWide::dx), rows("dw1", &DWide::dw1), numbers("db1", &DWide::db1), rows("dw2", &DWide::dw2),
          numbers("db2", &DWide::db2), choice("act", &DWide::act, last_activation));

  declare(m, "rope", Native<Rope>{"ROPE", INGOT_BUILT(ROPE, &rope)}, heads("x", &Rope::x), heads("y", &Rope::y),
          numbers("positions", &Rope::positions), rows("cos", &Rope::cos), rows("sin", &Rope::sin),
          option("interleaved", &Rope::interleaved), option("sign", &Rope::sign));
  declare(m, "qk_norm_rope", Native<QkNormRope>{"ROPE", INGOT_BUILT(ROPE, &qk_norm_rope)}, heads("x", &QkNormRope::x),
          heads("y", &QkNormRope::y), numbers("positions", &QkNormRope::positions), rows("cos", &QkNormRope::cos),
          rows("sin", &QkNormRope::sin), numbers("gain", &QkNormRope::gain), option("eps", &QkNormRope::eps),
          option("interleaved", &QkNormRope::interleaved), option("sign", &QkNormRope::sign));
  using DNormRope = QkNormRopeBackward;
  declare(m, "qk_norm_rope_backward",
          Native<DNormRope>{"ROPE", INGOT_BUILT(ROPE, &qk_norm_rope_backward),
                            INGOT_BUILT(
                                ROPE,
                                +[](const DNormRope& a) -> int64_t {
                                  if (!a.dgain) return 0;
                                  return qk_norm_rope_backward_workspace_bytes(a.x.size(0), a.x.size(1), a.x.device);
                                })},
          heads("x", &DNormRope::x), heads("dy", &DNormRope::dy), heads("dx", &DNormRope::dx),
          numbers("positions", &DNormRope::positions), rows("cos", &DNormRope::cos), rows("sin", &DNormRope::sin),
          numbers("gain", &DNormRope::gain), numbers("dgain", &DNormRope::dgain), option("eps", &DNormRope::eps),
          option("interleaved", &DNormRope::interleaved), option("sign", &DNormRope::sign));

  declare(m, "attention", Native<Attention>{"ATTENTION", INGOT_BUILT(ATTENTION, &attention)}, heads("q", &Attention::q),
          heads("k", &Attention::k), heads("v", &Attention::v), numbers("cu_seqlens_q", &Attention::cu_q),
          numbers("cu_seqlens_k", &Attention::cu_k), numbers("sinks", &Attention::sinks), heads("out", &Attention::out),
          rows("lse", &Attention::lse), option("scale", &Attention::scale), option("softcap", &Attention::softcap),
          option("window", &Attention::window), option("causal", &Attention::causal));
  using DAttention = AttentionBackward;
  declare(m, "attention_backward",
          Native<DAttention>{"ATTENTION", INGOT_BUILT(ATTENTION, &attention_backward),
                             INGOT_BUILT(ATTENTION, &attention_backward_workspace_bytes)},
          heads("dout", &DAttention::dout), heads("q", &DAttention::q), heads("k", &DAttention::k),
          heads("v", &DAttention::v), numbers("cu_seqlens_q", &DAttention::cu_q),
          numbers("cu_seqlens_k", &DAttention::cu_k), numbers("sinks", &DAttention::sinks),
          heads("out", &DAttention::out), rows("lse", &DAttention::lse), rows("dlse", &DAttention::dlse),
          heads("dq", &DAttention::dq), heads("dk", &DAttention::dk), heads("dv", &DAttention::dv),
          numbers("dsinks", &DAttention::dsinks), option("scale", &DAttention::scale),
          option("softcap", &DAttention::softcap), option("window", &DAttention::window),
          option("causal", &DAttention::causal), option("deterministic", &DAttention::deterministic),
          option("regular", &DAttention::regular));

  // dw and db accumulate, or are set.
  declare(m, "grouped_linear", Native<ExpertLinear>{"EXPERT_LINEAR", INGOT_BUILT(EXPERT_LINEAR, &expert_linear)},
          rows("x", &ExpertLinear::x), bank("weight", &ExpertLinear::w), rows("bias", &ExpertLinear::b),
          numbers("offsets", &ExpertLinear::offsets), rows("y", &ExpertLinear::y));
  using DExperts = ExpertLinearBackward;
  declare(m, "grouped_linear_backward",
          Native<DExperts>{"EXPERT_LINEAR", INGOT_BUILT(EXPERT_LINEAR, &expert_linear_backward)},
          rows("dy", &DExperts::dy), rows("x", &DExperts::x), bank("weight", &DExperts::w),
          numbers("offsets", &DExperts::offsets), rows("dx", &DExperts::dx), bank("dw", &DExperts::dw),
          rows("db", &DExperts::db), option("overwrite", &DExperts::overwrite));

  // A step of Muon on a bank. rates: (lr, momentum, weight decay) as three fp64 numbers on the bank's device, or None.
  declare(m, "muon",
          Native<Muon>{"MUON", INGOT_BUILT(MUON, &muon),
                       INGOT_BUILT(
                           MUON,
                           +[](const Muon& a) -> int64_t {
                             const Tensor& p = a.p;
                             if (p.numel() == 0) return 0;
                             return muon_workspace_bytes(p.size(0), p.size(1), p.size(2), p.dtype, p.device);
                           })},
          bank("p", &Muon::p), bank("g", &Muon::g), bank("momentum", &Muon::momentum), numbers("rates", &Muon::rates),
          option("lr", &Muon::lr), option("mu", &Muon::mu), option("weight_decay", &Muon::weight_decay),
          option("grad_scale", &Muon::grad_scale), option("nesterov", &Muon::nesterov),
          option("row_normalise", &Muon::row_normalise), option("steps", &Muon::steps), option("a", &Muon::a),
          option("b", &Muon::b), option("c", &Muon::c), choice("products", &Muon::products, int(Products::tf32)));

  // x2 and w2: a second pair whose product is added, or None. dw and dw2 accumulate.
  using Loss = LinearCrossEntropy;
  declare(m, "linear_cross_entropy",
          Native<Loss>{"CROSS_ENTROPY", INGOT_BUILT(CROSS_ENTROPY, &linear_cross_entropy),
                       INGOT_BUILT(
                           CROSS_ENTROPY,
                           +[](const Loss& a) {
                             return linear_cross_entropy_workspace_bytes(a.x.rows(), a.x.cols(), a.w.rows(), a.x.dtype,
                                                                         a.products, a.x.device);
                           })},
          rows("x", &Loss::x), rows("weight", &Loss::w), rows("x2", &Loss::x2), rows("w2", &Loss::w2),
          numbers("target", &Loss::targets), numbers("loss", &Loss::loss), numbers("dloss", &Loss::dloss),
          rows("dx", &Loss::dx), rows("dw", &Loss::dw), rows("dw2", &Loss::dw2), option("softcap", &Loss::softcap),
          option("z_loss", &Loss::z_loss), option("ignore_index", &Loss::ignore_index),
          option("label_smoothing", &Loss::label_smoothing));

  using DScaledAdd = ScaledAddBackward;
  declare(m, "scaled_add_backward", Native<DScaledAdd>{"SCALED_ADD", INGOT_BUILT(SCALED_ADD, &scaled_add_backward)},
          rows("dy", &DScaledAdd::dy), numbers("scale", &DScaledAdd::scale), rows("dbranch", &DScaledAdd::dbranch));
}

}  // namespace ingot::python
