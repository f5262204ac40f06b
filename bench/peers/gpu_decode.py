"""A token of GPT-OSS on a GPU, by one kernel and by one launch per phase, with random weights of the published shapes: `ingot bench decode`
for every context and format, whole answers from prompt to end, several sequences per pass, and grid barriers by themselves; beside these kernel
times the tokens that `generate` gets, greedy and sampled, through the decoder. Writes bench/results/<gpu>/decode.json.

    python3 bench/peers/gpu_decode.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--llama-bench PATH] [--only TEXT] [--quick]

The limit is the time of the weights and keys that a token reads, at the speed of a kernel that only reads, in the same process. The limit of several
sequences counts their chosen experts; the limit of a grid barrier with data is the barrier alone.
Tests check the computed values (models/decode/phased/decode.cuda.test.cpp), not this script: through all layers of random weights a rounding decides
the choice of experts, and two correct results differ.

llama.cpp is a peer at 20B shapes if the path of its `llama-bench`, built with CUDA, is given: on a GGUF with random weights (synthetic_gguf.py)
whose dense matrices are bf16, or Q8_0, llama.cpp's nearest format to fp8; both have the same bytes of experts.
"""
import json
import os
import pathlib
import subprocess
import tempfile

import synthetic_gguf
from gpu_common import Native, begin, ceilings, measure_each, parsed, program_options

# For each model the measurements of one process: contexts, whole answers (tokens of the prompt and of the answer), sequences per pass, grid barriers.
# `sampled`: tokens through the decoder, at the first of the contexts.
MODELS = [dict(size="120b", dense="bf16", contexts=(1024, 128, 8192, 32768, 130000), sampled=True, answers=((100, 100), (1024, 100), (1024, 1024), (2048, 2048)), grid_barriers=True),
          dict(size="120b", dense="bf16", sequences=(1, 2, 4, 8)),
          dict(size="120b", dense="fp8", contexts=(1024,)),
          dict(size="120b", dense="mxfp4", contexts=(1024, 32768), sequences=(1, 8)),
          dict(size="20b", dense="bf16", contexts=(1024, 8192), sampled=True),
          dict(size="20b", dense="fp8", contexts=(1024,)),
          dict(size="20b", dense="mxfp4", contexts=(1024,))]
TOKENS = 128  # timed tokens
SAMPLED = ("greedy", "temperature 1", "top-p 0.9", "top-k 40, min-p 0.05")  # as `ingot bench decode` names them


def label(model):
    if model["size"][0].isdigit():
        return f"gpt-oss-{model['size']}, {model['dense']} dense"
    return f"{model['size']}, {model['dense']}"


def case_name(model):
    return label(model) + ("" if "contexts" in model else ", several sequences")


def listed(numbers):
    return ",".join(str(n) for n in numbers)


