"""The operators under PyTorch's own checks: derivatives in both directions, shapes without numbers, and refusals."""
import pytest
import torch

import ingot
import reference
from cases import everything, gradients, Net, samples
from conftest import on_cpu
from ingot import _C, functional


def largest_number(op, arguments):
    """The largest of the results and of the gradients that opcheck compares: gradients of the sum of all results' sums."""
    leaves = [a for a in torch.utils._pytree.tree_leaves(arguments) if isinstance(a, torch.Tensor) and a.requires_grad]
    results = [y for y in torch.utils._pytree.tree_leaves(op(*arguments)) if isinstance(y, torch.Tensor) and y.is_floating_point() and y.numel()]
    total = sum(y.sum().abs() for y in results)
    found = torch.autograd.grad(total, leaves, allow_unused=True) if leaves and total.requires_grad else ()
    return max(t.abs().max().item() for t in (*results, *(g for g in found if g is not None)))


def test_opcheck(device):
    for name, op, arguments in samples(device):
        # In a traced graph PyTorch may choose other matrix kernels, whose sums of some 16 products are formed in another order: of second
        # derivatives, up to 700, the smallest elements then differ by more than a share of themselves.
        atol = max(1e-5, 16 * reference.ROUNDING[torch.float32] * largest_number(op, arguments))
        report = torch.library.opcheck(op, arguments, raise_exception=False, rtol=1.3e-6, atol=atol)
        assert all(v == "SUCCESS" for v in report.values()), f"{name}: {report}"


def test_forward_mode_is_the_transpose_of_backward(device):
    for name, function in everything(device):
        x, v = (torch.randn(4, 16, device=device) for _ in range(2))
        z = x.clone().requires_grad_()
        y = function(z)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, z, dy)
        value, tangent = torch.func.jvp(function, (x,), (v,))
        torch.testing.assert_close(value, y.detach(), rtol=2e-4, atol=2e-5, msg=name)
        torch.testing.assert_close((dy * tangent).sum(), (dx * v).sum(), rtol=1e-3, atol=1e-3, msg=name)
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():  # gradients off is not tangents off
            dual = function(torch.autograd.forward_ad.make_dual(x, v))
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent, msg=name)


@on_cpu
def test_forward_mode_gradcheck_in_fp64():
    for name, function in everything("cpu", torch.float64):
        x = torch.randn(4, 16, dtype=torch.float64)
        x = torch.where((x.abs() < 1e-3) | ((x.abs() - 0.5).abs() < 1e-3), 0.1, x).requires_grad_()  # away from kinks
        assert torch.autograd.gradcheck(function, x, check_forward_ad=True, fast_mode=True), name
    norm = ingot.nn.RMSNorm(5, eps=1e-5, dtype=torch.float64)
    x = torch.randn(5, dtype=torch.float64)
    weights = torch.randn(5, dtype=torch.float64)
    expected = torch.func.hessian(lambda x: (weights * torch.nn.functional.rms_norm(x, (5,), None, 1e-5)).sum())(x)
    torch.testing.assert_close(torch.func.hessian(lambda x: (weights * norm(x)).sum())(x), expected)


def test_a_table_that_trains_gets_its_gradient(device):
    x = torch.randn(4, 2, 8, device=device)
    for interleaved in (False, True):
        cos, sin = (t.requires_grad_() for t in functional.rope_table(4, 6, device=device))
        oracle = [t.detach().double().requires_grad_() for t in (cos, sin)]
        y = functional.rope(x, cos, sin, interleaved=interleaved)
        expected = reference.rope(x.double(), *oracle, torch.arange(4, device=device), interleaved)
        dy = torch.randn_like(y)
        y.backward(dy)
        expected.backward(dy.double())
        for found, wanted in zip((y, cos.grad, sin.grad), (expected, *(t.grad for t in oracle))):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            assert torch.allclose(functional.rope(x, cos, sin, interleaved=interleaved), y, atol=1e-6)
        assert functional.qk_norm_rope(x, cos, sin).requires_grad
        with pytest.raises(NotImplementedError, match="rope_: found a call that autograd"):
            functional.rope_(x.clone(), cos, sin)


def test_values_that_are_not_written_anywhere_count(device):
    """PyTorch negates a view on the way, and has zeros without memory."""
    x = torch.randn(4, 16, device=device)
    zeros = torch._efficientzerotensor(4, 16, device=device)
    for exchange in (True, False):
        _C.use_ways(exchange, exchange)
        try:
            for name, function in everything(device):
                with torch.no_grad():
                    assert torch.equal(function(torch._neg_view(x)), function(-x)), name
                    assert torch.equal(function(zeros), function(torch.zeros_like(x))), name
                z = x.clone().requires_grad_()
                y = function(z)
                dy = torch.randn_like(y)
                want = torch.autograd.grad(y, z, -dy, retain_graph=True)[0]
                assert torch.equal(torch.autograd.grad(y, z, torch._neg_view(dy), retain_graph=True)[0], want), name
                nothing = torch._efficientzerotensor(dy.shape, device=device)
                assert not torch.autograd.grad(y, z, nothing)[0].any(), name
        finally:
            _C.use_ways(True, True)
    with pytest.raises(NotImplementedError, match=r"rms_norm: x: found a tensor of shape \(4, 16\) without memory"):
        _C.rms_norm(zeros, None, None, None, x, None, 1e-5, False)


