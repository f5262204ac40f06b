"""Code that the operators share: their registration with PyTorch, and the layouts that their kernels take.

Every op has up to three entries over one implementation: a plain Python function that allocates and calls the kernel (`run_*`), an
autograd.Function for eager training, and an operator registered with torch.library for tracing, transforms and dispatch
modes. `functional` chooses among them (see _C.route): the first two cost a few microseconds, the third about twice as much. The first two of
rms_norm and mlp are also written in C++ (native/calls.cpp), for dense operands. For operators over rows none of these is written by hand: _declare.py
derives all three from one declaration. For other shapes _kernel.py derives the first and the third entry.
"""
import numbers

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import _C

ACTIVATIONS = {name: i for i, name in enumerate(_C.activation_names())}
ACTIVATION_NAMES = list(ACTIVATIONS)

library = torch.library.Library("ingot", "DEF")


def activation_number(op, name):
    number = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if number is None:
        raise ValueError(f"{op}: activation: found {name!r}, expected one of {', '.join(ACTIVATIONS)}")
    return number


def expect_tensors(op, **operands):
    """Raises a TypeError or ValueError for an operand that is neither a dense tensor nor a symbol of a trace."""
    for name, t in operands.items():
        if isinstance(t, torch.Tensor):
            if t.layout is not torch.strided or t.is_nested:
                raise ValueError(f"{op}: {name}: found a {'nested ' if t.is_nested else ''}{t.layout} tensor, expected a dense one")
        elif not isinstance(t, torch.fx.Proxy):
            raise TypeError(f"{op}: {name}: found {type(t).__name__}, expected torch.Tensor")


def expect_tensors_or_none(op, **operands):
    expect_tensors(op, **{name: t for name, t in operands.items() if t is not None})


def expect_eps(op, eps):
    # torch.compile follows isinstance for a number that it keeps as a symbol, and not hasattr.
    if eps is not None and not isinstance(eps, (float, int)) and not hasattr(eps, "__float__"):
        raise ValueError(f"{op}: eps: found {eps!r}, expected a number or None")


def number(op, name, value, expected="a number"):
    """The float of an option; a ValueError for an option that is no number. Symbols of torch.compile remain symbols."""
    if isinstance(value, (float, int)) or (not isinstance(value, str) and hasattr(value, "__float__")):
        return float(value)
    raise ValueError(f"{op}: {name}: found {value!r}, expected {expected}")


def expect_bools(op, **values):
    """Raises a ValueError for an option that is no bool, because Python takes every text but "" for true, "no" too. A number or an array is no bool either."""
    for name, value in values.items():
        if not isinstance(value, (bool, torch.SymBool)):
            raise ValueError(f"{op}: {name}: found {value!r}, expected a bool")


INTEGERS = (numbers.Integral, torch.SymInt)


def expect_integers(op, low, **values):
    for name, value in values.items():
        if not isinstance(value, INTEGERS) or value < low:
            raise ValueError(f"{op}: {name}: found {value!r}, expected an integer from {low}")


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def expect_float(op, name, t):
    if t.dtype not in FLOATS:
        raise ValueError(f"{op}: {name}: found dtype {t.dtype}, expected torch.float64, torch.float32, torch.bfloat16 or torch.float16")


def expect_like(op, name, x, **operands):
    """Raises a ValueError for an operand (or None) whose dtype or device is not that of x, the argument called `name`."""
    for other, t in operands.items():
        if t is not None and t.dtype is not x.dtype:
            raise ValueError(f"{op}: {other}: found dtype {t.dtype}, expected {name}'s {x.dtype}")
        if t is not None and t.device != x.device:
            raise ValueError(f"{op}: {other}: found a tensor on {t.device}, expected {name}'s {x.device}")


def expect_offsets(op, name, offsets, rows):
    """Raises a ValueError for offsets on a CPU that do not ascend from 0 to at most `rows`. A GPU's are not read."""
    if offsets.is_cuda:
        return
    values = offsets.tolist()
    if not values or values[0] != 0 or any(a > b for a, b in zip(values, values[1:])) or values[-1] > rows:
        shown = ", ".join(map(str, values if len(values) <= 8 else [*values[:4], "...", *values[-3:]]))
        raise ValueError(f"{op}: {name}: found ({shown}), expected numbers that ascend from 0 to at most {rows}")


def expect_positions(op, positions, cos):
    """`positions` on a CPU must be rows of the table `cos`, as in the kernel. Those of a GPU and of a trace are not read. Both arguments may be None."""
    if positions is None or positions.device.type != "cpu" or torch.compiler.is_compiling():
        return positions
    values = positions
    while torch._C._functorch.is_functorch_wrapped_tensor(values):  # torch.vmap does not allow decisions that depend on one of its tensors
        values = torch._C._functorch.get_unwrapped(values)
    if type(values) is torch.Tensor and values.numel() > 0:
        (low, high), rows = values.aminmax(), cos.shape[0]
        if low < 0 or high >= rows:
            raise ValueError(f"{op}: positions: found {int(low if low < 0 else high)}, expected 0 to {rows - 1}, the rows of the table")
    return positions


