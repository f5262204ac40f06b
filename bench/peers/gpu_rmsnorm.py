"""RMSNorm forward on a GPU: Ingot's shipped entry point beside PyTorch eager, torch.compile and, where its source is given, the
origin (MGRrmsnorm). Writes bench/results/<gpu>/rmsnorm.json.

    python3 bench/peers/gpu_rmsnorm.py --native build/cuda/libingot_bench.so [--origin MGRrmsnorm/src] [--sweep FILE] [--quick]
"""
import argparse
import ctypes
import dataclasses
import json
import pathlib
import subprocess

import torch
import torch.nn.functional as F

from gpu_common import DTYPES, Native, captured, ceilings, gpu_state, interleaved, pointer, stream, write_report

EPS = 1e-5


@dataclasses.dataclass
class Case:
    rows: int
    cols: int
    dtype: str = "bf16"
    weight: bool = True
    residual: bool = False

    @property
    def name(self):
        return "RMSNorm" + (" + residual" if self.residual else "") + ("" if self.weight else ", no weight")

    @property
    def size(self):
        return self.rows * self.cols * DTYPES[self.dtype].itemsize

    @property
    def bytes(self):
        return self.size * (4 if self.residual else 2) + (self.cols * DTYPES[self.dtype].itemsize if self.weight else 0)


CASES = [
    Case(64, 4096), Case(512, 4096), Case(4096, 4096), Case(4096, 4096, "f16"), Case(32768, 4096), Case(32768, 4096, "f16"),
    Case(32768, 4096, residual=True), Case(16384, 4096, "f32"), Case(786432, 64), Case(786432, 128), Case(131072, 256),
    Case(98304, 512, weight=False), Case(65536, 1024), Case(32768, 2048), Case(32768, 2880), Case(16384, 8192), Case(8192, 16384),
    Case(4096, 32768), Case(2048, 65536), Case(2048, 65536, "f32"),
]


