import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import ingot
import reference
from conftest import on_cpu, on_gpu
from ingot import _plain, functional


def parameters(device, dtype, widths, bias, weight_norm):
    """Rows that keep pre-activations near N(0, 1..2)."""
    weights, biases, gains = [], [], []
    for k, n in zip(widths, widths[1:]):
        w = torch.randn(n, k, device=device) * (1.5 / k**0.5)
        weights.append(w.to(dtype).requires_grad_())
        biases.append((torch.randn(n, device=device) * 0.5).to(dtype).requires_grad_())
        gains.append((torch.rand(n, device=device) + 0.7).to(dtype).requires_grad_())
    return weights, biases if bias else None, gains if weight_norm else None


def flat(*groups):
    return [t for g in groups if g is not None for t in g]


def run_both(device, dtype, widths, activation, bias, weight_norm, rows=37, **options):
    """(found, oracle) lists: y, dx and every parameter's gradient."""
    weights, biases, gains = parameters(device, dtype, widths, bias, weight_norm)
    x = torch.randn(rows, widths[0], device=device).to(dtype).requires_grad_()
    y = functional.fused_mlp(x, weights, biases, gains, activation=activation, **options)
    dy = torch.randn_like(y)
    y.backward(dy)
    ow, ob, og = (None if g is None else reference.wide(g) for g in (weights, biases, gains))
    (ox,) = reference.wide([x])
    oy = reference.mlp(ox, ow, ob, og, activation, options.get("activate_last", False))
    oy.backward(dy.double())
    found = [y, x.grad] + [p.grad for p in flat(weights, biases, gains)]
    return found, [oy, ox.grad] + [p.grad for p in flat(ow, ob, og)]


