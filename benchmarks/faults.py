"""Kill a segment at random moments, and check that the same command then gives the same bits.

    python benchmarks/faults.py [--kills 200] [--seed 0]

A run of SCAFFOLD (with server and client state) on digits has three rounds. Every second SIGKILL comes during a random
write of the segment, after a random fraction of the file's bytes. The others come at a random time of the segment. Then
the segment runs again. It must keep the complete rounds, compute the others, and give the same bits as an uninterrupted
run, without temporary files. The exit status is 1 if it fails once.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pyarrow.dataset  # noqa: F401  # a late import of runs, so that children don't repeat it
import yaml

from fedpipe.core.storage import archive
from fedpipe.core.storage import files as storage_files
from fedpipe.core.storage.layout import PARAMS, RunFiles
from fedpipe.engine.run import Run
from fedpipe.planning import download, partition, planner
from fedpipe.planning.plan import PlannedRun

ROUNDS = 3
WRITES = Path("writes")  #: number of writes of a segment
STUDY = {
    "partition": {"scheme": "dirichlet", "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [16]},
    "federation": {"clients": 10, "rounds": ROUNDS, "batch_size": 40, "learning_rate": 0.1},
    "algorithms": {"scaffold": {}},
    "study": {"algorithms": ["scaffold"], "seeds": [0]},
}


def fork_process(work: Callable[[], None]) -> int:
    """Do the work in a child process, which has the loaded modules. Return its process id."""
    if pid := os.fork():
        return pid
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def run_in_child(work: Callable[[], None]) -> bool:
    """Do the work in a child process. Return whether it succeeded."""
    return os.waitpid(fork_process(work), 0)[1] == 0


class Writes:
    """Counts the writes of artifacts, and may kill the process in one of them.

    Parameters
    ----------
    fatal
        The number of the write that kills the process, from 1. 0 for none.
    fraction
        The fraction of the bytes that are on disk by then.
    """

    def __init__(self, fatal: int = 0, fraction: float = 0) -> None:
        self.count, self._fatal, self._fraction = 0, fatal, fraction
        open_file = Path.open

        def open_and_count(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            stream = open_file(path, mode, *arguments, **options)
            return self._count(stream) if mode == "xb" else stream

        Path.open = open_and_count  # type: ignore[method-assign, assignment]

    def _count(self, stream: IO[bytes]) -> IO[bytes]:
        self.count += 1
        if self.count == self._fatal:
            stream.write = functools.partial(self._die, stream, stream.write)  # type: ignore[method-assign]
        return stream

    def _die(self, stream: IO[bytes], write: Callable[[Any], int], data: Any) -> None:
        write(data[: round(self._fraction * len(data))])
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def hash_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the run, loose or packed, except times."""
    loose = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    packed = {f"rounds/{name}": data for name, data in archive.read_pack_members(folder / "rounds.zip").items()}
    return {
        name: hashlib.sha256(data).hexdigest()
        for name, data in sorted((packed | loose).items())
        if not name.endswith(("times.json", "rounds.zip"))
    }


def read_complete_rounds(files: RunFiles) -> dict[int, str]:
    """The times of each complete round. They differ if it is computed again."""
    return {
        number: str(storage_files.read_json(files.get_round_files(number).times))
        for number in files.list_complete_rounds()
        if number
    }


class Target:
    """A run in the current folder, whose only segment is killed."""

    def __init__(self, run: PlannedRun) -> None:
        self.run, self.files = run, run.files

    def prepare_data(self) -> None:
        """Write the data set and the partition."""
        download.download_dataset(self.run.dataset)
        partition.partition_dataset(self.run.partition)

    def run_segment(self) -> None:
        """Compute all rounds that are not complete."""
        list(Run(self.files).run_segment(ROUNDS))

    def count_writes(self) -> None:
        """Run the segment, and write the number of its writes to `WRITES`."""
        writes = Writes()
        self.run_segment()
        WRITES.write_text(str(writes.count))

    def delete_rounds(self) -> None:
        """Delete all rounds."""
        for name in ("rounds", "segments"):
            shutil.rmtree(self.files.path / name, ignore_errors=True)
        archive.get_pack_path(self.files.rounds_folder).unlink(missing_ok=True)

    def kill_segment(self, write: int, fraction: float, moment: float) -> bool:
        """Kill a new segment during a write, or after some seconds if ``write`` is 0. False if it ended before."""
        self.delete_rounds()

        def run_until_killed() -> None:
            Writes(write, fraction)
            self.run_segment()

        child = fork_process(run_until_killed)
        if not write:
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_runs(kills: int, seed: int) -> bool:
    """Kill this number of runs in the current folder once each. Return whether all give the same bits."""
    storage_files.write_bytes(PARAMS, yaml.safe_dump(STUDY).encode())
    plan = planner.make_plan(PARAMS)
    planner.write_plan(plan)
    (run,) = plan.runs
    target, files, random_ = Target(run), run.files, random.Random(seed)
    assert run_in_child(target.prepare_data)
    assert run_in_child(target.count_writes)
    writes, expected_hashes = int(WRITES.read_text()), hash_files(files.path)
    target.delete_rounds()
    begin = time.perf_counter()
    assert run_in_child(target.run_segment)
    seconds = time.perf_counter() - begin
    print(f"a segment of {ROUNDS} rounds: {writes} writes, {seconds:.2f} s", flush=True)
    successes, places, round_counts = 0, Counter[str](), Counter[int]()
    for number in range(kills):
        write, fraction = random_.randint(1, writes) * (number % 2), random_.random()
        while not target.kill_segment(write, fraction, moment := random_.uniform(0, seconds)):
            seconds *= 0.95  # it had ended, because the machine is faster now
        temporary_files = [*files.path.rglob("*.tmp")]
        places["during a write" if temporary_files else "between writes"] += 1
        complete = read_complete_rounds(files)
        round_counts[len(complete)] += 1
        has_succeeded = (
            run_in_child(target.run_segment)
            and hash_files(files.path) == expected_hashes
            and complete.items() <= read_complete_rounds(files).items()
        )
        successes += has_succeeded
        if not has_succeeded:
            how = f"during write {write}, after {fraction:.2f} of its bytes" if write else f"after {moment:.3f} s"
            print(f"kill {number} ({how}): the result differs", flush=True)
    print(", ".join(f"{count} kills {position}" for position, count in sorted(places.items())))
    print(", ".join(f"{count} with {rounds} rounds complete" for rounds, count in sorted(round_counts.items())))
    print(f"{successes} of {kills} runs gave the same bits and computed no complete round again")
    return successes == kills


def main() -> None:
    """Kill runs and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="number of kills (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments (default 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        has_succeeded = kill_runs(options.kills, options.seed)
        os.chdir("/")
    sys.exit(not has_succeeded)


if __name__ == "__main__":
    main()
