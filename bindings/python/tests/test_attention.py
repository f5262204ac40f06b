"""flash_attn_func and flash_attn_varlen_func against attention written out in PyTorch."""
import pytest
import torch

from ingot import _plain
from ingot.functional import flash_attn_func, flash_attn_varlen_func


def written_out(q, k, v, scale, causal=False, window=None, softcap=0.0, sinks=None):
    """One sequence (S, H, D) in fp64, a loop over heads; shares nothing with the package."""
    q, k, v = q.double(), k.double(), v.double()
    outs = []
    for h in range(q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        s = scale * q[:, h] @ k[:, g].T
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        i, j = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0], torch.arange(k.shape[0], device=q.device)
        unseen = torch.zeros_like(s, dtype=torch.bool)
        if causal:
            unseen |= j > i
        if window is not None:
            unseen |= j < i - window
        s = s.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            s = torch.cat([s, sinks[h].double().expand(q.shape[0], 1)], 1)
        outs.append(torch.softmax(s, 1)[:, : k.shape[0]] @ v[:, g])
    return torch.stack(outs, 1)


OPTIONS = [dict(), dict(causal=True), dict(causal=True, window=5), dict(softcap=8.0), dict(causal=True, softcap=8.0, window=20, sinks=True)]


def dtype_of(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def operands(device, *shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g).to(device=device, dtype=dtype_of(device)).requires_grad_() for s in shapes]


def allowed(dtype):
    """Rounding of P and of the result, each relative to sums that are at most a few units here; then some for sums of sums."""
    return {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]


def assert_close(got, want, name):
    error = (got.double() - want).abs().max().item() / max(1.0, want.abs().max().item())
    assert error <= allowed(got.dtype), f"{name}: {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_log_of_the_sums_has_the_precision_of_fp32(device, dtype):
    if device.type == "cuda" and dtype is torch.float32:
        pytest.skip("attention on a GPU has 16 bits")
    q, k, v = (torch.randn(2, 40, 3, 64, device=device).to(dtype) for _ in range(3))
    lse = flash_attn_func(q, k, v, return_attn_probs=True)[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8
    # A score is a sum of 64 products in fp32; exponentials and their sum round a few times more.
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("lengths", [[(0, 7), (5, 5), (0, 130), (70, 150), (3, 0), (0, 9)], [(1, 1), (0, 300)], [(200, 0), (0, 200)]])
def test_keys_that_no_query_sees_have_gradients_of_zero(device, lengths, width, deterministic):
    """As in the attention of a decoder to a padded encoder: the padding is a segment of keys without queries."""
    cu_q, cu_k = (torch.tensor([0, *n], dtype=torch.int64).cumsum(0).to(device, torch.int32) for n in zip(*lengths))
    q, k, v = operands(device, (int(cu_q[-1]), 4, width), (int(cu_k[-1]), 2, width), (int(cu_k[-1]), 2, width))
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, deterministic=deterministic)
    ends = list(zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:]))
    want = torch.cat([written_out(q[a:b], k[c:d], v[c:d], width**-0.5) if d > c else torch.zeros_like(q[a:b], dtype=torch.float64) for a, b, c, d in ends])
    assert_close(out, want, "out")
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for name, g, w in zip("qkv", got, torch.autograd.grad((want * upstream.double()).sum(), (q, k, v))):
        assert_close(g, w.double(), f"d{name}")
    for a, b, c, d in ends:
        if a == b:
            assert not got[1][c:d].any() and not got[2][c:d].any()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_batches_forward_and_backward(device, options, deterministic):
    q, k, v = operands(device, (2, 37, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64))
    sinks = torch.randn(4, device=device).requires_grad_() if options.get("sinks") else None
    window = options.get("window")
    out = flash_attn_func(q, k, v, causal=options.get("causal", False), window_size=(-1 if window is None else window, -1),
                          softcap=options.get("softcap", 0.0), deterministic=deterministic, sinks=sinks)
    reference = {**options, "sinks": sinks}
    want = torch.stack([written_out(*(t[b] for t in (q, k, v)), 64**-0.5, **reference) for b in range(2)])
    assert_close(out, want, "out")
    upstream = torch.randn_like(out)
    inputs = [q, k, v] + ([sinks] if sinks is not None else [])
    found = torch.autograd.grad(out, inputs, upstream)
    expected = torch.autograd.grad(want, inputs, upstream.double())
    for name, got, of_it in zip(("dq", "dk", "dv", "dsinks"), found, expected):
        if name == "dsinks":
            torch.testing.assert_close(got, of_it, rtol=3e-2, atol=3e-2)
        else:
            assert_close(got, of_it.double(), name)


def test_packed_sequences_are_each_alone(device):
    q, k, v = operands(device, (60, 4, 64), (60, 2, 64), (60, 2, 64))
    cu = torch.tensor([0, 7, 7, 40, 60], dtype=torch.int32, device=device)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu, cu, 33, 33, causal=True, return_attn_probs=True)
    for begin, end in ((0, 7), (7, 40), (40, 60)):
        alone, alone_lse, _ = flash_attn_func(q[None, begin:end], k[None, begin:end], v[None, begin:end], causal=True, return_attn_probs=True)
        assert torch.equal(out[begin:end], alone[0]) and torch.equal(lse[:, begin:end], alone_lse[0])


