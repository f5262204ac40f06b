"""Gated units, with and without the products before them: operators and autograd.Functions (see _op).

For the backward pass a gated linear keeps gate and up as the halves of one tensor, `kept`, in the order of the halves of the weights: if up comes first in
the weights, it comes first in `kept`, too. The gradients of gate and up have the same size, and overwrite `kept` where no later pass reads `kept`.
"""
import math

import torch

from . import _C, _plain
from ._kernel import kernel
from ._op import as_rows, eager, empty_apart, fake_rows
from ._second_order import gradients, knowing_whether_recorded, with_formula

GATE_ORDERS = {"gate_first": 0, "gate_second": 1, "interleaved": 2}
_SEPARATE = 3


_GATE_OPTIONS = "int order, float limit, float alpha, float up_offset, float cubic"


def _order(order, up):
    return order if up is None else _SEPARATE


def _swiglu_gate_backward_formula(dh, packed, up, *options):
    return gradients(lambda packed, up: _plain.swiglu(packed, up, *options), (packed, up), (True, up is not None), (dh,))


_gate_backward = kernel(
    f"swiglu_gate_backward(Tensor dh, Tensor packed, Tensor? up, {_GATE_OPTIONS}) -> (Tensor, Tensor)",
    results=lambda dh, packed, up, *options: (fake_rows(packed), None if up is None else fake_rows(up)),
    call=lambda dh, packed, up, order, limit, alpha, up_offset, cubic, dpacked, dup:
        _C.swiglu_gate_backward(dh, packed, up, dpacked, dup, None, _order(order, up), limit, alpha, up_offset, cubic),
    rows=("dh", "packed", "up"), **with_formula(_swiglu_gate_backward_formula))
run_swiglu_gate_backward, swiglu_gate_backward_op = _gate_backward.run, _gate_backward.operator


def _setup_swiglu_gate(ctx, inputs, output):
    packed, up, *ctx.options = inputs
    ctx.save_for_backward(packed, up)


def _swiglu_gate_gradients(ctx, dh, run):
    packed, up = ctx.saved_tensors
    dpacked, dup = run(dh, packed, up, *ctx.options)
    return dpacked, None if up is None else dup, *(None,) * len(ctx.options)


_gate = kernel(  # h of a packed (..., 2H) tensor, or of gate and up where `up` is given
    f"swiglu_gate(Tensor packed, Tensor? up, {_GATE_OPTIONS}) -> Tensor",
    results=lambda packed, up, *options: (
        fake_rows(packed) if up is not None else packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2)),),
    call=lambda packed, up, order, limit, alpha, up_offset, cubic, h:
        _C.swiglu_gate(packed, up, h, _order(order, up), limit, alpha, up_offset, cubic),
    rows=("packed", "up"), backward=lambda ctx, dh: _swiglu_gate_gradients(ctx, dh, swiglu_gate_backward_op), setup=_setup_swiglu_gate)
run_swiglu_gate, swiglu_gate_op = _gate.run, _gate.operator


class _SwigluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, up, *options):
        ctx.save_for_backward(packed, up)
        ctx.options = options
        return run_swiglu_gate(packed, up, *options)

    @knowing_whether_recorded
    def backward(ctx, recorded, dh):
        return _swiglu_gate_gradients(ctx, dh, swiglu_gate_backward_op if recorded else run_swiglu_gate_backward)


swiglu_gate_eager = eager(_SwigluGate)


def _check_dtypes(x, w, w_up, bias, up_bias):
    for name, t in {"w": w, "up": w_up, "bias": bias, "up_bias": up_bias}.items():
        if t is not None and t.dtype is not x.dtype:
            raise ValueError(f"gated_linear: {name}: found dtype {t.dtype}, expected x's {x.dtype}")


def _hidden(w, w_up, columns):
    both = w.shape[1 if columns else 0]
    return both // 2 if w_up is None else both


def _kept_order(order, w_up):
    """The order of the halves. Two separate weights have no order, whatever `order` says; then the gate comes first."""
    return order if w_up is None and order == GATE_ORDERS["gate_second"] else GATE_ORDERS["gate_first"]


