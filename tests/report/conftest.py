"""Small result folders, with numbers that are easy to check by hand."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fedpipe.core.components import code_digest
from fedpipe.core.storage import files as storage_files
from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import MergedRoundFiles
from fedpipe.data import heterogeneity
from fedpipe.planning.plan import Cell, Plan, PlannedRun
from fedpipe.report import tables
from fedpipe.report.data import StudyData
from fedpipe.settings.execution import Artifacts, Execution
from fedpipe.settings.report import Report

Counts = Sequence[tuple[int, int]]  #: (correct, total) of each client, or of the server's model if there is one pair

ROUNDS = 3
PARTITION = "00000000000a"  #: key of the partition of all runs
MADE_BY = {"executor": "loop", "device": "x86_64", "fedpipe": "0.1.0", "torch": "2.11.0"}


class Tree:
    """A study in the working directory. Tests write its runs one by one."""

    def __init__(
        self, algorithms: Sequence[str], seeds: Sequence[int] = (0, 1), grid: Mapping[str, Sequence[Any]] | None = None
    ):
        grid = grid or {}
        points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        runs: list[PlannedRun] = []
        cells: list[Cell] = []
        for point, name, seed in itertools.product(points, algorithms, seeds):
            method_point = {
                key: v for key, v in point.items() if not key.startswith("algorithms.") or f".{name}." in key
            }
            if any((cell.algorithm, cell.seed, cell.grid) == (name, seed, method_point) for cell in cells):
                continue
            fields: dict[str, Any] = {"algorithm": name, "seed": seed, "key": f"{len(runs):012x}", "rounds": ROUNDS}
            cells.append(Cell(**fields, grid=method_point))
            runs.append(PlannedRun(**fields, partition=PARTITION, dataset=f"digits-{0:012x}", participants=2))
        self.plan = Plan(
            params=Path("params.yaml"),
            preset="full",
            algorithms=tuple(algorithms),
            seeds=tuple(seeds),
            grid={name: list(values) for name, values in grid.items()},
            protocols=("global-on-global", "personal-on-local"),
            method_protocols={},
            partitions={
                PARTITION: {
                    "dataset": {"name": "digits", "split": "official"},
                    "partition": {"scheme": "dirichlet", "alpha": 0.3},
                    "clients": 2,
                    "seed": 0,
                }
            },
            runs=tuple(runs),
            cells=tuple(cells),
            warnings=(),
            files=(),
            shared=code_digest.compute_shared_code_digest(),
            execution=Execution(),
            artifacts=Artifacts(),
            report=Report(last_k=2),
        )
        path = layout.get_assignment_path(PARTITION).with_name("heterogeneity.parquet")
        table = heterogeneity.make_heterogeneity_table(np.array([[4, 0], [3, 3]]))
        self.write_table(path, table, "assignment.json")

    def change(self, **fields: Any) -> None:
        """Change fields of the plan."""
        self.plan = dataclasses.replace(self.plan, **fields)

    def change_report(self, **fields: Any) -> None:
        """Change fields of the section `report`."""
        self.change(report=self.plan.report.model_copy(update=fields))

    def set_overrides(self, get_overrides: Callable[[Cell], dict[str, Any]]) -> None:
        """Give each cell the overrides that a function returns for it."""
        self.change(cells=tuple(dataclasses.replace(cell, own=get_overrides(cell)) for cell in self.plan.cells))

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        return self.plan.runs

    @property
    def data(self) -> StudyData:
        """The numbers of the study. Each use reads the files again."""
        return StudyData(self.plan)

    def render_markdown(self) -> str:
        return tables.render_markdown_table(self.data)

    def write(
        self, run: int, rounds: Sequence[Mapping[str, Counts]], traffic: int = 100, seconds: float = 1.0, **made_by: str
    ) -> None:
        """Write the files of a run, with the counts of each protocol by round."""
        files = self.merged_files(run)
        rows: list[dict[str, Any]] = [
            {"round": number, "client": client if len(counts) > 1 else -1, "protocol": protocol}
            | {"correct": correct, "total": total}
            for number, counts_by_protocol in enumerate(rounds, 1)
            for protocol, counts in counts_by_protocol.items()
            for client, (correct, total) in enumerate(counts)
        ]
        names = {"round": pa.int32(), "client": pa.int32(), "protocol": pa.string()}
        schema = pa.schema(names | {"correct": pa.int64(), "total": pa.int64()})
        self.write_table(files.metrics, pa.Table.from_pylist(rows, schema))
        sent = {"participants": 2, "left_out": 0, "bytes_up": 2.0 * traffic}
        rows_sent = [{"round": n, **sent, "bytes_down": traffic * n} for n in range(1, len(rounds) + 1)]
        self.write_table(files.rounds, pa.Table.from_pylist(rows_sent))
        times = {"train": seconds, "epoch": seconds / 4, "aggregate": 0.5, "evaluate": 0.25}
        times_by_round = [{"round": n} | times for n in range(1, len(rounds) + 1)]
        self.write_json(files.times, {"rounds": times_by_round, "made_by": [MADE_BY | made_by]})

    def write_all(self, rounds_by_run: Iterable[Sequence[Mapping[str, Counts]]]) -> None:
        """Write the files of all runs."""
        for run, rounds in zip(range(len(self.runs)), rounds_by_run, strict=True):
            self.write(run, rounds)

    def merged_files(self, run: int) -> MergedRoundFiles:
        """Return the paths of the merged files of a run."""
        return self.runs[run].merged_files

    @staticmethod
    def write_json(path: Path, value: Any) -> None:
        """Write a JSON file and add its hash to ``joined.json`` in the same folder."""
        record = path.with_name("joined.json")
        hashes = storage_files.read_json(record) | {path.name: storage_files.write_json(path, value)}
        storage_files.write_json(record, hashes)

    @staticmethod
    def write_table(path: Path, table: pa.Table, manifest: str = "joined.json") -> None:
        """Write a table and add its hash to a manifest in the same folder."""
        record = path.with_name(manifest)
        first_fields = {"rounds": ROUNDS} if manifest == "joined.json" else {}
        hashes = storage_files.read_json(record) if record.exists() else first_fields
        storage_files.write_json(record, hashes | {path.name: storage_files.write_parquet(path, table)})

    def write_matrices(self, run: int, measured: Mapping[str, float] | None) -> None:
        """Write 2 x 2 matrices of rounds 1 to 3. All entries are the value times the round."""
        rows = [
            {"round": n, "source": source, "client": -1, "matrix": name, "class": c, "0": n * value, "1": n * value}
            for source, values in (("measured", measured), ("exchanged", {"SL": 9.0, "CR": 9.0}))
            for n, (name, value), c in itertools.product((1, 2, 3), (values or {}).items(), (0, 1))
        ]
        table = pa.Table.from_pylist(rows) if measured is not None else pa.table({})
        self.write_table(self.merged_files(run).matrices, table)


def rounds(server: Sequence[int], clients: Sequence[Counts]) -> list[dict[str, Counts]]:
    """Return the counts of each round: the server's correct answers of 10, and those of the clients."""
    return [
        {"global-on-global": [(right, 10)], "personal-on-local": local}
        for right, local in zip(server, clients, strict=True)
    ]


def read_markdown_rows(text: str, start: str = "") -> list[list[str]]:
    """Return the cells of the rows of Markdown tables whose first cell begins with a text, heads included."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def select_rows(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Select the rows of a frame with these values."""
    return frame[(frame[[*values]] == [*values.values()]).all(axis=1)]


@pytest.fixture
def make(in_empty_folder: Path) -> Callable[..., Tree]:
    """Return a function that makes a study in a new working directory."""
    return Tree


@pytest.fixture
def two(make: Callable[..., Tree]) -> Tree:
    """FedAvg and an algorithm without a global model, with two seeds and three rounds."""
    tree = make(["fedavg", "local"])
    uneven = [(1, 2), (4, 8), (0, 0)]  # the third client has no test samples
    tree.write(0, rounds([2, 8, 6], [[(1, 2), (2, 8), (0, 0)], [(2, 2), (4, 8), (0, 0)], uneven]))
    tree.write(1, rounds([3, 4, 8], [uneven, uneven, [(2, 2), (4, 8), (0, 0)]]), traffic=200, seconds=3.0)
    for run, right in ((2, 1), (3, 2)):
        tree.write(run, [{"personal-on-local": [(right, 2), (right, 4)]}] * 3)
    return tree
