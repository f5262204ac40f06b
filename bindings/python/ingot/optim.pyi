# The types of optim.py. tests/test_types.py compares names, parameters and defaults with the class.
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

__all__ = ["Muon"]

class Muon(torch.optim.Optimizer):
    def __init__(self, params: ParamsT, lr: float | Tensor = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
                 ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315), eps: float = 1e-7, ns_steps: int = 5,
                 adjust_lr_fn: str | None = None, *, row_normalise: bool = False, products: str | None = None, use_muon: bool = True,
                 betas: tuple[float, float] = (0.9, 0.95), adam_eps: float = 1e-8) -> None: ...
    def add_param_group(self, param_group: dict[str, Any]) -> None: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
