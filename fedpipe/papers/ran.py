"""What of a paper's study has been run at a scale: cells by row and column of a table, and why others are missing."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pandas as pd
import yaml

from fedpipe import artifacts, config
from fedpipe import plan as planning
from fedpipe.artifacts import PAPERS, StudyFiles
from fedpipe.data import store
from fedpipe.errors import ArtifactError
from fedpipe.planned import Cell, Plan, PlannedProbe, PlannedRun
from fedpipe.report import forecast, results, status

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TOLD = 160  #: letters of a failed job's last line that a reason quotes
GENERATED = "generated"  #: the name of the data set that stands in for one that is not here
LEFT_OUT = {"code", "sha256", "origin", "seed"}  #: parts of settings that a reader of a cell has no use for


class Study:
    """A study at a scale, as far as it has been run.

    Parameters
    ----------
    plan
        Its plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.runs = {(run.algorithm, run.key): run for run in plan.runs}
        self.done = tuple(cell for cell in results.cells(plan) if cell.joined.marker.is_file())

    @classmethod
    def find(cls, stem: str, name: str, scale: str) -> Study | None:
        """The study of a paper (``stem``), as ``table1``; None where it was never planned at this scale."""
        place = StudyFiles.of(PAPERS / stem / f"{name}.yaml", scale).plan
        return cls(Plan.read(place)) if place.is_file() else None

    # -- places ------------------------------------------------------------------------------------------------------

    @cached_property
    def axes(self) -> list[str]:
        """The names of the grid of which a column of the paper's table has a value each, in the study's order."""
        raw, _ = config.at_scale(config.read(self.plan.params), self.plan.scale)
        names = [name for name in raw["study"].get("grid", {}) if not name.startswith("algorithms.")]
        return [name for name in names if name not in self.plan.report.best_over]

    def column(self, cell: Cell) -> str:
        """The column of a cell: its values, with a slash between, as `published` has them."""
        return "/".join(_text(cell.grid[name]) for name in self.axes if name in cell.grid)

    def cells(self, method: str, column: str) -> list[Cell]:
        """The cells of a method in a column, whether they have been run or not."""
        return [cell for cell in self.plan.cells if (cell.algorithm, self.column(cell)) == (method, column)]

    def protocol(self, method: str) -> str:
        """The protocol by which a method is shown."""
        return self.plan.shown.get(method, self.plan.protocols[0])

    @cached_property
    def changes(self) -> str:
        """What its scale sets, in words; of a mapping only the names."""
        if self.plan.scale == artifacts.PAPER:
            return ""
        told = []
        for key, value in config.read(self.plan.params)["scales"][self.plan.scale].items():
            names = value.get("name", ", ".join(value)) if isinstance(value, dict) else value
            listed = ", ".join(map(str, names)) if isinstance(names, list) else names
            told.append(f"{key} {listed}")
        return "; ".join(told)

    # -- numbers -----------------------------------------------------------------------------------------------------

    @cached_property
    def accuracies(self) -> pd.DataFrame:
        """Accuracies of the runs that are done, in the average that is reported; see `fedpipe.report.results.load`."""
        frame = results.load(self._finished)
        return frame[frame["average"] == self.plan.report.average]

    @cached_property
    def reported(self) -> dict[tuple[str, str, str], float]:
        """In percent, by method, run's key with its number of rounds, and protocol: what stands in the table."""
        report = self.plan.report
        by_point = {(cell.algorithm, cell.seed, *results.point(self.plan, cell).values()): cell for cell in self.done}
        frame = results.reported(self.accuracies, report.round, report.last_k)
        found = {}
        for row in frame.to_dict("records"):
            cell = by_point[row["algorithm"], row["seed"], *(row[name] for name in self.plan.grid)]
            found[cell.algorithm, _at(cell), str(row["protocol"])] = 100 * float(row["accuracy"])
        return found

    @cached_property
    def diverged(self) -> set[str]:
        """The keys of runs in which some round had no finite update."""
        frame = results.left_out(self._finished)
        return set(frame[frame["diverged"] > 0]["key"])

    def accuracy(self, cell: Cell) -> float | None:
        """What stands in the table for a cell, by its method's protocol; None where the method has no such model."""
        return self.reported.get((cell.algorithm, _at(cell), self.protocol(cell.algorithm)))

    def merit(self, cell: Cell) -> float:
        """By what the best value of a grid is chosen: a cell's accuracy on test or validation samples."""
        protocol = self.protocol(cell.algorithm)
        chosen = config.validating(protocol) if self.plan.report.best_on == "validation" else protocol
        return self.reported.get((cell.algorithm, _at(cell), chosen), -math.inf)

    def metrics(self, cell: Cell) -> pd.DataFrame:
        """All that was measured of a run, by round, client and protocol."""
        return _joined(cell.joined.metrics)

    def traffic(self, cell: Cell) -> pd.Series[float]:
        """Bytes that a participant receives and sends in the last round, when nobody is new any more."""
        return cast("pd.Series[float]", _joined(cell.joined.rounds)[["bytes_down", "bytes_up"]].iloc[-1])

    def tests(self, cell: Cell) -> int:
        """Number of test samples of the last round's accuracy, each once: clients have their own, or all the same."""
        frame, protocol = self.metrics(cell), self.protocol(cell.algorithm)
        frame = frame[frame["protocol"] == protocol]
        by_client = frame[frame["round"] == frame["round"].max()]["total"]
        return int(by_client.max() if protocol.endswith("-on-global") else by_client.sum())

    def seconds(self, cell: Cell) -> pd.DataFrame:
        """Seconds by round."""
        return pd.DataFrame(results.seconds(cell)["rounds"])

    def hours(self, cell: Cell) -> float:
        """Hours that a run took."""
        return float(self.seconds(cell)[list(results.SECONDS)].sum().sum()) / 3600

    def settings(self, cell: Cell) -> dict[str, Any]:
        """All settings of a run, as its ``run.yaml`` holds them."""
        return _settings(cell.files.settings)

    def classes(self, cell: Cell) -> int:
        """Number of classes of a run's data."""
        return store.facts(artifacts.dataset_file(self.runs[cell.algorithm, cell.key].dataset)).classes

    def is_generated(self, cell: Cell) -> bool:
        """Whether a run's data are noise in the shape of those that the study names."""
        return bool(self.settings(cell)["dataset"]["name"] == GENERATED)

    def differing(self, cell: Cell) -> dict[str, Any]:
        """Settings of a run that not all runs of the study have, with its data set and model."""
        always = {"dataset.name", "dataset.subset", "model.name"}
        mine = {name: value for name, value in _flat(self.settings(cell)).items() if name in always | self._varied}
        return mine | {"federation.rounds": cell.rounds}

    @cached_property
    def _varied(self) -> set[str]:
        """The settings in which the runs that are done differ."""
        found: list[set[Any]] = [set(_flat(self.settings(cell)).items()) for cell in self.done]
        return {name for name, _ in set.union(*found) - set.intersection(*found)} if found else set()

    def probes(self, name: str, cell: Cell) -> list[tuple[PlannedProbe, pd.DataFrame]]:
        """What a probe of the study found in a run, where it is there."""
        found = []
        for probe in self.plan.probes:
            mine = (probe.algorithm, probe.run_key, probe.rounds) == (cell.algorithm, cell.key, cell.rounds)
            if probe.kind == name and mine and probe.files.marker.is_file():
                table = artifacts.read_parquet(probe.files.table, artifacts.manifest(probe.files.table))
                found.append((probe, artifacts.frame(table)))
        return found

    # -- what is missing ---------------------------------------------------------------------------------------------

    def missing(self, method: str, column: str) -> str:
        """Why there is no number of a method in a column."""
        cells = self.cells(method, column)
        if not cells:
            return f"not part of scale {self.plan.scale}"
        runs = [self.runs[cell.algorithm, cell.key] for cell in cells]
        lacking = [self.absent[str(run.path)] for run in runs if str(run.path) in self.absent]
        if lacking:
            return lacking[0]
        left = [run for cell, run in zip(cells, runs, strict=True) if not cell.joined.marker.is_file()]
        if not left:
            return "no such model"
        return next(filter(None, map(self._failure, left)), "not run")

    def left(self, method: str, column: str) -> list[Cell]:
        """The cells of a method in a column that have not been run."""
        return [cell for cell in self.cells(method, column) if not cell.joined.marker.is_file()]

    def hours_of(self, cells: Sequence[Cell]) -> float:
        """About the hours that cells would take on this machine; NaN where none can tell."""
        return sum(cell.rounds * self._hours_a_round.get(cell.key, math.nan) for cell in cells)

    @cached_property
    def _hours_a_round(self) -> dict[str, float]:
        return forecast.hours_a_round(planning.make(self.plan.params, self.plan.scale))

    @cached_property
    def absent(self) -> dict[str, str]:
        """By path, runs that nothing here can make, with what is missing."""
        place = self.plan.study.absent
        return artifacts.read_json(place) if place.is_file() else {}

    @cached_property
    def _failures(self) -> list[status.Failure]:
        return status.progress(self.plan)[1]

    def _failure(self, run: PlannedRun) -> str:
        """What the job said that failed, of a run or of what it is made of."""
        for failure in self._failures:
            if any(part in failure.log.name for part in (run.key, run.partition, run.dataset)):
                last = failure.lines[-1].strip() if failure.lines else "its log is empty"
                return f"{failure.rule} failed: {last[:TOLD]}"
        return ""

    @cached_property
    def _finished(self) -> Plan:
        runs = tuple(run for run in self.plan.runs if any(run.serves(cell) for cell in self.done))
        return dataclasses.replace(self.plan, cells=self.done, runs=runs)


def _at(cell: Cell) -> str:
    return f"{cell.key}:{cell.rounds}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value}"


@functools.lru_cache(maxsize=2048)
def _joined(path: Path) -> pd.DataFrame:
    return artifacts.frame(artifacts.read_joined(path))


@functools.lru_cache(maxsize=2048)
def _settings(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = yaml.load(path.read_text(), Loader=_LOADER)
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing; run `fedpipe plan` to write it again.") from None
    return found


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Settings by dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name not in LEFT_OUT:
            found |= _flat(value, f"{above}{name}.")
        elif name not in LEFT_OUT:
            found[f"{above}{name}"] = value if isinstance(value, str | int | float) else str(value)
    return found
