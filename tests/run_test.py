"""The steps of ./run before compilation, with a cmake and a ninja that only record their arguments."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CMAKE = """#!/bin/sh
echo cmake "$@" >> calls
mkdir -p build/cpu
echo "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" > build/cpu/CMakeCache.txt
for word; do case $word in -D*) echo "${word#-D}" | sed "s/=/:BOOL=/" >> build/cpu/CMakeCache.txt ;; esac; done
touch build/cpu/build.ninja
"""
# Stands in for ctest. With -N it prints the tests of the build whose names match the expression after -R; without -N it writes a report in which
# each of these tests passed.
CTEST = """#!/bin/sh
while [ $# -gt 0 ]; do case $1 in -N) list=yes ;; -R) name=$2 ;; --output-junit) report=$2 ;; esac; shift; done
found=$(sed -n 's/^add_test(\\[=\\[\\([a-z_]*\\).*/\\1/p' build/cpu/CTestTestfile.cmake | grep -E "$name")
if [ -n "$list" ]; then echo "$found" | sed 's/^./  Test #1: &/'; exit; fi
echo "<testsuite tests=\\"$(echo "$found" | wc -l)\\" failures=\\"0\\" skipped=\\"0\\"></testsuite>" > "$report"
"""


class CopiedTree(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.directory = pathlib.Path(holder.name)
        self.tree = self.directory / "tree"
        (self.tree / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "run", self.tree)
        for script in (ROOT / "tools").glob("*.sh"):
            shutil.copy(script, self.tree / "tools")
        programs = self.directory / "bin"
        programs.mkdir()
        for name, text in (("cmake", CMAKE), ("ctest", CTEST), ("ninja", '#!/bin/sh\necho ninja "$@" >> calls\n')):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.environment = os.environ | dict(PATH=f"{programs}:{os.environ['PATH']}", INGOT_BUILD="cpu")

    def build(self, tree):
        """The recorded calls, and the output."""
        (tree / "calls").unlink(missing_ok=True)
        run = subprocess.run(["bash", tree / "run", "build", "--no-install"], capture_output=True, text=True, env=self.environment)
        self.assertEqual(run.returncode, 0, run.stderr)
        return [line.split()[0] for line in (tree / "calls").read_text().splitlines()], run.stderr

    def test_the_program_reads_the_paths_of_the_caller_s_directory(self):
        self.build(self.tree)
        program = self.tree / "build/cpu/ingot"
        program.write_text('#!/bin/sh\necho "$PWD|$INGOT_PROGRAM|$*"\n')
        program.chmod(0o755)
        elsewhere = self.directory / "elsewhere"
        elsewhere.mkdir()
        for script, directory in ((f"{self.tree}/run", elsewhere), ("./run", self.tree)):
            for words, arguments in ((["ingot", "info", "a b"], "info a b"), (["bench", "rope"], "bench rope")):
                run = subprocess.run([script, words[0], "--no-install", *words[1:]], cwd=directory, capture_output=True, text=True, env=self.environment)
                self.assertEqual(run.stdout, f"{directory.resolve()}|{script} ingot|{arguments}\n", run.stderr)

    def test_a_name_builds_what_the_tests_of_this_name_need(self):
        self.build(self.tree)
        folder = self.tree / "build/cpu"
        (folder / "CTestTestfile.cmake").write_text(f"""
add_test([=[kernels_softcap]=] "{folder}/test_kernels_softcap")
add_test([=[kernels_linear]=] "{folder}/test_kernels_linear" "--gtest_filter=-Huge")
add_test([=[cli]=] "python3" "{self.tree}/tests/cli_test.py" "{folder}/ingot")
add_test([=[crash]=] "python3" "{self.tree}/tests/crash_test.py" "--command" "{folder}/save_driver train")
add_test([=[checks]=] "python3" "{self.tree}/tests/checks_test.py")
add_test([=[install]=] "{self.tree}/tests/install_test.sh" "{self.tree}" "{folder}")
add_test([=[engine]=] "python3" "{self.tree}/tests/engine_test.py" "{folder}/ingot")
set_tests_properties([=[engine]=] PROPERTIES  ENVIRONMENT "PYTHONPATH={folder}/python")
""")
        for name, tests, built in (("softcap", 1, ["test_kernels_softcap"]), ("^kernels_", 2, ["test_kernels_softcap", "test_kernels_linear"]), ("cli|crash", 2, ["ingot", "save_driver"]),
                                   ("checks", 1, None), ("install", 1, ["all"]), ("engine", 1, ["ingot", "all"]), ("", 7, ["all"])):
            with self.subTest(name=name):
                (self.tree / "calls").unlink()
                run = subprocess.run(["bash", self.tree / "run", "test", "--no-install", *([name] if name else [])], capture_output=True, text=True, env=self.environment)
                self.assertEqual((run.returncode, run.stdout), (0, f"{tests} passed, 0 failed\n"), run.stderr)
                calls = [line.split()[5:] for line in (self.tree / "calls").read_text().splitlines() if line.startswith("ninja")]
                self.assertEqual(calls, [["build.ninja"]] * bool(name) + ([built] if built else []))
        (self.tree / "calls").unlink()
        run = subprocess.run(["bash", self.tree / "run", "test", "--no-install", "sotfcap"], capture_output=True, text=True, env=self.environment)
        self.assertEqual((run.returncode, run.stdout), (1, "0 passed, 0 failed\n"))
        self.assertIn("test: found no test whose name matches 'sotfcap', expected a part of one of these names: kernels_softcap kernels_linear cli", run.stderr)
        self.assertEqual([line.split()[5:] for line in (self.tree / "calls").read_text().splitlines()], [["build.ninja"]])

    def test_another_system_than_linux_is_named(self):
        uname = self.directory / "bin/uname"
        uname.write_text("#!/bin/sh\necho Darwin\n")
        uname.chmod(0o755)
        run = subprocess.run(["bash", self.tree / "run", "build", "--no-install"], capture_output=True, text=True, env=self.environment)
        self.assertEqual((run.returncode, run.stdout), (1, ""))
        self.assertIn("run: found the system Darwin, expected Linux", run.stderr)

    def test_a_gpu_without_nvcc_is_named_before_the_first_build_and_with_nvcc_it_is_built_for(self):
        def add(name):
            (self.directory / "bin" / name).write_text("#!/bin/sh\necho 'GPU 0: NVIDIA GeForce RTX 3090'\n")
            (self.directory / "bin" / name).chmod(0o755)
        add("nvidia-smi")
        del self.environment["INGOT_BUILD"]
        tools = self.directory / "tools"  # everything but an nvcc of this machine
        tools.mkdir()
        for folder in os.environ["PATH"].split(":"):
            for program in pathlib.Path(folder).glob("*") if pathlib.Path(folder).is_dir() else ():
                if program.name != "nvcc" and not (tools / program.name).exists():
                    (tools / program.name).symlink_to(program)
        self.environment["PATH"] = f"{self.directory / 'bin'}:{tools}"
        self.assertIn("Found a GPU but no nvcc: building for the CPU alone.", self.build(self.tree)[1])
        self.assertEqual(self.build(self.tree), (["ninja"], ""))
        add("nvcc")
        self.build(self.tree)
        self.assertIn("--preset cuda", (self.tree / "calls").read_text())

    def test_help_of_the_gpu_s_stages_needs_no_gpu(self):
        run = subprocess.run(["bash", self.tree / "run", "gpu", "--help"], capture_output=True, text=True, env=self.environment)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertRegex(run.stdout, r"\AFor a machine with an NVIDIA GPU(.|\n)*\n  sanitize ")

    def test_a_copy_is_configured_anew_and_the_original_is_not_touched(self):
        self.assertEqual(self.build(self.tree)[0], ["cmake", "ninja"])
        (self.tree / "build/cpu/object").touch()
        self.assertEqual(self.build(self.tree), (["ninja"], ""))
        copy = self.directory / "copy"
        shutil.copytree(self.tree, copy)
        calls, said = self.build(copy)
        self.assertEqual((calls, said), (["cmake", "ninja"], f"build/cpu was made for {self.tree}: building anew\n"))
        self.assertFalse((copy / "build/cpu/object").exists())
        self.assertTrue((self.tree / "build/cpu/object").exists())
        self.assertEqual(self.build(copy), (["ninja"], ""))

    def test_a_tree_that_was_moved_is_configured_anew_and_one_behind_a_link_is_not(self):
        self.build(self.tree)
        link = self.directory / "link"
        link.symlink_to(self.tree)
        self.assertEqual(self.build(link)[0], ["ninja"])
        moved = self.tree.rename(self.directory / "moved")
        self.assertEqual(self.build(moved)[0], ["cmake", "ninja"])


if __name__ == "__main__":
    unittest.main()
