"""Gated units, with and without the products before them: operators and autograd.Functions (see _op).

For the backward pass a gated linear keeps gate and up as the halves of one tensor, `kept`, in the order of the halves of the weights: up comes first where it
does in the weights. The gradients of gate and up have the same size, and overwrite `kept` where no later pass reads `kept`.
"""
import torch

from . import _C, _plain
from ._second_order import gradients, knowing_whether_recorded, with_formula
from ._op import as_rows, dense, eager, empty_rows, fake_rows, or_nothing, register

GATE_ORDERS = {"gate_first": 0, "gate_second": 1, "interleaved": 2}
_SEPARATE = 3


def run_swiglu_gate(packed, up, order, limit, alpha, up_offset, cubic):
    """h of a packed (..., 2H) tensor, or of gate and up where `up` is given."""
    packed, up = as_rows(packed), as_rows(up)
    if up is not None:
        h, order = empty_rows(packed), _SEPARATE
    else:
        h = packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))
    _C.swiglu_gate(packed, up, h, order, limit, alpha, up_offset, cubic)
    return h


def run_swiglu_gate_backward(dh, packed, up, order, limit, alpha, up_offset, cubic):
    dh, packed, up = as_rows(dh), as_rows(packed), as_rows(up)
    dpacked = empty_rows(packed)
    dup = None if up is None else empty_rows(up)
    _C.swiglu_gate_backward(dh, packed, up, dpacked, dup, order if up is None else _SEPARATE, limit, alpha, up_offset, cubic)
    return dpacked, packed.new_empty(0) if dup is None else dup


def _fake_swiglu_gate(packed, up, *options):
    return fake_rows(packed) if up is not None else packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))


def _swiglu_gate_backward_formula(dh, packed, up, *options):
    return gradients(lambda packed, up: _plain.swiglu(packed, up, *options), (packed, up), (True, up is not None), (dh,))


swiglu_gate_backward_op = register(
    "swiglu_gate_backward(Tensor dh, Tensor packed, Tensor? up, int order, float limit, float alpha, float up_offset, float cubic) "
    "-> (Tensor, Tensor)",
    run_swiglu_gate_backward,
    lambda dh, packed, up, *options: (
        fake_rows(packed),
        packed.new_empty(0) if up is None else fake_rows(up),
    ),
    **with_formula(_swiglu_gate_backward_formula),
)


def _setup_swiglu_gate(ctx, inputs, output):
    packed, up, *ctx.options = inputs
    ctx.save_for_backward(packed, up)


def _swiglu_gate_gradients(ctx, dh, run):
    packed, up = ctx.saved_tensors
    dpacked, dup = run(dh, packed, up, *ctx.options)
    return dpacked, None if up is None else dup, *(None,) * len(ctx.options)


swiglu_gate_op = register(
    "swiglu_gate(Tensor packed, Tensor? up, int order, float limit, float alpha, float up_offset, float cubic) -> Tensor",
    run_swiglu_gate,
    _fake_swiglu_gate,
    lambda ctx, dh: _swiglu_gate_gradients(ctx, dh, swiglu_gate_backward_op),
    _setup_swiglu_gate,
)


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


def _narrow_on_cpu(x):
    """CPUs do not compute these products in 16 bits: operands are widened, and results rounded."""
    return not x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _wide(*tensors):
    return [None if t is None else t.float() for t in tensors]


def _rounded(dtype, tensors):
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def _check(x, **others):
    for name, t in others.items():
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


def run_gated_linear(x, w, w_up, bias, up_bias, order, columns, limit, alpha, up_offset, cubic, keep):
    """Returns (h, kept) for x (..., C); kept is None unless `keep` is set."""
    _check(x, w=w, up=w_up, bias=bias, up_bias=up_bias)
    if _narrow_on_cpu(x):
        return _rounded(x.dtype, run_gated_linear(*_wide(x, w, w_up, bias, up_bias), order, columns, limit, alpha, up_offset, cubic, keep))
    x, w, w_up = as_rows(x), as_rows(w), as_rows(w_up)
    h = x.new_empty((*x.shape[:-1], _hidden(w, w_up, columns)))
    kept = _empty_kept(h) if keep else None
    order = order if w_up is None else _SEPARATE
    _C.gated_linear(x, w, w_up, dense(bias), dense(up_bias), h, kept, order, columns, limit, alpha, up_offset, cubic)
    return h, kept


