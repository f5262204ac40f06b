"""Linear layer and cross entropy: operators over rows, which hold the logits of only a chunk of rows at a time."""
import torch

from . import _C, _plain
from ._second_order import gradients, knowing_whether_recorded, with_formula
from ._op import as_rows, eager, fake_rows, or_nothing, register, sum_dtype

_I32 = torch.iinfo(torch.int32)


def _narrow_on_cpu(x):
    """CPUs do not compute this loss in 16 bits: operands are widened, and results rounded."""
    return not x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _i32(target):
    """Targets in 32 bits. A target beyond 32 bits becomes a number that is no class: on a CPU an error, on a GPU a loss of NaN."""
    if target.dtype is torch.int64:
        target = target.clamp(_I32.min, _I32.max)
    return target.to(torch.int32).contiguous()


def _kept_dtype(parameter):
    """The dtype of a gradient before its factor is applied: a sum over all rows may exceed fp16."""
    return torch.float32 if parameter.dtype is torch.float16 else parameter.dtype


# The most logits (T V) and rows (T) whose gradient of the weights is summed in bf16: the kernels then divide the rows into at most six chunks, in the common case
# into two to four. The sum is rounded once per chunk; as its partial sums grow like the square root of their number of rows, n roundings leave about
# sqrt((n + 1) / 2) times the error of a single rounding.
_FEW_LOGITS, _FEW_ROWS = 2**31, 6 * 16384


def _accumulator(x, weight):
    """The dtype in which the chunks' gradients of the weights are summed. fp32 takes twice the memory, and one more pass, which rounds."""
    few = x.shape[0] <= _FEW_ROWS and x.shape[0] * weight.shape[0] <= _FEW_LOGITS
    return torch.bfloat16 if x.dtype is torch.bfloat16 and x.is_cuda and few else sum_dtype(x.dtype)


def _run(x, weight, bias, target, dloss, needs, options):
    """Returns (losses of the rows, dx, dw, db). None for each gradient that is not needed; db in the type of sums, dw in _accumulator's."""
    need_dx, need_dw, need_db = needs
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else None
    dw = torch.zeros(weight.shape, dtype=_accumulator(x, weight), device=x.device) if need_dw else None
    loss = x.new_empty(x.shape[0], dtype=sum_dtype(x.dtype))
    ones, column, dcolumn = _as_features(x, weight, bias, need_db)
    _C.linear_cross_entropy(as_rows(x), as_rows(weight), ones, column, _i32(target), loss, dloss, dx, dw, dcolumn, *options)
    return loss, dx, dw, None if dcolumn is None else dcolumn[:, 0].contiguous()


def _as_features(x, weight, bias, need_db):
    """Turns a bias into the weight of an additional feature that is 1. Returns (features, weights, their gradient). On a GPU zeros fill the features up to
    whole 16 bytes."""
    if bias is None:
        return None, None, None
    width = 8 if x.is_cuda else 1
    ones, column = x.new_zeros(x.shape[0], width), weight.new_zeros(weight.shape[0], width)
    ones[:, 0] = 1
    column[:, 0] = bias
    return ones, column, torch.zeros(column.shape, dtype=sum_dtype(x.dtype), device=x.device) if need_db else None


def _wide(*tensors):
    return [None if t is None else t.float() for t in tensors]


def _check(x, weight, bias):
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype is not x.dtype:
            raise ValueError(f"linear_cross_entropy: {name}: found dtype {t.dtype}, expected x's {x.dtype} (or autocast)")


def run_linear_cross_entropy(x, weight, bias, target, softcap, z_loss, ignore_index, label_smoothing, reduce, *needs):
    """Returns (the rows' losses, or their sum; dx, dw and db of the sum, None for each that is not needed)."""
    _check(x, weight, bias)
    operands = _wide(x, weight, bias) if _narrow_on_cpu(x) else [x, weight, bias]
    needs = needs if reduce else (False,) * 3
    dloss = x.new_ones(x.shape[0], dtype=sum_dtype(x.dtype)) if any(needs) else None
    loss, dx, *of_parameters = _run(*operands, target, dloss, needs, (softcap, z_loss, ignore_index, label_smoothing))
    found = [t if t is None else t.to(_kept_dtype(p)) for t, p in zip(of_parameters, (weight, bias))]
    return loss.sum() if reduce else loss, None if dx is None else dx.to(x.dtype), *found


def run_linear_cross_entropy_backward(dloss, x, weight, bias, target, softcap, z_loss, ignore_index, label_smoothing, *needs):
    """Returns (dx, dw, db) from the gradients of the rows' losses; dw and db in _kept_dtype."""
    operands = _wide(x, weight, bias) if _narrow_on_cpu(x) else [x, weight, bias]
    _, *found = _run(*operands, target, dloss.to(sum_dtype(x.dtype)).contiguous(), needs, (softcap, z_loss, ignore_index, label_smoothing))
    dtypes = x.dtype, _kept_dtype(weight), bias is None or _kept_dtype(bias)
    return tuple(t if t is None else t.to(dtype) for t, dtype in zip(found, dtypes))


def _op(x, weight, *arguments):
    loss, *found = run_linear_cross_entropy(x, weight, *arguments)
    return loss, *(or_nothing(t, x) for t in found)


