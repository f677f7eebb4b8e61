"""Pages that a thread has touched are its own from then on."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

#: Faults of a thread, by getrusage: 20 times a tensor of 40 MB, larger than glibc ever keeps by itself. Before that it
#: comes to have enough: what it gave back lies in pieces, which grow together.
TOUCH = """
import resource, sys, threading, torch
from fedpipe.engine.torch_env.memory import keep_pages

def touch():
    torch.set_num_threads(1)
    for _ in range(20):
        torch.ones(10_000_000)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(20):
        torch.ones(10_000_000)
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

if sys.argv[1] == "keep":
    keep_pages()
thread = threading.Thread(target=touch)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another malloc than glibc's")
def test_a_step_takes_again_what_the_last_one_gave_back() -> None:
    faults = {
        mode: int(
            subprocess.run([sys.executable, "-c", TOUCH, mode], capture_output=True, text=True, check=True).stdout
        )
        for mode in ("keep", "leave")
    }
    assert faults["keep"] < 1000 < 20 * 1000 < faults["leave"]
