"""Models for scripts: opens a checkpoint, an archive or a GGUF file of any supported family and answers prompts, on a GPU if a supported one is present.

    model = ingot.engine.Model("gpt-oss-20b.ingot")
    print(model.generate("Why is the sky blue?", max_tokens=300).text)
    for piece in model.stream([{"role": "user", "content": "Hi."}]):
        print(piece, end="", flush=True)
"""
import dataclasses
import datetime
import json
import math
import numbers
import operator
import os
import queue
import threading

from . import _C

__all__ = ["Answer", "Call", "GptOss", "Model"]

_SHOWN = ("final", "")  # channels whose text is the answer: "" is raw text, or text without a header


@dataclasses.dataclass
class Call:
    """A function that the model calls in an answer. The function need not be one of `tools`, and the arguments need not be valid."""
    id: str  # the model's own id of the call, or call_N, where N counts the calls of the conversation; a result is sent back under this id
    name: str
    arguments: str  # JSON text as the model wrote it
    channel: str = "commentary"


@dataclasses.dataclass
class Answer:
    """The answer of a model. Times are in seconds. reused_tokens of the prompt_tokens were already in the cache from the preceding prompt."""
    text: str  # text of the final channel, or all text where a model writes no headers; with raw=True all text
    thoughts: str  # text of the analysis channel
    messages: list  # all messages, as (channel, name of the called function or "", content)
    ids: list  # the sampled ids, without the id that ended the answer
    finish: str  # "stop", "length", "context" or "cancelled"; "stop" also where a stop string ended it
    prompt_tokens: int
    reused_tokens: int
    prompt_seconds: float
    token_seconds: float
    logprobs: list  # for each id (logprob of the sampled token, [(id, logprob), ...]), if requested
    drafted_tokens: int = 0  # tokens that were guessed, with `draft`
    accepted_tokens: int = 0  # drafted tokens that became tokens of the answer
    calls: list = dataclasses.field(default_factory=list)  # each Call, in the order of `messages`

    @property
    def message(self):
        """The answer as a message of the next prompt, in the form of OpenAI's chat completions."""
        said = _texts(self.messages, ("commentary",)) + self.text
        calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.calls]
        message = {"role": "assistant", "content": said or (None if calls else "")}
        return message | ({"reasoning_content": self.thoughts} if self.thoughts else {}) | ({"tool_calls": calls} if calls else {})

    @property
    def tokens_per_second(self):
        """Tokens per second of the answer without its first token, which follows from the prompt's logits; 0 for an answer of fewer than two tokens."""
        return max(0, len(self.ids) - 1) / self.token_seconds if self.token_seconds > 0 else 0.0


def _wrong(name, found, expected):
    return ValueError(f"engine: {name}: found {found!r}, expected {expected}")


def _integer(name, value, low, high):
    try:
        found = operator.index(value)
    except TypeError:
        raise _wrong(name, value, "an integer") from None
    if not low <= found <= high:
        raise _wrong(name, value, f"{low} to {high}")
    return found


def _bool(name, value):
    if not isinstance(value, bool):
        raise _wrong(name, value, "a bool")
    return value


def _number(name, value):
    if not isinstance(value, numbers.Real):
        raise _wrong(name, value, "a number")
    return float(value)


def _text(name, value):
    if not isinstance(value, str):
        raise _wrong(name, type(value).__name__, "text")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise _wrong(name, value[e.start], "text that UTF-8 can hold") from None
    return value


def _path(name, value):
    try:
        return os.fsdecode(value)
    except TypeError:
        raise _wrong(name, value, "a path") from None


def _ids(name, value):
    try:
        return [_integer(name, i, -(2**31), 2**31 - 1) for i in value]
    except TypeError:
        raise _wrong(name, type(value).__name__, "a list of ids") from None


def _list(name, value):
    if not isinstance(value, (list, tuple)):
        raise _wrong(name, value, "a list of numbers")
    return value


def _number_of_calls(messages):
    lists = [m.get("tool_calls") for m in messages if isinstance(m, dict)]
    return sum(len(calls) for calls in lists if isinstance(calls, (list, tuple)))


