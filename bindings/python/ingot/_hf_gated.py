"""Recognition and replacement of gated MLPs for hf.patch: down_proj(act_fn(gate_proj(x)) * up_proj(x)).

The module is run with small Linears in place of its own to find out which of the kernels' activations act_fn is, if any.
"""
import copy

import torch

from . import functional
from ._hf_parts import (DTYPES, Replacement, error_of, has_settings, is_plain_linear, own_forward, settings_of, small_linear, takes_one_input,
                        tries_in_each_mode, with_children)
from .nn import _fuses

_LINEARS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATIONS = ("silu", "gelu_tanh")
# The largest allowed error, relative to the largest value of a row of down_proj's input: the original rounds the activation once more.
_TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def replacement(module):
    """Returns a Replacement, the reason why the module cannot be replaced, or None where the module does not look like a gated MLP."""
    if "gate_up_proj" in module._modules or "gate_up_proj" in module._parameters:  # packed weights, of experts or not
        return "found gate_up_proj, expected gate_proj and up_proj"
    if not all(name in module._modules for name in _LINEARS):
        return None
    if unsupported_reason := _unsupported_reason(module):
        return unsupported_reason
    verdict = _verify(module)
    if isinstance(verdict, str):
        return verdict
    errors, activation = verdict
    act = module.act_fn
    key = frozenset(errors), activation, settings_of(module), type(act), settings_of(act) if isinstance(act, torch.nn.Module) else ()
    return Replacement("gated MLP", f"{activation} gate", errors, _fused(own_forward(module), *key), key)


def _unsupported_reason(module):
    for name in _LINEARS:
        child = getattr(module, name)
        if not isinstance(child, torch.nn.Linear):
            return f"found {name} of type {type(child).__name__}, expected Linear"
        if child.weight.is_meta:
            return f"{name} is on the meta device"
    others = [name for name in module._modules if name not in (*_LINEARS, "act_fn")]
    if others:
        return f"found modules inside it besides gate_proj, up_proj, down_proj and act_fn ({', '.join(others[:3])})"
    if list(module.named_parameters(recurse=False)):
        return "found parameters of its own, expected those of its Linears alone"
    if module.gate_proj.weight.shape != module.up_proj.weight.shape or (module.gate_proj.bias is None) != (module.up_proj.bias is None):
        return "found gate_proj and up_proj that differ in shape or bias"
    if not callable(getattr(module, "act_fn", None)):
        return "found no activation act_fn"
    if isinstance(module.act_fn, torch.nn.Module) and (list(module.act_fn.parameters()) or list(module.act_fn.children())):
        return "found an activation act_fn with parameters or modules inside it"
    return None if takes_one_input(module) else "its forward takes more than one input"


def _probe(module):
    """The module with small Linears, the last of which is the identity, and rows whose gates range from small to large."""
    generator = torch.Generator().manual_seed(1)
    gate, up = (small_linear(24, 16, getattr(module, name), 0.3, generator) for name in ("gate_proj", "up_proj"))
    down = small_linear(16, 16, module.down_proj, 0.0, generator)
    down.weight.data.copy_(torch.eye(16, device="cpu"))
    probe = with_children(module, gate_proj=gate, up_proj=up, down_proj=down)
    if isinstance(module.act_fn, torch.nn.Module):
        probe._modules["act_fn"] = copy.deepcopy(module.act_fn)
    with torch.device("cpu"):
        rows = torch.randn(6, 24, generator=generator) * torch.tensor([1e-3, 0.1, 1.0, 1.0, 4.0, 12.0]).unsqueeze(1)
    return probe, rows.to(gate.weight.device)


def _verify(module):
    """Returns ({dtype: error}, activation) for the activation that agrees with the module, or the reason why none does."""
    try:
        probe, rows = _probe(module)
    except Exception as e:
        return f"no copy of it could be tried: {e}"
    original = own_forward(module)
    errors, form, why = {}, None, "no dtype could be tried"
    for dtype in DTYPES:
        for name in _LINEARS:  # moves the Linears and not the whole probe, whose buffers belong to the module
            getattr(probe, name).to(dtype)
        x = rows.to(dtype)
        try:
            passes = [(mode, original(probe, x)) for mode in tries_in_each_mode(probe)]
        except Exception as e:
            why = f"its own forward failed on {dtype}: {e}"
            continue
        if any(not isinstance(y, torch.Tensor) or y.shape != (6, 16) or y.dtype is not dtype for _, y in passes):
            why = f"its output is not a tensor like down_proj's in {dtype}"
            continue
        differences, modes = [], []
        for activation in _ACTIVATIONS if form is None else (form,):
            try:
                found = _call(probe, x, activation)
            except Exception as e:
                return f"the kernel refused it: {e}"
            differing = [(error, mode) for mode, y in passes if not (error := error_of(found, y)) <= _TOLERANCE[dtype]]
            if not differing:
                errors[dtype], form = max(error_of(found, y) for _, y in passes), activation
                break
            differences.append(f"{differing[0][0]:.1e} from {activation}")
            modes.append(differing[0][1])
        else:
            mode = "training" if "training" in modes else "evaluation"
            why = f"it differs in {dtype} in {mode} mode by {' and '.join(differences)}"
            if dtype is torch.float32:
                return why  # in 16 bits similar activations cannot be distinguished
    return (errors, form) if errors else why


def _call(module, x, activation):
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    if is_plain_linear(gate) and is_plain_linear(up) and _fuses(x, gate.weight, up.weight, gate.bias, up.bias):
        of_gate = {"up": up.weight, "up_bias": up.bias, "activation": activation}
        if is_plain_linear(down) and _fuses(x, down.weight, down.bias):
            return functional.gated_linear(x, gate.weight, gate.bias, down=down.weight, down_bias=down.bias, **of_gate)
        return down(functional.gated_linear(x, gate.weight, gate.bias, **of_gate))
    return module.down_proj(functional.swiglu(gate(x), up(x), activation=activation))


def _fused(original, served, activation, settings, act_type, act_settings):
    def forward(self, *inputs, **named):
        (x,) = inputs or named.values()  # the input may have any name in the module's own forward
        act = self.act_fn
        if x.dtype in served and has_settings(self, settings) and type(act) is act_type and has_settings(act, act_settings):
            return _call(self, x, activation)
        return original(self, x)

    return forward
