#!/usr/bin/env python3
"""Calls the package `ingot` with random shapes, types, strides and options and compares every result and gradient with fp64 PyTorch.

    python3 tools/fuzz_ops.py --seconds 60                        on the CPU
    python3 tools/fuzz_ops.py --seconds 60 --device cuda --ops attention,muon
    python3 tools/fuzz_ops.py --device cuda --seed 7 --case 123   repeats one case, as in the last line of a failure's report

Case k of a seed is a function of k and the seed (and of --ops). A case compares the numbers with their bounds (tools/fuzz_cases.py). A case also
checks that a second call gives the same bits; that operands and the memory around them stay unchanged; that nothing is written outside the memory of
the results, which is NaN before; and that PyTorch's modes give the result of a plain call: compiled, captured in a CUDA graph, on another stream,
checkpointed, through torch.func, without gradients. Every seventh case breaks an argument: then one line must name the argument, the value found and
the value expected. Batches of cases run in processes of their own: a crash, a hang or an unusable GPU is a failure of the case.
"""
import argparse
import collections
import json
import math
import os
import pathlib
import queue
import random
import subprocess
import sys
import threading
import time
import traceback

HERE = pathlib.Path(__file__).resolve()
FACTOR = 4  # allowed multiple of the largest distance among the perturbed runs
RUNS = 3
BATCH = 200  # cases per process
SILENCE = 90  # seconds after which a case counts as hanging, on a machine with a CPU for each running process


def numbers_of(text):
    """"3,5-8": 3, 5, 6, 7 and 8."""
    ends = [part.split("-") for part in text.split(",")]
    return [n for e in ends for n in range(int(e[0]), int(e[-1]) + 1)]


# --- one process: cases ------------------------------------------------------------------------------------------------


def worker(options):
    import torch

    sys.path.insert(0, str(HERE.parent))
    import fuzz_cases

    torch.set_num_threads(2)
    ops = options.ops.split(",") if options.ops else list(fuzz_cases.OPS)
    for index in numbers_of(options.case):
        print(json.dumps({"begin": index}), flush=True)
        result = {"case": index, "op": "?", "text": ""}
        began = time.monotonic()
        try:
            d = fuzz_cases.Draw(options.seed, index, options.device)
            name = d.r.choice(ops)
            result["op"] = name
            case = fuzz_cases.OPS[name](d)
            result["text"] = describe(case)
            outcome = broken(case, d) if d.r.random() < 1 / 7 and name != "muon" else whole(case, d)
            result.update(outcome)
        except Failure as e:
            result.update(status="FAILED", message=str(e))
        except Exception as e:
            result.update(status="FAILED", message=f"harness: {type(e).__name__}: {e}", trace=traceback.format_exc()[-1500:])
        result["seconds"] = round(time.monotonic() - began, 2)
        dead = False
        if options.device == "cuda":
            try:
                torch.cuda.synchronize()
            except Exception as e:
                result.update(status="FAILED", message=f"{result.get('message', '')}; the GPU is unusable afterwards: {e}".replace("\n", " "))
                dead = True
        print(json.dumps(result), flush=True)
        if dead:
            os._exit(3)


class Failure(Exception):
    pass


def describe(case):
    import fuzz_cases

    parts = [f"{k}={fuzz_cases.text_of(t)}" for k, t in case.inputs.items()]
    return ", ".join([case.op, *parts, *case.text, *([f"autocast={case.autocast}"] if case.autocast else []), *([case.planted] if case.planted else [])])


REFUSALS = (ValueError, TypeError, NotImplementedError)


def refusal(e):
    """The fault in a refusal, or None."""
    text = str(e)
    if not isinstance(e, REFUSALS):
        return f"{type(e).__name__} in place of a refusal: {text[:300]}"
    if "\n" in text.strip() or "found" not in text or "expected" not in text or ":" not in text:
        return f"a refusal that does not name op, argument, found and expected on one line: {type(e).__name__}: {text[:300]}"
    return None


def bits(t):
    import torch

    if t is None:
        return None
    return torch.empty(t.numel(), dtype=t.dtype, device=t.device).copy_(t.detach().reshape(-1)).view(torch.uint8)


