"""Operators declared by kernel() (ingot/_kernel.py): the function, the operator and the fake kernel agree."""
import pytest
import torch

from conftest import on_cpu
from ingot import _gates, _rms_norm


def cases(device, dtype=torch.float32):
    """By name: the kernel, and arguments with and without the operands that may be None."""

    def new(*shape):
        return torch.randn(shape, device=device).to(dtype)

    x, w, rstd, numbers = new(2, 3, 8), new(8), torch.rand(2, 3, device=device), (0.0, 1.0, 0.0, 0.0)
    packed, halves = new(5, 8), (new(6, 8), new(6, 8))
    return {
        "rms_norm": (_rms_norm._rms_norm, [(x, w, None, False), (x, None, 1e-6, False)]),
        "add_rms_norm": (_rms_norm._add_rms_norm, [(x, new(2, 3, 8), w, None, True)]),
        "rms_norm_backward": (_rms_norm._backward, [(x, None, x, w, rstd, None, False, *need) for need in ((True, True), (True, False), (False, True))]),
        "swiglu_gate": (_gates._gate, [(packed, None, 2, *numbers), (packed, new(5, 8), 0, *numbers)]),
        "swiglu_gate_backward": (_gates._gate_backward, [(new(5, 4), packed, None, 1, *numbers), (packed, packed, packed, 0, *numbers)]),
        "gated_linear": (_gates._linear, [(x, new(12, 8), None, None, None, 0, False, *numbers, keep) for keep in (False, True)]
                         + [(x, *halves, new(6), new(6), 0, False, *numbers, True)]),
        "gated_linear_backward": (_gates._linear_backward, [
            (new(2, 3, 12), x, new(12, 8), None, new(12), None, 1, False, True, False, False, True, False),
            (new(2, 3, 12), x, *halves, None, None, 0, False, False, True, False, False, False)]),
    }


def as_list(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def on_meta(arguments):
    return [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]


@pytest.mark.parametrize("name", cases("cpu"))
def test_the_fake_kernel_has_the_shapes_and_dtypes_of_the_operator(device, name):
    kernel, calls = cases(device)[name]
    for arguments in calls:
        found, fake = as_list(kernel.operator(*arguments)), as_list(kernel.operator(*on_meta(arguments)))
        assert [(t.shape, t.dtype, t.stride()) for t in found] == [(t.shape, t.dtype, t.stride()) for t in fake]


@pytest.mark.parametrize("name", cases("cpu"))
def test_the_function_returns_none_where_the_operator_returns_an_empty_tensor(device, name):
    kernel, calls = cases(device)[name]
    for arguments in calls:
        for own, found in zip(as_list(kernel.run(*arguments)), as_list(kernel.operator(*arguments)), strict=True):
            if own is None:
                assert found.shape == (0,)
            else:
                assert found.numel() and torch.equal(own, found)


@pytest.mark.parametrize("name", cases("cpu"))
def test_operands_whose_rows_lie_apart_give_the_same_results(device, name):
    kernel, calls = cases(device)[name]
    for arguments in calls:
        apart = [torch.stack([a, a], -1)[..., 0] if isinstance(a, torch.Tensor) else a for a in arguments]
        for expected, found in zip(as_list(kernel.run(*arguments)), as_list(kernel.run(*apart)), strict=True):
            assert (found is None) == (expected is None) and (found is None or torch.equal(found, expected))


@on_cpu
@pytest.mark.parametrize("name", ["gated_linear", "gated_linear_backward"])
def test_operands_of_16_bits_are_computed_in_fp32_on_a_cpu(name):
    kernel, calls = cases("cpu", torch.bfloat16)[name]
    for arguments in calls:
        wide = kernel.run(*(a.float() if isinstance(a, torch.Tensor) else a for a in arguments))
        for expected, found in zip(wide, kernel.run(*arguments), strict=True):
            assert found is None if expected is None else torch.equal(found, expected.bfloat16())


def test_operands_are_refused_before_anything_is_allocated():
    with pytest.raises(ValueError, match="gated_linear: bias: found dtype torch.float64, expected x's torch.float32"):
        _gates._linear.run(torch.empty(2, 8), torch.empty(12, 8), None, torch.empty(12, dtype=torch.float64), None, 0, False, 0.0, 1.0, 0.0, 0.0, False)
    with pytest.raises(TypeError, match="rms_norm: weight: found list, expected torch.Tensor"):
        _rms_norm._rms_norm.run(torch.empty(2, 8), [1.0], None, False)
