"""Linear layer, softcap and cross entropy together: losses and gradients against fp64, and under PyTorch's modes and transforms."""
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ingot
import reference
from conftest import DEVICE, has_loss, on_cpu
from ingot import _loss, functional
from reference import assert_near

pytestmark = pytest.mark.skipif(not has_loss(DEVICE), reason="this build has no cross entropy on a GPU")
OPTIONS = [{}, {"softcap": 15.0}, {"z_loss": 1e-3, "label_smoothing": 0.1}, {"softcap": 30.0, "z_loss": 1e-4, "label_smoothing": 0.3, "ignore_index": 7},
           {"reduction": "sum", "label_smoothing": 1.0}, {"reduction": "none", "softcap": 20.0, "z_loss": 1e-3}]


def options_here(device):
    """Not every GPU build smooths labels."""
    return [o for o in OPTIONS if "label_smoothing" not in o or has_loss(device, label_smoothing=0.1)]


def oracle(x, w, target, b, reduction="mean", ignore_index=-100, label_smoothing=0.0, softcap=0.0, z_loss=0.0):
    """With PyTorch's own cross entropy, of whole logits."""
    logits = F.linear(x, w, b).flatten(0, -2)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    rows = F.cross_entropy(logits, target.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    counts = target.flatten() != ignore_index
    rows = rows + torch.where(counts, z_loss * torch.logsumexp(logits, -1).square(), 0.0)
    return {"mean": rows.sum() / counts.sum(), "sum": rows.sum(), "none": rows.view(target.shape)}[reduction]


def case(device, dtype=torch.float32, rows=(3, 19), features=40, classes=301, bias=True, ignore_index=-100):
    x = torch.randn(*rows, features, device=device)
    w, b = torch.randn(classes, features, device=device) * (3 / features**0.5), torch.randn(classes, device=device)
    target = torch.randint(0, classes, rows, device=device)
    target.view(-1)[::5] = ignore_index
    return [t.to(dtype).requires_grad_() for t in (x, w, b)[: 2 + bias]], target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_and_gradients_against_fp64(device, dtype):
    for bias in (True, False):
        for options in options_here(device):
            (x, w, *b), target = case(device, dtype, bias=bias, ignore_index=options.get("ignore_index", -100))
            wide = reference.wide([x, w, *b])
            loss = functional.linear_cross_entropy(x, w, target, *b, **options)
            expected = oracle(*wide[:2], target, *(wide[2:] or [None]), **options)
            dloss = (torch.rand_like(loss) + 0.5) * (1024 if dtype is torch.float16 else 1)  # whose subnormals are multiples of 6e-8
            loss.backward(dloss)
            expected.backward(dloss.double())
            assert loss.dtype is torch.float32 and loss.shape == expected.shape
            # As in the test of kernels/cross_entropy: logits up to 12 from sums of 40 products, turned into relative errors by the exponential.
            # A gradient in 16 bits is rounded once, and again when it is multiplied by dloss.
            of_sums = 100 + 4 * 40**0.5
            # On a GPU the logits' gradients are fp16 too, below 6e-8 in steps of that: each is off by half a step, before dloss where rows are summed.
            step = 2.0**-25 if dtype is torch.float16 and device.type == "cuda" else 0.0
            if options.get("reduction") != "none":
                step *= dloss.max().item() / (1 if options.get("reduction") == "sum" else (target != options.get("ignore_index", -100)).sum().item())
            spread = {"x": w.abs().sum(0).max(), "w": x.abs().flatten(0, -2).sum(0).max(), "b": torch.tensor(target.numel())}
            assert_near(loss.reshape(1, -1), expected.reshape(1, -1), of_sums, f"{options}")
            for name, t, want in zip("xwb", (x, w, *b), wide):
                got, want = (t.grad.reshape(-1, t.shape[-1]), want.grad.reshape(-1, t.shape[-1])) if name == "x" else (t.grad, want.grad)
                assert_near(got, want, of_sums if dtype is torch.float32 else 2.1, f"gradient of {name}, {options}", step * spread[name].item())


@on_cpu
def test_gradcheck_in_fp64():
    for options in OPTIONS:
        (x, w, b), target = case("cpu", torch.float64, (2, 4), 5, 11, ignore_index=options.get("ignore_index", -100))
        assert torch.autograd.gradcheck(lambda x, w, b: functional.linear_cross_entropy(x, w, target, b, **options), (x, w, b)), options
        assert torch.autograd.gradgradcheck(lambda x, w, b: functional.linear_cross_entropy(x, w, target, b, **options), (x, w, b)), options
        assert torch.autograd.gradcheck(lambda x, w: functional.linear_cross_entropy(x, w, target, **options), (x, w), check_forward_ad=True)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has none of its own")
def test_is_torchs_linear_cross_entropy(device):
    for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1} if has_loss(device, label_smoothing=0.1) else {}):
        leaves, target = case(device, rows=(30,))
        x, w, b = leaves
        ours, theirs = functional.linear_cross_entropy(x, w, target, b, **options), F.linear_cross_entropy(x, w, target, linear_bias=b, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        for g, h in zip(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves)):
            torch.testing.assert_close(g, h, rtol=1e-4, atol=1e-5)


