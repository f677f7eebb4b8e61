"""Memory: a thread reuses the pages that it has freed, and a round's tensors are freed at its end."""

import ctypes
import gc
import subprocess
import sys

import pytest
import torch

from fedpipe.core import garbage
from fedpipe.core.components import component, registry
from tests import small_studies as studies

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


@pytest.mark.parametrize("name", ["fedavg", "cfl", "fednova", "fedrod", "ifca", "scaffold"])
def test_tensors_of_round_are_in_no_cycle_of_references(make_trial, name: str) -> None:
    """Python frees cycles late, so the uploads of several rounds would be in memory."""
    trial = make_trial(registry.build_component(component.ALGORITHM, name, {})).run(1)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        trial.run(2)
        gc.collect()
        assert not [value for value in gc.garbage if isinstance(value, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_opened_run_searches_for_garbage_as_often_as_python(in_empty_folder) -> None:
    """A cycle in the loss of a custom method may contain a large tensor per batch."""
    default_thresholds = gc.get_threshold()
    garbage.reduce_collections()
    assert gc.get_threshold() != default_thresholds
    studies.open_runs(studies.prepare(studies.settings()))
    assert gc.get_threshold() == default_thresholds
