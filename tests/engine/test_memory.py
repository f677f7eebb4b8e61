"""A thread reuses the memory pages that it has freed."""

import ctypes
import subprocess
import sys

import pytest

#: Prints a thread's page faults (getrusage) for 20 tensors of 40 MB, which is more than glibc retains by default. The
#: heap grows to its final size with 20 other tensors before, because freed memory is in pieces at first.
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
def test_retain_freed_memory_prevents_page_faults() -> None:
    faults = {
        mode: int(
            subprocess.run([sys.executable, "-c", TOUCH, mode], capture_output=True, text=True, check=True).stdout
        )
        for mode in ("keep", "leave")
    }
    assert faults["keep"] < 1000 < 20 * 1000 < faults["leave"]