def _empty_kept(h):
    return h.new_empty((*h.shape[:-1], 2 * h.shape[-1]))


def _gated_linear_results(x, w, w_up, bias, up_bias, order, columns, limit, alpha, up_offset, cubic, keep):
    h = x.new_empty((*x.shape[:-1], _hidden(w, w_up, columns)))
    return h, _empty_kept(h) if keep else None


def _gated_linear_backward_results(dkept, x, w, w_up, bias, up_bias, order, columns, *needs):
    if w_up is not None:  # both weights' gradients are computed together, and so are both biases'
        needs = needs[0], *(needs[1] or needs[2],) * 2, *(needs[3] or needs[4],) * 2
    return tuple(new(t) if t is not None and need else None
                 for t, need, new in zip((x, w, w_up, bias, up_bias), needs, (fake_rows, fake_rows, empty_apart, fake_rows, fake_rows)))


def _gated_linear_backward_formula(dkept, x, w, w_up, bias, up_bias, order, columns, *needs):
    return gradients(lambda *operands: _plain.gate_and_up(*operands, order, columns), (x, w, w_up, bias, up_bias), needs, (dkept,))


_GATED_OPERANDS = "Tensor x, Tensor w, Tensor? w_up, Tensor? bias, Tensor? up_bias"
_GATED_OPTIONS = "int order, bool columns, float limit, float alpha, float up_offset, float cubic"

# (dx, dw, dw_up, dbias, dup_bias) from the gradients of gate and up, which have the layout of `kept`
_linear_backward = kernel(
    f"gated_linear_backward(Tensor dkept, {_GATED_OPERANDS}, int order, bool columns, bool need_dx, bool need_dw, bool need_dw_up, bool need_db, "
    "bool need_db_up) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    results=_gated_linear_backward_results,
    call=lambda dkept, x, w, w_up, bias, up_bias, order, columns, *needs_and_results:
        _C.gated_linear_backward(dkept, x, w, w_up, *needs_and_results[5:], _order(order, w_up), columns),
    rows=("dkept", "x", "w", "w_up"), apart=("w", "w_up"), widens=True, **with_formula(_gated_linear_backward_formula))
run_gated_linear_backward, gated_linear_backward_op = _linear_backward.run, _linear_backward.operator


def _setup_gated_linear(ctx, inputs, output):
    *ctx.options, ctx.keep = inputs[5:]
    ctx.there = [t is not None for t in inputs[:5]]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], output[1])


def _gated_linear_gradients(ctx, dh, dkept):
    """The gradients of all twelve arguments. dkept is the gradient of `kept`, which a differentiated first backward pass has read, or None."""
    *operands, kept = ctx.saved_tensors
    order, columns, *numbers = ctx.options
    found = dkept if ctx.keep else None
    if dh is not None:
        if not ctx.keep:
            kept = gated_linear_op(*operands, *ctx.options, True)[1]
        of_h = swiglu_gate_backward_op(dh, kept, None, _kept_order(order, operands[2]), *numbers)[0]
        found = of_h if found is None else found + of_h
    if found is None:
        return (None,) * 12
    needs = [there and need for there, need in zip(ctx.there, ctx.needs_input_grad)]
    found = gated_linear_backward_op(found, *operands, order, columns, *needs)
    return (*(t if wanted else None for t, wanted in zip(found, needs)), *(None,) * 7)


_linear = kernel(  # (h, kept) for x (..., C); kept only where `keep` is set
    f"gated_linear({_GATED_OPERANDS}, {_GATED_OPTIONS}, bool keep) -> (Tensor, Tensor)",
    results=_gated_linear_results,
    call=lambda x, w, w_up, bias, up_bias, order, columns, limit, alpha, up_offset, cubic, keep, h, kept:
        _C.gated_linear(x, w, w_up, bias, up_bias, h, kept, _order(order, w_up), columns, limit, alpha, up_offset, cubic),
    rows=("x", "w", "w_up"), widens=True, check=lambda *arguments: _check_dtypes(*arguments[:5]),
    backward=_gated_linear_gradients, setup=_setup_gated_linear)
run_gated_linear, gated_linear_op = _linear.run, _linear.operator


