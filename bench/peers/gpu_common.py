"""The method of every GPU benchmark: Ingot and the peers in one process, each as a CUDA graph of at least 20 calls over
rotated buffers, replayed in turn; medians. The ceilings are measured in the same run."""
import argparse
import contextlib
import ctypes
import fcntl
import functools
import importlib
import importlib.metadata
import json
import math
import os
import pathlib
import random
import site
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile

import torch
import torch._functorch.config

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import suite_report  # noqa: E402

IN_MEMORY = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None  # for checkpoints, so that no run waits for a disk
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Native:
    """libingot_bench.so; a call that fails raises with Ingot's own message."""

    def __init__(self, path):
        self._lib = ctypes.CDLL(str(path))
        self._lib.ingot_bench_error.restype = ctypes.c_char_p

    def __getattr__(self, name):
        function = getattr(self._lib, f"ingot_bench_{name}")

        def call(*arguments):
            if function(*(ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments)) != 0:
                raise RuntimeError(self._lib.ingot_bench_error().decode())
        return call


def pointer(tensor):
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def captured(call, calls, on=None):
    """call(i) for i in range(calls) as one graph. The returned tensors stay alive, so that no two calls share an output. Captured on
    the stream `on` where given: backward passes run on the stream of their forward pass."""
    side = on or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(2):
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=on):
        for i in range(calls):
            kept.append(call(i))
    graph.kept = kept, call  # with the tensors saved for the backward pass
    return graph.replay, kept, graph


def backward_of(function, inputs, upstream, calls):
    """The captured graph of `function`'s backward pass alone: gradients of inputs[i] (tuples of leaves) for upstream[i]."""
    torch._functorch.config.donated_buffer = False  # the saved tensors serve many backward passes
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outputs = [function(*leaves) for leaves in inputs]

    def call(i):
        k = i % len(inputs)
        leaves = [t for t in inputs[k] if t.requires_grad]
        return torch.autograd.grad(outputs[k], leaves, upstream[k], retain_graph=True)
    return captured(call, calls, on=side)


# Packages of peers whose versions a report states; the places beside sys.path where their distributions lie.
PACKAGES = ("liger-kernel", "quack-kernels", "flash-attn-3", "flash-attn-4", "transformers", "triton", "nvidia-cudnn-cu13")
package_places = []


def versions_of_packages():
    """{package: version} of the installed packages of PACKAGES and of those in wheels that were given by path."""
    found = {}
    for distribution in importlib.metadata.distributions(path=[*sys.path, *package_places]):
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in PACKAGES:
            found.setdefault(name, distribution.version)
    return found


def import_liger(wheel):
    """Liger-Kernel, installed or in the wheel given by path; None without either."""
    if wheel:  # unpacked, because zipimport does not find its folders without an __init__.py
        folder = tempfile.mkdtemp()
        zipfile.ZipFile(wheel).extractall(folder)
        sys.path.append(folder)
    try:
        import liger_kernel.ops as ops
        return ops
    except Exception as e:
        print(f"liger: absent ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})", flush=True)
        return None


def add_wheels(parser):
    parser.add_argument("--wheels", type=use_wheels, help="a folder with the wheels of peers that are not installed: quack_kernels, and flash_attn_3 or flash_attn_4, "
                        "each with the packages that it needs")


def use_wheels(folder):
    """Makes the packages in the wheels of `folder` importable, here and in child processes, after the installed ones; a .pth file in a wheel counts, as when it
    is installed. The packages lie in a folder named site-packages, because QuACK takes functions from any other place for a user's: it then looks
    into the functions of CuTe's DSL for all that can change them and refuses what it finds ("epilogue fn depends on <ContextVar name='_LOC_TRANSFORMS'>")."""
    unpacked = pathlib.Path(tempfile.mkdtemp()) / "site-packages"
    unpacked.mkdir()
    for wheel in sorted(pathlib.Path(folder).glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(unpacked)
    before = list(sys.path)
    site.addsitedir(str(unpacked))
    added = [path for path in sys.path if path not in before]
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *added])
    return folder


class Absent:
    """In place of a library that is there and cannot be imported; false, with the reason."""

    def __init__(self, reason):
        self.reason = reason

    def __bool__(self):
        return False


