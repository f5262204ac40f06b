"""Writes the tables between `<!-- table:SUITE -->` and `<!-- /table -->` of a page from bench/results/<gpu>/SUITE.json, and
those of CPU_TABLES from bench/cpu/<cpu>/SUITE.json. README has tables of its own: `headline`, its first numbers, from both, and `gpu_summary`
and `cpu_summary`, a few rows of the full tables in docs/benchmarks.md. The figures of SENTENCES come from the reports of SUMMARY_GPU, too.

    python3 tools/report_tables.py [--check] [PAGE ...]     --check changes nothing and fails where a table is not current;
                                                            without pages: README.md, CHANGELOG.md, every docs/*.md and docs/mlp.svg (tools/mlp_picture.py)
"""
import json
import pathlib
import re
import statistics
import sys

import mlp_picture
import reports

MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
PEERS = {"torch_eager": "PyTorch", "torch_compile": "torch.compile", "origin": "original project", "liger": "Liger", "quack": "QuACK", "flash_attn_3": "flash-attention 3", "flash_attn_4": "flash-attention 4",
         "flash_attn_3_fixed": "flash-attention 3, fixed order", "flash_attn_4_fixed": "flash-attention 4, fixed order", "tiny_cuda_nn": "tiny-cuda-nn",
         "cublas": "cuBLAS", "cublas_each": "cuBLAS, one product per expert", "grouped_mm": "PyTorch grouped_mm", "cudnn": "cuDNN", "torch_packed": "PyTorch, packed weights", "bare_products": "matrix products alone",
         "hopper": "Ingot's Hopper variant", "plain_products": "Ingot's products alone", "one GPU": "one GPU", "formed_again": "activations recomputed", "cpu": "the machine's CPU, fp32", "cpu_one_thread": "one CPU thread", "llama.cpp": "llama.cpp",
         "kernels": "kernels alone", "no_drafts": "without drafts", "phased": "one launch per phase", "plain_launches": "the same, without a graph", "whole_head": "head in full precision", "one_by_one": "one sequence after another", "fenced": "barrier with a fence",
         "polled": "without a barrier", "steps": "16 tokens per pass", "compile_rows": "torch.compile, dense attention", "compile_packed": "torch.compile, FlexAttention",
         "compile_origin": "torch.compile, as in parameter-golf", "compile_chunk_head": "torch.compile, head on the chunk only", "eager_origin": "PyTorch, as in parameter-golf"}
# No peers of other people: these compute less than the rows that they stand in, need another GPU, or are Ingot's own other ways to the same result.
NO_RIVALS = {"bare_products", "plain_products", "kernels", "hopper", "no_drafts", "phased", "plain_launches", "whole_head", "one_by_one", "fenced", "polled"}
# Words in names of committed rows, and the glossary's words for the same.
ROW_WORDS = {"head screened in 8 bits": "int8 prefilter of the head", "applications": "layer calls", "drawn": "sampled", "sequences a step": "sequences per pass",
             "experts a layer": "experts per layer", "stamped words behind a barrier": "words with ready flags behind a barrier",
             "a step of 1 pass on each": "1 pass per GPU and step", " ms, all ": " ms, whole answer "}
# Suites whose rows state memory: the words before the list, and the name of a row in it.
WITH_MEMORY = {suite: ("Peak memory of a training step in GB, without operands and gradients: ", lambda r: " x ".join(f"{n:,}" for n in r["shape"]))
               for suite in ("swiglu", "cross_entropy")}
WITH_MEMORY["models"] = ("Peak GPU memory in GB, weights and moments included: ", lambda r: r["name"])
WITH_MEMORY["train_memory"] = ("GPU memory of a run in GB: ", lambda r: row_name(r).rsplit(", ", 1)[0])


def in_our_words(name):
    for word, ours in ROW_WORDS.items():
        name = name.replace(word, ours)
    return name


def row_name(result):
    return in_our_words(result["name"] + result.get("note", ""))


def percent(share):
    return f"{share:.0f} %" if share >= 1 else f"{share:.1f} %"


# The package of which a peer is, where this is not PyTorch, and packages behind all rows of a suite.
PACKAGES = {"liger": "liger-kernel", "quack": "quack-kernels", "flash_attn_3": "flash-attn-3", "flash_attn_4": "flash-attn-4", "cudnn": "nvidia-cudnn-cu13"}
OF_SUITES = {"models": "transformers", "families": "transformers"}
NOT_OF_PYTORCH = {*PACKAGES, "origin", "tiny_cuda_nn", "llama.cpp", "one GPU", "formed_again", "cpu", "cpu_one_thread", "steps"}


def versions_of_peers(report):
    """The versions of PyTorch and of the packages of the peers, as the report knows them. Older reports know PyTorch's alone."""
    peers, known = {peer for r in report["results"] for peer in r.get("peers", {})} - NO_RIVALS, report.get("versions", {})
    found = [f"PyTorch {report['torch'].split('+')[0]}"] if "torch" in report and peers - NOT_OF_PYTORCH | peers & {"cudnn"} else []
    packages = sorted({PACKAGES[peer] for peer in peers & PACKAGES.keys()} | {OF_SUITES.get(report["suite"])} & known.keys())
    return found + [f"{package} {known[package]}" for package in packages if package in known]


