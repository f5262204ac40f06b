"""Linear layers of experts: rows sorted by expert, each with its expert's matrix. Operators (see _op)."""
import torch

from . import _C, _plain
from ._second_order import gradients, with_formula
from ._op import as_rows, dense, fake_rows, or_nothing, register, sum_dtype


def _wide(x, *tensors):
    """CPUs have no 16-bit products: operands are widened, results rounded."""
    return x.dtype in (torch.bfloat16, torch.float16) and not x.is_cuda, [None if t is None else t.float() for t in (x, *tensors)]


def _check(x, weight, bias):
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype is not x.dtype:
            raise ValueError(f"grouped_linear: {name}: found dtype {t.dtype}, expected x's {x.dtype} (or autocast)")


def run_grouped_linear(x, weight, bias, offsets):
    _check(x, weight, bias)
    narrow, wide = _wide(x, weight, bias)
    if narrow:
        return run_grouped_linear(*wide, offsets).to(x.dtype)
    y = x.new_empty(x.shape[0], weight.shape[1])
    _C.grouped_linear(as_rows(x), dense(weight), dense(bias), offsets, y)
    return y


def run_grouped_linear_backward(dy, x, weight, offsets, need_dx, need_dw, need_db):
    """(dx, dw, db), None for a gradient that is not needed."""
    narrow, wide = _wide(x, weight)
    if narrow:
        found = run_grouped_linear_backward(dy.float(), *wide, offsets, need_dx, need_dw, need_db)
        return tuple(t if t is None else t.to(x.dtype) for t in found)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else None
    sums = {"dtype": sum_dtype(x.dtype), "device": x.device}
    dw = torch.zeros(weight.shape, **sums) if need_dw else None
    db = torch.zeros(weight.shape[:2], **sums) if need_db else None
    _C.grouped_linear_backward(as_rows(dy), as_rows(x), dense(weight), offsets, dx, dw, db)
    return dx, *(t if t is None else t.to(x.dtype) for t in (dw, db))


def _fake(x, weight, bias, offsets):
    return x.new_empty(x.shape[0], weight.shape[1])


def _op_backward(dy, x, *arguments):
    return tuple(or_nothing(t, x) for t in run_grouped_linear_backward(dy, x, *arguments))


def _fake_backward(dy, x, weight, offsets, need_dx, need_dw, need_db):
    return (fake_rows(x) if need_dx else x.new_empty(0), weight.new_empty(weight.shape) if need_dw else x.new_empty(0),
            weight.new_empty(weight.shape[:2]) if need_db else x.new_empty(0))


def _backward_formula(dy, x, weight, offsets, *needs):
    bias = dy.new_zeros(weight.shape[:2])
    return gradients(lambda x, weight, bias: _plain.grouped_linear(x, weight, bias, offsets), (x, weight, bias), needs, (dy,))


grouped_linear_backward_op = register(
    "grouped_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor offsets, bool need_dx, bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor)",
    _op_backward, _fake_backward, **with_formula(_backward_formula))


def _setup(ctx, inputs, output):
    x, weight, bias, offsets = inputs
    ctx.has_bias = bias is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, offsets)


def _gradients(ctx, dy):
    if dy is None:
        return (None,) * 4
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2]
    found = grouped_linear_backward_op(dy, *ctx.saved_tensors, *needs)
    return *(t if need else None for t, need in zip(found, needs)), None


grouped_linear_op = register("grouped_linear(Tensor x, Tensor weight, Tensor? bias, Tensor offsets) -> Tensor", run_grouped_linear, _fake, _gradients, _setup)
