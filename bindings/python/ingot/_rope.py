"""Rotary embeddings, alone and with the norm of queries and keys: operators (see _op)."""
import torch

from . import _C, _plain
from ._second_order import gradients, with_formula
from ._op import dense, empty_rows, fake_rows, register, sum_dtype


def _empty_tables(positions, dim, *options):
    *_, dtype = options
    return tuple(torch.empty(positions, dim // 2, dtype=dtype, device="cpu") for _ in range(2))


def _run_rope_table(positions, dim, *options):
    cos, sin = _empty_tables(positions, dim, *options)
    _C.rope_table(cos, sin, *options[:-1])
    return cos, sin


rope_table_op = register(  # (cos, sin) on the host
    "rope_table(SymInt positions, SymInt dim, float base, str scaling, float factor, float original_context, float beta_fast, float beta_slow, "
    "bool truncate, float attention_factor, ScalarType dtype) -> (Tensor, Tensor)", _run_rope_table, _empty_tables, keys=("CompositeExplicitAutograd",))


def _as_heads(t):
    """(..., H, D) with tokens one stride apart; the stride between heads is arbitrary."""
    if t.is_contiguous():
        return t
    if t.dim() < 3 or t.stride(-1) != 1:
        return t.contiguous()
    stride = None
    for n, s in zip(t.shape[:-2], t.stride()[:-2]):
        if n == 1:
            continue
        if s == 0 or (stride is not None and stride != n * s):
            return t.contiguous()
        stride = s
    return t if t.stride(-2) != 0 or t.shape[-2] == 1 else t.contiguous()


def run_rope(x, positions, cos, sin, interleaved, sign):
    x = _as_heads(x)
    y = empty_rows(x)
    _C.rope(x, y, dense(positions), dense(cos), dense(sin), interleaved, sign)
    return y


def run_rope_(x, positions, cos, sin, interleaved, sign):
    if _as_heads(x) is not x:
        raise ValueError(f"rope_: x: found strides {x.stride()} for shape {tuple(x.shape)}, expected contiguous heads, tokens one stride apart")
    _C.rope(x, x, dense(positions), dense(cos), dense(sin), interleaved, sign)
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # so that autograd reports an error if it has saved x
    return x


def _setup_rope(ctx, inputs, output):
    _, positions, cos, sin, ctx.interleaved, ctx.sign = inputs
    ctx.save_for_backward(positions, cos, sin)


def _rope_gradients(ctx, dy):
    positions, cos, sin = ctx.saved_tensors  # a rotation's derivative is the rotation by the opposite angle
    return rope_op(dy, positions, cos, sin, ctx.interleaved, -ctx.sign), None, None, None, None, None


rope_op = register(
    "rope(Tensor x, Tensor positions, Tensor cos, Tensor sin, bool interleaved, int sign) -> Tensor",
    run_rope,
    lambda x, positions, cos, sin, interleaved, sign: fake_rows(x),
    _rope_gradients,
    _setup_rope,
)


def run_qk_norm_rope(x, positions, cos, sin, gain, eps, interleaved, sign):
    x = _as_heads(x)
    y = empty_rows(x)
    _C.qk_norm_rope(x, y, dense(positions), dense(cos), dense(sin), dense(gain), eps, interleaved, sign)
    return y


def run_qk_norm_rope_backward(x, dy, positions, cos, sin, gain, eps, interleaved, sign):
    x, dy = _as_heads(x), _as_heads(dy)
    dx = empty_rows(x)
    dgain = None if gain is None else x.new_zeros(x.shape[-2], dtype=sum_dtype(x.dtype))
    _C.qk_norm_rope_backward(x, dy, dx, dense(positions), dense(cos), dense(sin), dense(gain), dgain, eps, interleaved, sign)
    return dx, x.new_empty(0, dtype=sum_dtype(x.dtype)) if dgain is None else dgain


def _qk_norm_rope_backward_formula(x, dy, positions, cos, sin, gain, eps, interleaved, sign):
    return gradients(lambda x, gain: _plain.qk_norm_rope(x, positions, cos, sin, gain, eps, interleaved, sign), (x, gain),
                     (True, gain is not None), (dy,))


qk_norm_rope_backward_op = register(
    "qk_norm_rope_backward(Tensor x, Tensor dy, Tensor? positions, Tensor? cos, Tensor? sin, Tensor? gain, float eps, "
    "bool interleaved, int sign) -> (Tensor, Tensor)",
    run_qk_norm_rope_backward,
    lambda x, dy, positions, cos, sin, gain, eps, interleaved, sign: (
        fake_rows(x),
        x.new_empty(0 if gain is None else x.shape[-2], dtype=sum_dtype(x.dtype)),
    ),
    **with_formula(_qk_norm_rope_backward_formula),
)


def _setup_qk_norm_rope(ctx, inputs, output):
    x, positions, cos, sin, gain, *ctx.options = inputs
    ctx.save_for_backward(x, positions, cos, sin, gain)


def _qk_norm_rope_gradients(ctx, dy):
    x, positions, cos, sin, gain = ctx.saved_tensors
    dx, dgain = qk_norm_rope_backward_op(x, dy, positions, cos, sin, gain, *ctx.options)
    return dx, None, None, None, None if gain is None else dgain.to(gain.dtype), None, None, None


qk_norm_rope_op = register(
    "qk_norm_rope(Tensor x, Tensor? positions, Tensor? cos, Tensor? sin, Tensor? gain, float eps, bool interleaved, int sign) -> Tensor",
    run_qk_norm_rope,
    lambda x, positions, cos, sin, gain, eps, interleaved, sign: fake_rows(x),
    _qk_norm_rope_gradients,
    _setup_qk_norm_rope,
)