def memory_of(t):
    """The whole storage of `t` as bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


class Guards:
    """While open, memory that Python allocates for results lies between guards and is NaN until written."""

    ROOM, MARK = 512, 0xA5

    def __init__(self, torch):
        self.torch, self.made, self.saved = torch, [], []

    def make(self, shape, dtype, device, zero):
        torch, room = self.torch, self.ROOM
        n = math.prod(shape) * dtype.itemsize
        flat = self.own_full((n + 2 * room,), self.MARK, dtype=torch.uint8, device=device)
        flat[room : room + n] = 0 if zero else 0xFF
        self.made.append((flat, n))
        return self.own_empty(0, dtype=dtype, device=device).set_(flat.untyped_storage(), room // dtype.itemsize, tuple(shape))

    def __enter__(self):
        import ingot

        torch, guards = self.torch, self
        self.own_full, self.own_empty = torch.full, torch.empty
        own_tensor_empty, own_tensor_zeros = torch.Tensor.new_empty, torch.Tensor.new_zeros

        def usable(dtype):
            return dtype.is_floating_point or dtype is torch.uint8

        def shape_of(size):
            return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size

        class Torch:  # stands in for torch in a module of the package
            def __getattr__(self, name):
                return getattr(torch, name)

            @staticmethod
            def empty_like(t, memory_format=None):
                if memory_format is None and not t.is_contiguous():
                    return torch.empty_like(t)
                return guards.make(t.shape, t.dtype, t.device, False)

            @staticmethod
            def empty(*size, dtype=torch.float32, device="cpu"):
                return guards.make(shape_of(size), dtype, device, False) if usable(dtype) else torch.empty(*size, dtype=dtype, device=device)

            @staticmethod
            def zeros(*size, dtype=torch.float32, device="cpu"):
                return guards.make(shape_of(size), dtype, device, True) if usable(dtype) else torch.zeros(*size, dtype=dtype, device=device)

        for name in ("_attention", "_declare", "_gates", "_loss", "_mlp", "_op", "_rms_norm", "_rope", "_wide_mlp"):
            module = getattr(ingot, name, None) or sys.modules[f"ingot.{name}"]
            self.saved.append((module, "torch", module.torch))
            module.torch = Torch()

        def new(zero, own):
            def make(t, *size, dtype=None, device=None):
                dtype = t.dtype if dtype is None else dtype
                return guards.make(shape_of(size), dtype, device or t.device, zero) if usable(dtype) else own(t, *size, dtype=dtype)

            return make

        torch.Tensor.new_empty, torch.Tensor.new_zeros = new(False, own_tensor_empty), new(True, own_tensor_zeros)
        ingot._C.use_ways(False, True)  # so that C++ allocates through Python
        return self

    def __exit__(self, *error):
        import ingot

        for module, name, value in self.saved:
            setattr(module, name, value)
        del self.torch.Tensor.new_empty, self.torch.Tensor.new_zeros
        ingot._C.use_ways(True, True)

    def check(self):
        for flat, n in self.made:
            if not ((flat[: self.ROOM] == self.MARK).all() and (flat[self.ROOM + n :] == self.MARK).all()):
                raise Failure(f"written outside a result of {n} bytes")


def leaves_of(case, wanted):
    return {k: t.detach().requires_grad_(k in wanted) for k, t in case.inputs.items()}


def tuple_of(y):
    return y if isinstance(y, (tuple, list)) else (y,)


def differentiate(torch, outputs, leaves, upstream):
    """Gradients by name, of the leaves that require a gradient."""
    pairs = [(y, u) for y, u in zip(outputs, upstream) if u is not None and y.requires_grad]
    names = [k for k, t in leaves.items() if t.requires_grad]
    if not pairs or not names:
        return {}
    found = torch.autograd.grad([y for y, _ in pairs], [leaves[k] for k in names], [u for _, u in pairs], allow_unused=True)
    return dict(zip(names, found))


def oracle(torch, case, wanted, upstream, runs, seed):
    """[(outputs, gradients)] of the exact run and of the perturbed runs."""
    import fuzz_numbers

    found = []
    for run in range(runs + 1):
        numbers = fuzz_numbers.Numbers(case.dtype if run else None, seed + 7919 * run, case.autocast)
        wide = {k: t.detach().double().requires_grad_(k in wanted) for k, t in case.inputs.items()}
        outputs = tuple_of(case.reference(numbers, **wide))
        gradients = differentiate(torch, outputs, wide, [None if u is None else u.double() for u in upstream])
        if run:  # a gradient is rounded to its operand's type and to the type of the stages
            gradients = {k: None if g is None else rounded(case, numbers, k, g) for k, g in gradients.items()}
        found.append(([y.detach() for y in outputs], gradients))
    return found


def rounded(case, numbers, k, g):
    """Rounds a gradient: to the type of the stages (twice if its factor comes later), then to its operand's type."""
    import fuzz_numbers

    own = case.inputs[k].dtype
    for dtype in ([case.dtype] * 2 if own is not case.dtype and case.autocast else [own]) + [own]:
        g = numbers.move(g, fuzz_numbers.UNIT[dtype], dtype)
    return g


