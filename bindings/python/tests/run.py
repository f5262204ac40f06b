#!/usr/bin/env python3
"""Runs the package's tests with this Python. --skip-without-torch: status 77 where PyTorch or pytest is not installed."""
import importlib.util
import pathlib
import subprocess
import sys

arguments = sys.argv[1:]
if "--skip-without-torch" in arguments:
    arguments.remove("--skip-without-torch")
    missing = [name for name in ("torch", "pytest", "ingot") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: {sys.executable} has no {', '.join(missing)}")
        sys.exit(77)
here = pathlib.Path(__file__).parent
sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", here, *arguments]).returncode)