def _fake(x, weight, bias, target, softcap, z_loss, ignore_index, label_smoothing, reduce, need_dx, need_dw, need_db):
    loss = x.new_empty(() if reduce else x.shape[:1], dtype=sum_dtype(x.dtype))
    dx = fake_rows(x) if need_dx and reduce else x.new_empty(0)
    return loss, dx, *(p.new_empty(p.shape, dtype=_kept_dtype(p)) if need and reduce else x.new_empty(0) for need, p in
                       ((need_dw, weight), (need_db, bias)))


def _op_backward(dloss, x, *arguments):
    return tuple(or_nothing(t, x) for t in run_linear_cross_entropy_backward(dloss, x, *arguments))


def _fake_backward(dloss, x, weight, bias, target, softcap, z_loss, ignore_index, label_smoothing, need_dx, need_dw, need_db):
    dx = fake_rows(x) if need_dx else x.new_empty(0)
    return dx, *(p.new_empty(p.shape, dtype=_kept_dtype(p)) if need else x.new_empty(0) for need, p in ((need_dw, weight), (need_db, bias)))


def _backward_formula(dloss, x, weight, bias, target, softcap, z_loss, ignore_index, label_smoothing, *needs):
    return gradients(lambda x, weight, bias: _plain.linear_cross_entropy(x, weight, bias, target, softcap, z_loss, ignore_index, label_smoothing, False),
                     (x, weight, bias), needs, (dloss,))


_OPERANDS = "Tensor x, Tensor weight, Tensor? bias, Tensor target, float softcap, float z_loss, int ignore_index, float label_smoothing"
_NEEDS = "bool need_dx, bool need_dw, bool need_db"

linear_cross_entropy_backward_op = register(f"linear_cross_entropy_backward(Tensor dloss, {_OPERANDS}, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
                                             _op_backward, _fake_backward, **with_formula(_backward_formula))


def _needs(ctx):
    return ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2]


def _formed_again(ctx, run, dloss, operands):
    """Computes the gradients again from the operands: the product for the logits, and the two products of the gradients. Gradients of a sum are computed
    without dloss and then multiplied by dloss, like the gradients that are computed together with the sum, so the bits are the same."""
    x = operands[0]
    of_rows = x.new_ones(x.shape[0], dtype=sum_dtype(x.dtype)) if ctx.reduce else dloss
    found = run(of_rows, *operands, *ctx.options, *_needs(ctx))
    return _times(ctx, found, dloss if ctx.reduce else None, operands)


def _times(ctx, found, factor, operands, in_place=False):
    """The needed gradients, multiplied in fp32 (PyTorch itself would first round a factor without dimensions to the dtype of the gradient)."""
    result = []
    for t, p, need in zip(found, operands, _needs(ctx)):
        if need and factor is not None:
            t = _multiply(t, factor.reshape(1)) if in_place else t * factor.reshape(1)
        result.append(t.to(p.dtype) if need else None)
    return result


def _multiply(t, factor):
    """t times the one element of `factor`, in place. Beside a 16-bit t, PyTorch multiplies by an fp32 tensor without vectors, in two to five times the time
    that the bytes need; scaled_add_backward multiplies columns by fp32 factors, with the same single rounding."""
    if t.is_cuda and t.dim() > 1 and t.numel() > 0 and t.dtype in (torch.bfloat16, torch.float16) and t.is_contiguous():
        rows = t.view(-1, t.shape[-1])
        try:
            _C.scaled_add_backward(rows, factor.float().expand(rows.shape[1]).contiguous(), rows)
            return t
        except NotImplementedError:  # a build without this room
            pass
    return t.mul_(factor)


def _setup(ctx, inputs, output):
    x, weight, bias, target, *ctx.options, ctx.reduce, _, _, _ = inputs
    ctx.has_bias = bias is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, bias, target, *output[1:])


def _op_gradients(ctx, dloss, *_):
    if dloss is None:
        return (None,) * 12
    *operands, dx, dw, db = ctx.saved_tensors
    there = ctx.reduce and all(t.numel() == p.numel() for t, p, need in zip((dx, dw, db), operands, _needs(ctx)) if need)
    if there and not torch.is_grad_enabled():
        found = _times(ctx, (dx, dw, db), dloss, operands)
    else:
        found = _formed_again(ctx, linear_cross_entropy_backward_op, dloss, operands)
    return *found, *(None,) * 9


linear_cross_entropy_op = register(f"linear_cross_entropy({_OPERANDS}, bool reduce, {_NEEDS}) -> (Tensor, Tensor, Tensor, Tensor)", _op, _fake,
                                    _op_gradients, _setup)


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients of a sum are computed together with the sum. The first backward pass multiplies them in place and returns them; a later backward pass
    computes them again."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, reduce, *options):
        ctx.options, ctx.reduce, ctx.has_bias = options, reduce, bias is not None
        ctx.save_for_backward(x, weight, bias, target)
        loss, *ctx.found = run_linear_cross_entropy(x, weight, bias, target, *options, reduce, *_needs(ctx))
        return loss

    @knowing_whether_recorded
    def backward(ctx, recorded, dloss):
        operands = ctx.saved_tensors
        if recorded or not ctx.reduce or ctx.found is None:
            run = linear_cross_entropy_backward_op if recorded else run_linear_cross_entropy_backward
            found = _formed_again(ctx, run, dloss, operands)
        else:
            found, ctx.found = ctx.found, None
            found = _times(ctx, found, None if not dloss.is_cuda and dloss == 1 else dloss, operands, in_place=True)
        return *found, *(None,) * (2 + len(ctx.options))


linear_cross_entropy_eager = eager(_LinearCrossEntropy)
