"""GPT-OSS for people who script: a checkpoint, an archive or a GGUF in, answers out, on a GPU where there is one that it runs on.

    model = ingot.engine.GptOss("gpt-oss-20b.ingot")
    print(model.generate("Why is the sky blue?", max_tokens=300).text)
    for piece in model.stream([{"role": "user", "content": "Hi."}]):
        print(piece, end="", flush=True)
"""
import dataclasses
import datetime
import queue
import threading

from . import _C

__all__ = ["Answer", "GptOss"]


@dataclasses.dataclass
class Answer:
    """What a model said. Times in seconds; prompt_tokens of which reused_tokens were known from the prompt before."""
    text: str  # of the final channel; with raw=True all of it
    thoughts: str  # of the analysis channel
    messages: list  # all of them, as (channel, recipient of a call or "", content)
    ids: list  # as drawn, without the one that ended them
    finish: str  # "stop", "length", "context" or "cancelled"; "stop" also where a stop string ended it
    prompt_tokens: int
    reused_tokens: int
    prompt_seconds: float
    token_seconds: float
    logprobs: list  # (of the token drawn, [(id, of it), ...]) for each id, where asked for

    @property
    def tokens_per_second(self):
        return len(self.ids) / self.token_seconds if self.token_seconds > 0 else 0.0


class _Stops:
    """Text up to the first of some strings. What may be the beginning of one is held back."""

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


class GptOss:
    """A model and one sequence of tokens, of which the next prompt's beginning is used again.

    path: a checkpoint's directory, an .ingot, a .gguf or an .iris file. tokenizer: a file, where it is not beside or inside the model.
    device: "auto" (a GPU where there is one with room), "cpu" or "cuda". context: longest sequence that will be needed; 0: the model's.
    Attributes: device ("cpu" or "cuda"), context, vocab, weight_bytes, load_seconds, harmony (whether it holds conversations), note (why no
    GPU was taken although there is one). One answer at a time: another thread's call is a RuntimeError. Errors are those of the package: ValueError for a wrong argument,
    NotImplementedError for what this build, machine or model cannot do, else RuntimeError, each one line.
    """

    def __init__(self, path, *, device="auto", tokenizer=None, context=0):
        self._engine = _C.Engine(str(path), str(tokenizer or ""), device, context)
        for name, value in self._engine.about().items():
            setattr(self, name, value)

    def encode(self, text):
        """The ids of a text, in which nothing is a control token."""
        return self._engine.encode(text)

    def decode(self, ids):
        return self._engine.decode(list(ids)).decode("utf-8", "replace")

    def generate(self, prompt, *, max_tokens=200, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, stop=(), logprobs=-1,
                 reasoning="medium", system=None, date=None, raw=False, past_end=False, on_text=None):
        """The Answer to `prompt`: a user's words, or messages of {"role": ..., "content": ...} with the roles system (or developer), user and
        assistant; with raw=True a text or a list of ids to go on with as it is.

        stop: strings, of which the first ends the text and is not part of it. logprobs: of each token and so many likeliest; -1: none.
        reasoning: low, medium or high. system: who the model is told to be. date: yyyy-mm-dd, "" for none; None: today.
        past_end (raw): go on over the ids that end a text. on_text(channel, text): called with each piece of text as it comes, channel
        "analysis", "commentary" or "final" ("" with raw); returning False ends the answer, and so does raising.
        """
        stops, said, shown = _Stops([stop] if isinstance(stop, str) else stop), [], "" if raw else "final"

        def hear(channel, text):
            if channel == shown:
                text = stops.push(text)
                said.append(text)
            go_on = on_text(channel, text) if on_text and text else None
            return False if go_on is False or stops.hit else None

        common = dict(tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, logprobs=logprobs, on_text=hear)
        if raw:
            ids = self._engine.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
            found = self._engine.go_on(prompt=ids, past_end=past_end, **common)
            found["messages"] = [("", "", found.pop("text"))]
        else:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            today = datetime.date.today().isoformat() if date is None else date
            found = self._engine.answer(conversation=[(str(t["role"]), str(t["content"])) for t in turns], identity=system or "",
                                        reasoning=reasoning, date=today, **common)
        if not stops.hit:
            rest = stops.rest()
            said.append(rest)
            if rest and on_text:
                on_text(shown, rest)
        thoughts = "".join(content for channel, _, content in found["messages"] if channel == "analysis")
        found["finish"] = "stop" if stops.hit else found["finish"]
        found.pop("stop_id")
        return Answer(text="".join(said), thoughts=thoughts, **found)

    def stream(self, prompt, *, thoughts=False, **options):
        """Yields the text of generate() piece by piece; with thoughts=True (channel, text) of every channel. Closing the iterator, as leaving
        a loop does, ends the answer; what the model raises is raised here."""
        pieces, closed, shown = queue.Queue(), threading.Event(), "" if options.get("raw") else "final"

        def hear(channel, text):
            pieces.put((channel, text))
            return not closed.is_set()

        def work():
            try:
                self.generate(prompt, on_text=hear, **options)
                pieces.put(None)
            except BaseException as e:  # the thread that reads raises it
                pieces.put(e)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                if thoughts:
                    yield piece
                elif piece[0] == shown:
                    yield piece[1]
        finally:
            closed.set()
            thread.join()