def test_shapes_are_inferred_on_the_meta_device(device):
    x = torch.randn(4, 16, device=device)
    for exchange in (True, False):
        _C.use_ways(exchange, exchange)
        try:
            for (name, real), (_, inferred) in zip(everything(device), everything(torch.device("meta"))):
                z = torch.empty(4, 16, device="meta", requires_grad=True)
                found = inferred(z)
                assert found.is_meta and found.shape == real(x).shape and found.dtype is real(x).dtype, name
                found.sum().backward()
                assert z.grad.is_meta and z.grad.shape == z.shape, name
        finally:
            _C.use_ways(True, True)
    assert functional.fused_mlp(x.to("meta"), [torch.empty(8, 16, device="meta"), torch.empty(0, 8, device="meta")]).shape == (4, 0)
    with pytest.raises(ValueError, match=r"mlp: parameters\[0\]: found a tensor on .*, expected x's device, meta"):
        ingot.nn.FusedMLP(16, 24, 8, device=device)(x.to("meta"))


def test_an_argument_that_is_no_tensor_is_refused_by_name(device):
    cos, sin = functional.rope_table(4, 8, device=device)
    calls = {
        "rms_norm: x": lambda x: functional.rms_norm(x, None, 1e-5),
        "mlp: x": ingot.nn.FusedMLP(16, 24, 8, device=device),
        "swiglu: gate": functional.swiglu,
        "swiglu: up": lambda x: functional.swiglu(cos, x or [0]),
        "rope: x": lambda x: functional.rope(x, cos, sin),
        "rope_: x": lambda x: functional.rope_(x, cos, sin),
        "qk_norm_rope: x": lambda x: functional.qk_norm_rope(x, cos, sin),
        "activation: x": lambda x: functional.activation(x, "relu"),
    }
    rows, target = torch.randn(3, 16, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    w, heads = torch.randn(8, 16, device=device), torch.randn(4, 2, 8, device=device)
    calls |= {
        "gated_linear: w": lambda t: functional.gated_linear(rows, t),
        "grouped_linear: weight": lambda t: functional.grouped_linear(rows, t, target),
        "grouped_linear: offsets": lambda t: functional.grouped_linear(rows, w[None], t),
        "wide_mlp: w1": lambda t: functional.wide_mlp(rows, t, w),
        "wide_mlp: w2": lambda t: functional.wide_mlp(rows, w, t),
        "linear_cross_entropy: weight": lambda t: functional.linear_cross_entropy(rows, t, target),
        "rope: cos": lambda t: functional.rope(heads, t, sin),
        "rope: sin": lambda t: functional.rope(heads, cos, t),
        "rope_: cos": lambda t: functional.rope_(heads, t, sin),
    }
    or_none = {
        "mlp: weights\\[0\\]": lambda t: functional.fused_mlp(rows, [t]),
        "rms_norm: weight": lambda t: functional.rms_norm(rows, t),
        "gated_linear: bias": lambda t: functional.gated_linear(rows, w, t),
        "gated_linear: up": lambda t: functional.gated_linear(rows, w, up=t),
        "wide_mlp: b1": lambda t: functional.wide_mlp(rows, w, w.T.contiguous(), t),
        "linear_cross_entropy: bias": lambda t: functional.linear_cross_entropy(rows, w, target, t),
        "rope: positions": lambda t: functional.rope(heads, cos, sin, t),
        "qk_norm_rope: gain": lambda t: functional.qk_norm_rope(heads, cos, sin, gain=t),
    }
    for name, call in or_none.items():
        with pytest.raises(TypeError, match=f"{name}: found list, expected torch.Tensor"):
            call([1.0, 2.0])
    for name, call in calls.items():
        for x in ([1.0, 2.0], None):
            found = type([0] if x is None and name.endswith("up") else x).__name__
            with pytest.raises(TypeError, match=f"{name}: found {found}, expected torch.Tensor"):
                call(x)


def test_a_buffer_too_small_for_the_gradients_is_refused(device):
    x, w = torch.randn(3, 16, device=device), torch.randn(8, 16, device=device)
    with pytest.raises(ValueError, match="mlp_backward: elements of gradients: found 128, expected at most 127"):
        _C.mlp_backward(torch.randn(3, 8, device=device), x, None, [w], torch.zeros(127, device=device), [True], False, False, 0, False, None)


def test_modes_and_subclasses_see_the_operator(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            seen.append(str(f))
            return f(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        functional.rms_norm(torch.randn(2, 16, device=device), torch.ones(16, device=device), 1e-5)
    assert "ingot.rms_norm.default" in seen
    del seen[:]

    class Follow(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, f, types, args=(), kwargs=None):
            seen.append(str(f))
            return f(*args, **(kwargs or {}))

    with torch.no_grad(), Follow():
        functional.rms_norm(torch.randn(2, 16, device=device), torch.ones(16, device=device), 1e-5)
    assert any("ingot.rms_norm" in f for f in seen)

    class Tagged(torch.Tensor):
        pass

    y = functional.rms_norm(torch.randn(2, 16, device=device).as_subclass(Tagged), None, 1e-5)
    assert isinstance(y, Tagged)


def test_meta_and_fake_tensors_have_the_right_shapes(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = ingot.nn.FusedMLP(16, 24, 8)(torch.randn(5, 16))
        assert y.shape == (5, 8)


@pytest.mark.parametrize("exchange", [False, True])
def test_without_the_fast_ways_to_ask_results_are_the_same(device, exchange):
    net = Net(device)
    x = torch.randn(6, 16, device=device)
    expected = gradients(net, net, x)
    _C.use_ways(False, exchange)
    try:
        found = gradients(net, net, x)
        with pytest.raises((ValueError, NotImplementedError), match="rms_norm: x: found dtype torch.complex64"):
            functional.rms_norm(x.to(torch.complex64), None, 1e-5)
    finally:
        _C.use_ways(True, True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_the_route_follows_gradients_modes_and_types(device):
    x, w = torch.randn(2, 16, device=device), torch.nn.Parameter(torch.ones(16, device=device))
    assert _C.route(x, w, None) == _C.DIFFERENTIATE
    assert _C.route(x, w.detach()) == _C.PLAIN
    with torch.no_grad():
        assert _C.route(x, w) == _C.PLAIN
    with torch.inference_mode():
        assert _C.route(x, w) == _C.PLAIN
    assert _C.route(x, [1]) == _C.DISPATCH
    with torch.autograd.forward_ad.dual_level():
        assert _C.route(x, w) == _C.DISPATCH
        with torch.no_grad():
            assert _C.route(x, w) == _C.DISPATCH


@on_cpu
def test_a_tensor_of_another_device_is_refused():
    with pytest.raises((NotImplementedError, RuntimeError), match="meta|could not run|expected cpu or cuda|Could not run"):
        _C.rms_norm(torch.empty(2, 16, device="meta"), None, None, None, torch.empty(2, 16), None, 1e-5, False)


class OnCuda(torch.Tensor):
    """Memory of the CPU whose attributes name a GPU; only code that reads attributes (no exchange) is deceived."""

    device = property(lambda self: torch.device("cuda", 0))


@pytest.mark.skipif(_C.cuda, reason="needs a build without CUDA")
def test_a_build_without_cuda_says_so():
    x, y, w = (torch.ones(8, 8).as_subclass(OnCuda) for _ in range(3))
    one = torch.ones(1, 2, 8).as_subclass(OnCuda)
    table, positions = torch.ones(1, 4).as_subclass(OnCuda), torch.zeros(1, dtype=torch.int32).as_subclass(OnCuda)
    calls = {
        "rms_norm": lambda: _C.rms_norm(x, None, None, None, y, None, 1e-5, False),
        "rms_norm_backward": lambda: _C.rms_norm_backward(y, x, None, None, None, x, None, 1e-5, False),
        "mlp": lambda: _C.mlp(x, [w], 0, False),
        "swiglu_gate": lambda: _C.swiglu_gate(x, y, w, 3, 0.0, 1.0, 0.0, 0.0),
            "muon": lambda: _C.muon(one, one, one, None, 0.1, 0.9, 0.0, 1.0, True, False, 5, 3.0, -4.0, 2.0, 0),
            "linear_cross_entropy": lambda: _C.linear_cross_entropy(x, w, None, None, positions, y[0], None, None, None, None, 0.0, 0.0, -100, 0.0),
            "wide_mlp": lambda: _C.wide_mlp(x, w, None, w, None, y, None, None, y, 0),
        "grouped_linear": lambda: _C.grouped_linear(x, one, None, positions, y),
        "rope": lambda: _C.rope(one, one, positions, table, table, False, 1),
        "activation": lambda: _C.activation(x, y, 0),
    }
    _C.use_ways(False, False)
    try:
        for name, call in calls.items():
            with pytest.raises(NotImplementedError, match=f"{name}: .*: found a tensor on cuda:0, but Ingot was built without CUDA; expected cpu"):
                call()
    finally:
        _C.use_ways(True, True)
