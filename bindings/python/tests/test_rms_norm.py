import itertools

import pytest
import torch

import ingot
import reference
from conftest import on_cpu, on_gpu
from ingot import functional
from reference import assert_near

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def leaves(device, dtype, shape=(6, 96), weight_dtype=None):
    x = (torch.randn(shape, device=device) * 2).to(dtype).requires_grad_()
    w = (torch.randn(shape[-1], device=device) * 0.5 + 1).to(weight_dtype or dtype).requires_grad_()
    return x, w


@pytest.mark.parametrize("dtype,weight_dtype,unit_offset", [
    (d, w, u) for d, w, u in itertools.product(DTYPES, [None, torch.float32], [False, True]) if not (d is torch.float32 and w)])
def test_agrees_with_fp64_forward_and_backward_for_random_upstream_gradients(device, dtype, weight_dtype, unit_offset):
    x, w = leaves(device, dtype, weight_dtype=weight_dtype)
    y = functional.rms_norm(x, w, EPS, unit_offset=unit_offset)
    dy = torch.randn_like(y)
    y.backward(dy)
    ox, ow = reference.wide([x, w])
    oy = reference.rms_norm(ox, ow, EPS, unit_offset)
    oy.backward(dy.double())
    # fp32: a sum of 96 squares and three products; 16 bits: one rounding of the result
    roundings = 24 if dtype is torch.float32 else 1.5
    assert_near(y, oy, roundings, "y")
    assert_near(x.grad, ox.grad, roundings, "dx")
    assert_near(w.grad, ow.grad, 32 if w.dtype is torch.float32 else 1.5, "dw")


def test_has_the_numbers_parameters_and_default_epsilon_of_torch(device):
    for dtype in DTYPES + [torch.float64] * (device.type == "cpu"):
        ours, theirs = ingot.nn.RMSNorm(64, device=device, dtype=dtype), torch.nn.RMSNorm(64, device=device, dtype=dtype)
        with torch.no_grad():
            theirs.weight.normal_()
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(5, 64, device=device, dtype=dtype) * 1e-3  # small enough for epsilon to matter
        assert_near(ours(x), torch.nn.functional.rms_norm(x.double(), (64,), theirs.weight.double(),
                                                           torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps),
                    24 if dtype.itemsize > 2 else 1.5)
        assert repr(ours) == repr(theirs)
        assert list(ours.state_dict()) == list(theirs.state_dict())


def test_an_offset_weight_starts_as_the_plain_norm(device):
    x = torch.randn(5, 64, device=device)
    assert torch.equal(ingot.nn.RMSNorm(64, unit_offset=True, device=device)(x), ingot.nn.RMSNorm(64, device=device)(x))


def test_normalises_over_several_dimensions(device):
    ours, theirs = ingot.nn.RMSNorm((4, 8), eps=EPS, device=device), torch.nn.RMSNorm((4, 8), eps=EPS, device=device)
    x = torch.randn(3, 5, 4, 8, device=device)
    torch.testing.assert_close(ours(x), theirs(x))
    y, total = ours(x, x)
    torch.testing.assert_close((y, total), (theirs(x + x), x + x))


def test_adds_a_residual_in_both_directions(device):
    x, w = leaves(device, torch.float32)
    r = torch.randn_like(x, requires_grad=True)
    y, total = functional.rms_norm(x, w, EPS, residual=r)
    dy, dtotal = torch.randn_like(y), torch.randn_like(total)
    torch.autograd.backward((y, total), (dy, dtotal))
    ox, ow, orr = reference.wide([x, w, r])
    oy = reference.rms_norm(ox + orr, ow, EPS)
    torch.autograd.backward((oy, ox + orr), (dy.double(), dtotal.double()))
    for name, found, oracle in (("y", y, oy), ("dx", x.grad, ox.grad), ("dresidual", r.grad, orr.grad), ("dw", w.grad, ow.grad)):
        assert_near(found, oracle, 32, name)


