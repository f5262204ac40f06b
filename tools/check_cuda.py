"""The gates CUDA code must pass on a machine without a GPU. Compiles every .cu as the build does, and has the compiler read every
.cpp that changes with CUDA. Fails on: an error; registers spilled; local memory; ptxas C7508, C7510 or C7511 (a register request ignored,
wgmma serialised); another target than sm_90a; a translation unit of more than a minute of CPU time.

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
    (re.compile(r"\bC75(08|10|11)\b"), "ptxas ignored a register request or serialised wgmma"),
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


def compile_one(entry, folder):
    source = pathlib.Path(entry["file"])
    command = shlex.split(entry["command"])
    if source.suffix == ".cpp":  # its code is not looked at
        command.append("-fsyntax-only")
    # Packing the object as small as it goes takes a sixth of the time, optimising its host side a tenth, and nobody keeps it.
    unneeded = {"--compress-mode=size": "--compress-mode=none", "-O3": "-O0"}  # -Xptxas has its own -O3
    command = [unneeded.get(c, c) for c in command]
    command[command.index("-o") + 1] = str(pathlib.Path(folder) / (source.name + ".o"))
    # A shell in between, so that the CPU time of nvcc's own children is counted for this file alone.
    timed = [sys.executable, "-c",
             "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); u = resource.getrusage(resource.RUSAGE_CHILDREN);"
             "print(f'cpu {u.ru_utime + u.ru_stime:.1f}'); sys.exit(code)", *command]
    done = subprocess.run(timed, cwd=entry["directory"], capture_output=True, text=True)
    seconds = float((re.findall(r"^cpu ([\d.]+)$", done.stdout, re.M) or ["0"])[-1])
    log = done.stdout + done.stderr
    bad = []
    if done.returncode != 0:
        bad.append(f"exit status {done.returncode}:\n{log}")
    bad += findings(log)
    if source.suffix == ".cu" and TARGET not in " ".join(command):
        bad.append(f"found no {TARGET} in the compile command")
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
    # Files that read differently with CUDA: those beside a .cu, and the device layer.
    rooms = {pathlib.Path(c["file"]).parent for c in commands if c["file"].endswith(".cu")}
    wanted = [c for c in commands if pathlib.Path(c["file"]).parent in rooms and ".simd." not in c["file"]]
    wanted.sort(key=lambda c: c["file"].endswith(".cpp"))  # short ones last, so that both threads end together
    failed = False
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        for source, seconds, registers, bad in pool.map(lambda c: compile_one(c, folder), wanted):
            kernels = f", {len(registers)} kernels of at most {max(registers)} registers" if registers else ""
            print(f"{source.relative_to(ROOT)}: {seconds:.1f} s{kernels}")
            for problem in bad:
                failed = True
                print(f"  FAILED {problem}")
    print("cuda gates: " + ("failed" if failed else f"ok ({len(wanted)} files)"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
