"""Parts that several test files share: every operation with its arguments, a net of all modules, and comparisons."""
import inspect

import torch

import ingot
from conftest import DEVICE, has_loss
from ingot import _C, _declare, functional


def declared(device, dtype=torch.float32, most=100):
    """(name, the declaration, whether its derivative jumps, tensors for x (4, 16), options) for the cases of every declared operator, at most `most` of each."""
    for op in _declare.OPS.values():
        for options in op.options[-most:]:
            tensors = [torch.randn(16 if t in op.columns else (4, 16), device=device, dtype=dtype).requires_grad_() for t in op.tensors]
            arguments = inspect.signature(op.function).bind(*tensors, **options)
            arguments.apply_defaults()
            yield ", ".join([op.name, *map(str, options.values())]), op, options in [op.options[j] for j in op.jumps], tensors, arguments.args[len(tensors):]


def samples(device):
    """(name, op, arguments) of every operator."""
    x = torch.randn(4, 16, device=device, requires_grad=True)
    w = torch.randn(16, device=device, requires_grad=True)
    parameters = [p.detach().requires_grad_() for p in ingot.nn.FusedMLP(16, 24, 8, device=device).parameters()]
    heads = torch.randn(3, 2, 8, device=device, requires_grad=True)
    cos, sin = functional.rope_table(3, 8, device=device)
    positions = torch.arange(3, dtype=torch.int32, device=device)
    gain = torch.rand(2, device=device, requires_grad=True)
    yield "rope_table", torch.ops.ingot.rope_table.default, (5, 8, 500.0, "yarn", 4.0, 32.0, 32.0, 1.0, True, 0.0, torch.float64)
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
    yield "gated_linear_backward", ops.gated_linear_backward.default, (torch.randn(*x.shape[:-1], wide.shape[0], device=device), x.detach(), wide.detach(), None, None, None, 0, False,
                                                                       True, True, False, False, False)
    yield "gated_linear_backward, derived", ops.gated_linear_backward.default, (torch.randn(4, 12, device=device, requires_grad=True), x, wide, None,
                                                                                torch.randn(12, device=device), None, 1, False, True, True, False, True, False)
    narrow, of_narrow = torch.randn(6, 12, device=device, requires_grad=True), torch.randn(4, 6, device=device)
    row = torch.randn(12, device=device, requires_grad=True)
    yield "wide_mlp", ops.wide_mlp.default, (x, wide, row, narrow, None, "leaky_relu_squared", True)
    yield "wide_mlp, gelu", ops.wide_mlp.default, (x, wide, None, narrow, torch.randn(6, device=device), "gelu", True)
    yield "wide_mlp, nothing kept", ops.wide_mlp.default, (x, wide, row, narrow, None, "gelu_tanh", False)
    yield "wide_mlp_backward", ops.wide_mlp_backward.default, (of_narrow, x.detach(), wide.detach(), row.detach(), narrow.detach(), None, h.new_empty(0),
                                                               torch.randn(4, 12, device=device), "gelu", True, True, True, True, False)
    yield "wide_mlp_backward, derived", ops.wide_mlp_backward.default, (of_narrow.clone().requires_grad_(), x, wide, row, narrow, None, h.new_empty(0),
                                                                        h.new_empty(0), "leaky_relu_squared", True, True, True, False, False)
    if DEVICE == "cpu":  # no kernel on a GPU yet
        bank, biases, ends = torch.randn(3, 5, 16, requires_grad=True), torch.randn(3, 5, requires_grad=True), torch.tensor([0, 1, 1, 3], dtype=torch.int32)
        yield "grouped_linear", ops.grouped_linear.default, (x, bank, biases, ends)
        yield "grouped_linear_backward", ops.grouped_linear_backward.default, (torch.randn(4, 5), x.detach(), bank.detach(), ends, True, True, False)
        yield "grouped_linear_backward, derived", ops.grouped_linear_backward.default, (torch.randn(4, 5, requires_grad=True), x, bank, ends, True, True, True)
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
    for name, op, _, tensors, options in declared(device, most=2):
        yield name, getattr(ops, op.name).default, (*tensors, *options)
        yield f"{op.name}_backward, {name}", getattr(ops, f"{op.name}_backward").default, (torch.randn_like(tensors[0]), *(t.detach() for t in tensors), *options)
    dy = torch.randn(4, 16, device=device, requires_grad=True)  # the same, for the second derivative
    yield "rms_norm_backward, derived", ops.rms_norm_backward.default, (dy, h16, x, w, None, 1e-5, False, True, True)
    yield "mlp_backward, derived", ops.mlp_backward.default, (dy[:, :8].detach().requires_grad_(), x, parameters, x.detach().new_empty(0), [True] * 6, True,
                                                              True, False, "softplus", False)
    yield "swiglu_gate_backward, derived", ops.swiglu_gate_backward.default, (dy, x, x.detach().clone().requires_grad_(), 0, 7.0, 1.7, 1.0, 0.07)
    yield "qk_norm_rope_backward, derived", ops.qk_norm_rope_backward.default, (heads, torch.randn_like(heads).requires_grad_(), positions, cos, sin, gain, 1e-6,
                                                                               False, 1)
    for name, op, _, tensors, options in declared(device, most=2):
        yield f"{op.name}_backward, derived, {name}", getattr(ops, f"{op.name}_backward").default, (dy, *tensors, *options)


