"""Attention: the operator over packed segments, and flash-attention's two functions, which call the operator."""
import functools

import torch

from . import _C, _plain
from ._second_order import gradients, with_formula
from ._op import INTEGERS, dense, expect_bools, expect_float, expect_like, expect_offsets, expect_tensors, expect_tensors_or_none, number, register, sum_dtype

_SCHEMA = ("Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, Tensor? sinks, float scale, float softcap, int window, bool causal, "
           "bool deterministic, bool regular")


def _heads(t):
    """`t` (T, H, D) in the layout of the kernels: the last dimension dense, and on a GPU rows of whole 16 bytes."""
    dense = t.stride(-1) == 1 or t.shape[-1] <= 1
    if t.is_cuda:
        size = t.element_size()
        dense = dense and t.data_ptr() % 16 == 0 and all(s * size % 16 == 0 and s > 0 for s in t.stride()[:-1])
    if dense and min(t.stride()) > 0:
        return t
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)  # a clone keeps the strides of dimensions of one element


def _narrow_on_cpu(q):
    """CPUs have no 16-bit attention: operands are widened, results rounded."""
    return not q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def run_attention(q, k, v, cu_q, cu_k, sinks, scale, softcap, window, causal, deterministic, regular):
    """Returns out (Tq, H, D), and lse (H, Tq) in fp32 (fp64 for fp64). `deterministic` and `regular` (every segment has
    Tq / S queries and Tk / S keys) concern the backward pass."""
    if not regular:
        expect_offsets("attention", "cu_seqlens_q", cu_q, q.shape[0])
        expect_offsets("attention", "cu_seqlens_k", cu_k, k.shape[0])
    if _narrow_on_cpu(q):
        wide = (q.float(), k.float(), v.float(), cu_q, cu_k, None if sinks is None else sinks.float())
        out, lse = run_attention(*wide, scale, softcap, window, causal, deterministic, regular)
        return out.to(q.dtype), lse
    q, k, v = _heads(q), _heads(k), _heads(v)
    out = torch.empty(q.shape[:2] + v.shape[2:], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=sum_dtype(q.dtype), device=q.device)
    _C.attention(q, k, v, cu_q, cu_k, _sinks_for(sinks, q), out, lse, scale, softcap, window, causal)
    return out, lse


def _sinks_for(sinks, q):
    return None if sinks is None else sinks.to(sum_dtype(q.dtype)).contiguous()


def run_attention_backward(dout, dlse, q, k, v, cu_q, cu_k, sinks, out, lse, scale, softcap, window, causal, deterministic, regular):
    """Returns dq, dk, dv, and dsinks in the type of sums (empty without sinks). dout (Tq, H, D) and dlse (H, Tq), or None, are the gradients of out and lse."""
    if _narrow_on_cpu(q):
        wide_dout, *wide = [None if t is None else t.float() for t in (dout, q, k, v)]
        found = run_attention_backward(wide_dout, dlse, *wide, cu_q, cu_k, None if sinks is None else sinks.float(), out.float(), lse, scale,
                                       softcap, window, causal, deterministic, regular)
        return tuple(g.to(q.dtype) for g in found[:3]) + found[3:]
    dout, q, k, v, out = (_heads(t) for t in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dsinks = torch.zeros(0 if sinks is None else q.shape[1], dtype=sum_dtype(q.dtype), device=q.device)
    _C.attention_backward(dout, q, k, v, cu_q, cu_k, _sinks_for(sinks, q), out, lse, dense(dlse), dq, dk, dv, None if sinks is None else dsinks, scale,
                          softcap, window, causal, deterministic, regular)
    return dq, dk, dv, dsinks


def _fake_attention(q, k, v, cu_q, cu_k, sinks, scale, softcap, window, causal, deterministic, regular):
    return q.new_empty(q.shape[:2] + v.shape[2:]), q.new_empty(q.shape[1], q.shape[0], dtype=sum_dtype(q.dtype))


def _fake_attention_backward(dout, dlse, q, k, v, cu_q, cu_k, sinks, out, lse, scale, softcap, window, causal, deterministic, regular):
    dsinks = q.new_empty(0 if sinks is None else q.shape[1], dtype=sum_dtype(q.dtype))
    return *(t.new_empty(t.shape) for t in (q, k, v)), dsinks


def _backward_formula(dout, dlse, q, k, v, cu_q, cu_k, sinks, out, lse, scale, softcap, window, causal, deterministic, regular):
    def forward(q, k, v, sinks):
        return _plain.attention(q, k, v, cu_q, cu_k, sinks, scale, softcap, window, causal)

    return gradients(forward, (q, k, v, sinks), (True, True, True, sinks is not None), (dout, dlse))


attention_backward_op = register(
    f"attention_backward(Tensor dout, Tensor? dlse, {_SCHEMA[:_SCHEMA.index(', float scale')]}, Tensor out, Tensor lse, "
    f"{_SCHEMA[_SCHEMA.index('float scale'):]}) -> (Tensor, Tensor, Tensor, Tensor)",
    run_attention_backward,
    _fake_attention_backward,
    **with_formula(_backward_formula),
)


def _setup(ctx, inputs, output):
    q, k, v, cu_q, cu_k, sinks, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cu_q, cu_k, sinks, *output)


