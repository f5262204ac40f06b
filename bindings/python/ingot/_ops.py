"""The operations as PyTorch sees them.

Every op exists three times over one implementation: a plain Python function that allocates and calls the kernel (`run_*`), an
autograd.Function for eager training, and an operator registered with torch.library for whatever traces, transforms or watches
operations. `functional` chooses among them (see _C.route): the first two cost a few microseconds, the third about twice that. Of
rms_norm and mlp the first two are written once more in C++ (native/calls.cpp), for dense operands.
"""
import gc

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from . import _C, _plain
from ._again import again, gradients, is_batched, knowing_whether_recorded

ACTIVATIONS = {name: i for i, name in enumerate(_C.activation_names())}
GATE_ORDERS = {"gate_first": 0, "gate_second": 1, "interleaved": 2}
_NAMES = list(ACTIVATIONS)
_SEPARATE = 3

_empty_like = torch.empty_like
_contiguous = torch.contiguous_format
_library = torch.library.Library("ingot", "DEF")


def activation_number(op, name):
    number = ACTIVATIONS.get(name)
    if number is None:
        raise ValueError(f"{op}: activation: found {name!r}, expected one of {', '.join(ACTIVATIONS)}")
    return number


def sum_dtype(dtype):
    """The type that statistics and parameters' gradients are kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


_EPS = {dtype: torch.finfo(sum_dtype(dtype)).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def default_eps(eps, dtype):
    """What torch.nn.RMSNorm takes for None: the epsilon of the type that sums are kept in."""
    return _EPS.get(dtype, 0.0) if eps is None else eps


def as_rows(t, groups=1):
    """`t` itself if its last dimension is dense and its leading ones merge into `groups` strides, else a contiguous copy."""
    if t is None or t.is_contiguous():
        return t
    if t.dim() == 0 or (t.stride(-1) != 1 and t.shape[-1] > 1):
        return t.contiguous()
    found, size, stride = 0, 1, None
    for n, s in zip(t.shape[:-1], t.stride()[:-1]):
        if n == 1:
            continue
        if stride is None or stride != n * s:
            found += 1
        stride = s
    overlapping = any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride()))
    return t if found <= groups and not overlapping else t.contiguous()


def dense(t):
    return t if t is None or t.is_contiguous() else t.contiguous()


def _empty_rows(t):
    return _empty_like(t) if t.is_contiguous() else _empty_like(t, memory_format=_contiguous)


def _bytes(n, like):
    return like.new_empty(n, dtype=torch.uint8) if n else None


def _transformable(op, setup, backward):
    """`op` as torch.func wants it: operators whose gradient is written in Python do not take part in its transforms. Lists among the
    arguments are laid flat on the way."""

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(structure, *flat):
            return op(*tree_unflatten(flat, structure))

        @staticmethod
        def setup_context(ctx, inputs, output):
            structure, *flat = inputs
            ctx.structure = structure
            setup(ctx, tree_unflatten(flat, structure), output)

        @staticmethod
        def backward(ctx, *gradients):
            needs = tree_unflatten(ctx.needs_input_grad[1:], ctx.structure)
            found = backward(_WithNeeds(ctx, needs), *gradients)
            return None, *(g for need, gradient in zip(needs, found) for g in _one_for_each(need, gradient))

    def call(*arguments):
        if torch._C._are_functorch_transforms_active():
            flat, structure = tree_flatten(arguments)
            return Transformable.apply(structure, *flat)
        return op(*arguments)

    return call


def _one_for_each(argument, gradient):
    """The gradients of an argument's leaves; a list may have one None in all."""
    if not isinstance(argument, (list, tuple)):
        return [gradient]
    return [None] * len(argument) if gradient is None else gradient


class _WithNeeds:
    """A context whose needs_input_grad has the structure of the operator's arguments."""

    def __init__(self, ctx, needs):
        self.__dict__.update(ctx=ctx, needs_input_grad=needs)

    def __getattr__(self, name):
        return getattr(self.ctx, name)