def test_strided_operands(device):
    qkv = operands(device, (2, 30, 3, 2, 64))[0]
    q, k, v = qkv.unbind(2)
    out = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True))
    out.sum().backward()
    assert qkv.grad is not None and torch.isfinite(qkv.grad).all()


def test_compiled_as_one_graph(device):
    q, k, v = operands(device, (1, 40, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64))
    run = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True) * 2, fullgraph=True)
    assert torch.equal(run(q, k, v), flash_attn_func(q, k, v, causal=True) * 2)
    run(q, k, v).sum().backward()
    compiled = q.grad.clone()
    q.grad = None
    (flash_attn_func(q, k, v, causal=True) * 2).sum().backward()
    assert torch.equal(compiled, q.grad)


def test_opcheck(device):
    q, k, v = operands(device, (20, 4, 64), (20, 2, 64), (20, 2, 64))
    cu = torch.tensor([0, 9, 20], dtype=torch.int32, device=device)
    sinks = torch.zeros(4, device=device, requires_grad=True)
    for s in (None, sinks):
        torch.library.opcheck(torch.ops.ingot.attention.default, (q, k, v, cu, cu, s, 0.125, 0.0, 6, True, True, False))
    torch.library.opcheck(torch.ops.ingot.attention.default, (q, k, v, cu, cu, None, 0.125, 0.0, 0, True, False, False))


