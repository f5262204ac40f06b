"""experts_implementation="ingot" of transformers: experts whose products are functional.grouped_linear, under transformers' ExpertsInterface."""
from collections import Counter

import torch

from ._hf_parts import capability_of, count_fallback
from .functional import grouped_linear

fallbacks = Counter()


def _reason(module, hidden_states):
    kind = hidden_states.device.type
    if kind not in ("cpu", "cuda"):
        return f"grouped_linear has no kernel on the device {kind}"
    if kind == "cuda" and (hidden_states.dtype not in (torch.bfloat16, torch.float16) or capability_of(hidden_states.device)[0] != 9):
        return "grouped_linear has fast kernels on a GPU only for bfloat16 and float16, and compute capability 9.0"
    if not hidden_states.is_floating_point() or module.down_proj.dtype is not hidden_states.dtype:
        return f"experts of {module.down_proj.dtype} beside activations of {hidden_states.dtype}"
    return None


def experts(module, hidden_states, top_k_index, top_k_weights):
    """transformers' experts function: hidden_states (T, C), top_k_index and top_k_weights (T, k); returns (T, C)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    reason = _reason(module, hidden_states)
    if reason is not None:
        count_fallback(fallbacks, "experts", reason)
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    tokens, k = top_k_index.shape
    # Choices of experts that other processes hold have numbers from num_experts on. Their rows come last and belong to no expert of this process.
    expert, order = top_k_index.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(module.num_experts, device=expert.device), right=True)
    offsets = torch.nn.functional.pad(ends, (1, 0))

    def product(x, name):
        weight, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
        return grouped_linear(x, weight.transpose(1, 2) if module.is_transposed else weight, offsets, bias)

    rows = product(hidden_states[order // k], "gate_up_proj" if module.has_gate else "up_proj")
    rows = product(module._apply_gate(rows) if module.has_gate else module.act_fn(rows), "down_proj")
    rows = rows * top_k_weights.reshape(-1)[order, None]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return rows[place].view(tokens, k, -1).sum(1).to(hidden_states.dtype)


def register():
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as e:
        raise ImportError("hf.register_experts: found no transformers with ExpertsInterface, expected transformers 5 or later") from e
    ALL_EXPERTS_FUNCTIONS.register("ingot", experts)
