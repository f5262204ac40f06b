"""Two linear layers of any width with an activation between them: operators (see _op)."""
import torch

from . import _C, _plain
from ._second_order import gradients, with_formula
from ._op import activation_number, as_rows, dense, fake_rows, or_nothing, register, sum_dtype

_BY_SIGN = ("leaky_relu_squared", "relu_squared")  # activations whose slope follows from the value and one bit (linear.h)
_NAMES = ("x", "w1", "b1", "w2", "b2")


def _narrow_on_cpu(x):
    """CPUs do not compute this MLP in 16 bits: operands are widened, results rounded, and nothing is kept."""
    return not x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _wide(*tensors):
    return [None if t is None else t.float() for t in tensors]


def _keeps_signs(x, activation):
    return activation in _BY_SIGN and x.dtype is not torch.float16


def _sign_bytes(x, rows, columns):
    """The value of linear_sign_bytes() in kernels/linear: on a GPU one bit per element, in whole blocks of 16 x 128, on a CPU one byte."""
    return -(-rows // 16) * -(-columns // 128) * 256 if x.is_cuda else rows * columns


def _kept(x, w1, activation, keep):
    """Returns (h, the signs of h or h before the activation) to keep for the backward pass; a tensor that is not kept has no elements."""
    shape = (*x.shape[:-1], w1.shape[0])
    if not keep:
        return x.new_empty(0), x.new_empty(0)
    if not _keeps_signs(x, activation):
        return x.new_empty(0), x.new_empty(shape)
    rows = 1
    for n in x.shape[:-1]:
        rows = rows * n
    return x.new_empty(shape), x.new_empty(_sign_bytes(x, rows, w1.shape[0]), dtype=torch.uint8)


def _some(t):
    return t if t is not None and t.numel() else None


def _check(*operands):
    for name, t in zip(_NAMES, operands):
        if t is not None and t.dtype is not operands[0].dtype:
            raise ValueError(f"wide_mlp: {name}: found dtype {t.dtype}, expected x's {operands[0].dtype} (or autocast)")


def run_wide_mlp(x, w1, b1, w2, b2, activation, keep):
    """Returns (y, h, kept)."""
    _check(x, w1, b1, w2, b2)
    if _narrow_on_cpu(x):
        return run_wide_mlp(*_wide(x, w1, b1, w2, b2), activation, False)[0].to(x.dtype), x.new_empty(0), x.new_empty(0)
    x, w1, w2 = as_rows(x), as_rows(w1), as_rows(w2)
    h, kept = _kept(x, w1, activation, keep)
    y = x.new_empty((*x.shape[:-1], w2.shape[0]))
    hidden = h if h.numel() else x.new_empty((*x.shape[:-1], w1.shape[0]))
    pre, signs = (None, _some(kept)) if kept.dtype is torch.uint8 else (_some(kept), None)
    _C.wide_mlp(x, w1, dense(b1), w2, dense(b2), hidden, pre, signs, y, activation_number("wide_mlp", activation))
    return y, h, kept


def run_wide_mlp_backward(dy, x, w1, b1, w2, b2, h, kept, activation, *needs):
    """Returns (dx, dw1, db1, dw2, db2), None for a gradient that is not needed. If nothing was kept, the forward pass runs again."""
    if _narrow_on_cpu(x):
        found = run_wide_mlp_backward(*_wide(dy, x, w1, b1, w2, b2), h.float(), kept.float(), activation, *needs)
        return tuple(t if t is None else t.to(x.dtype) for t in found)
    if not kept.numel():
        _, h, kept = run_wide_mlp(x, w1, b1, w2, None, activation, True)
    dy, x, w1, w2 = as_rows(dy), as_rows(x), as_rows(w1), as_rows(w2)
    hidden = h if kept.dtype is torch.uint8 else torch.empty_like(kept)
    pre, signs = (None, kept) if kept.dtype is torch.uint8 else (kept, None)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    sums = [torch.zeros(p.shape, dtype=sum_dtype(x.dtype), device=x.device) if need else None for p, need in zip((w1, b1, w2, b2), needs[1:])]
    dhidden = torch.empty_like(hidden) if any(needs[:3]) else None
    _C.wide_mlp_backward(dy, x, w1, w2, hidden, pre, signs, dhidden, dx, *sums, activation_number("wide_mlp", activation))
    return dx, *(t if t is None else t.to(x.dtype) for t in sums)


def _fake(x, w1, b1, w2, b2, activation, keep):
    narrow = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
    return x.new_empty((*x.shape[:-1], w2.shape[0])), *_kept(x, w1, activation, keep and not narrow)


def _op_backward(dy, x, *arguments):
    return tuple(or_nothing(t, x) for t in run_wide_mlp_backward(dy, x, *arguments))


def _fake_backward(dy, x, w1, b1, w2, b2, h, kept, activation, need_dx, *needs):
    return fake_rows(x) if need_dx else x.new_empty(0), *(p.new_empty(p.shape) if need else x.new_empty(0) for p, need in zip((w1, b1, w2, b2), needs))


def _backward_formula(dy, x, w1, b1, w2, b2, h, kept, activation, *needs):
    return gradients(lambda *operands: _plain.wide_mlp(*operands, activation), (x, w1, b1, w2, b2), needs, (dy,))


_OPERANDS = "Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2"

wide_mlp_backward_op = register(
    f"wide_mlp_backward(Tensor dy, {_OPERANDS}, Tensor h, Tensor kept, str activation, bool need_dx, bool need_dw1, bool need_db1, bool need_dw2, "
    "bool need_db2) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op_backward, _fake_backward, **with_formula(_backward_formula))


def _setup(ctx, inputs, output):
    *operands, ctx.activation, _ = inputs
    ctx.there = [t is not None for t in operands]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*operands, *output[1:])


def _gradients(ctx, dy, *_):
    if dy is None:
        return (None,) * 7
    needs = [there and need for there, need in zip(ctx.there, ctx.needs_input_grad)]
    found = wide_mlp_backward_op(dy, *ctx.saved_tensors, ctx.activation, *needs)
    return *(t if need else None for t, need in zip(found, needs)), None, None


wide_mlp_op = register(f"wide_mlp({_OPERANDS}, str activation, bool keep) -> (Tensor, Tensor, Tensor)", run_wide_mlp, _fake, _gradients, _setup)