def test_many_chunks_and_no_whole_logits(device):
    """5,000 rows of 1,500 logits are 30 MB; a chunk is at most 16."""
    (x, w), target = case(device, rows=(5000,), features=8, classes=1500, bias=False)
    if device.type == "cpu":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
            functional.linear_cross_entropy(x, w, target).backward()
        sizes = [e.nbytes() for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
        assert 2**20 < max(sizes) <= 17 * 2**20, max(sizes)
    wide = reference.wide([x, w])
    x.grad = w.grad = None
    functional.linear_cross_entropy(x, w, target, reduction="sum").backward()
    oracle(*wide, target, None, reduction="sum").backward()
    assert_near(x.grad, wide[0].grad, 120, "x")
    assert_near(w.grad, wide[1].grad, 120 + 5000**0.5, "w")  # sums over rows, in fp32


@pytest.mark.parametrize("rows, classes, cuda, dtype, wanted", [
    (98304, 8192, True, torch.bfloat16, torch.bfloat16),   # six chunks
    (98305, 8192, True, torch.bfloat16, torch.float32),    # one more
    (16384, 131072, True, torch.bfloat16, torch.bfloat16),
    (16385, 131072, True, torch.bfloat16, torch.float32),  # more than 2^31 logits
    (1024, 8192, True, torch.float16, torch.float32),
    (1024, 8192, False, torch.bfloat16, torch.float32),
])
def test_bf16_sums_the_gradient_of_the_weights_for_few_chunks_only(rows, classes, cuda, dtype, wanted):
    from types import SimpleNamespace
    x, weight = SimpleNamespace(dtype=dtype, is_cuda=cuda, shape=(rows, 64)), SimpleNamespace(shape=(classes, 64))
    assert _loss._accumulator(x, weight) is wanted


def test_sums_of_a_gradient_may_exceed_fp16_where_the_mean_does_not(device):
    x = torch.full((2000, 8), 200.0, device=device, dtype=torch.float16)
    w = torch.zeros(2, 8, device=device, dtype=torch.float16, requires_grad=True)
    functional.linear_cross_entropy(x, w, torch.zeros(2000, device=device, dtype=torch.int64)).backward()
    assert w.grad.tolist() == [[-100.0] * 8, [100.0] * 8]  # of sums of 200,000


def test_rows_that_do_not_count(device):
    for ignored in (-100, 3):
        (x, w, b), target = case(device)
        target.fill_(ignored)
        options = {"ignore_index": ignored}
        loss = functional.linear_cross_entropy(x, w, target, b, **options)
        loss.backward()
        assert loss.isnan() and not any(t.grad.any() for t in (x, w, b))  # as in PyTorch: a mean of nothing is NaN, with gradients of 0
        assert functional.linear_cross_entropy(x, w, target, b, reduction="sum", **options) == 0
        rows = functional.linear_cross_entropy(x, w, target, b, reduction="none", **options)
        assert rows.shape == target.shape and not rows.any()
    (x, w, b), target = case(device, rows=(0,))
    assert functional.linear_cross_entropy(x, w, target, b, reduction="sum") == 0
    functional.linear_cross_entropy(x, w, target, b, reduction="sum").backward()
    assert x.grad.shape == (0, 40) and not w.grad.any()


def test_integers_of_every_size_and_layouts(device):
    (x, w, b), target = case(device)
    expected = functional.linear_cross_entropy(x, w, target, b)
    for dtype in (torch.int32, torch.int16):
        assert torch.equal(functional.linear_cross_entropy(x, w, target.to(dtype), b), expected)
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(functional.linear_cross_entropy(turned, w.detach().t().contiguous().t(), target.t().contiguous().t(), b), expected)
    assert torch.equal(functional.linear_cross_entropy(x[:, :1].expand_as(x)[:, 3], w, target[:, 3], b),
                       functional.linear_cross_entropy(x[:, 0], w, target[:, 3], b))


def test_a_graph_may_be_gone_through_again(device):
    for reduction in ("mean", "sum", "none"):
        (x, w, b), target = case(device)
        loss = functional.linear_cross_entropy(x, w, target, b, reduction=reduction).sum() * 3
        first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
        copies = [g.clone() for g in first]
        again = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
        recorded = torch.autograd.grad(loss, (x, w, b), create_graph=True)
        for a, g, h, r in zip(first, copies, again, recorded):
            assert torch.equal(a, g)  # a returned gradient belongs to the caller
            assert torch.equal(h, g) and torch.equal(r, g)
    (x, w, b), target = case(device)
    for frozen in range(3):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((x, w, b))]
        functional.linear_cross_entropy(leaves[0], leaves[1], target, leaves[2]).backward()
        assert [t.grad is None for t in leaves] == [i == frozen for i in range(3)]