def compare(torch, case, name, found, exact, moved):
    """(the error of `found` as a multiple of the allowed error, its position)."""
    import fuzz_numbers

    if found.numel() == 0:
        return 0, ""
    f, e = found.detach().double(), exact
    finite = torch.isfinite(e)
    for m in moved:
        finite &= torch.isfinite(m)
    rows = lambda t: t.reshape(-1, t.shape[-1]) if t.dim() else t.reshape(1, 1)
    f, e, finite = rows(f), rows(e), rows(finite)
    lost = finite & ~torch.isfinite(f)
    if lost.any():
        i, j = lost.nonzero()[0].tolist()
        return math.inf, f"{lost.sum().item()} of {lost.numel()} are not finite, first [{i}, {j}]: found {f[i, j].item()}, expected {e[i, j].item():.6g}"
    if not case.planted or name in case.outputs_named:
        never = ~rows(torch.isfinite(exact))
        for m in moved:
            never &= ~torch.isfinite(rows(m))
        kept = never & torch.isfinite(f) & (not case.masked and "inf" not in case.planted)  # the limit of a product with 0 may be 0, so a finite value is allowed
        if kept.any():
            i, j = kept.nonzero()[0].tolist()
            return math.inf, f"{kept.sum().item()} of {kept.numel()} are finite, first [{i}, {j}]: found {f[i, j].item():.6g}, expected {e[i, j].item()}"
    zero = torch.zeros((), dtype=torch.float64, device=f.device)
    size = torch.where(finite, e.abs(), zero).amax(-1, keepdim=True)
    distance = torch.stack([torch.where(finite, (rows(m) - e).abs(), zero).amax(-1, keepdim=True) for m in moved]).amax(0)
    if case.jumps or min(e.shape[-1], e.shape[0]) < 8:  # too few numbers per row for statistics, or a rounding may change a whole gradient
        distance = torch.maximum(distance, size * (distance / (size + 1e-300)).amax().clamp(max=1))
    dtype = found.dtype
    least = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-118, torch.float32: 2.0**-118, torch.float64: 2.0**-1000}[dtype]
    least = max(least, 2.0**-24 if case.dtype is torch.float16 else 0.0)
    allowed = FACTOR * (distance + fuzz_numbers.UNIT[dtype] * size) + 4 * least + 1e-300
    ratio = torch.where(finite, (f - e).abs(), zero) / allowed
    worst = ratio.max().item()
    i, j = divmod(ratio.argmax().item(), ratio.shape[1])
    return worst, f"{(ratio > 1).sum().item()} of {ratio.numel()} off, worst [{i}, {j}]: found {f[i, j].item():.8g}, expected {e[i, j].item():.8g} within {allowed[i, 0].item():.2g}"


def same(torch, a, b):
    return (a is None) == (b is None) and (a is None or torch.equal(bits(a), bits(b)))


def draw_mode(case, d):
    """The mode in which a case is called, and the operands that require gradients."""
    r = d.r
    names = [k for k in case.inputs if k not in case.frozen]
    mode = r.choice(case.modes)
    if mode in ("stream", "graph") and not d.gpu:
        mode = "eager"
    if mode == "compile" and r.random() < 0.85:
        mode = "eager"
    if case.autocast and mode in ("func", "graph", "compile"):
        mode = "eager"
    wanted = set(names) if r.random() < 0.4 else {r.choice(names)} if names and r.random() < 0.5 else {k for k in names if r.random() < 0.6}
    if mode in ("no_grad", "inference"):
        wanted = set()
    if mode in ("func", "checkpoint") and not wanted:
        mode = "eager"
    case.text.append(f"mode={mode}, gradients of {sorted(wanted)}")
    return mode, wanted


