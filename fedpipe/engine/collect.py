"""The collect stage: merges the small files of a run's rounds. It imports no torch, so it is fast."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import layout, packing
from fedpipe.core.storage.archive import PackError
from fedpipe.core.storage.files import read_json, read_parquet, write_json, write_parquet
from fedpipe.core.storage.layout import RunFiles
from fedpipe.engine.pruning import prune_states

#: Where the advice of an error about one file begins.
OTHER_ADVICE = re.compile(r"[;.] (?=(?:delete|type) )", re.IGNORECASE)


class MergedRounds(NamedTuple):
    """The merged first rounds of a run."""

    metrics: pa.Table
    matrices: pa.Table
    rounds: pa.Table  #: one row per round: traffic and observations
    times: dict[str, Any]  #: seconds of each round, and the environment


def collect_rounds(files: RunFiles, rounds: int, keep_models: str | int) -> None:
    """Merge the rounds 1 to ``rounds`` and write metrics, matrices, traffic, observations and times.

    Raises
    ------
    ArtifactError
        A round is incomplete or damaged. The message names the files to delete, so that it is recomputed.
    """
    packing.delete_temporary_files(files.path)
    try:
        merged_rounds = merge_rounds(files, rounds)
    except PackError:
        raise
    except ArtifactError as error:
        if files.list_segment_manifests():
            advice = f"Type `rm -r {files.path / 'segments'}` and run again. Complete rounds are not recomputed."
        else:  # from the DAG of single rounds
            advice = f"Delete the folder of that round in {files.rounds_folder} and run again."
        raise ArtifactError(f"{OTHER_ADVICE.split(str(error))[0]}. {advice}") from error
    merged_files = files.get_merged_files(rounds)
    tables = {
        merged_files.metrics: merged_rounds.metrics,
        merged_files.matrices: merged_rounds.matrices,
        merged_files.rounds: merged_rounds.rounds,
    }
    hashes = {path.name: write_parquet(path, table) for path, table in tables.items()}
    hashes[merged_files.times.name] = write_json(merged_files.times, merged_rounds.times)
    write_json(merged_files.marker, {"rounds": rounds, **hashes})
    prune_states(files, rounds, keep_models)


def merge_rounds(files: RunFiles, rounds: int) -> MergedRounds:
    """Merge the rounds 1 to ``rounds`` into one table per kind. Nothing is written."""
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    made_by: list[dict[str, Any]] = []
    metrics: list[pa.Table] = []
    matrices: list[pa.Table] = []
    for number in range(1, rounds + 1):
        round_files = files.get_round_files(number)
        round_state = read_json(round_files.complete_states_marker)
        rows.append({"round": number, **layout.summarize_round(round_files, round_state)})
        times.append({"round": number, **read_json(round_files.times)})
        made_by += [maker for maker in round_state["made_by"] if maker not in made_by]
        hashes = layout.read_round_hashes(round_files, round_files.marker)
        metrics += _read_tables(hashes, round_files.metrics, round_files.trained_accuracies)
        matrices += _read_tables(hashes, round_files.matrices, round_files.exchanged_matrices)
    return MergedRounds(
        _concat_tables(metrics),
        _concat_tables(matrices),
        pa.table({name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}),
        {"rounds": times, "made_by": made_by},
    )


def _read_tables(hashes: Mapping[str, str], *paths: Path) -> list[pa.Table]:
    """Read the tables that a round has."""
    return [read_parquet(path, hashes[path.name]) for path in paths if path.name in hashes]


def _concat_tables(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})