def measured_on(report):
    """Days, GPU, versions of the peers and sources of a report: `tree` is the hash of the suite's sources (tools/reports.py)."""
    same, days = report.get("same_kernels"), reports.days_of(report)
    later = f" (kernels of the same machine code: {same['tree']})" if same and same["tree"] != report["tree"] else ""
    return (f"Measured on {' and '.join(days)} on {report['gpu']}, driver {report['driver']}, "
            + "".join(f"{part}, " for part in [f"CUDA {report['cuda']}", *versions_of_peers(report)]) + f"sources {report['tree']}{later}")


def table(report):
    peers = [p for p in PEERS if any(p in r["peers"] for r in report["results"])]
    ceilings = report["ceilings"]
    yield (f"{measured_on(report)}; copy bandwidth "
           f"{ceilings['copy_TBps']:.2f} TB/s in the same run. Times in µs."
           + (f" Incomplete: {report['incomplete']}." if "incomplete" in report else ""))
    yield ""
    yield "| | shape | dtype | Ingot | share of the limit | " + " | ".join(PEERS[p] for p in peers) + " | speed-up over the fastest peer |"
    yield "|---|---|---|---:|---:|" + "---:|" * (len(peers) + 1)
    for r in report["results"]:
        best = min((us for peer, us in r["peers"].items() if peer not in NO_RIVALS), default=None)
        cells = [row_name(r), " x ".join(f"{n:,}" for n in r["shape"]), r["dtype"], f"{r['ours_us']:.1f}",
                 percent(100 * r["limit_us"] / r["ours_us"])]
        cells += [f"{r['peers'][p]:.1f}" if p in r["peers"] else "" for p in peers]
        yield "| " + " | ".join(cells + [f"{best / r['ours_us']:.2f}x" if best is not None else ""]) + " |"
    memory, (words, of_row) = {}, WITH_MEMORY.get(report["suite"], ("", None))
    for r in report["results"] if of_row else []:
        memory.setdefault(of_row(r), {}).update(r.get("memory_bytes", {}))
    if any(memory.values()):
        yield ""
        yield words + "; ".join(
            f"{row}: " + ", ".join(f"{PEERS.get(p, 'Ingot')} {b / 1e9:.2f}" for p, b in of_peer.items()) for row, of_peer in memory.items() if of_peer) + "."


def serve_table(report):
    """Rows of clients: tokens/s count the tokens of all answers over the whole time; the times are measured by the clients."""
    def rate(result):
        return f"{result['tokens_per_second']:,.0f}" + (f" ({result['errors']} of {result['requests']} requests failed)" if result.get("errors") else "")

    def pair(quantiles, digits):
        return f"{quantiles['p50']:.{digits}f} / {quantiles['p99']:.{digits}f}"

    rivals = any("llama.cpp" in r for r in report["results"])
    yield (f"{measured_on(report)}; {report['slots']} slots, prompts of {report['results'][0]['shape'][1]} "
           f"and answers of {report['results'][0]['shape'][2]} tokens." + (f" Incomplete: {report['incomplete']}." if "incomplete" in report else ""))
    yield ""
    yield ("| model | sampling | at once | tokens/s | share of the limit | ms a token | first token, ms, p50 / p99 | between tokens, ms, p50 / p99 |"
           + (" llama.cpp, tokens/s | its first token | its between tokens |" if rivals else ""))
    yield "|---|---|---:|---:|---:|---:|---:|---:|" + ("---:|---:|---:|" if rivals else "")
    for r in report["results"]:
        ours, theirs = r["clients"], r.get("llama.cpp")
        cells = [r["model"], r["sampling"], str(r["shape"][0]), rate(ours), percent(100 * r["limit_us"] / r["ours_us"]), f"{ours['token_ms']:.2f}",
                 pair(ours["first_token_ms"], 0), pair(ours["between_tokens_ms"], 2)]
        if rivals:
            cells += [rate(theirs), pair(theirs["first_token_ms"], 0), pair(theirs["between_tokens_ms"], 2)] if theirs else ["", "", ""]
        yield "| " + " | ".join(cells) + " |"


GPT_OSS = [(f"gpt-oss-{size}, {dense} dense", f"{size.upper()}, {dense}") for size in ("120b", "20b") for dense in ("bf16", "fp8", "mxfp4")]
PREFILTERED = ", int8 prefilter of the head"


def token_bound_table(report):
    """Kernel times of single tokens beside the time of their bytes, after 1,024 tokens of context."""
    rows = {in_our_words(r["name"]): r for r in report["results"] if r["shape"] == [1024]}
    read = report["ceilings"]["read_TBps"]
    yield f"{measured_on(report)}; a kernel that only reads reaches {read:.2f} TB/s. Kernel times in ms, with 1,024 tokens of context."
    yield ""
    yield "| shapes, dense weights | GB per token | limit | phased | megakernel | limit / time | with int8 prefilter |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, shown in GPT_OSS:
        if not (row := rows.get(name)):
            continue
        short = rows.get(name + PREFILTERED)
        yield (f"| {shown} | {row['limit_us'] * read / 1e3:.2f} | {row['limit_us'] / 1e3:.2f} | {row['peers']['phased'] / 1e3:.2f} | {row['ours_us'] / 1e3:.2f} | "
               f"{percent(100 * row['limit_us'] / row['ours_us'])} | {short['ours_us'] / 1e3 if short else 0:.2f} |".replace(" 0.00 |", " |"))


