"""A small run of benchmarks/faults.py."""

import subprocess
import sys

import pytest

from tests import small_studies as studies


@pytest.mark.slow
def test_twenty_killed_runs_have_equal_bits() -> None:
    command = [sys.executable, str(studies.ROOT / "benchmarks/faults.py"), "--kills", "20", "--seed", "1"]
    process = subprocess.run(command, cwd=studies.ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "20 of 20 runs" in process.stdout
    assert " kills during a write" in process.stdout