def check_memory(case, operands, upstreams, gradients):
    """Checks (tensor, memory before the call): operands and upstream gradients are unchanged; gradients have their operands' shapes and types."""
    import torch

    for t, was in operands:
        if not torch.equal(memory_of(t), was):
            raise Failure(f"an operand was written: {describe(case)}")
    for u, was in upstreams:
        if u is not None and not torch.equal(memory_of(u), was):
            raise Failure("an upstream gradient was written")
    for k, g in gradients.items():
        t = case.inputs[k]
        if g is not None and (g.shape != t.shape or g.dtype is not t.dtype):
            raise Failure(f"gradient of {k}: found {g.dtype} of {tuple(g.shape)}, expected {t.dtype} of {tuple(t.shape)}")


def check_numbers(torch, case, drawn, outputs, gradients, note):
    """Compares outputs and gradients with the oracle's; returns the worst ratio to the allowed error. Before a failure is reported, more runs are made."""
    wanted, upstream, seed = drawn
    for runs in (RUNS, 4 * RUNS):
        runs_found = oracle(torch, case, wanted, upstream, runs, seed)
        (e_outputs, e_gradients), moved = runs_found[0], runs_found[1:]
        problems, worst = [], 0.0
        checks = [(f"output {i}", y, e_outputs[i], [m[0][i] for m in moved]) for i, y in enumerate(outputs)]
        for k, g in gradients.items():
            e = e_gradients.get(k)
            if (g is None or e is None) and not (g is None and e is None):
                have = g if g is not None else e
                if case.planted:
                    have = torch.nan_to_num(have, 0.0, 0.0, 0.0)  # 0 times a value that is not finite
                if have.numel() and have.abs().max().item() != 0:
                    problems.append(f"gradient of {k}: found {'none' if g is None else 'one'}, expected {'none' if e is None else 'one'}")
            elif g is not None:
                checks.append((f"gradient of {k}", g, e, [m[1][k] for m in moved]))
        if case.planted and (case.masked or case.jumps):  # 0 times a value that is not finite reaches all rows of a tile; a clamp's slope at a NaN is not defined
            checks = [c for c in checks if c[0].startswith("output")]
        for name, found, e, ms in checks:
            if tuple(found.shape) != tuple(e.shape):
                problems.append(f"{name}: found shape {tuple(found.shape)}, expected {tuple(e.shape)}")
                continue
            ratio, where = compare(torch, case, name, found, e, ms)
            worst = max(worst, ratio)
            if not ratio <= 1:
                problems.append(f"{name}: {ratio:.3g} times what it may be off: {where}")
        if not problems:
            break
    if problems:
        raise Failure("; ".join(problems[:4]) + f" [{note()}]")
    return worst


def check_mode(torch, case, again, outputs, gradients, when, note):
    """Compares the bits of a second call, `again`; None if there was no second call."""
    if again is not None:
        a_outputs, a_gradients, exact = again
        for i, (a, b) in enumerate(zip(a_outputs, outputs)):
            if exact and not same(torch, a, b):
                raise Failure(f"output {i} differs {when}: {difference(torch, a, b)} [{note()}]")
        for k, b in gradients.items():
            a = a_gradients.get(k)
            if a is None and b is not None and b.numel() and b.abs().max() == 0:
                continue
            if exact and case.deterministic and not same(torch, a, b):
                raise Failure(f"gradient of {k} differs {when}: {difference(torch, a, b)} [{note()}]")


