"""The end of a run: its rounds' small files joined into one each. Imports no torch, so that it takes no time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedpipe import artifacts
from fedpipe.artifacts import RoundFiles, RunFiles
from fedpipe.engine.pruning import prune


def collect(files: RunFiles, rounds: int, keep_models: str | int) -> None:
    """Join the rounds 1 to ``rounds``: metrics, matrices, one row a round of traffic and observations, times.

    Raises
    ------
    ArtifactError
        A round is incomplete, or one of its files is damaged.
    """
    artifacts.sweep(files.path)
    numbers = range(1, rounds + 1)
    artifacts.write_parquet(files.metrics, _joined(files, numbers, lambda each: [each.metrics, each.trained]))
    artifacts.write_parquet(files.matrices, _joined(files, numbers, lambda each: [each.matrices, each.exchanged]))
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    made_by: list[dict[str, Any]] = []
    for number in numbers:
        each = files.round(number)
        sealed = artifacts.read_json(each.state)
        traffic = artifacts.read_parquet(each.participants, sealed["sha256"][each.participants.name])
        mean = {name: sum(traffic[name].to_pylist()) / len(traffic) for name in ("bytes_down", "bytes_up")}
        left_out = traffic["finite"].to_pylist().count(False)
        counts = {"participants": len(traffic), "left_out": left_out}
        rows.append({"round": number, **counts, **mean, **sealed["observed"]})
        times.append({"round": number, **artifacts.read_json(each.times)})
        made_by += [each for each in sealed["made_by"] if each not in made_by]
    artifacts.write_parquet(files.rounds, pa.Table.from_pylist(rows))
    artifacts.write_json(files.times, {"rounds": times, "made_by": made_by})
    prune(files, rounds, keep_models)


def _joined(files: RunFiles, numbers: range, names: Callable[[RoundFiles], list[Path]]) -> pa.Table:
    tables = []
    for number in numbers:
        each = files.round(number)
        hashes = artifacts.read_json(each.marker)["sha256"]
        tables += [artifacts.read_parquet(path, hashes[path.name]) for path in names(each) if path.name in hashes]
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})