def test_gradient_flows_when_only_the_sum_is_used(device):
    x, w = leaves(device, torch.float32)
    r = torch.randn_like(x, requires_grad=True)
    functional.rms_norm(x, w, EPS, residual=r)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(r.grad, torch.ones_like(x))
    assert w.grad is None or not w.grad.any()


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_operand_gets_no_gradient(device, frozen):
    x, w = leaves(device, torch.float32)
    (x if frozen == "x" else w).requires_grad_(False)
    functional.rms_norm(x, w, EPS).sum().backward()
    assert (x.grad is None) == (frozen == "x") and (w.grad is None) == (frozen == "weight")


@on_cpu
@pytest.mark.parametrize("unit_offset", [False, True])
def test_gradcheck_in_fp64(unit_offset):
    x, w = leaves("cpu", torch.float64, (3, 7))
    r = torch.randn_like(x, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: functional.rms_norm(x, w, EPS, unit_offset=unit_offset), (x, w))
    assert torch.autograd.gradcheck(lambda x, w, r: functional.rms_norm(x, w, EPS, residual=r), (x, w, r))
    op = torch.ops.ingot.rms_norm  # rstd is an output here, with a gradient of its own
    assert torch.autograd.gradcheck(lambda x, w: op(x, w, EPS, unit_offset), (x, w))
    add = torch.ops.ingot.add_rms_norm
    assert torch.autograd.gradcheck(lambda x, w, r: add(x, r, w, EPS, unit_offset), (x, w, r))
    assert torch.autograd.gradcheck(lambda x, w, r: add(x, r, w, EPS, unit_offset)[1:], (x, w, r))


def strided_inputs(device):
    base = torch.randn(4, 6, 32, device=device)
    yield "transposed leading dimensions", base.transpose(0, 1)
    yield "rows of a wider matrix", torch.randn(8, 80, device=device)[:, 16:48]
    yield "a slice of heads", torch.randn(4, 6, 64, device=device)[:, 1:5, :32]
    yield "every second row", torch.randn(12, 32, device=device)[::2]
    yield "columns that are not dense", torch.randn(32, 8, device=device).t()
    yield "an expanded row", torch.randn(1, 32, device=device).expand(5, 32)
    yield "four dimensions, permuted", torch.randn(2, 3, 4, 32, device=device).permute(1, 2, 0, 3)
    yield "one row alone", torch.randn(32, device=device)


def test_takes_any_strides(device):
    w = torch.randn(32, device=device)
    for name, x in strided_inputs(device):
        x = x.detach().requires_grad_()
        dy = torch.randn(x.shape, device=device)
        y = functional.rms_norm(x, w, EPS)
        y.backward(dy)
        assert y.is_contiguous(), name
        ox = x.detach().double().requires_grad_()
        oy = reference.rms_norm(ox, w.double(), EPS)
        oy.backward(dy.double())
        assert_near(y, oy, 24, name)
        assert_near(x.grad, ox.grad, 24, name)
        with torch.no_grad():
            assert_near(functional.rms_norm(x, w, EPS), oy, 24, name)
            y2, total = functional.rms_norm(x, w, EPS, residual=torch.ones_like(x))
            assert_near(total, ox + 1, 1, name)


def test_large_inputs_whose_statistics_are_kept_have_the_same_gradients(device):
    x, w = leaves(device, torch.float32, (1040, 1024))
    y = functional.rms_norm(x, w, EPS)
    assert y.grad_fn.saved_tensors[2] is not None
    dy = torch.randn_like(y)
    y.backward(dy)
    part = x.detach()[:40].requires_grad_()
    small = functional.rms_norm(part, w.detach(), EPS)
    assert small.grad_fn.saved_tensors[2] is None
    small.backward(dy[:40])
    torch.testing.assert_close(x.grad[:40], part.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (0, 0, 32)])
def test_an_empty_batch_has_zero_gradients(device, shape):
    x, w = leaves(device, torch.float32, shape)
    y = functional.rms_norm(x, w, EPS)
    y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape and torch.equal(w.grad, torch.zeros_like(w))
    assert functional.rms_norm(x.detach(), w.detach(), EPS).shape == shape