def whole(case, d):
    """Checks a case with valid arguments: numbers, bits, memory."""
    import torch

    r = d.r
    mode, wanted = draw_mode(case, d)
    watched = [*case.inputs.values(), *case.others]
    kept = [memory_of(t).clone() for t in watched]
    forward = case.call
    if case.autocast:
        forward = lambda **inputs: autocasted(torch, d, case, inputs)

    def refuse(e):
        wrong = refusal(e)
        if wrong:
            raise Failure(wrong + (f" [{describe(case)}]")) from e
        return {"status": "refused", "message": str(e)[:200], "text": describe(case)}

    # A plain eager call first, for shapes and upstream gradients.
    guards = Guards(torch)
    try:
        with guards:
            leaves = leaves_of(case, wanted)
            outputs = tuple_of(forward(**leaves))
            upstream = [None] * len(outputs)
            layout = d.gpu or "module=True" not in case.text  # for nn.Linear of 16 bits on a CPU see fuzz_cases.gated_linear
            if wanted:
                count = len(outputs) if case.only_outputs is None else case.only_outputs
                upstream = [d.tensor(tuple(y.shape), y.dtype, layout=layout) if i < count and (count == 1 or r.random() < 0.75) else None for i, y in enumerate(outputs)]
            own_upstream = [None if u is None else memory_of(u).clone() for u in upstream]
            gradients = differentiate(torch, outputs, leaves, upstream)
    except REFUSALS + (RuntimeError,) as e:
        return refuse(e)
    if d.gpu:
        torch.cuda.synchronize()
    guards.check()
    outputs = [y.detach() for y in outputs]
    check_memory(case, zip(watched, kept), zip(upstream, own_upstream), gradients)

    # Numbers.
    case.outputs_named = [f"output {i}" for i in range(len(outputs))]
    seed = r.randrange(2**40)
    note = lambda: f"mode={mode}, gradients of {sorted(wanted)}, upstream {[None if u is None else text(u) for u in upstream]}"
    worst = check_numbers(torch, case, (wanted, upstream, seed), outputs, gradients, note)

    # The same call again, in the mode.
    check_mode(torch, case, in_mode(torch, d, case, forward, mode, wanted, upstream, outputs, gradients), outputs, gradients, f"in mode {mode} or a second call", note)
    return {"status": "ok", "worst": round(worst, 3), "mode": mode}


def text(t):
    import fuzz_cases

    return fuzz_cases.text_of(t)


def difference(torch, a, b):
    if a is None or b is None:
        return f"found {a if a is None else 'one'} and {b if b is None else 'one'}"
    if a.shape != b.shape or a.dtype is not b.dtype:
        return f"found {text(a)} and {text(b)}"
    other = (a != b) & ~(a.isnan() & b.isnan())
    if not other.any():
        return "in bits of NaNs or zeros alone"
    at = tuple(other.nonzero()[0].tolist())
    return f"{other.sum().item()} of {other.numel()}, first {list(at)}: {a[at].item()!r} and {b[at].item()!r}"


def autocasted(torch, d, case, inputs):
    with torch.autocast(d.device.type, dtype=case.autocast):
        return case.call(**inputs)


