"""Whole MLPs: operators and autograd.Functions (see _op)."""
import gc
import math

import torch

from . import _C, _plain
from ._second_order import gradients, is_batched, knowing_whether_recorded, with_formula
from ._op import ACTIVATION_NAMES, activation_number, eager, expect_tensors, fake_rows, register, sum_dtype


def _narrow_on_cpu(x):
    """CPUs do not compute the MLP in 16 bits: operands are widened, results rounded, and nothing is saved."""
    return not x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def run_mlp(x, parameters, options, save):
    """Returns (y, saved); saved is None where nothing is kept. `options` are those of mlp_options(), whose SAVE has no effect."""
    each = 1 + bool(options & _C.BIAS) + bool(options & _C.WEIGHT_NORM)
    if not parameters or len(parameters) % each:
        raise ValueError(f"mlp: parameters: found {len(parameters)} tensors, expected {each} for every layer")
    for name, p in named(parameters, options & _C.BIAS, options & _C.WEIGHT_NORM):
        expect_tensors("mlp", **{name: p})
        if p.dim() == 0:
            raise ValueError(f"mlp: {name}: found a tensor without dimensions, expected {'a matrix' if name.startswith('weights') else 'a vector'}")
    if _narrow_on_cpu(x):
        _check_dtypes(x, parameters, options)
        wide = [p.float() for p in parameters]
        return run_mlp(x.float(), wide, options, False)[0].to(x.dtype), None
    if x.dim() == 0:
        raise ValueError("mlp: x: found a tensor without dimensions, expected at least one")
    return _C.mlp(x, parameters, options, save) or _C.mlp(_aligned(x), [_aligned(p) for p in parameters], options, save)


def _aligned(t):
    """`t` or a copy of it, contiguous and, on a GPU, at an address that is a multiple of 16, as the MLP kernels require. PyTorch calls a tensor without
    elements contiguous whatever its strides are."""
    t = t.contiguous() if t.numel() else t.new_empty(t.shape)
    return t.clone() if t.is_cuda and t.data_ptr() % 16 else t


def named(parameters, bias, weight_norm):
    """(name, parameter) with the names of functional.fused_mlp's arguments: weights[0], biases[0], ..."""
    names = ["weights", *["biases"] * bool(bias), *["gains"] * bool(weight_norm)]
    return [(f"{names[i % len(names)]}[{i // len(names)}]", p) for i, p in enumerate(parameters)]


def _check_dtypes(x, parameters, options):
    for name, p in named(parameters, options & _C.BIAS, options & _C.WEIGHT_NORM):
        if p.dtype is not x.dtype:
            raise ValueError(f"mlp: {name}: found dtype {p.dtype}, expected x's {x.dtype} (or autocast)")


def run_mlp_backward(dy, x, parameters, saved, wanted, need_dx, bias, weight_norm, act, activate_last):
    """Returns (dx, the wanted parameters' gradients, concatenated, in fp32, or fp64 for fp64)."""
    if _narrow_on_cpu(x):
        wide = [p.float() for p in parameters]
        dx, gradients = run_mlp_backward(dy.float(), x.float(), wide, None, wanted, need_dx, bias, weight_norm, act, activate_last)
        return None if dx is None else dx.to(x.dtype), gradients
    x, dy = _aligned(x), _aligned(dy)
    parameters = [_aligned(p) for p in parameters]
    dx = torch.empty_like(x) if need_dx else None
    total = sum(p.numel() for p, w in zip(parameters, wanted) if w)
    gradients = x.new_zeros(total, dtype=sum_dtype(x.dtype))
    _C.mlp_backward(dy, x, dx, parameters, gradients, wanted, bias, weight_norm, act, activate_last, saved)
    return dx, gradients


def _split_gradients(gradients, parameters, wanted):
    """Views of the flat gradients with the parameters' shapes and dtype (all have one dtype)."""
    parts = iter(gradients.to(parameters[0].dtype).split([p.numel() for p, w in zip(parameters, wanted) if w]))
    return [next(parts).view(p.shape) if w else None for p, w in zip(parameters, wanted)]


def _op_mlp(x, parameters, bias, weight_norm, activation, activate_last, save):
    y, saved = run_mlp(x, parameters, mlp_options(bias, weight_norm, activation_number("mlp", activation), activate_last, not save), save)
    return y, x.new_empty(0) if saved is None else saved


def _activated_columns(parameters, bias, weight_norm, activate_last):
    widths = [p.shape[0] for p in parameters[:: 1 + bias + weight_norm]]
    return sum(widths if activate_last else widths[:-1])


def _fake_mlp(x, parameters, bias, weight_norm, activation, activate_last, save):
    y = x.new_empty((*x.shape[:-1], parameters[-1 - bias - weight_norm].shape[0]))
    rows = math.prod(x.shape[:-1])
    save = save and not (x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16))
    return y, x.new_empty(rows * _activated_columns(parameters, bias, weight_norm, activate_last) if save else 0)


def _op_mlp_backward(dy, x, parameters, saved, wanted, need_dx, bias, weight_norm, activation, activate_last):
    act = activation_number("mlp", activation)
    kept = saved if saved.numel() else None
    dx, gradients = run_mlp_backward(dy, x, parameters, kept, wanted, need_dx, bias, weight_norm, act, activate_last)
    return x.new_empty(0) if dx is None else dx, gradients


