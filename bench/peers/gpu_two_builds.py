"""Two builds of Ingot in turn in one process, on cases of the suites rmsnorm, rope, gate and mlp: the effect of a change that should only move
code. Writes bench/results/<gpu>/two_builds.json; a result's only peer is the earlier build.

    python3 bench/peers/gpu_two_builds.py --native NEW/libingot_bench.so --before OLD/libingot_bench.so --commit OLD [--only TEXT] [--seconds N]

Either build may have a selection of rooms (INGOT_ROOMS). The earlier build runs twice, so that the report shows the uncertainty of the measurement;
results of the later build are checked as in the suites.
"""
import argparse
import os
import time

import torch

import gpu_gate
import gpu_mlp
import gpu_rmsnorm
import gpu_rope
from gpu_common import Native, captured, ceilings, gpu_state, interleaved, write_report


class Mlp(gpu_mlp.Case):
    @property
    def shape(self):
        return [self.rows, self.width]


def mlp_cases():
    for width in (512, 256, 64, 128):
        for rows in (1024, 65536) if width < 256 else (300, 1024, 65536):
            for training in (False, True):
                yield Mlp(rows, 3, training, width=width)
    for width in (128, 256, 512):
        for rows in (1024, 65536):
            for training in (False, True):
                yield Mlp(rows, 3, training, weight_norm=True, width=width)
    for depth, width in ((5, 128), (5, 256), (5, 512)):
        yield Mlp(65536, depth, True, width=width)
    for width in (128, 256, 512):
        yield Mlp(65536, 3, act="relu", width=width)


def rmsnorm_cases():
    kind = gpu_rmsnorm.Case
    shapes = [(512, 4096), (32768, 4096), (16384, 4096, "f32"), (786432, 64), (300000, 192), (65536, 1024), (8192, 16384)]
    return [*(kind(*shape) for shape in shapes),
            kind(32768, 4096, residual=True), kind(32768, 4096, backward=True), kind(65536, 1024, backward=True),
            kind(32768, 4096, backward=True, residual=True)]


def every_case():
    """(suite, case, the function that makes its buffers, the function that checks the results)."""
    for case in rmsnorm_cases():
        yield "rmsnorm", case, gpu_rmsnorm.Buffers, gpu_rmsnorm.check
    for case in gpu_rope.cases():
        yield "rope", case, lambda case, native, l2: gpu_rope.Buffers(case, l2), gpu_rope.check
    for case in gpu_gate.cases():
        yield "gate", case, lambda case, native, l2: gpu_gate.Buffers(case, l2), gpu_gate.check
    for case in mlp_cases():
        yield "mlp", case, lambda case, native, l2: gpu_mlp.Buffers(case, l2), gpu_mlp.check


def graph_of(buffers, native):
    call = buffers.ours(native)
    return captured(call, buffers.calls), getattr(buffers, "workspace", None)  # another build may want another size


def measure(suite, case, make, check, after, before, l2_bytes, ceiling):
    buffers = make(case, after, l2_bytes)
    error, tolerance = check(buffers, after)[:2]
    graphs = {name: graph_of(buffers, native) for name, native in (("before", before), ("after", after), ("before again", before))}
    us, spread = interleaved({name: g[0][0] for name, g in graphs.items()}, buffers.calls, rounds=9, least_ms=0.5)
    limit = case.limit_us(ceiling) if suite == "mlp" else case.bytes / ceiling["copy_TBps"] * 1e-6
    return {"name": case.name, "shape": case.shape, "dtype": case.dtype, "ours_us": us.pop("after"), "peers": us, "limit_us": limit,
            "error": error, "tolerance": tolerance, "p20_p80_us": spread}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", required=True)
    parser.add_argument("--before", required=True, help="the same library of an earlier tree")
    parser.add_argument("--commit", required=True, help="of the earlier tree")
    parser.add_argument("--seconds", type=float, default=600, help="what is not measured by then is missing from the report, which says so")
    parser.add_argument("--only", help="only cases whose suite, name, shape and type hold this, and no report")
    options = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(0)
    after, before = (Native(os.path.abspath(path)) for path in (options.native, options.before))
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    chosen = []
    for suite, case, make, check in every_case():
        label = f"{suite}: {case.name} {' x '.join(str(n) for n in case.shape)} {case.dtype}"
        if not options.only or options.only in label:
            chosen.append((label, suite, case, make, check))
    ceiling, results = ceilings(after), []
    for label, *of in chosen:
        if time.monotonic() - start > options.seconds:
            break
        r = measure(*of, after, before, l2_bytes, ceiling)
        torch.cuda.empty_cache()
        results.append(r)
        was, again = r["peers"]["before"], r["peers"]["before again"]
        print(f"{label:78} before {was:8.2f} again {again:8.2f} after {r['ours_us']:8.2f}  {r['ours_us'] / min(was, again):.3f}"
              + ("  SLOWER" if r["ours_us"] > 1.03 * min(was, again) else "")
              + ("  WRONG" if not r["error"] <= r["tolerance"] else ""), flush=True)
    if not options.only:
        write_report("two_builds", results, ceiling, {"before": options.commit, "clocks": gpu_state(), "notes": "ours_us: the later build"},
                     cases=len(chosen))


if __name__ == "__main__":
    main()
