"""The portable variants on this GPU, with the limits of other GPUs (INGOT_GPU_AS), beside the Hopper variants in the same run and the bound of the
instruction: a loop of nothing but mma.sync, and a copy. PyTorch's flash attention and varlen_attn, which are compiled for sm_80, are peers as they
are; torch.compile's kernels are made without wgmma (DISABLE_MMA_V3, and Triton alone for products). Writes bench/results/<gpu>/portable.json.

    python3 bench/peers/gpu_portable.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only TEXT] [--quick] [--without-compile]

A row is an operation with the limits of one GPU. Products and attention have a block for each tile, whatever the limits: with the limits of every GPU
their blocks run on all multiprocessors of the GPU at hand, as the loop does (`multiprocessors` in a row of the report). These limits choose the form of
a kernel by the shared memory. Kernels of a fixed number of blocks, as in decoding and prompts, take this number from the multiprocessors of the named
GPU. The loop takes turns with the operation, because the clock falls under load. Products of PyTorch eager are cuBLAS's, which uses wgmma; Ingot's run on its own core, although a GPU
other than Hopper would call cuBLASLt where the library is present. "Plain products" are Ingot's products of the same sizes by the same core, without the
fused computation. The limits of a token and of a prompt of GPT-OSS are those of the suites decode and prompt.
All times are measured on the GPU at hand (an H200), which runs the portable variants compiled for itself. How fast
another GPU would run them does not follow from these times.
"""
import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
import typing

os.environ["DISABLE_MMA_V3"] = "1"  # Triton's products are those of GPUs without wgmma
os.environ["TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS"] = "TRITON"

import torch  # noqa: E402
from torch.nn.attention import SDPBackend  # noqa: E402

import gpu_attention  # noqa: E402
import gpu_cross_entropy  # noqa: E402
import gpu_gate  # noqa: E402
import gpu_linear  # noqa: E402
import gpu_muon  # noqa: E402
import gpu_rmsnorm  # noqa: E402
import gpu_rope  # noqa: E402
import gpu_swiglu  # noqa: E402
import gpu_wide_mlp  # noqa: E402
from gpu_common import (IN_MEMORY, SHARE, Native, add_peers, begin, captured, ceilings, interleaved, l2_bytes, measure_each, parsed, pointer, program_options,  # noqa: E402
                        stream)

WITHOUT_LIBRARY = {"INGOT_CUBLASLT": "none"}  # products run on Ingot's core
SMALL, LARGE, WHOLE = "8.6", "8.0", "10.0"  # 99, 163 and 227 KB of shared memory per block; 82, 108 and all of an H200's 132 multiprocessors
FORMS = (LARGE, SMALL)  # of a product: blocks of two tiles over a long K need 144 KB
SMALL_MEMORY = "12.0"  # 99 KB, and all multiprocessors


class As(Native):
    """A copy of the library that behaves like a GPU of compute capability `capability`. The library reads its environment once, so that each copy,
    loaded from a file of its own, keeps what it found."""

    def __init__(self, path, capability):
        self._variables = {"INGOT_GPU_AS": capability, **WITHOUT_LIBRARY}
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            super().__init__(shutil.copy(path, folder))

    def __getattr__(self, name):
        call = super().__getattr__(name)

        def within(*arguments):
            with environment(self._variables):
                return call(*arguments)
        return within


