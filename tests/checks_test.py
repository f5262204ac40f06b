"""The findings of tools/check_names.py, tools/check_layers.py and tools/pronouns.py in small trees, and text that they must accept; when
tools/check_cuda.py trusts its record.

    python3 tests/checks_test.py
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import check_cuda  # noqa: E402
import check_layers  # noqa: E402
import check_names  # noqa: E402
import pronouns  # noqa: E402
import same_kernels  # noqa: E402


class RecordOfCudaGates(unittest.TestCase):
    def keys(self, kernel="int k; // why\n", header="int h;\n", compiler="nvcc 13.0", command="nvcc -O3 -I{root}/src {root}/src/ingot/a.cu"):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            (root / "src/ingot").mkdir(parents=True)
            (root / "src/ingot/a.cu").write_text('#include "ingot/b.h"\n' + kernel, encoding="utf-8")
            (root / "src/ingot/b.h").write_text(header, encoding="utf-8")
            check_cuda.headers_of.cache_clear()
            with unittest.mock.patch.object(check_cuda, "ROOT", root):
                return check_cuda.key_of({"file": str(root / "src/ingot/a.cu"), "command": command.format(root=root)}, root / "build", [compiler])

    def test_a_key_changes_with_code_headers_flags_and_compilers_and_not_with_comments_or_places(self):
        before = self.keys()
        self.assertEqual(before, self.keys())  # in another folder
        self.assertEqual(before, self.keys(kernel="  int k;  /* another\n reason */\n\n", header="// a comment\nint h;\n"))
        for change in ({"kernel": "int l;\n"}, {"header": "int g;\n"}, {"compiler": "nvcc 13.1"}, {"command": "nvcc -O2 -I{root}/src {root}/src/ingot/a.cu"}):
            self.assertNotEqual(before, self.keys(**change), change)

    def test_comment_signs_in_literals_hide_no_code(self):
        for one, other in (('f("//", 1);', 'f("//", 2);'), ("f('\"', \"//\", 1);", "f('\"', \"//\", 2);"), ('f(R"(/*)", 1);', 'f(R"(/*)", 2);')):
            self.assertNotEqual(check_cuda.code_of(one), check_cuda.code_of(other))

    def test_files_without_a_record_are_compiled_and_a_sample_of_the_recorded_ones(self):
        entries = [{"file": str(i)} for i in range(20)]
        keys = {str(i): (f"{i}.cu", f"key {i}") for i in range(20)}
        record = {f"{i}.cu": f"key {i}" for i in range(15)} | {"16.cu": "an older key"}
        chosen, known = check_cuda.to_compile(entries, keys, record, everything=False)
        self.assertTrue({str(i) for i in range(15, 20)} <= {e["file"] for e in chosen})
        self.assertEqual((len(chosen), known), (5 + check_cuda.SAMPLE, 15 - check_cuda.SAMPLE))
        self.assertEqual(check_cuda.to_compile(entries, keys, record, everything=True), (entries, 0))


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
                "docs/lab/old.md": "`gone_word`\n"}
        self.assertEqual([p.split(" in ")[0] for p in self.problems(tree)],
                         ["docs/a.md:2: found gone_word", "docs/a.md:2: found GoneType"])

    def test_a_link_to_a_heading_that_is_gone_is_found(self):
        a, b = "a" + ".md", "b" + ".md"  # apart, as this file's comments are looked at too
        tree = {f"docs/{a}": f"# One `word`, two\n[1](#one-word-two) [2](lab/{b}#b) [3](https://host/#x)\n```\n# no heading\n[no](#link)\n```\n"
                             f"[4](#no-heading) [5](lab/{b}#a)\n",
                f"docs/lab/{b}": f"# B\n[6](../{a}#one-word-two) [7](../{a}#two)\n"}
        self.assertEqual([p.split(", expected")[0] for p in self.problems(tree)],
                         [f"docs/{a}:7: found the link #no-heading", f"docs/{a}:7: found the link lab/{b}#a", f"docs/lab/{b}:2: found the link ../{a}#two"])


KERNEL = """template <class T> __global__ void __launch_bounds__(kThreads, 1)
    some_kernel(const __grid_constant__ Params p) {{
  {body}
}}
void launch() {{ gpu::launch("op", some_kernel<float>, {{.grid = 1, .overlap = {overlap}}}, stream, p); }}
"""
WAIT = "ptx::wait_for_earlier_kernels();"


class Switches(unittest.TestCase):
    def test_gpu_code_behind_a_name_that_no_build_defines_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            root, moved = pathlib.Path(folder), "mix"
            files = {"kernels/rope/rope.cu": "", "kernels/rope/rope.cpp": "#ifdef INGOT_HAS_CUDA_ROPE\n#endif\n", f"kernels/mix/cuda/{moved}.cu": "",
                     "kernels/mix/mix.cpp": "\n#ifndef INGOT_HAS_CUDA_MIX\n#endif\n"}
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            self.assertEqual(list(check_layers.problems_of_switches(sorted(root / name for name in files), root)),
                             [f"{root / 'kernels/mix/mix.cpp'}:2: found INGOT_HAS_CUDA_MIX, expected a mix.cu in a folder of that name"])


class Launches(unittest.TestCase):
    def problems(self, body, overlap="true", more=""):
        room = pathlib.Path("ingot/kernels/op")
        texts = {room / "a.cu": KERNEL.format(body=body, overlap=overlap), room / "b.cuh": more}
        return [p.split(": ", 1)[1] for p in check_layers.problems_of_launches(texts, pathlib.Path("ingot"))]

    def test_a_kernel_that_may_overlap_waits_itself_or_in_a_called_function(self):
        self.assertEqual(self.problems(f"start(p); {WAIT} if (p.n == 0) return;"), [])
        self.assertEqual(self.problems("run<T>(p);", more=f"template <class T> __device__ void run(const Params& p) {{ begin(p); }} void begin(const Params&) {{ {WAIT} }}"), [])
        self.assertEqual(self.problems("run<T>(p);", overlap="false"), [])
        by_variable = "void launch2() { const gpu::Launch at{.block = 32, .overlap = true}; gpu::launch(op, other<T, 2>, at, stream, p); } __global__ void other(int) { f(); }"
        self.assertEqual(self.problems(WAIT, more=by_variable), ["other() may overlap the kernel before and does not wait for it"])
        self.assertEqual(self.problems(f"run<T>(p);  // {WAIT}"), ["some_kernel() may overlap the kernel before and does not wait for it"])

    def test_no_block_returns_before_it_has_waited(self):
        self.assertEqual(self.problems(f"if (p.n == 0) return; {WAIT}"),
                         ["some_kernel() may return before ptx::wait_for_earlier_kernels(), which every block must call"])

    def test_a_kernel_that_lets_the_next_kernel_start_waits_itself(self):
        self.assertEqual(self.problems("ptx::let_next_kernel_start();", overlap="false"),
                         ["some_kernel() lets the next kernel start and waits for none before it"])

    def test_the_status_of_every_runtime_call_is_checked(self):
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "gpu").mkdir()
            for i, line in enumerate(["cudaFree(p);", "if (p != nullptr) cudaFree(p);", "ncclCommAbort(c);", "(void)cudaFree(p);",
                                      "check_cuda(cudaFree(p), \"freeing\");", "const cudaError_t status = cudaFree(p);", "cudaFreeing = f(x);"]):
                path = root / "gpu" / f"a{i}.cpp"
                path.write_text(f"  {line}\n", encoding="utf-8")
                found[line] = len(list(check_layers.problems_of(path, root)))
        self.assertEqual(list(found.values()), [1, 1, 1, 0, 0, 0, 0], found)

    def test_a_test_with_cases_for_a_gpu_is_one_that_ctest_labels(self):
        include, case = '#include "ingot/testing/gpu_test.h"\n', "  if (gpu::device_count() == 0) return;\n"
        for name, text, expected in [("a.test.cpp", case, 1), ("a.test.cpp", include + case, 0), ("a.cuda.test.cpp", case, 0), ("a.cpp", case, 0),
                                     ("a.test.cpp", "class A : public testing::GpuTest<> {};", 1), ("a.test.cpp", "class A : public testing::HopperTest<> {};", 1), ("a.test.cpp", '  if (gpu::device_count() > 0) GTEST_SKIP() << "a GPU";\n', 0)]:
            with self.subTest(name, text=text):
                self.assertEqual(len(list(check_layers.problem_of_label(pathlib.Path(name), text))), expected)


class Pronouns(unittest.TestCase):
    def counts(self, name, text):
        return pronouns.counts_of(pronouns.prose_of(name, text))

    def test_pronouns_are_counted_in_comments_and_not_in_code(self):
        self.assertEqual(self.counts("a.h", 'int it = 1;  // It waits for others.\nauto s = "// that is no comment";\n/* the block\n   polls them */\n'), (3, 8))
        self.assertEqual(self.counts("a.py", '"""Who reads this."""\nit = "that"  # of one\ndef f():\n    """Such."""\n    return "what"\n'), (3, 6))
        self.assertEqual(self.counts("a.cmake", 'set(IT "# that")  # which file\nif(IT)\n# the next\n'), (1, 4))
        self.assertEqual(self.counts("run", "#!/bin/sh\necho $# '# that'  # nobody\n"), (1, 1))
        self.assertEqual(self.counts("a.json", '{"it": "that"}'), (0, 0))

    def test_a_page_is_counted_without_its_code_and_tables(self):
        page = "Those words.\n<!-- table:x -->\nit it\n<!-- /table -->\n```\nit\n```\nSee `it` in [the page](it.md).\n"
        self.assertEqual(self.counts("docs/a.md", page), (1, 6))

    def test_counts_add_up_by_folder(self):
        counts = {"src/ingot/kernels/rope/a.h": (1, 10), "src/ingot/kernels/rope/parts/b.h": (2, 30), "tools/c.py": (0, 5), "run": (1, 2)}
        self.assertEqual(pronouns.add_up(counts, pronouns.folder_of), {"src/ingot/kernels/rope": (3, 40), "tools": (0, 5), ".": (1, 2)})


def missing_quotes(page, text_of):
    """The lines of a page's quoted code that the file named above them does not have, in the order of the quote. Between two lines of
    dots the lines must follow each other."""
    for name, block in re.findall(r"<!-- from (\S+) -->\n```\w+\n(.*?)```", page, re.DOTALL):
        lines, at = text_of(name).split("\n"), 0
        for part in re.split(r"^ *\.\.\.\n", block, flags=re.MULTILINE):
            quoted = part.rstrip("\n").split("\n")
            found = next((i for i in range(at, len(lines) - len(quoted) + 1) if lines[i:i + len(quoted)] == quoted), None)
            if found is None:
                yield f"{name}: {quoted[0].strip()}"
            else:
                at = found + len(quoted)


class Presets(unittest.TestCase):
    def test_every_preset_that_readme_names_has_a_workflow(self):
        table = (ROOT / "README.md").read_text(encoding="utf-8").split("| preset | builds |")[1].split("\n\n")[0]
        named = set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))))
        presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))
        self.assertEqual(named, {"cpu", "cuda", "emulated", "asan", "tsan"})
        for preset in presets["workflowPresets"]:
            self.assertEqual(preset["steps"], [{"type": step, "name": preset["name"]} for step in ("configure", "build", "test")])
        self.assertEqual(named, {preset["name"] for preset in presets["workflowPresets"]})


# Variables by which Ingot's own programs and tests speak to the processes that they start.
INTERNAL_VARIABLES = {"INGOT_COMMAND", "INGOT_PROGRAM", "INGOT_SCHEMA_DOCUMENTS", "INGOT_BENCH_SHARE", "INGOT_BENCH_CONTINUE", "INGOT_BENCH_UNTIL"}


class Documented(unittest.TestCase):
    """Every environment variable that code reads, and every option of the build, stands on a page."""

    def test_variables_and_options_of_the_build(self):
        names = [name for name in check_names.files_of(ROOT) if name.endswith((".cpp", ".cu", ".h", ".cuh", ".py", ".sh", ".cmake", "CMakeLists.txt")) or name == "run"]
        reads = re.compile(r"""(?:getenv\(|environ\.get\(|environ\[|environ\.setdefault\()\s*"((?:INGOT|PAGE)_\w+)\"|\$\{((?:INGOT|PAGE)_\w+):-""")
        options = re.compile(r"^(?:option\((INGOT_\w+)|set\((INGOT_\w+) \S+ CACHE STRING)", re.MULTILINE)
        found = {}
        for name in names:
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            for pattern in (reads, options):
                for match in pattern.finditer(text):
                    found.setdefault(match[1] or match[2], name)
        self.assertTrue({"INGOT_NCCL", "INGOT_ROOMS", "INGOT_FUZZ", "INGOT_BUILD", "INGOT_MODELS", "INGOT_LIGER"} <= found.keys(), found)
        pages = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in check_names.files_of(ROOT)
                          if name.endswith(".md") and not name.startswith("docs/lab/") and name != "CHANGELOG.md")
        documented = set(re.findall(r"(?:INGOT|PAGE)_\w+", pages))
        self.assertEqual({variable: name for variable, name in found.items() if variable not in documented | INTERNAL_VARIABLES}, {})


class Tutorial(unittest.TestCase):
    def test_every_quoted_line_is_in_the_tree(self):
        page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
        self.assertEqual(page.count("```cpp") + page.count("```python"), len(re.findall("<!-- from ", page)))
        self.assertEqual(list(missing_quotes(page, lambda name: (ROOT / name).read_text(encoding="utf-8"))), [])

    def test_a_changed_or_reordered_line_is_found(self):
        page = "<!-- from a.h -->\n```cpp\nint a;\n  ...\nint c;\n```\n"
        self.assertEqual(list(missing_quotes(page, lambda name: "int a;\nint b;\nint c;\n")), [])
        for text in ("int a;\nint b;\nint d;\n", "int c;\nint a;\n"):
            self.assertEqual(list(missing_quotes(page, lambda name: text)), ["a.h: int c;"])


class KernelsThatHopperDoesNotLaunch(unittest.TestCase):
    """same_kernels.PORTABLE rests on the places at which these kernels are launched."""

    def test_kernels_are_told_apart_by_instructions_and_namespaces(self):
        same_kernels.self_check()

    def test_each_launch_is_behind_the_choice_of_a_variant(self):
        sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for kind in ("*.cu", "*.cuh", "*.h", "*.cpp") for path in (ROOT / "src").rglob(kind)
                   if ".test." not in path.name}

        def places(pattern):
            return {name for name, text in sources.items() if re.search(pattern, re.sub(r"//.*", "", text))}
        # Products name the portable core only through gemm::with_core(), which asks for the variant.
        self.assertEqual({name for name in places(r"\bPortableCore\b") if "/gemm/portable/" not in name}, {"src/ingot/gpu/gemm/variant.h"})
        for launch, place, choice in ((r"\bgrouped::launch_portable\(|^  launch_portable\(a, p, limits", "src/ingot/kernels/grouped/grouped.cu", "gemm::Variant::hopper) return launch_hopper"),
                                      (r"\battention_portable::(forward|backward)\(", "src/ingot/kernels/attention/attention.cu", "AttentionVariant::hopper)")):
            self.assertEqual(places(f"(?m){launch}"), {place})
            before = 0
            for found in re.finditer(launch, sources[place], re.MULTILINE):
                self.assertIn(choice, sources[place][before:found.start()], found[0])
                before = found.end()
        # Each kernel in these namespaces stands in the folder of the launch.
        namespaces = {name: text for name, text in sources.items() if re.search(r"^namespace ingot::(gemm::portable|cuda::(attention|grouped)_portable) ", text, re.MULTILINE)}
        self.assertEqual({name for name in namespaces if "/portable/" not in name}, set())


if __name__ == "__main__":
    unittest.main()
