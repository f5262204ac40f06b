"""Derivatives of derivatives: penalties on gradients, Hessians and products with them, against plain PyTorch and finite differences."""
import pytest
import torch
from torch.autograd import functional as transforms

import ingot
import reference
from cases import declared
from conftest import DEVICE, has_loss, on_cpu
from ingot import functional
from test_loss import oracle as cross_entropy
from cases import everything, mlp_with_edge
from test_wide_mlp import plain as wide_mlp

EPS = 1e-5


def pairs(device, dtype):
    """(name, ours(x, *parameters), plain PyTorch's, the parameters) for x (4, 16)."""

    def tensor(*shape, around=0.0):
        return (torch.randn(shape, device=device, dtype=dtype) * 0.4 + around).requires_grad_()

    w = tensor(16, around=1.0)
    yield "rms_norm", lambda x, w: functional.rms_norm(x, w, EPS), lambda x, w: reference.rms_norm(x, w, EPS), [w]
    yield ("rms_norm, 1 + weight", lambda x, w: functional.rms_norm(x, w, EPS, unit_offset=True),
           lambda x, w: reference.rms_norm(x, w, EPS, True), [w])
    yield "rms_norm without a weight", lambda x: functional.rms_norm(x, None, EPS), lambda x: reference.rms_norm(x, None, EPS), []
    yield ("rms_norm of a sum", lambda x, r, w: sum(functional.rms_norm(x, w, EPS, residual=r)),
           lambda x, r, w: reference.rms_norm(x + r, w, EPS) + x + r, [tensor(4, 16), w])
    shapes = (24, 16), (24, 24), (8, 24)
    weights = [tensor(*s) for s in shapes]
    rows = [tensor(s[0], around=0.5) for s in shapes]
    for name in ("softplus", "gelu", "silu", "relu_squared", "tanh"):
        yield (f"mlp, {name}", lambda x, *p, name=name: functional.fused_mlp(x, p[:3], p[3:], activation=name),
               lambda x, *p, name=name: reference.mlp(x, p[:3], p[3:], None, name), weights + rows)
    yield ("mlp with weight norm, recomputed",
           lambda x, *p: functional.fused_mlp(x, p[:3], None, p[3:], activation="gelu", activate_last=True, recompute=True),
           lambda x, *p: reference.mlp(x, p[:3], None, p[3:], "gelu", True), weights + rows)
    yield "swiglu of two", functional.swiglu, reference.swiglu, [tensor(4, 16)]
    yield "swiglu of one tensor twice", lambda x: functional.swiglu(x, x), lambda x: reference.swiglu(x, x), []
    for order in ("gate_first", "gate_second", "interleaved"):
        yield (f"swiglu, {order}", lambda x, order=order: functional.swiglu(x, order=order, limit=0.5, alpha=1.7, up_offset=1.0),
               lambda x, order=order: reference.swiglu(*reference.split(x, order), 0.5, 1.7, 1.0), [])
    for columns in (False, True):
        yield (f"gated linear, columns {columns}", lambda x, w, b, columns=columns: functional.gated_linear(x, w, b, columns=columns),
               lambda x, w, b, columns=columns: reference.swiglu(*reference.split(x @ (w if columns else w.t()) + b, "gate_first")),
               [tensor(16, 12) if columns else tensor(12, 16), tensor(12)])
    yield ("gated linear of two", lambda x, w, v, b, c: functional.gated_linear(x, w, b, up=v, up_bias=c, activation="gelu_tanh"),
           lambda x, w, v, b, c: reference.swiglu(x @ w.t() + b, x @ v.t() + c, activation="gelu_tanh"), [tensor(6, 16), tensor(6, 16), tensor(6), tensor(6)])
    for name in ("leaky_relu_squared", "gelu_tanh"):
        yield (f"wide_mlp, {name}", lambda x, *p, name=name: functional.wide_mlp(x, *p, activation=name),
               lambda x, *p, name=name: wide_mlp(x, *p, activation=name), [tensor(12, 16), tensor(6, 12), tensor(12), tensor(6)])
    if device.type == "cpu":
        ends = torch.tensor([0, 1, 1, 3])

        def by_expert(x, w, b):
            return torch.cat([x[:1] @ w[0].t() + b[0], x[1:3] @ w[2].t() + b[2], 0 * x[3:] @ w[0].t()])

        yield "grouped_linear", lambda x, w, b: functional.grouped_linear(x, w, ends, b), by_expert, [tensor(3, 6, 16), tensor(3, 6)]
    classes = torch.tensor([3, -100, 0, 11], device=device)
    for reduction in ("mean", "none") if has_loss(DEVICE) else ():
        yield (f"linear_cross_entropy, {reduction}",
               lambda x, w, b, reduction=reduction: functional.linear_cross_entropy(x, w, classes, b, softcap=3.0, z_loss=0.1, reduction=reduction),
               lambda x, w, b, reduction=reduction: cross_entropy(x, w, classes, b, softcap=3.0, z_loss=0.1, reduction=reduction),
               [tensor(12, 16), tensor(12)])
    cos, sin = functional.rope_table(4, 6, device=device, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    positions, gain = torch.arange(4, device=device), torch.rand(2, device=device, dtype=cos.dtype, requires_grad=True)
    for turned in (False, True):
        yield (f"rope, {turned}", lambda x, turned=turned: functional.rope(x.view(4, 2, 8), cos, sin, interleaved=turned).sin(),
               lambda x, turned=turned: reference.rope(x.view(4, 2, 8), cos, sin, positions, turned).sin(), [])
    yield ("qk_norm_rope", lambda x, gain: functional.qk_norm_rope(x.view(4, 2, 8), cos, sin, gain=gain, eps=EPS),
           lambda x, gain: reference.rope(reference.rms_norm(x.view(4, 2, 8), None, EPS), cos, sin, positions) * gain.unsqueeze(-1), [gain])
    for name in functional.ACTIVATIONS:
        yield name, lambda x, name=name: functional.activation(x, name), lambda x, name=name: reference.ACTIVATIONS[name](x), []
    for name, op, _, tensors, options in declared(device, dtype):
        if op.name != "activation":  # which has a reference of its own
            yield (name, lambda x, *t, op=op, options=options: op.function(x, *t, *options),
                   lambda x, *t, op=op, options=options: op.formula(x, *t, *options), tensors[1:])


def penalty(f, x, parameters):
    """The issue's own: a loss, and ten times the squared norm of its gradient by x."""
    y = f(x, *parameters)
    (g,) = torch.autograd.grad(y.sum() + y.square().sum(), x, create_graph=True)
    return y.sum() + 10 * g.square().sum()


def assert_gradients_agree(name, found, expected):
    for i, (a, b) in enumerate(zip(found, expected)):
        a, b = (torch.zeros(()) if t is None else t for t in (a, b))
        assert torch.isfinite(a).all(), f"{name}: {i}"
        size = b.abs().max().item()
        # fp64 against fp64, and fp32 against fp32 whose own sums of up to 24 products of two derivatives round as often
        allowed = {torch.float64: 1e-12, torch.float32: 2e-5}[a.dtype] * max(size, 1e-3)
        assert (a - b).abs().max().item() <= allowed, f"{name}: input {i}: found {a.flatten()[:4]}, expected {b.flatten()[:4]}"


def dtypes(device):
    return [torch.float32] if device.type == "cuda" else [torch.float32, torch.float64]


def test_penalties_on_gradients_train_everything(device):
    for dtype in dtypes(device):
        for name, ours, plain, parameters in pairs(device, dtype):
            x = torch.randn(4, 16, device=device, dtype=dtype, requires_grad=True)
            inputs = [x, *parameters]
            expected = torch.autograd.grad(penalty(plain, x, parameters), inputs, allow_unused=True)
            assert_gradients_agree(name, torch.autograd.grad(penalty(ours, x, parameters), inputs, allow_unused=True), expected)
            for wanted, of_it in zip(inputs, expected):  # one at a time: every node must run, even if further gradients are not requested
                assert_gradients_agree(name, torch.autograd.grad(penalty(ours, x, parameters), [wanted], allow_unused=True), [of_it])
                wanted.grad = None
                penalty(ours, x, parameters).backward(inputs=[wanted])
                assert_gradients_agree(name, [wanted.grad], [of_it])
                wanted.grad = None


def test_penalties_on_gradients_of_parameters(device):
    for name, ours, plain, parameters in pairs(device, torch.float32):
        if not parameters:
            continue
        x = torch.randn(4, 16, device=device)  # x needs no gradient

        def loss(f):
            of_parameters = torch.autograd.grad(f(x, *parameters).square().sum(), parameters, create_graph=True)
            return sum(g.square().sum() for g in of_parameters)

        assert_gradients_agree(name, *(torch.autograd.grad(loss(f), parameters) for f in (ours, plain)))


def test_a_recorded_pass_gives_the_kernels_first_derivatives(device):
    for name, ours, _, parameters in pairs(device, torch.float32):
        x = torch.randn(4, 16, device=device, requires_grad=True)
        loss = ours(x, *parameters).square().sum()
        expected = torch.autograd.grad(loss, [x, *parameters], retain_graph=True)
        found = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected)), name


