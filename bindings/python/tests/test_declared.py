"""Declared operators (ingot/_declare.py): each case of each operation against its formula in fp64, and the promises of every declaration."""
import inspect
import pathlib

import pytest
import torch

from cases import declared
from conftest import DEVICE, on_cpu
from ingot import _declare, functional
from reference import ROUNDING

CASES = [name for name, *_ in declared("cpu")]
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "python.md"


def case_named(wanted, device, dtype=torch.float32):
    return next((op, jumps, tensors, options) for name, op, jumps, tensors, options in declared(device, dtype) if name == wanted)


def operands(op, device, dtype, rows=37, columns=45):
    found = [torch.randn(columns if name in op.columns else (rows, columns), device=device).to(dtype) for name in op.tensors]
    found[0][found[0].abs() < 1e-2] = 0.5  # away from kinks at 0
    return [t.requires_grad_() for t in found]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_the_formula_in_fp64(device, name, dtype):
    if DEVICE == "cuda" and dtype is torch.float64:
        pytest.skip("fp64 runs on a CPU")
    op, _, _, options = case_named(name, device)
    tensors = operands(op, device, dtype)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    y, expected = op.function(*tensors, *options), op.formula(*wide, *options)
    dy = torch.randn_like(y)
    assert y.shape == tensors[0].shape and y.dtype is dtype
    results = [("y", y, expected), *zip(op.tensors, torch.autograd.grad(y, tensors, dy), torch.autograd.grad(expected, wide, dy.double()))]
    for what, found, want in results:
        size = want.abs().clamp_min(1)  # some roundings of numbers around 1 in fp32, then one of the result; sums over rows have more terms
        terms = tensors[0].shape[0] if what in op.columns else 1
        allowed = (32 * terms * ROUNDING[torch.float64 if dtype is torch.float64 else torch.float32] + ROUNDING[dtype]) * size
        assert found.dtype is dtype and ((found.double() - want).abs() <= allowed).all(), f"{what}: {((found.double() - want).abs() / size).max().item()}"


@on_cpu
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_differences(name):
    op, jumps, _, options = case_named(name, "cpu", torch.float64)
    tensors = operands(op, "cpu", torch.float64, 3, 5)
    assert torch.autograd.gradcheck(lambda *t: op.function(*t, *options), tensors, fast_mode=True)
    assert jumps or torch.autograd.gradgradcheck(lambda *t: op.function(*t, *options), tensors, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_layouts_and_shapes_of_rows(device, name):
    op, _, _, options = case_named(name, device)
    tensors = [t.detach() for t in operands(op, device, torch.float32, 24, 32)]
    expected = op.function(*tensors, *options)
    apart = [torch.stack([t, t], -1)[..., 0] for t in tensors]
    turned = [t.t().contiguous().t() if t.dim() == 2 else t for t in tensors]
    for given in (apart, turned):
        assert torch.equal(op.function(*given, *options), expected)
    leading = [t.view(2, 3, 4, 32) if t.dim() == 2 else t for t in tensors]
    assert torch.equal(op.function(*leading, *options), expected.view(2, 3, 4, 32))
    assert op.function(*(t[:0] if t.dim() == 2 else t for t in tensors), *options).shape == (0, 32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_declared_operator_compiles_traces_and_maps(device, name):
    op, _, tensors, options = case_named(name, device)

    def call(*t):
        return op.function(*t, *options)

    expected = call(*tensors)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors), expected)
    torch.testing.assert_close(torch.jit.trace(call, tuple(tensors))(*tensors), expected)
    batched = [torch.stack([t, 2 * t]).detach() for t in tensors]
    torch.testing.assert_close(torch.func.vmap(call)(*batched), torch.stack([call(*(t[i] for t in batched)) for i in range(2)]))
    assert call(*(t.to("meta") for t in tensors)).shape == expected.shape


@pytest.mark.parametrize("op", _declare.OPS.values(), ids=_declare.OPS)
def test_refusals_name_the_operator_and_the_argument(device, op):
    options = list(case_named(next(name for name in CASES if name.startswith(op.name)), device)[3])
    tensors = [t.detach() for t in operands(op, device, torch.float32)]
    with pytest.raises(TypeError, match=f"{op.name}: {op.tensors[0]}: found list, expected torch.Tensor"):
        op.function([1.0], *tensors[1:], *options)
    with pytest.raises(ValueError, match=f"{op.name}: {op.tensors[0]}: found a tensor without dimensions"):
        op.function(tensors[0].sum(), *tensors[1:], *options)
    with pytest.raises(ValueError, match=f"{op.name}.*found dtype torch.int64"):
        op.function(*(t.long() for t in tensors), *options)
    for i, name in enumerate(op.tensors[1:], 1):
        wrong = [*tensors[:i], tensors[i][..., :-1], *tensors[i + 1:]]
        with pytest.raises(ValueError, match=f"{op.name}: {name}: found .*, expected"):
            op.function(*wrong, *options)


@pytest.mark.parametrize("op", _declare.OPS.values(), ids=_declare.OPS)
def test_the_function_is_found_and_described(op):
    assert getattr(functional, op.name) is op.function and op.name in functional.__all__
    assert list(inspect.signature(op.function).parameters) == [*op.tensors, *op.others]
    assert op.function.__doc__.startswith(op.summary) and op.summary.endswith(".")


@pytest.mark.skipif(not PAGE.exists(), reason="tests without the tree")
def test_the_page_has_the_table_of_declared_operators():
    text = PAGE.read_text()
    found = text[text.index("<!-- declared -->") + len("<!-- declared -->") : text.index("<!-- /declared -->")].strip()
    assert found == _declare.table(), "docs/python.md: run python -m ingot --declared, and copy the table between the marks"