def in_mode(torch, d, case, forward, mode, wanted, upstream, outputs, gradients):
    """(outputs, gradients, whether the bits must be equal) of a call in `mode`."""

    def plain():
        leaves = leaves_of(case, wanted)
        found = tuple_of(forward(**leaves))
        return [y.detach() for y in found], differentiate(torch, found, leaves, upstream), True

    if mode == "eager":
        return plain()
    if mode == "no_grad":
        with torch.no_grad():
            return [y.detach() for y in tuple_of(forward(**leaves_of(case, wanted)))], {}, True
    if mode == "inference":
        with torch.inference_mode():
            return [y.clone() for y in tuple_of(forward(**case.inputs))], {}, True
    if mode == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        leaves = leaves_of(case, wanted)
        order = list(leaves)
        found = tuple_of(checkpoint(lambda *ts: forward(**dict(zip(order, ts))), *leaves.values(), use_reentrant=False))
        return [y.detach() for y in found], differentiate(torch, found, leaves, upstream), True
    if mode == "func":
        order = sorted(wanted)
        fixed = {k: t for k, t in case.inputs.items() if k not in wanted}
        found, pull = torch.func.vjp(lambda *ts: tuple_of(forward(**fixed, **dict(zip(order, ts)))), *(case.inputs[k] for k in order))
        parts = pull(tuple(torch.zeros_like(y) if u is None else u for y, u in zip(found, upstream)))
        return [y.detach() for y in found], dict(zip(order, parts)), False
    if mode == "compile":
        backend = "inductor" if d.gpu and d.r.random() < 0.1 else "aot_eager"
        torch._dynamo.reset()
        order = list(case.inputs)
        run = torch.compile(lambda *ts: tuple_of(forward(**dict(zip(order, ts)))), backend=backend, dynamic=d.r.choice([None, False, True]))
        leaves = leaves_of(case, wanted)
        found = run(*leaves.values())
        return [y.detach() for y in found], differentiate(torch, found, leaves, upstream), False
    if mode == "stream":
        # Operands arrive late on the stream: work on any other stream would read the old contents.
        side = torch.cuda.Stream()
        real = {k: t.clone(memory_format=torch.preserve_format) for k, t in case.inputs.items()}
        if any(0 in t.stride() for t in case.inputs.values()):
            return plain()
        for t in case.inputs.values():
            t.fill_(0.5)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            for k, t in case.inputs.items():
                t.copy_(real[k])
            found = plain()
        torch.cuda.synchronize()
        return found
    if mode == "graph":
        if any(0 in t.stride() for t in case.inputs.values()) or not outputs or case.op == "muon":
            return plain()
        side = torch.cuda.Stream()
        real = {k: t.clone(memory_format=torch.preserve_format) for k, t in case.inputs.items()}
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            plain()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        for t in case.inputs.values():
            t.fill_(0.5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = plain()
        for k, t in case.inputs.items():
            t.copy_(real[k])
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        return found
    raise ValueError(mode)


# --- arguments that are wrong ------------------------------------------------------------------------------------------


def broken(case, d):
    """A call with one wrong operand. The call is refused or returns some result, and the process continues."""
    import torch

    r = d.r
    case.modes = ("eager",)
    name = r.choice(list(case.inputs))
    t = case.inputs[name]
    kinds = {
        "of integers": lambda: t.nan_to_num(0, 0, 0).clamp(-3, 3).to(r.choice([torch.int64, torch.int32, torch.uint8])),
        "complex": lambda: t.to(torch.complex64),
        "bool": lambda: t > 0,
        "float8": lambda: t.nan_to_num(0, 0, 0).to(torch.float8_e4m3fn),
        "another float": lambda: t.to(r.choice([x for x in (torch.float32, torch.bfloat16, torch.float16, torch.float64) if x is not t.dtype])),
        "one column more": lambda: torch.cat([t, t[..., :1]], -1) if t.dim() and t.shape[-1] else t.new_ones(1),
        "one row more": lambda: torch.cat([t, t[:1]], 0) if t.dim() and t.shape[0] else t.new_ones(1),
        "one dimension more": lambda: t[None],
        "one dimension less": lambda: t.reshape(-1)[0] if t.dim() < 2 and t.numel() else t.flatten(0, 1) if t.dim() > 1 else t.new_ones(()),
        "without dimensions": lambda: t.new_ones(()),
        "None": lambda: None,
        "a list": lambda: [1.0, 2.0],
        "a number": lambda: 1.5,
        "sparse": lambda: t.to_sparse() if t.dim() else None,
        "on meta": lambda: t.to("meta"),
        "elsewhere": lambda: t.cpu() if d.gpu else t.to("meta"),
        "empty": lambda: t.new_empty(0),
        "a subclass": lambda: torch.nn.Parameter(t.detach().clone()),
        "transposed": lambda: t.mT.contiguous() if t.dim() > 1 else t,
    }
    kind = r.choice(list(kinds))
    try:
        wrong = kinds[kind]()
    except Exception as e:
        return {"status": "skipped", "message": f"{kind}: {e}"[:100]}
    given = {**case.inputs, name: wrong}
    if r.random() < 0.5:
        given = {k: v.detach().requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() and not isinstance(v, torch.nn.Parameter) and not v.is_sparse and v.itemsize > 1 else v for k, v in given.items()}
    note = f"{name} {kind} [{describe(case)}]"
    try:
        y = tuple_of(case.call(**given))
        total = sum((v.double().sum() for v in y if v.device.type != "meta"), start=torch.zeros((), dtype=torch.float64))
        if isinstance(total, torch.Tensor) and total.requires_grad:
            total.backward()
        if d.gpu:
            torch.cuda.synchronize()
    except Exception as e:
        wrong, place = refusal(e), traceback.extract_tb(e.__traceback__)[-1].name
        if place == "swap_tensor" or "module=True" in note and (type(e) in (RuntimeError, AttributeError) or "linear()" in str(e)):
            wrong = None  # a refusal of functional_call, which puts the operands into a module, or of nn.Linear
        if wrong:
            raise Failure(f"{note}: {wrong} ({place})") from e
        return {"status": "refused as it should", "message": str(e)[:200], "kind": kind}
    return {"status": "accepted", "message": note[:300], "kind": kind}


# --- the processes -----------------------------------------------------------------------------------------------------


def reproducer(options, index):
    ops = f" --ops {options.ops}" if options.ops else ""
    return f"python3 tools/fuzz_ops.py --device {options.device} --seed {options.seed}{ops} --case {index}"


def start(options, indices):
    consecutive = indices[-1] - indices[0] + 1 == len(indices)
    cases = f"{indices[0]}-{indices[-1]}" if consecutive else ",".join(map(str, indices))
    command = [sys.executable, str(HERE), "--worker", "--device", options.device, "--seed", str(options.seed), "--case", cases]
    environment = {**os.environ, "MALLOC_PERTURB_": "165"}  # memory that is not written is not zero
    process = subprocess.Popen([*command, *(["--ops", options.ops] if options.ops else [])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    lines = queue.Queue()

    def read(stream, kind):
        for line in stream:
            lines.put((kind, line))
        lines.put((kind, None))

    for stream, kind in ((process.stdout, "out"), (process.stderr, "err")):
        threading.Thread(target=read, args=(stream, kind), daemon=True).start()
    return process, lines


def silence():
    """Where more processes want to run than the machine has CPUs, a case takes as much longer: one was reported as hanging beside a dozen compilers."""
    return SILENCE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def batch(options, indices, deadline, record):
    """Runs cases in a process; returns the cases that did not run, or None if the process does not start."""
    process, lines = start(options, indices)
    done, running, errors, open_streams, last = 0, None, [], 2, time.monotonic()
    hangs = False
    while open_streams:
        try:
            kind, line = lines.get(timeout=0.5)
        except queue.Empty:
            now = time.monotonic()
            allowed = silence()
            hangs = running is not None and now - last > allowed
            if hangs or now > deadline:
                process.kill()
                break
            continue
        if line is None:
            open_streams -= 1
            continue
        last = time.monotonic()
        if kind == "err":
            errors = (errors + [line.rstrip()])[-30:]
            continue
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if "begin" in found:
            running = found["begin"]
        else:
            running, done = None, done + 1
            record(found)
        if time.monotonic() > deadline:
            process.kill()
            break
    process.wait()
    if running is not None and (hangs or time.monotonic() <= deadline):
        what = f"no answer for {allowed:.0f} s" if hangs else f"the process ended with {process.returncode}: {' | '.join(errors[-6:])[-600:]}"
        record({"case": running, "op": "?", "text": "", "status": "FAILED", "message": what})
        return indices[done + 1 :]
    if done == 0 and process.returncode not in (0, 3) and time.monotonic() <= deadline:
        what = "the process did not begin: " + " | ".join(errors[-6:])[-600:]
        record({"case": indices[0], "op": "?", "text": "", "status": "FAILED", "message": what})
        return None
    return indices[done:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0, help="0: a new one, which is printed")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--case", help="this one alone, or 3,5-8")
    parser.add_argument("--ops", default="", help="a list with commas; all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--log", help="a file for every case's line")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    if options.seed == 0:
        options.seed = random.SystemRandom().randrange(1, 10**6)
    print(f"seed {options.seed}, {options.device}")
    deadline = time.monotonic() + options.seconds
    log = open(options.log, "a") if options.log else None
    counts, failures, lock = collections.Counter(), [], threading.Lock()

    def record(found):
        with lock:
            counts[found["op"], found["status"]] += 1
            if log:
                log.write(json.dumps(found) + "\n")
                log.flush()
            if found["status"] == "FAILED":
                failures.append(found)
                print(f"FAILED {found['op']}: {found['message']}\n  {found['text']}\n  {reproducer(options, found['case'])}", flush=True)
            if options.case is not None and "trace" in found:
                print(found["trace"])
            if options.case is not None:
                print({k: v for k, v in found.items() if k != "trace"})

    if options.case is not None:
        left = numbers_of(options.case)
        while left:
            left = batch(options, left, deadline + 600, record)
        return 1 if failures else 0
    next_case, lock_case = [0], threading.Lock()

    def go():
        while time.monotonic() < deadline:
            with lock_case:
                first = next_case[0]
                next_case[0] += BATCH
            left = list(range(first, min(first + BATCH, options.cases)))
            if not left:
                return
            while left and time.monotonic() < deadline:
                left = batch(options, left, deadline, record)
            if left is None:
                return

    threads = [threading.Thread(target=go) for _ in range(options.jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for op in sorted({op for op, _ in counts}):
        print(f"{op:24}" + ", ".join(f"{n} {status}" for (o, status), n in sorted(counts.items()) if o == op))
    print(f"{sum(counts.values())} cases, {len(failures)} failed")
    return 1 if failures or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
