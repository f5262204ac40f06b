"""Prints how many empty pronouns the comments of each folder and the documentation have per 100 words.

A comment that names the thing ("the result word carries its own flag") is understood at once; a comment that says "it" or "what others
leave" has to be solved. The count is crude ("one" is also a number, "that" also a conjunction) and forbids nothing: the figures show which
files to read again.

    python3 tools/pronouns.py [ROOT]        a row for each folder, then all comments and all pages
    python3 tools/pronouns.py --files PATH  a row for each file at or below PATH, the worst first
"""
import argparse
import io
import pathlib
import re
import tokenize

import check_names

PRONOUNS = frozenset("it that what they them those these who which one others other such nobody whoever everybody".split())
C_LIKE = (".h", ".cpp", ".cu", ".cuh")
HASHED = (".cmake", ".sh", "CMakeLists.txt", ".toml")
# Strings are matched first, so that // inside a string is no comment.
C_TOKEN = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'|//([^\n]*)|/\*(.*?)\*/', re.DOTALL)
HASH_TOKEN = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^'\n]*'|(?:^|(?<=\s))#(?!!)([^\n]*)", re.MULTILINE)


def python_comments(text):
    """Comments and docstrings (strings that are a whole statement)."""
    begins_statement = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#!")
        elif token.type == tokenize.STRING and begins_statement:
            yield re.sub(r"^[rbuRBU]*[\"']+|[\"']+$", "", token.string)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def prose_of(name, text):
    """The sentences of a file: a page without its code and tables of numbers, or the comments of a source; empty for other files."""
    if name.endswith(".md"):
        text = re.sub(r"<!-- table:.*?<!-- /table -->|```.*?```|<!--.*?-->", " ", text, flags=re.DOTALL)
        return re.sub(r"`[^`\n]*`|\]\([^)]*\)", " ", text)
    if name.endswith(C_LIKE):
        return "\n".join((m[2] or m[3] or "") for m in C_TOKEN.finditer(text))
    if name.endswith(".py"):
        return "\n".join(python_comments(text))
    if name.endswith(HASHED) or pathlib.PurePath(name).name == "run":
        return "\n".join(m[1] or "" for m in HASH_TOKEN.finditer(text))
    return ""


def counts_of(prose):
    words = re.findall(r"[A-Za-z']+", prose)
    return sum(word.lower() in PRONOUNS for word in words), len(words)


def folder_of(name):
    """The folder whose row a file belongs to: three levels below src/ingot at most, elsewhere two."""
    parts = pathlib.PurePath(name).parent.parts
    return "/".join(parts[:4] if parts[:2] == ("src", "ingot") else parts[:2]) or "."


def add_up(counts, key_of):
    sums = {}
    for name, (pronouns, words) in counts.items():
        before = sums.get(key_of(name), (0, 0))
        sums[key_of(name)] = before[0] + pronouns, before[1] + words
    return sums


def row(key, pronouns, words):
    return f"{100 * pronouns / words if words else 0:6.1f}  {words:7,}  {key}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).resolve().parent.parent, type=pathlib.Path)
    parser.add_argument("--files", metavar="PATH")
    args = parser.parse_args()
    counts = {}
    for name in check_names.files_of(args.root):
        if name.endswith((".md", ".py", *C_LIKE, *HASHED)) or pathlib.PurePath(name).name == "run":
            counts[name] = counts_of(prose_of(name, (args.root / name).read_text(encoding="utf-8", errors="replace")))
    print("per 100    words  of")
    if args.files:
        inside = {n: c for n, c in counts.items() if n == args.files or n.startswith(args.files.rstrip("/") + "/")}
        for name, (pronouns, words) in sorted(inside.items(), key=lambda item: -item[1][0] / max(1, item[1][1])):
            print(row(name, pronouns, words))
        return
    for key, sums in sorted(add_up({n: c for n, c in counts.items() if not n.endswith(".md")}, folder_of).items()):
        print(row(key, *sums))
    kinds = add_up(counts, lambda n: "comments" if not n.endswith(".md") else "docs/lab" if n.startswith("docs/lab/") else "other pages")
    for kind in ("comments", "other pages", "docs/lab"):
        print(row(f"all {kind}", *kinds.get(kind, (0, 0))))


if __name__ == "__main__":
    main()