@pytest.mark.parametrize("weight_norm", [False, True])
def test_a_penalty_through_an_edge(device, weight_norm):
    mlp, _ = mlp_with_edge(device, weight_norm=weight_norm)
    z = torch.randn(5, 16, device=device, requires_grad=True)

    def plain(x, *p):
        each = 2 + weight_norm
        return reference.mlp(x, p[0::each], p[1::each], p[2::each] if weight_norm else None, mlp.activation)

    inputs = [z, *mlp.parameters()]
    expected = torch.autograd.grad(penalty(plain, z, inputs[1:]), inputs, allow_unused=True)
    assert_gradients_agree("edge", torch.autograd.grad(penalty(lambda x: mlp(x), z, []), inputs, allow_unused=True), expected)
    for wanted, of_it in zip(inputs, expected):
        assert_gradients_agree("edge", torch.autograd.grad(penalty(lambda x: mlp(x), z, []), [wanted], allow_unused=True), [of_it])


@on_cpu
def test_second_derivatives_by_finite_differences_in_fp64():
    for name, f in everything(torch.device("cpu"), torch.float64):
        x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(f, x), name


def test_hessians_and_products_with_them(device):
    dtype = dtypes(device)[-1]
    tolerance = dict(rtol=1e-9, atol=1e-11) if dtype is torch.float64 else dict(rtol=2e-4, atol=2e-4)
    for name, f in everything(device, dtype):
        x, v = (torch.randn(4, 16, device=device, dtype=dtype) for _ in range(2))

        def loss(x):
            return f(x).sin().square().sum()

        expected = torch.func.hessian(loss)(x)  # forward over reverse, by PyTorch's own operations
        for way, found in (("tape", transforms.hessian(loss, x)), ("batched tape", transforms.hessian(loss, x, vectorize=True)),
                           ("reverse over reverse", torch.func.jacrev(torch.func.grad(loss))(x))):
            torch.testing.assert_close(found, expected, **tolerance, msg=lambda m: f"{name}, {way}: {m}")
        product = torch.einsum("abcd,cd->ab", expected, v)
        for way in (transforms.hvp, transforms.vhp):
            torch.testing.assert_close(way(loss, x, v)[1], product, **tolerance, msg=lambda m: f"{name}: {m}")
        torch.testing.assert_close(torch.func.vjp(torch.func.grad(loss), x)[1](v)[0], product, **tolerance, msg=lambda m: f"{name}: {m}")