def run_gated_linear_backward(dkept, x, w, w_up, bias, up_bias, order, columns, *needs):
    """Returns (dx, dw, dw_up, dbias, dup_bias) from the gradients of gate and up, which have the layout of `kept`. None for each gradient that is not needed."""
    if _narrow_on_cpu(x):
        wide = _wide(dkept, x, w, w_up, bias, up_bias)
        return _rounded(x.dtype, run_gated_linear_backward(*wide, order, columns, *needs))
    dkept, x, w, w_up = as_rows(dkept), as_rows(x), as_rows(w), as_rows(w_up)
    if w_up is not None:  # both weights' gradients are computed together, and so are both biases'
        needs = needs[0], *(needs[1] or needs[2],) * 2, *(needs[3] or needs[4],) * 2
    dx, dw, dw_up, db, db_up = (empty_rows(t) if t is not None and need else None for t, need in zip((x, w, w_up, bias, up_bias), needs))
    order = order if w_up is None else _SEPARATE
    _C.gated_linear_backward(dkept, x, w, w_up, dx, dw, dw_up, db, db_up, order, columns)
    return dx, dw, dw_up, db, db_up


def _op_gated_linear(x, *arguments):
    h, kept = run_gated_linear(x, *arguments)
    return h, or_nothing(kept, x)


def _fake_gated_linear(x, w, w_up, bias, up_bias, order, columns, limit, alpha, up_offset, cubic, keep):
    h = x.new_empty((*x.shape[:-1], _hidden(w, w_up, columns)))
    return h, _empty_kept(h) if keep else x.new_empty(0)


def _op_gated_linear_backward(dkept, x, *arguments):
    needs = arguments[-5:]
    return tuple(or_nothing(t if need else None, x) for t, need in zip(run_gated_linear_backward(dkept, x, *arguments), needs))


def _fake_gated_linear_backward(dkept, x, w, w_up, bias, up_bias, *options):
    return tuple(fake_rows(t) if t is not None and need else x.new_empty(0) for t, need in zip((x, w, w_up, bias, up_bias), options[-5:]))


def _gated_linear_backward_formula(dkept, x, w, w_up, bias, up_bias, order, columns, *needs):
    return gradients(lambda *operands: _plain.gate_and_up(*operands, order, columns), (x, w, w_up, bias, up_bias), needs, (dkept,))


_GATED_OPERANDS = "Tensor x, Tensor w, Tensor? w_up, Tensor? bias, Tensor? up_bias"
_GATED_OPTIONS = "int order, bool columns, float limit, float alpha, float up_offset, float cubic"

gated_linear_backward_op = register(
    f"gated_linear_backward(Tensor dkept, {_GATED_OPERANDS}, int order, bool columns, bool need_dx, bool need_dw, bool need_dw_up, bool need_db, "
    "bool need_db_up) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op_gated_linear_backward,
    _fake_gated_linear_backward,
    **with_formula(_gated_linear_backward_formula),
)


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


gated_linear_op = register(
    f"gated_linear({_GATED_OPERANDS}, {_GATED_OPTIONS}, bool keep) -> (Tensor, Tensor)",
    _op_gated_linear,
    _fake_gated_linear,
    _gated_linear_gradients,
    _setup_gated_linear,
)


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
            _C.swiglu_gate_backward(as_rows(dh), kept, None, dkept, None, *ctx.options)
            torch.autograd.graph.increment_version(kept)  # autograd reports any other use of the old values
        return None, dkept, *(None,) * 5


# Whether the running backward pass keeps the graph for a further pass (retain_graph); True outside of backward passes.
_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _is_read_again(kept):
    """A CUDA graph of a backward pass alone may replay several times."""
    return _graph_is_kept() or (kept.is_cuda and torch.cuda.is_current_stream_capturing())


_kept_of_gated_linear, _gate_of_kept = eager(_KeptOfGatedLinear), eager(_GateOfKept)


def gated_linear_eager(*arguments):
    held = []
    kept = _kept_of_gated_linear(held, *arguments)
    order, _, *numbers = arguments[5:]
    return _gate_of_kept(held, kept, _kept_order(order, arguments[2]), *numbers)
