"""RMSNorm, alone and of a sum: operators and autograd.Functions (see _op)."""
import torch

from . import _C, _plain
from ._kernel import kernel
from ._op import as_rows, default_eps, dense, eager, empty_rows, expect_eps, expect_tensors_or_none, fake_rows, sum_dtype
from ._second_order import gradients, knowing_whether_recorded, with_formula


def expect_vector(x, weight):
    """Refuses a weight of another shape than (C): a weight (1, C), for example, would get a gradient (C)."""
    if isinstance(weight, torch.Tensor) and weight.dim() != 1 and x.dim() > 0:
        raise ValueError(f"rms_norm: weight: found shape {tuple(weight.shape)}, expected {tuple(x.shape[-1:])}")


def _expect(x, weight, eps, _):
    expect_tensors_or_none("rms_norm", x=x, weight=weight)
    expect_vector(x, weight)
    expect_eps("rms_norm", eps)


def run_rms_norm_plain(x, weight, eps, unit_offset):
    _expect(x, weight, eps, unit_offset)
    x = as_rows(x, 2)
    y = empty_rows(x)
    _C.rms_norm(x, dense(weight), None, None, y, None, default_eps(eps, x.dtype), unit_offset)
    return y


def _statistics(x):
    return x.new_empty(x.shape[:-1], dtype=sum_dtype(x.dtype))


def _rms_norm_backward_formula(dy, dsum, s, weight, rstd, eps, unit_offset, need_dx, need_dw):
    eps = default_eps(eps, s.dtype)
    dx, dw = gradients(lambda s, w: _plain.rms_norm(s, w, eps, unit_offset), (s, weight), (need_dx, need_dw), (dy,))
    return dx if dsum is None or dx is None else dx + dsum, dw


_backward = kernel(  # (dx, dweight in the type of sums)
    "rms_norm_backward(Tensor dy, Tensor? dsum, Tensor s, Tensor? weight, Tensor? rstd, float? eps, bool unit_offset, bool need_dx, "
    "bool need_dw) -> (Tensor, Tensor)",
    results=lambda dy, dsum, s, weight, rstd, eps, unit_offset, need_dx, need_dw: (
        fake_rows(s) if need_dx else None, s.new_zeros(s.shape[-1], dtype=sum_dtype(s.dtype)) if need_dw else None),
    call=lambda dy, dsum, s, weight, rstd, eps, unit_offset, need_dx, need_dw, dx, dw:
        _C.rms_norm_backward(dy, s, weight, rstd, dsum, dx, dw, default_eps(eps, s.dtype), unit_offset),
    rows=("dy", "dsum", "s"), strides=2, **with_formula(_rms_norm_backward_formula))
run_rms_norm_backward, rms_norm_backward_op = _backward.run, _backward.operator


def _rms_norm_gradients(ctx, need_dx, need_dw, dy, dsum, drstd, run):
    """Returns (ds, dweight) for a context that holds s, weight, rstd and the options."""
    s, weight, rstd = ctx.saved_tensors
    if drstd is not None:  # rstd is an output of the registered op: d rstd / ds = -rstd^3 s / C
        through = (drstd * rstd.pow(3) / -s.shape[-1]).unsqueeze(-1).to(s.dtype) * s
        dsum = through if dsum is None else dsum + through
    if dy is None:
        return (dsum if need_dx else None), (torch.zeros_like(weight) if need_dw else None)
    dx, dw = run(dy, dsum, s, weight, rstd, ctx.eps, ctx.unit_offset, need_dx, need_dw)
    return (dx if need_dx else None), (dw.to(weight.dtype) if need_dw else None)


def _setup_rms_norm(ctx, inputs, output):
    x, weight, ctx.eps, ctx.unit_offset = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _setup_add_rms_norm(ctx, inputs, output):
    _, _, weight, ctx.eps, ctx.unit_offset = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight, output[2])


