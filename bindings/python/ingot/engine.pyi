# The types of engine.py. tests/test_types.py compares names, parameters and defaults with the classes.
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, overload
from typing_extensions import Self

__all__ = ["Answer", "Call", "GptOss", "Model"]

_Prompt = str | Sequence[Mapping[str, Any]] | Iterable[int]  # ids with raw=True

class Call:
    id: str
    name: str
    arguments: str
    channel: str
    def __init__(self, id: str, name: str, arguments: str, channel: str = "commentary") -> None: ...

class Answer:
    text: str
    thoughts: str
    messages: list[tuple[str, str, str]]
    ids: list[int]
    finish: str
    prompt_tokens: int
    reused_tokens: int
    prompt_seconds: float
    token_seconds: float
    logprobs: list[tuple[float, list[tuple[int, float]]]]
    drafted_tokens: int
    accepted_tokens: int
    calls: list[Call]
    @property
    def message(self) -> dict[str, Any]: ...
    @property
    def tokens_per_second(self) -> float: ...

class Model:
    device: str
    context: int
    vocab: int
    weight_bytes: int
    load_seconds: float
    harmony: bool
    efforts: tuple[str, ...]
    start: int | None
    note: str
    def __init__(self, path: str | os.PathLike[str], *, device: str = "auto", tokenizer: str | os.PathLike[str] | None = None,
                 chat_format: str | None = None, context: int = 0, quant: bool = False, dense: str | None = None,
                 draft: str | os.PathLike[str] = "none", draft_max: int = 7, draft_costs: Sequence[float] = (), draft_layers: Sequence[int] = (),
                 draft_window: int = 0, draft_dense: str | None = None, draft_exact: bool = False) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def prompt_ids(self, prompt: _Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None, tool_choice: str = "auto", reasoning: str = "medium",
                   system: str | None = None, date: str | None = None) -> list[int]: ...
    def parse(self, ids: Iterable[int], *, tools: Sequence[Mapping[str, Any]] | None = None) -> Answer: ...
    def generate(self, prompt: _Prompt, *, max_tokens: int = 200, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
                 seed: int = 1, stop: str | Sequence[str] | None = (), logprobs: int = -1, reasoning: str = "medium", system: str | None = None,
                 date: str | None = None, raw: bool = False, past_end: bool = False, on_text: Callable[[str, str], bool | None] | None = None,
                 tools: Sequence[Mapping[str, Any]] | None = None, tool_choice: str = "auto") -> Answer: ...
    @overload
    def stream(self, prompt: _Prompt, *, thoughts: Literal[False] = False, **options: Any) -> Generator[str, None, Answer]: ...
    @overload
    def stream(self, prompt: _Prompt, *, thoughts: Literal[True], **options: Any) -> Generator[tuple[str, str], None, Answer]: ...

GptOss = Model