def _with_call_ids(messages):
    """The messages, with an id for each call that has none, and for each result that names only its function the id of that function's first call
    without a result."""
    out, waiting, count = [], {}, 0  # waiting: the name of the function by the id of the call
    for i, m in enumerate(messages):
        m = dict(m) if isinstance(m, dict) else m
        if isinstance(m, dict) and isinstance(m.get("tool_calls"), (list, tuple)):
            m["tool_calls"] = [c | {"id": c.get("id") or f"call_{count + n}"} if isinstance(c, dict) else c for n, c in enumerate(m["tool_calls"])]
            count += len(m["tool_calls"])
            waiting |= {c["id"]: c["function"].get("name") for c in m["tool_calls"]
                        if isinstance(c, dict) and isinstance(c["id"], str) and isinstance(c.get("function"), dict)}
        elif isinstance(m, dict) and m.get("role") == "tool":
            if m.get("name") is not None and m.get("tool_call_id") is None:
                m["tool_call_id"] = next((id_ for id_, name in waiting.items() if name == m["name"]), None)
                if m["tool_call_id"] is None:
                    raise _wrong(f"prompt[{i}].name", m["name"], "the function of a call before it that has no result yet")
            if isinstance(m.get("tool_call_id"), str):
                waiting.pop(m["tool_call_id"], None)
        out.append(m)
    return out


def _tool(tool):
    """A tool in the form of OpenAI's chat completions; a function's own object is accepted in its place."""
    if isinstance(tool, dict) and "function" not in tool and "name" in tool and tool.get("type", "function") == "function":
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return tool


def _request(prompt, tools, tool_choice):
    """The JSON text of a chat request, which the module reads as `ingot serve` does."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": _text("prompt", prompt)}]
    if not isinstance(prompt, (list, tuple)):
        raise _wrong("prompt", type(prompt).__name__, "text or a list of messages")
    if not isinstance(tools, (list, tuple, type(None))):
        raise _wrong("tools", type(tools).__name__, "a list of functions or None")
    if tool_choice not in ("auto", "none"):
        raise _wrong("tool_choice", tool_choice, "'auto' or 'none'")
    text = {}
    for name, value in (("messages", _with_call_ids(prompt)), ("tools", [_tool(t) for t in tools or ()])):
        try:
            text[name] = json.dumps(value, ensure_ascii=False, allow_nan=False)
            text[name].encode()
        except UnicodeEncodeError as e:
            raise _wrong("prompt" if name == "messages" else name, e.object[e.start], "text that UTF-8 can hold") from None
        except (TypeError, ValueError, RecursionError) as e:
            raise ValueError(f"engine: {'prompt' if name == 'messages' else name}: found a value that JSON cannot hold ({e}), expected dicts, lists, texts and numbers") from None
    return f'{{"messages": {text["messages"]}, "tools": {text["tools"]}, "tool_choice": "{tool_choice}"}}'


def _with_calls(found, prompt):
    """The module's report of an answer, with each call as a Call."""
    before = _number_of_calls(prompt) if isinstance(prompt, (list, tuple)) else 0
    found["calls"] = [Call(id_ or f"call_{before + n}", name, arguments, channel) for n, (id_, name, arguments, channel) in enumerate(found["calls"])]
    return found


def _texts(messages, channels):
    return "".join(content for channel, name, content in messages if channel in channels and not name)


def _date(value):
    if value is None or value == "":
        return datetime.date.today().isoformat() if value is None else ""
    try:
        return datetime.datetime.strptime(value, "%Y-%m-%d").date().isoformat()
    except (TypeError, ValueError):
        raise _wrong("date", value, "one like '2026-01-31', '' or None") from None


