"""A short run of tools/fuzz_ops.py, with the same cases every time."""
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import DEVICE

TOOL = pathlib.Path(__file__).parents[3] / "tools" / "fuzz_ops.py"


@pytest.mark.skipif(not TOOL.exists(), reason="tests without the tree")
def test_random_calls_are_near_fp64_and_leave_memory_alone():
    found = subprocess.run([sys.executable, TOOL, "--device", DEVICE, "--seed", "11", "--cases", "40", "--seconds", "1500"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert "40 cases, 0 failed" in found.stdout
    computed = sum(int(n) for n in re.findall(r" (\d+) ok", found.stdout))
    assert computed >= 30, found.stdout  # the rest: wrong arguments, and layouts that kernels do not take
