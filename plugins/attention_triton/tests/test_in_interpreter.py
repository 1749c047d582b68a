"""Runs the tests of ``kernels/`` in Triton's interpreter, which must be chosen before triton is imported.

They are a process of their own, so that the choice reaches no other test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux only")
@pytest.mark.parametrize(
    "which", ["not slow", pytest.param("slow", marks=(pytest.mark.slow, pytest.mark.timeout(1200)))]
)
def test_kernels_in_the_interpreter(which: str) -> None:
    """All tests of the kernels pass, and there are some."""
    environ = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    folder = Path(__file__).parent / "kernels"
    command = [sys.executable, "-m", "pytest", str(folder), "-q", "-m", which, "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
