"""Parts that the replacements of hf.patch share."""
import copy
import inspect
import logging
import os
import re
import types
from dataclasses import dataclass
from typing import Callable

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The compute capability to whose limits INGOT_GPU_AS reduces every GPU (docs/gpu-layer.md), or None. The kernels refuse a value for which they know no
# limits.
LIMIT = re.fullmatch(r"(\d+)\.(\d)", os.environ.get("INGOT_GPU_AS", ""))
LIMIT = LIMIT and (int(LIMIT[1]), int(LIMIT[2]))


def capability_of(device):
    """(major, minor) of the compute capability whose kernels a GPU runs."""
    return LIMIT or torch.cuda.get_device_capability(device)


@dataclass
class Replacement:
    """A forward for one module that has been compared with the module's own forward in training and in evaluation mode."""

    kind: str  # a description in words, for the report
    form: str
    errors: dict  # largest relative error by the dtype of the input, for the supported dtypes
    forward: Callable  # takes the module and its inputs
    key: tuple = ()  # modules of one class with equal keys can share one `forward`


class LeftAlone(Exception):
    """Raised with the reason why a module is not replaced, or not in one dtype. `differs`: the module computes a different function than the kernel."""

    def __init__(self, reason="", differs=False):
        super().__init__(reason)
        self.differs = differs


def count_fallback(counter, kind, reason):
    """Counts a layer that transformers or PyTorch computes in place of a kernel, and logs the first of each reason."""
    if torch.compiler.is_compiling():  # a compiled graph has no place to count
        return
    counter[reason] += 1
    if counter[reason] == 1:
        logging.getLogger("ingot").warning("ingot %s: PyTorch computes a layer, because of this: %s (said once)", kind, reason)


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
    """The forward of the module's class, as a function of the module, so that copies of the module compute with their own weights."""
    return type(module).forward


_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)
_SIMPLE = (int, float, str, type(None), torch.dtype, types.FunctionType, types.BuiltinFunctionType)


def settings_of(module):
    """((name, value), ...) of the attributes on which a forward may depend: numbers, strings, dtypes and functions."""
    return tuple((name, value) for name, value in module.__dict__.items()
                 if name not in _OF_EVERY_MODULE and name != "forward" and isinstance(value, _SIMPLE))


def has_settings(module, settings):
    """Whether the attributes are still those that `settings_of` found when the replacement was verified."""
    for name, value in settings:
        found = getattr(module, name, settings)
        if found is not value and (type(found) is not type(value) or found != value):
            return False
    return True


def with_children(module, **children):
    """A copy of the module that shares everything except these children and the buffers."""
    probe = copy.copy(module)
    probe.__dict__["_modules"] = {**module._modules, **children}
    probe.__dict__["_buffers"] = dict(module._buffers)
    fill_buffers(probe)
    return probe


def fill_buffers(probe):
    """Replaces the numbers in a probe's buffers, so that a forward that reads a buffer gives another result than the replacement, which reads none."""
    for name, buffer in probe._buffers.items():
        if buffer is not None and buffer.is_floating_point() and not buffer.is_meta:
            probe._buffers[name] = torch.full_like(buffer, 0.37)


def tries_in_each_mode(probe):
    """Sets evaluation mode, then training mode twice: dropout and noise differ from one training pass to the next."""
    for mode in ("evaluation", "training", "training"):
        probe.train(mode == "training")
        yield mode


def is_plain_linear(module):
    """Whether the module is an unchanged nn.Linear: no hooks, no replaced forward, no computed weight."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is torch.nn.Linear and "forward" not in module.__dict__ and not any(hooks)


def small_linear(in_features, out_features, like, scale, generator):
    """An nn.Linear with random numbers, on the device and with as many biases as `like`."""
    with torch.device("cpu"):  # the same numbers whatever PyTorch's default device is
        linear = torch.nn.Linear(in_features, out_features, bias=like.bias is not None)
        for p in linear.parameters():
            p.data = torch.randn(p.shape, generator=generator) * scale
    return linear.to(like.weight.device)