def _one_by_one(op):
    """torch.vmap's rule for `op` (several tensors out): call after call. PyTorch has the same for operators without lists of tensors."""

    def pick(argument, dim, i):
        if isinstance(argument, (list, tuple)):
            dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(argument)
            return [pick(a, d, i) for a, d in zip(argument, dims)]
        return argument if dim is None else argument.select(dim, i)

    def rule(info, in_dims, *arguments):
        calls = [op(*(pick(a, d, i) for a, d in zip(arguments, in_dims))) for i in range(info.batch_size)]
        outputs = tuple(torch.stack(parts) for parts in zip(*calls))
        return outputs, (0,) * len(outputs)

    return rule


def _on_one_device(name, fake):
    """`fake` where all tensors are on one device: the kernel on the meta device is called as soon as one of them is there."""

    def checked(*arguments):
        found = {str(t.device): None for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)}
        if len(found) > 1:
            raise ValueError(f"{name}: found tensors on {' and '.join(found)}, expected one device")
        return fake(*arguments)

    return checked


def _register(schema, run, fake, backward=None, setup=None):
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"ingot::{name}", _on_one_device(name, fake), lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"ingot::{name}", backward, setup_context=setup, lib=_library)
    op = getattr(torch.ops.ingot, name).default
    if "Tensor[]" in schema:
        torch.library.register_vmap(f"ingot::{name}", _one_by_one(op), lib=_library)
    return _transformable(op, setup, backward) if backward is not None else op


# --- rms_norm ---------------------------------------------------------------------------------------------------------


def run_rms_norm_plain(x, weight, eps, unit_offset):
    x = as_rows(x, 2)
    y = _empty_rows(x)
    _C.rms_norm(x, dense(weight), None, None, y, None, default_eps(eps, x.dtype), unit_offset)
    return y


def run_rms_norm(x, weight, eps, unit_offset):
    x = as_rows(x, 2)
    y = _empty_rows(x)
    rstd = x.new_empty(x.shape[:-1], dtype=sum_dtype(x.dtype))
    _C.rms_norm(x, dense(weight), None, None, y, rstd, default_eps(eps, x.dtype), unit_offset)
    return y, rstd


def run_add_rms_norm(x, residual, weight, eps, unit_offset):
    x, residual = as_rows(x, 2), as_rows(residual, 2)
    y, total = _empty_rows(x), _empty_rows(x)
    rstd = x.new_empty(x.shape[:-1], dtype=sum_dtype(x.dtype))
    _C.rms_norm(x, dense(weight), residual, total, y, rstd, default_eps(eps, x.dtype), unit_offset)
    return y, total, rstd


def run_rms_norm_backward(dy, dsum, s, weight, rstd, eps, unit_offset, need_dx, need_dw):
    """(dx, dweight in the type of sums), None for what is not needed."""
    dy, dsum, s = as_rows(dy, 2), as_rows(dsum, 2), as_rows(s, 2)
    dx = _empty_rows(s) if need_dx else None
    dw = workspace = None
    if need_dw:
        dw = s.new_zeros(s.shape[-1], dtype=sum_dtype(s.dtype))
        workspace = _bytes(_C.rms_norm_backward_workspace_bytes(s), s)
    _C.rms_norm_backward(dy, s, dense(weight), rstd, dsum, dx, dw, workspace, default_eps(eps, s.dtype), unit_offset)
    return dx, dw


def _op_run_rms_norm_backward(dy, dsum, s, weight, rstd, eps, unit_offset, need_dx, need_dw):
    dx, dw = run_rms_norm_backward(dy, dsum, s, weight, rstd, eps, unit_offset, need_dx, need_dw)
    return s.new_empty(0) if dx is None else dx, s.new_empty(0, dtype=sum_dtype(s.dtype)) if dw is None else dw


def _fake_rows(x):
    return _empty_like(x, memory_format=_contiguous)


def _fake_rstd(x):
    return x.new_empty(x.shape[:-1], dtype=sum_dtype(x.dtype))