def test_third_derivatives(device):
    dtype = dtypes(device)[-1]
    for name, ours, plain, parameters in pairs(device, dtype):
        x = (0.5 * torch.randn(4, 16, device=device, dtype=dtype)).requires_grad_()

        directions = torch.randn(2, 4, 16, device=device, dtype=dtype)

        def third(f):
            value = f(x, *parameters).sin().sum()
            for v in directions:
                (slope,) = torch.autograd.grad(value, x, create_graph=True)
                value = (v * slope).sum()
            return torch.autograd.grad(value, x)

        rtol, atol = (1e-8, 1e-9) if dtype is torch.float64 else (1e-3, 1e-3)
        torch.testing.assert_close(third(ours)[0], third(plain)[0], rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")


def test_second_derivatives_far_out_are_finite(device):
    x = torch.tensor([-1e4, -200.0, -90.0, -0.0, 90.0, 200.0, 1e4], device=device, requires_grad=True)
    for name in functional.ACTIVATIONS:
        (g,) = torch.autograd.grad(functional.activation(x, name).sum(), x, create_graph=True)
        if g.requires_grad and g.grad_fn is not None:
            (h,) = torch.autograd.grad(g.sum(), x, allow_unused=True)
            assert h is None or torch.isfinite(h).all(), f"{name}: {h}"
        assert torch.isfinite(torch.func.hessian(lambda x: functional.activation(x, name).sum())(x.detach())).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_round_as_pytorch_does(device, dtype):
    def loss(f, x, w):
        (g,) = torch.autograd.grad(f(x, w).float().square().sum(), x, create_graph=True)
        return g.float().square().sum()

    wide = [torch.randn(64, 32, device=device), torch.rand(32, device=device) + 0.5]
    narrow = [t.to(dtype).requires_grad_() for t in wide]
    exact = [t.detach().double().requires_grad_() for t in narrow]

    def oracle(x, w):
        (g,) = torch.autograd.grad(reference.rms_norm(x, w, EPS).square().sum(), x, create_graph=True)
        return g.square().sum()

    expected = torch.autograd.grad(oracle(*exact), exact)
    found = torch.autograd.grad(loss(lambda x, w: functional.rms_norm(x, w, EPS), *narrow), narrow)
    peers = torch.autograd.grad(loss(lambda x, w: torch.nn.functional.rms_norm(x, (32,), w, EPS), *narrow), narrow)
    for ours, theirs, e in zip(found, peers, expected):
        error, allowed = ((t.double() - e).square().mean().sqrt() for t in (ours, theirs))
        assert ours.dtype is dtype and error <= 1.5 * allowed


def test_jacobians_of_several_gradients_at_once(device):
    for name, f in everything(device):
        x = torch.randn(4, 16, device=device)
        torch.testing.assert_close(transforms.jacobian(f, x, vectorize=True), transforms.jacobian(f, x), rtol=2e-4, atol=2e-5,
                                   msg=lambda m: f"{name}: {m}")


def test_compiled_code_gives_second_derivatives_or_an_error(device):
    mlp, norm = ingot.nn.FusedMLP(16, 24, 8, device=device), ingot.nn.RMSNorm(16, device=device)
    for f in (norm, lambda x: mlp(x), functional.swiglu):
        torch._dynamo.reset()
        x = torch.randn(4, 16, device=device, requires_grad=True)

        def product(x):
            return torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).square().sum())(x).sin().sum())(x)

        compiled = torch.compile(lambda x: product(x), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x.detach()), product(x.detach()), rtol=1e-3, atol=1e-4)
        y = torch.compile(lambda x: f(x), backend="aot_eager")(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):  # PyTorch's own answer, for any module
            (y.sum() + g.square().sum()).backward()
