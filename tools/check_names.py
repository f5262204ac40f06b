"""Fails where a comment or a page names a file that the repository does not have, where a page quotes a word that no source file has, or where
a link in a page leads to a heading that does not exist.

    python3 tools/check_names.py [ROOT]
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

SOURCES = (".h", ".cpp", ".cu", ".cuh", ".py", ".cmake", ".sh", ".txt", ".toml", ".html")
# A path that ends like a source file; the name may contain dots (softcap.cuda.test.cpp). Not after a variable, a wildcard or a domain.
FILE = re.compile(r"(?<![\w/.{}<>$*:])((?:\.\./)*(?:[\w.-]+/)*\w[\w-]*(?:\.\w+)*\.(?:cuh|cu|cpp|h|md|py|cmake|sh))(?![\w/])")
COMMENT = re.compile(r"(?://|#|\"\"\")(.*)")
# Names of files in other projects, and names that are no files.
NOT_OURS = {"llama.cpp", "torch/csrc/inductor/aoti_torch/c/shim.h", "megagemm/swiglu.py",
            "records/track_10min_16mb/2026-04-10_VarLenAttn/train_gpt.py", "train_gpt.py"}
# Names of generated files.
GENERATED = {"rmsnorm_f32.cu", "rmsnorm_f16.cu", "rmsnorm_bf16.cu"}
# Words that the code assembles from parts.
NOT_IN_CODE = {"INGOT_MIN_P", "op_backward", "__has_include"}


def files_of(root):
    listed = shutil.which("git") and subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True)
    if listed and listed.returncode == 0 and listed.stdout:
        return [name for name in listed.stdout.splitlines() if (root / name).is_file()]
    built = ("build", "demo", ".venv")  # no checkout: an unpacked archive
    return [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file() and path.relative_to(root).parts[0] not in built]


def is_page(name):
    return name.endswith(".md")


def lines_that_tell(name, text):
    """(number, text) of the lines of a page, or of the comments of a source file."""
    for number, line in enumerate(text.splitlines(), 1):
        if "#include" in line:
            continue
        if is_page(name):
            yield number, line
        elif comment := COMMENT.search(line):
            yield number, comment[1]


def missing_files(name, text, files):
    """A file may be named by any end of its path: forward.cuh, hopper/forward.cuh."""
    ends = {"/".join(parts[i:]) for parts in (f.split("/") for f in files) for i in range(len(parts))}
    for number, line in lines_that_tell(name, text):
        for found in FILE.findall(line):
            plain = re.sub(r"^(\.\./|\./)+", "", found)
            if plain not in ends | NOT_OURS | GENERATED and not plain.startswith("."):
                yield f"{name}:{number}: found {found}, expected a file of this repository"


def missing_words(name, text, words):
    """Words in a page's `code` that must be words of the source: those with an underscore or a capital letter inside."""
    for number, line in enumerate(text.splitlines(), 1):
        for code in re.findall(r"`([^`]+)`", line):
            for word in re.findall(r"(?<![<>\w/])[A-Za-z_]\w{3,}(?![\w/])", code):
                of_code = "_" in word or re.search(r"[a-z][A-Z]", word)
                if of_code and word not in words | NOT_IN_CODE:
                    yield f"{name}:{number}: found {word} in `{code}`, expected a word of the code"


def anchor_of(heading):
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def broken_links(name, text, anchors):
    """Links of a page to headings that do not exist. (missing_files() finds links to files that do not exist.)"""
    folder = pathlib.PurePosixPath(name).parent
    for number, line in enumerate(re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL).splitlines(), 1):
        for link in re.findall(r"\]\(([^)\s]+)\)", line):
            file, _, anchor = link.partition("#")
            target = os.path.normpath(folder / file) if file else name
            if ":" not in link and anchor and anchor not in anchors.get(target, [anchor]):
                yield f"{name}:{number}: found the link {link}, expected one of the headings of {target}"


def problems_of(root):
    files = files_of(root)
    texts = {}
    for name in files:
        if name.endswith((*SOURCES, ".json", ".md")) or name in ("run", ".ci/run"):
            texts[name] = (root / name).read_text(encoding="utf-8", errors="replace")
    code = [text for name, text in texts.items() if not name.endswith(".md")]
    words = set(re.findall(r"\w+", "\n".join(code)))
    words |= {part.replace("/", "_") for f in files for part in [re.sub(r"^src/ingot/", "", f).rsplit("/", 1)[0]]}  # names of test executables
    pages = {name: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for name, text in texts.items() if is_page(name)}
    anchors = {name: {anchor_of(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)} for name, text in pages.items()}
    for name, text in texts.items():
        if is_page(name) or name.endswith(SOURCES):
            yield from missing_files(name, text, files)
        if is_page(name):
            yield from broken_links(name, text, anchors)
        if is_page(name) and not name.startswith("docs/lab/"):  # lab pages quote names from other programs and from earlier code
            yield from missing_words(name, text, words)


def main():
    bad = list(problems_of(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
    print("\n".join(bad) if bad else "names: ok")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
