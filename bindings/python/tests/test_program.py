"""python -m ingot."""
import subprocess
import sys

import pytest
from ingot.__main__ import verdict


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "ingot", *arguments], capture_output=True, text=True)


def test_the_help_says_what_the_command_prints():
    found = run("--help")
    assert (found.returncode, found.stderr) == (0, "")
    assert "Prints the versions" in found.stdout and "--declared" in found.stdout


@pytest.mark.parametrize("arguments", [["--foo"], ["doctor"], ["--declared", "more"]])
def test_unknown_arguments_are_refused_in_one_line(arguments):
    found = run(*arguments)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    assert found.stderr.startswith("python -m ingot: unrecognized arguments: " + arguments[-1])


@pytest.mark.parametrize("capability, word, absent", [((9, 0), "kernels for Hopper", "plain"), ((8, 0), "grouped_linear by a plain kernel", "for Hopper"),
                                                     ((12, 0), "grouped_linear by a plain kernel", "for Hopper"), ((7, 5), "operations over rows run (rms_norm, ", "everything"),
                                                     ((7, 5), "attention and Muon need compute capability 8.0", "Hopper"), ((7, 0), "nothing runs", "everything")])
def test_the_command_says_what_runs_on_each_generation(capability, word, absent):
    assert word in verdict(capability) and absent not in verdict(capability)