def _fake_rms_norm_backward(dy, dsum, s, weight, rstd, eps, unit_offset, need_dx, need_dw):
    dx = _fake_rows(s) if need_dx else s.new_empty(0)
    return dx, s.new_empty(s.shape[-1] if need_dw else 0, dtype=sum_dtype(s.dtype))


def _rms_norm_backward_formula(dy, dsum, s, weight, rstd, eps, unit_offset, need_dx, need_dw):
    eps = default_eps(eps, s.dtype)
    dx, dw = gradients(lambda s, w: _plain.rms_norm(s, w, eps, unit_offset), (s, weight), (need_dx, need_dw), (dy,))
    return dx if dsum is None or dx is None else dx + dsum, dw


rms_norm_backward_op = _register(
    "rms_norm_backward(Tensor dy, Tensor? dsum, Tensor s, Tensor? weight, Tensor? rstd, float? eps, bool unit_offset, bool need_dx, "
    "bool need_dw) -> (Tensor, Tensor)",
    _op_run_rms_norm_backward,
    _fake_rms_norm_backward,
    **again(_rms_norm_backward_formula),
)


def _rms_norm_gradients(ctx, need_dx, need_dw, dy, dsum, drstd, run):
    """(ds, dweight) for a context that holds s, weight, rstd and the options."""
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


rms_norm_op = _register(
    "rms_norm(Tensor x, Tensor? weight, float? eps, bool unit_offset) -> (Tensor, Tensor)",
    run_rms_norm,
    lambda x, weight, eps, unit_offset: (_fake_rows(x), _fake_rstd(x)),
    _op_rms_norm_backward,
    _setup_rms_norm,
)
add_rms_norm_op = _register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float? eps, bool unit_offset) -> (Tensor, Tensor, Tensor)",
    run_add_rms_norm,
    lambda x, residual, weight, eps, unit_offset: (_fake_rows(x), _fake_rows(x), _fake_rstd(x)),
    _op_add_rms_norm_backward,
    _setup_add_rms_norm,
)


def eager(function):
    """`function.apply` without the Python around it, which asks about transforms that _C.route has already excluded.

    apply looks up its class's attributes by text, through every base; a class that holds them itself, and looks there first, has them at
    hand.
    """
    try:
        found = {name: function.__dict__[name] for name in ("forward", "_backward_cls")}
        for name in ("setup_context", "clear_saved_tensors_on_access", "boxed_grads_call"):
            if hasattr(function, name):
                found[name] = staticmethod(getattr(function, name)) if name == "setup_context" else getattr(function, name)
        return _C.quick_class(function.__name__, (torch._C._FunctionBase,), found).apply
    except (AttributeError, KeyError, TypeError):
        return function.apply


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


rms_norm_eager, add_rms_norm_eager = eager(_RmsNorm), eager(_AddRmsNorm)


# --- mlp --------------------------------------------------------------------------------------------------------------


def _narrow_on_cpu(x):
    """CPUs have no 16-bit form of the MLP: operands are widened, results rounded, and nothing is saved."""
    return not x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def run_mlp(x, parameters, bias, weight_norm, act, activate_last, save):
    """(y, saved); saved is None where nothing is kept."""
    if _narrow_on_cpu(x):
        _check_dtypes(x, parameters)
        wide = [p.float() for p in parameters]
        return run_mlp(x.float(), wide, bias, weight_norm, act, activate_last, False)[0].to(x.dtype), None
    if x.dim() == 0:
        raise ValueError("mlp: x: found a tensor without dimensions, expected at least one")
    found = _C.mlp(x, parameters, bias, weight_norm, act, activate_last, save)
    return found or _C.mlp(_aligned(x), [_aligned(p) for p in parameters], bias, weight_norm, act, activate_last, save)


def _aligned(t):
    """`t` or a copy of it, contiguous and, on a GPU, at an address that is a multiple of 16, as MLPs take it."""
    t = t.contiguous()
    return t.clone() if t.is_cuda and t.data_ptr() % 16 else t