class Doubled(torch.nn.Module):
    """n(x + 2 x) + x + 2 x."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        both = self.norm(x, 2 * x)
        return both[0] + both[1]


def everything(device, dtype=torch.float32):
    """(name, a function of x (4, 16) that is differentiable in it) for every operation of the package; some parameters do not train."""
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
    if DEVICE == "cpu":
        bank, ends = torch.randn(3, 5, 16, device=device, dtype=dtype) * 0.3, torch.tensor([0, 1, 1, 3], device=device)
        yield "grouped_linear", lambda x: functional.grouped_linear(x, bank, ends, bank[..., 0])
    head = torch.randn(12, 16, device=device, dtype=dtype) * 0.5
    classes = torch.tensor([3, -100, 0, 11], device=device)
    if has_loss(DEVICE):
        yield "linear_cross_entropy", lambda x: functional.linear_cross_entropy(x, head, classes, softcap=4.0, z_loss=0.1)
        yield "linear_cross_entropy of rows", lambda x: functional.linear_cross_entropy(x, head, classes, head[:, 0], reduction="none")
    yield "rope", lambda x: functional.rope(x.view(4, 2, 8), *table)
    yield "rope, interleaved", lambda x: functional.rope(x.view(4, 2, 8), *table, sign=-1, interleaved=True)
    yield "qk_norm_rope", lambda x: functional.qk_norm_rope(x.view(4, 2, 8), *table, gain=gain)
    yield "qk_norm_rope without a table", lambda x: functional.qk_norm_rope(x.view(4, 2, 8))
    for name, op, _, tensors, options in declared(device, dtype):
        yield name, (lambda f, others: lambda x: f(x, *others))(op.function, (*(t.detach() for t in tensors[1:]), *options))


class Net(torch.nn.Module):
    """A net with every operation once."""

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


def modules(device):
    x = torch.randn(3, 16, device=device)
    yield ingot.nn.RMSNorm(16, device=device), x
    yield ingot.nn.FusedMLP(16, 24, 8, device=device), x


def mlp_with_edge(device, **options):
    """An MLP whose calls go through an edge from now on, as long as its parameters do not change."""
    mlp = ingot.nn.FusedMLP(16, 24, 8, device=device, **options)
    x = torch.randn(3, 16, device=device)
    for _ in range(3):
        y = mlp(x)
    assert has_edge(y) or not _C.has_symbols()
    return mlp, x


def has_edge(y):
    return len(y.grad_fn.next_functions) == 2


def direct(mlp, x):
    """The result of the call without the module, and so without its edge."""
    return functional.mlp_of_parameters(x, list(mlp.parameters()), mlp.bias, mlp.weight_norm, mlp.activation, mlp.activate_last, mlp.recompute)


def parameter_gradients(mlp, loss):
    mlp.zero_grad()
    loss.backward()
    return [p.grad for p in mlp.parameters()]