def test_a_step_under_checkpointing_compilation_and_autocast(device):
    head = ingot.nn.LinearCrossEntropy(16, 50, bias=True, softcap=20.0, z_loss=1e-3, device=device)
    body = torch.nn.Linear(16, 16, device=device)
    x, target = torch.randn(4, 9, 16, device=device), torch.randint(0, 50, (4, 9), device=device)

    def step(run):
        for p in (*head.parameters(), *body.parameters()):
            p.grad = None
        loss = run(x)
        (2 * loss).backward()
        return [loss.detach()] + [p.grad for p in (*head.parameters(), *body.parameters())]

    def plain(x):
        return head(body(x).tanh(), target)

    expected = step(plain)
    torch._dynamo.reset()
    for run in (lambda x: checkpoint(plain, x, use_reentrant=False), torch.compile(plain, fullgraph=True, backend="aot_eager"),
                torch.compile(plain, fullgraph=True, backend="aot_eager", dynamic=True)):
        for found, want in zip(step(run), expected):
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
    with torch.autocast(device.type, torch.bfloat16):
        narrow = step(plain)
    assert narrow[0].dtype is torch.float32 and narrow[1].dtype is torch.float32
    wide = F.linear(body(x.bfloat16().float()).tanh(), head.weight, head.bias)
    assert abs(narrow[0] - expected[0]) <= 2.0**-8 * 4 * wide.abs().max()  # operands and the body's output are rounded to bf16


def test_compiled_steps_form_gradients_once(device):
    from torch._dynamo.backends.common import aot_autograd
    from functorch.compile import make_boxed_func

    seen = []

    def keep(graph, _):
        seen.append(graph.code)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    (x, w, b), target = case(device)
    loss = torch.compile(lambda x: functional.linear_cross_entropy(x, w, target, b), fullgraph=True,
                         backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))(x)
    loss.backward()
    assert "ingot.linear_cross_entropy.default" in seen[0] and "ingot" not in seen[1]


