"""Common code of the tools for bench/results/<gpu>/<suite>.json: the files that a suite exercises, their hash, and the format."""
import hashlib
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
UNFINISHED = "unfinished"  # in a GPU's folder of RESULTS: reports that lack cases

# The rooms that a suite exercises, for suites without a room of the same name.
ROOMS = {"mlp": ["mlp", "activation"], "swiglu": ["swiglu", "linear"], "gate": ["swiglu", "activation"], "wide_mlp": ["linear", "activation"], "cross_entropy": ["cross_entropy", "linear"],
         "experts": ["expert_linear"], "host_cost": ["rmsnorm", "mlp"]}
# Folders outside the rooms that a suite exercises.
ELSEWHERE = {"host_cost": ["bindings/python/native", "bindings/python/ingot"]}
# Files in these places that the measured calls do not run: host_cost times modules of ingot.nn alone, not models of transformers and not the engine.
NOT_RUN = {"host_cost": re.compile(r"bindings/python/ingot/(hf|_hf_\w+|engine)\.pyi?")}
# Code under every suite besides its rooms: src/gpu, src/core and the files of the compilers' flags.
COMMON = ["src/ingot/gpu", "src/ingot/core", "cmake/IngotCuda.cmake", "cmake/IngotFlags.cmake"]
# The rooms and folders that compute a token: attention, router, quantised weights, sampling and the model's own folders.
ROOMS["decode"] = ["attention", "moe", "quant", "sampling"]
ELSEWHERE["decode"] = ["src/ingot/apps/cli/measure", "src/ingot/megakernel", "src/ingot/models/decode", "src/ingot/models/gpt_oss"]
ROOMS["families"], ELSEWHERE["families"] = ROOMS["decode"], [*ELSEWHERE["decode"], "src/ingot/models/families"]
ROOMS["prompt"], ELSEWHERE["prompt"] = [*ROOMS["decode"], "grouped"], ELSEWHERE["decode"]
ROOMS["decode_gpus"], ELSEWHERE["decode_gpus"] = ROOMS["prompt"], ELSEWHERE["decode"]  # the same with several GPUs
ROOMS["draft"], ELSEWHERE["draft"] = ROOMS["prompt"], [*ELSEWHERE["decode"], "src/ingot/engines/generate", "src/ingot/models/draft"]
ROOMS["serve"], ELSEWHERE["serve"] = ROOMS["prompt"], [*ELSEWHERE["decode"], "src/ingot/apps/server", "src/ingot/engines/serve"]
ROOMS["host_token"], ELSEWHERE["host_token"] = ROOMS["prompt"], [*ELSEWHERE["serve"], "src/ingot/engines/generate", "bindings/python/native"]
# The rooms of a training step of the preset golf.
ROOMS["train"] = ["activation", "adamw", "attention", "axpby", "copy", "cross_entropy", "embedding", "lane_write", "linear", "mix", "muon",
                  "residual", "rmsnorm", "rope", "scaled_add", "skip_merge", "sum"]
ELSEWHERE["train"] = ["src/ingot/engines/train", "src/ingot/models/gpt"]
# A training step of a model of transformers after ingot.hf.patch.
ROOMS["models"], ELSEWHERE["models"] = ["rmsnorm", "swiglu", "activation", "linear", "cross_entropy", "attention", "rope"], ELSEWHERE["host_cost"]
for _suite in ("train_gpus", "train_memory"):
    ROOMS[_suite], ELSEWHERE[_suite] = ROOMS["train"], ELSEWHERE["train"]
ROOMS["ttt"] = [room for room in ROOMS["train"] if room not in ("muon", "sum")]
ELSEWHERE["ttt"] = ["src/ingot/engines/ttt", "src/ingot/models/gpt"]
# The rooms of a generated token of a model of the trainer.
ROOMS["generate"] = [room for room in ROOMS["ttt"] if room not in ("adamw", "cross_entropy")] + ["sampling"]
ELSEWHERE["generate"] = ["src/ingot/engines/generate", "src/ingot/models/gpt"]
# Suites whose operation is a single function of PyTorch, with this peer's name: torch.compile would call the same function.
PYTORCH_FUNCTION = {"experts": "grouped_mm"}
# Suites with times only; tests check the computed values.
TIMES_ALONE = {"sampling", "decode", "families", "decode_gpus", "draft", "prompt", "serve", "host_token", "train", "train_gpus", "train_memory", "generate", "ttt"}
# Operations by their portable variants, and the tokens and prompts of GPT-OSS.
ROOMS["portable"] = ["attention", "cross_entropy", "grouped", "linear", "activation", "moe", "muon", "quant", "rmsnorm", "rope", "sampling", "swiglu"]
ELSEWHERE["portable"] = ELSEWHERE["decode"]
# Suites whose products may use cuBLASLt.
WITH_LIBRARY = {"linear", "swiglu", "wide_mlp", "cross_entropy", "train", "train_gpus", "train_memory", "ttt", "generate", "models"}
# Suites whose original project published kernels, which are measured too.
WITH_ORIGIN = {"rmsnorm", "mlp"}
SOURCES = {".h", ".cpp", ".cu", ".cuh", ".txt", ".cmake", ".py"}


