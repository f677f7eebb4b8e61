"""The collect stage: a run's small files of rounds joined into one each. Imports no torch, so that it takes no time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from fedpipe import artifacts
from fedpipe.archive import ArchiveError
from fedpipe.artifacts import RoundFiles, RunFiles
from fedpipe.engine.checkpoint import prune
from fedpipe.errors import ArtifactError


class Joined(NamedTuple):
    """The first rounds of a run."""

    metrics: pa.Table
    matrices: pa.Table
    rounds: pa.Table  #: one row a round: traffic and observations
    times: dict[str, Any]  #: of each round, and what made them


def collect(files: RunFiles, rounds: int, keep_models: str | int) -> None:
    """Join the rounds 1 to ``rounds``: metrics, matrices, one row a round of traffic and observations, times.

    Raises
    ------
    ArtifactError
        A round is incomplete, or one of its files is damaged; it says what to delete so that it is done again.
    """
    artifacts.sweep(files.path)
    try:
        joined = join(files, rounds)
    except ArchiveError:
        raise
    except ArtifactError as error:
        if files.segments():
            advice = f"`rm -r {files.path / 'segments'}` and run again: rounds that are whole are not done again"
        else:  # made by the DAG of single rounds
            advice = f"`rm -r` the folder of that round in {files.history} and run again"
        raise ArtifactError(f"{str(error).partition(';')[0]}; type {advice}.") from error
    written = files.joined(rounds)
    tables = {written.metrics: joined.metrics, written.matrices: joined.matrices, written.rounds: joined.rounds}
    hashes = {path.name: artifacts.write_parquet(path, table) for path, table in tables.items()}
    hashes[written.times.name] = artifacts.write_json(written.times, joined.times)
    artifacts.write_json(written.marker, {"rounds": rounds, **hashes})
    prune(files, rounds, keep_models)


def join(files: RunFiles, rounds: int) -> Joined:
    """The rounds 1 to ``rounds`` as one table of each kind; nothing is written."""
    return _join(files, range(1, rounds + 1))


def _join(files: RunFiles, numbers: range) -> Joined:
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    made_by: list[dict[str, Any]] = []
    for number in numbers:
        place = files.round(number)
        sealed = artifacts.read_json(place.state)
        traffic = artifacts.read_parquet(place.participants, sealed["sha256"][place.participants.name])
        mean = {name: sum(traffic[name].to_pylist()) / len(traffic) for name in ("bytes_down", "bytes_up")}
        left_out = traffic["finite"].to_pylist().count(False)
        counts = {"participants": len(traffic), "left_out": left_out}
        rows.append({"round": number, **counts, **mean, **sealed["observed"]})
        times.append({"round": number, **artifacts.read_json(place.times)})
        made_by += [maker for maker in sealed["made_by"] if maker not in made_by]
    return Joined(
        _tables(files, numbers, lambda place: [place.metrics, place.trained]),
        _tables(files, numbers, lambda place: [place.matrices, place.exchanged]),
        pa.table({name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}),
        {"rounds": times, "made_by": made_by},
    )


def _tables(files: RunFiles, numbers: range, names: Callable[[RoundFiles], list[Path]]) -> pa.Table:
    tables = []
    for number in numbers:
        place = files.round(number)
        hashes = artifacts.hashes(place, place.marker)
        tables += [artifacts.read_parquet(path, hashes[path.name]) for path in names(place) if path.name in hashes]
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})