def _gradients(ctx, dout, dlse):
    q, k, v, cu_q, cu_k, sinks, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 12
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = attention_backward_op(dout, dlse, q, k, v, cu_q, cu_k, sinks, out, lse, *ctx.options)
    return dq, dk, dv, None, None, None if sinks is None else dsinks.to(sinks.dtype), None, None, None, None, None, None


attention_op = register(f"attention({_SCHEMA}) -> (Tensor, Tensor)", run_attention, _fake_attention, _gradients, _setup)


# --- flash-attention's functions --------------------------------------------------------------------------------------


def _window(op, window_size, causal):
    """(window, causal) for flash-attention's pair: the number of keys that a query sees to its left and right, where -1 means all."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{op}: window_size: found {window_size!r}, expected a pair (left, right)")
    if not all(isinstance(n, INTEGERS) for n in window_size):
        raise ValueError(f"{op}: window_size: found {window_size!r}, expected two integers")
    left, right = window_size
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return 0, False
    if right != 0:
        raise NotImplementedError(f"{op}: window_size: found {tuple(window_size)} and causal={causal}, expected (-1, -1), or a window that "
                                  "ends at the query itself: causal=True or (left, 0)")
    return (left + 1 if left >= 0 else 0), True


def _check(op, q, k, v, dims, dropout_p, alibi_slopes, **flags):
    expect_bools(op, **flags)
    for name, t in (("q", q), ("k", k), ("v", v)):
        expect_tensors(op, **{name: t})
        if t.dim() != dims:
            raise ValueError(f"{op}: {name}: found shape {tuple(t.shape)}, expected {dims} dimensions")
    if dropout_p:
        raise NotImplementedError(f"{op}: dropout_p: found {dropout_p}, expected 0")
    if alibi_slopes is not None:
        raise NotImplementedError(f"{op}: alibi_slopes: found slopes, expected None")


def _autocast(q, k, v):
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t for t in (q, k, v))


def _expect_operands(op, q, k, v, sinks):
    """Refuses dtypes, devices and sizes that do not go together; the last two dimensions are heads and head size."""
    expect_float(op, "q", q)
    expect_like(op, "q", q, k=k, v=v)
    (heads, width), kv_heads = q.shape[-2:], k.shape[-2]
    if k.shape[-1] != width:
        raise ValueError(f"{op}: k: found a head size of {k.shape[-1]}, expected q's {width}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"{op}: k: found {kv_heads} heads, expected a number that divides q's {heads}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"{op}: v: found shape {tuple(v.shape)}, expected {tuple(k.shape[:-1])} as k before the head size")
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_floating_point() or sinks.device != q.device):
        raise ValueError(f"{op}: sinks: found {sinks.dtype} of {tuple(sinks.shape)} on {sinks.device}, expected floating-point numbers of ({heads},) on {q.device}")


def _attention(op, q, k, v, cu_q, cu_k, sinks, softmax_scale, softcap, window, causal, deterministic, regular):
    if q.shape[-1] == 0:
        raise ValueError(f"{op}: q: found shape {tuple(q.shape)}, expected a head size from 1")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else number(op, "softmax_scale", softmax_scale, "a number or None")
    softcap = number(op, "softcap", softcap)
    q, k, v = _autocast(q, k, v)
    _expect_operands(op, q, k, v, sinks)
    if _plain.needed():
        return _plain.attention(q, k, v, cu_q, cu_k, sinks, scale, softcap, window, causal)
    return attention_op(q, k, v, cu_q, cu_k, sinks, scale, softcap, window, causal, deterministic, regular)


def _regular_offsets(batch, length, device):
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device) if length else torch.zeros(batch + 1, dtype=torch.int32,
                                                                                                                device=device)


@functools.lru_cache(maxsize=256)
def _kept_offsets(batch, length, device, stream):
    return _regular_offsets(batch, length, device)


def _offsets(batch, length, q):
    """The offsets of segments of equal length. They are cached for the stream on which they are made. They are not cached if a trace, a dispatch mode or a
    CUDA graph would own the tensor, nor in inference mode, whose tensors cannot take part in recorded calls."""
    device = q.device
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or _C.route(q) == _C.DISPATCH:
        return _regular_offsets(batch, length, device)
    if device.type != "cuda":
        return _kept_offsets(batch, length, device, None)
    if torch.cuda.is_current_stream_capturing():
        return _regular_offsets(batch, length, device)
    return _kept_offsets(batch, length, device, torch.cuda.current_stream(device).cuda_stream)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                    deterministic=True, return_attn_probs=False, *, sinks=None):
    """softmax(softmax_scale q k^T) v, with flash-attention's arguments.

    q: (B, Sq, H, D); k, v: (B, Sk, Hkv, D), H a multiple of Hkv. On a GPU bfloat16 or float16 and D a multiple of 8 up to 256. A causal mask is
    aligned at the end: query i sees keys up to i + Sk - Sq. window_size=(left, 0): query i sees the last left + 1 of these keys.
    sinks: (H), one more logit for every query of the head, whose value vector is zero. deterministic: the same call gives the same
    gradients, bit for bit; deterministic=False (flash-attention's default): the gradient of q may differ in the last bits, and the backward pass of heads up to 128 wide without a softcap is faster.
    Returns out, or with return_attn_probs (out, lse (B, H, Sq), None); lse has a gradient, too. The third result is None; flash-attention returns a matrix
    of probabilities there. Source: the formula in kernels/attention/attention.h. Errors are those of ingot.functional.
    """
    op = "flash_attn_func"
    _check(op, q, k, v, 4, dropout_p, alibi_slopes, causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    expect_tensors_or_none(op, sinks=sinks)
    window, causal = _window(op, window_size, causal)
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    if k.shape[0] != batch or v.shape[:2] != k.shape[:2]:
        raise ValueError(f"{op}: found q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}, expected one batch, and keys as many as values")
    out, lse = _attention(op, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), _offsets(batch, queries, q), _offsets(batch, keys, q),
                          sinks, softmax_scale, softcap, window, causal, deterministic, regular=True)
    out = out.unflatten(0, (batch, queries))
    return (out, lse.unflatten(1, (batch, queries)).transpose(0, 1), None) if return_attn_probs else out


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=True, return_attn_probs=False,
                           block_table=None, *, sinks=None):
    """flash_attn_func for sequences packed one after the other: q (Tq, H, D), k and v (Tk, Hkv, D), cu_seqlens (S + 1) int32 on their device, ascending
    from 0, the last at most the number of tokens. On a GPU their values are trusted. max_seqlen is not needed. Tokens behind the last sequence are
    padding: out = 0, lse = -inf, and their gradients are 0. With return_attn_probs (out, lse (H, Tq), None).
    """
    op = "flash_attn_varlen_func"
    _check(op, q, k, v, 3, dropout_p, alibi_slopes, causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    expect_tensors_or_none(op, sinks=sinks)
    if block_table is not None:
        raise NotImplementedError(f"{op}: block_table: found a table, expected None")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, torch.Tensor) or cu.dtype is not torch.int32 or cu.dim() != 1:
            found = f"{cu.dtype} of shape {tuple(cu.shape)}" if isinstance(cu, torch.Tensor) else type(cu).__name__
            raise ValueError(f"{op}: {name}: found {found}, expected int32 of one dimension")
        expect_tensors(op, **{name: cu})
        if cu.device != q.device:
            raise ValueError(f"{op}: {name}: found a tensor on {cu.device}, expected q's {q.device}")
    if cu_seqlens_q.shape[0] < 1 or cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(f"{op}: cu_seqlens_k: found {cu_seqlens_k.shape[0]} offsets beside {cu_seqlens_q.shape[0]} of cu_seqlens_q, expected the same number, at least one")
    window, causal = _window(op, window_size, causal)
    out, lse = _attention(op, q, k, v, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), sinks, softmax_scale, softcap, window, causal, deterministic, regular=False)
    return (out, lse, None) if return_attn_probs else out