def several_gpus_table(report):
    """Tokens and prompts over several GPUs beside one GPU of the same process, with the matrices divided (tensor)."""
    rows = {(in_our_words(r["name"]), r["shape"][0]): r for r in report["results"]}
    counts = sorted({int(n) for name, _ in rows for n in re.findall(r", (\d+) GPUs", name)})
    words = {2: "two", 4: "four", 8: "eight"}

    def cells(name, suffix, tokens, unit, digits):
        """The cells of a row, or None without measurements."""
        found = {n: rows.get((f"{name}, {n} GPUs, tensor{suffix}", tokens)) for n in counts}
        if not any(found.values()):
            return None
        one = next(row for row in found.values() if row)["peers"]["one GPU"]
        return ([f"{one / unit:.{digits}f}"] + [f"**{row['ours_us'] / unit:.{digits}f}**" if row else "" for row in found.values()]
                + [f"{row['ours_us'] / one:.2f}" if row else "" for row in found.values()] + [f"{row['limit_us'] / unit:.{digits}f}" if row else "" for row in found.values()])

    heads = ["one GPU"] + [words.get(n, str(n)) for n in counts] + [f"{words.get(n, n)} / one" for n in counts] + [f"limit of memory, {words.get(n, n)}" for n in counts]
    yield f"{measured_on(report)}. Kernel times of a token in ms, with 1,024 tokens of context; the time of one GPU is from the same process."
    yield ""
    yield "| shapes, dense weights | " + " | ".join(heads) + " |"
    yield "|---|" + "---:|" * len(heads)
    for name, shown in GPT_OSS:
        for suffix, note in (("", ""), (PREFILTERED, ", int8 prefilter")):
            if found := cells(name, suffix, 1024, 1e3, 2):
                yield f"| {shown}{note} | " + " | ".join(found) + " |"
    lengths = sorted(tokens for name, tokens in rows if name == f"{GPT_OSS[0][0]}, {counts[0]} GPUs, tensor, to the first token") if counts else []
    if lengths:
        yield ""
        yield f"Time to the first token in ms ({GPT_OSS[0][1]}):"
        yield ""
        yield "| tokens of the prompt | " + " | ".join(heads[:1 + 2 * len(counts)]) + " |"
        yield "|---:|" + "---:|" * (1 + 2 * len(counts))
        for tokens in lengths:
            yield f"| {tokens:,} | " + " | ".join(cells(GPT_OSS[0][0], ", to the first token", tokens, 1e3, 1)[:1 + 2 * len(counts)]) + " |"


def attention_rates_table(report):
    """The suite's times as TFLOP/s of visible pairs: the limit of a row is the time of its operations at the rate of a large product."""
    peers = [p for p in ("flash_attn_4", "flash_attn_4_fixed", "flash_attn_3", "flash_attn_3_fixed", "cudnn", "torch_eager", "torch_compile") if any(p in r["peers"] for r in report["results"])]
    words = {**PEERS, "torch_eager": "PyTorch's flash attention", "torch_compile": "FlexAttention"}
    rate = report["ceilings"]["bf16_TFLOPs"]
    yield f"{measured_on(report)}. TFLOP/s of visible pairs, with 4 operations for each pair and column forward and 10 backward; a large product reaches {rate:.0f}."
    yield ""
    yield "| | shape | Ingot | " + " | ".join(words[p] for p in peers) + " |"
    yield "|---|---|---:|" + "---:|" * len(peers)
    for r in report["results"]:
        of = [r["ours_us"], *(r["peers"].get(p) for p in peers)]
        yield (f"| {row_name(r).removeprefix('Attention of ')} | {' x '.join(f'{n:,}' for n in r['shape'])} | "
               + " | ".join("" if us is None else f"{r['limit_us'] / us * rate:.0f}" for us in of) + " |")


def gpu_tests_table(report):
    """The cases of all tests of ctest on a GPU, and why some were skipped."""
    passed, skipped, failed = (sum(test[count] for test in report["results"]) for count in ("passed", "skipped", "failed"))
    reasons = {}
    for test in report["results"]:
        for reason, cases in test.get("reasons", {}).items():
            reasons[reason] = reasons.get(reason, 0) + cases
    yield f"{measured_on(report)}, `{report['command']}`: {len(report['results'])} tests of ctest with {passed:,} passed, {skipped} skipped and {failed} failed cases."
    if reasons and skipped > sum(reasons.values()):
        reasons["no reason in the log"] = skipped - sum(reasons.values())
    if reasons:
        yield ""
        yield "| reason of skipped cases | cases |"
        yield "|---|---:|"
        yield from (f"| {reason} | {cases} |" for reason, cases in sorted(reasons.items(), key=lambda entry: (-entry[1], entry[0])))


def sanitizers_table(report):
    yield f"{measured_on(report)}, `{report['command']}`, cases `{report['filter']}`."
    yield ""
    yield "| tool | executable | cases | errors | explained hazards |"
    yield "|---|---|---:|---:|---:|"
    for run in report["results"]:
        yield f"| {run['tool']} | {run['executable']} | {run['tests']} | {run['errors']} | {run.get('explained', '')} |".replace("|  |", "| |")


