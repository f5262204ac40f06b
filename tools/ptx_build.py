"""Copies the tests and programs of a build with CUDA to another folder, and removes from the copies all code that a GPU of compute capability 8.0
could not load: the machine code for sm_90a, that of other GPUs (INGOT_GPUS), and PTX newer than compute_80.

    python3 tools/ptx_build.py build/cuda build/ptx80 [--newest 80]

What remains are the bytes of PTX that the build ships for older GPUs. On a Hopper GPU the driver then compiles this PTX, as on an A100, and
gpu::limits() finds that no code for sm_90a was loaded; CUDA_FORCE_PTX_JIT, under which cuBLASLt makes no handle, is not needed. A kernel without PTX is
refused at its launch: "found a GPU of compute capability 9.0, for which this build has no code of the kernel". With INGOT_GPU_AS=8.0 the limits are an
A100's too (docs/gpu-layer.md). The copy's tests run by `ctest --test-dir` also where the build folder was moved after its configuration.
"""
import argparse
import json
import pathlib
import re
import shutil
import stat
import struct
import sys

NEWEST = 80  # compute capability times 10
# What the copied build has, for the reports of tools/gpu_tests.py and tools/sanitize.py.
NOTE = "only_ptx.json"
# Device code lies in a section of the program, one container per translation unit: a header, then an entry for each target. Offsets in bytes.
SECTION = b".nv_fatbin"
CONTAINER = struct.Struct("<IHHQ")  # magic number, version, bytes of the header, bytes of the entries
MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of the header, bytes of the code
TARGET = struct.Struct("<I")  # compute capability times 10, at offset 28 of an entry's header
AT_TARGET = 28
PTX, MACHINE_CODE = 1, 2
# A removed entry is labelled as machine code of a GPU that reads no reports here (8.7 is a system on a chip), which every other driver passes over.
REMOVED = (MACHINE_CODE, 87)


def section_of(program, name):
    """(offset, bytes) of an ELF file's section; None if the file is no 64-bit ELF file or has no such section."""
    if program[:5] != b"\x7fELF\x02":
        return None
    table, = struct.unpack_from("<Q", program, 0x28)
    count, names = struct.unpack_from("<HH", program, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", program, table + 64 * i) for i in range(count)]
    for of_name, _, _, _, offset, size in headers:
        at = headers[names][4] + of_name
        if program[at:at + len(name) + 1] == name + b"\0":
            return offset, size
    return None


def entries_of(program):
    """(offset, kind, compute capability times 10, offset and bytes of the code) of every piece of device code in a program."""
    section = section_of(program, SECTION)
    if section is None:
        return
    at, end = section[0], sum(section)
    while at < end:
        if program[at:at + 8] == bytes(8):  # padding between containers
            at += 8
            continue
        magic, _, header, size = CONTAINER.unpack_from(program, at)
        if magic != MAGIC:
            raise ValueError(f"device code: found {magic:#x} at offset {at}, expected the magic number {MAGIC:#x}")
        entry, at = at + header, at + header + size
        while entry < at:
            kind, _, of_entry, code = ENTRY.unpack_from(program, entry)
            if kind not in (PTX, MACHINE_CODE):
                raise ValueError(f"device code: found an entry of kind {kind} at offset {entry}, expected PTX ({PTX}) or machine code ({MACHINE_CODE})")
            yield entry, kind, TARGET.unpack_from(program, entry + AT_TARGET)[0], entry + of_entry, code
            entry += of_entry + code
        if entry != at or at > end:
            raise ValueError(f"device code: found entries up to offset {entry}, expected up to {at}, within {end}")


def remove_newer(program, newest):
    """Removes machine code and PTX newer than `newest` from a program (a bytearray): the numbers of entries kept and removed."""
    kept = removed = 0
    for entry, kind, target, code, size in list(entries_of(program)):
        if kind == PTX and target <= newest:
            kept += 1
            continue
        struct.pack_into("<H", program, entry, REMOVED[0])
        TARGET.pack_into(program, entry + AT_TARGET, REMOVED[1])
        program[code:code + size] = bytes(size)
        removed += 1
    return kept, removed


def moved(text, source, target):
    """CTest's list of tests, with the folders of the configuration replaced by the present source folder and the copy."""
    was_source, was_build = (re.search(rf"^# {word} directory: (.*)$", text, re.M)[1] for word in ("Source", "Build"))
    places = {was_build: str(target), was_source: str(source)}
    # A build folder usually lies in the source folder: the longer path first.
    return re.sub("|".join(re.escape(place) for place in sorted(places, key=len, reverse=True)), lambda found: places[found[0]], text)


def copy(build, target, newest):
    """Copies a build; returns {program: (entries kept, entries removed)}."""
    target.mkdir(parents=True, exist_ok=True)
    found = {}
    for path in sorted(build.iterdir()):
        if not path.is_file() or not (path.stat().st_mode & stat.S_IXUSR) or path.suffix == ".so":
            continue
        program = bytearray(path.read_bytes())
        try:
            found[path.name] = remove_newer(program, newest)
        except ValueError as e:
            sys.exit(f"{path}: {e}")
        (target / path.name).write_bytes(program)
        shutil.copymode(path, target / path.name)
    source = pathlib.Path(__file__).resolve().parent.parent
    tests = (build / "CTestTestfile.cmake").read_text(encoding="utf-8")
    (target / "CTestTestfile.cmake").write_text(moved(tests, source, target), encoding="utf-8")
    return found


def imitation_of(build, capability):
    """For a run of a build's programs with the limits of a GPU of this compute capability: the variables of the environment, and what the run shows, for
    reports. The driver keeps what it compiled in the build's folder, so that only the first run compiles."""
    note = build / NOTE
    newest = json.loads(note.read_text(encoding="utf-8"))["newest_ptx"] if note.is_file() else None
    variables = {"INGOT_GPU_AS": capability}
    if newest is not None:
        variables |= {"CUDA_CACHE_PATH": str(build.resolve() / "compiled_ptx"), "CUDA_CACHE_MAXSIZE": str(4 << 30)}
    code = "machine code for sm_90a" if newest is None else f"compiled by the driver from PTX up to compute_{newest}"
    return variables, {"capability": capability, "code": code, "grade": "limited" if newest is None else "imitated"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--newest", type=int, default=NEWEST, help=f"the newest PTX that stays (default {NEWEST})")
    options = parser.parse_args()
    if not (options.build / "CTestTestfile.cmake").is_file():
        parser.error(f"build: found no {options.build / 'CTestTestfile.cmake'}, expected the folder of a build with tests")
    found = copy(options.build.resolve(), options.target.resolve(), options.newest)
    kept, removed = (sum(counts[i] for counts in found.values()) for i in (0, 1))
    note = {"newest_ptx": options.newest, "programs": len(found), "kept": kept, "removed": removed}
    (options.target / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")
    print(f"{options.target}: {len(found)} programs with {kept} pieces of PTX up to compute_{options.newest}, {removed} pieces of newer PTX and machine code removed")


if __name__ == "__main__":
    main()
