"""Optimizers."""
import math
import numbers

import torch
from torch.optim.adamw import adamw

from ._muon import PRODUCTS, muon_op

__all__ = ["Muon"]

_EPS = 1e-7  # the kernel's own
_CALL_BYTES = 256 << 20  # of matrices in a call, whose copies and workspace take several times as much
_WIDE = (torch.float32, torch.float64)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024) for matrices, AdamW for the rest, in groups of parameters.

        ingot.optim.Muon([{"params": matrices, "lr": 0.02},
                          {"params": others, "lr": 3e-4, "use_muon": False}])

    Of a matrix's gradient g: B = momentum B + (1 - momentum) g; u = (1 - momentum) g + momentum B (nesterov) or B; X = the orthogonal factor of u
    by ns_steps steps of Newton-Schulz; p = p (1 - lr weight_decay) - lr f X, where f is sqrt(max(1, rows / columns)), and with
    adjust_lr_fn="match_rms_adamw" 0.2 sqrt(max(rows, columns)). Arguments, defaults and state are torch.optim.Muon's, whose state dicts load
    and which loads these. A parameter of three dimensions is a bank of matrices. All of one shape, up to 256 MB, are one call of the kernel, wherever they are.

    Every option may differ from group to group:
    use_muon=False: AdamW (torch's own) of any parameters, with lr, betas, adam_eps and weight_decay; its state is torch.optim.AdamW's.
    row_normalise=True: rows of u are scaled to length 1 before the iteration.
    products: what the iteration's matrix products run in: "fp32", "bf16", on a GPU "tf32" too. None: bf16 on a GPU, as torch.optim.Muon
    has it everywhere, fp32 (fp64 of fp64) on a CPU.
    lr may be a tensor of one element; one on the parameters' GPU is read there, when a captured graph replays.
    """

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_coefficients=(3.4445, -4.7750, 2.0315), eps=_EPS,
                 ns_steps=5, adjust_lr_fn=None, *, row_normalise=False, products=None, use_muon=True, betas=(0.9, 0.95), adam_eps=1e-8):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients,
                                      eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, row_normalise=row_normalise, products=products,
                                      use_muon=use_muon, betas=betas, adam_eps=adam_eps))

    def add_param_group(self, param_group):
        count = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
            _check_parameters(self.param_groups[-1])
        except Exception:
            del self.param_groups[count:]
            raise

    def load_state_dict(self, state_dict):
        """A state dict of this class or of torch.optim.Muon; options that it lacks stay as they are."""
        groups = [{**{name: own[name] for name in self.defaults}, **given} for own, given in zip(self.param_groups, state_dict["param_groups"])]
        for group in groups:
            _check_options(group)
        super().load_state_dict({**state_dict, "param_groups": groups + state_dict["param_groups"][len(groups):]})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for p in (p for parameters in given for p in parameters if p.grad.is_sparse):
            raise ValueError(f"Muon: found a sparse gradient of a parameter of {tuple(p.shape)}, expected a dense one")
        for group, parameters in zip(self.param_groups, given):
            step = self._muon_step if group["use_muon"] else self._adamw_step
            if parameters:
                step(group, parameters)
        return loss

    def _muon_step(self, group, parameters):
        banks = {}
        for p in parameters:
            if p.numel():
                banks.setdefault((p.shape[-2:], p.dtype, p.device), []).append(p)
        for (shape, dtype, device), members in banks.items():
            self._momenta(members)
            wide = dtype if dtype in _WIDE or (dtype is torch.bfloat16 and device.type == "cuda") else torch.float32
            matrices = [_matrices(tensors) for tensors in (members, [p.grad for p in members], [self.state[p]["momentum_buffer"] for p in members])]
            numbers = *_rates(group, shape, device), bool(group["nesterov"]), bool(group["row_normalise"]), group["ns_steps"]
            at_once = max(1, _CALL_BYTES // (shape.numel() * wide.itemsize))
            for begin in range(0, len(matrices[0]), at_once):
                p, g, momentum = (_Bank(parts[begin : begin + at_once], wide) for parts in matrices)
                muon_op(p.all, g.all, momentum.all, *numbers, list(group["ns_coefficients"]), _products(group, device))
                p.write_back()
                momentum.write_back()

    def _momenta(self, members):
        """Momentum of those that have none: one bank, which its parts go on lying in."""
        new = [p for p in members if "momentum_buffer" not in self.state[p]]
        if not new:
            return
        counts = [p.numel() // (p.shape[-2] * p.shape[-1]) for p in new]
        bank = torch.zeros((sum(counts), *new[0].shape[-2:]), dtype=new[0].dtype, device=new[0].device)
        for p, part in zip(new, bank.split(counts)):
            self.state[p]["momentum_buffer"] = part.view(p.shape)

    def _adamw_step(self, group, parameters):
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(2))
        beta1, beta2 = group["betas"]
        adamw(parameters, [p.grad for p in parameters], *([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq")), [],
              [s["step"] for s in states], amsgrad=False, beta1=beta1, beta2=beta2, lr=_number(group["lr"]),
              weight_decay=group["weight_decay"], eps=group["adam_eps"], maximize=False)


class _Bank:
    """Matrices of one shape as one tensor (B, R, C): where they lie evenly in one memory that very memory, else a copy."""

    def __init__(self, matrices, dtype):
        self._parts = matrices
        self.all = _where_they_lie(self._parts) if self._parts[0].dtype is dtype else None
        self._copied = self.all is None
        if self._copied:
            self.all = torch.stack(self._parts).to(dtype)

    def write_back(self):
        if self._copied:
            torch._foreach_copy_(self._parts, list(self.all.unbind(0)))


def _where_they_lie(parts):
    first = parts[0]
    rows, columns = first.shape
    apart = parts[1].storage_offset() - first.storage_offset() if len(parts) > 1 else rows * columns
    row = first.stride(0) if rows > 1 else columns
    if (first.stride(1) != 1 and columns > 1) or row < columns or apart < rows * row:
        return None
    memory = first.untyped_storage()
    for i, part in enumerate(parts):
        if (part.untyped_storage()._cdata != memory._cdata or part.storage_offset() != first.storage_offset() + i * apart
                or part.stride() != first.stride() or part.dtype is not first.dtype):
            return None
    return first.as_strided((len(parts), rows, columns), (apart, row, 1))


def _matrices(tensors):
    """The matrices of matrices and banks, one by one."""
    return [m for t in tensors for m in (t.detach().unbind(0) if t.dim() == 3 else (t.detach(),))]


def _number(lr):
    """An lr that the host may read: itself as it is, unless that waits for a GPU."""
    return lr.item() if isinstance(lr, torch.Tensor) and not lr.is_cuda else lr


def _rates(group, shape, device):
    """(rates, lr, momentum, weight decay, the gradient's factor) that the kernel is given: its own factor of lr is sqrt(max(1, R / C))."""
    rows, columns = shape
    ratio = 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1.0, rows / columns)) if group["adjust_lr_fn"] == "match_rms_adamw" else 1.0
    lr, mu, decay = _number(group["lr"]), float(group["momentum"]), float(group["weight_decay"]) / ratio
    if not isinstance(lr, torch.Tensor):
        return None, lr * ratio, mu, decay, 1 - mu
    others = torch.full((2,), decay, dtype=torch.float64, device=device)
    others[0] = mu
    return torch.cat([lr.to(device, torch.float64).reshape(1) * ratio, others]), 0.0, mu, decay, 1 - mu


