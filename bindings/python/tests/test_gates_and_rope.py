"""Gated units, rotary embedding and single activations."""
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ingot
import reference
from conftest import DEVICE, on_cpu, on_gpu
from ingot import functional
from reference import assert_near

OPTIONS = [{}, {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}, {"activation": "gelu_tanh"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_swiglu_of_packed_and_separate_inputs(device, dtype, options):
    for order in ("gate_first", "gate_second", "interleaved", None):
        packed = (torch.randn(3, 5, 48, device=device) * 4).to(dtype).requires_grad_()
        (wide,) = reference.wide([packed])
        gate, up = reference.split(wide, order or "gate_first")
        if order is None:
            h = functional.swiglu(*packed.chunk(2, -1), **options)
        else:
            h = functional.swiglu(packed, order=order, **options)
        oracle = reference.swiglu(gate, up, **options)
        dh = torch.randn_like(h)
        h.backward(dh)
        oracle.backward(dh.double())
        roundings = 16 if dtype is torch.float32 else 1.5
        assert_near(h, oracle, roundings, f"h {order}")
        assert_near(packed.grad, wide.grad, roundings, f"gradient {order}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_gated_linear(device, dtype, options):
    if torch.device(device).type == "cpu" and dtype is not torch.float32:
        pytest.skip("16-bit products are a GPU's")
    for order in ("gate_first", "gate_second", "interleaved"):
        for columns in (False, True)[: 1 if order == "interleaved" else 2]:
            for with_bias in (False, True)[: 1 if order == "interleaved" else 2]:
                shape = (40, 48) if columns else (48, 40)
                leaves = [torch.randn(3, 5, 40, device=device), torch.randn(shape, device=device) / 6, torch.randn(48, device=device)]
                x, w, b = (t.to(dtype).requires_grad_() for t in leaves)
                wide = reference.wide([x, w, b])
                h = functional.gated_linear(x, w, b if with_bias else None, order=order, columns=columns, **options)
                packed = wide[0] @ (wide[1] if columns else wide[1].t()) + (wide[2] if with_bias else 0)
                oracle = reference.swiglu(*reference.split(packed, order), **options)
                dh = torch.randn_like(h)
                h.backward(dh)
                oracle.backward(dh.double())
                roundings = 64 if dtype is torch.float32 else 4  # gate and up are kept in the type, and dgate and dup
                assert_near(h, oracle, roundings, f"h {order} {columns}")
                for name, got, want in zip("xwb", (x, w, b), wide):
                    if name != "b" or with_bias:
                        assert_near(got.grad, want.grad, roundings, f"gradient of {name} {order} {columns}")


@pytest.mark.parametrize("options", OPTIONS)
def test_gated_linear_of_two_weights_equals_packed_weights(device, options):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, w, b = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((5, 40), (48, 40), (48,)))
    parts = [t.detach().clone().requires_grad_() for both in (w, b) for t in both.chunk(2)]
    for bias in (False, True):
        packed = functional.gated_linear(x, w, b if bias else None, **options)
        apart = functional.gated_linear(x, parts[0], parts[2] if bias else None, up=parts[1], up_bias=parts[3] if bias else None, **options)
        assert torch.equal(packed, apart)
        dh = torch.randn_like(packed)
        dx, dw, *db = torch.autograd.grad(packed, (x, w, b)[: 2 + bias], dh)
        found = torch.autograd.grad(apart, (x, *parts[: 2 + 2 * bias]), dh)
        # With packed weights one product gives dx; with two weights the second product is added to the rounded result of the first.
        roundings = 4 if dtype is torch.bfloat16 else 16
        assert_near(found[0], dx.double(), roundings, "dx")
        for name, got, want in [("dw", found[1:3], dw)] + [("db", found[3:], t) for t in db]:
            if DEVICE == "cpu":
                assert torch.equal(torch.cat(got), want), name
            else:  # a product of twice the columns may be summed in another order
                assert_near(torch.cat(got), want.double(), roundings, name)
    only = functional.gated_linear(x.detach(), parts[0].detach(), up=parts[1], **options)
    only.sum().backward()
    assert parts[1].grad is not None and parts[0].grad is None


@pytest.mark.parametrize("options", OPTIONS)
def test_gated_linear_with_the_last_product(device, options):
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float64
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {}  # h, kept in one and rounded in the other: two roundings of 2^-9, and sums of 24
    for apart in (False, True):
        for with_bias in (False, True):
            shapes = (3, 5, 40), (24 if apart else 48, 40), (24, 40), (8, 24), (8,)
            x, w, up, down, b = ((torch.randn(shape, device=device) / shape[-1]**0.5).to(dtype).requires_grad_() for shape in shapes)
            leaves = [x, w, *[up] * apart, down, *[b] * with_bias]
            gate = {"up": up if apart else None, **options}
            y = functional.gated_linear(x, w, down=down, down_bias=b if with_bias else None, **gate)
            want = torch.nn.functional.linear(functional.gated_linear(x, w, **gate), down, b if with_bias else None)
            dy = torch.randn_like(y)
            expected = torch.autograd.grad(want, leaves, dy)
            for keep in (True, True, False):  # the last pass writes the gradients of gate and up over gate and up
                found = torch.autograd.grad(y, leaves, dy, retain_graph=keep)
                for got, e in zip(found, expected):
                    torch.testing.assert_close(got, e, **tolerance)
            torch.testing.assert_close(y, want, **tolerance)
            frozen = functional.gated_linear(x.detach(), w.detach(), down=down, **{**gate, "up": up.detach() if apart else None})
            torch.testing.assert_close(torch.autograd.grad(frozen, down, dy)[0], expected[-1 - with_bias], **tolerance)
            with torch.no_grad():
                torch.testing.assert_close(functional.gated_linear(x, w, down=down, **gate), want - (b if with_bias else 0), **tolerance)


def test_the_last_product_of_a_gated_linear_leaves_h_out_of_memory(device):
    x, w, down = (torch.randn(shape, device=device, dtype=torch.float32, requires_grad=True) for shape in ((7, 40), (48, 40), (8, 24)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        functional.gated_linear(x, w, down=down)
    assert sorted(kept) == sorted([(7, 40), (48, 40), (7, 48), (8, 24)])


def test_gated_linear_of_frozen_parts(device):
    x, w = torch.randn(6, 8, device=device, requires_grad=True), torch.randn(16, 8, device=device)
    functional.gated_linear(x, w).sum().backward()
    assert x.grad is not None and w.grad is None
    y, v = x.detach(), w.clone().requires_grad_()
    functional.gated_linear(y, v).sum().backward()
    assert v.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(functional.gated_linear(y, v), functional.swiglu(y @ v.t()))


def gated_case(device, order="gate_first", columns=False):
    """(function of leaves, leaves) of a gated linear with a bias, dh of its shape."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    leaves = [(torch.randn(s, device=device) / 3).to(dtype).requires_grad_() for s in ((7, 40), (40, 48) if columns else (48, 40), (48,))]
    return lambda *leaves: functional.gated_linear(*leaves, order=order, columns=columns), leaves, torch.randn(7, 24, device=device).to(dtype)


@pytest.mark.parametrize("order, columns", [("gate_first", False), ("gate_second", False), ("gate_first", True), ("gate_second", True)])
def test_gradients_of_gate_and_up_are_written_over_them_unless_the_graph_is_kept(device, order, columns):
    f, leaves, dh = gated_case(device, order, columns)
    h = f(*leaves)
    (kept,) = h.grad_fn.saved_tensors
    before, version = kept.detach().clone(), kept._version
    packed = leaves[0].double() @ (leaves[1] if columns else leaves[1].t()).double() + leaves[2].double()
    assert_near(before, packed, 4 if dh.dtype is torch.bfloat16 else 64, "kept, in the order of the weights")
    first = torch.autograd.grad(h, leaves, dh, retain_graph=True)
    assert torch.equal(kept, before) and kept._version == version
    again = torch.autograd.grad(h, leaves, -dh, retain_graph=True)
    assert all(torch.equal(a, -b) for a, b in zip(first, again))
    last = torch.autograd.grad(h, leaves, dh)
    assert all(torch.equal(a, b) for a, b in zip(first, last))
    wide = before.double().requires_grad_()
    reference.swiglu(*reference.split(wide, order)).backward(dh.double())
    assert_near(kept, wide.grad, 2 if dh.dtype is torch.bfloat16 else 16, "gradients of gate and up where those were")
    assert kept._version > version  # another use of the saved tensor is reported
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(h, leaves, dh)


def test_a_node_called_by_hand_keeps_its_saved_tensors(device):
    f, leaves, dh = gated_case(device)
    h = f(*leaves)
    node = h.grad_fn  # torch 2.11 frees the tensors saved with h
    (kept,) = node.saved_tensors
    before = kept.detach().clone()
    with torch.no_grad():
        results = [next(t for t in node.apply(dh) if t is not None) for _ in range(2)]
    assert torch.equal(*results) and torch.equal(kept, before)


def test_the_memory_of_dh_is_freed_before_gradients_of_weights(device, monkeypatch):
    f, leaves, dh = gated_case(device)
    upstream, expired = [], []
    backward = ingot._gates._C.gated_linear_backward

    def watched(*arguments):
        expired.extend(reference.expired() for reference in upstream)
        return backward(*arguments)
    monkeypatch.setattr(ingot._gates._C, "gated_linear_backward", watched)
    h = f(*leaves)
    h.register_hook(lambda g: upstream.append(StorageWeakRef(g.untyped_storage())))
    (h * 2).backward(dh)
    assert expired == [True]
    expected = [t.grad for t in leaves]
    for got, want in zip(torch.autograd.grad(f(*leaves), leaves, 2 * dh), expected):
        assert torch.equal(got, want)


def test_saved_tensors_that_hooks_move_and_passes_that_are_computed_again(device):
    f, leaves, dh = gated_case(device)
    expected = torch.autograd.grad(f(*leaves), leaves, dh)
    with torch.autograd.graph.save_on_cpu():
        h = f(*leaves)
    found = [torch.autograd.grad(h, leaves, dh, retain_graph=keep) for keep in (True, True, False)]
    for reentrant in (False, True):
        h = checkpoint(f, *leaves, use_reentrant=reentrant)
        if not reentrant:
            found.append(torch.autograd.grad(h, leaves, dh, retain_graph=True))
            found.append(torch.autograd.grad(h, leaves, dh))
        else:
            h.backward(dh)
            found.append([t.grad for t in leaves])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous() if t.dim() == 2 else t, lambda t: t.mT if t.dim() == 2 else t):
        h = f(*leaves)
    found.append(torch.autograd.grad(h, leaves, dh))
    for gradients in found:
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected))


def test_the_operator_takes_two_weights_in_one_order(device):
    x, w, up = (torch.randn(s, device=device, dtype=torch.float32, requires_grad=True) for s in ((7, 40), (24, 40), (24, 40)))
    dh = torch.randn(7, 24, device=device)
    expected = torch.autograd.grad(functional.gated_linear(x, w, up=up), (x, w, up), dh)
    for order in ingot._gates.GATE_ORDERS.values():
        for keep in (False, True):
            h = torch.ops.ingot.gated_linear(x, w, up, None, None, order, False, 0.0, 1.0, 0.0, 0.0, keep)[0]
            for got, want in zip(torch.autograd.grad(h, (x, w, up), dh), expected):
                assert torch.equal(got, want), (order, keep)


class Neighbours:
    """Stands in for torch in a module of the package: of tensors made in turn each begins where the one before ends."""

    def __init__(self, device):
        self.room, self.used = torch.zeros(1 << 20, dtype=torch.uint8, device=device), 0

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *size, dtype, device):
        shape = torch.empty(*size, device="meta").shape
        begin, self.used = self.used, self.used + shape.numel() * dtype.itemsize
        return self.room[begin : self.used].view(dtype).view(shape)

    def empty_like(self, t, memory_format=None):
        return self.empty(*t.shape, dtype=t.dtype, device=t.device)


@pytest.mark.parametrize("dense", [True, False])
def test_two_matrices_are_never_neighbours_by_chance(device, dense, monkeypatch):
    """The kernel joins the products of neighbours, which round in another order: the bits must not depend on the allocator."""
    memory, seen = Neighbours(device), []
    backward = ingot._gates._C.gated_linear_backward

    def watched(dkept, x, w, w_up, dx, dw, dw_up, *others):
        for first, second in ((w, w_up), (dw, dw_up)):
            seen.append(first.data_ptr() + first.numel() * first.element_size() == second.data_ptr())
        return backward(dkept, x, w, w_up, dx, dw, dw_up, *others)

    monkeypatch.setattr(ingot._gates._C, "gated_linear_backward", watched)
    monkeypatch.setattr(ingot._op, "torch", memory)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t, contiguous=torch.Tensor.contiguous: memory.empty_like(t).copy_(t) if not t.is_contiguous() else contiguous(t))
    x, *weights = (torch.randn(s, device=device) for s in ((7, 40), (24, 40), (24, 40)))
    weights = [w if dense else w.t().contiguous().t() for w in weights]
    leaves = [t.requires_grad_() for t in (x, *weights)]
    h = functional.gated_linear(x, weights[0], up=weights[1])
    for got, want in zip(torch.autograd.grad(h, leaves, torch.ones_like(h)), leaves):
        assert got.shape == want.shape
    assert seen == [False, False]


@on_gpu
def test_graphs_of_a_backward_pass_alone_replay_the_pass(device):
    mlp = ingot.nn.SwiGLU(64, 96, device=device, dtype=torch.bfloat16)
    x, dy = (torch.randn(32, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.requires_grad_(), *mlp.parameters()]
    expected = torch.autograd.grad(mlp(x), leaves, dy)
    graphed = torch.cuda.make_graphed_callables(mlp, (x.detach().clone().requires_grad_(),))
    y = graphed(x)
    for _ in range(2):
        found = [t.clone() for t in torch.autograd.grad(y, leaves, dy, retain_graph=True)]
        for got, want in zip(found, expected):
            assert_near(got, want.double(), 4, "gradient")


@on_gpu
def test_a_training_step_has_no_memory_for_gradients_of_gate_and_up(device):
    x = torch.randn(16384, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4096, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    dh = torch.randn(16384, 2048, device=device, dtype=torch.bfloat16)

    def peak(**options):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = torch.autograd.grad(functional.gated_linear(x, w) * 2, (x, w), dh, **options)
        del kept
        return torch.cuda.max_memory_allocated() - before
    peak()  # the memory made once
    of_h = dh.numel() * dh.element_size()
    # 2 h, gate and up, dh; then dx, dw and room for the products in place of dh
    assert 4 * of_h <= peak() <= 4.25 * of_h
    assert peak(retain_graph=True) >= 6 * of_h


def test_the_modules_agree_with_their_parts(device):
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    for module in (ingot.nn.SwiGLU(64, 48, bias=True, device=device, dtype=dtype), ingot.nn.SwiGLU(64, 48, order="interleaved", device=device, dtype=dtype)):
        x = torch.randn(4, 7, 64, device=device, dtype=dtype)
        want = module.w3(functional.swiglu(module.w12(x), order=module.order))
        assert_near(module(x), want.double(), 8, module.order)
        seen = []
        handle = module.w12.register_forward_hook(lambda *a: seen.append(a))  # hooks of w12 are still called
        module(x)
        handle.remove()
        assert len(seen) == 1


@on_cpu
def test_gradcheck_in_fp64():
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (6, 4), (6,)))
    assert torch.autograd.gradcheck(lambda *a: functional.gated_linear(*a, limit=1.0, alpha=1.7, up_offset=1.0), (x, w, b))
    assert torch.autograd.gradcheck(lambda x, w: functional.gated_linear(x, w.t().contiguous(), columns=True), (x, w))
    assert torch.autograd.gradcheck(lambda x, w, d: functional.gated_linear(x, w, down=d), (x, w, torch.randn(3, w.shape[0] // 2, dtype=w.dtype, requires_grad=True)))
    assert torch.autograd.gradcheck(lambda x, w, v: functional.gated_linear(x, w, up=v, activation="gelu_tanh"), (x, w, w.detach().sin().requires_grad_()))
    packed = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    for order in ("gate_first", "gate_second", "interleaved"):
        assert torch.autograd.gradcheck(lambda p: functional.swiglu(p, order=order), packed)
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(4, dtype=torch.float64, requires_grad=True)
    cos, sin = functional.rope_table(3, 6, dtype=torch.float64)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda x: functional.rope(x, cos, sin, interleaved=interleaved), x)
        assert torch.autograd.gradgradcheck(lambda x: functional.rope(x, cos, sin, interleaved=interleaved), x)
        assert torch.autograd.gradcheck(
            lambda x, g: functional.qk_norm_rope(x, cos, sin, gain=g, interleaved=interleaved), (x, gain))
    for name in functional.ACTIVATIONS:
        y = torch.randn(5, 4, dtype=torch.float64) * 2
        y = torch.where(y.abs() < 1e-3, 0.1, y).requires_grad_()  # away from kinks
        assert torch.autograd.gradcheck(lambda y: functional.activation(y, name), y), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_over_layouts_positions_and_partial_rotations(device, dtype, interleaved):
    S, H, D = 6, 3, 16
    for rotary in (D, 8):
        cos, sin = functional.rope_table(32, rotary, device=device)
        plain = torch.randn(2, S, H, D, device=device).to(dtype)
        heads_first = torch.randn(2, H, S, D, device=device).to(dtype).transpose(1, 2)
        packed = torch.randn(2, S, 3 * H, D, device=device).to(dtype)[:, :, H : 2 * H]
        for name, x in (("plain", plain), ("heads first", heads_first), ("packed", packed), ("one sequence", plain[0])):
            for positions in (None, torch.randint(0, 32, x.shape[:-2], device=device)):
                x = x.detach().requires_grad_()
                y = functional.rope(x, cos, sin, positions, interleaved=interleaved)
                dy = torch.randn_like(y)
                y.backward(dy)
                (ox,) = reference.wide([x])
                p = torch.arange(S, device=device).expand(x.shape[:-2]) if positions is None else positions
                oracle = reference.rope(ox, cos.double(), sin.double(), p, interleaved)
                oracle.backward(dy.double())
                assert_near(y, oracle, 8 if dtype is torch.float32 else 1.5, name)
                assert_near(x.grad, ox.grad, 8 if dtype is torch.float32 else 1.5, name)
                assert torch.equal(functional.rope(x.detach(), cos, sin, positions, interleaved=interleaved), y)
                base = x.detach().clone(memory_format=torch.contiguous_format)
                assert functional.rope_(base, cos, sin, positions, interleaved=interleaved) is base and base._version == 1
                assert_near(base, y.detach(), 8 if dtype is torch.float32 else 1.5, name)
    with torch.inference_mode():
        inferred = functional.rope(plain, cos, sin, interleaved=interleaved)
        assert torch.equal(functional.rope_(plain.clone(), cos, sin, interleaved=interleaved), inferred)
    with pytest.raises(NotImplementedError, match="rope_: found a call that autograd"):
        functional.rope_(plain.requires_grad_(), cos, sin)
    with pytest.raises(ValueError, match="rope_: x: found strides"):
        functional.rope_(torch.randn(2, S, D, H, device=device).transpose(2, 3), cos, sin)


def test_qk_norm_rope_is_norm_rotation_and_gain(device):
    x = torch.randn(2, 6, 3, 16, device=device, requires_grad=True)
    gain = (torch.rand(3, device=device) + 0.5).requires_grad_()
    cos, sin = functional.rope_table(6, 16, device=device)
    y = functional.qk_norm_rope(x, cos, sin, gain=gain)
    dy = torch.randn_like(y)
    y.backward(dy)
    ox, og = reference.wide([x, gain])
    positions = torch.arange(6, device=device).expand(2, 6)
    oracle = reference.rope(reference.rms_norm(ox, None, 2.0**-23), cos.double(), sin.double(), positions) * og.unsqueeze(-1)
    oracle.backward(dy.double())
    for name, found, expected in (("y", y, oracle), ("dx", x.grad, ox.grad), ("dgain", gain.grad, og.grad)):
        assert_near(found, expected, 24, name)
    no_rotation = functional.qk_norm_rope(x.detach())
    assert_near(no_rotation, reference.rms_norm(ox, None, 2.0**-23), 12, "norm alone")


def calls_by_formula_and_by_kernel(device):
    """{how: call(function, x, positions, **options)} for rope and qk_norm_rope: by the kernel, with a table that trains, and in forward mode."""
    cos, sin = functional.rope_table(3, 4, device=device)

    def forward_mode(function, x, positions, **options):
        with torch.autograd.forward_ad.dual_level():
            return function(x, cos, sin, positions, **options)

    return {"kernel": lambda function, x, positions, **options: function(x, cos, sin, positions, **options),
            "a table that trains": lambda function, x, positions, **options: function(x, cos.clone().requires_grad_(), sin, positions, **options),
            "forward mode": forward_mode}


@pytest.mark.parametrize("how", ("kernel", "a table that trains", "forward mode"))
@pytest.mark.parametrize("function", (functional.rope, functional.qk_norm_rope))
def test_the_formula_refuses_the_arguments_that_the_kernel_refuses(device, function, how):
    x, call = torch.ones(1, 3, 2, 4, device=device), calls_by_formula_and_by_kernel(device)[how]
    name = function.__name__
    cases = [((x, torch.zeros(2, dtype=torch.int64, device=device)), {}, r"positions: found shape \(2,\), expected \(1, 3\)"),
             ((x, torch.zeros(3, device=device)), {}, "positions: found torch.float32, expected integers"),
             ((x[0, 0], None), {}, r"x: found shape \(2, 4\), expected \(..., S, H, D\)"),
             ((x.long(), None), {}, "x: found dtype torch.int64, expected"),
             ((x, None), dict(sign=2), "sign: found 2, expected 1 or -1"),
             ((x, None), dict(sign=1.0), "sign: found 1.0, expected 1 or -1")]
    if function is functional.qk_norm_rope:
        cases.append(((x, None), dict(eps="much"), "eps: found 'much', expected a number"))
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            call(function, *arguments, **options)
    for wrong in (-1, 3, 2**32 + 1) if DEVICE == "cpu" else ():  # a GPU does not read positions
        positions = torch.tensor([0, wrong, 1])
        with pytest.raises(ValueError, match=rf"^{name}: (positions: found|found positions\[1\] =) {min(wrong, 2**31 - 1)}, expected 0 to 2"):
            call(function, x, positions)
    assert torch.isfinite(call(function, x, torch.tensor([2, 0, 1], device=device), sign=-1)).all()


def test_a_norm_without_a_table_refuses_the_same_in_forward_mode(device):
    x = torch.ones(3, 2, 4, device=device)
    for wrong, message in ((x[0], r"found shape \(2, 4\), expected \(..., S, H, D\)"), (x.long(), "found dtype torch.int64, expected")):
        with pytest.raises(ValueError, match=f"^qk_norm_rope: x: {message}"):
            functional.qk_norm_rope(wrong)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match=f"^qk_norm_rope: x: {message}"):
            functional.qk_norm_rope(wrong)


@pytest.mark.parametrize("function", (functional.rope, functional.qk_norm_rope))
def test_positions_may_be_mapped_in_forward_mode(device, function):
    (cos, sin), x = functional.rope_table(4, 8, device=device), torch.randn(5, 3, 2, 8, device=device)
    positions = torch.randint(0, 4, (5, 3), device=device)

    def tangent(x, positions):
        return torch.func.jvp(lambda x: function(x, cos, sin, positions), (x,), (x.cos(),))[1]

    expected = torch.stack([tangent(*arguments) for arguments in zip(x, positions)])
    torch.testing.assert_close(torch.func.vmap(tangent)(x, positions), expected)
    torch.testing.assert_close(torch.func.jvp(lambda x: torch.func.vmap(function, (0, None, None, 0))(x, cos, sin, positions), (x,), (x.cos(),))[1], expected)
    if DEVICE == "cpu":
        positions[4, 1] = 4
        with pytest.raises(ValueError, match=f"^{function.__name__}: positions: found 4, expected 0 to 3"):
            torch.func.vmap(tangent)(x, positions)


def test_rope_tables_take_the_number_of_positions():
    with pytest.raises(TypeError, match="rope_table: positions: found a tensor, expected the number of positions"):
        functional.rope_table(torch.arange(6), 16)
    assert functional.rope_table(torch.tensor(6), 16)[0].shape == (6, 8)


def test_rope_tables_are_the_published_formula(device):
    cos, sin = functional.rope_table(50, 16, base=500.0, dtype=torch.float64)
    angle = torch.arange(50.0, dtype=torch.float64).unsqueeze(1) * 500.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(cos, angle.cos(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sin, angle.sin(), rtol=0, atol=1e-12)
    stretched, _ = functional.rope_table(50, 16, scaling="yarn", factor=4.0, original_context=32.0)
    assert not torch.allclose(stretched.double(), functional.rope_table(50, 16)[0].double())
    with pytest.raises(ValueError, match="^rope_table: scaling: found 'linear', expected 'none', 'ntk' or 'yarn'$"):
        functional.rope_table(4, 8, scaling="linear")
    with torch.device("meta"):  # as a model is built whose weights come later
        assert all(t.is_meta and t.shape == (50, 8) for t in functional.rope_table(50, 16))
        assert all(torch.equal(a, b) for a, b in zip(functional.rope_table(50, 16, base=500.0, dtype=torch.float64, device="cpu"), (cos, sin)))


@pytest.mark.parametrize("name", functional.ACTIVATIONS)
def test_activations(device, name):
    x = (torch.randn(7, 33, device=device) * 3).requires_grad_()
    y = functional.activation(x, name)
    dy = torch.randn_like(y)
    y.backward(dy)
    (ox,) = reference.wide([x])
    oy = reference.ACTIVATIONS[name](ox)
    oy.backward(dy.double())
    assert_near(y, oy, 16, "y")
    assert_near(x.grad, ox.grad, 16, "dx")


def test_rows_may_lie_apart_and_dimensions_of_one_have_any_stride(device):
    x = torch.randn(8, 64, device=device).as_strided((4, 1, 32), (64, 7, 1))
    for name, f in (("activation", lambda x: functional.activation(x, "silu")), ("swiglu", functional.swiglu),
                    ("rope", lambda x: functional.rope(x.view(4, 1, 1, 32), *functional.rope_table(1, 16, device=device))),
                    ("rms_norm", lambda x: functional.rms_norm(x, None, 1e-5))):
        assert torch.equal(f(x), f(x.contiguous())), name


def test_swiglu_modules(device):
    x = torch.randn(4, 24, device=device, requires_grad=True)
    for order in ("gate_first", "gate_second"):
        m = ingot.nn.SwiGLU(24, 32, 8, order=order, device=device)
        gate, up = reference.split(torch.nn.functional.linear(x, m.w12.weight), order)
        expected = torch.nn.functional.linear(reference.swiglu(gate, up), m.w3.weight)
        torch.testing.assert_close(m(x), expected)
        m(x).sum().backward()
        assert all(p.grad is not None for p in m.parameters())
    mega = ingot.nn.MegaGemmTriton(d_model=24, multiple_of=16, hidden_multiple=5 / 3)
    assert {k: tuple(v.shape) for k, v in mega.state_dict().items()} == {"w12.weight": (96, 24), "w3.weight": (24, 48)}
    fused = ingot.nn.FusedSwiGLU(24, 40, block=64, device=device)
    assert {k: tuple(v.shape) for k, v in fused.state_dict().items()} == {"Wf": (24, 80)}
    value, gate = (x @ fused.Wf).chunk(2, -1)
    torch.testing.assert_close(fused(x), value * torch.nn.functional.silu(gate), rtol=1e-4, atol=1e-4)
    fused.requires_grad_(False)(x).sum().backward()
    assert fused.Wf.grad is None
    up_to = [ingot.nn.MegaGemmTriton(d, device="meta").w3.weight.shape for d in (2048, 4096)]
    assert up_to == [(2048, 3584), (4096, 6912)]
    gate, value = mega.w12(x.cpu()).chunk(2, -1)  # the gate comes first there
    torch.testing.assert_close(mega(x.cpu()), mega.w3(torch.nn.functional.silu(gate) * value))
    assert ingot.nn.MegaGemmRMSNorm(8, epsilon=1e-6).eps == 1e-6 and ingot.nn.MegaGemmRMSNorm(8).eps == 1e-5


def test_empty_batches(device):
    calls = {
        "swiglu": lambda: functional.swiglu(torch.empty(0, 16, device=device, requires_grad=True)),
        "rope": lambda: functional.rope(torch.empty(0, 4, 3, 8, device=device, requires_grad=True), *functional.rope_table(4, 8, device=device)),
        "activation": lambda: functional.activation(torch.empty(0, 16, device=device, requires_grad=True), "silu"),
    }
    for name, call in calls.items():
        y = call()
        y.sum().backward()
        assert y.numel() == 0, name


@pytest.mark.parametrize("rows, hidden, outputs", [(5, 6, 0), (5, 0, 4), (0, 6, 4), (5, 0, 0)])
def test_products_without_elements_have_empty_results_and_gradients_of_zero(device, rows, hidden, outputs):
    def leaf(*shape):
        return torch.randn(shape, device=device, requires_grad=True)

    for x in (leaf(rows, 8), leaf(8) if rows else leaf(3, 0, 8)):
        w, up, down, bias = leaf(hidden, 8), leaf(hidden, 8), leaf(outputs, hidden), leaf(outputs)
        calls = {"packed": (lambda x, w, up, down: functional.gated_linear(x, torch.cat([w, up]), down=down), (x, w, up, down)),
                 "two": (lambda x, w, up, down, bias: functional.gated_linear(x, w, up=up, down=down, down_bias=bias), (x, w, up, down, bias))}
        for name, (f, leaves) in calls.items():
            y = f(*leaves)
            assert y.shape == (*x.shape[:-1], outputs), name
            for t, g in zip(leaves, torch.autograd.grad(y, leaves, torch.ones_like(y))):
                assert g.shape == t.shape and (t is bias or not g.any()), name


def test_errors_name_operation_argument_found_and_expected(device):
    x = torch.randn(2, 5, device=device)
    cos, sin = functional.rope_table(2, 8, device=device)
    cases = [
        (lambda: functional.swiglu(x), "swiglu: gate: found 5 columns"),
        (lambda: functional.swiglu(x, x.half()), "swiglu: up: found"),
        (lambda: functional.swiglu(x, x, activation="relu"), "swiglu: activation: found 'relu', expected 'silu' or 'gelu_tanh'"),
        (lambda: functional.gated_linear(x, x, up=x[:1]), r"gated_linear: up: found \(1, 5\) beside w of \(2, 5\), order 'gate_first' and 0 biases"),
        (lambda: functional.gated_linear(x, x, up_bias=x[0]), "gated_linear: up_bias: found one without up"),
        (lambda: functional.gated_linear(x, x, up=x, down=x), r"gated_linear: down: found shape \(2, 5\), expected \(N, 2\)"),
        (lambda: functional.gated_linear(x, x, up=x, down_bias=x[0]), "gated_linear: down_bias: found one without down"),
        (lambda: functional.swiglu(x, order="up"), "swiglu: order: found 'up', expected one of gate_first"),
        (lambda: functional.rope(x, cos, sin), "rope: x: found shape"),
        (lambda: functional.rope(torch.randn(2, 3, 8, device=device), cos, sin, torch.zeros(5, device=device)), "rope: positions: found shape"),
        (lambda: functional.rope(torch.randn(2, 3, 8, device=device), cos, sin, torch.zeros(2, device=device)),
         "rope: positions: found torch.float32, expected integers"),
        (lambda: functional.swiglu(x[0, 0]), "swiglu: gate: found a tensor without dimensions"),
        (lambda: functional.fused_mlp(x[0, 0], [torch.randn(8, 8, device=device)]), "mlp: x: found a tensor without dimensions"),
        (lambda: functional.activation(x.long(), "relu"), "activation: x: found dtype torch.int64, expected torch.float64, torch.float32, torch.bfloat16 or torch.float16"),
        (lambda: functional.swiglu(x[:, :4].long()), "swiglu: gate: found dtype torch.int64, expected"),
        (lambda: functional.rope(torch.zeros(2, 3, 8, device=device, dtype=torch.int32), cos, sin), "rope: x: found dtype torch.int32, expected"),
        (lambda: functional.activation(x, "swish"), "activation: activation: found 'swish', expected one of identity"),
        (lambda: functional.activation(x, ["relu"]), r"activation: activation: found \['relu'\], expected one of identity"),
        (lambda: functional.rope_table(-1, 8), "rope_table: positions: found -1, expected an integer from 0"),
    ]
    if DEVICE == "cpu":
        cases.append((lambda: functional.rope(torch.randn(2, 3, 8), cos, sin, torch.tensor([0, 2])), r"rope: found positions\[1\] = 2"))
        for far in (2**31, 2**32 + 1, -(2**32)):  # 1, or 0, in 32 bits
            cases.append((lambda far=far: functional.rope(torch.randn(2, 3, 8), cos, sin, torch.tensor([0, far])), r"rope: found positions\[1\]"))
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@on_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_linear_of_16_bits_on_a_cpu_equals_rounded_fp32(dtype):
    x, w, b, up = (torch.randn(s).to(dtype).requires_grad_() for s in ((5, 8), (12, 8), (12,), (12, 8)))
    for call in (lambda x, w, b, up: functional.gated_linear(x, w, b), lambda x, w, b, up: functional.gated_linear(x, w, up=up, activation="gelu_tanh")):
        h = call(x, w, b, up)
        wide = [t.detach().float().requires_grad_() for t in (x, w, b, up)]
        expected = call(*wide)
        assert h.dtype is dtype and torch.equal(h, expected.to(dtype))
        dh = torch.randn_like(h)
        found = torch.autograd.grad(h, (x, w, b, up), dh, allow_unused=True)
        for got, want in zip(found, torch.autograd.grad(expected, wide, dh.float(), allow_unused=True)):
            assert (got is None) == (want is None)
            if got is not None:  # gate and up are kept in the type
                assert got.dtype is dtype and (got.float() - want).abs().max() <= 8 * torch.finfo(dtype).eps * want.abs().max()
    with pytest.raises(ValueError, match="gated_linear: w: found dtype torch.float32, expected x's"):
        functional.gated_linear(x, w.float())


def test_tensors_that_are_not_dense_are_refused_by_name(device):
    x, t = torch.randn(4, 8, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    calls = {"activation: x": lambda s: functional.activation(s, "relu"), "swiglu: gate": functional.swiglu, "swiglu: up": lambda s: functional.swiglu(x, s),
             "gated_linear: x": lambda s: functional.gated_linear(s, x), "gated_linear: w": lambda s: functional.gated_linear(x, s),
             "grouped_linear: x": lambda s: functional.grouped_linear(s, x[None], t[:2]), "grouped_linear: weight": lambda s: functional.grouped_linear(x, s, t[:2]),
             "linear_cross_entropy: x": lambda s: functional.linear_cross_entropy(s, x, t), "wide_mlp: x": lambda s: functional.wide_mlp(s, x, x.t()),
             "rms_norm: x": lambda s: functional.rms_norm(s, None, residual=x), "rms_norm: weight": lambda s: functional.rms_norm(x.t(), s),
             "rope: x": lambda s: functional.rope(s, x, x), "qk_norm_rope: x": functional.qk_norm_rope,
             "flash_attn_func: q": lambda s: functional.flash_attn_func(s, x, x)}
    for name, call in calls.items():
        for s in (x.to_sparse(), x.to_sparse().requires_grad_(), torch.nested.nested_tensor([x, x])):
            with pytest.raises(ValueError, match=f"{name}: found a (nested )?torch.* tensor, expected a dense one"):
                call(s)


def test_a_table_shorter_than_the_sequence_is_refused_where_positions_are_counted(device):
    """A GPU does not check positions; positions that are left out are known on the host and checked."""
    x, (cos, sin) = torch.randn(9, 2, 8, device=device), functional.rope_table(5, 8, device=device)
    for call in (functional.rope, functional.qk_norm_rope, functional.rope_):
        with pytest.raises(ValueError, match="rope_?: positions: found none for x of shape .* beside a table of 5 rows, expected a row for each of 9"):
            call(x, cos, sin)
        call(x[:5].clone(), cos, sin)
