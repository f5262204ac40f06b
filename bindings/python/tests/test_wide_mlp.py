"""Two linear layers with an activation between them, of any width."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import ingot
import reference
from conftest import on_cpu
from ingot import functional
from reference import assert_near

SQUARED = ("leaky_relu_squared", "relu_squared")


def leaves(device, dtype, bias, rows=(3, 7), widths=(40, 136, 24)):
    c, h, n = widths
    shapes = [rows + (c,), (h, c), (n, h)] + ([(h,), (n,)] if bias else [])
    scales = [1, c**-0.5, h**-0.5, 0.5, 0.5]
    return [(torch.randn(s, device=device) * scale).to(dtype).requires_grad_() for s, scale in zip(shapes, scales)]


def plain(x, w1, w2, b1=None, b2=None, activation="leaky_relu_squared"):
    return F.linear(reference.ACTIVATIONS[activation](F.linear(x, w1, b1)), w2, b2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [*SQUARED, "gelu", "gelu_tanh", "silu", "identity"])
def test_outputs_and_gradients_against_fp64(device, dtype, activation):
    for bias in (False, True):
        for recompute in (False, True):
            operands = leaves(device, dtype, bias)
            wide = reference.wide(operands)
            y = functional.wide_mlp(*operands, activation=activation, recompute=recompute)
            expected = plain(*wide, activation=activation)
            dy = torch.randn_like(y)
            y.backward(dy)
            expected.backward(dy.double())
            # fp32: sums of up to 136 products of similar size, added one after the other. 16 bits: on a CPU the result is rounded once; on a GPU
            # the hidden units, their slopes and their gradients are rounded too.
            roundings = 64 if dtype is torch.float32 else 1.1 if device.type == "cpu" else 6
            assert y.dtype is dtype
            assert_near(y, expected, roundings, f"y, {bias}")
            for name, got, want in zip(("x", "w1", "w2", "b1", "b2"), operands, wide):
                # Relative to the whole gradient, because the terms of the gradient of a rarely active unit mostly cancel.
                assert_near(got.grad.reshape(1, -1), want.grad.reshape(1, -1), roundings, f"gradient of {name}, {recompute}")


@on_cpu
def test_hooks_adapters_and_pruned_weights_take_part():
    mlp, x = ingot.nn.WideMLP(8, 24, 4, "gelu", bias=True), torch.randn(5, 8)
    plain = lambda: mlp.w2(F.gelu(mlp.w1(x)))  # noqa: E731
    seen = []
    handle = mlp.w1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch.testing.assert_close(mlp(x), plain())
    handle.remove()
    assert seen == [(5, 24)] * 2

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.more = base, nn.Linear(base.in_features, base.out_features)

        weight = property(lambda self: self.base_layer.weight)
        bias = property(lambda self: self.base_layer.bias)

        def forward(self, x):
            return self.base_layer(x) + self.more(x)

    mlp.w1 = Adapter(mlp.w1)
    torch.testing.assert_close(mlp(x), plain())
    mlp(x).sum().backward()
    assert mlp.w1.more.weight.grad is not None
    mlp.w1 = mlp.w1.base_layer
    prune.l1_unstructured(mlp.w2, "weight", 0.5)  # a hook before each call computes the pruned weight
    for _ in range(2):
        torch.testing.assert_close(mlp(x), plain())
        mlp(x).sum().backward()
    prune.remove(mlp.w2, "weight")
    nn.utils.parametrizations.weight_norm(mlp.w2)
    torch.testing.assert_close(mlp(x), plain())


@on_cpu
def test_gradcheck_in_fp64():
    for activation in (*SQUARED, "gelu"):
        for bias in (False, True):
            operands = leaves("cpu", torch.float64, bias, (2, 2), (3, 5, 4))
            for recompute in (False, True):
                call = lambda *a: functional.wide_mlp(*a, activation=activation, recompute=recompute)  # noqa: E731
                assert torch.autograd.gradcheck(call, operands), activation
            assert torch.autograd.gradgradcheck(lambda *a: functional.wide_mlp(*a, activation=activation), operands), activation


def test_frozen_parts_get_no_gradient(device):
    operands = leaves(device, torch.float32, True)
    functional.wide_mlp(*operands).sum().backward()
    for only in range(5):
        some = [t.detach().requires_grad_(i == only) for i, t in enumerate(operands)]
        functional.wide_mlp(*some).sum().backward()
        for i, t in enumerate(some):
            assert (t.grad is None) == (i != only)
        torch.testing.assert_close(some[only].grad, operands[only].grad, rtol=1e-6, atol=1e-6)


def test_the_tensors_kept_for_the_backward_pass(device):
    x, w1, w2 = leaves(device, torch.float32, False)
    op = torch.ops.ingot.wide_mlp.default
    _, h, kept = op(x, w1, None, w2, None, "relu_squared", True)
    torch.testing.assert_close(h, F.relu(F.linear(x, w1)).square(), rtol=1e-5, atol=1e-5)
    assert kept.dtype is torch.uint8 and kept.numel() == (2 * 2 * 256 if x.is_cuda else 21 * 136)
    _, h, kept = op(x, w1, None, w2, None, "gelu", True)
    torch.testing.assert_close(kept, F.linear(x, w1), rtol=1e-5, atol=1e-5)
    assert h.numel() == 0
    assert all(t.numel() == 0 for t in op(x, w1, None, w2, None, "gelu", False)[1:])


def test_layouts_and_empty_batches(device):
    x, w1, w2 = leaves(device, torch.float32, False)
    expected = functional.wide_mlp(x, w1, w2)
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(functional.wide_mlp(turned, w1.detach().t().contiguous().t(), w2), expected)
    torch.testing.assert_close(functional.wide_mlp(x[1, 2], w1, w2), expected[1, 2], rtol=1e-5, atol=1e-5)  # one row sums in another order
    empty = x[:0].detach().requires_grad_()
    y = functional.wide_mlp(empty, w1, w2)
    y.sum().backward()
    assert y.shape == (0, 7, 24) and empty.grad.shape == empty.shape and not w1.grad.any()


def test_the_module_loads_compiles_and_is_checkpointed(device):
    sequential = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 8)).to(device)
    mlp = ingot.nn.WideMLP(16, 40, 8, "gelu", bias=True, device=device)
    mlp.load_state_dict(sequential.state_dict())
    again = ingot.nn.WideMLP(16, 40, 8, "gelu", bias=True, device=device)
    again.load_state_dict(mlp.state_dict())
    x = torch.randn(5, 16, device=device, requires_grad=True)

    def step(f):
        x.grad = None
        mlp.zero_grad()
        y = f(x)
        y.square().sum().backward()
        return [y.detach(), x.grad] + [p.grad for p in mlp.parameters()]

    expected = step(mlp)
    torch.testing.assert_close(expected[0], sequential(x).detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(again(x), mlp(x))
    torch._dynamo.reset()
    for f in (torch.compile(mlp, fullgraph=True, backend="aot_eager"), torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True),
              lambda x: checkpoint(mlp, x, use_reentrant=False)):
        for found, want in zip(step(f), expected):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    with torch.autocast(device.type, torch.bfloat16):
        y = mlp(x)
    assert y.dtype is torch.bfloat16
    want = plain(x.bfloat16().double(), *(p.bfloat16().double() for p in (mlp.w1.weight, mlp.w2.weight, mlp.w1.bias, mlp.w2.bias)), activation="gelu")
    assert_near(y, want, 1.1 if device.type == "cpu" else 6)
    assert ingot.nn.WideMLP(8, 32, device=device)(torch.randn(2, 8, device=device)).shape == (2, 8)


def test_errors_name_the_value_found(device):
    x, w1, w2, b1, b2 = leaves(device, torch.float32, True)
    f = functional.wide_mlp
    for call, message in [
        (lambda: f(x, w1, w2, activation="swish"), "activation: found 'swish', expected one of identity"),
        (lambda: f(x, w2, w1), r"found x of \(3, 7, 40\), w1 of \(24, 136\), w2 of \(136, 40\), expected"),
        (lambda: f(x, w1, w2, b2), r"found .* b1 of \(24,\), .*, expected"),
        (lambda: f(x, w1.half(), w2), "w1: found dtype torch.float16, expected x's torch.float32"),
        (lambda: f(x.long(), w1.long(), w2.long()), "x: found dtype torch.int64, expected torch.float64, torch.float32, torch.bfloat16 or torch.float16"),
    ]:
        with pytest.raises(ValueError, match="wide_mlp: " + message):
            call()
    with pytest.raises(TypeError, match="wide_mlp: x: found list"):
        f([1.0], w1, w2)
    with pytest.raises(ValueError, match="WideMLP: activation: found 'swish'"):
        ingot.nn.WideMLP(8, 8, activation="swish")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_fp32_also_where_a_product_is_cut_over_its_features(device, dtype):
    """The result is rounded once, after a sum of 1100 terms in fp32. The second product multiplies by the identity and is exact."""
    for rows, columns, features in ((129, 24, 1100), (1000, 2, 1096), (1000, 8, 1100), (129, 100, 1096), (3, 7, 1100)):
        x, w = torch.randn(rows, features, device=device).to(dtype), (torch.randn(columns, features, device=device) / features**0.5).to(dtype)
        y = functional.wide_mlp(x, w, torch.eye(columns, device=device, dtype=dtype), activation="identity")
        expected = x.double() @ w.double().T
        # In fp16 a result below 2^-14 is rounded by 2^-25; twice that for margin.
        allowed = reference.ROUNDING[dtype] * expected.abs() + 2.0**-20 * (x.double().abs() @ w.double().abs().T) + 2.0**-24
        assert ((y.double() - expected).abs() / allowed).max() <= 1, (rows, columns, features)