# The findings of compute-sanitizer by tool (tools/sanitize.py): no benchmark, but a report of the same tree, checked like the others.
SANITIZERS = "sanitizers"
# The tests of a GPU (tools/gpu_tests.py), likewise; their tree is that of all rooms, models and engines.
GPU_TESTS = "gpu_tests"
ELSEWHERE[GPU_TESTS] = ["src/ingot/engines", "src/ingot/megakernel", "src/ingot/models"]
NO_BENCHMARKS = {SANITIZERS: "tools/sanitize.py", GPU_TESTS: "tools/gpu_tests.py"}


def imitating(suite, capability):
    """The suite's name for a run with the limits of another GPU (INGOT_GPU_AS): gpu_tests_as_8_0."""
    return f"{suite}_as_{capability.replace('.', '_')}"


for _capability in ("8.0", "8.6", "8.9", "10.0", "12.0"):
    for _suite in (SANITIZERS, GPU_TESTS):
        NO_BENCHMARKS[imitating(_suite, _capability)] = f"{NO_BENCHMARKS[_suite]} --as {_capability}"
    ELSEWHERE[imitating(GPU_TESTS, _capability)] = ELSEWHERE[GPU_TESTS]


def folder_of(gpu):
    """The folder of bench/results for a GPU's name: "NVIDIA H200" is h200."""
    found = re.search(r"[A-Z]+\d+\w*", gpu)
    return (found[0] if found else gpu.replace(" ", "-")).lower()


def outdated(suites, gpu, results=RESULTS):
    """[(suite, its last whole report or None)] of the suites without a whole report of this tree on this GPU: first those without a report, then by age."""
    found = []
    for suite in suites:
        report = read(paths_of(suite, results / folder_of(gpu))[0])
        if not report or "incomplete" in report or report["gpu"] != gpu or not holds(report, tree_hash(suite)):
            found.append((suite, report or None))
    return sorted(found, key=lambda entry: "" if entry[1] is None else entry[1]["date"])


def how_to_measure(suite):
    return NO_BENCHMARKS[suite] if suite in NO_BENCHMARKS else f"bench/gpu.py {suite}"


def rooms_of(suite, root):
    if suite in NO_BENCHMARKS:
        return sorted({path.parent.name for path in (root / "src/ingot/kernels").glob("*/*.cu")})
    return ROOMS.get(suite, [suite])


def places_of(suite, root=ROOT):
    return [f"src/ingot/kernels/{room}" for room in rooms_of(suite, root)] + ELSEWHERE.get(suite, []) + COMMON


def files_of(suite, root=ROOT):
    for place in places_of(suite, root):
        path = root / place
        if not path.exists():
            raise FileNotFoundError(f"suite {suite}: found no {place}")
        found = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and p.suffix in SOURCES]
        yield from (p for p in found if not any(part in p.name for part in (".test.", ".bench.", ".native.", ".fuzz.")) and p.parent.name != "emulation"
                    and not (suite in NOT_RUN and NOT_RUN[suite].fullmatch(p.relative_to(root).as_posix())))


def tree_hash(suite, root=ROOT):
    """One hash of the names and contents of the suite's files; needs no git."""
    total = hashlib.sha256()
    for path in sorted(files_of(suite, root)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return total.hexdigest()[:16]


def bench_files(suite, root=ROOT):
    """The programs that measure a suite: bench/peers/gpu_<suite>.py and the files beside it that it imports or names in quotation marks, and those of these files.
    Empty for suites that are no benchmarks."""
    peers, found = root / "bench" / "peers", set()
    left = set() if suite in NO_BENCHMARKS else {peers / f"gpu_{suite}.py"}
    while left:
        path = left.pop()
        found.add(path)
        text = path.read_text(encoding="utf-8")
        named = [*(f"{module}.py" for module in re.findall(r"^\s*(?:import|from) (\w+)", text, re.M)), *re.findall(r'"(\w+\.\w+)"', text)]
        left |= {peers / name for name in named if (peers / name).is_file()} - found
    return sorted(found)


def bench_hash(suite, root=ROOT):
    """One hash of bench_files, for an unfinished report: cases and peers of other programs do not belong into the same report. Whole reports have none, so that
    a new case or another peer does not make a report stale."""
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in bench_files(suite, root))).hexdigest()[:16]


def can_be_continued(report, suite, tree=None):
    """Whether the missing cases of a report can be measured on this tree: the report holds, and if it is unfinished, the programs that measured it are the same."""
    return holds(report, tree or tree_hash(suite)) and report.get("bench", bench_hash(suite)) == bench_hash(suite)


def holds(report, tree):
    """Whether a report describes this tree: the same sources, or kernels of the same machine code (tools/same_kernels.py --reports)."""
    return tree in (report["tree"], report.get("same_kernels", {}).get("tree"))


