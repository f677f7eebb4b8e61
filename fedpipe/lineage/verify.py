"""Whether results hold: all files against their recorded hashes, and a round, run again, against its recorded bits."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedpipe import artifacts, packs
from fedpipe.artifacts import RESTORE, RunFiles
from fedpipe.config import Execution
from fedpipe.data import store
from fedpipe.engine import collecting
from fedpipe.engine.run import Run
from fedpipe.errors import ArtifactError, UserError
from fedpipe.plan import Settings, digest


class Verdict(NamedTuple):
    """What was found of a run."""

    said: str
    holds: bool


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
    rounds = files.complete()
    for number in rounds:
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
        wrong |= dict.fromkeys(_joined(files), files.path)
    if wrong:
        places = ", ".join(map(str, dict.fromkeys(wrong.values())))
        return Verdict(f"{files.path}: not as recorded: {', '.join(wrong)}; delete {places}, then {RESTORE}", False)
    pruned = f"; states absent: {absent} (artifacts.keep_models)" if absent else ""
    return Verdict(f"{files.path}: {count} files of {len(rounds)} rounds are as recorded{pruned}", True)


def rerun(files: RunFiles, rng: random.Random) -> Verdict:
    """Run one round again, drawn from those whose states before it are kept, and compare all of its bits."""
    candidates = [number for number in files.complete() if number > 0 and files.round(number - 1).server.exists()]
    rng.shuffle(candidates)
    with tempfile.TemporaryDirectory(prefix="fedpipe-verify-") as folder:
        for number in candidates:
            copy = _until(files, number, Path(folder) / str(number) / files.path.name)
            made_by = artifacts.read_json(files.round(number).state)["made_by"]
            run = Run(copy, _as_before(made_by[0]["executor"]))
            if run.checkpoint.complete(number - 1) < number - 1:
                continue  # a client's last state was pruned
            run.round(number)
            return _compared(files, copy, number, made_by)
    return Verdict(f"{files.path}: no round can be run again, since no state before one is kept", True)


def verify(paths: list[Path], again: int, rng: random.Random) -> Iterator[Verdict]:
    """Re-hash runs, then run a round of so many of them again, drawn at random."""
    whole = []
    for path in paths:
        try:
            verdict = rehash(RunFiles(path))
        except UserError as error:
            verdict = Verdict(f"{path}: {error}", False)
        if verdict.holds:
            whole.append(path)
        yield verdict
    for path in rng.sample(whole, min(again, len(whole))):
        yield rerun(RunFiles(path), rng)


def _joined(files: RunFiles) -> list[str]:
    """The joined tables that differ from what the rounds give; none where they were not joined yet."""
    if not files.metrics.is_file():
        return [str(files.metrics)]
    rounds = artifacts.read_parquet(files.rounds).num_rows
    with tempfile.TemporaryDirectory(prefix="fedpipe-verify-") as folder:
        copy = _until(files, rounds + 1, Path(folder) / files.path.name)
        collecting.collect(copy, rounds, "all")
        pairs = [(files.metrics, copy.metrics), (files.matrices, copy.matrices), (files.rounds, copy.rounds)]
        pairs += [(files.joined, copy.joined)]
        return [str(ours) for ours, theirs in pairs if not artifacts.intact(ours, artifacts.sha256_of(theirs))]


def _until(files: RunFiles, number: int, folder: Path) -> RunFiles:
    """A run's folder as it was before a round: its settings, and what the rounds so far left."""
    copy = RunFiles(folder)
    copy.history.mkdir(parents=True)
    copy.settings.write_bytes(files.settings.read_bytes())
    packed = packs.contents(packs.of(files.history))
    before = {name: data for name, data in packed.items() if int(Path(name).parent.name) < number}
    packs.of(copy.history).write_bytes(packs.join(before))
    for earlier in range(number):
        if files.round(earlier).path.is_dir():
            copy.round(earlier).path.symlink_to(files.round(earlier).path.resolve(), target_is_directory=True)
    return copy


def _as_before(executor: str) -> Execution:
    """The execution that made it: loop, or a stack of so many."""
    width = executor.removeprefix("stack of ")
    return Execution.model_validate({"stack": int(width) if width.isdigit() else 1})


def _compared(files: RunFiles, copy: RunFiles, number: int, made_by: list[dict[str, Any]]) -> Verdict:
    ours, theirs = (artifacts.read_json(each.round(number).marker)["sha256"] for each in (files, copy))
    names = sorted({name for name in ours | theirs if not name.endswith(".json")})
    differ = [name for name in names if ours.get(name) != theirs.get(name)]
    place = f"{files.path}: round {number}, run again"
    if not differ:
        return Verdict(f"{place}: all bits agree ({', '.join(names)})", True)
    now = artifacts.read_json(copy.round(number).state)["made_by"][0]
    other = [f"{name} {made_by[0].get(name)}, now {now[name]}" for name in now if now[name] != made_by[0].get(name)]
    reason = f"; made with {'; '.join(other)}" if other else ""
    return Verdict(f"{place}: bits differ in {', '.join(differ)}{_distance(files, copy, number)}{reason}", False)


def _distance(files: RunFiles, copy: RunFiles, number: int) -> str:
    """By how much the server's states differ, where both are there: rounding, or something else."""
    try:
        old, new = (dict(_leaves(artifacts.read_pt(each.round(number).server))) for each in (files, copy))
    except ArtifactError:
        return ""
    if old.keys() != new.keys():
        return ""
    gaps = [(new[name].double() - old[name].double()).abs().max().item() for name in old if old[name].numel()]
    return f" (server's state by at most {max(gaps, default=0.0):.3g})"


def _leaves(tree: dict[str, Any], place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{place}{name}/")
        else:
            yield f"{place}{name}", value
