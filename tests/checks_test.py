"""What tools/check_names.py finds in a small tree of its own, and what it leaves alone.

    python3 tests/names_test.py
"""
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
import check_names  # noqa: E402


class Names(unittest.TestCase):
    def problems(self, files, in_git=True):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            if in_git:
                subprocess.run(["git", "init", "-q"], cwd=root, check=True)
            return list(check_names.problems_of(root))

    def test_a_file_that_is_gone_is_found_in_comments_and_pages(self):
        gone = "gone"  # apart, as this file's comments are looked at too
        tree = {"src/ingot/kernels/rope/rope.h": "// as rope_gone.cuh has it\n#include <vector>\n",
                "tools/a.py": f'"""Reads src/ingot/{gone}.h."""\nx = 1  # of tests/{gone}_test.py\n',
                "docs/a.md": "See [rope](../src/ingot/kernels/rope/gone.h) and gone.md.\n"}
        self.assertEqual([p.split(", expected")[0] for p in sorted(self.problems(tree))],
                         ["docs/a.md:1: found ../src/ingot/kernels/rope/gone.h", "docs/a.md:1: found gone.md",
                          "src/ingot/kernels/rope/rope.h:1: found rope_gone.cuh", "tools/a.py:1: found src/ingot/gone.h",
                          "tools/a.py:2: found tests/gone_test.py"])

    def test_files_are_known_by_any_end_of_their_path_with_git_and_without(self):
        tree = {"src/ingot/kernels/rope/rope.cuda.test.cpp": "// rope.cuda.test.cpp, rope/rope.cuda.test.cpp, ../rope/rope.cuda.test.cpp\n",
                "a.cpp": '#include "gone.h"\nconst char* text = "gone.h";  // $DIR/gone.h, *.cpp, <op>.cpp, llama.cpp\n'}
        for in_git in (True, False):
            self.assertEqual(self.problems(tree, in_git), [])

    def test_a_word_of_the_code_that_is_gone_is_found_in_pages(self):
        tree = {"a.h": "int known_word; struct KnownType {};\n", "src/ingot/engines/ttt/ttt.h": "",
                "docs/a.md": "`known_word`, `KnownType(x)`, `plain words`, `engines_ttt`, `<op>_bytes`, gone_outside\n`gone_word` `GoneType`\n",
                "docs/lab/old.md": "`gone_word` in gone.h\n"}
        self.assertEqual([p.split(" in ")[0] for p in self.problems(tree)],
                         ["docs/a.md:2: found gone_word", "docs/a.md:2: found GoneType"])


if __name__ == "__main__":
    unittest.main()
