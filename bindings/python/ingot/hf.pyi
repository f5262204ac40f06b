# The types of hf.py. tests/test_types.py compares names, parameters and defaults with the functions.
from collections import Counter
from typing import Any
from typing_extensions import Self

import torch

__all__ = ["patch", "Report", "register_attention", "register_experts", "attention_fallbacks", "experts_fallbacks"]

attention_fallbacks: Counter[str]
experts_fallbacks: Counter[str]

def patch(model: torch.nn.Module, *, norms: bool = True, mlps: bool = True, rope: bool = True, loss: bool = False) -> Report: ...
def register_attention() -> None: ...
def register_experts() -> None: ...

class Report:
    replaced: list[tuple[str, str, tuple[torch.dtype, ...], float]]
    skipped: list[tuple[str, str]]
    already: list[str]
    def undo(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...