@functools.lru_cache(maxsize=None)
def import_peer(*modules):
    """(name, module) of the first of `modules` that can be imported. If there is none, (the first name, None), or Absent in place of None if an installed one
    cannot be imported; the reasons are printed."""
    broken = None
    for name in modules:
        try:
            return name, importlib.import_module(name)
        except Exception as e:
            reason = in_a_line(e)
            print(f"{name}: absent ({reason})", flush=True)
            if not (isinstance(e, ModuleNotFoundError) and e.name == name.split(".")[0]):
                broken = broken or Absent(reason)
    return modules[0], broken


def in_a_line(e):
    """An exception in one line."""
    return f"{type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}"


def relative_error(got, want):
    """The largest relative error between two tuples of tensors, in fp64. Raises if a tensor has a NaN, which max() ignores and which means memory that was
    never written."""
    errors = [((g.double() - w.double()).norm() / w.double().norm()).item() for g, w in zip(got, want)]
    if not all(math.isfinite(e) for e in errors):
        raise ValueError(f"found relative errors {errors}, expected numbers: an output is not finite or was not written")
    return max(errors)


# In a process of gpu.py --warm, such as "2/6": the process compiles its share of a suite's cases, measures little and writes nothing.
SHARE = os.environ.get("INGOT_BENCH_SHARE")


def share(cases):
    if not SHARE:
        return cases
    first, step = map(int, SHARE.split("/"))
    return cases[first::step]


