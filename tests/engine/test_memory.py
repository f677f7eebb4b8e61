"""A thread keeps the pages that it has touched."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

#: Page faults of a thread, by getrusage, of 20 tensors of 40 MB, which is more than glibc keeps by default. The 20
#: tensors before them let the heap grow to its final size, because freed memory is in pieces at first.
TOUCH = """
import resource, sys, threading, torch
from fedpipe.engine.torch_env.memory import retain_freed_memory

def touch():
    torch.set_num_threads(1)
    for _ in range(20):
        torch.ones(10_000_000)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(20):
        torch.ones(10_000_000)
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

if sys.argv[1] == "keep":
    retain_freed_memory()
thread = threading.Thread(target=touch)
thread.start()
thread.join()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another malloc than glibc's")
def test_a_step_takes_again_what_the_last_one_gave_back() -> None:
    faults = {
        mode: int(
            subprocess.run([sys.executable, "-c", TOUCH, mode], capture_output=True, text=True, check=True).stdout
        )
        for mode in ("keep", "leave")
    }
    assert faults["keep"] < 1000 < 20 * 1000 < faults["leave"]
