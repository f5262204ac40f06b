"""What PyTorch puts around operations: compilation, transforms, checkpointing, graphs, threads."""
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ingot
import reference
from conftest import DEVICE, has_loss, on_cpu, on_gpu
from ingot import _C, functional


def samples(device):
    """(name, op, arguments) of every operator."""
    x = torch.randn(4, 16, device=device, requires_grad=True)
    w = torch.randn(16, device=device, requires_grad=True)
    parameters = [p.detach().requires_grad_() for p in ingot.nn.FusedMLP(16, 24, 8, device=device).parameters()]
    heads = torch.randn(3, 2, 8, device=device, requires_grad=True)
    cos, sin = functional.rope_table(3, 8, device=device)
    positions = torch.arange(3, dtype=torch.int32, device=device)
    gain = torch.rand(2, device=device, requires_grad=True)
    h, h16 = torch.randn(4, 8, device=device), torch.randn(4, 16, device=device)
    ops = torch.ops.ingot
    quiet = [p.detach() for p in parameters]
    wide = torch.randn(12, 16, device=device, requires_grad=True)
    yield "rms_norm", ops.rms_norm.default, (x, w, 1e-5, False)
    yield "rms_norm without weight", ops.rms_norm.default, (x, None, 1e-5, False)
    yield "add_rms_norm", ops.add_rms_norm.default, (x, x.detach().clone(), w, 1e-5, True)
    yield "rms_norm_backward", ops.rms_norm_backward.default, (x.detach(), None, x.detach(), w.detach(), x.detach().mean(1), 1e-5, False, True, True)
    yield "rms_norm_backward of a frozen input", ops.rms_norm_backward.default, (x.detach(), h16, x.detach(), w.detach(), x.detach().mean(1), None, True, False,
                                                                                 True)
    yield "rms_norm_backward of a frozen weight", ops.rms_norm_backward.default, (x.detach(), None, x.detach(), w.detach(), x.detach().mean(1), 1e-5, False,
                                                                                  True, False)
    yield "mlp", ops.mlp.default, (x, parameters, True, False, "softplus", False, True)
    yield "mlp, nothing saved", ops.mlp.default, (x, parameters, True, False, "silu", True, False)
    yield "mlp_backward", ops.mlp_backward.default, (torch.randn(4, 8, device=device), x.detach(), quiet, x.new_empty(0).detach(), [True] * 6, True, True, False,
                                                     "softplus", False)
    yield "mlp_backward of frozen parts", ops.mlp_backward.default, (torch.randn(4, 8, device=device), x.detach(), quiet, x.new_empty(0).detach(),
                                                                      [True, False] * 3, False, True, False, "silu", True)
    yield "swiglu_gate", ops.swiglu_gate.default, (x, None, 0, 0.0, 1.0, 0.0, 0.0)
    yield "swiglu_gate of two", ops.swiglu_gate.default, (x, x.detach().clone().requires_grad_(), 0, 7.0, 1.7, 1.0, 0.07)
    yield "swiglu_gate_backward", ops.swiglu_gate_backward.default, (h, x.detach(), None, 2, 7.0, 1.7, 1.0, 0.0)
    yield "gated_linear", ops.gated_linear.default, (x, wide, None, None, None, 1, False, 0.0, 1.0, 0.0, 0.0, True)
    yield "gated_linear, nothing kept", ops.gated_linear.default, (x, wide, None, torch.randn(wide.shape[0], device=device), None, 0, False, 7.0, 1.7, 1.0, 0.0,
                                                                           False)
    yield "gated_linear of two", ops.gated_linear.default, (x, wide, wide.detach().clone().requires_grad_(), *torch.randn(2, 12, device=device).unbind(), 0, False, 0.0,
                                                            1.6, 0.0, 0.07, True)
    yield "gated_linear_backward", ops.gated_linear_backward.default, (torch.randn(*x.shape[:-1], wide.shape[0] // 2, device=device), x.detach(), wide.detach(), None, None, None,
                                                                       *torch.randn(2, *x.shape[:-1], wide.shape[0] // 2, device=device).unbind(), 0, False, 0.0,
                                                                       1.0, 0.0, 0.0, True, True, False, False, False)
    narrow, of_narrow = torch.randn(6, 12, device=device, requires_grad=True), torch.randn(4, 6, device=device)
    row = torch.randn(12, device=device, requires_grad=True)
    yield "wide_mlp", ops.wide_mlp.default, (x, wide, row, narrow, None, "leaky_relu_squared", True)
    yield "wide_mlp, gelu", ops.wide_mlp.default, (x, wide, None, narrow, torch.randn(6, device=device), "gelu", True)
    yield "wide_mlp, nothing kept", ops.wide_mlp.default, (x, wide, row, narrow, None, "gelu_tanh", False)
    yield "wide_mlp_backward", ops.wide_mlp_backward.default, (of_narrow, x.detach(), wide.detach(), row.detach(), narrow.detach(), None, h.new_empty(0),
                                                               torch.randn(4, 12, device=device), "gelu", True, True, True, True, False)
    yield "wide_mlp_backward, derived", ops.wide_mlp_backward.default, (of_narrow.clone().requires_grad_(), x, wide, row, narrow, None, h.new_empty(0),
                                                                        h.new_empty(0), "leaky_relu_squared", True, True, True, False, False)
    classes = torch.tensor([3, -1, 0, 11], device=device)
    if has_loss(DEVICE):
        yield "linear_cross_entropy", ops.linear_cross_entropy.default, (x, wide, row, classes, 30.0, 1e-3, -1, 0.0, True, True, True, True)
        yield "linear_cross_entropy of rows", ops.linear_cross_entropy.default, (x, wide, None, classes, 0.0, 0.0, -1, 0.0, False, False, False, False)
        yield "linear_cross_entropy, no gradients yet", ops.linear_cross_entropy.default, (x, wide, row, classes, 30.0, 1e-3, -1, 0.0, True, False, False, False)
        yield "linear_cross_entropy_backward", ops.linear_cross_entropy_backward.default, (torch.rand(4, device=device), x.detach(), wide.detach(), row.detach(), classes,
                                                                                           30.0, 1e-3, -1, 0.0, True, True, False)
        yield "linear_cross_entropy_backward, derived", ops.linear_cross_entropy_backward.default, (torch.rand(4, device=device, requires_grad=True), x, wide, row, classes,
                                                                                                    30.0, 1e-3, -1, 0.0, True, True, True)
    yield "rope", ops.rope.default, (heads, positions, cos, sin, False, 1)
    yield "qk_norm_rope", ops.qk_norm_rope.default, (heads, positions, cos, sin, gain, 1e-6, True, 1)
    yield "qk_norm_rope without table and gain", ops.qk_norm_rope.default, (heads, None, None, None, None, 1e-6, False, 1)
    yield "qk_norm_rope_backward", ops.qk_norm_rope_backward.default, (heads.detach(), torch.randn_like(heads), positions, cos, sin,
                                                                       gain.detach(), 1e-6, False, 1)
    yield "activation", ops.activation.default, (x, "gelu")
    yield "activation_backward", ops.activation_backward.default, (torch.randn_like(x), x.detach(), "softplus")
    dy = torch.randn(4, 16, device=device, requires_grad=True)  # as above, derived again
    yield "rms_norm_backward, derived", ops.rms_norm_backward.default, (dy, h16, x, w, None, 1e-5, False, True, True)
    yield "mlp_backward, derived", ops.mlp_backward.default, (dy[:, :8].detach().requires_grad_(), x, parameters, x.detach().new_empty(0), [True] * 6, True,
                                                              True, False, "softplus", False)
    yield "swiglu_gate_backward, derived", ops.swiglu_gate_backward.default, (dy, x, x.detach().clone().requires_grad_(), 0, 7.0, 1.7, 1.0, 0.07)
    yield "qk_norm_rope_backward, derived", ops.qk_norm_rope_backward.default, (heads, torch.randn_like(heads).requires_grad_(), positions, cos, sin, gain, 1e-6,
                                                                               False, 1)
    yield "activation_backward, derived", ops.activation_backward.default, (dy, x, "gelu")


def largest_number(op, arguments):
    """Of the results and of the gradients that opcheck compares: those of the sum of all results' sums."""
    leaves = [a for a in torch.utils._pytree.tree_leaves(arguments) if isinstance(a, torch.Tensor) and a.requires_grad]
    results = [y for y in torch.utils._pytree.tree_leaves(op(*arguments)) if isinstance(y, torch.Tensor) and y.is_floating_point() and y.numel()]
    total = sum(y.sum().abs() for y in results)
    found = torch.autograd.grad(total, leaves, allow_unused=True) if leaves and total.requires_grad else ()
    return max(t.abs().max().item() for t in (*results, *(g for g in found if g is not None)))


def test_opcheck(device):
    for name, op, arguments in samples(device):
        # Traced, PyTorch's own products may be other ones, whose sums of some 16 products are formed in another order: of second derivatives,
        # up to 700, the smallest elements then differ by more than a share of themselves.
        atol = max(1e-5, 16 * reference.ROUNDING[torch.float32] * largest_number(op, arguments))
        report = torch.library.opcheck(op, arguments, raise_exception=False, rtol=1.3e-6, atol=atol)
        assert all(v == "SUCCESS" for v in report.values()), f"{name}: {report}"


class Doubled(torch.nn.Module):
    """n(x + 2 x) + x + 2 x."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        both = self.norm(x, 2 * x)
        return both[0] + both[1]


def everything(device, dtype=torch.float32):
    """(name, a function of x (4, 16) that is differentiable in it) for all that the package computes; some parameters do not train."""
    norm, offset, whole = (ingot.nn.RMSNorm(n, unit_offset=u, elementwise_affine=a, device=device, dtype=dtype)
                           for n, u, a in ((16, False, True), (16, True, True), ((4, 16), False, False)))
    mlp = ingot.nn.FusedMLP(16, 24, 8, device=device, dtype=dtype).requires_grad_(False)
    normed = ingot.nn.FusedMLP(16, 24, 8, 2, "gelu", weight_norm=True, activate_last=True, device=device, dtype=dtype)
    table = functional.rope_table(4, 6, device=device, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    gain = torch.rand(2, device=device, dtype=table[0].dtype)
    yield "rms_norm", norm
    yield "rms_norm without training", lambda x: functional.rms_norm(x, norm.weight.detach(), 1e-5)
    yield "rms_norm, 1 + weight", offset
    yield "rms_norm over two dimensions", whole
    yield "rms_norm of a sum", Doubled(norm)
    yield "mlp without training", mlp
    yield "mlp", normed
    yield "swiglu", lambda x: functional.swiglu(x, order="gate_second", limit=0.5, alpha=1.7, up_offset=1.0)
    yield "swiglu, interleaved", lambda x: functional.swiglu(x, order="interleaved")
    yield "swiglu of two", lambda x: functional.swiglu(x, x + 1)
    yield "swiglu with gelu", lambda x: functional.swiglu(x, activation="gelu_tanh")
    w1, w2 = torch.randn(12, 16, device=device, dtype=dtype) * 0.3, torch.randn(8, 12, device=device, dtype=dtype) * 0.3
    yield "wide_mlp", lambda x: functional.wide_mlp(x, w1, w2)
    yield "wide_mlp, gelu", lambda x: functional.wide_mlp(x, w1, w2, w1[:, 0], w2[:, 0], activation="gelu", recompute=True)
    head = torch.randn(12, 16, device=device, dtype=dtype) * 0.5
    classes = torch.tensor([3, -100, 0, 11], device=device)
    if has_loss(DEVICE):
        yield "linear_cross_entropy", lambda x: functional.linear_cross_entropy(x, head, classes, softcap=4.0, z_loss=0.1)
        yield "linear_cross_entropy of rows", lambda x: functional.linear_cross_entropy(x, head, classes, head[:, 0], reduction="none")
    yield "rope", lambda x: functional.rope(x.view(4, 2, 8), *table)
    yield "rope, interleaved", lambda x: functional.rope(x.view(4, 2, 8), *table, sign=-1, interleaved=True)
    yield "qk_norm_rope", lambda x: functional.qk_norm_rope(x.view(4, 2, 8), *table, gain=gain)
    yield "qk_norm_rope without a table", lambda x: functional.qk_norm_rope(x.view(4, 2, 8))
    for name in functional.ACTIVATIONS:
        yield name, (lambda name: lambda x: functional.activation(x, name))(name)


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


def test_symbolic_traces_compute_the_same(device):
    x = torch.zeros(4, 16, device=device)  # 0 / sqrt(0 + eps) is 0 where eps is not lost on the way
    x[1:] = torch.randn(3, 16, device=device)
    for name, function in everything(device):
        holder = torch.nn.Sequential(function) if isinstance(function, torch.nn.Module) else function
        traced = torch.fx.symbolic_trace(holder)
        assert torch.equal(traced(x), function(x)) and traced(x).isfinite().all(), name
    mlp = ingot.nn.FusedMLP(16, 24, 8, device=device)
    traced = torch.fx.symbolic_trace(mlp)  # itself the root
    traced(x).sum().backward()
    assert all(p.grad is not None for p in mlp.parameters()) and len(list(traced.parameters())) == 6
    with torch.autocast(device.type, torch.bfloat16):
        assert traced(x).dtype is torch.bfloat16  # asked when it runs
    y, total = torch.fx.symbolic_trace(ingot.nn.RMSNorm(16, device=device))(x, x)
    assert torch.equal(total, x + x)
    gated = ingot.nn.SwiGLU(16, 8, device=device)
    assert torch.equal(torch.fx.symbolic_trace(gated)(x), gated(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_recorded_trace_passes_its_own_check(device):
    x = torch.randn(4, 16, device=device)
    for module in (ingot.nn.RMSNorm(16, device=device), ingot.nn.FusedMLP(16, 24, 8, device=device)):
        assert torch.equal(torch.jit.trace(module, (x,))(x), module(x))


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
    with pytest.raises(ValueError, match="mlp: found tensors on meta and .*, expected one device"):
        ingot.nn.FusedMLP(16, 24, 8, device=device)(x.to("meta"))


def test_what_is_no_tensor_is_refused_by_name(device):
    cos, sin = functional.rope_table(4, 8, device=device)
    calls = {
        "rms_norm: x": lambda x: functional.rms_norm(x, None, 1e-5),
        "mlp: x": ingot.nn.FusedMLP(16, 24, 8, device=device),
        "swiglu_gate: packed": functional.swiglu,
        "swiglu_gate: gate": lambda x: functional.swiglu(x, x),
        "swiglu_gate: up": lambda x: functional.swiglu(cos, x or [0]),
        "rope: x": lambda x: functional.rope(x, cos, sin),
        "rope_: x": lambda x: functional.rope_(x, cos, sin),
        "qk_norm_rope: x": lambda x: functional.qk_norm_rope(x, cos, sin),
        "activation: x": lambda x: functional.activation(x, "relu"),
    }
    for name, call in calls.items():
        for x in ([1.0, 2.0], None):
            found = type([0] if x is None and name.endswith("up") else x).__name__
            if name == "swiglu_gate: gate" and x is None:
                found, name = "NoneType", "swiglu_gate: packed"
            with pytest.raises(TypeError, match=f"{name}: found {found}, expected torch.Tensor"):
                call(x)


class Net(torch.nn.Module):
    """Every operation once."""

    def __init__(self, device):
        super().__init__()
        self.norm = ingot.nn.RMSNorm(16, device=device)
        self.mlp = ingot.nn.FusedMLP(16, 24, 16, weight_norm=True, device=device)
        self.last = ingot.nn.RMSNorm(16, unit_offset=True, device=device)
        self.gated = ingot.nn.SwiGLU(16, 24, device=device)
        self.gain = torch.nn.Parameter(torch.rand(2, device=device) + 0.5)
        cos, sin = functional.rope_table(128, 8, device=device)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x):
        y, x = self.last(self.mlp(self.norm(x)), x)
        heads = (y + x).view(-1, 2, 8)
        turned = functional.rope(functional.qk_norm_rope(heads, self.cos, self.sin, gain=self.gain), self.cos, self.sin, interleaved=True)
        return self.gated(functional.activation(turned.flatten(1), "gelu")) + x


def gradients(net, f, x):
    net.zero_grad()
    x = x.detach().requires_grad_()
    y = f(x)
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad] + [p.grad for p in net.parameters()]


def assert_same(found, expected):
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_compiles_without_graph_breaks_forward_and_backward(device):
    net = Net(device)
    x = torch.randn(6, 16, device=device)
    expected = gradients(net, net, x)
    torch._dynamo.reset()
    # Tracing is what can break; the default backend on the GPU, without code generation on the CPU.
    compiled = torch.compile(net, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    assert_same(gradients(net, compiled, x), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected[0], rtol=2e-4, atol=2e-5)
    for rows in (9, 13):  # sizes that were not there when it compiled
        z = torch.randn(rows, 16, device=device)
        assert_same(gradients(net, compiled, z), gradients(net, net, z))


def test_compiles_under_autocast(device):
    net = Net(device)
    x = torch.randn(6, 16, device=device)
    torch._dynamo.reset()

    def f(x):
        with torch.autocast(device.type, torch.bfloat16):
            return net.mlp(x)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0)


def test_compiles_transforms(device):
    from torch.func import grad, jvp, vmap

    mlp, norm, x = ingot.nn.FusedMLP(16, 24, 8, device=device), ingot.nn.RMSNorm(16, device=device), torch.randn(4, 16, device=device)
    for f in (norm, lambda x: mlp(x), functional.swiglu, lambda x: norm(x, x)[0]):
        for transformed in (grad(lambda x: f(x).square().sum()), vmap(f), lambda x: jvp(f, (x,), (x,))[1]):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: transformed(x), fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x), transformed(x), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(device, reentrant):
    net = Net(device)
    x = torch.randn(6, 16, device=device)
    expected = gradients(net, net, x)
    assert_same(gradients(net, lambda x: checkpoint(net, x, use_reentrant=reentrant), x), expected)


def test_functional_transforms(device):
    from torch.func import grad, vmap

    x, w = torch.randn(4, 16, device=device), torch.randn(16, device=device)

    def loss(norm):
        return lambda x, w: norm(x, w, 1e-5).square().sum()

    ours, plain = loss(functional.rms_norm), loss(reference.rms_norm)
    torch.testing.assert_close(grad(ours, argnums=(0, 1))(x, w), grad(plain, argnums=(0, 1))(x, w), rtol=2e-4, atol=2e-5)
    each = vmap(grad(ours, argnums=1), (0, None))(x, w)  # one gradient per row
    torch.testing.assert_close(each, vmap(grad(plain, argnums=1), (0, None))(x, w), rtol=2e-4, atol=2e-5)

    net = ingot.nn.FusedMLP(16, 24, 8, device=device)
    held = {k: p.detach() for k, p in net.named_parameters()}

    def mlp_loss(p, x):
        return torch.func.functional_call(net, p, (x,)).square().sum()

    found = grad(mlp_loss)(held, x)
    expected = torch.autograd.grad(mlp_loss(dict(net.named_parameters()), x), list(net.parameters()))
    for (k, _), e in zip(net.named_parameters(), expected):
        torch.testing.assert_close(found[k], e, rtol=2e-4, atol=2e-5, msg=k)


def test_vmap_of_an_mlp_is_the_calls_one_by_one(device):
    from torch.func import functional_call, grad, jacrev, vmap

    net = ingot.nn.FusedMLP(16, 24, 8, device=device)
    held = {k: p.detach() for k, p in net.named_parameters()}
    x = torch.randn(5, 3, 16, device=device)
    torch.testing.assert_close(vmap(net, 1, 1)(x), net(x), rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(jacrev(net)(x[0, :1]).sum((0, 1)), grad(lambda x: net(x).sum())(x[0, :1]), rtol=2e-4, atol=2e-5)

    def loss(p, x):
        return functional_call(net, p, (x,)).square().sum()

    each = vmap(grad(loss), (None, 0))(held, x)
    several = vmap(lambda p, x: functional_call(net, p, (x,)), (0, None))({k: torch.stack([p, 2 * p]) for k, p in held.items()}, x[0])
    torch.testing.assert_close(several[0], net(x[0]), rtol=2e-4, atol=2e-5)
    for i in range(5):
        expected = grad(loss)(held, x[i])
        for k in held:
            torch.testing.assert_close(each[k][i], expected[k], rtol=2e-4, atol=2e-5, msg=k)


def test_a_parametrised_weight_is_computed_at_every_call(device):
    class Twice(torch.nn.Module):
        def forward(self, w):
            return 2 * w

    norm, mlp = ingot.nn.RMSNorm(16, device=device), ingot.nn.FusedMLP(16, 24, 8, device=device)
    x = torch.randn(3, 16, device=device)
    y = norm(x)
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", Twice())
    torch.testing.assert_close(norm(x), 2 * y)
    plain = mlp(x)
    torch.nn.utils.parametrize.register_parametrization(mlp.layers[2], "weight", Twice())
    torch.nn.utils.parametrize.register_parametrization(mlp.layers[2], "bias", Twice())
    torch.testing.assert_close(mlp(x), 2 * plain)
    mlp(x).sum().backward()
    assert mlp.layers[2].parametrizations.weight.original.grad is not None


def modules(device):
    x = torch.randn(3, 16, device=device)
    yield ingot.nn.RMSNorm(16, device=device), x
    yield ingot.nn.FusedMLP(16, 24, 8, device=device), x


def ways_to_follow_a_call(module, seen):
    """(how, what undoes it): each appends to `seen` when the module is called."""
    for name in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        handle = getattr(module, f"register_{name}_hook")(lambda *a: seen.append(1))
        yield f"{name} hook", handle.remove
    for name in ("forward", "forward_pre", "full_backward"):
        handle = getattr(torch.nn.modules.module, f"register_module_{name}_hook")(lambda *a: seen.append(1))
        yield f"{name} hook of all modules", handle.remove
    forward, kind = module.forward, type(module)
    module.forward = lambda x: (seen.append(1), forward(x))[1]
    yield "a forward of its own", lambda: module.__dict__.pop("forward")
    written = kind.forward
    kind.forward = lambda self, x: (seen.append(1), written(self, x))[1]
    yield "another forward of the class", lambda: setattr(kind, "forward", written)
    module._compiled_call_impl = lambda x: (seen.append(1), forward(x))[1]
    yield "a compiled form", lambda: setattr(module, "_compiled_call_impl", None)
    call = torch.nn.Module.__call__
    torch.nn.Module.__call__ = lambda self, *a, **k: (seen.append(1), call(self, *a, **k))[1]
    yield "another nn.Module.__call__", lambda: setattr(torch.nn.Module, "__call__", call)


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_is_seen_by_everything_that_follows_modules(device, grad):
    for module, x in modules(device):
        want = module(x)
        seen = []
        for how, undo in ways_to_follow_a_call(module, seen):
            del seen[:]
            try:
                with torch.set_grad_enabled(grad or "backward" in how):
                    y = module(x.requires_grad_("backward" in how))
                    if "backward" in how:
                        y.sum().backward()
            finally:
                undo()
            assert seen, f"{type(module).__name__}: {how}"
            assert torch.equal(y, want), f"{type(module).__name__}: {how}"
        del seen[:]
        assert torch.equal(module(x), want) and torch.equal(module(x=x), want) and not seen


def test_a_python_profiler_sees_the_forward_of_modules(device):
    for module, x in modules(device):
        seen = []
        sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name))
        try:
            module(x)
        finally:
            sys.setprofile(None)
        assert any(name.endswith("forward") for name in seen), type(module).__name__


def test_a_subclass_may_have_a_forward_of_its_own(device):
    class Scaled(ingot.nn.RMSNorm):
        def forward(self, x, scale):
            return super().forward(x) * scale

    x = torch.randn(3, 16, device=device)
    torch.testing.assert_close(Scaled(16, device=device)(x, scale=2), 2 * ingot.nn.RMSNorm(16, device=device)(x))


def test_fx_sees_modules_as_modules(device):
    for module, x in modules(device):
        class Leaves(torch.fx.Tracer):
            def is_leaf_module(self, m, name):
                return m is module

        graph = Leaves().trace(torch.nn.Sequential(module))
        assert [n.op for n in graph.nodes] == ["placeholder", "call_module", "output"]


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_inside_a_call_keeps_to_its_own_options(device, grad):
    """A finalizer that runs while autograd allocates for another call."""
    x = torch.randn(3, 16, device=device)
    inner, outer = (ingot.nn.RMSNorm(16, eps=eps, device=device) for eps in (1.0, 1e-5))
    want = [m(x).detach() for m in (inner, outer)]
    found = []

    def saved(t):
        found.append(inner(x).detach())
        return t

    with torch.set_grad_enabled(grad), torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t):
        y = outer(x)
    assert torch.equal(y.detach(), want[1]) and all(torch.equal(f, want[0]) for f in found) and bool(found) == grad


def test_what_apply_calls_is_not_called_by_itself(device):
    for module, x in modules(device):
        for _ in range(3):
            module(x)
        with pytest.raises(ValueError, match="forward: found it called by itself, expected apply"):
            if isinstance(module, ingot.nn.RMSNorm):
                _C.rms_norm_forward(object(), x, module.weight)
            else:
                _C.mlp_edge_forward(object(), x, x)


def test_a_buffer_too_small_for_the_gradients_is_refused(device):
    x, w = torch.randn(3, 16, device=device), torch.randn(8, 16, device=device)
    with pytest.raises(ValueError, match="mlp_backward: elements of gradients: found at = 128, expected <= flat.numel.. = 127"):
        _C.mlp_backward(torch.randn(3, 8, device=device), x, None, [w], torch.zeros(127, device=device), [True], False, False, 0, False, None)


def test_modules_copy_and_pickle(device):
    import copy
    import io

    net, x = Net(device), torch.randn(6, 16, device=device)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), net(x))
    with pytest.raises(AttributeError):
        net.mlp.recompute = True  # given once, at the start


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


def test_exports(device):
    net = Net(device)
    x = torch.randn(6, 16, device=device)
    exported = torch.export.export(net, (x,))
    torch.testing.assert_close(exported.module()(x), net(x), rtol=2e-4, atol=2e-5)


def test_threads_agree_with_one_thread(device):
    net = Net(device)
    inputs = [torch.randn(50, 16, device=device) for _ in range(4)]
    with torch.no_grad():
        expected = [net(x) for x in inputs]
    failures = []

    def work(i):
        stream = torch.cuda.Stream() if DEVICE == "cuda" else None
        try:
            with torch.cuda.stream(stream):
                if stream is not None:
                    stream.wait_stream(torch.cuda.default_stream())
                for _ in range(20):
                    with torch.no_grad():
                        torch.testing.assert_close(net(inputs[i]), expected[i], rtol=0, atol=0)
                    x = inputs[i].detach().requires_grad_()
                    net(x).sum().backward(inputs=[x])
                if stream is not None:
                    stream.synchronize()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("exchange", [False, True])
def test_without_the_fast_ways_to_ask_results_are_the_same(device, exchange):
    net = Net(device)
    x = torch.randn(6, 16, device=device)
    expected = gradients(net, net, x)
    _C.use_ways(False, exchange)
    try:
        found = gradients(net, net, x)
        with pytest.raises((ValueError, NotImplementedError), match="rms_norm: x: found (a dtype of 64 bits|dtype torch.complex64)"):
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
def test_pytorch_is_asked_the_same_way_whatever_its_defaults_are_at_import():
    program = """
import torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.float64)
import ingot
print(ingot._C.has_symbols(), torch.is_grad_enabled())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.split() == [str(_C.has_symbols()), "True"]


@on_cpu
def test_without_pytorch_the_import_says_what_is_missing():
    program = "import sys; sys.modules['torch'] = None; import ingot"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "ImportError: ingot needs PyTorch 2.6 or later: install torch" in found.stderr


# --- a module's parameters as one edge of the graph (native/edge.h) ---------------------------------------------------


def mlp_with_edge(device, **options):
    """An MLP whose calls go through an edge from now on, as long as its parameters stay what they are."""
    mlp = ingot.nn.FusedMLP(16, 24, 8, device=device, **options)
    x = torch.randn(3, 16, device=device)
    for _ in range(3):
        y = mlp(x)
    assert has_edge(y) or not _C.has_symbols()
    return mlp, x


def has_edge(y):
    return len(y.grad_fn.next_functions) == 2


def direct(mlp, x):
    """What the call computes without the module, and so without its edge."""
    return functional.mlp_of_parameters(x, list(mlp.parameters()), mlp.bias, mlp.weight_norm, mlp.activation, mlp.activate_last, mlp.recompute)


def parameter_gradients(mlp, loss):
    mlp.zero_grad()
    loss.backward()
    return [p.grad for p in mlp.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_through_an_edge_are_the_same(device, recompute):
    mlp, x = mlp_with_edge(device, recompute=recompute)
    z = torch.randn(5, 16, device=device, requires_grad=True)
    found = parameter_gradients(mlp, mlp(x).square().sum() + mlp(z).sum())
    dz, z.grad = z.grad, None
    expected = parameter_gradients(mlp, direct(mlp, x).square().sum() + direct(mlp, z).sum())
    assert_same(found + [dz], expected + [z.grad])
    w = mlp.layers[1].weight
    assert_same(torch.autograd.grad(mlp(x).sum(), [w]), torch.autograd.grad(direct(mlp, x).sum(), [w]))
    y = mlp(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_an_edge_follows_what_its_parameters_become(device):
    mlp, x = mlp_with_edge(device)
    w = mlp.layers[0].weight
    w.requires_grad_(False)
    y = mlp(x)
    w.requires_grad_(True)  # too late for y
    assert not has_edge(y) and [g is None for g in parameter_gradients(mlp, y.sum())] == [True] + [False] * 5
    mlp, x = mlp_with_edge(device)
    w = mlp.layers[0].weight
    w.data = torch.randn(24, 8, device=device)
    assert [g.shape for g in parameter_gradients(mlp, mlp(x[:, :8]).sum())] == [p.shape for p in mlp.parameters()]
    mlp, x = mlp_with_edge(device)
    old, mlp.layers[0].weight = mlp.layers[0].weight, torch.nn.Parameter(torch.randn(24, 16, device=device))
    assert all(g is not None for g in parameter_gradients(mlp, mlp(x).sum())) and old.grad is None
    mlp, x = mlp_with_edge(device)
    source, w = torch.ones(24, 1, device=device, requires_grad=True), mlp.layers[0].weight
    w.requires_grad_(False)
    w.mul_(source)  # no leaf any more
    mlp(x).sum().backward()
    assert source.grad is not None and w.grad_fn is not None
    if device.type == "cpu":
        mlp, x = mlp_with_edge(device)
        assert all(g.dtype == torch.float64 for g in parameter_gradients(mlp.double(), mlp(x.double()).sum()))


def test_parameters_may_be_swapped_behind_an_edge(device):
    mlp, x = mlp_with_edge(device)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        mlp.load_state_dict(ingot.nn.FusedMLP(16, 24, 8, device=device).state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_same(parameter_gradients(mlp, mlp(x).sum()), parameter_gradients(mlp, direct(mlp, x).sum()))


def test_an_edge_has_no_memory(device):
    mlp = ingot.nn.FusedMLP(16, 24, 8, device=device)
    edge = ingot._ops._make_edge(*mlp.parameters())
    assert edge.numel() == sum(p.numel() for p in mlp.parameters()) and edge.untyped_storage().nbytes() == 0


def test_gradients_through_an_edge_come_as_soon_as_they_can(device):
    mlp, _ = mlp_with_edge(device)
    before, seen = torch.nn.Linear(16, 16, device=device), []
    for name, p in (("mlp", mlp.layers[0].weight), ("linear", before.weight)):
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    y = mlp(before(torch.randn(3, 16, device=device)))
    assert has_edge(y) or not _C.has_symbols()
    y.sum().backward()
    assert seen == ["mlp", "linear"]


def test_a_call_goes_on_where_no_edge_can_be_made(device, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no memory")

    mlp, x = ingot.nn.FusedMLP(16, 24, 8, device=device), torch.randn(3, 16, device=device)
    with monkeypatch.context() as m:
        m.setattr(torch, "cat", fail)
        for _ in range(4):
            y = mlp(x)
            assert not has_edge(y)
        assert_same(parameter_gradients(mlp, y.sum()), parameter_gradients(mlp, direct(mlp, x).sum()))
    for _ in range(3):
        y = mlp(x)
    assert has_edge(y) or not _C.has_symbols()


def test_an_edge_outlives_collections_of_young_objects(device):
    import gc

    mlp, x = mlp_with_edge(device)
    gc.collect()
    for _ in range(3):
        y = mlp(x)
    for generation in range(2 if sys.version_info < (3, 14) else 1):
        gc.collect(generation)
        assert has_edge(mlp(x)) or not _C.has_symbols()
    gc.collect()
    assert not has_edge(mlp(x))


def test_an_edge_keeps_no_module_alive(device):
    import copy
    import gc
    import weakref

    mlp, x = mlp_with_edge(device)
    assert torch.equal(copy.deepcopy(mlp)(x), mlp(x)) and torch.equal(copy.copy(mlp)(x), mlp(x))
    mlp.layers[0].weight.register_hook(lambda g, mlp=mlp: None)  # a cycle
    alive = weakref.ref(mlp)
    del mlp
    gc.collect()
    assert alive() is None


@on_cpu
def test_a_tensor_of_another_device_is_refused():
    with pytest.raises((NotImplementedError, RuntimeError), match="meta|could not run|expected cpu or cuda|Could not run"):
        _C.rms_norm(torch.empty(2, 16, device="meta"), None, None, None, torch.empty(2, 16), None, 1e-5, False)


class OnCuda(torch.Tensor):
    """Memory of the CPU that says it is on a GPU; only what reads attributes (no exchange) believes it."""

    device = property(lambda self: torch.device("cuda", 0))


@pytest.mark.skipif(_C.cuda, reason="needs a build without CUDA")
def test_a_build_without_cuda_says_so():
    x, y, w = (torch.ones(8, 8).as_subclass(OnCuda) for _ in range(3))
    one = torch.ones(1, 2, 8).as_subclass(OnCuda)
    table, positions = torch.ones(1, 4).as_subclass(OnCuda), torch.zeros(1, dtype=torch.int32).as_subclass(OnCuda)
    calls = {
        "rms_norm": lambda: _C.rms_norm(x, None, None, None, y, None, 1e-5, False),
        "rms_norm_backward": lambda: _C.rms_norm_backward(y, x, None, None, None, x, None, None, 1e-5, False),
        "mlp": lambda: _C.mlp(x, [w], False, False, 0, False, False),
        "swiglu_gate": lambda: _C.swiglu_gate(x, y, w, 3, 0.0, 1.0, 0.0, 0.0),
            "muon": lambda: _C.muon(one, one, one, None, 0.1, 0.9, 0.0, 1.0, True, False, 5, 3.0, -4.0, 2.0, 0),
            "linear_cross_entropy": lambda: _C.linear_cross_entropy(x, w, None, None, positions, y[0], None, None, None, None, 0.0, 0.0, -100, 0.0),
            "wide_mlp": lambda: _C.wide_mlp(x, w, None, w, None, y, None, None, y, 0),
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


@on_gpu
def test_cuda_graphs_replay_forward_and_backward(device):
    net = Net(device)
    static = torch.randn(64, 16, device=device, requires_grad=True)
    dy = torch.randn(64, 16, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            net(static).backward(dy)
    torch.cuda.current_stream().wait_stream(side)
    net.zero_grad(set_to_none=True)
    static.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = net(static)
        y.backward(dy)
    for _ in range(2):
        fresh = torch.randn_like(static)
        with torch.no_grad():
            static.copy_(fresh)
        graph.replay()
        x = fresh.detach().requires_grad_()
        reference_y = net_copy(net)(x)
        torch.testing.assert_close(y, reference_y, rtol=2e-4, atol=2e-5)
        (dx,) = torch.autograd.grad(reference_y, x, dy)
        torch.testing.assert_close(static.grad, dx, rtol=2e-4, atol=2e-5)


def net_copy(net):
    import copy

    return copy.deepcopy(net)


@on_gpu
def test_work_runs_on_the_current_stream(device):
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    w = torch.ones(4096, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = x + 1  # not there yet when the next line is issued
        y = functional.rms_norm(late, w, 1e-5)
    stream.synchronize()
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x + 1, (4096,), w, 1e-5), rtol=2**-7, atol=2**-7)