def _products(group, device):
    name = group["products"] or ("bf16" if device.type == "cuda" else "fp32")
    return PRODUCTS[name]


def _check_options(group):
    """Refuses what the group's optimizer does not take."""

    def expect(ok, name, expected):
        if not ok:
            raise ValueError(f"Muon: {name}: found {group[name]!r}, expected {expected}")

    lr = group["lr"]
    expect((isinstance(lr, torch.Tensor) and lr.numel() == 1) or _at_least_0(lr), "lr", "0 or more, or a tensor of one element")
    expect(_at_least_0(group["weight_decay"]), "weight_decay", "0 or more")
    if not group["use_muon"]:
        expect(isinstance(group["betas"], (tuple, list)) and len(group["betas"]) == 2 and all(_at_least_0(b) and b < 1 for b in group["betas"]), "betas", "two numbers from 0 to below 1")
        expect(_at_least_0(group["adam_eps"]), "adam_eps", "0 or more")
        return
    expect(_at_least_0(group["momentum"]) and group["momentum"] < 1, "momentum", "a number from 0 to below 1")
    expect(group["eps"] == _EPS, "eps", f"{_EPS}, which the kernel adds to a matrix's norm (AdamW's is adam_eps)")
    expect(isinstance(group["ns_steps"], numbers.Integral) and 0 <= group["ns_steps"] < 100, "ns_steps", "an integer from 0 to 99")
    expect(len(group["ns_coefficients"]) == 3 and all(isinstance(c, numbers.Real) for c in group["ns_coefficients"]), "ns_coefficients", "three numbers")
    expect(group["adjust_lr_fn"] in (None, "original", "match_rms_adamw"), "adjust_lr_fn", "'original' or 'match_rms_adamw'")
    expect(group["products"] in (None, *PRODUCTS), "products", f"None or one of {', '.join(PRODUCTS)}")


def _check_parameters(group):
    for p in group["params"] if group["use_muon"] else ():
        if type(p).__name__ == "DTensor":
            raise ValueError(f"Muon: found a DTensor of {tuple(p.shape)}, expected whole tensors: a matrix's factor needs all of it")
        if p.dim() not in (2, 3) or not p.is_floating_point():
            raise ValueError(f"Muon: found a parameter of shape {tuple(p.shape)} and {p.dtype}, expected a matrix or a bank of matrices (B, R, C) of "
                             "floating-point numbers; give others in a group with use_muon=False")


def _at_least_0(value):
    return isinstance(value, numbers.Real) and value >= 0 and math.isfinite(value)
