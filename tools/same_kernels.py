"""Checks whether two builds have the same kernels: for a change that moves, splits or tidies GPU code and must not change the machine code.

    python3 tools/same_kernels.py OLD/libingot.a NEW/libingot.a     (cuobjdump of the CUDA toolkit on PATH)

Compares the instructions of every kernel, encodings included; names and files may change. Prints how many kernels are in both builds, and the names
of kernels in a single build; exit status 1 if there are such kernels, 77 without cuobjdump.

    python3 tools/same_kernels.py --reports OLD_TREE OLD_BUILD NEW_BUILD     (builds of Ninja, brought up to date first)

Compares the kernels for every report under bench/results, unfinished ones too, that measured OLD_TREE's sources and not this tree's. If all kernels of the suite's rooms
are the same, the report gets the entry `same_kernels`: this tree's hash, the number of kernels, the changed files, and new kernels, which the report
does not measure; the report is then not stale, and an unfinished one can be continued. Host code that chooses among kernels, tiles or grids is not compared: read the changed files. Exempt
are host_cost, which measures the host, and, where the choice among cuBLASLt's kernels changed, the suites that use cuBLASLt.

A Hopper GPU launches no kernel of the namespaces in PORTABLE: the choices of a variant (gemm::variant_of, attention_variant; tested with Hopper's limits)
exclude these kernels. The comparison therefore leaves these kernels out, and the entry names the namespaces and the number of kernels (`not_launched`).
The suites in RUNS_PORTABLE do launch such kernels and compare them. Portable kernels of other namespaces (experts, MLPs in fp32) run on
Hopper too, and every suite compares them. A report of another GPU than Hopper compares all kernels.
"""
import collections
import functools
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

import reports

NO_CUOBJDUMP = 77
CHOICE = {"src/ingot/gpu/cublaslt.cpp", "src/ingot/gpu/cublaslt.h"}  # choose among kernels outside Ingot's objects
# A string or character, which stays, or a comment of C++.
STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
# The namespaces of kernels that only GPUs other than Hopper launch, and a Hopper GPU with INGOT_GPU_AS or in a test of such a kernel.
PORTABLE = ("ingot::gemm::portable", "ingot::cuda::attention_portable", "ingot::cuda::grouped_portable")
RUNS_PORTABLE = {"portable", *reports.NO_BENCHMARKS}
HOPPER = re.compile(r"\b(H[12]00|H20|GH200)\b")  # the names of Hopper GPUs
FUNCTION = re.compile(r"^\s*Function : (\S+)")
# An instruction and its encoding, or the second half of an encoding.
CODE = re.compile(r"^\s*(/\*[0-9a-f]{4,}\*/.*|/\* 0x[0-9a-f]{16} \*/)\s*$")


def kernels(listing):
    """{sha of the instructions: [names]} from the output of `cuobjdump -sass`."""
    found, name, lines = collections.defaultdict(list), None, []

    def end():
        if name is not None:
            found[hashlib.sha256("\n".join(lines).encode()).hexdigest()].append(name)

    for line in listing:
        function = FUNCTION.match(line)
        if function:
            end()
            name, lines = function[1], []
        elif CODE.match(line):
            lines.append(" ".join(line.split()))
    end()
    return found


def kernels_of(path):
    with subprocess.Popen(["cuobjdump", "-sass", path], stdout=subprocess.PIPE, text=True) as dump:
        found = kernels(dump.stdout)
    if dump.returncode != 0 or not found:
        sys.exit(f"same kernels: {path}: found no kernels (cuobjdump ended with {dump.returncode}), expected an archive or object of them")
    return found


def only_in(one, other):
    """Names of the kernels of `one` that `other` lacks or has less often."""
    return sorted(name for body, names in one.items() for name in names[len(other.get(body, [])):])


def mangled(namespace):
    """How the mangled names of the namespace's members begin. A template argument of the namespace stands later in a name."""
    return "_ZN" + "".join(f"{len(part)}{part}" for part in namespace.split("::"))


def without_portable(found):
    """The kernels of `found` that a Hopper GPU launches, and the number of those of each namespace in PORTABLE."""
    kept, left_out = collections.defaultdict(list), collections.Counter()
    for body, names in found.items():
        for name in names:
            place = next((n for n in PORTABLE if name.startswith(mangled(n))), None)
            if place is None:
                kept[body].append(name)
            else:
                left_out[place] += 1
    return kept, left_out


