"""tools/gather_text.py on files made here: the text that a reader sees of a page, of dictionaries and of manuals, and the text that is left out. Nothing is
fetched."""
import gzip
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))
import gather_text as g  # noqa: E402

LONG = "A sentence that stands in document {0} alone. " * 8


class GatherText(unittest.TestCase):
    def test_the_text_of_a_page_is_the_text_that_a_reader_sees(self):
        page = "<html><head><title>no</title></head><body><nav>menu</nav><h1>Title</h1><p>One &amp;\n two.</p><pre>a  b\n  c</pre><script>x()</script></body></html>"
        self.assertEqual(g.tidy(g.plain_of(page)), "Title\n\nOne & two.\n\na  b\n  c\n")

    def test_files_are_read_by_their_kind(self):
        self.assertEqual(list(g.texts_of("a/b.txt.gz", gzip.compress(b"text"))), ["text"])
        self.assertEqual(list(g.texts_of("a/b.png", b"text")), [])
        self.assertEqual(list(g.texts_of("a/b.gz", b"not compressed")), [])
        self.assertEqual(list(g.texts_of("man/ls.1", b".TH LS 1\n.SH NAME\nls \\- list \\fBfiles\\fR\n")), ["LS 1\nNAME\nls - list files\n"])
        self.assertEqual(len(list(g.texts_of("x.dict.dz", gzip.compress(b"line\n" * 900)))), 3)
        self.assertEqual(list(g.texts_of("latin.txt", b"caf\xe9")), ["caf\u00e9"])

    def test_shared_lines_and_repeated_texts_are_left_out(self):
        files = [(f"{i}.txt", f"Home | Next\n{LONG.format(i)}\n".encode()) for i in range(g.COMMON + 1)] + [("again.txt", f"Home | Next\n{LONG.format(0)}\n".encode()), ("short.txt", b"short\n")]
        texts = list(g.documents_of(files, set()))
        self.assertEqual(len(texts), g.COMMON + 1)
        self.assertFalse(any("Home | Next" in text for text in texts))
        self.assertEqual(texts[1], LONG.format(1).rstrip() + "\n")

    def test_every_package_has_a_licence(self):
        self.assertTrue(all(g.DEBIAN.values()) and all(len(what) == 2 and what[1] for what in g.PYPI.values()))


if __name__ == "__main__":
    unittest.main()
