"""attn_implementation="ingot" of transformers: the attention kernels under transformers' AttentionInterface and AttentionMaskInterface.

transformers calls `make_mask` once per forward pass and kind of layer with a description of the mask, and `attention` in every layer with the result.
Causal masks, sliding windows, packed sequences and padding become segments, which the kernels take. Everything else becomes a dense mask, and PyTorch
computes the layer by the formula in `_dense_attention`; `fallbacks` counts these calls by their reason, and the first of each reason is logged.
"""
from collections import Counter

import torch

from . import _C, _attention
from ._hf_parts import capability_of, count_fallback
from ._op import register as register_operator

fallbacks = Counter()

_WIDEST_HEAD = 256  # the widest head of the GPU kernels
_HOLES = "the padding has holes: tokens of a row are not next to each other"


class _Mask:
    ndim = 4  # transformers checks whether a mask from an earlier call has two dimensions


class SegmentMask(_Mask):
    """A mask that the kernels take, in place of a tensor: causal or not, a window, and the offsets of segments of keys and queries.

    cu_q, cu_k: (S + 1) int32, or None where every row of the batch is one segment. dense: a function without arguments that makes the same mask as a
    boolean tensor (B, 1, Sq, Sk), for layers that PyTorch computes.
    """

    def __init__(self, causal, window, cu_q, cu_k, dense):
        self.causal, self.window, self.cu_q, self.cu_k, self.dense = causal, window, cu_q, cu_k, dense

    def to(self, *arguments, **named):
        """Moves the offsets, for tools that spread a model over devices."""
        def moved(t):
            return None if t is None else t.to(*arguments, **named).to(torch.int32)
        return SegmentMask(self.causal, self.window, moved(self.cu_q), moved(self.cu_k), lambda: self.dense().to(*arguments, **named))


class DenseMask(_Mask):
    """A boolean mask (B, 1, Sq, Sk), and the reason why it is no SegmentMask."""

    def __init__(self, tensor, reason):
        self.tensor, self.reason = tensor, reason

    def to(self, *arguments, **named):
        return DenseMask(self.tensor.to(*arguments, **named), self.reason)


# --- masks -------------------------------------------------------------------------------------------------------------


# transformers from 5.23 on applies the causal order and the window to the position_ids of packed sequences, and not to the places of the tokens in the
# row. The result is the same: a packed sequence ends wherever the next position is not one more than the last, so within a sequence the distance between
# two positions equals the distance between the two tokens.
_WITHIN_PACKED = "remap_positions_for_packed_sequence.<locals>.inner_mask"


def _parts(function):
    """Returns the mask functions whose intersection transformers.masking_utils has made in `function`, each with the variables of its closure."""
    variables = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ())))
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        return [part for f in variables["mask_functions"] for part in _parts(f)]
    if function.__qualname__ == _WITHIN_PACKED:
        return [*_parts(variables["mask_function"]), (function, variables)]
    return [(function, variables)]


def _traced_window(options):
    """The sliding window of a mask under torch.compile, 0 for none; None where the options of transformers may also mean chunks."""
    window, config = options.get("local_size"), options.get("config")
    if not window:
        return 0
    return window if window == getattr(config, "sliding_window", None) and getattr(config, "attention_chunk_size", None) is None else None


def _pattern(function, options):
    """Returns (causal, window, numbers of packed sequences or None) for a mask function of transformers, or None for a pattern that is not one of
    these."""
    # Not `from transformers import masking_utils`: torch.compile of PyTorch 2.11 cannot trace an import from transformers' lazy module.
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function in (causal_mask_function, bidirectional_mask_function):
        return function is causal_mask_function, 0, None
    if torch.compiler.is_compiling():  # torch.compile does not trace the reading of a closure
        window = _traced_window(options)
        # transformers allows the skip where the mask is the pattern of create_sliding_window_causal_mask alone.
        return (True, window, None) if window and options.get("allow_is_causal_skip") else None
    causal, window, packed, within = False, 0, None, False
    for part, variables in _parts(function):
        name = part.__qualname__ if part.__module__ == "transformers.masking_utils" else None
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay.<locals>.inner_mask":
            window = variables["sliding_window"]
        elif name == "packed_sequence_mask_function.<locals>.inner_mask" and packed is None:
            packed = variables["packed_sequence_mask"]
        elif name == _WITHIN_PACKED:
            within = True
        elif name != "bidirectional_mask_function":
            return None
    return None if window and not causal or within and packed is None else (causal, window, packed)


