"""The gates CUDA code must pass on a machine without a GPU. Compiles the kernels of every .cu as the build does for sm_90a, assembles them for the
older targets whose PTX travels with them, and has the compiler read every .cpp that changes with CUDA. For a .cu nvcc reads the whole file: errors
in host code are found, launches and instances of templates included; no host object is made. The gates fail on: a compiler error; spilled registers;
local memory; ptxas C7508, C7510, C7511 or C7512 (an ignored register request, serialised wgmma); another target than sm_90a; a translation unit of
more than a minute of CPU time.

    python3 tools/check_cuda.py [--build DIR] [--record] [--all]     prints one line per file; exit status 77 where there is no nvcc

A file that passed does so again when nothing that the compiler reads has changed. tools/cuda_gates.json records for each file that passed a key: a
hash of the file and of all headers of the tree that it includes (without comments, which the compiler does not read either), of its command line and of
both compilers' versions. A run compiles only the files whose key is not recorded, and a random sample of the recorded files, so that a wrong record
does not stay unseen. --all compiles every file. --record writes the keys of the files that passed into the record: commit the record with the
change.
"""
import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 60
TARGET = "arch=compute_90a,code=sm_90a"
NO_NVCC = 77
RECORD = ROOT / "tools" / "cuda_gates.json"
SAMPLE = 6  # recorded files that are compiled nevertheless

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
BAD = [
    (re.compile(r"([1-9]\d*) bytes spill (stores|loads)"), "registers are spilled"),
    (re.compile(r"Local memory used"), "local memory is used"),
    (re.compile(r"([1-9]\d*) bytes stack frame"), "a stack frame is used"),
    (re.compile(r"\bC75(08|10|11|12)\b"), "ptxas ignored a register request or serialised wgmma"),
    (re.compile(r"wgmma.*serialized|setmaxnreg ignored"), "ptxas ignored a register request or serialised wgmma"),
]


def findings(log):
    """The objections of the gates to one compiler log, each with its kernel."""
    kernel = "?"
    for line in log.splitlines():
        entry = ENTRY.search(line)
        if entry:
            kernel = entry[1]
        for pattern, what in BAD:
            if pattern.search(line):
                yield f"{kernel}: {what}: {line.strip()}"
                break


def split(command):
    """The build's command in the form of the gates, without the targets that are shipped as PTX only; and these targets."""
    # No object is kept. Compiling the host side would take three to seven seconds per file, a third of the gates' time, line information a twentieth.
    unneeded = {"--compress-mode=size": None, "-lineinfo": None, "-O3": None}
    words = [unneeded.get(word, word) for word in shlex.split(command)]
    words = [word for word in words if word is not None]
    ptx = [at for at, word in enumerate(words) if re.fullmatch(r"arch=(compute_\d+),code=\1", word)]
    targets = [words[at][len("arch=compute_"):words[at].index(",")] for at in ptx]
    return [word for at, word in enumerate(words) if at not in ptx and at + 1 not in ptx], targets


def run(command, directory):
    """(exit status, CPU seconds, log) of a command and all its children."""
    # A process in between, so that the CPU time of nvcc's children is counted for this command only.
    timed = [sys.executable, "-c",
             "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); u = resource.getrusage(resource.RUSAGE_CHILDREN);"
             "print(f'cpu {u.ru_utime + u.ru_stime:.1f}'); sys.exit(code)", *command]
    done = subprocess.run(timed, cwd=directory, capture_output=True, text=True)
    seconds = float((re.findall(r"^cpu ([\d.]+)$", done.stdout, re.M) or ["0"])[-1])
    return done.returncode, seconds, done.stdout + done.stderr


def compile_one(entry, folder):
    source = pathlib.Path(entry["file"])
    command, ptx_targets = split(entry["command"])
    output = command.index("-o") + 1
    command[output] = str(pathlib.Path(folder) / command[output].replace("/", "_"))
    if source.suffix == ".cpp":  # its machine code is not checked
        command.append("-fsyntax-only")
    else:
        command[command.index("-c")] = "-cubin"
    status, seconds, log = run(command, entry["directory"])
    bad = [f"exit status {status}:\n{log}"] if status != 0 else []
    bad += findings(log)
    if source.suffix == ".cu" and TARGET not in " ".join(command):
        bad.append(f"found no {TARGET} in the compile command")
    for target in ptx_targets:
        # The driver compiles the PTX on the target. An unoptimised assembly shows whether every instruction exists there.
        assembled = [word for word in command if word not in ("-gencode", TARGET)]
        assembled += ["-gencode", f"arch=compute_{target},code=sm_{target}", "-Xcicc=-O1", "-Xptxas=-O0"]
        status, more, ptx_log = run(assembled, entry["directory"])
        seconds += more
        if status != 0:
            bad.append(f"sm_{target}: exit status {status}:\n{ptx_log}")
    if seconds > SECONDS:
        bad.append(f"found {seconds:.0f} s of CPU time, expected at most {SECONDS}")
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    return source, seconds, registers, bad