def paths_of(suite, folder):
    """The places of a suite's whole report and of its unfinished one (tools/suite_report.py) in the folder of a GPU."""
    return folder / f"{suite}.json", folder / UNFINISHED / f"{suite}.json"


def read(path):
    """A report; {} where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def continued(suite, gpu, paths, fits=lambda report: True):
    """The first report of `paths` made on a `gpu` that can be continued, names its cases and for which fits(report) holds; None if there is none."""
    for report in map(read, paths):
        if report and report["gpu"] == gpu and can_be_continued(report, suite) and "case_seconds" in report and fits(report):
            return report
    return None


def days_of(report):
    """The days of a report's calls, the first one first."""
    return sorted({call["date"] for call in (*report.get("earlier", []), report)})


_REPORT = {"suite": str, "tree": str, "gpu": str, "driver": str, "cuda": str, "date": str, "command": str, "ceilings": dict,
           "results": list}
_RESULT = {"name": str, "shape": list, "dtype": str, "ours_us": float, "peers": dict, "limit_us": float, "error": float,
           "tolerance": float}
_SANITIZED = {"tool": str, "executable": str, "tests": int, "errors": int, "status": int}
_IMITATED = {"capability": str, "code": str, "grade": str}
_TESTED = {"test": str, "seconds": float, "passed": int, "skipped": int, "failed": int, "slowest": str, "slowest_seconds": float}


def problems_of(report):
    """The faults in a report's form or numbers, as sentences."""
    def typed(where, table, fields):
        for name, kind in fields.items():
            if name not in table:
                yield f"{where}: {name} is missing"
            elif not isinstance(table[name], (int, float) if kind is float else kind) or isinstance(table[name], bool):
                yield f"{where}: {name}: found {table[name]!r}, expected a {kind.__name__}"

    benchmark = report.get("suite") not in NO_BENCHMARKS
    bad = list(typed("report", report, {k: v for k, v in _REPORT.items() if benchmark or k != "ceilings"}))
    if bad:
        return bad
    kind = report["suite"].split("_as_")[0]
    if kind != report["suite"]:
        bad += typed("as", report.get("as", {}), _IMITATED)
    if kind == GPU_TESTS:
        for test in report["results"]:
            wrong = list(typed(test.get("test"), test, _TESTED))
            bad += wrong or ([f"{test['test']}: found {test['failed']} failed cases, expected none"] if test["failed"] else [])
        return bad if report["results"] else ["report: found no results"]
    if kind == SANITIZERS:
        for run in report["results"]:
            where = f"{run.get('tool')} of {run.get('executable')}"
            wrong = list(typed(where, run, _SANITIZED))
            bad += wrong
            if not wrong and (run["errors"] != 0 or run["status"] != 0 or run["tests"] < 1):
                bad.append(f"{where}: found {run['errors']} errors, status {run['status']}, {run['tests']} tests passed; "
                           "expected 0, 0, at least 1")
        return bad if report["results"] else ["report: found no results"]
    for name in ("copy_TBps", "read_TBps", "bf16_TFLOPs"):
        if not isinstance(report["ceilings"].get(name), (int, float)):
            bad.append(f"ceilings: {name}: found {report['ceilings'].get(name)!r}, expected a number")
    if not report["results"]:
        bad.append("report: found no results")
    if report["suite"] in WITH_ORIGIN and report["results"] and not any("origin" in result.get("peers", {}) for result in report["results"]):
        bad.append("report: found no times of the origin's kernels, expected them (.origins, see tools/gpu.sh)")
    times_alone = report["suite"] in TIMES_ALONE
    for i, result in enumerate(report["results"]):
        where = f"results[{i}] {result.get('name', '')}"
        unchecked = times_alone or "tests" in result  # a row may name the tests that check its values instead
        wrong = list(typed(where, result, {k: v for k, v in _RESULT.items() if not (unchecked and k in ("error", "tolerance"))}))
        bad += wrong
        if wrong:
            continue
        eager = PYTORCH_FUNCTION.get(report["suite"], "torch_eager")
        if not unchecked and eager not in result["peers"]:
            bad.append(f"{where}: peer {eager} is missing")
        if not unchecked and eager == "torch_eager" and "torch_compile" not in {**result["peers"], **result.get("absent", {})}:
            bad.append(f"{where}: peer torch_compile is missing, and no word why")
        if not all(isinstance(us, (int, float)) and us > 0 for us in [result["ours_us"], *result["peers"].values()]):
            bad.append(f"{where}: found a time that is not above 0")
        if not unchecked and not result["error"] <= result["tolerance"]:
            bad.append(f"{where}: error: found {result['error']}, expected at most {result['tolerance']}")
    return bad


def all_reports(results=RESULTS):
    for path in sorted(results.glob("*/*.json")):
        yield path, read(path)


def unfinished_reports(results=RESULTS):
    for path in sorted(results.glob(f"*/{UNFINISHED}/*.json")):
        yield path, read(path)
