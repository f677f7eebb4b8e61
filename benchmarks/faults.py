"""SIGKILL at random moments of a segment, and whether the same command then ends in the same bits.

    python benchmarks/faults.py [--kills 200] [--seed 0]

A run of SCAFFOLD (server and client state) on digits, three rounds. Every second kill strikes inside a write, of all
the segment's writes each as likely as the others, after a random share of the file's bytes; the others strike by the
clock, at any moment from the segment's first to its last. Then the segment runs once more, and must find the rounds
that were complete, leave them as they are, do the others, and end in the bits of a run that nobody killed, with no
half-written file beside them. Ends with status 1 if one did not.
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

import pyarrow.dataset  # noqa: F401  # what a run imports late, so that not every child does
import yaml

from fedpipe.core.storage import archive
from fedpipe.core.storage import files as storage_files
from fedpipe.core.storage.layout import PARAMS, RunFiles
from fedpipe.engine.run import Run
from fedpipe.planning import download, partition, planner

ROUNDS = 3
STUDY = {
    "partition": {"scheme": "dirichlet", "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [16]},
    "federation": {"clients": 10, "rounds": ROUNDS, "batch_size": 40, "learning_rate": 0.1},
    "algorithms": {"scaffold": {}},
    "study": {"algorithms": ["scaffold"], "seeds": [0]},
}


def forked(work: Callable[[], None]) -> int:
    """The number of a child process that does the work; its modules are loaded already."""
    if pid := os.fork():
        return pid
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def run_in_child(work: Callable[[], None]) -> bool:
    """Whether a child did the work to its end."""
    return os.waitpid(forked(work), 0)[1] == 0


class Writes:
    """Counts the writes of artifacts, and may kill the process in one of them.

    Parameters
    ----------
    fatal
        The number of the write to die in, from 1; 0 for none.
    share
        Of the bytes that are on disk when it dies.
    """

    def __init__(self, fatal: int = 0, share: float = 0) -> None:
        self.count, self._fatal, self._share, self._fdopen = 0, fatal, share, os.fdopen
        storage_files.os.fdopen = self._open  # type: ignore[assignment]

    def _open(self, *arguments: Any) -> Any:
        self.count += 1
        stream = self._fdopen(*arguments)
        if self.count == self._fatal:
            stream.write = functools.partial(self._die, stream, stream.write)
        return stream

    def _die(self, stream: IO[bytes], write: Callable[[Any], int], data: Any) -> None:
        write(data[: round(self._share * len(data))])
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def bits(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the run, loose or packed, but its times."""
    loose = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    packed = {f"rounds/{name}": data for name, data in archive.read_members(folder / "rounds.zip").items()}
    return {
        name: hashlib.sha256(data).hexdigest()
        for name, data in sorted((packed | loose).items())
        if not name.endswith(("times.json", "rounds.zip"))
    }


def done(files: RunFiles) -> dict[int, str]:
    """The complete rounds, each with its times, which differ when it is done again."""
    return {
        number: str(storage_files.read_json(files.round(number).times))
        for number in files.list_complete_rounds()
        if number
    }


def campaign(kills: int, seed: int) -> bool:
    """In the current folder: so many runs, each killed once; whether all ended in the same bits."""
    storage_files.write_bytes(PARAMS, yaml.safe_dump(STUDY).encode())
    made = planner.make_plan(PARAMS)
    planner.write_plan(made)
    (run,) = made.runs
    files, random_ = run.files, random.Random(seed)

    def prepare() -> None:
        download.download_dataset(run.dataset)
        partition.partition_dataset(run.partition)

    def segment() -> None:
        list(Run(files).run_segment(ROUNDS))

    def counted() -> None:
        writes = Writes()
        segment()
        Path("writes").write_text(str(writes.count))

    def away() -> None:
        for name in ("rounds", "segments"):
            shutil.rmtree(files.path / name, ignore_errors=True)
        archive.pack_path(files.rounds_folder).unlink(missing_ok=True)

    assert run_in_child(prepare)
    assert run_in_child(counted)
    writes, wanted = int(Path("writes").read_text()), bits(files.path)
    away()
    begin = time.perf_counter()
    assert run_in_child(segment)
    seconds = time.perf_counter() - begin
    print(f"a segment of {ROUNDS} rounds: {writes} writes, {seconds:.2f} s", flush=True)

    def struck(write: int, share: float, moment: float) -> bool:
        """Kill a segment in a write (0: by the clock); whether it was at work still."""
        away()

        def doomed() -> None:
            Writes(write, share)
            segment()

        child = forked(doomed)
        if not write:
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    same, where, found = 0, Counter[str](), Counter[int]()
    for number in range(kills):
        write, share = random_.randint(1, writes) * (number % 2), random_.random()
        while not struck(write, share, moment := random_.uniform(0, seconds)):
            seconds *= 0.95  # it was over: this machine is faster now
        half = [*files.path.rglob("*.tmp")]
        where["in a write" if half else "between writes"] += 1
        complete = done(files)
        found[len(complete)] += 1
        ended = run_in_child(segment) and bits(files.path) == wanted and complete.items() <= done(files).items()
        same += ended
        if not ended:
            how = f"write {write} after {share:.2f} of its bytes" if write else f"{moment:.3f} s"
            print(f"kill {number} ({how}) did not end in the same bits", flush=True)
    print(", ".join(f"{count} kills {place}" for place, count in sorted(where.items())))
    print(", ".join(f"{count} with {rounds} rounds complete" for rounds, count in sorted(found.items())))
    print(f"{same} of {kills} ended in the same bits, and did no complete round again")
    return same == kills


def main() -> None:
    """Strike, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="default 200")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; default 0")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        alike = campaign(options.kills, options.seed)
        os.chdir("/")
    sys.exit(not alike)


if __name__ == "__main__":
    main()