def test_the_module_is_a_linear_with_a_loss(device):
    linear = torch.nn.Linear(16, 50, device=device)
    head = ingot.nn.LinearCrossEntropy(16, 50, bias=True, softcap=5.0, reduction="none", device=device)
    head.load_state_dict(linear.state_dict())
    x, target = torch.randn(7, 16, device=device), torch.randint(0, 50, (7,), device=device)
    want = F.cross_entropy(5.0 * torch.tanh(linear(x) / 5.0), target, reduction="none")
    torch.testing.assert_close(head(x, target), want)
    torch.testing.assert_close(F.cross_entropy(head.logits(x), target, reduction="none"), want)
    assert "softcap=5.0" in repr(head)
    head.weight = torch.nn.Embedding(50, 16, device=device).weight  # tied
    head(x, target).sum().backward()
    assert head.weight.grad is not None


def test_errors_name_the_value_found(device):
    (x, w, b), target = case(device)
    f = functional.linear_cross_entropy
    cases = [
        (lambda: f(x, w, target, b, reduction="avg"), "reduction: found 'avg', expected 'mean', 'sum' or 'none'"),
        (lambda: f(x, w, target[:2], b), r"target: found torch.int64 of \(2, 19\), expected integers of shape \(3, 19\)"),
        (lambda: f(x, w, target.float(), b), "target: found torch.float32"),
        (lambda: f(x, w[:, :3], target, b), r"found x of \(3, 19, 40\), weight of \(301, 3\) and bias of \(301,\), expected \(..., C\), \(V, C\) and \(V\)"),
        (lambda: f(x, w.double(), target), "weight: found dtype torch.float64, expected x's torch.float32"),
        (lambda: f(x, w, target, ignore_index=2**40), "ignore_index: found 1099511627776"),
        (lambda: f(x, w, target, softcap=-1.0), "found softcap -1"),
        (lambda: f(x, w, target, label_smoothing=1.5), "found label_smoothing 1.5, expected 0 to 1"),
    ]
    if DEVICE == "cpu":
        for wrong in (301, 2**40, 2**32 + 5, -1):
            bad = target.clone()
            bad[0, 1] = wrong
            cases.append((lambda bad=bad: f(x, w, bad), "found target .* at position 1, expected 0 to 300"))
    for call, message in cases:
        with pytest.raises(ValueError, match="linear_cross_entropy: " + message):
            call()
    with pytest.raises(TypeError, match="linear_cross_entropy: x: found list, expected torch.Tensor"):
        f([1.0], w, target)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU names it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_outside_the_classes_counts_as_ignored(device, dtype):
    (x, w, _), target = case(device, dtype, rows=(200,), classes=304, ignore_index=3)
    for softcap in (0.0, 20.0):
        for wrong in (304, 2**40, 2**32 + 5, -1):  # 0 and 5 in 32 bits
            bad = target.clone()
            bad[2] = wrong
            rows = functional.linear_cross_entropy(x, w, bad, ignore_index=3, softcap=softcap, reduction="none")
            assert rows.isnan().nonzero().flatten().tolist() == [2], (softcap, wrong)


def test_rows_without_features_have_the_loss_of_the_bias(device):
    for rows in ((), (5,), (2, 3)):
        x, w, b = (torch.zeros(*s, device=device).requires_grad_() for s in ((*rows, 0), (7, 0), (7,)))
        target = torch.zeros(rows, dtype=torch.int64, device=device)
        loss = functional.linear_cross_entropy(x, w, target, b)
        torch.testing.assert_close(loss, torch.tensor(7.0, device=device).log())
        dx, dw, db = torch.autograd.grad(loss, (x, w, b))
        assert dx.shape == x.shape and dw.shape == w.shape
        torch.testing.assert_close(db, torch.full_like(b, 1 / 7) - F.one_hot(torch.tensor(0, device=device), 7))
