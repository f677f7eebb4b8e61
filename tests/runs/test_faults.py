"""A small run of benchmarks/faults.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import small_studies as studies


@pytest.mark.slow
def test_twenty_kills_end_in_the_same_bits() -> None:
    command = [sys.executable, str(studies.ROOT / "benchmarks/faults.py"), "--kills", "20", "--seed", "1"]
    done = subprocess.run(command, cwd=studies.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 of 20 runs" in done.stdout
    assert " kills during a write" in done.stdout
