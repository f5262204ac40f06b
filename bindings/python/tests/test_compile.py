"""Calls under tracing, compilation, export, transforms, checkpointing and recording."""
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ingot
import ingot.hf
import reference
from cases import assert_same, everything, gradients, modules, Net
from conftest import DEVICE, has_loss, on_gpu
from ingot import functional
from test_refusals import calls


def test_symbolic_traces_compute_the_same(device):
    x = torch.zeros(4, 16, device=device)  # 0 / sqrt(0 + eps) is 0 where eps is not lost on the way
    x[1:] = torch.randn(3, 16, device=device)
    for name, function in everything(device):
        holder = torch.nn.Sequential(function) if isinstance(function, torch.nn.Module) else function
        traced = torch.fx.symbolic_trace(holder)
        assert torch.equal(traced(x), function(x)) and traced(x).isfinite().all(), name
    mlp = ingot.nn.FusedMLP(16, 24, 8, device=device)
    traced = torch.fx.symbolic_trace(mlp)  # the MLP itself is the root of the trace
    traced(x).sum().backward()
    assert all(p.grad is not None for p in mlp.parameters()) and len(list(traced.parameters())) == 6
    with torch.autocast(device.type, torch.bfloat16):
        assert traced(x).dtype is torch.bfloat16  # the dtype is asked for when the trace runs
    for norm in (ingot.nn.RMSNorm((3, 16), device=device), ingot.nn.RMSNorm(16, elementwise_affine=False)):
        rows = torch.randn(2, 3, 16, device=device)
        assert torch.equal(torch.fx.symbolic_trace(norm)(rows), norm(rows))
        assert all(map(torch.equal, torch.fx.symbolic_trace(norm)(rows, rows), norm(rows, rows)))
    y, total = torch.fx.symbolic_trace(ingot.nn.RMSNorm(16, device=device))(x, x)
    assert torch.equal(total, x + x)
    gated = ingot.nn.SwiGLU(16, 8, device=device)
    assert torch.equal(torch.fx.symbolic_trace(gated)(x), gated(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_recorded_trace_passes_its_own_check(device):
    x = torch.randn(4, 16, device=device)
    for module in (ingot.nn.RMSNorm(16, device=device), ingot.nn.FusedMLP(16, 24, 8, device=device)):
        assert torch.equal(torch.jit.trace(module, (x,))(x), module(x))


def test_compiles_without_graph_breaks_forward_and_backward(device):
    net = Net(device)
    x = torch.randn(6, 16, device=device)
    expected = gradients(net, net, x)
    torch._dynamo.reset()
    # The package can break tracing, but hardly the generation of code: a GPU uses the default backend, a CPU one that generates no code.
    compiled = torch.compile(net, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    assert_same(gradients(net, compiled, x), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected[0], rtol=2e-4, atol=2e-5)
    for rows in (9, 13):  # sizes that the compiled function has not seen
        z = torch.randn(rows, 16, device=device)
        assert_same(gradients(net, compiled, z), gradients(net, net, z))


def test_numbers_among_the_options_may_be_symbols(device):
    """With dynamic=True, and after a second value of an argument, torch.compile keeps floats as symbols."""
    x, w, target = torch.randn(3, 16, device=device), torch.randn(8, 16, device=device), torch.tensor([0, 7, 3], device=device)
    heads = torch.randn(1, 3, 2, 16, device=device)
    functions = {"rms_norm": lambda a: functional.rms_norm(x, w[0], a),
                 "rms_norm of a sum": lambda a: functional.rms_norm(x, w[0], a, residual=x)[0],
                 "swiglu": lambda a: functional.swiglu(x, limit=a, alpha=a, up_offset=a, activation="gelu_tanh"),
                 "gated_linear": lambda a: functional.gated_linear(x, w, limit=a, alpha=a, up_offset=a),
                 "qk_norm_rope": lambda a: functional.qk_norm_rope(heads, eps=a)}
    if has_loss(DEVICE):
        functions["linear_cross_entropy"] = lambda a: functional.linear_cross_entropy(x, w, target, softcap=a, z_loss=a, label_smoothing=a / 8)
    if DEVICE == "cpu":
        functions["flash_attn_func"] = lambda a: functional.flash_attn_func(heads, heads, heads, softmax_scale=a, softcap=a, causal=True)
    for name, function in functions.items():
        for dynamic in (True, None):
            torch._dynamo.reset()
            compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="eager")
            for a in (1e-3, 2.0, 0.5):
                torch.testing.assert_close(compiled(a), function(a), rtol=0, atol=0, msg=name)
    torch._dynamo.reset()
    norm = ingot.nn.RMSNorm(16, eps=1e-6, device=device)
    assert torch.equal(torch.compile(norm, fullgraph=True, dynamic=True, backend="eager")(x), norm(x))


def test_flags_may_be_symbols(device):
    """A comparison of sizes that a trace keeps as symbols is a symbol too."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x):
        return functional.rms_norm(x, x[0], unit_offset=x.shape[0] > 4)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="eager")
    for rows in (3, 4, 5, 9):
        x = torch.randn(rows, 16, device=device)
        assert torch.equal(compiled(x), f(x)) and torch.equal(make_fx(f, tracing_mode="symbolic")(x)(x), f(x))


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


class Watch:
    """Hooks of saved tensors that count how often each one is unpacked."""

    def __init__(self):
        self.counts = []

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, t):
        self.counts.append(0)
        return len(self.counts) - 1, t.detach()

    def unpack(self, packed):
        number, t = packed
        self.counts[number] += 1
        return t


class GatedMlp(torch.nn.Module):
    """A gated MLP with the names and the forward pass of transformers."""

    def __init__(self, bias, device):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(16, 24, bias=bias, device=device) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(24, 16, bias=bias, device=device), torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def trained(device):
    """(name, a function of tensors, the tensors) for every function and module of the package; the tensors and parameters all require gradients."""
    for name, (function, given, _) in calls().items():
        if name != "rope_" and (device.type == "cpu" or name not in ("grouped_linear", "flash_attn_func", "flash_attn_varlen_func")):
            module = function.to(device) if isinstance(function, torch.nn.Module) else None
            own = dict(module.named_parameters()) if module is not None else {}
            yield name, (lambda f: lambda **t: f(**{k: v for k, v in t.items() if not k.startswith("parameter ")}))(function), {
                **{k: t.to(device).requires_grad_(t.is_floating_point() and k not in ("cos", "sin")) for k, t in given.items()},
                **{f"parameter {k}": p for k, p in own.items()}}
    for bias in (False, True):
        patched = torch.nn.Sequential(GatedMlp(bias, device))
        assert len(ingot.hf.patch(patched).replaced) == 1
        for name, net in ((f"patched MLP, bias {bias}", patched), (f"SwiGLU, bias {bias}", ingot.nn.SwiGLU(16, 24, bias=bias, device=device))):
            yield name, (lambda net: lambda x, **_: net(x))(net), dict(x=torch.randn(5, 16, device=device).requires_grad_(), **dict(net.named_parameters()))


def training_gradients(call, given, **options):
    outputs = call(**given)
    outputs = [y for y in (outputs if isinstance(outputs, (tuple, list)) else (outputs,)) if isinstance(y, torch.Tensor) and y.requires_grad]
    leaves = [t for t in given.values() if t.requires_grad]
    torch.manual_seed(1)
    return torch.autograd.grad(outputs, leaves, [torch.randn_like(y) for y in outputs], **options)


@pytest.mark.parametrize("whole", [False, True])
def test_a_backward_pass_unpacks_each_saved_tensor_once(device, whole, monkeypatch):
    """Checkpointing raises an error where a saved tensor is unpacked twice. whole: gated MLPs are one node, as on a Hopper GPU in 16 bits."""
    if whole:
        monkeypatch.setattr(ingot.nn, "_fuses", lambda *operands: True)
        monkeypatch.setattr(ingot._hf_gated, "_fuses", lambda *operands: True)
    for name, call, given in trained(device):
        expected = training_gradients(call, given)
        watch = Watch()
        with watch.hooks():
            found = training_gradients(call, given)
        assert watch.counts and max(watch.counts) == 1, name
        names, leaves = list(given), list(given.values())
        again = training_gradients(lambda call=call, names=names, leaves=leaves, **_: checkpoint(lambda *t: call(**dict(zip(names, t))), *leaves,
                                                                                                use_reentrant=False), given)
        for a, b, c in zip(expected, found, again, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c), name


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


def test_fx_sees_modules_as_modules(device):
    for module, x in modules(device):
        class Leaves(torch.fx.Tracer):
            def is_leaf_module(self, m, name):
                return m is module

        graph = Leaves().trace(torch.nn.Sequential(module))
        assert [n.op for n in graph.nodes] == ["placeholder", "call_module", "output"]


class RotatesByItsOwnTable(torch.nn.Module):
    def forward(self, x, base):
        return functional.rope(x, *functional.rope_table(x.shape[1], x.shape[3], base, scaling="yarn", factor=4.0, original_context=32, device=x.device))


@pytest.mark.parametrize("dynamic", (False, True))
def test_a_table_may_be_made_inside_a_compiled_function(device, dynamic):
    module = RotatesByItsOwnTable()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for tokens, base in ((5, 100.0), (7, 100.0), (9, 500.0)):
        x = torch.randn(2, tokens, 3, 8, device=device)
        assert torch.equal(compiled(x, base), module(x, base))
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    with torch.device("meta"):
        torch._dynamo.reset()
        assert all(t.is_meta and t.shape == (5, 4) for t in torch.compile(lambda: functional.rope_table(5, 8), fullgraph=True, backend=backend)())
    assert "rope_table" in graphs[0] and "tracing_state" not in graphs[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_table_inside_a_recorded_trace_is_a_constant(device):
    x = torch.randn(2, 5, 3, 8, device=device)
    traced = torch.jit.trace(RotatesByItsOwnTable(), (x, torch.tensor(100.0)))
    assert torch.equal(traced(x, torch.tensor(100.0)), RotatesByItsOwnTable()(x, 100.0)) and "rope_table" not in str(traced.graph)


@pytest.mark.parametrize("strict", (False, True))
def test_a_table_may_be_made_inside_an_exported_function(device, strict):
    module, x = RotatesByItsOwnTable(), torch.randn(2, 5, 3, 8, device=device)
    exported = torch.export.export(module, (x, 100.0), dynamic_shapes=({1: torch.export.Dim("tokens", min=3, max=30)}, None), strict=strict)
    for tokens in (5, 9):
        x = torch.randn(2, tokens, 3, 8, device=device)
        assert torch.equal(exported.module()(x, 100.0), module(x, 100.0))
    assert "ingot.rope_table.default" in {str(node.target) for node in exported.graph.nodes}


def test_exports(device):
    net = Net(device)
    x = torch.randn(6, 16, device=device)
    exported = torch.export.export(net, (x,))
    torch.testing.assert_close(exported.module()(x), net(x), rtol=2e-4, atol=2e-5)


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
