"""What hf.patch's kinds of replacements share."""
import copy
import inspect
import types
from dataclasses import dataclass
from typing import Callable

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Replacement:
    """A forward for one module, checked against its own."""

    kind: str  # in words, for the report
    form: str
    errors: dict  # by dtype, of those that are served; the module's own forward does the others
    forward: Callable  # of the module and its inputs


def takes_one_input(module):
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return False
    free = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(free) == 1 and all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_KEYWORD) for p in signature.parameters.values())


def error_of(found, expected):
    size = expected.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return ((found.double() - expected.double()).abs() / size.double()).max().item()


def own_forward(module):
    """What computes `module` so far, as a function of the module too: a copy of it has weights of its own."""
    forward = module.forward
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        return forward.__func__
    return lambda _, *arguments, **named: forward(*arguments, **named)


def with_children(module, **children):
    """A copy of the module that shares all but these children."""
    probe = copy.copy(module)
    probe.__dict__["_modules"] = {**module._modules, **children}
    return probe


def is_plain_linear(module):
    """An nn.Linear as it was made: nothing watches, wraps or computes its weight."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is torch.nn.Linear and "forward" not in module.__dict__ and not any(hooks)


def small_linear(in_features, out_features, like, scale, generator):
    """An nn.Linear with random numbers, on the device and with as many biases as `like`."""
    with torch.device("cpu"):  # the same numbers wherever tensors are made by default
        linear = torch.nn.Linear(in_features, out_features, bias=like.bias is not None)
        for p in linear.parameters():
            p.data = torch.randn(p.shape, generator=generator) * scale
    return linear.to(like.weight.device)