def _op_rms_norm_backward(ctx, dy, drstd):
    dx, dw = _rms_norm_gradients(ctx, *ctx.needs_input_grad[:2], dy, None, drstd, rms_norm_backward_op)
    return dx, dw, None, None


def _op_add_rms_norm_backward(ctx, dy, dsum, drstd):
    need = ctx.needs_input_grad
    ds, dw = _rms_norm_gradients(ctx, need[0] or need[1], need[2], dy, dsum, drstd, rms_norm_backward_op)
    return ds if need[0] else None, ds if need[1] else None, dw, None, None


_rms_norm = kernel(  # (y, rstd)
    "rms_norm(Tensor x, Tensor? weight, float? eps, bool unit_offset) -> (Tensor, Tensor)",
    results=lambda x, *_: (fake_rows(x), _statistics(x)),
    call=lambda x, weight, eps, unit_offset, y, rstd: _C.rms_norm(x, weight, None, None, y, rstd, default_eps(eps, x.dtype), unit_offset),
    rows=("x",), strides=2, check=_expect, backward=_op_rms_norm_backward, setup=_setup_rms_norm)
_add_rms_norm = kernel(  # (y, x + residual, rstd)
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float? eps, bool unit_offset) -> (Tensor, Tensor, Tensor)",
    results=lambda x, *_: (fake_rows(x), fake_rows(x), _statistics(x)),
    call=lambda x, residual, weight, eps, unit_offset, y, total, rstd:
        _C.rms_norm(x, weight, residual, total, y, rstd, default_eps(eps, x.dtype), unit_offset),
    rows=("x", "residual"), strides=2, backward=_op_add_rms_norm_backward, setup=_setup_add_rms_norm)
run_rms_norm, rms_norm_op = _rms_norm.run, _rms_norm.operator
run_add_rms_norm, add_rms_norm_op = _add_rms_norm.run, _add_rms_norm.operator


class _RmsNorm(torch.autograd.Function):
    forward = staticmethod(_C.rms_norm_forward)  # (ctx, x, weight), for rms_norm_call; sets ctx.options

    @knowing_whether_recorded
    def backward(ctx, recorded, dy):
        s, weight, rstd = ctx.saved_tensors
        eps, unit_offset = ctx.options
        need_dx, need_dw = ctx.needs_input_grad
        run = rms_norm_backward_op if recorded else run_rms_norm_backward
        dx, dw = run(dy, None, s, weight, rstd, eps, unit_offset, need_dx, need_dw)
        return dx if need_dx else None, dw.to(weight.dtype) if need_dw else None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, unit_offset):
        y, total, rstd = run_add_rms_norm(x, residual, weight, eps, unit_offset)
        ctx.save_for_backward(total, weight, rstd)
        ctx.eps, ctx.unit_offset = eps, unit_offset
        ctx.set_materialize_grads(False)
        return y, total

    @knowing_whether_recorded
    def backward(ctx, recorded, dy, dsum):
        need = ctx.needs_input_grad
        run = rms_norm_backward_op if recorded else run_rms_norm_backward
        ds, dw = _rms_norm_gradients(ctx, need[0] or need[1], need[2], dy, dsum, None, run)
        return ds if need[0] else None, ds if need[1] else None, dw, None, None


class _RmsNormBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, unit_offset):
        y, rstd = run_rms_norm(x, weight, eps, unit_offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps, ctx.unit_offset = eps, unit_offset
        ctx.set_materialize_grads(False)
        return y, x

    @knowing_whether_recorded
    def backward(ctx, recorded, dy, dsum):
        run = rms_norm_backward_op if recorded else run_rms_norm_backward
        return *_rms_norm_gradients(ctx, *ctx.needs_input_grad[:2], dy, dsum, None, run), None, None


rms_norm_eager, add_rms_norm_eager = eager(_RmsNorm), eager(_AddRmsNorm)
# (x, weight, eps, unit_offset) -> (the norm of x, x), for an x that has another use: the kernel of the norm's gradient adds the gradient of the returned x.
rms_norm_beside = eager(_RmsNormBeside)