class _Stops:
    """Passes text on up to the first of some strings. Text that may be the beginning of such a string is held back."""

    def __init__(self, stops):
        self.stops, self.held, self.hit = [s for s in stops if s], "", False

    def push(self, text):
        self.held += text
        found = [at for at in (self.held.find(s) for s in self.stops) if at >= 0]
        if found:
            out, self.held, self.hit = self.held[:min(found)], "", True
            return out
        keep = max((n for s in self.stops for n in range(1, min(len(s), len(self.held) + 1)) if self.held.endswith(s[:n])), default=0)
        out, self.held = self.held[:len(self.held) - keep], self.held[len(self.held) - keep:]
        return out

    def rest(self):
        out, self.held = self.held, ""
        return out


def _one_of(names):
    quoted = [repr(name) for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


class _Closed:
    """Takes the place of the engine of a closed model."""

    def __getattr__(self, name):
        raise ValueError("engine: found a model that was closed, expected an open one")


class Model:
    """A model and one sequence of tokens. Tokens that the sequence shares with the beginning of the next prompt are reused.

    path: a checkpoint's directory, an .ingot, a .gguf or an .iris file, or a run of `ingot train`, which only continues texts (raw=True). tokenizer: a
    file, if the tokenizer is neither beside nor inside the model. chat_format: a name of docs/models.md, in place of the format that the model's template
    indicates.
    device: "auto" (a GPU if one has enough memory), "cpu" or "cuda". context: longest sequence in tokens; 0: the model's.
    dense: the format in memory of the matrices of attention, dense MLPs and the head of a checkpoint or a GGUF file, "bf16", "fp8" or "mxfp4"; None: as
    stored, and bf16 for the blocks of a GGUF file.
    quant: the inputs of the experts are rounded to e4m3 times a power of two per 32 numbers, as with `ingot --quant`.
    draft: "lookup" guesses the next tokens from earlier places of the same text, at most draft_max (1 to 7) at a time. On a CPU no answer changes. On a
    GPU an answer may differ where two tokens are almost equally likely. With draft_exact every token is computed by the steps that check guesses, so that
    the answer does not depend on the guesses; tokens without a guess then take longer. draft_costs: relative times of steps of 1, 2, ... tokens, such as
    (100, 110, 120), which determine how many guesses a step checks; (): the times are measured before the first answer.
    With the directory of a published EAGLE-3 head in place of "lookup", the head also makes guesses. draft_layers: the layers behind which the head reads
    the model's hidden states, in place of those that its config.json names; draft_window: the latest tokens that the head attends to, 0: all; draft_dense:
    the format of the head's matrices in memory, "bf16", "fp8" or "mxfp4", None: as stored.
    Attributes: device ("cpu" or "cuda"), context, vocab, weight_bytes, load_seconds, harmony (whether the model has a chat format), efforts (how long its
    chat format can ask the model to think, from least to most), start (the id with which every text of the model begins, or None), note (why an existing
    GPU is not used, or how this run differs from the default). Only one answer at a time: a call from another thread is a RuntimeError.
    Errors: ValueError for a wrong argument, FileNotFoundError for a missing file, NotImplementedError for a function that this build, machine or model lacks, otherwise RuntimeError; each
    message is one line.
    """

    def __init__(self, path, *, device="auto", tokenizer=None, chat_format=None, context=0, quant=False, dense=None, draft="none", draft_max=7, draft_costs=(),
                 draft_layers=(), draft_window=0, draft_dense=None, draft_exact=False):
        path, tokenizer = _path("path", path), "" if tokenizer is None else _path("tokenizer", tokenizer)
        if device not in ("auto", "cpu", "cuda"):
            raise _wrong("device", device, "'auto', 'cpu' or 'cuda'")
        if chat_format is not None and chat_format not in _C.chat_formats():
            raise _wrong("chat_format", chat_format, f"None, {_one_of(_C.chat_formats())}")
        if draft not in ("none", "lookup") and not (isinstance(draft, (str, os.PathLike)) and os.path.isdir(draft)):
            raise _wrong("draft", draft, "'none', 'lookup' or the directory of a draft head")
        for name, value in (("dense", dense), ("draft_dense", draft_dense)):
            if value not in (None, "bf16", "fp8", "mxfp4"):
                raise _wrong(name, value, "None, 'bf16', 'fp8' or 'mxfp4'")
        costs = [_number("draft_costs", n) for n in _list("draft_costs", draft_costs)]
        if costs and (len(costs) < 2 or not all(0 < n < math.inf for n in costs)):
            raise _wrong("draft_costs", draft_costs, "positive times of steps of 1, 2 and more tokens, such as (100, 110, 120)")
        layers = [_integer("draft_layers", n, 0, 2**31 - 1) for n in _list("draft_layers", draft_layers)]
        _bool("draft_exact", draft_exact)
        if draft in ("none", "lookup"):
            for name, value, without in (("draft_layers", draft_layers, ()), ("draft_window", draft_window, 0), ("draft_dense", draft_dense, None)):
                if value:
                    raise _wrong(name, value, f"{without} without a draft head")
        if draft == "none":
            for name, value, without in (("draft_costs", draft_costs, ()), ("draft_exact", draft_exact, False)):
                if value:
                    raise _wrong(name, value, f"{without} without drafts")
        self._engine = _C.Engine(path, tokenizer, chat_format or "", device, _integer("context", context, 0, 2**31 - 1), _bool("quant", quant), dense or "", str(draft),
                                 _integer("draft_max", draft_max, 1, 7), costs, layers, _integer("draft_window", draft_window, 0, 2**31 - 1),
                                 draft_dense or "", draft_exact)
        for name, value in self._engine.about().items():
            setattr(self, name, value)
        self._path = path

    def close(self):
        """Frees the model's memory, as leaving a `with` block does. Further calls of a closed model are a ValueError."""
        self._engine = _Closed()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __repr__(self):
        return f"{type(self).__name__}({self._path!r}, device={self.device!r}, context={self.context})"

    def encode(self, text):
        """The ids of a text. No part of the text is read as a control token."""
        return self._engine.encode(_text("text", text))

    def decode(self, ids):
        """The text of some ids. Bytes that are no UTF-8 become U+FFFD; an id outside the vocabulary is a ValueError."""
        return self._engine.decode(_ids("ids", ids)).decode("utf-8", "replace")

    def _effort(self, reasoning):
        if reasoning not in _C.chat_efforts():
            raise _wrong("reasoning", reasoning, _one_of(self.efforts or _C.chat_efforts()))
        return reasoning

    def _asked(self, prompt, tools, tool_choice, reasoning, system, date):
        return dict(request=_request(prompt, tools, tool_choice), identity=_text("system", system or ""), reasoning=self._effort(reasoning), date=_date(date))

    def prompt_ids(self, prompt, *, tools=None, tool_choice="auto", reasoning="medium", system=None, date=None):
        """The ids that generate() computes before an answer to the same arguments."""
        return self._engine.prompt(**self._asked(prompt, tools, tool_choice, reasoning, system, date))

    def parse(self, ids, *, tools=None):
        """The Answer that the ids form: text, thoughts, messages and calls. For callers who sample with raw=True after the ids of prompt_ids(). `finish`
        is "stop" if an id ends the answer, and later ids are ignored; otherwise "length"."""
        found = _with_calls(self._engine.parse(_ids("ids", ids), _request("", tools, "auto")), "")
        found.pop("stop_id")
        return Answer(text=_texts(found["messages"], _SHOWN), thoughts=_texts(found["messages"], ("analysis",)), **found)

    def generate(self, prompt, *, max_tokens=200, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, stop=(), logprobs=-1,
                 reasoning="medium", system=None, date=None, raw=False, past_end=False, on_text=None, tools=None, tool_choice="auto"):
        """Returns the Answer to `prompt`: a user's words, or messages of {"role": ..., "content": ...} with the roles system (or developer), user,
        assistant and tool; with raw=True a text (behind `start`) or a list of ids, which the answer continues.

        Messages and tools have the form of OpenAI's chat completions. tools: the functions that the model may call, {"type": "function", "function":
        {"name": ..., "description": ..., "parameters": a JSON schema}} or only the inner object; tool_choice="none" leaves them out. Answer.calls are the
        calls. A message of the assistant may have tool_calls, {"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON text}}, with or
        without content, and reasoning_content; Answer.message is such a message. A message with the role tool is the result of an earlier call, which
        tool_call_id names; with only `name` it is the result of the first call of this function that has no result yet. A chat format without functions
        refuses tools, calls and results. The arguments are not forced to be valid under the schema, even if a function has "strict".

        stop: strings (or one string, or None); the first stop string that occurs ends the text and is not part of the text. logprobs: for each token
        its own logprob and the logprobs of this number of likeliest tokens; -1: none. reasoning: one of `efforts`; of the other known efforts (none, minimal,
        low, medium, high, xhigh, max) the nearest of `efforts` is used, and a model without efforts ignores all. system: the identity that the model
        should state. date: yyyy-mm-dd, "" for none; None: today. past_end (raw): continue after ids that end a text. on_text(channel, text):
        called with each piece of text as soon as the piece is complete, with channel "analysis", "commentary" or "final" ("" with raw, and for the text
        of a model that writes no headers); thoughts are analysis, the arguments of a call commentary. The answer ends if on_text returns False or raises.
        """
        stop = () if stop is None else [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, (list, tuple)):
            raise _wrong("stop", stop, "text or a list of texts")
        if on_text is not None and not callable(on_text):
            raise _wrong("on_text", on_text, "a function or None")
        for name, value in (("raw", raw), ("past_end", past_end)):
            _bool(name, value)
        stops = _Stops([_text("stop", s) for s in stop])
        said, channels = [], []  # the text that is shown, with its channels

        def hear(channel, text):
            if channel in _SHOWN:
                channels[:] = [channel]
                text = stops.push(text)
                said.append(text)
            go_on = on_text(channel, text) if on_text and text else None
            return False if go_on is False or stops.hit else None

        common = dict(tokens=_integer("max_tokens", max_tokens, 0, 2**62), temperature=_number("temperature", temperature),
                      top_k=_integer("top_k", top_k, 0, 2**62), top_p=_number("top_p", top_p), min_p=_number("min_p", min_p),
                      seed=_integer("seed", seed, 0, 2**64 - 1), logprobs=_integer("logprobs", logprobs, -1, 2**62), on_text=hear)
        if raw:
            self._effort(reasoning)
            if tools:
                raise _wrong("tools", tools, "None with raw=True")
            ids = [*([] if self.start is None else [self.start]), *self.encode(prompt)] if isinstance(prompt, str) else _ids("prompt", prompt)
            if not ids:
                raise _wrong("prompt", prompt, "at least one token")
            found = self._engine.go_on(prompt=ids, past_end=past_end, **common)
            found["messages"] = [("", "", found.pop("text"))]
        else:
            found = _with_calls(self._engine.answer(**self._asked(prompt, tools, tool_choice, reasoning, system, date), **common), prompt)
        if not stops.hit:
            rest = stops.rest()
            said.append(rest)
            if rest and on_text:
                on_text(*channels, rest)
        found["finish"] = "stop" if stops.hit else found["finish"]
        found.pop("stop_id")
        return Answer(text="".join(said), thoughts=_texts(found["messages"], ("analysis",)), **found)

    def stream(self, prompt, *, thoughts=False, **options):
        """Yields the text of generate() piece by piece; with thoughts=True yields (channel, text) of every channel. Closing the iterator, for example by
        leaving a loop, ends the answer. The value of a finished iterator (StopIteration.value, or that of `yield from`) is the Answer, with its calls.
        Exceptions of the model are raised here."""
        _bool("thoughts", thoughts)
        pieces, closed = queue.Queue(), threading.Event()

        def hear(channel, text):
            pieces.put((channel, text))
            return not closed.is_set()

        def work():
            try:
                pieces.put(self.generate(prompt, on_text=hear, **options))
            except BaseException as e:  # the reading thread raises the exception
                pieces.put(e)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while not isinstance(piece := pieces.get(), Answer):
                if isinstance(piece, BaseException):
                    raise piece
                if thoughts:
                    yield piece
                elif piece[0] in _SHOWN:
                    yield piece[1]
            return piece
        finally:
            closed.set()
            thread.join()


GptOss = Model  # the earlier name