# Suites whose reports are not tables of times beside peers.
GPU_TABLES = {"serve": serve_table, reports.GPU_TESTS: gpu_tests_table, reports.SANITIZERS: sanitizers_table}
# Further tables of a suite, for single pages: {name: (suite, function)}.
PAGE_TABLES = {"token_bound": ("decode", token_bound_table), "several_gpus": ("decode_gpus", several_gpus_table),
               "attention_rates": ("attention", attention_rates_table)}


def key_of(result):
    return in_our_words(result["name"]), tuple(result["shape"]), result["dtype"]


def tabled(suite):
    """The reports that a page shows: the reports of SUMMARY_GPU, and from other GPUs the missing rows."""
    own = [r for r in suite if SUMMARY_GPU in r["gpu"]]
    known = {key_of(result) for r in own for result in r["results"]}
    others = [{**r, "results": [result for result in r["results"] if key_of(result) not in known]} for r in suite if r not in own]
    return own + [r for r in others if r["results"]]


def train_step_table(report):
    yield f"{report['cpu']} ({report['level']}), {report['threads']} threads, PyTorch {report['torch']}, {report['date']}."
    yield ""
    yield "| model | products | Ingot | PyTorch eager | torch.compile | speed-up over the faster peer | memory / that peer's memory |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    by_key = {(r["shape"], r["precision"], r["mode"]): r for r in report["results"]}
    cases = dict.fromkeys((r["shape"], r["precision"]) for r in report["results"])
    for shape, precision in sorted(cases, key=lambda c: (c[0] != "nano", c[1] != "fp32")):
        ours, eager, compiled = (by_key.get((shape, precision, m)) for m in ("native", "eager", "compile"))
        if not (ours and eager and compiled):
            continue
        best = min(eager, compiled, key=lambda r: r["ms"])
        yield (f"| {shape} | {precision} | {ours['ms']:.1f} ms | {eager['ms']:.1f} | {compiled['ms']:.1f} | "
               f"{best['ms'] / ours['ms']:.2f}x | {ours['memory_mib'] / best['memory_mib']:.2f} |")


def held_out_table(report):
    yield f"{report['data']}; seeds 1 to 3, {report['cpu']}, {report['date']}. Nats per character, mean and deviation."
    yield ""
    yield "| preset | Ingot | spec/gpt.py |"
    yield "|---|---:|---:|"
    for r in report["results"]:
        spec = [seed["held_out"] for seed in r.get("spec", {}).get("results", [])]
        peer = f"{statistics.mean(spec):.4f} ± {statistics.stdev(spec):.4f}" if spec else ""
        yield f"| {r['preset']} | {r['ingot']['mean']:.4f} ± {r['ingot']['deviation']:.4f} | {peer} |"


def bpe_table(report):
    train, encode = report["train"], report["encode"]
    seconds, rate = train["seconds"], encode["mb_per_second"]
    yield f"{report['cpu']}, {report['date']}."
    yield ""
    yield "| byte-level BPE | Ingot | tokenizers | tiktoken |"
    yield "|---|---:|---:|---:|"
    yield (f"| learning 8,192 merges on {train['bytes'] / 1e6:.1f} MB, {train['threads']} threads | {seconds['ours']:.2f} s | "
           f"{seconds['tokenizers']:.2f} s | |")
    yield (f"| encoding {encode['bytes'] / 1e6:.0f} MB of distinct text, one thread | {rate['ours']:.1f} MB/s | "
           f"{rate['tokenizers']:.1f} MB/s | {rate['tiktoken']:.1f} MB/s |")
    if "encode_o200k" in report:
        wide = report["encode_o200k"]
        rate = wide["mb_per_second"]
        yield (f"| the same with o200k's pattern and {wide['vocab']:,} tokens | {rate['ours']:.1f} MB/s | {rate['tokenizers']:.1f} MB/s | "
               f"{rate['tiktoken']:.1f} MB/s |")


def archive_load_table(report):
    seconds = report["seconds"]
    layers = "all" if report["layers"] == report["of_layers"] else f"{report['layers']} of"
    yield (f"An archive of GPT-OSS-20B's shape, {layers} its {report['of_layers']} layers and the whole vocabulary: "
           f"{report['archive_bytes'] / 1e9:.2f} GB of random numbers. {report['cpu']}, {report['threads']} threads, its virtual disk, "
           f"{report['date']}; medians of {len(report['rounds'])} rounds, `python3 bench/archive_load.py --program PROGRAM --dir FOLDER`.")
    yield ""
    yield "| from a cold disk | seconds | relative to dd |"
    yield "|---|---:|---:|"
    yield f"| dd bs=8M of the file | {seconds['dd']:.1f} | |"
    yield f"| loading the archive | {seconds['load']:.1f} | {report['load_over_dd']:.2f}x |"
    yield f"| the whole run, one token of prompt | {seconds['start_to_end']:.1f} | {report['whole_over_dd']:.2f}x |"
    yield f"| the whole run, file in the page cache | {seconds['warm']:.1f} | |"


def write_files_table(report):
    copy = report["results"][0]["bytes"] / report["results"][0]["seconds"]
    yield (f"{report['cpu']}, {report['threads']} threads, files in {report['place']}, {report['date']}; the checkpoint has {report['layers']} of GPT-OSS-20B's {report['of_layers']} layers and "
           f"the whole vocabulary. Medians of {len(report['results'][0]['rounds'])} rounds, `python3 bench/write_files.py --program PROGRAM`.")
    yield ""
    yield "| | GB | seconds | GB/s | relative to cp |"
    yield "|---|---:|---:|---:|---:|"
    for r in report["results"]:
        rate = r["bytes"] / r["seconds"]
        yield f"| {r['name']} | {r['bytes'] / 1e9:.2f} | {r['seconds']:.2f} | {rate / 1e9:.2f} | {rate / copy:.2f}x |"


