"""Recognition and replacement of rotary embeddings for hf.patch: modules, usually attention, whose forward calls apply_rotary_pos_emb(q, k, cos, sin).

The replacing forward is the module's own code, in which the name apply_rotary_pos_emb stands for a function that calls the kernel. The function is
compared with the kernel, apart from the module.
"""
import inspect
import types
import weakref

import torch
from torch.compiler import is_dynamo_compiling

from . import _C, _rope
from ._hf_parts import DTYPES, Replacement, error_of, own_forward
from ._op import eager
from ._second_order import knowing_whether_recorded

_NAME = "apply_rotary_pos_emb"
_PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")
# The bound is relative to the largest number m of a row. The original rounds two products, whose sizes add up to at most sqrt(2) * sqrt(2) m, and their
# sum. The kernel rounds only the sum.
_TOLERANCE = {dtype: 4 * torch.finfo(dtype).eps / 2 for dtype in DTYPES}


def replacement(module):
    """Returns a Replacement, the reason why the module's rotary embedding cannot be replaced, or None where its forward calls no such function."""
    original = own_forward(module)
    function = _function_of(inspect.unwrap(original))
    if function is None:
        return None
    if not _holds(original):
        return "its forward is decorated by a function that does not keep the forward in its closure"
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return "its weights are on the meta device"
    verdict = _verify(function, device)
    if isinstance(verdict, str):
        return verdict
    errors, repeated = verdict
    key = original, function, frozenset(errors), repeated
    return Replacement("rotary embedding", "half-split pairs", errors, _fused(*key), key)


def _function_of(forward):
    """Returns the function apply_rotary_pos_emb in the module of the forward, if it has the known parameters, otherwise None."""
    if not isinstance(forward, types.FunctionType) or _NAME not in forward.__code__.co_names:
        return None
    function = forward.__globals__.get(_NAME)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return function if tuple(parameters) == _PARAMETERS and parameters["unsqueeze_dim"].default == 1 else None


def _has(cell, function):
    """Whether the cell of a closure holds the function."""
    try:
        return cell.cell_contents is function
    except ValueError:  # a variable without a value
        return False


def _holds(forward):
    """Whether each decorator of the forward keeps the function that it decorates in its closure, so that _decorated can replace the innermost one."""
    while hasattr(forward, "__wrapped__"):
        if not isinstance(forward, types.FunctionType) or not any(_has(cell, forward.__wrapped__) for cell in forward.__closure__ or ()):
            return False
        forward = forward.__wrapped__
    return True