class Buffers:
    """Enough inputs that a replay never finds one in L2, an output for each call; weights are not rotated."""

    def __init__(self, case, l2_bytes):
        self.case = case
        wanted = -(-3 * l2_bytes // case.bytes)
        self.sets = int(min(max(2, wanted), 200))
        self.cached = self.sets < wanted
        self.calls = max(20, self.sets)
        dtype = DTYPES[case.dtype]
        self.x = [torch.randn(case.rows, case.cols, device="cuda", dtype=dtype) for _ in range(self.sets)]
        self.r = [torch.randn_like(x) for x in self.x] if case.residual else None
        self.w = torch.randn(case.cols, device="cuda", dtype=dtype) * 0.5 + 1 if case.weight else None
        self.y = [torch.full_like(self.x[0], float("nan")) for _ in range(self.calls)]
        self.s = [torch.full_like(self.x[0], float("nan")) for _ in range(self.calls)] if case.residual else None

    def ours(self, native, config=None):
        case = self.case

        def call(i):
            k = i % self.sets
            native.rmsnorm(case.dtype.encode(), pointer(self.x[k]), case.dtype.encode(), pointer(self.w),
                           pointer(self.r[k] if self.r else None), pointer(self.s[i] if self.s else None), pointer(self.y[i]),
                           pointer(None), case.rows, case.cols, ctypes.c_double(EPS), config, stream())
        return call

    def peer(self, function):
        def call(i):
            k = i % self.sets
            return function(self.x[k], self.r[k], self.w) if self.r else function(self.x[k], self.w)
        return call


def norm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


def add_norm(x, r, w):
    s = x + r
    return F.rms_norm(s, (s.shape[-1],), w, EPS), s


def rounded_chain(s, w):
    """The same dtype's plain chain: what one rounding per step loses. For 16 bits float sums and one final rounding."""
    f = s.float()
    y = f * torch.rsqrt((f * f).mean(-1, keepdim=True) + EPS)
    return (y if w is None else y * w.float()).to(s.dtype)


def errors(got, s, w):
    """Relative error of ours and of the rounded chain against fp64, and the largest single one in units of the dtype's roundoff."""
    ours = chain = total = 0.0
    worst = 0.0
    step = max(1, (1 << 25) // s.shape[1])
    for a in range(0, s.shape[0], step):
        part = s[a:a + step].double()
        want = part * torch.rsqrt((part * part).mean(-1, keepdim=True) + EPS)
        if w is not None:
            want = want * w.double()
        off = got[a:a + step].double() - want
        ours += off.square().sum().item()
        chain += (rounded_chain(s[a:a + step], w).double() - want).square().sum().item()
        total += want.square().sum().item()
        worst = max(worst, (off.abs() / want.abs().clamp_min(torch.finfo(s.dtype).tiny)).max().item())
    return (ours / total) ** 0.5, (chain / total) ** 0.5, worst / (torch.finfo(s.dtype).eps / 2)


def check(buffers, native):
    """The relative error of one fresh call, and what it may be: 1.5 times what a rounded chain of the same dtype loses."""
    case = buffers.case
    for t in [buffers.y[0]] + ([buffers.s[0]] if buffers.s else []):
        t.fill_(float("nan"))
    buffers.x[0].normal_(std=2)
    buffers.ours(native)(0)
    torch.cuda.synchronize()
    s = buffers.x[0]
    if case.residual:
        s = buffers.s[0]
        assert torch.equal(s, buffers.x[0] + buffers.r[0]), "sum differs from x + residual"
    error, chain, worst = errors(buffers.y[0], s, buffers.w)
    limit = 2.0 if case.dtype != "f32" else 16.0  # half an ulp of the result is 1 to 2 units; f32 also carries its sum's rounding
    assert worst <= limit, f"{case}: one element is off by {worst:.2f} roundoffs, expected at most {limit}"
    return error, 1.5 * chain


def origin_call(buffers, library):
    case = buffers.case
    pick = [i % buffers.sets for i in range(buffers.calls)]
    out = (ctypes.c_void_p * buffers.calls)(*[buffers.y[i].data_ptr() for i in range(buffers.calls)])
    inputs = (ctypes.c_void_p * buffers.calls)(*[buffers.x[k].data_ptr() for k in pick])
    inv = torch.empty(case.rows, device="cuda")

    def call():
        assert library.mgrrmsnorm(DTYPES[case.dtype].itemsize, ctypes.c_bool(case.dtype == "bf16"), buffers.calls, out, inputs,
                                  pointer(inv), pointer(buffers.w), case.rows, case.cols, ctypes.c_float(EPS)) == 0
    return call


def build_origin(source, folder):
    target = pathlib.Path(folder) / "libmgrrmsnorm.so"
    subprocess.run(["nvcc", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC", "-Xlinker", "--exclude-libs=ALL", "-I", source,
                    str(pathlib.Path(__file__).with_name("mgrrmsnorm_peer.cu")), f"{source}/rmsnorm_kernel.cu", "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def measure(case, native, l2_bytes, copy_tbps, origin):
    buffers = Buffers(case, l2_bytes)
    error, tolerance = check(buffers, native)
    function = add_norm if case.residual else norm
    torch._dynamo.reset()  # fresh per shape
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    graphs = {"ours": captured(buffers.ours(native), buffers.calls), "torch_eager": captured(buffers.peer(function), buffers.calls),
              "torch_compile": captured(buffers.peer(compiled), buffers.calls)}
    replays = {name: g[0] for name, g in graphs.items()}
    if origin and not case.residual and case.weight:
        replays["origin"] = origin_call(buffers, origin)
    us, spread = interleaved(replays, buffers.calls)
    ours = us.pop("ours")
    return {"name": case.name, "shape": [case.rows, case.cols], "dtype": case.dtype, "ours_us": ours, "peers": us,
            "limit_us": case.bytes / copy_tbps * 1e-6, "error": error, "tolerance": tolerance, "in_L2": buffers.cached, "p20_p80_us": spread}


def configurations(case):
    """Every way of spreading the rows that fits, as libingot_bench's seven integers."""
    vecs = case.cols * DTYPES[case.dtype].itemsize // 16
    for per_thread in (1, 2, 4, 8):
        if case.residual and per_thread == 8:
            continue
        rows = 4 // per_thread if per_thread < 4 else 1
        for group in (8, 16, 32, 64, 128, 256, 512):
            for cluster in (1, 2, 4, 8):
                room = per_thread * group * cluster
                if room < vecs or room >= 4 * max(vecs, 32) or (cluster > 1 and (rows > 1 or group < 128)):
                    continue
                for threads in sorted({group} if cluster > 1 else {max(group, 64), max(group, 128), max(group, 256)}):
                    for overlap, evict_first in ((1, 0), (1, 1), (0, 1)):
                        yield [per_thread, rows, group, cluster, threads, overlap, evict_first]


def sweep(case, native, l2_bytes):
    """Times every configuration; returns [(us, config)] with the default's time first."""
    buffers = Buffers(case, l2_bytes)
    default = (ctypes.c_int * 7)()
    native.rmsnorm_config(case.dtype.encode(), case.rows, case.cols, ctypes.c_int(case.residual), default)
    timed = []
    for config in [None, *configurations(case)]:
        replay, _, _ = captured(buffers.ours(native, (ctypes.c_int * 7)(*config) if config else None), buffers.calls)
        us, _ = interleaved({"ours": replay}, buffers.calls, rounds=5, least_ms=0.5)
        timed.append([us["ours"], config or ["default", *default]])
    return [timed[0], *sorted(timed[1:], key=lambda t: t[0])]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    parser.add_argument("--origin", help="MGRrmsnorm's src folder")
    parser.add_argument("--sweep", help="time every configuration instead, and write the times here")
    parser.add_argument("--quick", action="store_true", help="three cases")
    options = parser.parse_args()
    torch.manual_seed(0)
    native = Native(options.native)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    cases = CASES[2:5] if options.quick else CASES

    if options.sweep:
        table = {}
        for case in cases:
            timed = sweep(case, native, l2_bytes)
            table[f"{case.rows}x{case.cols} {case.dtype}{' residual' if case.residual else ''}"] = timed
            print(f"{case.rows:>7} x {case.cols:<6}{case.dtype:5} default {timed[0][0]:8.2f} us {timed[0][1][1:]}   "
                  + "   ".join(f"{us:.2f} {c}" for us, c in timed[1:4]), flush=True)
            torch.cuda.empty_cache()
        pathlib.Path(options.sweep).write_text(json.dumps(table), encoding="utf-8")
        return

    ceiling = ceilings(native)
    print("ceilings:", {k: round(v, 3) for k, v in ceiling.items()}, flush=True)
    origin = build_origin(options.origin, pathlib.Path(options.native).parent) if options.origin else None
    results, before = [], gpu_state()
    for case in cases:
        r = measure(case, native, l2_bytes, ceiling["copy_TBps"], origin)
        results.append(r)
        torch.cuda.empty_cache()
        print(f"{r['name']:24}{case.rows:>7} x {case.cols:<6}{case.dtype:5} ours {r['ours_us']:8.2f} us  {100 * r['limit_us'] / r['ours_us']:3.0f} % of copy  "
              + "  ".join(f"{p} {us:.2f} ({us / r['ours_us']:.2f}x)" for p, us in r["peers"].items())
              + f"  error {r['error']:.1e} <= {r['tolerance']:.1e}", flush=True)
    write_report("rmsnorm", results, ceiling,
                 {"clocks": {"fields": "SM MHz, memory MHz, W, C", "before": before, "after": gpu_state()},
                  "notes": "origin: CUDA events over back-to-back calls (its launches cannot be captured); in_L2: too small to rotate beyond L2"})


if __name__ == "__main__":
    main()