def test_an_earlier_call_under_another_mode_has_no_effect(device):
    """Offsets of a batch's sequences are cached from call to call; offsets made under a dispatch mode, in a trace or in inference mode are not."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def call(length, *, real=True):
        x = torch.randn(2, length, 2, 64, device=device, dtype=dtype_of(device), requires_grad=real)
        return flash_attn_func(x, x, x, causal=True)

    with torch.inference_mode():
        call(11, real=False)
    call(11).sum().backward()
    with FakeTensorMode():
        assert call(13, real=False).shape == (2, 13, 2, 64)
    call(13).sum().backward()
    with FakeTensorMode():  # and also after real sequences
        assert call(13, real=False).shape == (2, 13, 2, 64)
    make_fx(lambda x: flash_attn_func(x, x, x), tracing_mode="fake")(torch.randn(2, 15, 2, 64, device=device, dtype=dtype_of(device)))
    call(15).sum().backward()
    q = torch.empty(2, 17, 4, 64, device="meta", dtype=dtype_of(device))
    assert flash_attn_func(q, q, q).is_meta and flash_attn_func(q, q, q).shape == q.shape
    call(17).sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_second_stream_does_not_wait_for_offsets_of_the_first():
    from ingot._attention import _offsets

    x = torch.empty(1, device="cuda")
    here, here_again = _offsets(3, 19, x), _offsets(3, 19, x)
    with torch.cuda.stream(torch.cuda.Stream()):
        there = _offsets(3, 19, x)
    torch.cuda.synchronize()
    assert here is here_again and here is not there and torch.equal(here, there)


def test_autocast_runs_in_its_dtype(device):
    q, k, v = (torch.randn(1, 16, 2, 64, device=device) for _ in range(3))
    with torch.autocast(device.type, torch.bfloat16):
        assert flash_attn_func(q, k, v).dtype is torch.bfloat16


def test_second_derivatives_of_fp64():
    q, k, v = (torch.randn(7, h, 8, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)

    def f(q, k, v, sinks):
        return flash_attn_varlen_func(q, k, v, cu, cu, causal=True, window_size=(2, -1), softcap=3.0, sinks=sinks, return_attn_probs=True)[:2]

    assert torch.autograd.gradcheck(f, (q, k, v, sinks))
    assert torch.autograd.gradgradcheck(f, (q, k, v, sinks))


def of_out_and_lse(out, lse):
    """A loss of both results."""
    return (out.double() * torch.linspace(-1, 1, out.shape[-1], device=out.device)).sum() + lse.double().where(lse > -torch.inf, 0).sin().sum()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("sinks", [False, True])
def test_lse_has_a_gradient(device, deterministic, sinks):
    """Merging attention over parts of the keys, or a z-loss, needs this gradient."""
    q, k, v = operands(device, (2, 20, 4, 64), (2, 29, 2, 64), (2, 29, 2, 64))
    given = [q, k, v] + ([torch.randn(4, device=device).requires_grad_()] if sinks else [])
    out, lse, _ = flash_attn_func(q, k, v, causal=True, deterministic=deterministic, return_attn_probs=True, sinks=given[3] if sinks else None)
    wide = [t.detach().double().requires_grad_() for t in given]
    cu_q, cu_k = (torch.arange(0, 2 * n + 1, n, dtype=torch.int32, device=device) for n in (20, 29))
    plain, plain_lse = _plain.attention(*(t.flatten(0, 1) for t in wide[:3]), cu_q, cu_k, wide[3] if sinks else None, 64**-0.5, 0.0, 0, True)
    expected = torch.autograd.grad(of_out_and_lse(plain.unflatten(0, (2, 20)), plain_lse), wide)
    for name, got, want in zip(("dq", "dk", "dv", "dsinks"), torch.autograd.grad(of_out_and_lse(out, lse), given), expected):
        assert_close(got.to(dtype_of(device)), want, name)
    alone = torch.autograd.grad(flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1].sum(), [q, k])
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in alone)


def test_tokens_behind_the_last_sequence_are_padding(device):
    q, k, v = operands(device, (50, 4, 64), (60, 2, 64), (60, 2, 64))
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device=device) for c in ([0, 20, 33], [0, 11, 41]))
    sinks = torch.randn(4, device=device)
    for s in (None, sinks):
        out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, causal=True, return_attn_probs=True, sinks=s)
        alone, alone_lse, _ = flash_attn_varlen_func(q[:33], k[:41], v[:41], cu_q, cu_k, causal=True, return_attn_probs=True, sinks=s)
        assert torch.equal(out[:33], alone) and torch.equal(lse[:, :33], alone_lse)
        assert not out[33:].any() and (lse[:, 33:] == -torch.inf).all()
        found = torch.autograd.grad(of_out_and_lse(out, lse), (q, k, v))
        for got, covered in zip(found, (33, 41, 41)):
            assert got[:covered].isfinite().all() and got[:covered].any() and not got[covered:].any()
        plain, plain_lse = _plain.attention(q, k, v, cu_q, cu_k, s, 0.125, 0.0, 0, True)
        assert not plain[33:].any() and (plain_lse[:, 33:] == -torch.inf).all()
        assert_close(out, plain.double(), "the plain form")


def test_the_plain_form_is_the_kernels(device):
    q, k, v = operands(torch.device("cpu"), (30, 4, 16), (45, 2, 16), (45, 2, 16))
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 20, 30], [0, 11, 45]))
    for window, causal, sinks in ((0, False, None), (0, True, None), (4, True, None), (4, True, torch.randn(4))):
        out, lse = torch.ops.ingot.attention(q, k, v, cu_q, cu_k, sinks, 0.3, 0.0, window, causal, True, False)
        plain, plain_lse = _plain.attention(q, k, v, cu_q, cu_k, sinks, 0.3, 0.0, window, causal)
        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, plain_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change, said", [
    (dict(dropout_p=0.1), "dropout_p: found 0.1"),
    (dict(alibi_slopes=torch.ones(2)), "alibi_slopes"),
    (dict(window_size=(3, 4)), r"window_size: found \(3, 4\)"),
])
def test_refusals(device, change, said):
    q, k, v = operands(device, (1, 8, 2, 64), (1, 8, 2, 64), (1, 8, 2, 64))
    with pytest.raises(NotImplementedError, match=said):
        flash_attn_func(q, k, v, **change)


def test_bad_operands_are_named(device):
    q, k, v = operands(device, (1, 8, 2, 64), (1, 8, 2, 64), (1, 8, 2, 64))
    with pytest.raises(ValueError, match="q: found shape"):
        flash_attn_func(q[0], k, v)
    with pytest.raises(ValueError, match="expected one batch"):
        flash_attn_func(q, k.repeat(2, 1, 1, 1), v)
    with pytest.raises(TypeError, match="k: found list"):
        flash_attn_func(q, [1], v)
    with pytest.raises(TypeError, match="flash_attn_func: sinks: found list, expected torch.Tensor"):
        flash_attn_func(q, k, v, sinks=[0.0, 0.0])
    for pair in (3, (1,), None):
        with pytest.raises(ValueError, match="window_size: found .*, expected a pair"):
            flash_attn_func(q, k, v, window_size=pair)
    with pytest.raises(ValueError, match="cu_seqlens_q: found torch.int64"):
        cu = torch.tensor([0, 8], device=device)
        flash_attn_varlen_func(q[0], k[0], v[0], cu, cu)


def test_strides_of_dimensions_of_one_element_mean_nothing(device):
    """With one key head and one key PyTorch allows any stride, also in copies, while GPU kernels need multiples of 16 bytes."""
    q, k, v = operands(device, (1, 9, 4, 16), (1, 9, 1, 16), (1, 9, 1, 16))
    k1, v1 = (t.detach().as_strided(t.shape, (144, 16, 1, 1)).requires_grad_() for t in (k, v))
    one = [t.detach().as_strided((1, 1, 4 if t is q else 1, 16), (3, 5, 16 if t is q else 1, 1)).requires_grad_() for t in (q, k, v)]
    for given, plain in (((q, k1, v1), (q, k, v)), (one, [t.detach()[:, :1].clone(memory_format=torch.contiguous_format).requires_grad_() for t in (q, k, v)])):
        out, expected = flash_attn_func(*given, causal=True), flash_attn_func(*plain, causal=True)
        assert torch.equal(out, expected)
        upstream = torch.randn_like(expected)
        for a, b in zip(torch.autograd.grad(out, given, upstream), torch.autograd.grad(expected, plain, upstream)):
            assert torch.equal(a, b)
