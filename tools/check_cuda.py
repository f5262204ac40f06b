"""The gates CUDA code must pass on a machine without a GPU. Compiles every .cu's kernels as the build does for sm_90a, assembles them for older
targets whose PTX travels with them, and has the compiler read every .cpp that changes with CUDA. For a .cu's kernels nvcc reads the whole file:
errors in its host code are found, launches and instances of templates among them; code for it is not made. Fails on: an error; registers spilled; local memory;
ptxas C7508, C7510, C7511 or C7512 (a register request ignored, wgmma serialised); another target than sm_90a; a translation unit of more than
a minute of CPU time.

    python3 tools/check_cuda.py [--build DIR]     prints one line per file; exit status 77 where there is no nvcc
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
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

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
BAD = [
    (re.compile(r"([1-9]\d*) bytes spill (stores|loads)"), "registers are spilled"),
    (re.compile(r"Local memory used"), "local memory is used"),
    (re.compile(r"([1-9]\d*) bytes stack frame"), "a stack frame is used"),
    (re.compile(r"\bC75(08|10|11|12)\b"), "ptxas ignored a register request or serialised wgmma"),
    (re.compile(r"wgmma.*serialized|setmaxnreg ignored"), "ptxas ignored a register request or serialised wgmma"),
]


def findings(log):
    """What the gates object to in one compiler log, with the kernel it was said of."""
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
    """The build's command as the gates run it, less the targets of which only PTX travels, and those targets."""
    # Nobody keeps the objects: their host side would take three to seven seconds each, a third of the gates' time, lines a twentieth of it.
    unneeded = {"--compress-mode=size": None, "-lineinfo": None, "-O3": None}
    words = [unneeded.get(word, word) for word in shlex.split(command)]
    words = [word for word in words if word is not None]
    ptx = [at for at, word in enumerate(words) if re.fullmatch(r"arch=(compute_\d+),code=\1", word)]
    targets = [words[at][len("arch=compute_"):words[at].index(",")] for at in ptx]
    return [word for at, word in enumerate(words) if at not in ptx and at + 1 not in ptx], targets


def run(command, directory):
    """(exit status, CPU seconds, log) of a command and all its children."""
    # Another process in between, so that the CPU time of nvcc's own children is counted for this command alone.
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
    if source.suffix == ".cpp":  # its code is not looked at
        command.append("-fsyntax-only")
    else:
        command[command.index("-c")] = "-cubin"
    status, seconds, log = run(command, entry["directory"])
    bad = [f"exit status {status}:\n{log}"] if status != 0 else []
    bad += findings(log)
    if source.suffix == ".cu" and TARGET not in " ".join(command):
        bad.append(f"found no {TARGET} in the compile command")
    for target in ptx_targets:
        # The driver compiles it where it runs. Whether every instruction exists there takes no optimisation to see.
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


def self_check():
    """The patterns must see what ptxas writes, or the gates pass everything."""
    seen = ["ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'\n    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
            "    0 bytes stack frame, 16 bytes spill stores, 16 bytes spill loads",
            "ptxas warning : Local memory used for function '_Z1kv', size of stack frame: 8 bytes",
            "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."]
    clean = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert all(list(findings(line)) for line in seen) and not list(findings(clean)), "the gates' patterns do not match ptxas"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=str(ROOT / "build" / "cuda-gates"))
    build = pathlib.Path(parser.parse_args().build).resolve()
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
    # Files that read differently with CUDA: instances, those beside a .cu, and the device layer.
    rooms = {pathlib.Path(c["file"]).parent for c in commands if c["file"].endswith(".cu")}
    wanted = [c for c in commands if pathlib.Path(c["file"]).parent in rooms and ".simd." not in c["file"]]
    wanted.sort(key=lambda c: c["file"].endswith(".cpp"))  # short ones last, so that both threads end together
    failed = False
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        for source, seconds, registers, bad in pool.map(lambda c: compile_one(c, folder), wanted):
            kernels = f", {len(registers)} kernels of at most {max(registers)} registers" if registers else ""
            name = source.relative_to(next(p for p in (build, ROOT) if source.is_relative_to(p)))
            print(f"{name}: {seconds:.1f} s{kernels}")
            for problem in bad:
                failed = True
                print(f"  FAILED {problem}")
    print("cuda gates: " + ("failed" if failed else f"ok ({len(wanted)} files)"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