def _fake_mlp_backward(dy, x, parameters, saved, wanted, need_dx, bias, weight_norm, activation, activate_last):
    total = sum(p.numel() for p, w in zip(parameters, wanted) if w)
    return fake_rows(x) if need_dx else x.new_empty(0), x.new_empty(total, dtype=sum_dtype(x.dtype))


def _mlp_backward_formula(dy, x, parameters, saved, wanted, need_dx, bias, weight_norm, activation, activate_last):
    dx, *found = gradients(lambda x, *parameters: _plain.mlp(x, parameters, bias, weight_norm, activation, activate_last),
                           (x, *parameters), (need_dx, *wanted), (dy,))
    parts = [p.new_zeros(p.numel()) if g is None else g.reshape(-1) for g, p, w in zip(found, parameters, wanted) if w]
    return dx, torch.cat(parts) if parts else x.new_empty(0)


mlp_backward_op = register(
    "mlp_backward(Tensor dy, Tensor x, Tensor[] parameters, Tensor saved, bool[] wanted, bool need_dx, bool bias, bool weight_norm, "
    "str activation, bool activate_last) -> (Tensor, Tensor)",
    _op_mlp_backward,
    _fake_mlp_backward,
    **with_formula(_mlp_backward_formula),
)


def _setup_mlp(ctx, inputs, output):
    x, parameters, ctx.bias, ctx.weight_norm, ctx.activation, ctx.activate_last, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], *parameters)


def _op_mlp_gradients(ctx, dy, dsaved):
    x, saved, *parameters = ctx.saved_tensors
    if dy is None:
        return (None,) * 7
    wanted = list(ctx.needs_input_grad[1])
    dx, flat = mlp_backward_op(dy, x, parameters, saved, wanted, ctx.needs_input_grad[0], ctx.bias, ctx.weight_norm,
                               ctx.activation, ctx.activate_last)
    gradients = _split_gradients(flat, parameters, wanted)
    return dx if ctx.needs_input_grad[0] else None, gradients, None, None, None, None, None


mlp_op = register(
    "mlp(Tensor x, Tensor[] parameters, bool bias, bool weight_norm, str activation, bool activate_last, bool save) -> (Tensor, Tensor)",
    _op_mlp,
    _fake_mlp,
    _op_mlp_gradients,
    _setup_mlp,
)


def mlp_options(bias, weight_norm, act, activate_last, recompute):
    """The options of a call as one integer, the form that native/calls.h reads."""
    return act | _C.BIAS * bool(bias) | _C.WEIGHT_NORM * bool(weight_norm) | _C.ACTIVATE_LAST * bool(activate_last) | _C.SAVE * (not recompute)


def _split_options(options):
    return bool(options & _C.BIAS), bool(options & _C.WEIGHT_NORM), options & 0xFF, bool(options & _C.ACTIVATE_LAST)


def _mlp_gradients(ctx, recorded, dy, x, saved, parameters, wanted):
    """Returns (dx, the wanted parameters' gradients, concatenated) for a context of an autograd.Function."""
    need_x = ctx.needs_input_grad[0]
    bias, weight_norm, act, activate_last = _split_options(ctx.options)
    if not recorded:
        return run_mlp_backward(dy, x, parameters, saved, wanted, need_x, bias, weight_norm, act, activate_last)
    saved = x.new_empty(0) if saved is None else saved
    run = _mlp_backward_formula if is_batched(dy) else mlp_backward_op  # PyTorch cannot batch operators with lists of tensors
    dx, flat = run(dy, x, parameters, saved, wanted, need_x, bias, weight_norm, ACTIVATION_NAMES[act], activate_last)
    return dx if need_x else None, flat


class _Mlp(torch.autograd.Function):
    forward = staticmethod(_C.mlp_forward)  # (ctx, x, *parameters), for mlp_call; sets ctx.options

    @knowing_whether_recorded
    def backward(ctx, recorded, dy):
        x, saved, *parameters = ctx.saved_tensors
        _, *wanted = ctx.needs_input_grad
        dx, flat = _mlp_gradients(ctx, recorded, dy, x, saved, parameters, wanted)
        return (dx, *_split_gradients(flat, parameters, wanted))


_NEXT = 2**64 - 1  # the node with the greatest number runs first


def _make_edge(*parameters):
    """A tensor without memory whose gradient is the concatenation of the gradients of `parameters`: see native/edge.h.

    PyTorch's own autograd nodes make the tensor; a backward pass frees nothing in them. They are older than the nodes that give them gradients, but
    run as soon as they are ready, as the nodes that accumulate gradients do.
    """
    edge = torch.cat([p.view(-1) for p in parameters])
    edge.untyped_storage().resize_(0)
    edge.grad_fn._set_sequence_nr(_NEXT)
    for node, _ in edge.grad_fn.next_functions:
        node._set_sequence_nr(_NEXT)
    return edge


class _MlpAtEdge(torch.autograd.Function):
    forward = staticmethod(_C.mlp_edge_forward)  # (ctx, x, edge); sets ctx.options

    @knowing_whether_recorded
    def backward(ctx, recorded, dy):
        x, saved, *parameters = ctx.saved_tensors
        need_parameters = ctx.needs_input_grad[1]
        dx, flat = _mlp_gradients(ctx, recorded, dy, x, saved, parameters, [need_parameters] * len(parameters))
        return dx, flat.to(x.dtype) if need_parameters else None


mlp_eager, mlp_edge_eager = eager(_Mlp), eager(_MlpAtEdge)
if hasattr(torch._C._functions.AccumulateGrad, "_set_sequence_nr"):
    _C.attach_edges(_make_edge)
    gc.callbacks.append(_C.forget_edges)
