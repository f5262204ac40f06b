# The types of nn.py. tests/test_types.py compares names, parameters and defaults with the modules.
from collections.abc import Iterable
from typing import Any, overload
from typing_extensions import Self

import torch
from torch import Tensor, nn

__all__ = ["RMSNorm", "FusedMLP", "SwiGLU", "WideMLP", "LinearCrossEntropy", "FusedMLPSoftplus", "FusedMLPSoftplusWN", "FusedMLP5Softplus", "FusedMLP5SoftplusWN",
           "MegaGemmTriton", "MegaGemmRMSNorm", "FusedSwiGLU"]

_Device = torch.device | str | int | None
_Dtype = torch.dtype | None

class RMSNorm(nn.Module):
    normalized_shape: tuple[int, ...]
    eps: float | None
    elementwise_affine: bool
    unit_offset: bool
    weight: nn.Parameter | None
    def __init__(self, normalized_shape: int | Iterable[int], eps: float | None = None, elementwise_affine: bool = True, device: _Device = None,
                 dtype: _Dtype = None, *, unit_offset: bool = False) -> None: ...
    def reset_parameters(self) -> None: ...
    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

class FusedMLP(nn.Module):
    in_features: int
    hidden_features: int
    out_features: int
    num_layers: int
    layers: nn.ModuleList
    @property
    def bias(self) -> bool: ...
    @property
    def weight_norm(self) -> bool: ...
    @property
    def activate_last(self) -> bool: ...
    @property
    def recompute(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    def __init__(self, in_features: int, hidden_features: int, out_features: int, num_layers: int = 3, activation: str | nn.Module = "softplus",
                 bias: bool = True, weight_norm: bool = False, *, activate_last: bool = False, recompute: bool = False, device: _Device = None,
                 dtype: _Dtype = None) -> None: ...
    def reset_parameters(self) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
    def __call__(self, x: Tensor) -> Tensor: ...
    @classmethod
    def from_sequential(cls, model: nn.Sequential, **options: Any) -> Self: ...
    def to_sequential(self) -> nn.Sequential: ...

class FusedMLPSoftplus(FusedMLP):
    def __init__(self, in_features: int | None = None, hidden_features: int | None = None, out_features: int | None = None, *, D: int | None = None,
                 H: int | None = None, device: _Device = None, dtype: _Dtype = None) -> None: ...

class FusedMLPSoftplusWN(FusedMLP):
    def __init__(self, in_features: int | None = None, hidden_features: int | None = None, out_features: int | None = None, *, D: int | None = None,
                 H: int | None = None, device: _Device = None, dtype: _Dtype = None) -> None: ...

class FusedMLP5Softplus(FusedMLP):
    def __init__(self, in_features: int | None = None, hidden_features: int | None = None, out_features: int | None = None, *, D: int | None = None,
                 H: int | None = None, device: _Device = None, dtype: _Dtype = None) -> None: ...

class FusedMLP5SoftplusWN(FusedMLP):
    def __init__(self, in_features: int | None = None, hidden_features: int | None = None, out_features: int | None = None, *, D: int | None = None,
                 H: int | None = None, device: _Device = None, dtype: _Dtype = None) -> None: ...

class SwiGLU(nn.Module):
    order: str
    limit: float
    alpha: float
    up_offset: float
    activation: str
    w12: nn.Linear
    w3: nn.Linear
    def __init__(self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = False, *, order: str = "gate_first",
                 limit: float = 0.0, alpha: float = 1.0, up_offset: float = 0.0, activation: str = "silu", device: _Device = None,
                 dtype: _Dtype = None) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
    def __call__(self, x: Tensor) -> Tensor: ...

class WideMLP(nn.Module):
    activation: str
    recompute: bool
    w1: nn.Linear
    w2: nn.Linear
    def __init__(self, in_features: int, hidden_features: int, out_features: int | None = None, activation: str | nn.Module = "leaky_relu_squared",
                 bias: bool = False, *, recompute: bool = False, device: _Device = None, dtype: _Dtype = None) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
    def __call__(self, x: Tensor) -> Tensor: ...

class LinearCrossEntropy(nn.Linear):
    reduction: str
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    def __init__(self, in_features: int, num_classes: int, bias: bool = False, device: _Device = None, dtype: _Dtype = None, *, reduction: str = "mean",
                 ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float = 0.0, z_loss: float = 0.0) -> None: ...
    def forward(self, x: Tensor, target: Tensor) -> Tensor: ...  # type: ignore[override]
    def __call__(self, x: Tensor, target: Tensor) -> Tensor: ...
    def logits(self, x: Tensor) -> Tensor: ...

class MegaGemmTriton(SwiGLU):
    def __init__(self, d_model: int, multiple_of: int = 256, hidden_multiple: float = 1.6666666666666667, device: _Device = None,
                 dtype: _Dtype = None) -> None: ...

class FusedSwiGLU(nn.Module):
    Wf: nn.Parameter
    def __init__(self, in_features: int, hidden_dim: int, block: int = 64, device: _Device = None, dtype: _Dtype = None) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
    def __call__(self, x: Tensor) -> Tensor: ...

class MegaGemmRMSNorm(RMSNorm):
    def __init__(self, hidden_size: int, epsilon: float = 1e-5, device: _Device = None, dtype: _Dtype = None) -> None: ...
