"""The device of a job, and the facts of its machine that are recorded."""

from __future__ import annotations

import functools
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedpipe
from fedpipe.algorithms.base import Algorithm
from fedpipe.core.components import code_digest, pinned_files
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.engine.torch_env import gpus, numerics
from fedpipe.models.base import Model
from fedpipe.settings.execution import Execution


@functools.cache
def get_cpu_name() -> str:
    """Kind of CPU, which determines how kernels round."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{platform.machine()}, {line.partition(':')[2].strip()}"
    return platform.machine()


def get_device_and_versions(device: torch.device) -> dict[str, Any]:
    """Device and versions of this process, on which bits depend."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else get_cpu_name(),
        "fedpipe": fedpipe.__version__,
        "shared": code_digest.compute_shared_code_digest(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def configure_device(execution: Execution) -> torch.device:
    """Select the device, acquire a GPU, and set up PyTorch for reproducible bits."""
    numerics.configure_torch()
    if execution.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("execution.device: cuda can't be used, because PyTorch sees no GPU. Use auto or cpu.")
    if execution.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", _acquire_gpu_once(count) if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


@functools.cache
def _acquire_gpu_once(count: int) -> int:
    """Acquire a GPU for this process. Return its index."""
    return gpus.acquire_gpu(gpus.get_visible_gpu_ids(count))


class ComponentCode:
    """The code of a run's components, as it was when this job began.

    User code may read files of the run's key at any time, so results are written only if these are unchanged.
    """

    def __init__(self, *components: Model | Algorithm) -> None:
        self._code_objects = [component.list_hashed_code() for component in components]
        digests = [code_digest.compute_code_digest(*objects) for objects in self._code_objects]
        self._digests = [digest.text for digest in digests]
        # Data, and imports that this process has not read yet.
        paths = {path for digest in digests for path in digest.files if path.suffix != ".py" or not _is_imported(path)}
        self._file_stamps = {path: pinned_files.compute_stat_fingerprint(path) for path in paths}

    def require_unchanged(self, run_folder: Path) -> None:
        """Reject a result of a run if files of its key have changed since this job began."""
        current_stamps = {path: pinned_files.compute_stat_fingerprint(path) for path in self._file_stamps}
        changed_files = [path for path, stamp in self._file_stamps.items() if current_stamps[path] != stamp]
        if changed_files and code_digest.recompute_code_digests(*self._code_objects) == self._digests:
            self._file_stamps = current_stamps  # a file was only touched, or a comment has changed
        elif changed_files:
            raise ArtifactError(
                f"{run_folder}: {changed_files[0]} has changed since this job began, but the run's key depends "
                "on its previous content. Type `fedpipe run` to plan again, or restore the file."
            )


def _is_imported(path: Path) -> bool:
    """Whether a file is the source of an imported module. Other modules are not read, because a fork shares them."""
    last_name = path.parent.name if path.stem == "__init__" else path.stem
    modules = [module for name, module in list(sys.modules.items()) if name.rpartition(".")[2] == last_name]
    return any(Path(getattr(module, "__file__", None) or "").resolve() == path for module in modules)
