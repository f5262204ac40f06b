"""Linear layers of experts: rows sorted by expert, each with its expert's matrix. Operators (see _op)."""
from . import _C, _plain
from ._kernel import kernel
from ._op import expect_offsets
from ._second_order import gradients, with_formula


def _check(x, weight, bias, offsets):
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype is not x.dtype:
            raise ValueError(f"grouped_linear: {name}: found dtype {t.dtype}, expected x's {x.dtype} (or autocast)")
    expect_offsets("grouped_linear", "offsets", offsets, x.shape[0])


def _backward_formula(dy, x, weight, offsets, *needs):
    bias = dy.new_zeros(weight.shape[:2])
    return gradients(lambda x, weight, bias: _plain.grouped_linear(x, weight, bias, offsets), (x, weight, bias), needs, (dy,))


_backward = kernel(  # (dx, dweight, dbias), each only where it is needed
    "grouped_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor offsets, bool need_dx, bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor)",
    results=lambda dy, x, weight, offsets, need_dx, need_dw, need_db: (
        x.new_empty(x.shape) if need_dx else None, weight.new_empty(weight.shape) if need_dw else None,
        weight.new_empty(weight.shape[:2]) if need_db else None),
    call=lambda dy, x, weight, offsets, need_dx, need_dw, need_db, *found: _C.grouped_linear_backward(dy, x, weight, offsets, *found, True),
    rows=("dy", "x"), widens=True, **with_formula(_backward_formula))


def _setup(ctx, inputs, output):
    x, weight, bias, offsets = inputs
    ctx.has_bias = bias is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, offsets)


def _gradients(ctx, dy):
    if dy is None:
        return (None,) * 4
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2]
    found = _backward.operator(dy, *ctx.saved_tensors, *needs)
    return *(t if need else None for t, need in zip(found, needs)), None


grouped_linear_op = kernel(
    "grouped_linear(Tensor x, Tensor weight, Tensor? bias, Tensor offsets) -> Tensor",
    results=lambda x, weight, bias, offsets: (x.new_empty(x.shape[0], weight.shape[1]),),
    call=lambda x, weight, bias, offsets, y: _C.grouped_linear(x, weight, bias, offsets, y),
    rows=("x",), widens=True, check=_check, backward=_gradients, setup=_setup).operator