def accuracy_table(report):
    yield (f"{report['tokens']:,} tokens in {report['lists']} sequences; the reference's loss is {report['loss']:.4f}, its perplexity "
           f"{report['perplexity']:.3f}. *Confident* counts the positions where the reference gives its likeliest token {report['confident']:.0%} or more "
           f"({report['results'][0]['confident_tokens']:,} tokens). *Mean rank* is the mean rank of the reference's likeliest token. Computed on {report['date']}.")
    yield ""
    yield "| form | component | loss | perplexity | top-1 | confident | top-5 | top-10 | KL | cosine | mean rank |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for r in report["results"]:
        yield (f"| {r['form']} | {r['component']} | {r['loss']:.4f} | {r['perplexity']:.3f} | {r['top1']:.2%} | {r['confident_top1']:.2%} | "
               f"{r['top5_overlap']:.2%} | {r['top10_overlap']:.2%} | {r['kl']:.5f} | {r['cosine']:.5f} | {r['mean_rank']:.3f} |")


# README's first numbers are the speeds that a user of the program sees: tokens sampled at temperature 1, whole training steps. Each entry has
# alternatives, of which the first one with a report is shown. An alternative is a suite, its row, the sentence, and a peer: {ms}, {us}, {peer} and
# the peer's times (the fastest peer's, or those of the peer that is named; without this peer the line is left out). Of a whole answer {first_ms} and
# {whole_s}, without a peer. Of `serve` the row's model alone.
_TOKEN = {"shape": [1024], "dtype": "bf16, mxfp4"}
_SAMPLED = ("a token of GPT-OSS-{size}'s shapes, sampled at temperature 1 through the decoder as `generate` gets it, 1,024 tokens of context: **{{ms:.2f}} ms**; the kernels alone take "
            "{{peer_ms:.2f}} ms.")
_LLAMA_ROW = {"name": "llama-3.2-1b, bf16, greedy, through the decoder", "shape": [1024], "dtype": "bf16"}
_LLAMA = "a greedy token of Llama-3.2-1B's shapes in bf16 as `generate` gets it, 1,024 tokens of context: **{ms:.2f} ms**; "
HEADLINES = [
    [("decode", {"name": "gpt-oss-120b, bf16 dense, temperature 1, through the decoder", **_TOKEN}, _SAMPLED.format(size="120B"), "kernels"),
     ("decode", {"name": "gpt-oss-120b, bf16 dense, int8 prefilter of the head", **_TOKEN},
      "kernel time of one greedy token of GPT-OSS-120B's shapes, 1,024 tokens of context: **{ms:.2f} ms** with the int8 prefilter of the head, {peer_ms:.2f} ms with the head in full precision.",
      "whole_head")],
    [("serve", {"model": "gpt-oss-120b"}, None, None),
     ("decode", {"name": "gpt-oss-120b, bf16 dense, answers of 1024", **_TOKEN},
      "GPT-OSS-120B's shapes, a prompt of 1,024 tokens and a greedy answer of 1,024 tokens: the first token after **{first_ms:.1f} ms**, the whole answer after **{whole_s:.2f} s**.", None)],
    [("decode", {"name": "gpt-oss-20b, bf16 dense, temperature 1, through the decoder", **_TOKEN}, _SAMPLED.format(size="20B"), "kernels")],
    [("decode", {"name": "gpt-oss-20b, bf16 dense", **_TOKEN},
      "kernel time of one token of GPT-OSS-20B's shapes, head in full precision: **{ms:.2f} ms**; a token of llama.cpp's benchmark takes {peer_ms:.2f} ms.", "llama.cpp")],
    [("serve", {"model": "gpt-oss-20b"}, None, None)],
    [("families", _LLAMA_ROW, _LLAMA + "a token of llama.cpp's benchmark takes {peer_ms:.2f} ms.", "llama.cpp"),
     ("families", _LLAMA_ROW, _LLAMA + "transformers under {peer} as one CUDA graph takes {peer_ms:.2f} ms.", "torch_compile")],
    [("train", {"name": "golf, 11 applications, whole step", "dtype": "bf16"},
      "a whole training step of the preset `golf`, 98,304 tokens: **{ms:.1f} ms**; {peer} with its optimizer takes {peer_ms:.1f} ms.", None)],
    [("models", {"name": "Llama-3.2-1B, training step"},
      "a training step of Llama-3.2-1B's shapes in transformers, 8,192 tokens, after `ingot.hf.patch(loss=True)`: **{ms:.0f} ms** and {gb:.1f} GB; with {peer} {peer_ms:.0f} ms and {peer_gb:.1f} GB.",
      "liger")],
    [("mlp", {"name": "MLP, 3 layers, forward + backward", "shape": [65536, 128], "dtype": "f16"},
      "kernel time of an MLP of 3 layers, 128 wide, 65,536 rows of f16, forward and backward: **{us:.1f} µs**; {peer} takes {peer_us:.1f} µs.", None)],
]
HEADLINE_STEP = {"shape": "golf", "precision": "bf16"}  # the preset golf-small