def _check_dtypes(x, parameters):
    for p in parameters:
        if p.dtype is not x.dtype:
            raise ValueError(f"mlp: parameters: found dtype {p.dtype}, expected x's {x.dtype} (or autocast)")


def run_mlp_backward(dy, x, parameters, saved, wanted, need_dx, bias, weight_norm, act, activate_last):
    """(dx, the wanted parameters' gradients one after the other in fp32, or fp64 for fp64)."""
    if _narrow_on_cpu(x):
        wide = [p.float() for p in parameters]
        dx, gradients = run_mlp_backward(dy.float(), x.float(), wide, None, wanted, need_dx, bias, weight_norm, act, activate_last)
        return None if dx is None else dx.to(x.dtype), gradients
    x, dy = _aligned(x), _aligned(dy)
    parameters = [_aligned(p) for p in parameters]
    dx = _empty_like(x) if need_dx else None
    total = sum(p.numel() for p, w in zip(parameters, wanted) if w)
    gradients = x.new_zeros(total, dtype=sum_dtype(x.dtype))
    _C.mlp_backward(dy, x, dx, parameters, gradients, wanted, bias, weight_norm, act, activate_last, saved)
    return dx, gradients


def _split_gradients(gradients, parameters, wanted):
    """Views of the flat gradients with the parameters' shapes and dtype (all have one dtype)."""
    parts = iter(gradients.to(parameters[0].dtype).split([p.numel() for p, w in zip(parameters, wanted) if w]))
    return [next(parts).view(p.shape) if w else None for p, w in zip(parameters, wanted)]


def _op_mlp(x, parameters, bias, weight_norm, activation, activate_last, save):
    y, saved = run_mlp(x, parameters, bias, weight_norm, activation_number("mlp", activation), activate_last, save)
    return y, x.new_empty(0) if saved is None else saved


def _activated_columns(parameters, bias, weight_norm, activate_last):
    widths = [p.shape[0] for p in parameters[:: 1 + bias + weight_norm]]
    return sum(widths if activate_last else widths[:-1])


def _fake_mlp(x, parameters, bias, weight_norm, activation, activate_last, save):
    y = x.new_empty((*x.shape[:-1], parameters[-1 - bias - weight_norm].shape[0]))
    rows = y.numel() // y.shape[-1]
    save = save and not (x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16))
    return y, x.new_empty(rows * _activated_columns(parameters, bias, weight_norm, activate_last) if save else 0)


def _op_mlp_backward(dy, x, parameters, saved, wanted, need_dx, bias, weight_norm, activation, activate_last):
    act = activation_number("mlp", activation)
    kept = saved if saved.numel() else None
    dx, gradients = run_mlp_backward(dy, x, parameters, kept, wanted, need_dx, bias, weight_norm, act, activate_last)
    return x.new_empty(0) if dx is None else dx, gradients


def _fake_mlp_backward(dy, x, parameters, saved, wanted, need_dx, bias, weight_norm, activation, activate_last):
    total = sum(p.numel() for p, w in zip(parameters, wanted) if w)
    return _fake_rows(x) if need_dx else x.new_empty(0), x.new_empty(total, dtype=sum_dtype(x.dtype))


def _mlp_backward_formula(dy, x, parameters, saved, wanted, need_dx, bias, weight_norm, activation, activate_last):
    dx, *found = gradients(lambda x, *parameters: _plain.mlp(x, parameters, bias, weight_norm, activation, activate_last),
                           (x, *parameters), (need_dx, *wanted), (dy,))
    parts = [p.new_zeros(p.numel()) if g is None else g.reshape(-1) for g, p, w in zip(found, parameters, wanted) if w]
    return dx, torch.cat(parts) if parts else x.new_empty(0)