@contextlib.contextmanager
def environment(variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclasses.dataclass
class Case:
    """A case of another suite. `make` builds its operands, `check` compares a call with fp64 or fp32; the peers are functions of the operands that
    return captured graphs."""
    of: typing.Any
    make: typing.Callable
    check: typing.Callable
    eager: typing.Callable
    compiled: typing.Callable
    plain: typing.Callable = None  # (operands, library) -> the products alone
    calls: typing.Callable = lambda buffers: buffers.calls
    capabilities: tuple = (LARGE,)

    @property
    def name(self):
        return self.of.name

    @property
    def shape(self):
        return list(self.of.sizes) if isinstance(self.of, gpu_linear.Case) else self.of.shape if hasattr(self.of, "shape") else sizes_of(self.of)

    @property
    def label(self):
        return f"{self.name} {' x '.join(map(str, self.shape))}"

    def limit_us(self, mma_tflops, copy_tbps):
        return max(getattr(self.of, "flops", 0) / mma_tflops, getattr(self.of, "bytes", 0) / copy_tbps) * 1e-6


def sizes_of(case):
    return [getattr(case, field) for field in ("rows", "width", "features", "channels", "hidden", "vocab") if hasattr(case, field)]


def optimised(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")


def products(library, sizes, workspace):
    """A call of products c = a b^T of the library's core; sizes: [(m, n, k)]."""
    made = [(m, n, k, *(torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (n, k), (m, n)))) for m, n, k in sizes]

    def call(_):
        for m, n, k, a, b, c in made:
            library.matmul(pointer(a), pointer(b), pointer(c), m, n, k, 0, 1, 0, pointer(workspace), workspace.numel(), stream())
    return call


def linear_case(*sizes):
    return Case(gpu_linear.Case(*sizes), lambda case, _: gpu_linear.Buffers(case, l2_bytes()), gpu_linear.check, lambda b: b.peer(b.product()),
                lambda b: b.peer(optimised(b.product())), capabilities=FORMS)


def wide_mlp_case(rows, width, hidden):
    def graph(b, function):
        return captured(b.peer(function), 4, on=torch.cuda.Stream())
    return Case(gpu_wide_mlp.Case(rows, width, hidden, False), lambda case, library: gpu_wide_mlp.Buffers(case, library), gpu_wide_mlp.check,
                lambda b: graph(b, gpu_wide_mlp.mlp), lambda b: graph(b, optimised(gpu_wide_mlp.mlp)),
                lambda b, library: products(library, [(rows, hidden, width), (rows, width, hidden)], b.workspace), calls=lambda b: 4)


def swiglu_case(rows, channels, hidden):
    return Case(gpu_swiglu.Case(rows, channels, hidden), lambda case, _: gpu_swiglu.Buffers(case, l2_bytes()), gpu_swiglu.check, lambda b: b.peer(b.two()),
                lambda b: b.peer(optimised(b.two())), lambda b, library: products(library, [(rows, 2 * hidden, channels)], b.workspace))


def cross_entropy_case(rows, features, vocab):
    loss = gpu_cross_entropy.loss_of(gpu_cross_entropy.SOFTCAP)

    def graph(b, function):
        call = b.peer(function)
        call(0)
        return captured(call, 1, on=torch.cuda.Stream())
    return Case(gpu_cross_entropy.Case(rows, features, vocab), lambda case, _: gpu_cross_entropy.Buffers(case), gpu_cross_entropy.check,
                lambda b: graph(b, loss), lambda b: graph(b, optimised(loss)),
                lambda b, library: products(library, [(rows, vocab, features), (rows, features, vocab), (vocab, features, rows)], b.workspace), calls=lambda b: 1)


def muon_case(count, rows, cols):
    function = gpu_muon.of_all(False)

    def graph(b, f):
        with torch.no_grad():
            return captured(b.peer(f), 2)
    return Case(gpu_muon.Case("a bank", ((count, rows, cols),), False), lambda case, _: gpu_muon.Banks(case), gpu_muon.check, lambda b: graph(b, function),
                lambda b: graph(b, optimised(function)), calls=lambda b: 2)


def attention_case(*sizes, backward):
    def eager(b):
        return b.peer(b.sdpa(SDPBackend.FLASH_ATTENTION)) if b.case.regular else b.peer(b.varlen(), packed=True)
    return Case(gpu_attention.Case(*sizes, backward=backward), lambda case, _: gpu_attention.Buffers(case), gpu_attention.check, eager,
                lambda b: b.peer(b.flex()), capabilities=(LARGE, SMALL, WHOLE))


def row_case(module, case, function):
    def make(of, library):
        return module.Buffers(of, library, l2_bytes()) if module is gpu_rmsnorm else module.Buffers(of, l2_bytes())
    return Case(case, make, module.check, lambda b: b.peer(function(b)), lambda b: b.peer(optimised(function(b))))


def cases():
    shapes = [(16, 16, 128, [8192] * 2), (64, 8, 64, [4096] * 4), (8, 4, 64, gpu_attention.documents()), (8, 4, 128, gpu_attention.documents())]
    norm = {False: lambda b: gpu_rmsnorm.norm, True: lambda b: gpu_rmsnorm.add_norm}
    turned = lambda b: b.forward(torch.bfloat16)  # noqa: E731
    heads = dict(tokens=16384, q_heads=32, kv_heads=8)
    return [*(linear_case(kind, 4096, 4096, 4096) for kind in ("forward", "dX", "dW", "dW f32 +=")), linear_case("forward", 8192, 4096, 22016), linear_case("forward", 98304, 512, 2048),
            wide_mlp_case(8192, 4096, 16384), wide_mlp_case(98304, 512, 2048), swiglu_case(8192, 4096, 11008), cross_entropy_case(16384, 768, 50304), muon_case(8, 1024, 4096),
            *(attention_case(*shape, backward=backward) for shape in shapes for backward in (False, True)),
            *(row_case(gpu_rmsnorm, gpu_rmsnorm.Case(32768, 4096, backward=backward), norm[False]) for backward in (False, True)),
            row_case(gpu_rmsnorm, gpu_rmsnorm.Case(32768, 4096, residual=True), norm[True]),
            *(row_case(gpu_gate, gpu_gate.Case(8192, 11008, backward=backward), lambda b: b.forward()) for backward in (False, True)),
            *(row_case(gpu_rope, gpu_rope.Case(**heads, norm=norm_, backward=backward), turned) for norm_, backward in ((False, False), (True, False), (True, True)))]


def compile_share(report, hopper):
    """In a process of gpu.py --warm: compiles the peers of a share of the cases and measures nothing."""
    for case in report.each():
        if isinstance(case, Case):
            add_peers({}, {}, {"torch_compile": (True, lambda case=case: case.compiled(case.make(case.of, hopper)))})
            torch.cuda.empty_cache()


def measure(case, hopper, libraries, ceiling, with_compile):
    """The rows of a case: one for each of its capabilities."""
    buffers, graphs, checked, absent, kept = case.make(case.of, hopper), {}, {}, {}, []
    calls = case.calls(buffers)

    def capture(name, call, calls):
        graphs[name] = captured(call, calls)
        kept.append(getattr(buffers, "workspace", None))  # the next call of `ours` may replace it

    for capability in case.capabilities:
        library = libraries[capability]
        checked[capability] = case.check(buffers, library)
        capture(f"as {capability}", buffers.ours(library), calls)
    capture("hopper", buffers.ours(hopper), calls)
    if case.plain:
        capture("plain_products", case.plain(buffers, libraries[LARGE]), calls)
    torch.cuda.empty_cache()
    add_peers(graphs, absent, {"torch_eager": (True, lambda: case.eager(buffers))})
    if with_compile:
        add_peers(graphs, absent, {"torch_compile": (True, lambda: case.compiled(buffers))})
    else:
        absent["torch_compile"] = "left out by --without-compile"
    loop, loop_flops = mma_loop(hopper)
    us, spread = interleaved({"mma_loop": loop, **{name: g[0] for name, g in graphs.items()}}, calls, rounds=9)
    mma_tflops = loop_flops / calls / us.pop("mma_loop") * 1e-6
    peers = {name: us[name] for name in us if not name.startswith("as ")}
    flops, multiprocessors = getattr(case.of, "flops", None), torch.cuda.get_device_properties(0).multi_processor_count
    for capability in case.capabilities:
        ours = us[f"as {capability}"]
        yield {"name": f"{case.name}, as {capability}", "shape": case.shape, "dtype": "bf16", "ours_us": ours, "peers": peers, "limit_us": case.limit_us(mma_tflops, ceiling["copy_TBps"]),
               **({"tflops": flops / ours * 1e-6, "mma_TFLOPs": mma_tflops, "multiprocessors": multiprocessors} if flops else {}), "error": checked[capability][0], "tolerance": checked[capability][1], "absent": absent,
               "p20_p80_us": spread}


@dataclasses.dataclass
class Program:
    """A measurement by the program `ingot`, with random weights of GPT-OSS-20B's shapes in bf16."""
    name: str
    shape: list
    arguments: tuple
    time_ms: typing.Callable  # (the JSON's contents, whether by the Hopper variant)
    limit_ms: typing.Callable
    capabilities: tuple = (LARGE, SMALL, WHOLE)

    @property
    def label(self):
        return f"{self.name} {self.shape[0]}"


def programs():
    size = ("--synthetic", "20b", "--dense", "bf16")

    def phased_ms(found, hopper):
        return found["token"]["megakernel" if hopper else "phased"]["mean_ms"]

    def kernel_ms(found, _):
        return found["token"]["megakernel"]["mean_ms"]

    def token_limit_ms(found, _):
        return found["token_bytes"] / found["read_TBps"] * 1e-9

    def prompt_limit_ms(found, ceiling):
        p = found["prompts"][0]
        return max(p["weight_bytes"] / ceiling["read_TBps"], p["flops"] / ceiling["mma_TFLOPs"]) * 1e-9
    token = ("decode", *size, "--context", "1024", "--tokens", "128", "--kernels-alone")
    return [Program("a token of gpt-oss-20b, one launch per phase", [1024], token, phased_ms, token_limit_ms),
            Program("a token of gpt-oss-20b, one kernel", [1024], (*token, "--megakernel"), kernel_ms, token_limit_ms, (WHOLE, LARGE, SMALL, SMALL_MEMORY)),
            Program("a prompt of gpt-oss-20b, to the first token", [4096], ("prompt", *size, "4096"), lambda found, _: found["prompts"][0]["p50_ms"], prompt_limit_ms)]


def measure_program(case, ingot, ceiling):
    def ask(variables):
        line = [str(ingot), "bench", *case.arguments, "--json"]
        with environment(variables):
            done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{case.label}: {done.stderr.strip()}")
        return json.loads(done.stdout)
    hopper = case.time_ms(ask({}), True)
    for capability in case.capabilities:
        found = ask({"INGOT_GPU_AS": capability, **WITHOUT_LIBRARY})
        yield {"name": f"{case.name}, as {capability}", "shape": case.shape, "dtype": "bf16, mxfp4", "ours_us": 1e3 * case.time_ms(found, False), "peers": {"hopper": 1e3 * hopper},
               "limit_us": 1e3 * case.limit_ms(found, ceiling), "tests": "tests check the values (models/decode/phased/decode.cuda.test.cpp)"}


def mma_loop(native):
    """A call of the loop of nothing but mma.sync, of about 2 ms, and its operations."""
    sink, flops = torch.zeros(1, device="cuda"), ctypes.c_int64()

    def call():
        native.mma_loop(20000, pointer(sink), ctypes.byref(flops), stream())
    call()
    return call, flops.value


def said(r):
    rate = f" {r['tflops']:4.0f} TFLOP/s" if "tflops" in r else ""
    error = f"  error {r['error']:.1e} <= {r['tolerance']:.1e}" if "error" in r else ""
    return (f"{r['name'] + ' ' + ' x '.join(map(str, r['shape'])):84} {r['ours_us']:9.1f} us{rate}, {100 * r['limit_us'] / r['ours_us']:3.0f} % of the limit  "
            + "  ".join(f"{p} {us:.1f} ({us / r['ours_us']:.2f}x)" for p, us in r["peers"].items()) + error + "".join(f"  {p}: {why}" for p, why in r.get("absent", {}).items()))


def main():
    parser = program_options()
    parser.add_argument("--without-compile", action="store_true", help="without torch.compile, which takes most of the time")
    options = parsed(parser)
    torch.manual_seed(0)
    hopper = Native(options.native)
    report = begin("portable", options, [*cases(), *programs()], lambda case: case.label)
    if SHARE:
        return None if options.without_compile else compile_share(report, hopper)
    libraries = {capability: As(options.native, capability) for capability in (LARGE, SMALL, WHOLE)}

    def ceilings_of():
        loop, flops = mma_loop(hopper)
        return {**ceilings(hopper), "mma_TFLOPs": flops / interleaved({"loop": loop}, 1, least_ms=20)[0]["loop"] * 1e-6}

    def measured(case, ceiling):
        return measure_program(case, options.ingot, ceiling) if isinstance(case, Program) else measure(case, hopper, libraries, ceiling, not options.without_compile)
    measure_each(report, ceilings_of, measured, said)


if __name__ == "__main__":
    main()