def serve_line(report, model):
    """The speeds for one client, for 16 and for 64 at temperature 1, and those of llama.cpp's server in the same measurement where the server answered
    every request of so many clients."""
    def told(of_clients):
        many = " and ".join(f"**{of_clients[n]['tokens_per_second']:,.0f} tokens/s** for {n}" for n in (16, 64) if n in of_clients)
        return f"**{of_clients[1]['token_ms']:.2f} ms** a token for one client" + (many and f", {many}")

    rows = {r["shape"][0]: r for r in report["results"] if (r["model"], r["sampling"]) == (model, "temperature 1")}
    if not {1, 16, 64} <= rows.keys():
        return None
    prompt, answer = rows[1]["shape"][1:]
    line = (f"clients of `serve`, {model.replace('gpt-oss', 'GPT-OSS').replace('b', 'B')}'s shapes, prompts of {prompt} and answers of {answer} tokens sampled at temperature 1: "
            + told({n: r["clients"] for n, r in rows.items()}))
    rival = {n: rows[n]["llama.cpp"] for n in (1, 16, 64) if "llama.cpp" in rows[n] and not rows[n]["llama.cpp"].get("errors")}
    if 1 in rival:
        line += "; of llama.cpp's server " + told(rival).replace("**", "")
    return line + "."


def headline_of(suite, report, row, text, named):
    """The sentences of one alternative."""
    if suite == "serve":
        return [line for line in [serve_line(report, row["model"])] if line]
    lines = []
    alike = lambda a, b: in_our_words(a) == in_our_words(b) if isinstance(a, str) else a == b
    for r in (r for r in report["results"] if all(alike(r[k], v) for k, v in row.items())):
        us, values = r["ours_us"], {}
        rivals = {peer: time for peer, time in r["peers"].items() if named in (None, peer)}
        if "answer" in r:
            values = {"first_ms": r["answer"]["first_token_ms"], "whole_s": r["answer"]["whole_ms"] / 1e3}
        elif rivals:
            peer = min(rivals, key=rivals.get)
            values = {"peer": PEERS[peer], "peer_us": rivals[peer], "peer_ms": rivals[peer] / 1e3}
            if memory := r.get("memory_bytes"):
                values |= {"gb": memory["ours"] / 1e9, "peer_gb": memory[peer] / 1e9}
        if values:
            lines.append(text.format(us=us, ms=us / 1e3, **values))
    return lines


def headline(by_suite, step_reports):
    """README's first numbers, on GPUs and on CPUs, each with its day and beside the fastest peer of the same row."""
    for alternatives in HEADLINES:
        for suite, *rest in alternatives:
            lines = [f"- {report['gpu'].removeprefix('NVIDIA ')}, {' and '.join(reports.days_of(report))}: {line}" for report in by_suite.get(suite, []) for line in headline_of(suite, report, *rest)]
            yield from lines
            if lines:
                break
    for report in step_reports:
        by_mode = {r["mode"]: r["ms"] for r in report["results"] if all(r[k] == v for k, v in HEADLINE_STEP.items())}
        ours, peers = by_mode.pop("native", None), [by_mode[m] for m in ("eager", "compile") if m in by_mode]
        if ours and peers:
            yield (f"- {report['cpu']} ({report['level']}), {report['threads']} threads, {report['date']}: a whole training step of the preset `golf-small` without its recurrence "
                   f"(6 layers, 256 wide), in {HEADLINE_STEP['precision']}: **{ours:.0f} ms**; the faster of PyTorch eager and torch.compile takes {min(peers):.0f} ms.")


# README's rows: one or two of most suites, of the sizes that a reader compares first, measured on this GPU where its report has the row.
SUMMARY_GPU = "H200"
SUMMARY = {
    "rmsnorm": [("RMSNorm, backward", [65536, 1024], "bf16")],
    "mlp": [("MLP, 5 layers, forward + backward", [65536, 128], "f16"),
            ("MLP, 3 layers, forward + backward", [65536, 512], "f16")],
    "rope": [("QK norm + RoPE + gain, backward", [16384, 40, 128], "bf16")],
    "attention": [("Attention of 128-wide heads, 16/16", [2, 8192], "bf16"), ("Attention of 128-wide heads, 16/16, backward", [2, 8192], "bf16"),
                  ("Attention of 64-wide heads, 8/4, 195 documents, backward", [98304], "bf16")],
    "swiglu": [("SwiGLU forward + backward", [8192, 4096, 11008], "bf16")],
    "wide_mlp": [("LeakyReLU^2 MLP forward + backward", [98304, 512, 2048], "bf16")],
    "cross_entropy": [("linear + softcap + cross entropy, with gradients", [8192, 4096, 128256], "bf16")],
    "muon": [("all banks of golf, Newton-Schulz alone", [66, 512, 2048], "bf16")],
}


def gpu_summary(by_suite):
    rows = list(gpu_summary_rows(by_suite))
    days = {day for report, _ in rows for day in reports.days_of(report)}
    if days:
        yield f"Measured on {min(days)}" + (f" to {max(days)}" if len(days) > 1 else "") + "; the full tables state the day and the sources of each suite."
        yield ""
    yield "| | shape | dtype | Ingot | PyTorch | torch.compile | speed-up over the fastest peer |"
    yield "|---|---|---|---:|---:|---:|---:|"
    yield from (line for _, line in rows)


