"""Derivatives of derivatives.

Each operation's backward pass is a separate operator, `<op>_backward`, which runs a kernel. Autograd differentiates that operator by its formula: the same
results in PyTorch's own operations, which can be differentiated any number of times. First derivatives therefore always come from kernels, and second
derivatives (gradient penalties, Hessians, products with Hessians) from formulas.

A new operation that is written by hand: its forward formula goes into _plain.py. Its backward operator is registered with `**with_formula(formula)`, where
`formula` takes the operator's arguments and returns the operator's results, None for each result that is not wanted; `gradients` below makes this one
line. Its autograd.Function, if it has one, runs the kernel in `backward(ctx, recorded, ...)` where `recorded` is false, and otherwise calls the operator
with the saved tensors, so that autograd records how the results depend on them. Tests: a line in `pairs` of test_second_order.py. Declared operators
(_declare.py) have all of this.
"""
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

_transforms_active = torch._C._are_functorch_transforms_active
is_batched = torch._C._functorch.is_legacy_batchedtensor


def gradients(function, inputs, wanted, cotangents):
    """The gradients of sum(cotangent * output) over the outputs of `function(*inputs)` with respect to each wanted input. None for an input that is not wanted,
    or on which no output depends. Outputs and cotangents may be None. The result can be differentiated where gradients are recorded."""
    if not any(wanted):
        return [None] * len(inputs)
    derive = _by_transform if _transforms_active() else _by_tape
    return derive(function, inputs, wanted, cotangents)


def _counted(outputs, cotangents):
    """The pairs (output, cotangent) that contribute. An output that was not wanted is empty in the operator and None in its formula."""
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [(y, c.to(y.dtype)) for y, c in zip(outputs, cotangents) if y is not None and c is not None]


def _by_tape(function, inputs, wanted, cotangents):
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():

        def own(t, w):  # the same tensor may occur in two places, and each place has its own gradient
            if not isinstance(t, torch.Tensor):
                return t
            t = t.view_as(t) if recorded else t.detach()
            return t.detach().requires_grad_() if w and not t.requires_grad else t

        inputs = [own(t, w) for t, w in zip(inputs, wanted)]
        pairs = [(y, c) for y, c in _counted(function(*inputs), cotangents) if y.requires_grad]
        found = [None] * len(inputs)
        if not pairs:
            return found
        places = [i for i, w in enumerate(wanted) if w]
        outputs, cotangents = zip(*pairs)
        parts = torch.autograd.grad(outputs, [inputs[i] for i in places], cotangents, create_graph=recorded, allow_unused=True)
        for i, part in zip(places, parts):
            found[i] = part
        return found


def _by_transform(function, inputs, wanted, cotangents):
    """The same as `gradients` inside torch.func's transforms, whose tensors the tape does not follow."""
    places = [i for i, w in enumerate(wanted) if w]

    def of_wanted(*parts):
        given = list(inputs)
        for i, part in zip(places, parts):
            given[i] = part
        pairs = _counted(function(*given), cotangents)
        return sum(((y * c).sum() for y, c in pairs), start=parts[0].new_zeros(()))

    found = [None] * len(inputs)
    for i, part in zip(places, torch.func.grad(of_wanted, argnums=tuple(range(len(places))))(*(inputs[i] for i in places))):
        found[i] = part
    return found


def with_formula(formula):
    """Arguments of `register` for an operator whose gradient is that of `formula`, a function of the operator's arguments."""

    def setup(ctx, inputs, output):
        flat, ctx.arguments = tree_flatten(inputs)
        ctx.set_materialize_grads(False)
        ctx.others = [_TENSOR if isinstance(a, torch.Tensor) else a for a in flat]
        ctx.save_for_backward(*(a for a in flat if isinstance(a, torch.Tensor)))

    def backward(ctx, *cotangents):
        saved = iter(ctx.saved_tensors)
        flat = [next(saved) if a is _TENSOR else a for a in ctx.others]
        arguments = tree_unflatten(flat, ctx.arguments)
        needs = [n for argument, need in zip(arguments, ctx.needs_input_grad) for n in _each(argument, need)]
        wanted = [isinstance(a, torch.Tensor) and a.is_floating_point() and need for a, need in zip(flat, needs)]
        found = gradients(lambda *flat: formula(*tree_unflatten(flat, ctx.arguments)), flat, wanted, cotangents)
        return tuple(_of_argument(a, g) for a, g in zip(arguments, tree_unflatten(found, ctx.arguments)))

    return {"backward": backward, "setup": setup}


_TENSOR = object()


def _each(argument, need):
    """Whether the gradient of each leaf of an argument is needed: PyTorch gives a list for a list of tensors."""
    if not isinstance(argument, (list, tuple)):
        return [need]
    return need if isinstance(need, (list, tuple)) else [need] * len(argument)


def _of_argument(argument, gradient):
    """The gradient in the structure that PyTorch expects: a list for a list of tensors, None for any other list."""
    if not isinstance(argument, (list, tuple)):
        return gradient
    return list(gradient) if any(isinstance(a, torch.Tensor) for a in argument) else None


def knowing_whether_recorded(backward):
    """The backward of an autograd.Function from `backward(ctx, recorded, *gradients)`. recorded: the caller wants a graph of this pass, or the gradients
    are a batch (is_grads_batched), so the results must come from the operator; otherwise the kernel is called directly."""

    def run(ctx, *gradients):
        for g in gradients:
            if g is not None and (g.is_neg() or g._is_zerotensor() or is_batched(g)):
                recorded = torch.is_grad_enabled() or any(g is not None and is_batched(g) for g in gradients)
                return backward(ctx, recorded, *map(_in_memory, gradients))
        return backward(ctx, torch.is_grad_enabled(), *gradients)

    return staticmethod(run)


def _in_memory(g):
    """`g` with its values in memory: PyTorch may have represented `g` as a lazy negative, or as zeros without memory."""
    if g is None or not (g.is_neg() or g._is_zerotensor()):
        return g
    return g.resolve_neg() if g.is_neg() else torch.zeros_like(g)
