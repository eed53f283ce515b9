"""Runs `kernel_cases.py`, the tests of the Triton kernels on CPU tensors, in a process where Triton interprets."""

import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("kernel_cases.py")

if find_spec("triton") is None:
    pytest.skip("needs Triton: pip install -e '.[dev]' on Linux", allow_module_level=True)
if tuple(map(int, metadata.version("triton").split(".")[:2])) < (3, 7):
    pytest.skip("needs Triton 3.7: the interpreter before it does not know NumPy 2.4", allow_module_level=True)


def test_kernels_compute_what_the_plain_implementation_does():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--tb=short",
        str(CASES),
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, cwd=CASES.parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
