"""Whether results hold: all files against their recorded hashes, and a round, run again, against its recorded bits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from fedpipe import archive, artifacts, code
from fedpipe.artifacts import RESTORE, RunFiles
from fedpipe.changes import made_elsewhere
from fedpipe.config import Execution
from fedpipe.data import store
from fedpipe.engine import redo
from fedpipe.engine.run import Run
from fedpipe.errors import UserError
from fedpipe.plan import Settings, digest
from fedpipe.stages import collect, partition


class Verdict(NamedTuple):
    """What was found of a run."""

    said: str
    holds: bool
    of: str = ""  #: what was compared, in the singular: run, partition, file or round
    number: int = 1  #: of them


def summary(verdicts: list[Verdict]) -> str:
    """All verdicts in a line."""
    if not all(verdict.holds for verdict in verdicts):
        return "something differs: see above"
    counts = Counter[str]()
    for verdict in verdicts:
        counts[verdict.of] += verdict.number
    listed = [
        f"{counts[of]:,} {of if counts[of] == 1 else f'{of}s'}{more}"
        for of, more in {"run": "", "partition": "", "file": "", "round": " run again"}.items()
        if counts[of]
    ]
    return f"all agrees: {', '.join(listed)}"


def rehash(files: RunFiles) -> Verdict:
    """Hash every file of a run, its partition and its data set, and join its rounds again.

    States that `artifacts.keep_models` has pruned may be absent; their hashes stay recorded.
    """
    wrong: dict[str, Path] = {}  #: what is not as recorded, and what to delete
    count = absent = 0
    settings = Settings.read(files.settings)
    data, key = store.place(settings.dataset), digest(settings.partition_settings)
    dealt, unlike = artifacts.assignment_file(key), artifacts.heterogeneity_file(key)
    for path, delete in ((data, data), (dealt, dealt), (unlike, dealt)):
        count += 1
        if not artifacts.intact(path, artifacts.manifest(path, delete.with_suffix(".json").name)):
            wrong[str(path)] = delete
    if not archive.sound(zipped := archive.of(files.history)):
        wrong[str(zipped)] = files.path
    rounds = files.complete()
    for number in rounds if not wrong else ():
        folder = files.round(number)
        for name, sha256 in artifacts.hashes(folder, folder.marker).items():
            path = folder.path / name
            if path in (folder.server, folder.clients) and not path.exists():
                absent += 1
                continue
            count += 1
            if not artifacts.intact(path, sha256):
                wrong[str(artifacts.holder(path))] = files.path
    if not wrong:
        wrong |= _segments(files)
        wrong |= _joined(files)
    if wrong:
        places = ", ".join(map(str, dict.fromkeys(wrong.values())))
        return Verdict(f"{files.path}: not as recorded: {', '.join(wrong)}; delete {places}, then {RESTORE}", False)
    pruned = f"; states absent: {absent} (artifacts.keep_models)" if absent else ""
    return Verdict(f"{files.path}: {count} files of {len(rounds)} rounds are as recorded{pruned}", True, "run")


def redeal(key: str) -> Verdict:
    """Deal a partition again, by the code that lies here, and compare."""
    path, holds = artifacts.assignment_file(key), partition.holds(key)
    advice = f"other samples; bring back the code that dealt it, or delete {path.parent} and the runs that have it"
    return Verdict(f"{path}: dealt again: {'the same samples' if holds else advice}", holds, "partition")


def rerun(files: RunFiles, rng: random.Random) -> Verdict:
    """Do one round again, drawn from those whose states before it are kept, and compare all of its bits."""
    candidates = [number for number in files.complete() if number > 0 and files.round(number - 1).server.exists()]
    rng.shuffle(candidates)
    for number in candidates:
        made_by = artifacts.read_json(files.round(number).state)["made_by"]
        run = Run(files, _as_before(made_by[0]["executor"]))
        found = redo.again(run, number)
        if found is not None:  # else a client's last state was pruned
            return _judged(files, found, run.federation.arithmetic)
    return Verdict(f"{files.path}: no round can be run again, since no state before one is kept", True)


def _judged(files: RunFiles, found: redo.Comparison, arithmetic: str) -> Verdict:
    """What was found of a round that was done again: its bits agree, or elsewhere than it was made it is close."""
    reason = ""
    if found.differ:
        made = found.made_by[0]
        other = [f"{name} {made.get(name)}, now {now}" for name, now in found.now.items() if now != made.get(name)]
        reason = f"; made with {'; '.join(other)}" if other else ""
        reason += "; within rounding" if found.agrees(arithmetic) else ""
    return Verdict(
        f"{files.path}: round {found.round}, run again: {found.told()}{reason}", found.agrees(arithmetic), "round"
    )


def verify(paths: list[Path], again: int, rng: random.Random) -> Iterator[Verdict]:
    """Re-hash runs, deal their partitions again, and run a round again of some.

    That is of all that other shared code has made, and of so many others, at random.
    """
    whole: list[Path] = []
    for path in paths:
        try:
            verdict = rehash(RunFiles(path))
        except UserError as error:
            verdict = Verdict(f"{path}: {error}", False)
        if verdict.holds:
            whole.append(path)
        yield verdict
    for key in dict.fromkeys(digest(Settings.read(RunFiles(path).settings).partition_settings) for path in whole):
        try:
            yield redeal(key)
        except UserError as error:
            yield Verdict(f"{artifacts.assignment_file(key)}: can't be dealt again: {error}", True)
    elsewhere = [path for path in whole if made_elsewhere(RunFiles(path), code.shared())]
    others = [path for path in whole if path not in elsewhere]
    for path in [*(elsewhere if again else []), *rng.sample(others, min(again, len(others)))]:
        try:
            yield rerun(RunFiles(path), rng)
        except UserError as error:
            yield Verdict(f"{path}: {error}", False)


def _segments(files: RunFiles) -> dict[str, Path]:
    """Manifests of segments that do not name the rounds that are there, which are to be deleted."""
    wrong = {}
    for path in files.segments():
        markers = {str(number): files.round(number).marker for number in range(int(path.stem) + 1)}
        rounds = {number: artifacts.sha256_of(marker) for number, marker in markers.items() if artifacts.exists(marker)}
        if artifacts.read_json(path) != {"rounds": rounds}:
            wrong[str(path)] = path
    return wrong


def _joined(files: RunFiles) -> dict[str, Path]:
    """Joined files that are not what the rounds give, with their folders, which are to be deleted."""
    wrong: dict[str, Path] = {}
    for joined in files.all_joined():
        made, times = collect.join(files, joined.length), joined.times
        tables = {joined.metrics: made.metrics, joined.matrices: made.matrices, joined.rounds: made.rounds}
        same = {
            path: artifacts.intact(path, joined.sha256(path)) and _same(artifacts.read_parquet(path), table)
            for path, table in tables.items()
        }
        same[times] = artifacts.intact(times, joined.sha256(times)) and artifacts.read_json(times) == made.times
        wrong |= {str(path): joined.path for path, holds in same.items() if not holds}
    return wrong


def _same(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables say the same, where a NaN is one as well; other versions of Arrow may have written them."""
    return artifacts.parquet_bytes(one) == artifacts.parquet_bytes(other)


def _as_before(executor: str) -> Execution:
    """The execution that made it: loop, or a stack of so many."""
    width = executor.removeprefix("stack of ")
    return Execution.model_validate({"stack": int(width) if width.isdigit() else 1})