def ask(model, ingot):
    """The output of `ingot bench decode` for a model."""
    contexts = model.get("contexts", (1024,))
    line = [str(ingot), "bench", "decode", "--synthetic", model["size"], "--dense", model["dense"], "--context", str(contexts[0]), "--tokens", str(TOKENS), "--json"]
    if contexts[1:]:
        line += ["--contexts", listed(contexts[1:])]
    if "answers" in model:
        line += ["--answers", ",".join(f"{a}:{b}" for a, b in model["answers"])]
    if "sequences" in model:
        line += ["--sequences", listed(model["sequences"])]
    if model.get("grid_barriers"):
        line += ["--grid-barriers"]
    if not model.get("sampled"):
        line += ["--kernels-alone"]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{label(model)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def rows(model, found):
    """The report's rows for a model."""
    def row(name, shape, ours_ms, peers, limit_ms, **more):
        return {"name": name, "shape": shape, "dtype": model["dtype"] if "dtype" in model else f"{model['dense']}, mxfp4", "ours_us": 1e3 * ours_ms, "peers": {k: 1e3 * v for k, v in peers.items()},
                "limit_us": 1e3 * limit_ms, "read_TBps": found["read_TBps"], **more}

    def limit_ms(size):
        return size / found["read_TBps"] * 1e-9

    what, out = label(model), []
    if "contexts" in model:
        for at in sorted([found, *found.get("contexts", [])], key=lambda at: at["context"]):
            phased = {path: at["token"][path]["mean_ms"] for path in ("phased", "plain_launches") if path in at["token"]}
            out.append(row(what, [at["context"]], at["token"]["megakernel"]["mean_ms"], phased, limit_ms(at["token_bytes"]),
                           token=at["token"], token_bytes=at["token_bytes"], prompt_ms_of_16=found["prompt_ms_of_16"]))
            if "prefiltered" in at["token"]:
                out.append(row(f"{what}, int8 prefilter of the head", [at["context"]], at["token"]["prefiltered"]["mean_ms"], {"whole_head": at["token"]["megakernel"]["mean_ms"]},
                               limit_ms(at["prefiltered_bytes"]), prefiltered=at["token"]["prefiltered"]))
    for sampled in found.get("sampled", []):
        size = found["prefiltered_bytes"] or found["token_bytes"]
        for name in SAMPLED:
            token = sampled["token"][name]
            kernels = (found["token"].get("prefiltered", found["token"]["megakernel"]) if name == "greedy" else found["token"]["sampled"])["mean_ms"]
            out.append(row(f"{what}, {name}, through the decoder", [found["context"]], token["mean_ms"], {"kernels": kernels}, limit_ms(size), sampled=token))
    for a in found.get("answers", []):
        whole = dict(first_token_ms=a["first_token_ms"], token_ms=a["token_ms"], whole_ms=a["whole_ms"])
        out.append(row(f"{what}, answers of {a['tokens']}", [a["prompt"]], a["token_ms"], {}, limit_ms(found["token_bytes"]), answer=whole,
                       note=f": first token {a['first_token_ms']:.1f} ms, all {a['whole_ms'] / 1e3:.2f} s"))
    one = next((s["mean_ms"] for s in found.get("sequences", []) if s["sequences"] == 1), None)
    for s in found.get("sequences", []):
        if s["sequences"] > 1 and s["in_use"]:
            out.append(row(f"{what}, {s['sequences']} sequences a step", [s["sequences"], found["context"]], s["mean_ms"], {"one_by_one": s["sequences"] * one},
                           limit_ms(s["step_bytes"]), step=s, note=f", {s['experts_a_layer']:.1f} experts a layer"))
    for load, times in found.get("grid_barriers", {}).items():
        out.append(row(f"a grid barrier, {load}: stamped words behind a barrier", [132], times["stamped_us"] * 1e-3,
                       {"fenced": times["fenced_us"] * 1e-3, "polled": times["polled_us"] * 1e-3}, times["barrier_us"] * 1e-3))
    return out


def said(r):
    text = f"{r['name'] + r.get('note', ''):90} {str(r['shape']):12} {r['ours_us'] / 1e3:8.4f} ms, {100 * r['limit_us'] / r['ours_us']:3.0f} % of the limit"
    text += "".join(f", {k} {v / 1e3:.4f}" for k, v in r["peers"].items())
    if "token" in r:
        m = r["token"]["megakernel"]
        text += f", p50 {m['p50_ms']:.4f}, p99 {m['p99_ms']:.4f}, best {m['best_ms']:.4f}, {1e3 / m['mean_ms']:.0f} tokens/s"
    return text + "".join(f", {p} absent: {why}" for p, why in r.get("absent", {}).items())


RIVAL = "llama.cpp"
RIVAL_FORMS = {"bf16": "bf16", "fp8": "q8_0"}


def measure_rival(bench, case, folder):
    """Microseconds per token of llama-bench after a context of the case's length, and llama-bench's description of itself."""
    file = pathlib.Path(folder) / f"{case['dense']}.gguf"
    try:
        synthetic_gguf.write(case["size"], RIVAL_FORMS[case["dense"]], file)
        done = subprocess.run([str(bench), "-m", str(file), "-ngl", "99", "-fa", "1", "-p", "0", "-n", "128", "-d", str(case["context"]), "-r", "3",
                               "-o", "json"], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]})
        if done.returncode != 0:
            raise RuntimeError(f"status {done.returncode}: {' '.join(done.stderr.split())[-160:]}")
        found = json.loads(done.stdout)[-1]
    finally:
        file.unlink(missing_ok=True)
    return found["avg_ns"] / found["n_gen"] * 1e-3, {k: found[k] for k in ("build_commit", "build_number", "model_size", "stddev_ns", "n_gen", "n_depth")}


def add_rival(result, case, bench, folder):
    """Adds llama-bench's time for a case, or the reason for having none, to a row."""
    try:
        if bench is None:
            raise LookupError("not given by path")
        result["peers"][RIVAL], result[RIVAL] = measure_rival(bench, case, folder)
    except (ImportError, LookupError, OSError, RuntimeError) as e:
        result.setdefault("absent", {})[RIVAL] = str(e) if isinstance(e, LookupError) else f"{type(e).__name__}: {str(e)[:200]}"


def main():
    parser = program_options("model")
    parser.add_argument("--llama-bench", type=pathlib.Path, help="llama.cpp's program, built with CUDA: a peer at 20B shapes")
    parser.add_argument("--folder", default="/dev/shm", help="where its GGUFs of 14 GB are written (default: /dev/shm)")
    options = parsed(parser)
    synthetic_gguf.check_llama("decode: --llama-bench", options.llama_bench)

    def measure(model, _):
        for r in rows(model, ask(model, options.ingot)):
            if "token" in r:
                case = {**model, "context": r["shape"][0]}
                if case["size"] == "20b" and case["context"] == 1024 and case["dense"] in RIVAL_FORMS:
                    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                        add_rival(r, case, options.llama_bench, folder)
            yield r
    measure_each(begin("decode", options, MODELS, case_name), lambda: ceilings(Native(options.native)), measure, said)


if __name__ == "__main__":
    main()