@contextlib.contextmanager
def turn(gate):
    """Exclusive use of the GPU among processes with the same file."""
    if not gate:
        yield
        return
    with open(gate, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def use_one_thread():
    """Restricts a peer's process to one thread: with all threads in several processes the QR of initial weights takes minutes, with one thread 1.3 s."""
    torch.set_num_threads(1)


LATE = "ran past its time"


class Child:
    """Starts a peer's process. The output goes to files, because compiler processes may outlive the peer and would hold a pipe open."""

    def __init__(self, line):
        self.out, self.err = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))
        self.process = subprocess.Popen(line, stdout=self.out, stderr=self.err)
        self.kill = self.process.kill

    def end(self, until):
        """The peer's result within its time, or the reason for having none."""
        late = False
        try:
            self.process.wait(max(1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            self.kill()
            self.process.wait()
        out, err = (file.seek(0) or file.read() for file in (self.out, self.err))
        if found := [json.loads(text) for text in out.splitlines() if text.startswith("{")]:
            return found[0], None
        return None, LATE if late else (err.strip().splitlines() or ["no word"])[-1][:300]


def cached_graphs():
    """The number of this process's graphs in PyTorch's cache, with their backward passes or apart."""
    from torch._dynamo.utils import counters
    return max(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])


def peak_beside(call, before):
    """The peak bytes of PyTorch's allocator during call(0) beyond the present ones, minus `before`."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    kept = call(0)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - start
    del kept
    return peak - before


def add_peers(graphs, absent, makers):
    """Captures each of `makers`, (library, function) by name, into `graphs`; the reason of a failure goes into `absent`."""
    for name, (library, make) in makers.items():
        if not library:
            absent[name] = getattr(library, "reason", "not installed, and not given by path")
            continue
        try:
            graphs[name] = make()
        except Exception as e:
            absent[name] = in_a_line(e)


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def interleaved(replays, calls, rounds=15, least_ms=1.0):
    """Median microseconds per call of each replay function, and the 20th and 80th percentile. The functions take turns in a random order, which is another one in
    each round and the same in every run: near the GPU's power limit a function begins at the clock that the function before it has left."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rounds, least_ms = (1, 0) if SHARE else (rounds, least_ms)

    def sample(replay, times):
        start.record()
        for _ in range(times):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    times = {name: max(1, round(least_ms / max(sample(replay, 2) / 2, 1e-3))) for name, replay in replays.items()}
    seen = {name: [] for name in replays}
    turns = list(replays.items())
    for number in range(rounds):
        random.Random(number).shuffle(turns)
        for name, replay in turns:
            seen[name].append(sample(replay, times[name]) / times[name] / calls * 1e3)
    spread = {name: sorted(v) for name, v in seen.items()}
    return ({name: median(v) for name, v in seen.items()},
            {name: [v[len(v) // 5], v[4 * len(v) // 5]] for name, v in spread.items()})


def ceilings(native):
    n = 1 << 30
    source = torch.randint(0, 1 << 30, (n // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    native.copy(pointer(target), pointer(source), n, stream())
    assert torch.equal(source, target), "the copy kernel copied wrongly"
    us, _ = interleaved({
        "memcpy": lambda: target.copy_(source),
        "kernel": lambda: native.copy(pointer(target), pointer(source), n, stream()),
        "read": lambda: native.read(pointer(source), n, pointer(sink), stream()),
    }, 1, least_ms=10)
    source = target = None
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product, _ = interleaved({"matmul": lambda: a @ b}, 1, least_ms=20)
    return {"copy_TBps": 2 * n / min(us["memcpy"], us["kernel"]) * 1e-6, "read_TBps": n / us["read"] * 1e-6,
            "bf16_TFLOPs": 2 * 8192**3 / product["matmul"] * 1e-6, "memcpy_TBps": 2 * n / us["memcpy"] * 1e-6,
            "copy_kernel_TBps": 2 * n / us["kernel"] * 1e-6}


def gpu_state(fields="clocks.sm,clocks.mem,power.draw,temperature.gpu"):
    """The state of the first GPU that this process sees."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    out = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", first], capture_output=True, text=True)
    return out.stdout.strip()


def rotation(bytes_, l2_bytes, most=100):
    """The number of input sets for a case of the given bytes, the calls in a graph, and whether all sets fit into L2."""
    wanted = -(-3 * l2_bytes // bytes_)
    sets = int(min(max(2, wanted), most))
    return sets, max(20, sets), sets < wanted


def compared(case, buffers, function, ours, checked, copy_tbps, others):
    """A case's result: Ingot beside `function` in PyTorch, eager and compiled, and `others`, in turn. `others` gives the library of
    each, or None, and the function that captures its graph. checked: the error and its tolerance. A peer that cannot run is listed with the reason."""
    error, tolerance = checked
    torch._dynamo.reset()  # fresh per shape
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    graphs = {"ours": captured(ours, buffers.calls), "torch_eager": buffers.peer(function), "torch_compile": buffers.peer(compiled)}
    absent = {}
    add_peers(graphs, absent, others)
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, buffers.calls)
    return {"name": case.name, "shape": case.shape, "dtype": case.dtype, "ours_us": us.pop("ours"), "peers": us,
            "limit_us": case.bytes / copy_tbps * 1e-6, "error": error, "tolerance": tolerance, "in_L2": buffers.cached, "absent": absent,
            "p20_p80_us": spread}


def sweep(buffers, native, configs):
    """[microseconds, configuration] of the default (first) and of each of `configs`, the fastest first. The configurations take turns."""
    configs = [None, *configs]
    graphs = [captured(buffers.ours(native, (ctypes.c_int * len(c))(*c) if c else None), buffers.calls) for c in configs]
    us, _ = interleaved(dict(enumerate(g[0] for g in graphs)), buffers.calls, rounds=5, least_ms=0.5)
    timed = [[us[i], config or "default"] for i, config in enumerate(configs)]
    return [timed[0], *sorted(timed[1:], key=lambda t: t[0])]


def begin(suite, options, cases, name, **more):
    """The report of the cases that this process measures (tools/suite_report.py). name(case) is unique. A run of a choice of cases (--only, --quick), or one
    that only warms caches, writes no report. more: further options of SuiteReport."""
    chosen = picked(cases, options, name)
    names = {name(case): case for case in chosen}
    assert len(names) == len(chosen), f"{suite}: found {len(chosen)} cases with {len(names)} names, expected a name for each"
    choice, until = options.only or options.quick, os.environ.get(suite_report.UNTIL)
    return suite_report.SuiteReport(suite, names, torch.cuda.get_device_name(0), again=bool(os.environ.get(suite_report.CONTINUE)) and not choice,
                                    until=float(until) if until else None, share=tuple(map(int, SHARE.split("/"))) if SHARE else None, writes=not (choice or SHARE), **more)


def describe(report, ceiling, before=None, **more):
    """Sets what a report says besides its rows: the versions (of PyTorch, and of the peers' packages), the ceilings, the GPU's state before (now, if not given) and after, and `more`."""
    before = before or gpu_state()
    report.entries = lambda: {"driver": gpu_state("driver_version"), "cuda": torch.version.cuda, "torch": torch.__version__, "versions": versions_of_packages(),
                              "command": os.environ.get("INGOT_COMMAND", f"python3 bench/peers/gpu_{report.suite}.py"), "ceilings": ceiling, **more,
                              "clocks": {"fields": "SM MHz, memory MHz, W, C", "before": before, "after": gpu_state()}}


@contextlib.contextmanager
def attempt(report, name):
    """Around the measurement of a case: an error is printed, and the other cases are still measured. print_end() then ends the process with status 1. A TimeoutError
    means that the time of the call has ended, and passes."""
    try:
        yield
    except TimeoutError:
        raise
    except (Exception, SystemExit):
        traceback.print_exc()
        report.failed.append(name)


def print_end(report):
    for line in report.end():
        print(line, flush=True)
    if report.failed:
        sys.exit(1)


def measure_each(report, ceilings_of, measure, said, **more):
    """Measures the missing cases that fit into the time, also after one that fails. ceilings_of() is called before the first; measure(case, ceiling) returns a row or yields the case's rows;
    said(row) is a line of the output, after which the seconds of the case follow; more: further entries of the report."""
    if report.fitting():
        ceiling = ceilings_of()
        print("ceilings:", {k: round(v, 3) for k, v in ceiling.items()}, flush=True)
        torch.cuda.empty_cache()
        describe(report, ceiling, **more)
        for case in report.each():
            with attempt(report, report.case):
                found = measure(case, ceiling)
                say_case(report, [found] if isinstance(found, dict) else list(found), said)
                torch.cuda.empty_cache()
    print_end(report)


def say_case(report, rows, said, **of_add):
    """Adds a case to the report and prints its rows, the last one with the seconds of the case."""
    seconds = report.add(rows, **of_add)
    lines = [said(row) for row in rows]
    print("\n".join(lines) + f"  [{seconds:.1f} s]", flush=True)


def program_options(case="case"):
    """The options of a suite that runs the program `ingot`; `--only` names a `case`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    parser.add_argument("--ingot", type=pathlib.Path, help="the program (default: beside the library)")
    parser.add_argument("--only", help=f"only {case}s whose name holds this, and no report")
    parser.add_argument("--quick", action="store_true", help=f"the first {case}, and no report")
    return parser


def parsed(parser):
    options = parser.parse_args()
    options.ingot = (options.ingot or pathlib.Path(options.native).parent / "ingot").resolve()
    return options


def several_gpus(text):
    """The option --gpus: numbers of GPUs, each measured beside one GPU."""
    found = [int(n) if n.isdigit() else 0 for n in text.split(",")]
    if min(found) < 2 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"found {text}, expected different numbers from 2, like 2,4")
    return found


def add_gpu_counts(parser):
    parser.add_argument("--gpus", type=several_gpus, help="over how many GPUs, like 2,4 (default: 2, 4 and 8, as many as there are)")


def gpu_counts(suite, options):
    """The numbers of GPUs to measure; none, with a message, if there are too few GPUs."""
    there = torch.cuda.device_count()
    counts = options.gpus or [n for n in (2, 4, 8) if n <= there]
    if not counts or max(counts) > there:
        print(f"{suite}: found {there} GPU{'' if there == 1 else 's'}, expected {max(counts, default=2)}: nothing measured")
        return []
    kinds = {torch.cuda.get_device_name(i) for i in range(max(counts))}
    if len(kinds) > 1:
        sys.exit(f"{suite}: found {', '.join(sorted(kinds))}, expected GPUs of one kind")
    return counts


def picked(cases, options, label):
    """The cases selected by --quick, by default the first one, and by --only: those whose label holds its text, or one of several (A|B)."""
    first = getattr(options, "of_quick", 1)
    return [case for case in (cases[:first] if options.quick else cases) if not options.only or any(text in label(case) for text in options.only.split("|"))]


def run_suite(suite, cases, quick, measure, sweep_case, notes, origin=None):
    """The command line of a suite whose bound is the copy bandwidth: measures every case and writes the report, or sweeps.

    quick: the cases of --quick. measure(case, native, l2_bytes, copy_TBps, liger, origin) returns a case's result;
    sweep_case(case, native, l2_bytes) returns sweep()'s result, error and tolerance. origin: for suites with an original project, the help text and
    the function that loads the project from a path and a build folder.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    if origin:
        parser.add_argument("--origin", help=origin[0])
    add_wheels(parser)
    parser.add_argument("--liger", help="a wheel of Liger-Kernel, where it is not installed")
    parser.add_argument("--sweep", help="time every configuration instead, and write the times here")
    parser.add_argument("--only", help="only cases whose name, shape and type hold this (or one of several: A|B), and no report")
    parser.add_argument("--quick", action="store_true", help=f"{len(quick)} cases, and no report")
    options = parser.parse_args()
    torch.manual_seed(0)
    native = Native(options.native)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size

    def label(case):
        return f"{case.name} {' x '.join(str(n) for n in case.shape)} {case.dtype}"
    width = max(len(label(c)) for c in cases)
    chosen = quick if options.quick else cases
    options.of_quick = len(quick)

    if options.sweep:
        table, ceiling = {}, ceilings(native)
        for case in picked(chosen, options, label):
            timed, error, tolerance = sweep_case(case, native, l2_bytes)
            limit = case.bytes / ceiling["copy_TBps"] * 1e-6
            table[label(case)] = timed
            print(f"{label(case):{width}} error {error:.1e} <= {tolerance:.1e} limit {limit:.1f} default {timed[0][0]:.2f}   "
                  + "  ".join(f"{us:.2f} {''.join(str(c).split())}" for us, c in timed[1:5]) + f"  worst {timed[-1][0]:.2f}", flush=True)
            torch.cuda.empty_cache()
        pathlib.Path(options.sweep).write_text(json.dumps(table), encoding="utf-8")
        return

    liger = import_liger(options.liger)
    library = origin[1](options.origin, pathlib.Path(options.native).parent) if origin and options.origin else None

    def said(r):
        return (f"{r['case']:{width}} ours {r['ours_us']:8.2f} us  {100 * r['limit_us'] / r['ours_us']:3.0f} % of copy  "
                + "  ".join(f"{p} {us:.2f} ({us / r['ours_us']:.2f}x)" for p, us in r["peers"].items())
                + f"  error {r['error']:.1e} <= {r['tolerance']:.1e}  {r['absent'] or ''}")
    measure_each(begin(suite, options, chosen, label), lambda: ceilings(native),
                 lambda case, ceiling: measure(case, native, l2_bytes, ceiling["copy_TBps"], liger, library), said, notes=notes)


def l2_bytes():
    return torch.cuda.get_device_properties(0).L2_cache_size


def run_products(suite, cases, quick, measure, label, liger=False):
    """The command line of a suite whose bound is the tensor cores: measures every case and writes the report.

    quick: the number of cases of --quick. measure(case, native, ceilings) returns a case's result, label(case) the text for --only; a case's
    `flops` are the required operations. liger: measure takes Liger's ops too, or None if Liger is absent.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    add_wheels(parser)
    if liger:
        parser.add_argument("--liger", help="a wheel of Liger-Kernel, where it is not installed")
    parser.add_argument("--only", help="only cases whose name and shape hold this, and no report")
    parser.add_argument("--quick", action="store_true", help=f"the first of the cases, {quick} in number, and no report")
    options = parser.parse_args()
    torch.manual_seed(0)
    native = Native(options.native)
    options.of_quick = quick
    libraries = [import_liger(options.liger)] if liger else []
    width, flops = max(len(label(c)) for c in cases), {label(c): c.flops for c in cases}

    def said(r):
        return (f"{r['case']:{width}} ours {r['ours_us']:8.1f} us {flops[r['case']] / r['ours_us'] * 1e-6:4.0f} TFLOP/s  "
                + "  ".join(f"{p} {us:.1f} ({us / r['ours_us']:.3f}x)" for p, us in r["peers"].items())
                + f"  error {r['error']:.1e} <= {r['tolerance']:.1e}  {r.get('absent') or ''}"
                + "".join(f"  {p} {b / 1e9:.2f} GB" for p, b in r.get("memory_bytes", {}).items()))
    measure_each(begin(suite, options, cases, label), lambda: ceilings(native), lambda case, ceiling: measure(case, native, ceiling, *libraries), said)
