"""A run: how its rounds resume, and its segments."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

from typing_extensions import override

from fedpipe.core.storage import packing
from fedpipe.core.storage.files import compute_file_sha256, is_stored, write_json
from fedpipe.engine import replay
from fedpipe.engine.pruning import StatePruner
from fedpipe.engine.rounds import Rounds


class Run(Rounds):
    """A run in this process, with the parameters of its :class:`Rounds`."""

    def run_segment(self, stop: int) -> Iterator[int]:
        """Run the incomplete rounds up to ``stop``. Yield the number of complete rounds, then each new round."""
        packing.delete_temporary_files(self.files.path)
        pruner = StatePruner(self.files)
        # A later marker than these is of another job, which runs at the same time.
        marked_rounds = self.files.list_complete_rounds()
        last_complete = self.checkpoint.find_last_resumable_round(stop, self._keep_models)
        if last_complete < 0:
            self.write_initial_round()
            last_complete = 0
        self._require_same_data(last_complete)
        yield last_complete
        damaged_rounds = {number for number in marked_rounds if number > last_complete}
        for number in range(last_complete + 1, stop + 1):
            if number in damaged_rounds or not is_stored(self.files.get_round_files(number).marker):
                self.run_round(number)  # unless another study has completed it
            pruner.prune(number, self._keep_models)
            yield number
        packing.pack_folder(self.files.rounds_folder)
        markers = {number: self.files.get_round_files(number).marker for number in range(stop + 1)}
        hashes = {str(number): compute_file_sha256(marker) for number, marker in markers.items()}
        write_json(self.files.get_segment_manifest_path(stop), {"rounds": hashes})

    def describe_executor_and_device(self) -> str:
        """Describe the executor, device and cores of this process."""
        visible_gpus, threads = os.environ.get("CUDA_VISIBLE_DEVICES", ""), self._threads
        executor, device = self.executor.name, self.get_environment()["device"]
        description = f"{executor} executor on {device}, {threads} thread{'s' * (threads > 1)} of {platform.node()}"
        if visible_gpus in ("", "-1"):
            return description
        missing_gpu = " is assigned, but PyTorch sees no GPU" if self._device.type == "cpu" else ""
        return f"{description}, GPU {visible_gpus}{missing_gpu}"

    @override
    def _begin_round_step(self, round_number: int) -> None:
        """Require also that data are unchanged and that the shared code reproduces the previous round."""
        super()._begin_round_step(round_number)
        self._require_same_data(round_number - 1)
        replay.require_reproducible_round(self, round_number - 1)