def _starts(numbers):
    """(B, Sk) boolean: whether a run of equal `numbers` begins in a row."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return starts


def _has_holes(real):
    """Whether the `real` tokens (B, Sk) of some row are not next to each other: a boolean tensor without dimensions."""
    return ((real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0] > 1).any()


def _segments(numbers, queries):
    """Returns (cu_q, cu_k) of the segments that `numbers` (B, Sk) gives: a run of equal numbers in a row is one segment. The queries are the last tokens
    of each row."""
    batch, keys = numbers.shape
    row, at = _starts(numbers).nonzero(as_tuple=True)
    end = torch.full((1,), batch, device=numbers.device)
    # For the queries, a segment that begins before the first query of its row begins at this query.
    first = (at - (keys - queries)).clamp(min=0)
    return torch.cat([row * queries + first, end * queries]).to(torch.int32), torch.cat([row * keys + at, end * keys]).to(torch.int32)


def _segments_of_real_keys(real, queries):
    """(cu_q, cu_k) of masks without an order: every query of a row sees the row's `real` keys (B, Sk), which are next to each other. Padding before and behind
    them is a segment without queries."""
    batch, keys = real.shape
    row, at = _starts(real).nonzero(as_tuple=True)
    behind = ~real[row, at] & (at > 0)
    end = torch.full((1,), batch, device=real.device)
    return torch.cat([row * queries + behind * queries, end * queries]).to(torch.int32), torch.cat([row * keys + at, end * keys]).to(torch.int32)


def _run_offsets(numbers, unlike):
    """The operator of a compiled model: the offsets (S + 1) int32 of segments of equal `numbers` (B, S_k), which only the run can know."""
    if unlike.item():
        raise ValueError('ingot attention under torch.compile: found a mask that is more than causal with a window, packed sequences and padding at the ends of '
                         'rows, expected one of these (attn_implementation="sdpa" takes every mask)')
    return _segments(numbers, numbers.shape[1])[1]


def _fake_offsets(numbers, unlike):
    return numbers.new_empty(torch.library.get_ctx().new_dynamic_size(min=2), dtype=torch.int32)


_offsets_op = register_operator("mask_offsets(Tensor numbers, Tensor unlike) -> Tensor", _run_offsets, _fake_offsets)


def _traced_numbers(mask_function, batch, length, window, device):
    """For a trace, which cannot read what a mask function consists of: (numbers (B, S) of the packed sequences, whether the mask is anything but causal
    within these sequences and the window). The numbers follow from the function at neighbouring tokens: a sequence begins where a token does not see the
    token before it. Whether this describes the whole mask is then tested for every pair of tokens. The compiler makes one reduction of the test, which
    stores no mask."""
    row, at, head = torch.arange(batch, device=device), torch.arange(length, device=device), torch.zeros((), dtype=torch.int64, device=device)
    joined = mask_function(row[:, None], head, at[1:], at[:-1]).expand(batch, length - 1)
    numbers = torch.nn.functional.pad((~joined).long().cumsum(-1), (1, 0))
    q, k = at[:, None], at
    expected = (k <= q) & (numbers[:, :, None] == numbers[:, None])
    if window:
        expected = expected & (q - k < window)
    found = mask_function(row[:, None, None], head, q, k)
    return numbers, (found != expected).any()


def _traced_mask(batch_size, length, mask_function, padding, dense, window, options):
    """The SegmentMask of a causal mask under torch.compile, with the sequences of a run."""
    if padding is None:
        numbers, unlike = _traced_numbers(mask_function, batch_size, length, window, options["device"])
    else:
        real = padding.bool()
        numbers, unlike = real.long(), _has_holes(real)
    offsets = _offsets_op(numbers, unlike)
    return SegmentMask(True, window, offsets, offsets, dense)


def make_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, **options):
    """A SegmentMask where the kernels support the pattern, otherwise a DenseMask. Called by transformers.masking_utils."""
    from transformers.masking_utils import prepare_padding_mask, sdpa_mask

    if isinstance(attention_mask, _Mask):  # made by an earlier call, for example by `generate` for a static cache
        return attention_mask
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)

    def dense():
        named = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
                         attention_mask=attention_mask, **named)

    # A trace of a model without a cache, as in training: only transformers' own patterns take index tensors, which use_vmap=False says.
    traced = (torch.compiler.is_dynamo_compiling() and q_length == kv_length and isinstance(q_offset, int) and (q_offset, kv_offset) == (0, 0)
              and not options.get("use_vmap"))
    pattern = _pattern(mask_function, options)
    if traced and pattern is None and padding is None and (window := _traced_window(options)) is not None:
        return _traced_mask(batch_size, q_length, mask_function, None, dense, window, options)
    if pattern is None:
        return DenseMask(dense(), "the mask is neither causal nor bidirectional, or has a pattern beside windows, packed sequences and padding")
    causal, window, packed = pattern
    if causal and (isinstance(q_offset, torch.Tensor) or q_offset + q_length != kv_offset + kv_length):
        return DenseMask(dense(), "the cache holds keys beyond the last query, as a static cache does")
    if padding is None and packed is None:
        return SegmentMask(causal, window, None, None, dense)
    if traced and causal:
        return _traced_mask(batch_size, q_length, mask_function, padding, dense, window, options)
    if torch.compiler.is_compiling():
        return DenseMask(dense(), "torch.compile traces padding beside a cache or in a mask that is not causal")
    numbers = torch.zeros(batch_size, kv_length, dtype=torch.int64, device=(packed if padding is None else padding).device)
    if packed is not None:
        numbers = numbers + packed[:, kv_offset:kv_offset + kv_length]
    if padding is not None:
        real = padding[:, kv_offset:kv_offset + kv_length].bool()
        # The host reads one number per forward pass, as with transformers' own masks.
        state = (_has_holes(real) + 2 * real.all()).item()
        if state == 1:
            return DenseMask(dense(), _HOLES)
        if state == 2 and packed is None:
            return SegmentMask(causal, window, None, None, dense)
        if not causal and packed is None:  # also of keys of another sequence, whose length is not that of the queries
            return SegmentMask(causal, window, *_segments_of_real_keys(real, q_length), dense)
        numbers = torch.where(real, numbers, -1)
    elif q_length != kv_length:
        return DenseMask(dense(), "packed sequences continue a cache")
    return SegmentMask(causal, window, *_segments(numbers, q_length), dense)


# --- attention ---------------------------------------------------------------------------------------------------------


def _reason(query, key, value, dropout, position_bias):
    """Why the kernels cannot compute the layer, or None."""
    if dropout:
        return "dropout of attention weights"
    if position_bias is not None:
        return "a bias of positions"
    if query.is_cuda:
        if not _C.cuda:
            return "this build of ingot has no CUDA kernels"
        if (capability := capability_of(query.device)) < (8, 0):
            return "a GPU of compute capability {}.{}, and the kernels need 8.0".format(*capability)
        if value.dtype not in (torch.bfloat16, torch.float16) and not torch.is_autocast_enabled("cuda"):
            return f"{value.dtype} on a GPU, whose kernels take bfloat16 and float16"
        if query.shape[-1] % 8 or query.shape[-1] > _WIDEST_HEAD:
            return f"heads of {query.shape[-1]} numbers on a GPU, whose kernels take multiples of 8 up to {_WIDEST_HEAD}"
        if value.shape[-1] != query.shape[-1]:
            return f"values of {value.shape[-1]} numbers beside keys of {query.shape[-1]} on a GPU"
    elif query.device.type not in ("cpu", "meta"):
        return f"the device {query.device.type}"
    return None


def _dense_attention(query, key, value, mask, scale, softcap, sinks, dropout, position_bias):
    """Computes the formula of kernels/attention in PyTorch for any mask: a boolean tensor, a tensor of numbers to add to the logits, or None. Returns (B,
    Sq, H, Dv)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None and sinks is None and position_bias is None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
        return out.transpose(1, 2)
    logits = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if position_bias is not None:
        logits = logits + position_bias
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(torch.float32).min) if mask.dtype is torch.bool else logits + mask
    if sinks is not None:
        logits = torch.cat([logits, sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    weights = logits.softmax(-1)[..., :key.shape[2]].to(value.dtype)
    return (torch.nn.functional.dropout(weights, dropout) @ value).transpose(1, 2)


def _causal_mask(queries, keys, window, device):
    """Returns the causal mask (Sq, Sk), boolean, aligned at the end: the last query sees the last key."""
    distance = torch.arange(queries, device=device)[:, None] + (keys - queries) - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _packed_mask(cu_q, cu_k, queries, keys):
    """Returns (Sq, Sk), boolean: whether query and key belong to the same packed sequence."""
    of_query = torch.bucketize(torch.arange(queries, device=cu_q.device), cu_q[1:], right=True)
    return of_query[:, None] == torch.bucketize(torch.arange(keys, device=cu_k.device), cu_k[1:], right=True)


def _mask_of(mask, module, shape, device, window, is_causal, cu_q, cu_k):
    """The SegmentMask or DenseMask of a layer. mask: the mask that transformers passes on: a result of make_mask, a tensor that the model has made itself,
    or None. shape: (queries, keys)."""
    if isinstance(mask, _Mask):
        return mask
    queries, keys = shape
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)

    def order():  # True: every query sees every key
        return _causal_mask(queries, keys, window, device) if causal else True

    if isinstance(mask, torch.Tensor):
        if mask.dim() != 2 or torch.compiler.is_compiling():
            return DenseMask(mask, "the caller gave a mask of its own")
        real = mask[:, -keys:].bool()  # padding, from a model that makes no masks
        if _has_holes(real).item():
            return DenseMask((real[:, None, None] & order()).expand(-1, -1, queries, -1), _HOLES)
        segments = _segments(real.long(), queries) if causal else _segments_of_real_keys(real, queries)
        return SegmentMask(causal, window, *segments, lambda: real[:, None, None] & order())
    if window and not causal:
        distance = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
        return DenseMask(distance.abs() <= window, "a window that looks into the future")
    if cu_q is not None:  # given by a collator for packed sequences
        return SegmentMask(causal, window, cu_q, cu_k, lambda: _packed_mask(cu_q, cu_k, queries, keys) & order())
    return SegmentMask(causal, window, None, None, lambda: order() if causal else None)


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None, is_causal=None, s_aux=None,
              position_bias=None, **others):
    """transformers' attention function: query (B, H, Sq, D), key and value (B, Hkv, Sk, D); returns ((B, Sq, H, D), None)."""
    if others.get("output_attentions"):
        raise NotImplementedError('ingot attention: output_attentions: found True, expected False (attn_implementation="eager" returns weights)')
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if query.dtype is not value.dtype and not torch.is_autocast_enabled(query.device.type):
        query, key = query.to(value.dtype), key.to(value.dtype)  # PEFT keeps norms in fp32, whose results are then fp32
    mask = _mask_of(attention_mask, module, (query.shape[2], key.shape[2]), query.device, sliding_window or 0, is_causal,
                    others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k"))
    dense = isinstance(mask, DenseMask)
    reason = _reason(query, key, value, dropout, position_bias) or (mask.reason if dense else None)
    if reason is not None:
        count_fallback(fallbacks, "attention", reason)
        return _dense_attention(query, key, value, mask.tensor if dense else mask.dense(), scale, softcap, s_aux, dropout, position_bias), None
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    options = dict(softmax_scale=scale, causal=mask.causal, window_size=(mask.window - 1, 0) if mask.window else (-1, -1), softcap=softcap or 0.0, sinks=s_aux)
    if mask.cu_q is None:
        return _attention.flash_attn_func(q, k, v, **options), None
    out = _attention.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask.cu_q.to(torch.int32), mask.cu_k.to(torch.int32), **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def register():
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
    except ImportError as e:
        raise ImportError('hf.register_attention: found no transformers with AttentionMaskInterface, expected transformers 5 or later') from e
    if int(__version__.split(".")[0]) < 5:
        raise ImportError(f"hf.register_attention: found transformers {__version__}, expected 5 or later")
    AttentionInterface.register("ingot", attention)
    AttentionMaskInterface.register("ingot", make_mask)