@functools.cache
def kernels_of_object(path):
    """Like kernels_of(); an object may have host code only."""
    return kernels(subprocess.run(["cuobjdump", "-sass", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout.splitlines())


def kernels_of_suite(suite, build, root):
    """The kernels of the suite's rooms, from their objects in a build directory."""
    found, objects = collections.defaultdict(list), build / "CMakeFiles" / "ingot.dir"
    for place in reports.places_of(suite, root):
        for folder in (objects / place, objects / "generated" / pathlib.PurePath(place).relative_to("src") if place.startswith("src/") else objects / place):
            for path in sorted(folder.rglob("*.cu.o")):
                for body, names in kernels_of_object(path).items():
                    found[body] += names
    return found


def changed_files(suite, old, new):
    def contents(root):
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in reports.files_of(suite, root)}
    before, after = contents(old), contents(new)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def code_of(text):
    """The words of a C++ source without its comments."""
    return STRING_OR_COMMENT.sub(lambda found: found[0] if found[0][0] in "\"'" else " ", text).split()


def choice_changed(old_tree):
    """Whether the code that chooses among cuBLASLt's kernels is another one in this tree."""
    return any(code_of((old_tree / name).read_text(encoding="utf-8")) != code_of((reports.ROOT / name).read_text(encoding="utf-8")) for name in CHOICE)


def keep_reports(old_tree, old_build, new_build):
    for build in (old_build, new_build):
        if subprocess.run(["ninja", "-C", build, "ingot"], stdout=subprocess.PIPE, check=False).returncode != 0:  # the objects of the current files
            sys.exit(f"same kernels: {build}: ninja could not build `ingot` there")
    for path, report in (*reports.all_reports(), *reports.unfinished_reports()):
        suite, name = path.stem, path.relative_to(reports.ROOT)
        now = reports.tree_hash(suite)
        if suite == "host_cost" or reports.holds(report, now) or not reports.holds(report, reports.tree_hash(suite, old_tree)):
            continue
        old, new = kernels_of_suite(suite, old_build, old_tree), kernels_of_suite(suite, new_build, reports.ROOT)
        left_out = {}
        if suite not in RUNS_PORTABLE and HOPPER.search(report["gpu"]):
            (old, left_out), (new, _) = without_portable(old), without_portable(new)
        count = sum(len(names) for names in old.values())
        gone, more = only_in(old, new), only_in(new, old)
        if gone or count == 0:
            print(f"{name}: stays stale, {len(gone)} of {count} kernels are gone or others: {', '.join(gone[:3])}")
            continue
        changed = {*changed_files(suite, old_tree, reports.ROOT), *report.get("same_kernels", {}).get("changed", [])}
        if suite in reports.WITH_LIBRARY and choice_changed(old_tree):
            print(f"{name}: stays stale, cuBLASLt's kernels may be others")
            continue
        more = sorted({*more, *report.get("same_kernels", {}).get("new", [])})
        results = report.pop("results")
        report = {**report, "same_kernels": {"tree": now, "kernels": count, "changed": sorted(changed), **({"not_launched": left_out} if left_out else {}),
                                             **({"new": more} if more else {})}, "results": results}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {count} kernels are the same, {len(more)} new ones, {len(changed)} files changed"
              + (f", {sum(left_out.values())} portable kernels not compared" if left_out else ""))


def self_check():
    """A self-test: names and spaces may differ; an operand or a bit of an encoding may not."""
    text = ["Function : a", "  /*0000*/   MOV R1, R2 ;   /* 0x0000000000000001 */", "        /* 0x000fe20000000f00 */"]
    renamed = ["Function : b", "  /*0000*/ MOV R1, R2 ;  /* 0x0000000000000001 */", "  /* 0x000fe20000000f00 */"]
    operand, bit = [*text], [*text]
    operand[1] = operand[1].replace("R2", "R3")
    bit[2] = bit[2].replace("f00", "f01")
    same = kernels(text)
    assert only_in(kernels(renamed), same) == [] and only_in(kernels(operand), same) == ["a"] and only_in(kernels(bit), same) == ["a"]
    assert only_in(kernels(text + renamed), same) == ["b"]
    source = 'f("// no comment", \'"\');  // a comment\n/* and\nanother */ g();'
    assert code_of(source) == code_of(source.replace("a comment", "a \"longer comment")) == code_of('f("// no comment", \'"\'); g();') != code_of(source.replace("no", "a"))
    portable = ["_ZN5ingot4gemm8portable20portable_gemm_kernelINS_4cuda7ProductEEEvT_", "_ZN5ingot4cuda18attention_portable12_GLOBAL__N_16kernelEv"]
    # A namespace's name also begins longer ones, and stands among template arguments and parameters of other kernels.
    others = ["_ZN5ingot4gemm6kernelINS0_8portable4TileEEEvT_", "_ZN5ingot4cuda15expert_portable6kernelEv", "_ZN5ingot4gemm9portable26kernelEv", "kernel"]
    kept, left_out = without_portable({"body": portable + others})
    assert kept == {"body": others} and left_out == {PORTABLE[0]: 1, PORTABLE[1]: 1}


def main():
    self_check()
    keep = len(sys.argv) == 5 and sys.argv[1] == "--reports"
    if len(sys.argv) != 3 and not keep:
        sys.exit(__doc__)
    if shutil.which("cuobjdump") is None:
        print("same kernels: found no cuobjdump, nothing compared")
        return NO_CUOBJDUMP
    if keep:
        return keep_reports(*(pathlib.Path(a).resolve() for a in sys.argv[2:]))
    old, new = kernels_of(sys.argv[1]), kernels_of(sys.argv[2])
    gone, come = only_in(old, new), only_in(new, old)
    for name in gone:
        print(f"only in {sys.argv[1]}: {name}")
    for name in come:
        print(f"only in {sys.argv[2]}: {name}")
    count = sum(len(names) for names in old.values())
    print(f"same kernels: {count - len(gone)} of {count} are in both, {len(come)} are new")
    return 1 if gone or come else 0


if __name__ == "__main__":
    sys.exit(main())