def _copy(function, global_names=None, closure=None):
    copied = types.FunctionType(function.__code__, function.__globals__ if global_names is None else global_names, function.__name__, function.__defaults__,
                                function.__closure__ if closure is None else closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _decorated(forward, innermost):
    """Returns a copy of the forward, with all its decorators, in which `innermost` takes the place of the decorated function. (Decorators of transformers,
    for example, accept the earlier name of an argument.)"""
    if not hasattr(forward, "__wrapped__"):
        return innermost
    inner = _decorated(forward.__wrapped__, innermost)
    return _copy(forward, closure=tuple(types.CellType(inner) if _has(cell, forward.__wrapped__) else cell for cell in forward.__closure__))


def _verify(function, device):
    """Returns ({dtype: error}, whether cos and sin hold each angle twice), or the reason why the function is not the kernel's."""
    generator = torch.Generator().manual_seed(1)
    with torch.device("cpu"):  # the same numbers whatever PyTorch's default device is
        q, k = (torch.randn(2, heads, 5, 16, generator=generator) for heads in (3, 1))
        angles = torch.randn(2, 5, 8, generator=generator) * 3
    errors, repeated, why, differs = {}, None, "no dtype could be tried", None
    for dtype in DTYPES:
        for twice in (True, False) if repeated is None else (repeated,):
            table = torch.cat([angles] * (2 if twice else 1), -1)
            operands = [t.to(device, dtype) for t in (q, k, table.cos(), table.sin())]
            try:
                expected = function(*operands)
            except Exception as e:
                why = f"its rotary embedding failed on {dtype}: {e}"
                continue
            try:
                found = _rotate(*operands)
            except Exception as e:
                return f"the kernel refused it: {e}"
            if [(y.shape, y.dtype) for y in found] != [(y.shape, y.dtype) for y in expected]:
                why = f"its rotary embedding returns another shape or type in {dtype}"
                continue
            error = max(error_of(a, b) for a, b in zip(found, expected))
            if error <= _TOLERANCE[dtype]:
                errors[dtype], repeated = error, twice
                break
            differs = f"its rotary embedding differs from half-split pairs by {error:.1e} in {dtype}"
        if dtype is torch.float32 and not errors:
            return differs or why
    return errors, repeated


class _Tables:
    """The kernel's table of the last cos and sin: each forward pass of a model gives the same two tensors to all its layers."""

    def __init__(self):
        self._of, self._found = None, None

    def of(self, cos, sin, batch, half):
        """cos, sin (B or 1, S, at least `half`). (cos, sin, positions): (rows, half) fp32 twice, and the row of each of batch * S tokens, int32."""
        versions = batch, half, *(0 if t.is_inference() else t._version for t in (cos, sin))
        if self._of is None or self._of[0]() is not cos or self._of[1]() is not sin or self._of[2] != versions:
            rows = cos.shape[0] * cos.shape[1]
            table = [t.detach()[..., :half].reshape(rows, half).float().contiguous() for t in (cos, sin)]
            positions = torch.arange(rows, dtype=torch.int32, device=cos.device)
            self._found = *table, positions if cos.shape[0] == batch else positions.repeat(batch)
            self._of = weakref.ref(cos), weakref.ref(sin), versions
        return self._found


_tables = _Tables()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, positions):
        ctx.save_for_backward(cos, sin, positions)
        return _rope.run_rope(q, positions, cos, sin, False, 1), _rope.run_rope(k, positions, cos, sin, False, 1)

    @knowing_whether_recorded
    def backward(ctx, recorded, dq, dk):
        cos, sin, positions = ctx.saved_tensors
        turn = _rope.rope_op if recorded else _rope.run_rope
        return turn(dq, positions, cos, sin, False, -1), turn(dk, positions, cos, sin, False, -1), None, None, None


_rotate_eager = eager(_Rotate)


def _rotate(q, k, cos, sin):
    """q, k: (B, H, S, D). cos, sin: (B or 1, S, D) with equal halves, or (B or 1, S, D / 2)."""
    table = _tables.of(cos, sin, q.shape[0], q.shape[-1] // 2)
    return tuple(y.transpose(1, 2) for y in _rotate_eager(q.transpose(1, 2), k.transpose(1, 2), *table))


def _takes(q, k, cos, sin, unsqueeze_dim, served, repeated):
    if unsqueeze_dim != 1 or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    batch, _, length, width = q.shape
    return (q.dtype in served and q.dtype is k.dtype is cos.dtype is sin.dtype and width % 2 == 0 and cos.shape[0] in (1, batch)
            and cos.shape[1:] == (length, width if repeated else width // 2) and k.shape[0] == batch and k.shape[2:] == q.shape[2:]
            and not (cos.requires_grad or sin.requires_grad) and _C.route(q, k, cos, sin) != _C.DISPATCH)


def _fused(original, function, served, repeated):
    halves_are_equal = {}  # by device and width: the host compares once, because a model makes all its tables in one way

    def has_equal_halves(cos, sin):
        """Whether cos and sin hold each angle twice; None where the host must not wait for the GPU to find out."""
        kind = cos.device, cos.shape[-1]
        if kind not in halves_are_equal:
            if cos.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            halves_are_equal[kind] = all(torch.equal(*t.chunk(2, -1)) for t in (cos, sin))
        return halves_are_equal[kind]

    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        if _takes(q, k, cos, sin, unsqueeze_dim, served, repeated) and (not repeated or has_equal_halves(cos, sin)):
            return _rotate(q, k, cos, sin)
        return function(q, k, cos, sin, unsqueeze_dim)

    innermost = inspect.unwrap(original)
    rotated = _decorated(original, _copy(innermost, {**innermost.__globals__, _NAME: rotary}))

    def forward(self, *arguments, **named):
        # The module's own forward runs under torch.compile, which fuses the formula itself, and if the name has been given another function since.
        own = is_dynamo_compiling() or innermost.__globals__.get(_NAME) is not function
        return (original if own else rotated)(self, *arguments, **named)

    return forward