def gpu_summary_rows(by_suite):
    """Pairs of a report and a line of the table."""
    for suite, rows in SUMMARY.items():
        for name, shape, dtype in rows:
            of_gpu = {report["gpu"].removeprefix("NVIDIA ").split(" ")[0]: (report, r) for report in by_suite.get(suite, []) for r in report["results"]
                      if (r["name"], r["shape"], r["dtype"]) == (name, shape, dtype)}
            if not of_gpu:
                if any("incomplete" not in report for report in by_suite.get(suite, [])):
                    raise KeyError(f"{suite}: no {name} {shape} {dtype}")
                continue
            gpu = SUMMARY_GPU if SUMMARY_GPU in of_gpu else next(iter(of_gpu))
            report, r = of_gpu[gpu]
            us = {"torch_eager": "", "torch_compile": "", **{peer: f"{t:.1f}" for peer, t in r["peers"].items()}}
            yield report, (f"| {name}{'' if gpu == SUMMARY_GPU else f' ({gpu})'} | {' x '.join(f'{n:,}' for n in shape)} | {dtype} | {r['ours_us']:.1f} µs | {us['torch_eager']} | "
                   f"{us['torch_compile']} | {min(t for peer, t in r['peers'].items() if peer not in NO_RIVALS) / r['ours_us']:.2f}x |")


def cpu_summary(step_reports):
    yield "| training step, 2 threads | CPU | Ingot | PyTorch eager | torch.compile |"
    yield "|---|---|---:|---:|---:|"
    for report in step_reports:
        by_key = {(r["shape"], r["precision"], r["mode"]): r["ms"] for r in report["results"]}
        for shape, precision in dict.fromkeys((s, p) for s, p, _ in by_key):
            ms = [by_key.get((shape, precision, mode)) for mode in ("native", "eager", "compile")]
            if shape == "golf" and all(ms):
                yield f"| {shape}, {precision} | {report['cpu']} ({report['level']}), {report['date']} | {ms[0]:.0f} ms | {ms[1]:.0f} | {ms[2]:.0f} |"


# Suites measured on CPUs: bench/cpu/<cpu>/SUITE.json.
CPU_TABLES = {"train_step": train_step_table, "tinyshakespeare": held_out_table, "bpe": bpe_table, "archive_load": archive_load_table,
              "write_files": write_files_table, "accuracy": accuracy_table}


# --- figures in sentences ---
def of_gpu(suite, name, shape=None, dtype=None):
    """The row of SUMMARY_GPU's report, by the glossary's words."""
    (report,) = [r for _, r in reports.all_reports() if r["suite"] == suite and SUMMARY_GPU in r["gpu"]]
    (row,) = [r for r in report["results"] if (row_name(r).startswith(name) if name.endswith(", ") else in_our_words(r["name"]) == name)
              and shape in (None, r["shape"]) and dtype in (None, r["dtype"])]
    return row


def times(suite, name, peer, *key):
    """The peer's time divided by Ingot's, of one row of a report."""
    row = of_gpu(suite, name, *key)
    return row["peers"][peer] / row["ours_us"]


def figures(pattern, *values):
    return [format(value, pattern) for value in values]


def between(pattern, values):
    return figures(pattern, min(values), max(values))


_LOSS = "linear + softcap + cross entropy, with gradients"
_FILTERS = "top-k 40, top-p 0.9, min-p 0.05"
_120B = "gpt-oss-120b, bf16 dense"


def losses_beside_liger():
    (report,) = [r for _, r in reports.all_reports() if r["suite"] == "cross_entropy" and SUMMARY_GPU in r["gpu"]]
    rows = [r for r in report["results"] if "liger" in r["peers"]]
    capped = [r for r in rows if r["name"].startswith(_LOSS)]
    (plain,) = [r for r in rows if r not in capped]
    return [*between(".1f", [r["peers"]["liger"] / r["ours_us"] for r in capped]), *figures(".1f", plain["peers"]["liger"] / plain["ours_us"]),
            *(gb for who in ("liger", "ours") for gb in between(".2f", [r["memory_bytes"][who] / 1e9 for r in rows]))]


def two_gpus_train():
    (report,) = [r for _, r in reports.all_reports() if r["suite"] == "train_gpus" and SUMMARY_GPU in r["gpu"]]
    return between(".2f", [r["peers"]["one GPU"] / r["ours_us"] for r in report["results"] if ", 2 GPUs, " in r["name"]])


