"""Modules under PyTorch's machinery: hooks, profilers, copies, threads, streams; and importing."""
import subprocess
import sys
import threading

import pytest
import torch

import ingot
from cases import modules, Net
from conftest import DEVICE, on_cpu, on_gpu
from ingot import _C, functional, nn


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


def ways_to_follow_a_call(module, seen):
    """(how, a function that undoes it): each appends to `seen` when the module is called."""
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


def test_functions_called_by_apply_are_not_called_directly(device):
    for module, x in modules(device):
        for _ in range(3):
            module(x)
        with pytest.raises(ValueError, match="forward: found it called by itself, expected apply"):
            if isinstance(module, ingot.nn.RMSNorm):
                _C.rms_norm_forward(object(), x, module.weight)
            else:
                _C.mlp_edge_forward(object(), x, x)


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
def test_without_pytorch_the_import_names_the_missing_package():
    program = "import sys; sys.modules['torch'] = None; import ingot"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "ImportError: ingot needs PyTorch 2.6 or later: install torch" in found.stderr


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


class Function(torch.nn.Module):
    """A function of functional as a module, with its parameters."""

    def __init__(self, function, *parameters):
        super().__init__()
        self.function, self.parameters_of_it = function, torch.nn.ParameterList(parameters)

    def forward(self, x):
        return self.function(x, *self.parameters_of_it)


def traced_modules():
    def weight(*shape):
        return torch.nn.Parameter(torch.randn(*shape))

    target = torch.tensor([0, 3, 6, -100, 2])
    return {
        "RMSNorm": nn.RMSNorm(16), "RMSNorm of two dimensions": nn.RMSNorm((5, 16)), "MegaGemmRMSNorm": nn.MegaGemmRMSNorm(16),
        "FusedMLP": nn.FusedMLP(16, 24, 16, 3), "FusedMLPSoftplusWN": nn.FusedMLPSoftplusWN(16, 24, 16), "SwiGLU": nn.SwiGLU(16, 24),
        "MegaGemmTriton": nn.MegaGemmTriton(16), "FusedSwiGLU": nn.FusedSwiGLU(16, 24), "WideMLP": nn.WideMLP(16, 24),
        "WideMLP of gelu": nn.WideMLP(16, 24, activation="gelu", bias=True),
        "LinearCrossEntropy": Function(lambda x, w: functional.linear_cross_entropy(x, w, target), weight(7, 16)),
        "LinearCrossEntropy of rows": Function(lambda x, w: functional.linear_cross_entropy(x, w, target, reduction="none"), weight(7, 16)),
        "gated_linear": Function(functional.gated_linear, weight(24, 16)), "swiglu": Function(functional.swiglu),
        "add_rms_norm": Function(lambda x, w: functional.rms_norm(x, w, residual=2 * x), weight(16)),
        "attention": Function(lambda x: functional.flash_attn_func(*(x.view(1, 5, 2, 8) * i for i in (1, 2, 3)), causal=True)),
        "rope": Function(lambda x: functional.rope(x.view(1, 5, 2, 8), *functional.rope_table(5, 8))),
        "qk_norm_rope": Function(lambda x: functional.qk_norm_rope(x.view(1, 5, 2, 8), *functional.rope_table(5, 8))),
        "activation": Function(lambda x: functional.activation(x, "gelu")),
    }


@on_cpu
@pytest.mark.parametrize("name", traced_modules())
@pytest.mark.filterwarnings("ignore")
def test_torch_jit_traces_every_module(name):
    torch.manual_seed(0)
    module = traced_modules()[name]
    traced = torch.jit.trace(module, torch.randn(5, 16))  # with its own check, which traces again without gradients
    x = torch.randn(5, 16)

    def outcome(module):
        given = x.clone().requires_grad_()
        y = module(given)
        y = torch.cat([t.flatten() for t in y]) if isinstance(y, tuple) else y
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), [given, *module.parameters()])]

    for found, expected in zip(outcome(traced), outcome(module), strict=True):
        torch.testing.assert_close(found, expected)
