"""Whether two builds hold the same kernels: for a change that moves, splits or tidies GPU code and must not change it.

    python3 tools/same_kernels.py OLD/libingot.a NEW/libingot.a     (cuobjdump of the CUDA toolkit on PATH)

Compares the instructions of every kernel, encodings included; names and files may change. Prints how many are in both, and the names
of those that are in one only; exit status 1 where there are any, 77 where there is no cuobjdump.
"""
import collections
import hashlib
import re
import shutil
import subprocess
import sys

NO_CUOBJDUMP = 77
FUNCTION = re.compile(r"^\s*Function : (\S+)")
# An instruction and its encoding, or the second half of one.
CODE = re.compile(r"^\s*(/\*[0-9a-f]{4,}\*/.*|/\* 0x[0-9a-f]{16} \*/)\s*$")


def kernels(listing):
    """{sha of the instructions: [names]} of what `cuobjdump -sass` prints."""
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
    """Names of the kernels of `one` that `other` has not, or has less often."""
    return sorted(name for body, names in one.items() for name in names[len(other.get(body, [])):])


def self_check():
    """Names and spaces may differ; an operand or a bit of an encoding may not."""
    text = ["Function : a", "  /*0000*/   MOV R1, R2 ;   /* 0x0000000000000001 */", "        /* 0x000fe20000000f00 */"]
    renamed = ["Function : b", "  /*0000*/ MOV R1, R2 ;  /* 0x0000000000000001 */", "  /* 0x000fe20000000f00 */"]
    operand, bit = [*text], [*text]
    operand[1] = operand[1].replace("R2", "R3")
    bit[2] = bit[2].replace("f00", "f01")
    same = kernels(text)
    assert only_in(kernels(renamed), same) == [] and only_in(kernels(operand), same) == ["a"] and only_in(kernels(bit), same) == ["a"]
    assert only_in(kernels(text + renamed), same) == ["b"]


def main():
    self_check()
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if shutil.which("cuobjdump") is None:
        print("same kernels: found no cuobjdump, nothing compared")
        return NO_CUOBJDUMP
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