# A string or character literal, which may contain comment signs, or a comment.
STRING_OR_COMMENT = re.compile(r'R"(\w*)\((?:.|\n)*?\)\1"|\'(?:\\.|[^\'\\\n])\'|"(?:[^"\\\n]|\\.)*"|//[^\n]*(?:\\\n[^\n]*)*|/\*(?:.|\n)*?\*/')
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.M)


def code_of(text):
    """The text without comments, empty lines and indentation."""
    text = STRING_OR_COMMENT.sub(lambda found: " " if found[0].startswith("/") else found[0], text)
    return "\n".join(line for line in (" ".join(line.split()) for line in text.splitlines()) if line)


@functools.cache
def headers_of(path, folders):
    """{path: hash of the code} of a file and of every file of `folders` that the file includes, directly or indirectly."""
    found, waiting = {}, [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        code = code_of(file.read_text(encoding="utf-8"))
        found[file] = hashlib.sha256(code.encode()).hexdigest()
        for name in INCLUDE.findall(code):
            waiting += [place for place in ((folder / name).resolve() for folder in (file.parent, *folders)) if place.is_file()][:1]
    return found


def name_of(source, build):
    return source.relative_to(next(p for p in (build, ROOT) if source.is_relative_to(p))).as_posix()


def versions():
    """The version strings of the compilers."""
    return [subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
            for name in (os.environ.get("CUDACXX", "nvcc"), os.environ.get("CXX", "c++"))]


def key_of(entry, build, compilers):
    """The hash of everything that decides whether a file passes. Paths are relative to the tree and to the build directory."""
    def relative(text):
        return text.replace(str(build), "BUILD").replace(str(ROOT), "TREE")
    folders = (ROOT / "src", build / "generated")
    headers = headers_of(pathlib.Path(entry["file"]).resolve(), folders)
    # The command as a list of words, without the paths of this machine; only the order of CMake's include folders remains.
    words = [relative(word) for word in shlex.split(entry["command"])]
    text = [*compilers, *words, *sorted(f"{relative(str(path))} {code}" for path, code in headers.items())]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:24]


def to_compile(entries, keys, record, everything):
    """The entries whose key is not recorded, and a sample of the recorded entries."""
    recorded = [] if everything else [e for e in entries if record.get(keys[e["file"]][0]) == keys[e["file"]][1]]
    sample = random.sample(recorded, min(SAMPLE, len(recorded)))
    return [e for e in entries if e not in recorded or e in sample], len(recorded) - len(sample)


def self_check():
    """Checks that the patterns match the output of ptxas; otherwise the gates would pass everything."""
    seen = ["ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'\n    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
            "    0 bytes stack frame, 16 bytes spill stores, 16 bytes spill loads",
            "ptxas warning : Local memory used for function '_Z1kv', size of stack frame: 8 bytes",
            "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."]
    clean = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert all(list(findings(line)) for line in seen) and not list(findings(clean)), "the gates' patterns do not match ptxas"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=str(ROOT / "build" / "cuda-gates"))
    parser.add_argument("--record", action="store_true", help="write the keys of the files that pass into tools/cuda_gates.json")
    parser.add_argument("--all", action="store_true", help="compile the recorded files too")
    options = parser.parse_args()
    build = pathlib.Path(options.build).resolve()
    self_check()
    if shutil.which(os.environ.get("CUDACXX", "nvcc")) is None:
        print("cuda gates: no nvcc here, nothing checked")
        return NO_NVCC
    configured = subprocess.run(["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build), "-DINGOT_CUDA=ON", "-DINGOT_APPS=OFF",
                                 "-DINGOT_TESTS=OFF", "-DINGOT_CCACHE=OFF"],  # a cached log says nothing about this compiler run
                                capture_output=True, text=True)
    if configured.returncode != 0:
        print(configured.stdout + configured.stderr)
        return 1
    commands = json.loads((build / "compile_commands.json").read_text())
    # Files whose text depends on CUDA: instances, files beside a .cu, and the device layer.
    rooms = {pathlib.Path(c["file"]).parent for c in commands if c["file"].endswith(".cu")}
    wanted = [c for c in commands if pathlib.Path(c["file"]).parent in rooms and ".simd." not in c["file"]]
    wanted.sort(key=lambda c: c["file"].endswith(".cpp"))  # short ones last, so that both threads end together
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    compilers = versions()
    keys = {c["file"]: (name_of(pathlib.Path(c["file"]), build), key_of(c, build, compilers)) for c in wanted}
    chosen, known = to_compile(wanted, keys, record, options.all)
    passed = dict(item for file, item in keys.items() if record.get(item[0]) == item[1])
    failed = False
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        for source, seconds, registers, bad in pool.map(lambda c: compile_one(c, folder), chosen):
            kernels = f", {len(registers)} kernels of at most {max(registers)} registers" if registers else ""
            name, key = keys[str(source)]
            print(f"{name}: {seconds:.1f} s{kernels}", flush=True)
            passed.pop(name, None)
            for problem in bad:
                failed = True
                print(f"  FAILED {problem}")
            if not bad:
                passed[name] = key
    if options.record:
        RECORD.write_text(json.dumps(passed, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    print("cuda gates: " + ("failed" if failed else f"ok ({len(chosen)} files compiled, {known} recorded as they are now)"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