mlp_backward_op = _register(
    "mlp_backward(Tensor dy, Tensor x, Tensor[] parameters, Tensor saved, bool[] wanted, bool need_dx, bool bias, bool weight_norm, "
    "str activation, bool activate_last) -> (Tensor, Tensor)",
    _op_mlp_backward,
    _fake_mlp_backward,
    **again(_mlp_backward_formula),
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


mlp_op = _register(
    "mlp(Tensor x, Tensor[] parameters, bool bias, bool weight_norm, str activation, bool activate_last, bool save) -> (Tensor, Tensor)",
    _op_mlp,
    _fake_mlp,
    _op_mlp_gradients,
    _setup_mlp,
)


def mlp_options(bias, weight_norm, act, activate_last, recompute):
    """One integer, as native/calls.h reads it."""
    return act | _C.BIAS * bool(bias) | _C.WEIGHT_NORM * bool(weight_norm) | _C.ACTIVATE_LAST * bool(activate_last) | _C.SAVE * (not recompute)


def _split_options(options):
    return bool(options & _C.BIAS), bool(options & _C.WEIGHT_NORM), options & 0xFF, bool(options & _C.ACTIVATE_LAST)


def _mlp_gradients(ctx, recorded, dy, x, saved, parameters, wanted):
    """(dx, the wanted parameters' gradients one after the other) for a context of an autograd.Function."""
    need_x = ctx.needs_input_grad[0]
    bias, weight_norm, act, activate_last = _split_options(ctx.options)
    if not recorded:
        return run_mlp_backward(dy, x, parameters, saved, wanted, need_x, bias, weight_norm, act, activate_last)
    saved = x.new_empty(0) if saved is None else saved
    run = _mlp_backward_formula if is_batched(dy) else mlp_backward_op  # PyTorch batches no operator that takes lists of tensors
    dx, flat = run(dy, x, parameters, saved, wanted, need_x, bias, weight_norm, _NAMES[act], activate_last)
    return dx if need_x else None, flat


def _run_mlp_options(x, parameters, options, save):
    return run_mlp(x, parameters, *_split_options(options), save)


class _Mlp(torch.autograd.Function):
    forward = staticmethod(_C.mlp_forward)  # (ctx, x, *parameters), for mlp_call; sets ctx.options

    @knowing_whether_recorded
    def backward(ctx, recorded, dy):
        x, saved, *parameters = ctx.saved_tensors
        _, *wanted = ctx.needs_input_grad
        dx, flat = _mlp_gradients(ctx, recorded, dy, x, saved, parameters, wanted)
        return (dx, *_split_gradients(flat, parameters, wanted))


_NEXT = 2**64 - 1  # the greatest number has the first turn


def _make_edge(*parameters):
    """A tensor whose gradient is that of all `parameters`, one after the other: see native/edge.h. It has no memory.

    Of PyTorch's own nodes, which keep nothing that a backward pass would free. They are older than what their gradients come from, but
    have their turn as soon as they are ready, as the nodes that take gradients up have.
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
_C.attach_calls(rms_norm_eager, run_rms_norm_plain, run_rms_norm, mlp_eager, mlp_edge_eager, _run_mlp_options)
if hasattr(torch._C._functions.AccumulateGrad, "_set_sequence_nr"):
    _C.attach_edges(_make_edge)
    gc.callbacks.append(_C.forget_edges)


# --- gated units ------------------------------------------------------------------------------------------------------


def run_swiglu_gate(packed, up, order, limit, alpha, up_offset, cubic):
    """h of a packed (..., 2H) tensor, or of gate and up where `up` is given."""
    packed, up = as_rows(packed), as_rows(up)
    if up is not None:
        h, order = _empty_rows(packed), _SEPARATE
    else:
        h = packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))
    _C.swiglu_gate(packed, up, h, order, limit, alpha, up_offset, cubic)
    return h


def run_swiglu_gate_backward(dh, packed, up, order, limit, alpha, up_offset, cubic):
    dh, packed, up = as_rows(dh), as_rows(packed), as_rows(up)
    dpacked = _empty_rows(packed)
    dup = None if up is None else _empty_rows(up)
    _C.swiglu_gate_backward(dh, packed, up, dpacked, dup, order if up is None else _SEPARATE, limit, alpha, up_offset, cubic)
    return dpacked, packed.new_empty(0) if dup is None else dup


def _fake_swiglu_gate(packed, up, *options):
    return _fake_rows(packed) if up is not None else packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))


def _swiglu_gate_backward_formula(dh, packed, up, *options):
    return gradients(lambda packed, up: _plain.swiglu(packed, up, *options), (packed, up), (True, up is not None), (dh,))


swiglu_gate_backward_op = _register(
    "swiglu_gate_backward(Tensor dh, Tensor packed, Tensor? up, int order, float limit, float alpha, float up_offset, float cubic) "
    "-> (Tensor, Tensor)",
    run_swiglu_gate_backward,
    lambda dh, packed, up, *options: (
        _fake_rows(packed),
        packed.new_empty(0) if up is None else _fake_rows(up),
    ),
    **again(_swiglu_gate_backward_formula),
)


def _setup_swiglu_gate(ctx, inputs, output):
    packed, up, *ctx.options = inputs
    ctx.save_for_backward(packed, up)


def _swiglu_gate_gradients(ctx, dh, run):
    packed, up = ctx.saved_tensors
    dpacked, dup = run(dh, packed, up, *ctx.options)
    return dpacked, None if up is None else dup, *(None,) * len(ctx.options)


swiglu_gate_op = _register(
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


# --- gated linear -----------------------------------------------------------------------------------------------------

# Weights are packed, or the gate's with up's beside them; so are biases. `order` and what follows it are options.


def _hidden(w, w_up, columns):
    both = w.shape[1 if columns else 0]
    return both // 2 if w_up is None else both


def run_gated_linear(x, w, w_up, bias, up_bias, order, columns, limit, alpha, up_offset, cubic, keep):
    """(h, gate, up) of x (..., C); gate and up None unless they are to be kept."""
    x, w, w_up = as_rows(x), as_rows(w), as_rows(w_up)
    h = x.new_empty((*x.shape[:-1], _hidden(w, w_up, columns)))
    gate, up = (_empty_like(h), _empty_like(h)) if keep else (None, None)
    order = order if w_up is None else _SEPARATE
    _C.gated_linear(x, w, w_up, dense(bias), dense(up_bias), h, gate, up, order, columns, limit, alpha, up_offset, cubic)
    return h, gate, up


def run_gated_linear_backward(dh, x, w, w_up, bias, up_bias, gate, up, order, columns, limit, alpha, up_offset, cubic, *needs):
    """(dx, dw, dw_up, dbias, dup_bias), None for what is not needed. gate and up without elements are formed again."""
    dh, x, w, w_up = as_rows(dh), as_rows(x), as_rows(w), as_rows(w_up)
    if gate.numel() == 0:
        gate = up = None
    if w_up is not None:  # the two weights' gradients are one kernel's, and so are the biases'
        needs = needs[0], *(needs[1] or needs[2],) * 2, *(needs[3] or needs[4],) * 2
    dx, dw, dw_up, db, db_up = (_empty_rows(t) if t is not None and need else None for t, need in zip((x, w, w_up, bias, up_bias), needs))
    order = order if w_up is None else _SEPARATE
    _C.gated_linear_backward(dh, x, w, w_up, dense(bias), dense(up_bias), gate, up, dx, dw, dw_up, db, db_up, order, columns, limit, alpha,
                             up_offset, cubic)
    return dx, dw, dw_up, db, db_up


def _or_nothing(t, like):
    return like.new_empty(0) if t is None else t


def _op_gated_linear(x, *arguments):
    h, gate, up = run_gated_linear(x, *arguments)
    return h, _or_nothing(gate, x), _or_nothing(up, x)


def _fake_gated_linear(x, w, w_up, bias, up_bias, order, columns, limit, alpha, up_offset, cubic, keep):
    h = x.new_empty((*x.shape[:-1], _hidden(w, w_up, columns)))
    return (h, *(_empty_like(h) if keep else x.new_empty(0) for _ in range(2)))


def _op_gated_linear_backward(dh, x, *arguments):
    needs = arguments[-5:]
    return tuple(_or_nothing(t if need else None, x) for t, need in zip(run_gated_linear_backward(dh, x, *arguments), needs))


def _fake_gated_linear_backward(dh, x, w, w_up, bias, up_bias, gate, up, *options):
    return tuple(_fake_rows(t) if t is not None and need else x.new_empty(0) for t, need in zip((x, w, w_up, bias, up_bias), options[-5:]))


def _gated_linear_backward_formula(dh, x, w, w_up, bias, up_bias, gate, up, *options):
    return gradients(lambda *operands: _plain.gated_linear(*operands, *options[:-5]), (x, w, w_up, bias, up_bias), options[-5:], (dh,))


_GATED_OPERANDS = "Tensor x, Tensor w, Tensor? w_up, Tensor? bias, Tensor? up_bias"
_GATED_OPTIONS = "int order, bool columns, float limit, float alpha, float up_offset, float cubic"

gated_linear_backward_op = _register(
    f"gated_linear_backward(Tensor dh, {_GATED_OPERANDS}, Tensor gate, Tensor up, {_GATED_OPTIONS}, bool need_dx, bool need_dw, bool need_dw_up, "
    "bool need_db, bool need_db_up) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op_gated_linear_backward,
    _fake_gated_linear_backward,
    **again(_gated_linear_backward_formula),
)


def _setup_gated_linear(ctx, inputs, output):
    ctx.options = inputs[5:-1]
    ctx.there = [t is not None for t in inputs[:5]]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], output[1], output[2])


def _gated_linear_gradients(ctx, dh, run):
    """Of all twelve arguments."""
    if dh is None:
        return (None,) * 12
    needs = [there and need for there, need in zip(ctx.there, ctx.needs_input_grad)]
    found = run(dh, *ctx.saved_tensors, *ctx.options, *needs)
    return (*(t if wanted else None for t, wanted in zip(found, needs)), *(None,) * 7)


gated_linear_op = _register(
    f"gated_linear({_GATED_OPERANDS}, {_GATED_OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor)",
    _op_gated_linear,
    _fake_gated_linear,
    lambda ctx, dh, dgate, dup: _gated_linear_gradients(ctx, dh, gated_linear_backward_op),
    _setup_gated_linear,
)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        h, gate, up = run_gated_linear(*arguments, True)
        ctx.options = arguments[5:]
        ctx.there = [t is not None for t in arguments[:5]]
        ctx.save_for_backward(*arguments[:5], gate, up)
        return h

    @knowing_whether_recorded
    def backward(ctx, recorded, dh):
        return _gated_linear_gradients(ctx, dh, gated_linear_backward_op if recorded else run_gated_linear_backward)[:11]


gated_linear_eager = eager(_GatedLinear)


# --- rotary embedding -------------------------------------------------------------------------------------------------


def _as_heads(t):
    """(..., H, D) with tokens one stride apart; heads may lie anywhere."""
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
    y = _empty_rows(x)
    _C.rope(x, y, dense(positions), dense(cos), dense(sin), interleaved, sign)
    return y


def run_rope_(x, positions, cos, sin, interleaved, sign):
    if _as_heads(x) is not x:
        raise ValueError(f"rope_: x: found strides {x.stride()} for shape {tuple(x.shape)}, expected contiguous heads, tokens one stride apart")
    _C.rope(x, x, dense(positions), dense(cos), dense(sin), interleaved, sign)
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # autograd is to find out where it had kept x
    return x


def _setup_rope(ctx, inputs, output):
    _, positions, cos, sin, ctx.interleaved, ctx.sign = inputs
    ctx.save_for_backward(positions, cos, sin)


def _rope_gradients(ctx, dy):
    positions, cos, sin = ctx.saved_tensors  # a rotation's derivative is the rotation by the opposite angle
    return rope_op(dy, positions, cos, sin, ctx.interleaved, -ctx.sign), None, None, None, None, None


rope_op = _register(
    "rope(Tensor x, Tensor positions, Tensor cos, Tensor sin, bool interleaved, int sign) -> Tensor",
    run_rope,
    lambda x, positions, cos, sin, interleaved, sign: _fake_rows(x),
    _rope_gradients,
    _setup_rope,
)


def run_qk_norm_rope(x, positions, cos, sin, gain, eps, interleaved, sign):
    x = _as_heads(x)
    y = _empty_rows(x)
    _C.qk_norm_rope(x, y, dense(positions), dense(cos), dense(sin), dense(gain), eps, interleaved, sign)
    return y


def run_qk_norm_rope_backward(x, dy, positions, cos, sin, gain, eps, interleaved, sign):
    x, dy = _as_heads(x), _as_heads(dy)
    dx = _empty_rows(x)
    dgain = None if gain is None else x.new_zeros(x.shape[-2], dtype=sum_dtype(x.dtype))
    _C.qk_norm_rope_backward(x, dy, dx, dense(positions), dense(cos), dense(sin), dense(gain), dgain, eps, interleaved, sign)
    return dx, x.new_empty(0, dtype=sum_dtype(x.dtype)) if dgain is None else dgain


def _qk_norm_rope_backward_formula(x, dy, positions, cos, sin, gain, eps, interleaved, sign):
    return gradients(lambda x, gain: _plain.qk_norm_rope(x, positions, cos, sin, gain, eps, interleaved, sign), (x, gain),
                     (True, gain is not None), (dy,))


qk_norm_rope_backward_op = _register(
    "qk_norm_rope_backward(Tensor x, Tensor dy, Tensor? positions, Tensor? cos, Tensor? sin, Tensor? gain, float eps, "
    "bool interleaved, int sign) -> (Tensor, Tensor)",
    run_qk_norm_rope_backward,
    lambda x, dy, positions, cos, sin, gain, eps, interleaved, sign: (
        _fake_rows(x),
        x.new_empty(0 if gain is None else x.shape[-2], dtype=sum_dtype(x.dtype)),
    ),
    **again(_qk_norm_rope_backward_formula),
)


def _setup_qk_norm_rope(ctx, inputs, output):
    x, positions, cos, sin, gain, *ctx.options = inputs
    ctx.save_for_backward(x, positions, cos, sin, gain)


def _qk_norm_rope_gradients(ctx, dy):
    x, positions, cos, sin, gain = ctx.saved_tensors
    dx, dgain = qk_norm_rope_backward_op(x, dy, positions, cos, sin, gain, *ctx.options)
    return dx, None, None, None, None if gain is None else dgain.to(gain.dtype), None, None, None


qk_norm_rope_op = _register(
    "qk_norm_rope(Tensor x, Tensor? positions, Tensor? cos, Tensor? sin, Tensor? gain, float eps, bool interleaved, int sign) -> Tensor",
    run_qk_norm_rope,
    lambda x, positions, cos, sin, gain, eps, interleaved, sign: _fake_rows(x),
    _qk_norm_rope_gradients,
    _setup_qk_norm_rope,
)


# --- activations ------------------------------------------------------------------------------------------------------


def run_activation(x, name):
    x = as_rows(x)
    y = _empty_rows(x)
    _C.activation(x, y, activation_number("activation", name))
    return y


def run_activation_backward(dy, x, name):
    dy, x = as_rows(dy), as_rows(x)
    dx = _empty_rows(x)
    _C.activation_backward(dy, x, dx, activation_number("activation", name))
    return dx


def _activation_backward_formula(dy, x, name):
    return gradients(lambda x: _plain.activation(x, name), (x,), (True,), (dy,))


activation_backward_op = _register(
    "activation_backward(Tensor dy, Tensor x, str name) -> Tensor",
    run_activation_backward,
    lambda dy, x, name: _fake_rows(x),
    **again(_activation_backward_formula),
)


def _setup_activation(ctx, inputs, output):
    x, ctx.name = inputs
    ctx.save_for_backward(x)


activation_op = _register(
    "activation(Tensor x, str name) -> Tensor",
    run_activation,
    lambda x, name: _fake_rows(x),
    lambda ctx, dy: (activation_backward_op(dy, *ctx.saved_tensors, ctx.name), None),
    _setup_activation,
)
