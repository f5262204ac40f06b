"""Optimizers."""
import math
import numbers

import torch
from torch.optim.adamw import adamw

from ._muon import PRODUCTS, muon_op
from ._op import FLOATS

__all__ = ["Muon"]

_EPS = 1e-7  # a constant of the kernel
_CALL_BYTES = 256 << 20  # bytes of the matrices in one call; their copies and the workspace take several times as much memory
_WIDE = (torch.float32, torch.float64)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) for matrices, AdamW for all other parameters, in groups of parameters.

        ingot.optim.Muon([{"params": matrices, "lr": 0.02},
                          {"params": others, "lr": 3e-4, "use_muon": False}])

    For a matrix with gradient g: B = momentum B + (1 - momentum) g; u = (1 - momentum) g + momentum B (nesterov) or B; X = the orthogonal factor of u
    by ns_steps steps of Newton-Schulz; p = p (1 - lr weight_decay) - lr f X, where f is sqrt(max(1, rows / columns)), and with
    adjust_lr_fn="match_rms_adamw" 0.2 sqrt(max(rows, columns)). Arguments, defaults and state are torch.optim.Muon's: state dicts of one load into
    the other. A schedule that cycles momentum (OneCycleLR, CyclicLR) cycles Muon's momentum, and does not change beta1 of AdamW groups.

    Shapes: (R, C) is a matrix. (B, R, C) is a bank of B matrices; the weight of a Conv1d has three dimensions too, and is a bank here. (N, C, H, W), the
    weight of a convolution, is the matrix (N, C H W), as in KellerJordan/Muon, with f = sqrt(max(1, H / W)) as there. Matrices of one shape, up to
    256 MB, are updated in one call of the kernel, at any addresses.

    Every option may differ from group to group:
    use_muon=False: AdamW (torch's own) of any parameters, with lr, betas, adam_eps and weight_decay; its state is torch.optim.AdamW's.
    row_normalise=True: rows of u are scaled to length 1 before the iteration.
    products: the type of the iteration's matrix products: "fp32", "bf16", on a GPU "tf32" too. None: bf16 on a GPU, as in torch.optim.Muon on every
    device, and fp32 (fp64 for fp64) on a CPU. With bf16 a GPU iterates in f16, which rounds less, and refuses ns_coefficients with which singular
    values would grow beyond f16's range.
    lr may be a tensor of one element; if the tensor is on the parameters' GPU, a captured graph reads the tensor at each replay.

    Errors: ValueError for an option, a parameter, a gradient or a state dict that Muon does not support.
    """

    _adam_options = {"betas": (0.9, 0.95), "adam_eps": 1e-8}

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_coefficients=(3.4445, -4.7750, 2.0315), eps=_EPS,
                 ns_steps=5, adjust_lr_fn=None, *, row_normalise=False, products=None, use_muon=True, betas=(0.9, 0.95), adam_eps=1e-8):
        # betas is not among the defaults, because a schedule of momentum cycles betas, not momentum, if the defaults have betas.
        self._adam_options = {"betas": betas, "adam_eps": adam_eps}
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients,
                                      eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, row_normalise=row_normalise, products=products,
                                      use_muon=use_muon))

    def __getstate__(self):
        return {**super().__getstate__(), "_adam_options": self._adam_options}

    def add_param_group(self, param_group):
        count = len(self.param_groups)
        if not param_group.get("use_muon", self.defaults["use_muon"]):
            param_group = {**self._adam_options, **param_group}
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
            _check_parameters(self.param_groups[-1])
        except Exception:
            del self.param_groups[count:]
            raise

    def load_state_dict(self, state_dict):
        """Loads a state dict of this class, of torch.optim.Muon, of torch.optim.AdamW (into groups with use_muon=False) or of KellerJordan/Muon's
        classes. Options that are missing in the dict do not change. Raises ValueError for a dict whose options or state mean something different here."""
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError(f"Muon: state dict: found {', '.join(map(str, state_dict)) or 'an empty dict' if isinstance(state_dict, dict) else type(state_dict).__name__}, "
                             "expected a dict with state and param_groups")
        groups = []
        if not all(isinstance(given, dict) and "params" in given for given in state_dict["param_groups"]):
            raise ValueError("Muon: state dict: found a group without params, expected the numbers of its parameters")
        for own, given in zip(self.param_groups, state_dict["param_groups"]):
            group = {**{name: value for name, value in own.items() if name != "params"}, **_own_options(own, given)}
            _check_options(group)
            groups.append(group)
        state = dict(state_dict["state"])
        for own, group in zip(self.param_groups, groups):
            for p, key in zip(own["params"], group["params"]):
                if key in state:
                    state[key] = _own_state(p, state[key], group["use_muon"])
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups + state_dict["param_groups"][len(groups):]})

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
                window = p.shape[-2:] if p.dim() == 4 else None
                banks.setdefault((_matrix_shape(p), window, p.dtype, p.device), []).append(p)
        for (shape, window, dtype, device), members in banks.items():
            self._momenta(members)
            wide = dtype if dtype in _WIDE or (dtype is torch.bfloat16 and device.type == "cuda") else torch.float32
            matrices = [_matrices(tensors) for tensors in (members, [p.grad for p in members], [self.state[p]["momentum_buffer"] for p in members])]
            numbers = *_rates(group, shape, window, device), bool(group["nesterov"]), bool(group["row_normalise"]), group["ns_steps"]
            at_once = max(1, _CALL_BYTES // (math.prod(shape) * wide.itemsize))
            for begin in range(0, len(matrices[0]), at_once):
                p, g, momentum = (_Bank(parts[begin : begin + at_once], shape, wide) for parts in matrices)
                muon_op(p.all, g.all, momentum.all, *numbers, list(group["ns_coefficients"]), _products(group, device))
                p.write_back()
                momentum.write_back()

    def _momenta(self, members):
        """Makes the momenta of parameters that have none: views of one bank, so that later steps need no copy."""
        new = [p for p in members if "momentum_buffer" not in self.state[p]]
        if not new:
            return
        shape = _matrix_shape(new[0])
        counts = [p.numel() // math.prod(shape) for p in new]
        bank = torch.zeros((sum(counts), *shape), dtype=new[0].dtype, device=new[0].device)
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
    """Tensors of `shape` elements each as one tensor (B, R, C): a view if the tensors are evenly spaced in one storage, else a copy."""

    def __init__(self, parts, shape, dtype):
        self._parts = parts
        self.all = _where_they_lie(parts) if parts[0].dtype is dtype and all(p.dim() == 2 for p in parts) else None
        self._copied = self.all is None
        if self._copied:
            self.all = torch.stack([p.reshape(shape) for p in parts]).to(dtype)

    def write_back(self):
        if self._copied:
            torch._foreach_copy_(self._parts, [m.view(p.shape) for m, p in zip(self.all.unbind(0), self._parts)])


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


def _matrix_shape(p):
    """(R, C) of the matrices of a parameter; for a convolution's weight (N, C, H, W) the matrix is (N, C H W)."""
    return (p.shape[0], p[0].numel()) if p.dim() == 4 else tuple(p.shape[-2:])


def _matrices(tensors):
    """The matrices of matrices, banks and convolutions, one by one. A convolution with channels last is returned unchanged, because it has no matrix as a view."""
    found = []
    for t in tensors:
        t = t.detach()
        found += t.unbind(0) if t.dim() == 3 else [t.flatten(1) if t.dim() == 4 and t.is_contiguous() else t]
    return found


def _number(lr):
    """lr as a number, or lr itself if reading the number would wait for a GPU."""
    return lr.item() if isinstance(lr, torch.Tensor) and not lr.is_cuda else lr


def _rates(group, shape, window, device):
    """(rates, lr, momentum, weight decay, the gradient's factor) as arguments of the kernel. window: a convolution's (H, W), or None.

    The kernel multiplies lr by sqrt(max(1, R / C)): `ratio` is the wanted factor over the kernel's."""
    rows, columns = shape
    wanted = kernels = math.sqrt(max(1.0, rows / columns))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        wanted = 0.2 * math.sqrt(max(rows, columns))
    elif window is not None:
        wanted = math.sqrt(max(1.0, window[0] / window[1]))
    ratio = wanted / kernels
    lr, mu, decay = _number(group["lr"]), float(group["momentum"]), float(group["weight_decay"]) / ratio
    if not isinstance(lr, torch.Tensor):
        return None, lr * ratio, mu, decay, 1 - mu
    others = torch.full((2,), decay, dtype=torch.float64, device=device)
    others[0] = mu
    return torch.cat([lr.to(device, torch.float64).reshape(1) * ratio, others]), 0.0, mu, decay, 1 - mu


def _products(group, device):
    name = group["products"] or ("bf16" if device.type == "cuda" else "fp32")
    return PRODUCTS[name]


_LOADED = "ingot.optim.Muon, torch.optim.Muon, torch.optim.AdamW or KellerJordan/Muon"
# Options of other packages' optimizers that this optimizer does not have, or that have another meaning.
_FOREIGN_OPTIONS = ("wd", "mu", "algorithm", "adamw_betas", "adamw_eps", "adamw_lr", "adamw_wd", "update_buffer", "muon_beta2", "rms_scale", "cautious_wd",
                    "dampening", "momentum_decay", "max_iter", "tolerance_grad")
# A state dict with one of _TORCH_OPTIONS comes from an optimizer of torch.optim other than Muon. AdamW's groups have all of _TORCH_ADAMW.
_TORCH_OPTIONS = ("maximize", "foreach", "differentiable", "capturable", "fused", "amsgrad")
_TORCH_ADAMW = {"betas", "amsgrad"}


def _own_options(own, given):
    """The options of a group of a loaded dict under the names that they have in this class."""

    def refuse(found, why):
        raise ValueError(f"Muon: state dict: found {found}, {why}")

    foreign = [name for name in _FOREIGN_OPTIONS if name in given and name not in own]
    if foreign:
        refuse(f"option {', '.join(foreign)}", f"expected the options of {_LOADED}")
    of_torch = [name for name in _TORCH_OPTIONS if name in given and name not in own]
    if of_torch and (own["use_muon"] or not _TORCH_ADAMW <= given.keys()):
        refuse(f"option {', '.join(of_torch)} for a group with use_muon={own['use_muon']}",
               f"expected the options of {'ingot.optim.Muon, torch.optim.Muon or KellerJordan/Muon' if own['use_muon'] else 'torch.optim.AdamW'}")
    if given.get("use_muon", own["use_muon"]) != own["use_muon"]:
        refuse(f"use_muon={given['use_muon']}", f"expected the group's own, {own['use_muon']}")
    if own["use_muon"]:
        if "ns_steps" in given and "ns_coefficients" not in given:
            refuse("ns_steps without ns_coefficients", "expected a Muon whose momentum is a mean of gradients (momentum B + (1 - momentum) g) and not their sum")
        return given
    if "ns_coefficients" in given and "use_muon" not in given:
        refuse("ns_coefficients for a group with use_muon=False", "expected the options of torch.optim.AdamW")
    for name, expected in (("amsgrad", False), ("maximize", False), ("decoupled_weight_decay", True)):
        if given.get(name, expected) != expected:
            refuse(f"{name}={given[name]}", f"expected {expected}: the group is AdamW's")
    if "eps" in given and "adam_eps" not in given:
        given = {**given, "adam_eps": given["eps"], "eps": own["eps"]}
    return given


def _own_state(p, state, use_muon):
    """The state of one parameter in the form of step(); refuses the state of another package."""
    expected = {"momentum_buffer"} if use_muon else {"step", "exp_avg", "exp_avg_sq"}
    if state and set(state) != expected:
        raise ValueError(f"Muon: state dict: found {', '.join(map(str, state))} for a parameter of {tuple(p.shape)}, expected {', '.join(sorted(expected))}")
    for name, t in state.items():
        if name != "step" and (not isinstance(t, torch.Tensor) or t.shape != p.shape):
            raise ValueError(f"Muon: state dict: {name}: found {tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__}, expected {tuple(p.shape)}")
    if isinstance(state.get("step"), numbers.Real):  # a number in KellerJordan/Muon and in PyTorch before 1.12
        state = {**state, "step": torch.tensor(float(state["step"]), dtype=torch.float32)}
    return state


def _check_options(group):
    """Raises a ValueError for an option that the group's optimizer does not support."""

    def expect(ok, name, expected):
        if not ok:
            raise ValueError(f"Muon: {name}: found {group[name]!r}, expected {expected}")

    expect(isinstance(group["use_muon"], bool), "use_muon", "a bool")
    lr = group["lr"]
    expect((isinstance(lr, torch.Tensor) and lr.numel() == 1) or _at_least_0(lr), "lr", "0 or more, or a tensor of one element")
    expect(_at_least_0(group["weight_decay"]), "weight_decay", "0 or more")
    if not group["use_muon"]:
        expect(isinstance(group["betas"], (tuple, list)) and len(group["betas"]) == 2 and all(_at_least_0(b) and b < 1 for b in group["betas"]), "betas", "two numbers from 0 to below 1")
        expect(_at_least_0(group["adam_eps"]), "adam_eps", "0 or more")
        return
    expect(_at_least_0(group["momentum"]) and group["momentum"] < 1, "momentum", "a number from 0 to below 1")
    for name in ("nesterov", "row_normalise"):
        expect(isinstance(group[name], bool), name, "a bool")
    expect(group["eps"] == _EPS, "eps", f"{_EPS}, which the kernel adds to a matrix's norm (AdamW's is adam_eps)")
    expect(isinstance(group["ns_steps"], numbers.Integral) and 0 <= group["ns_steps"] < 100, "ns_steps", "an integer from 0 to 99")
    coefficients = group["ns_coefficients"]
    expect(isinstance(coefficients, (tuple, list)) and len(coefficients) == 3 and all(isinstance(c, numbers.Real) for c in coefficients), "ns_coefficients", "three numbers")
    expect(group["adjust_lr_fn"] in (None, "original", "match_rms_adamw"), "adjust_lr_fn", "'original' or 'match_rms_adamw'")
    expect(group["products"] in (None, *PRODUCTS), "products", f"None or one of {', '.join(PRODUCTS)}")


def _check_parameters(group):
    for p in group["params"] if group["use_muon"] else ():
        if type(p).__name__ == "DTensor":
            raise ValueError(f"Muon: found a DTensor of {tuple(p.shape)}, expected whole tensors: a matrix's factor needs all of it")
        if p.layout is not torch.strided or p.device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(f"Muon: found a parameter of layout {p.layout} on {p.device}, expected a dense one on cpu or cuda")
        if p.dim() not in (2, 3, 4) or p.dtype not in FLOATS:
            raise ValueError(f"Muon: found a parameter of shape {tuple(p.shape)} and {p.dtype}, expected a matrix, a bank of matrices (B, R, C) or a "
                             "convolution's weight (N, C, H, W) of float64, float32, bfloat16 or float16; give others in a group with use_muon=False")


def _at_least_0(value):
    return isinstance(value, numbers.Real) and value >= 0 and math.isfinite(value)