# Eager training has two autograd nodes, so that autograd frees dh before dx and dw are allocated. One kernel computes both results: h waits in
# a list for the second node.


class _KeptOfGatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, held, *arguments):
        h, kept = run_gated_linear(*arguments, True)
        held.append(h)
        ctx.options = arguments[5:7]
        ctx.there = [t is not None for t in arguments[:5]]
        ctx.save_for_backward(*arguments[:5])
        return kept

    @knowing_whether_recorded
    def backward(ctx, recorded, dkept):
        needs = [there and need for there, need in zip(ctx.there, ctx.needs_input_grad[1:])]
        run = gated_linear_backward_op if recorded else run_gated_linear_backward
        found = run(dkept, *ctx.saved_tensors, *ctx.options, *needs)
        return None, *(t if wanted else None for t, wanted in zip(found, needs)), *(None,) * 6


class _GateOfKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, held, kept, *options):
        ctx.options = options
        ctx.save_for_backward(kept)
        return held.pop()

    @knowing_whether_recorded
    def backward(ctx, recorded, dh):
        (kept,) = ctx.saved_tensors
        if recorded:
            dkept = swiglu_gate_backward_op(dh, kept, None, *ctx.options)[0]
        elif _is_read_again(kept) or not kept.is_contiguous():  # hooks of saved tensors may have changed the layout
            dkept = run_swiglu_gate_backward(dh, kept, None, *ctx.options)[0]
        else:
            dkept = kept.detach()
            _C.swiglu_gate_backward(as_rows(dh), kept, None, dkept, None, None, *ctx.options)
            torch.autograd.graph.increment_version(kept)  # autograd reports any other use of the old values
        return None, dkept, *(None,) * 5


class _DownOfKept(torch.autograd.Function):
    """h w^T + bias, where h is taken from the list. Only gate and up are kept for the backward pass: the kernel that computes their gradients from dh also
    computes h again, for the gradient of w, and writes it over dh."""

    @staticmethod
    def forward(ctx, held, kept, w, bias, *options):
        ctx.options, ctx.has_bias = options, bias is not None
        ctx.save_for_backward(kept, w)
        return torch.nn.functional.linear(held.pop(), w, bias)

    @knowing_whether_recorded
    def backward(ctx, recorded, dy):
        saved, w = ctx.saved_tensors  # read once: under checkpointing a second read is an error
        kept = saved.contiguous()
        need_kept, need_w, need_bias = ctx.needs_input_grad[1:4]
        rows = math.prod(kept.shape[:-1])
        dy = dy.reshape(rows, dy.shape[-1])
        dbias = dy.sum(0) if ctx.has_bias and need_bias else None
        dh = (dy @ w).view(*kept.shape[:-1], w.shape[1])
        if recorded:
            h = swiglu_gate_op(kept, None, *ctx.options)
            dkept = swiglu_gate_backward_op(dh, kept, None, *ctx.options)[0]
        else:
            in_place = kept is saved and not _is_read_again(kept)
            dkept = kept.detach() if in_place else torch.empty_like(kept)
            h = dh if need_w else None
            _C.swiglu_gate_backward(dh, kept, None, dkept, None, h, *ctx.options)
            if in_place:
                torch.autograd.graph.increment_version(kept)
        dw = dy.t() @ h.reshape(rows, w.shape[1]) if need_w else None
        return None, dkept if need_kept else None, dw, dbias, *(None,) * 5


# Whether the running backward pass keeps the graph for another pass (retain_graph); True outside of backward passes.
_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _is_read_again(kept):
    """A CUDA graph of a backward pass alone may replay several times."""
    return _graph_is_kept() or (kept.is_cuda and torch.cuda.is_current_stream_capturing())


_kept_of_gated_linear, _gate_of_kept, _down_of_kept = eager(_KeptOfGatedLinear), eager(_GateOfKept), eager(_DownOfKept)


def gated_linear_eager(*arguments, down=None, down_bias=None):
    held = []
    kept = _kept_of_gated_linear(held, *arguments)
    order, _, *numbers = arguments[5:]
    options = _kept_order(order, arguments[2]), *numbers
    return _gate_of_kept(held, kept, *options) if down is None else _down_of_kept(held, kept, down, down_bias, *options)