def sum_dtype(dtype):
    """The dtype of statistics and of parameters' gradients."""
    return torch.float64 if dtype is torch.float64 else torch.float32


_EPS = {dtype: torch.finfo(sum_dtype(dtype)).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def default_eps(eps, dtype):
    """eps, or for None the value of torch.nn.RMSNorm: the machine epsilon of the dtype of sums."""
    return _EPS.get(dtype, 0.0) if eps is None else eps


def as_rows(t, groups=1, copy=torch.Tensor.contiguous):
    """`t` itself if its last dimension is dense and its leading ones merge into `groups` strides, else a contiguous copy."""
    if t is None or t.is_contiguous():
        return t
    if t.dim() == 0 or (t.stride(-1) != 1 and t.shape[-1] > 1):
        return copy(t)
    found, stride = 0, None
    for n, s in zip(t.shape[:-1], t.stride()[:-1]):
        if n == 1:
            continue
        if stride is None or stride != n * s:
            found += 1
        stride = s
    overlapping = any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride()))
    return t if found <= groups and not overlapping else copy(t)


def empty_apart(t):
    """`fake_rows(t)` that has no neighbour in memory. gated_linear_backward joins the products of two matrices if one begins where the other ends, and
    joined products round in a different order. Without a gap, the bits of a result would depend on where the allocator places the copies."""
    gap = 512 // t.element_size()  # a multiple of the alignment of PyTorch's allocator
    return torch.empty(t.numel() + 2 * gap, dtype=t.dtype, device=t.device)[gap : gap + t.numel()].view(t.shape)


def copy_apart(t):
    return empty_apart(t).copy_(t)


def dense(t):
    return t if t is None or t.is_contiguous() else t.contiguous()


def empty_rows(t):
    return torch.empty_like(t) if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format)


def fake_rows(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def or_nothing(t, like):
    return like.new_empty(0) if t is None else t


def _transformable(op, setup, backward):
    """`op` for torch.func, whose transforms do not follow operators with a gradient written in Python. Lists among the arguments are flattened for
    the call."""

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
    """The gradients of an argument's leaves; a list may have a single None for all of them."""
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
    """torch.vmap's rule for `op` (with several output tensors): one call after another. PyTorch does the same for operators without lists of tensors."""

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


def on_one_device(schema, fake):
    """`fake` with a check that all tensors are on one device: PyTorch calls the fake kernel as soon as one tensor is on the meta device."""
    parsed = torch._C.parse_schema(f"ingot::{schema}")
    op, names = parsed.name.removeprefix("ingot::").rstrip("_"), [a.name for a in parsed.arguments]

    def checked(*arguments):
        first = None
        for name, argument in zip(names, arguments):
            several = isinstance(argument, (list, tuple))
            for i, t in enumerate(argument if several else [argument]):
                if not isinstance(t, torch.Tensor):
                    continue
                if first is None:
                    first = name, t.device
                elif t.device != first[1]:
                    raise ValueError(f"{op}: {name}{f'[{i}]' if several else ''}: found a tensor on {t.device}, expected {first[0]}'s device, {first[1]}")
        return fake(*arguments)

    return checked


def register(schema, run, fake, backward=None, setup=None, keys=("CPU", "CUDA")):
    """keys: PyTorch's dispatch keys of `run`. An operator without tensors among its arguments needs another key, because these two are devices of arguments."""
    name = schema[: schema.index("(")]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in keys:
        library.impl(name, run, key)
    torch.library.register_fake(f"ingot::{name}", on_one_device(schema, fake), lib=library)
    if backward is not None:
        torch.library.register_autograd(f"ingot::{name}", backward, setup_context=setup, lib=library)
    op = getattr(torch.ops.ingot, name).default
    if "Tensor[]" in schema:
        torch.library.register_vmap(f"ingot::{name}", _one_by_one(op), lib=library)
    return _transformable(op, setup, backward) if backward is not None else op


def eager(function):
    """`function.apply` without PyTorch's Python wrapper, which checks for transforms that _C.route has already excluded.

    apply looks up attributes of its class by name, through every base class. The class that is made here holds these attributes itself, so that each
    lookup ends at once.
    """
    try:
        found = {name: function.__dict__[name] for name in ("forward", "_backward_cls")}
        for name in ("setup_context", "clear_saved_tensors_on_access", "boxed_grads_call"):
            if hasattr(function, name):
                found[name] = staticmethod(getattr(function, name)) if name == "setup_context" else getattr(function, name)
        return _C.quick_class(function.__name__, (torch._C._FunctionBase,), found).apply
    except (AttributeError, KeyError, TypeError):
        return function.apply