# {page: [(sentence, a function that gives a figure for each {} in it)]}. A figure has digits, points and commas.
SENTENCES = {
    "CHANGELOG.md": [
        ("top-k, top-p and min-p together {} µs for one row of 201,088 logits and {} for 16 rows on an H200, from 59 and 117. The greedy choice for 64 rows takes {} µs, from 42.",
         lambda: figures(".0f", of_gpu("sampling", _FILTERS, [1, 201088])["ours_us"], of_gpu("sampling", _FILTERS, [16, 201088])["ours_us"],
                         of_gpu("sampling", "greedy", [64, 201088])["ours_us"])),
        ("the kernels of a step of 2, 4 and 8 answers of 120B take {}, {} and {} ms on an H200, in place of 3.03, 3.90 and 5.56 ms.",
         lambda: figures(".2f", *(of_gpu("decode", f"{_120B}, {n} sequences per pass, ", [n, 1024])["ours_us"] / 1e3 for n in (2, 4, 8)))),
        ("drafts of three accepted tokens {} ms a token of 120B, from 0.99.", lambda: figures(".2f", of_gpu("draft", f"{_120B}, drafts of 3, all accepted")["ours_us"] / 1e3)),
        ("forward {} µs for 64 x 4,096 x 4,096 in bf16 on an H200, from 26.8.", lambda: figures(".1f", of_gpu("swiglu", "SwiGLU forward", [64, 4096, 4096])["ours_us"])),
    ],
    "docs/benchmark-method.md": [
        ("with a softcap Liger takes {} to {} times as long as Ingot, without one {} times. Liger needs {} to {} GB, Ingot {} to {} GB.", losses_beside_liger),
        ("where the table's run has {}; the backward pass took 1.35 times the time of Ingot's seven products, and the table's run has {} times that of five.",
         lambda: figures(".2f", times("attention", "Attention of 128-wide heads, 16/16", "torch_compile", [2, 8192]),
                         times("attention", "Attention of 128-wide heads, 16/16, backward", "torch_compile", [2, 8192]))),
    ],
    "docs/gpt-oss.md": [
        ("On an H200 the prefilter saves {} ms of a token",
         lambda: figures(".2f", (of_gpu("decode", _120B, [1024])["ours_us"] - of_gpu("decode", _120B + PREFILTERED, [1024])["ours_us"]) / 1e3)),
    ],
    "docs/gpt-oss-internals.md": [
        ("Two GPUs take {} of one GPU's time for a token",
         lambda: figures(".2f", 1 / times("decode_gpus", f"{_120B}, 2 GPUs, tensor{PREFILTERED}", "one GPU"))),
    ],
    "docs/mlp.md": [
        ("take {} of torch.compile's time forward and {} forward and backward. At 512 wide, where products dominate, Ingot is {} and {} times as fast.",
         lambda: figures(".2f", *(1 / times("mlp", f"MLP, 3 layers, forward{more}", "torch_compile", [65536, 128], "f16") for more in ("", " + backward")),
                         *(times("mlp", f"MLP, 3 layers, forward{more}", "torch_compile", [65536, 512], "f16") for more in ("", " + backward")))),
    ],
    "docs/runs.md": [
        ("Two H200s make a step of `golf` {} to {} times as fast as one", two_gpus_train),
    ],
}


def with_figures(page, text):
    """The page with the figures of SENTENCES; a sentence that does not stand exactly once in the page is an error."""
    for sentence, values in SENTENCES.get(page, []):
        pattern = re.compile(r"[\d.,]*\d".join(map(re.escape, sentence.split("{}"))))
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{page}: found {len(pattern.findall(text))} places of \"{sentence}\", expected 1 (SENTENCES of tools/report_tables.py)")
        text = pattern.sub(lambda _: sentence.format(*values()), text)
    return text


def filled(text):
    by_suite = {}
    for _, report in reports.all_reports():
        by_suite.setdefault(report["suite"], []).append(report)

    def on_cpus(suite):
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((reports.ROOT / "bench" / "cpu").glob(f"*/{suite}.json"))]

    def shown(suite):
        """The reports of all GPUs, or only that of SUMMARY_GPU where it is complete."""
        return [r for r in suite if SUMMARY_GPU in r["gpu"] and "incomplete" not in r] or suite

    def fill(match):
        lines = []
        if match[2] == "headline":
            lines = list(headline({suite: shown(found) for suite, found in by_suite.items()}, on_cpus("train_step")))
            return match[1] + "".join(line + "\n" for line in lines) + match[3]
        if match[2] == "gpu_summary":
            lines = [*gpu_summary(by_suite), ""]
        if match[2] == "cpu_summary":
            lines = [*cpu_summary(on_cpus("train_step")), ""]
        if match[2] in CPU_TABLES:
            for report in on_cpus(match[2]):
                lines += [*CPU_TABLES[match[2]](report), ""]
        suite, lines_of = PAGE_TABLES.get(match[2], (match[2], GPU_TABLES.get(match[2], table)))
        for report in (list if suite in reports.NO_BENCHMARKS else tabled)(by_suite.get(suite, [])):
            lines += [*lines_of(report), ""]
        how = f"bench/{suite}.py` writes it." if suite in CPU_TABLES else f"{reports.how_to_measure(suite)}` on a machine with a GPU writes it."
        return match[1] + "\n".join(lines or [f"No report yet: `{how}", ""]) + match[3]

    return MARKED.sub(fill, text)


PICTURE = mlp_picture.PICTURE.relative_to(reports.ROOT).as_posix()
PAGES = ["README.md", "CHANGELOG.md", *sorted(p.relative_to(reports.ROOT).as_posix() for p in (reports.ROOT / "docs").glob("*.md")), PICTURE]


def main():
    check = "--check" in sys.argv[1:]
    pages = [a for a in sys.argv[1:] if a != "--check"] or PAGES
    old = []
    for page in map(pathlib.Path, pages):
        text = page.read_text(encoding="utf-8")
        new = mlp_picture.drawn() or text if page.as_posix() == PICTURE else with_figures(page.as_posix(), filled(text))
        if new != text and check:
            old.append(str(page))
        elif new != text:
            page.write_text(new, encoding="utf-8")
    if old:
        print(f"tables not current: {', '.join(old)}; run python3 tools/report_tables.py {' '.join(old)}")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