def test_gradients_repeat_bit_for_bit(device):
    x, w = leaves(device, torch.bfloat16, (300, 256))
    dy = torch.randn_like(x)
    runs = []
    for _ in range(2):
        x.grad = w.grad = None
        functional.rms_norm(x, w, EPS).backward(dy)
        runs.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_keeps_its_dtype_under_autocast(device):
    x, w = leaves(device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        y = functional.rms_norm(x, w, EPS)
        assert y.dtype is torch.float32
        assert functional.rms_norm(x.bfloat16(), w, EPS).dtype is torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype is torch.float32


def test_errors_name_operation_argument_found_and_expected(device):
    x = torch.randn(2, 32, device=device)
    cases = [
        (lambda: functional.rms_norm(x, torch.ones(31, device=device), EPS), ValueError, "weight: found 31 elements, expected 32"),
        (lambda: functional.rms_norm(x, torch.ones(32, device=device, dtype=torch.float64), EPS), ValueError, "weight: found dtype torch.float64 beside x of torch.float32"),
        (lambda: functional.rms_norm(x.long(), None, EPS), ValueError, "x: found dtype torch.int64"),
        (lambda: functional.rms_norm(x, None, EPS, residual=torch.ones(3, 32, device=device)), ValueError, "residual"),
        (lambda: functional.rms_norm(x, None, EPS, residual=x.bfloat16()), ValueError, "residual: found dtype torch.bfloat16, expected x's torch.float32"),
        (lambda: functional.rms_norm(x, None, EPS, residual=[1.0]), TypeError, "residual: found list, expected torch.Tensor"),
        (lambda: ingot.nn.RMSNorm(16, elementwise_affine=False)(x), ValueError, r"\(32,\), expected \(16,\)"),
        (lambda: functional.rms_norm(x.to(torch.complex64), None, EPS), ValueError, "x: found dtype torch.complex64"),
        (lambda: functional.rms_norm(x.to("meta"), x[0], EPS), ValueError, "weight: found a tensor on .*, expected x's device, meta"),
        (lambda: functional.rms_norm(x.to_sparse(), None, EPS), NotImplementedError, "x: found a torch.sparse_coo tensor"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=f"rms_?norm: .*{message}"):
            call()
    with pytest.raises(TypeError, match="rms_norm: x: found list, expected torch.Tensor"):
        functional.rms_norm([1.0], None, EPS)
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        module = ingot.nn.RMSNorm(32, EPS, device=device)
        module.unit_offset = torch.ones(2, device=device)
        module(x)


@on_gpu
def test_weight_on_another_device_is_refused(device):
    with pytest.raises(ValueError, match="rms_norm: weight: found a tensor on cpu, expected x's cuda:0"):
        functional.rms_norm(torch.randn(2, 32, device=device), torch.ones(32), EPS)


@pytest.mark.parametrize("rows", [(), (128,), (2, 3)])
def test_rows_without_columns_have_gradients_without_elements(device, rows):
    x, w = torch.randn(*rows, 0, device=device).requires_grad_(), torch.ones(0, device=device).requires_grad_()
    for y in (functional.rms_norm(x, w), functional.rms_norm(x, w, residual=x)[0]):
        for t, g in zip((x, w), torch.autograd.grad(y, (x, w), torch.ones_like(y))):
            assert g.shape == t.shape


def test_a_weight_of_two_dimensions_is_refused(device):
    x = torch.randn(3, 8, device=device)
    for grad in (False, True):
        weight = torch.ones(1, 8, device=device, requires_grad=grad)  # whose gradient would have another shape
        for call in (lambda: functional.rms_norm(x, weight), lambda: functional.rms_norm(x, weight, residual=x),
                     lambda: torch.ops.ingot.rms_norm(x, weight, None, False)):
            with pytest.raises(ValueError, match=r"rms_norm: weight: found shape \(1, 8\), expected \(8,\)"):
                call()


def test_a_residual_of_another_shape_is_refused(device):
    x = torch.randn(2, 3, 8, device=device)
    for residual in (x.flatten(0, 1), x[:1], x.new_empty(0, 8), x[..., :4]):
        for grad in (False, True):
            with pytest.raises(ValueError, match=r"rms_norm: residual: found shape \(.*\), expected x's \(2, 3, 8\)"):
                functional.rms_norm(x.detach().requires_grad_(grad), None, residual=residual)