CASES = [
    ((16, 32, 32, 8), "softplus", False, False),
    ((128, 128, 128, 128), "softplus", False, False),
    ((16, 32, 32, 8), "silu", True, False),
    ((16, 32, 32, 32, 32, 8), "softplus", False, True),
    ((24, 64, 40), "gelu", True, True),
    ((16, 8), "relu", True, False),
]
# Roundings of the dtype: 16-bit layers round h and dz once each, and a sum of K products keeps about sqrt(K) of the error.
ROUNDINGS = {torch.float64: 4000, torch.float32: 200, torch.float16: 12, torch.bfloat16: 12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("widths,activation,bias,weight_norm", CASES)
def test_agrees_with_fp64_forward_and_backward_for_random_upstream_gradients(device, dtype, widths, activation, bias, weight_norm):
    for recompute in (False, True):
        for found, oracle in zip(*run_both(device, dtype, widths, activation, bias, weight_norm, recompute=recompute)):
            if found.dim() == 1:  # of a vector, the size is that of all of it
                found, oracle = found.unsqueeze(0), oracle.unsqueeze(0)
            scale = oracle.abs().max()
            error = (found.double() - oracle).abs().max() / scale
            assert error <= ROUNDINGS[dtype] * reference.ROUNDING[dtype], f"{tuple(found.shape)}: {error:.2e}"


@on_gpu
@pytest.mark.parametrize("widths", [(128, 128, 128, 128), (512, 512, 512), (64, 264, 256, 40)])
@pytest.mark.parametrize("rows", [300, 20000])
def test_fp32_is_at_least_as_accurate_as_cublas(device, widths, rows):
    """The results of products (y, dx and every dW): root mean square of the errors against fp64, beside cuBLAS without TF32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    weights, _, _ = parameters(device, torch.float32, widths, False, False)
    leaves = [torch.randn(rows, widths[0], device=device, requires_grad=True), *weights]
    dy = torch.randn(rows, widths[-1], device=device)

    def run(f, leaves):
        y = f(leaves[0], leaves[1:])
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    def chain(x, ws):
        return reference.mlp(x, ws, None, None, "silu")

    ours, theirs = run(lambda x, ws: functional.fused_mlp(x, ws, activation="silu"), leaves), run(chain, leaves)
    for i, (found, peer, exact) in enumerate(zip(ours, theirs, run(chain, reference.wide(leaves)))):
        error, allowed = ((t.double() - exact).square().mean().sqrt() for t in (found, peer))
        assert error <= 1.05 * allowed, f"{i}: {error:.3e}, cuBLAS {allowed:.3e}"  # as many roundings in another order


@pytest.mark.parametrize("activation", functional.ACTIVATIONS)
def test_every_activation_between_layers_and_after_the_last(device, activation):
    for activate_last in (False, True):
        for found, oracle in zip(*run_both(device, torch.float32, (16, 24, 8), activation, True, False, activate_last=activate_last)):
            torch.testing.assert_close(found.double(), oracle, rtol=1e-4, atol=2e-5 * oracle.abs().max().item())


@on_cpu
@pytest.mark.parametrize("bias,weight_norm", [(True, False), (True, True)])
def test_gradcheck_in_fp64(bias, weight_norm):
    weights, biases, gains = parameters("cpu", torch.float64, (3, 5, 4, 2), bias, weight_norm)
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    operands = flat(weights, biases, gains)

    def f(x, *operands):
        n = len(weights)
        return functional.fused_mlp(x, operands[:n], operands[n : 2 * n], operands[2 * n :] or None, activation="softplus")

    assert torch.autograd.gradcheck(f, (x, *operands))


def test_frozen_operands_get_no_gradient_and_change_no_other(device):
    m = ingot.nn.FusedMLP(16, 32, 8, device=device)
    x = torch.randn(9, 16, device=device)
    m(x).sum().backward()
    expected = {k: p.grad.clone() for k, p in m.named_parameters()}
    m.zero_grad()
    frozen = ("layers.0.weight", "layers.1.bias")
    for k, p in m.named_parameters():
        p.requires_grad_(k not in frozen)
    m(x).sum().backward()
    for k, p in m.named_parameters():
        if k in frozen:
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, expected[k], msg=k)


def test_leading_dimensions_strides_and_empty_batches(device):
    m = ingot.nn.FusedMLP(16, 32, 8, activation="silu", device=device)
    x = torch.randn(6, 5, 16, device=device)
    expected = m(x)
    assert expected.shape == (6, 5, 8)
    torch.testing.assert_close(m(x.transpose(0, 1)).transpose(0, 1), expected)
    torch.testing.assert_close(m(torch.cat((x, x), -1)[..., :16]), expected)
    torch.testing.assert_close(m(x[0, 0]), expected[0, 0])
    for shape in ((0, 16), (3, 0, 16)):
        y = m(torch.empty(shape, device=device, requires_grad=True))
        y.sum().backward()
        assert y.shape == (*shape[:-1], 8)
        assert all(not p.grad.any() for p in m.parameters())
        with torch.no_grad():
            assert m(torch.empty(shape, device=device)).shape == (*shape[:-1], 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_may_begin_at_any_element(device, dtype):
    weights, biases, gains = parameters(device, dtype, (16, 32, 8), True, True)
    x = torch.randn(9, 16, device=device).to(dtype).requires_grad_()
    dy = torch.randn(9, 8, device=device).to(dtype)

    def moved(t):
        space = torch.empty(t.numel() + 1, device=device, dtype=dtype)[1:]
        return space.view(t.shape).copy_(t.detach()).requires_grad_()

    def run(x, ws, bs, gs, dy):
        y = functional.fused_mlp(x, ws, bs, gs)
        return [y.detach(), *torch.autograd.grad(y, [x, *ws, *bs, *gs], dy)]

    found = run(moved(x), *([moved(t) for t in group] for group in (weights, biases, gains)), moved(dy).detach())
    assert all(torch.equal(a, b) for a, b in zip(found, run(x, weights, biases, gains, dy)))


def test_recompute_keeps_nothing_for_the_backward_pass(device):
    x = torch.randn(9, 16, device=device, requires_grad=True)
    for recompute in (False, True):
        m = ingot.nn.FusedMLP(16, 32, 8, recompute=recompute, device=device)
        for _ in range(3):  # the third call goes through the edge
            y = m(x)  # held: some versions of PyTorch free a node's saved tensors with the last tensor of its graph
            assert (y.grad_fn.saved_tensors[1] is None) == recompute
        traced = make_fx(m)(x)  # make_fx sees the operator
        (node,) = (n for n in traced.graph.nodes if n.target is torch.ops.ingot.mlp.default)
        assert node.args[-1] is not recompute


def test_gradients_accumulate_as_those_of_any_module(device):
    m = ingot.nn.FusedMLP(16, 32, 8, device=device)
    x = torch.randn(9, 16, device=device)
    m(x).sum().backward()
    once = [p.grad.clone() for p in m.parameters()]
    m(x).sum().backward()
    for p, g in zip(m.parameters(), once):
        torch.testing.assert_close(p.grad, 2 * g)


@on_cpu
def test_autocast_leaves_fp64_alone(device):
    m, x = ingot.nn.FusedMLP(16, 32, 8, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    expected = m(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(m(x), expected) and m(x).dtype is torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_runs_in_autocasts_dtype_with_gradients_for_fp32_masters(device, dtype):
    m = ingot.nn.FusedMLP(16, 32, 8, device=device)
    x = torch.randn(64, 16, device=device)
    expected = m(x)
    with torch.autocast(device.type, dtype):
        y = m(x)
    assert y.dtype is dtype
    assert (y.float() - expected).abs().max() / expected.abs().max() < 12 * reference.ROUNDING[dtype]
    y.float().square().mean().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.any() for p in m.parameters())


# --- state dicts ------------------------------------------------------------------------------------------------------


def sequential(device, wrap=lambda m: m, bias=True, activation=nn.Softplus, n=3):
    widths = [16] + [32] * (n - 1) + [8]
    layers = []
    for i, (k, o) in enumerate(zip(widths, widths[1:])):
        layers += [wrap(nn.Linear(k, o, bias=bias, device=device))] + ([activation()] if i + 1 < n else [])
    return nn.Sequential(*layers)


def test_loads_a_sequential_of_linears(device):
    x = torch.randn(11, 16, device=device)
    for bias in (True, False):
        theirs = sequential(device, bias=bias, n=7)  # numbered to 12: in the order of numbers, not of text
        ours = ingot.nn.FusedMLP(16, 32, 8, num_layers=7, bias=bias, device=device)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ingot.nn.FusedMLP.from_sequential(theirs)(x), theirs(x), rtol=1e-4, atol=1e-5)
    outer = nn.Sequential(nn.Identity(), theirs)
    held = nn.Sequential(nn.Identity(), ours)
    held.load_state_dict(outer.state_dict())  # nested, with a prefix


def test_an_activation_may_be_a_module(device):
    ours = ingot.nn.FusedMLP(8, 16, 8, activation=nn.GELU("tanh"), device=device)
    assert ours.activation == "gelu_tanh"
    assert "weight (16, 8), bias (16,)" in repr(ours)
    wide = ingot.nn.WideMLP(8, 16, activation=nn.SiLU(), device=device)
    x = torch.randn(4, 8, device=device)
    assert wide.activation == "silu"
    torch.testing.assert_close(wide(x), wide.w2(nn.functional.silu(wide.w1(x))), rtol=1e-4, atol=1e-5)


def test_from_sequential_keeps_requires_grad_and_the_training_mode(device):
    for wrap in (lambda linear: linear, nn.utils.parametrizations.weight_norm):
        theirs = sequential(device, wrap, n=3).eval()
        frozen = theirs[2].parametrizations.weight.original1 if hasattr(theirs[2], "parametrizations") else theirs[2].weight
        frozen.requires_grad_(False)
        theirs[0].bias.requires_grad_(False)
        ours = ingot.nn.FusedMLP.from_sequential(theirs)
        held = {name for name, p in ours.named_parameters() if not p.requires_grad}
        assert held == {"layers.1.weight", "layers.0.bias"} and not ours.training


def test_to_sequential_is_the_way_back(device):
    x = torch.randn(11, 16, device=device)
    for options in ({"activation": "silu"}, {"weight_norm": True, "bias": False}, {"activation": "gelu_tanh", "activate_last": True},
                    {"num_layers": 1, "activation": "relu"}):
        ours = ingot.nn.FusedMLP(16, 32, 8, device=device, **options).eval()
        with torch.no_grad():
            for p in ours.parameters():
                p.mul_(torch.rand_like(p) + 0.5)
        next(ours.parameters()).requires_grad_(False)
        back = ours.to_sequential()
        torch.testing.assert_close(back(x), ours(x), rtol=1e-4, atol=1e-5)
        assert not back.training and [p.requires_grad for p in back[0].parameters()] == [False, True][:1 + ours.bias]
        torch.testing.assert_close(ingot.nn.FusedMLP.from_sequential(back)(x), ours(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="to_sequential: activation: found 'relu_squared'"):
        ingot.nn.FusedMLP(16, 32, 8, activation="relu_squared").to_sequential()


def test_loads_both_styles_of_weight_norm(device):
    x = torch.randn(11, 16, device=device)
    styles = [nn.utils.parametrizations.weight_norm]
    if hasattr(nn.utils, "weight_norm"):
        styles.append(nn.utils.weight_norm)
    for wrap in styles:
        theirs = sequential(device, wrap)
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                if name.endswith(("original0", "weight_g")):
                    p.mul_(torch.rand_like(p) + 0.5)
        normed = ingot.nn.FusedMLP(16, 32, 8, weight_norm=True, device=device)
        normed.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(normed(x), theirs(x), rtol=1e-4, atol=1e-5)
        plain = ingot.nn.FusedMLP(16, 32, 8, device=device)
        plain.load_state_dict(theirs.state_dict())  # folded
        torch.testing.assert_close(plain(x), theirs(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ingot.nn.FusedMLP.from_sequential(theirs)(x), theirs(x), rtol=1e-4, atol=1e-5)
    normed.load_state_dict(plain.state_dict())  # and split into direction and gain again
    torch.testing.assert_close(normed(x), plain(x), rtol=1e-4, atol=1e-5)


def test_loads_the_packed_layout_of_mlp_megakernel(device):
    v, g = torch.randn(32 + 32 + 8, 32, device=device), torch.rand(32 + 32 + 8, 1, device=device)
    m = ingot.nn.FusedMLPSoftplusWN(D=16, H=32, out_features=8, device=device)
    m.load_state_dict({"v_all": v, "g_all": g})
    rows = [(v[:32, :16], g[:32]), (v[32:64], g[32:64]), (v[64:], g[64:])]
    x = torch.randn(11, 16, device=device)
    oracle = reference.mlp(x.double(), [v.double() for v, _ in rows], None, [g.flatten().double() for _, g in rows], "softplus")
    torch.testing.assert_close(m(x).double(), oracle, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="v_all: found 8 rows, expected 72"):
        m.load_state_dict({"v_all": v[:8], "g_all": g[:8]})
    with pytest.raises(RuntimeError, match=r"v_all: found shape \(32,\), expected two dimensions"):
        m.load_state_dict({"v_all": v[0], "g_all": g})


def test_fused_mlp_takes_parameters_from_iterators(device):
    layers = [nn.Linear(8, 8, device=device) for _ in range(2)]
    x, weights, biases = torch.randn(3, 8, device=device), [m.weight for m in layers], [m.bias for m in layers]
    assert torch.equal(functional.fused_mlp(x, iter(weights), iter(biases)), functional.fused_mlp(x, weights, biases))
    with pytest.raises(ValueError, match="mlp: biases: found 1, expected one for each of 2 weights"):
        functional.fused_mlp(x, iter(weights), iter(biases[:1]))


def test_a_fused_mlp_starts_like_its_linears(device):
    torch.manual_seed(3)
    linears = [nn.Linear(16, 32, device=device), nn.Linear(32, 8, device=device)]
    torch.manual_seed(3)
    ours = ingot.nn.FusedMLP(16, 32, 8, num_layers=2, device=device)
    assert all(torch.equal(a, b) for linear, layer in zip(linears, ours.layers) for a, b in zip(linear.parameters(), layer.parameters()))


def test_weight_norm_starts_as_the_plain_module(device):
    torch.manual_seed(3)
    plain = ingot.nn.FusedMLP(16, 32, 8, device=device)
    torch.manual_seed(3)
    normed = ingot.nn.FusedMLP(16, 32, 8, weight_norm=True, device=device)
    x = torch.randn(5, 16, device=device)
    torch.testing.assert_close(plain(x), normed(x), rtol=1e-4, atol=1e-5)


def test_aliases_have_the_origins_signatures(device):
    for cls, layers, weight_norm in ((ingot.nn.FusedMLPSoftplus, 3, False), (ingot.nn.FusedMLPSoftplusWN, 3, True),
                                     (ingot.nn.FusedMLP5Softplus, 5, False), (ingot.nn.FusedMLP5SoftplusWN, 5, True)):
        for m in (cls(D=16, H=32, out_features=8), cls(16, 32, 8), cls(in_features=16, hidden_features=32, out_features=8)):
            assert (m.num_layers, m.weight_norm, m.bias, m.activation) == (layers, weight_norm, False, "softplus")
            assert m(torch.randn(3, 16)).shape == (3, 8)
        assert cls(D=16, H=32).out_features == 32 and cls(16, H=32, device=device).layers[0].weight.device.type == device.type


def test_keys_of_other_modules_are_reported_and_keys_of_a_subclass_are_loaded(device):
    class Scaled(ingot.nn.FusedMLP):
        def __init__(self):
            super().__init__(8, 16, 4, device=device)
            self.scale = torch.nn.Parameter(torch.ones(4, device=device))
            self.head = torch.nn.Linear(4, 2, device=device)

    made, other, linears = Scaled(), Scaled(), ingot.nn.FusedMLP(8, 16, 4, device=device).to_sequential()
    other.load_state_dict(made.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), other.parameters()))
    found = other.load_state_dict(linears.state_dict(), strict=False)
    assert found.missing_keys == ["scale", "head.weight", "head.bias"] and not found.unexpected_keys
    assert torch.equal(other.layers[2].weight, linears[4].weight) and torch.equal(other.head.weight, made.head.weight)
    mlp = ingot.nn.FusedMLP(8, 16, 4, device=device)
    found = mlp.load_state_dict({**linears.state_dict(), "table": torch.ones(2)}, strict=False)
    assert found.unexpected_keys == ["table"] and not found.missing_keys and torch.equal(mlp.layers[0].weight, linears[0].weight)
    with pytest.raises(RuntimeError, match='Unexpected key.*"table"'):
        mlp.load_state_dict({**mlp.state_dict(), "table": torch.ones(2)})


def test_state_dict_round_trips(device):
    m = ingot.nn.FusedMLP(16, 32, 8, weight_norm=True, device=device)
    other = ingot.nn.FusedMLP(16, 32, 8, weight_norm=True, device=device)
    other.load_state_dict(m.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(m.parameters(), other.parameters()))
    broken = m.state_dict()
    del broken["layers.1.gain"], broken["layers.1.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*layers.1"):
        other.load_state_dict(broken)


def test_errors_name_operation_argument_found_and_expected(device):
    x = torch.randn(2, 16, device=device)
    w = [torch.randn(8, 16, device=device)]
    cases = [
        (lambda: functional.fused_mlp(x, w, activation="swish"), ValueError, "mlp: activation: found 'swish', expected one of identity"),
        (lambda: functional.fused_mlp(x[:, :8], w), ValueError, r"mlp: x: found 8 columns, expected 16, as many as weights\[0\] of shape \(8, 16\)"),
        (lambda: functional.fused_mlp(x, [w[0], w[0]]), ValueError, r"mlp: weights\[1\]: found shape \(8, 16\), expected \(N, 8\) for the rows of the weights before"),
        (lambda: functional.fused_mlp(x, w, [], activation="relu"), ValueError, "biases: found 0, expected one for each of 1"),
        (lambda: functional.fused_mlp(x, [w[0].bfloat16()]), ValueError, r"mlp: weights\[0\]: found dtype torch.bfloat16, expected x's torch.float32"),
        (lambda: functional.fused_mlp(x.long(), w), ValueError, "mlp: x: found dtype torch.int64, expected torch.float64, torch.float32, torch.bfloat16 or torch.float16"),
        (lambda: functional.fused_mlp(x, [w[0][0]]), ValueError, "mlp: weights: found 1 dimensions, expected 2"),
        (lambda: functional.fused_mlp(x[:, ::2].requires_grad_(), [w[0][0, ::2]]), ValueError, "mlp: weights: found . dimensions, expected 2"),
        (lambda: functional.fused_mlp(x, []), ValueError, "mlp: parameters: found 0"),
        (lambda: torch.ops.ingot.mlp(x, [w[0]] * 3, True, False, "relu", False, False), ValueError, "mlp: parameters: found 3 tensors, expected 2 for every layer"),
        (lambda: ingot.nn.FusedMLP(0, 32, 8), ValueError, "FusedMLP: in_features: found 0"),
        (lambda: ingot.nn.FusedMLP.from_sequential([nn.Linear(4, 4)]), TypeError, "model: found list, expected nn.Sequential"),
        (lambda: ingot.nn.FusedMLP.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))), ValueError,
         "with a bias and without"),
        (lambda: ingot.nn.FusedMLP.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4).half())), ValueError,
         "found torch.float16 and torch.float32, expected one dtype"),
        *((lambda act=act: ingot.nn.FusedMLP.from_sequential(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4))), ValueError,
           rf"model\[1\]: found {type(act).__name__}") for act in (nn.Softplus(2), nn.Softplus(1, 5), nn.LeakyReLU(0.2))),
        (lambda: ingot.nn.FusedMLP.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 4))), ValueError, r"FusedMLP.from_sequential: model\[1\]: found ELU"),
        (lambda: ingot.nn.FusedMLP(4, 8, 4, activation=nn.ELU()), ValueError, "FusedMLP: activation: found ELU"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()


def test_compiled_training_steps_of_few_wide_rows_are_pytorchs_own_products(monkeypatch):
    monkeypatch.setattr(_plain, "_COMPILED_PRODUCTS", ("cpu",))
    calls = []

    def backend(graph, _):
        calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def graph_of(module, x):
        torch._dynamo.reset()
        calls.clear()
        y = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(x)
        return y, any("ingot" in name for name in calls[0])

    torch.manual_seed(3)
    FusedMLP = ingot.nn.FusedMLP
    module = FusedMLP(264, 512, 8, dtype=torch.bfloat16)
    x = torch.randn(7, 73, 264, dtype=torch.bfloat16)
    y, has_kernel = graph_of(module, x)
    assert not has_kernel
    gradients = torch.autograd.grad(y.float().square().sum(), list(module.parameters()))
    wide = [p.detach().double().requires_grad_() for p in module.parameters()]
    want = _plain.mlp(x.double(), wide, True, False, "softplus", False)
    torch.testing.assert_close(y.double(), want, rtol=0, atol=0.02 * want.detach().abs().max().item())
    for got, exact in zip(gradients, torch.autograd.grad(want.square().sum(), wide)):
        assert (got.double() - exact).norm() < 0.02 * exact.norm()
    few, many = torch.randn(511, 264, dtype=torch.bfloat16), torch.randn(512, 264, dtype=torch.bfloat16)
    assert not graph_of(module, few)[1]
    assert graph_of(module, many)[1]
    with torch.no_grad():
        assert graph_of(module, few)[1]  # inference
    assert graph_of(FusedMLP(264, 512, 8, recompute=True, dtype=torch.bfloat16), few)[1]
    assert graph_of(FusedMLP(264, 512, 8, weight_norm=True, dtype=torch.bfloat16), few)[1]
    assert graph_of(FusedMLP(264, 512, 8), few.float())[1]
    assert graph_of(FusedMLP(256, 128, 8, dtype=torch.bfloat16), few[:, :256])[1]


def test_no_rows_of_a_transposed_tensor(device):
    """PyTorch calls a tensor without elements contiguous, whatever its strides are."""
    w, b = torch.randn(16, 8, device=device), torch.randn(16, device=device)
    for dtype in (torch.float32, torch.float16):
        for x in (torch.randn(8, 5, device=device).t()[:0], torch.randn(3, 8, 5, device=device).transpose(1, 2)[:, :0]):
            y = functional.fused_mlp(x.to(dtype).requires_grad_(), [w.to(dtype)], [b.to(dtype)])
            assert y.shape == (*x.shape[:-1], 16)
            y.sum().backward()


def test_parameters_that_are_none_or_without_dimensions_are_refused(device):
    """Also where the call has to make other operands dense first."""
    x = torch.randn(3, 8, device=device)
    for w in (torch.randn(16, 8, device=device), torch.randn(8, 16, device=device).t()):
        for dtype in (torch.float32, torch.float16):
            for wrong, error in ((None, TypeError), (torch.ones((), device=device, dtype=dtype), ValueError)):
                with pytest.raises(error, match="mlp: .*: found .*, expected"):
                    functional.fused_mlp(x.to(dtype), [w.to(dtype)], [wrong])
