"""What a study's ``plan.json`` holds: its runs, the cells of its tables, and what jobs and figures are told.

All that a study's commands and its Snakefile know of it is read from there. Every node that parses the Snakefile does
so: nothing here imports torch or pydantic.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage.files import read_json, write_json
from fedpipe.core.storage.layout import MergedFiles, ProbeFiles, RunFiles, StudyFiles
from fedpipe.settings.choices import Average, ReportedRound, Statistic

LABEL_PATTERN = r"[a-z][a-z0-9_]*"  #: of an algorithm
PROBE_KIND_PATTERN = r"[a-z][a-z-]*"  #: of a probe
KEY_PATTERN = r"[0-9a-f]{12}"  #: of a run or partition
DATASET_PATTERN = r"[A-Za-z0-9_.]+-[0-9a-f]{12}"
#: What a partition's name tells only where it differs, with what stands before its value; the seed it always tells.
OPTIONAL_NAME_PARTS = {
    "name": "",
    "subset": "subset",
    "split": "",
    "minimum": "minimum",
    "clients": "clients",
    "seed": "seed",
}


@dataclass(frozen=True, kw_only=True)
class _RunRounds:
    """The first so many rounds of a run."""

    algorithm: str  #: its label in the study
    seed: int
    key: str  #: the run's
    rounds: int

    @cached_property
    def files(self) -> RunFiles:
        """The run's files."""
        return RunFiles.from_key(self.algorithm, self.key)

    @property
    def merged_files(self) -> MergedFiles:
        """The files that join these rounds."""
        return self.files.merged_files(self.rounds)


@dataclass(frozen=True, kw_only=True)
class PlannedRun(_RunRounds):
    """A run of the study, which stands in its plan once, however many cells it serves."""

    partition: str  #: the key of its partition
    dataset: str  #: its stored data set, as ``digits-0123456789ab``
    participants: int  #: clients in a round, m

    @cached_property
    def path(self) -> Path:
        """Its folder."""
        return self.files.path

    def has_cell(self, cell: Cell) -> bool:
        """Whether a cell's number is of this run."""
        return (self.algorithm, self.key) == (cell.algorithm, cell.key)

    def to_dict(self) -> dict[str, Any]:
        """As ``plan.json`` holds it."""
        return _fields_to_dict(self) | {"path": str(self.path)}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> PlannedRun:
        """The run that ``plan.json`` holds so; see :meth:`Plan.of`."""
        run = cls(**_read_fields(cls, raw))
        _require_match(LABEL_PATTERN, [run.algorithm])
        _require_match(KEY_PATTERN, [run.key, run.partition])
        _require_match(DATASET_PATTERN, [run.dataset])
        _require_ints([run.seed, run.rounds, run.participants])
        if raw["path"] != str(run.path):
            raise ValueError(raw["path"])
        return run


@dataclass(frozen=True, kw_only=True)
class Cell(_RunRounds):
    """What tables and figures show: so many rounds of a run, at a point of the grid."""

    grid: dict[str, Any]  #: its point, where that concerns the algorithm
    own: dict[str, Any] = field(default_factory=dict)  #: the settings that the method has alone, by key (`with`)

    def to_dict(self) -> dict[str, Any]:
        """As ``plan.json`` holds it."""
        return {
            name: value for name, value in _fields_to_dict(self).items() if name != "own" or value
        }  # else as it was before

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Cell:
        """The cell that ``plan.json`` holds so; see :meth:`Plan.of`."""
        cell = cls(**_read_fields(cls, raw))
        _require_match(LABEL_PATTERN, [cell.algorithm])
        _require_match(KEY_PATTERN, [cell.key])
        _require_ints([cell.seed, cell.rounds])
        return cell


@dataclass(frozen=True, kw_only=True)
class PlannedProbe:
    """What the study looks at in the states after a round of a run."""

    name: str  #: of its entry in `probes`
    kind: str
    algorithm: str  #: the label and
    run_key: str  #: the key of the run
    rounds: int  #: of the run, in this study
    round: int
    key: str  #: a hash of its settings, of the run's key and of the probe's code

    @property
    def run(self) -> RunFiles:
        """The run's files."""
        return RunFiles.from_key(self.algorithm, self.run_key)

    @property
    def files(self) -> ProbeFiles:
        """Its own files."""
        return ProbeFiles.from_key(self.algorithm, self.run_key, self.round, self.kind, self.key)

    def to_dict(self) -> dict[str, Any]:
        """As ``plan.json`` holds it."""
        return _fields_to_dict(self) | {"path": str(self.files.table)}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> PlannedProbe:
        """The probe that ``plan.json`` holds so; see :meth:`Plan.of`."""
        probe = cls(**_read_fields(cls, raw))
        _require_match(LABEL_PATTERN, [probe.name, probe.algorithm])
        _require_match(PROBE_KIND_PATTERN, [probe.kind])
        _require_match(KEY_PATTERN, [probe.run_key, probe.key])
        _require_ints([probe.rounds, probe.round])
        if raw["path"] != str(probe.files.table):
            raise ValueError(raw["path"])
        return probe


@dataclass(frozen=True, kw_only=True)
class ExecutionSettings:
    """How jobs are cut and where they run: section `execution`."""

    rounds_per_job: int | None
    clients_per_job: int | None
    device: str
    stack: int | str
    graphs: bool
    callbacks: tuple[str, ...] = ()  #: what looks on


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What the tables show: section `report`."""

    round: ReportedRound
    last_k: int
    average: Average
    best_over: tuple[str, ...] = ()
    best_on: str = "test"  #: test or validation
    statistics: tuple[Statistic, ...] = ()
    target: float | None = None
    baseline: str | None = None  #: the label of a method

    def to_dict(self) -> dict[str, Any]:
        """As ``plan.json`` holds it."""
        return _fields_to_dict(self) | {"best_over": list(self.best_over), "statistics": list(self.statistics)}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ReportSettings:
        """What ``plan.json`` holds so."""
        texts: dict[str, Any] = {name: _to_texts(raw.get(name, [])) for name in ("best_over", "statistics")}
        return cls(**_read_fields(cls, raw) | texts)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study's plan."""

    params: Path  #: the study's file
    scale: str  #: which of its scales
    algorithms: tuple[str, ...]  #: labels, in the order of the study
    seeds: tuple[int, ...]
    grid: dict[str, list[Any]]  #: names and values
    protocols: tuple[str, ...]
    shown: dict[str, str]  #: by label the protocol of a method that tables show by another than the first
    partitions: dict[str, dict[str, Any]]  #: by key, all that each depends on
    runs: tuple[PlannedRun, ...]
    cells: tuple[Cell, ...]
    warnings: tuple[str, ...]
    files: tuple[str, ...]  #: what is written with the plan, for jobs to read, by name
    shared: str  #: the digest of the code that all runs share
    execution: ExecutionSettings
    keep_models: str | int  #: see `artifacts.keep_models`
    report: ReportSettings
    probes: tuple[PlannedProbe, ...] = ()
    titles: dict[str, str] = field(default_factory=dict)  #: by label what tables and figures call a method, if not that

    def title(self, label: str) -> str:
        """What tables and figures call a method."""
        return self.titles.get(label, label)

    @property
    def study_files(self) -> StudyFiles:
        """Where the study's own files lie."""
        return StudyFiles.from_params(self.params, self.scale)

    @property
    def run_lines(self) -> list[str]:
        """A line a run: method, seed, the points of the grid that it serves, key."""
        points: dict[tuple[str, str], list[str]] = {}
        for cell in self.cells:
            point = ", ".join(f"{name}={value}" for name, value in cell.grid.items())
            points.setdefault((cell.algorithm, cell.key), []).append(point)
        points_by_run = {run: "; ".join(points[run.algorithm, run.key]) for run in self.runs}
        return [
            f"{run.algorithm:<16} seed {run.seed}  {f'{points_by_run[run]}  ' if points_by_run[run] else ''}{run.key}"
            for run in self.runs
        ]

    @cached_property
    def partition_names(self) -> dict[str, str]:
        """By key, what files that show a partition are called, as ``dirichlet-0.2-seed0``.

        A name tells scheme, its parameters and seed, and what else differs between the study's partitions; and the key,
        where that is not enough.
        """
        parts_by_key = {key: _partition_name_parts(settings) for key, settings in self.partitions.items()}
        varied_names = {
            name
            for name in {name for parts in parts_by_key.values() for name in parts if name in OPTIONAL_NAME_PARTS}
            if len({str(parts.get(name)) for parts in parts_by_key.values()}) > 1
        }
        names = {
            key: "-".join(
                re.sub(r"[^A-Za-z0-9.]+", "_", f"{OPTIONAL_NAME_PARTS.get(name, '')}{value}")
                for name, value in parts.items()
                if name not in OPTIONAL_NAME_PARTS or name in varied_names or name == "seed"
            )
            for key, parts in parts_by_key.items()
        }
        count = Counter(names.values())
        return {key: name if count[name] == 1 else f"{name}-{key}" for key, name in names.items()}

    def describe_partition(self, key: str) -> dict[str, str]:
        """What a partition is, by name, for Snakemake's report: data set, scheme with its parameters, clients, seed."""
        told = _partition_name_parts(self.partitions[key])
        return {{"name": "data set"}.get(name, name): widen_tags(str(value)) for name, value in told.items()}

    @cached_property
    def merged_files(self) -> tuple[MergedFiles, ...]:
        """What its tables are made of, each once: so many rounds of a run."""
        return tuple(dict.fromkeys(cell.merged_files for cell in self.cells))

    @cached_property
    def round_counts(self) -> dict[Path, tuple[int, ...]]:
        """By run the numbers of rounds that cells show, ascending: several, where the grid varies nothing else."""
        counts: dict[Path, set[int]] = {}
        for cell in self.cells:
            counts.setdefault(cell.files.path, set()).add(cell.rounds)
        return {path: tuple(sorted(lengths)) for path, lengths in counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """As ``plan.json`` holds it."""
        return {
            "params": str(self.params),
            "scale": self.scale,
            "algorithms": list(self.algorithms),
            "seeds": list(self.seeds),
            "grid": self.grid,
            "protocols": list(self.protocols),
            "shown": self.shown,
            "partitions": self.partitions,
            "runs": [run.to_dict() for run in self.runs],
            "cells": [cell.to_dict() for cell in self.cells],
            "warnings": list(self.warnings),
            "files": list(self.files),
            "shared": self.shared,
            "execution": _fields_to_dict(self.execution),
            "artifacts": {"keep_models": self.keep_models},
            "report": self.report.to_dict(),
            "probes": [probe.to_dict() for probe in self.probes],
            **({"titles": self.titles} if self.titles else {}),  # else a plan is as it was before
        }

    def write(self) -> None:
        """Write ``plan.json``."""
        write_json(self.study_files.plan, self.to_dict())

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan in a ``plan.json``, all of whose names are such as a plan gives: none leads out of the folder.

        Raises
        ------
        ArtifactError
            It is missing, damaged, or of another study.
        """
        content = read_json(path)
        try:
            plan = cls.from_dict(content)
            is_valid = plan.study_files.plan.resolve() == path.resolve()
        except (LookupError, TypeError, ValueError, AttributeError):
            is_valid = False
        if not is_valid:
            raise ArtifactError(f"{path} is not the plan of the study that belongs there; delete it and run again.")
        return plan

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Plan:
        """The plan that a ``plan.json`` holds so.

        Raises
        ------
        LookupError, TypeError, ValueError, AttributeError
            Something is missing, of another type than a plan gives it, or leads elsewhere.
        """
        plan = cls(
            params=Path(raw["params"]),
            scale=raw["scale"],
            algorithms=_to_texts(raw["algorithms"]),
            seeds=tuple(raw["seeds"]),
            grid={name: list(values) for name, values in raw["grid"].items()},
            protocols=_to_texts(raw["protocols"]),
            shown=dict(raw["shown"]),
            partitions={key: dict(settings) for key, settings in raw["partitions"].items()},
            runs=tuple(map(PlannedRun.from_dict, raw["runs"])),
            cells=tuple(map(Cell.from_dict, raw["cells"])),
            warnings=_to_texts(raw["warnings"]),
            files=_to_texts(raw["files"]),
            shared=raw["shared"],
            execution=_parse_execution(raw["execution"]),
            keep_models=raw["artifacts"]["keep_models"],
            report=ReportSettings.from_dict(raw["report"]),
            probes=tuple(map(PlannedProbe.from_dict, raw["probes"])),
            titles=dict(raw.get("titles", {})),
        )
        _require_match(LABEL_PATTERN, [plan.scale, *plan.algorithms])
        _require_match(KEY_PATTERN, [*plan.partitions, plan.shared])
        _require_ints([*plan.seeds, plan.report.last_k])
        run_keys = {(run.algorithm, run.key) for run in plan.runs}
        is_consistent = run_keys >= {(cell.algorithm, cell.key) for cell in plan.cells}
        is_consistent &= run_keys >= {(probe.algorithm, probe.run_key) for probe in plan.probes}
        is_consistent &= {run.algorithm for run in plan.runs} == set(plan.algorithms)
        is_consistent &= {run.partition for run in plan.runs} == set(plan.partitions)
        is_consistent &= all(run.rounds == max(plan.round_counts.get(run.path, (0,))) for run in plan.runs)
        is_consistent &= all(cell.grid.keys() <= plan.grid.keys() for cell in plan.cells) and bool(plan.protocols)
        is_consistent &= all(type(cell.own) is dict for cell in plan.cells)
        is_consistent &= plan.shown.keys() <= set(plan.algorithms) and set(plan.shown.values()) <= set(plan.protocols)
        is_consistent &= plan.titles.keys() <= set(plan.algorithms) and all(
            type(name) is str for name in plan.titles.values()
        )
        is_consistent &= set(plan.report.best_over) <= plan.grid.keys()
        is_consistent &= set(plan.report.statistics) <= set(get_args(Statistic))
        is_consistent &= plan.report.target is None or 0 < plan.report.target <= 1
        is_consistent &= plan.report.baseline in (None, *plan.algorithms)
        is_consistent &= plan.report.round in get_args(ReportedRound) and plan.report.average in get_args(Average)
        is_consistent &= _is_keep_models(plan.keep_models) and _is_execution(plan.execution)
        if not is_consistent:
            raise ValueError(raw["params"])
        return plan


def widen_tags(text: str) -> str:
    """Text for a script in a page of Snakemake or DVC, neither of which escapes it: the ``<`` of a tag is a wide one.

    Examples
    --------
    >>> widen_tags("a < b</script>")
    'a < b＜/script>'
    """
    return re.sub(r"<(?=[A-Za-z/!?])", "＜", text)


def _partition_name_parts(settings: dict[str, Any]) -> dict[str, Any]:
    """What tells a partition from others, by name."""
    dataset, scheme = settings["dataset"], settings["partition"]
    parts = {name: dataset[name] for name in ("name", "subset", "split") if name in dataset}
    parts |= {"scheme": scheme["scheme"]}
    parts |= {
        name: value
        for name, value in sorted(scheme.items())
        if name not in {"scheme", "code", "sha256", *OPTIONAL_NAME_PARTS}
    }
    parts |= {"sha256": scheme["sha256"][:6]} if "sha256" in scheme else {}
    parts |= {"minimum": scheme["minimum"]} if "minimum" in scheme else {}
    return parts | {"clients": settings["clients"]} | ({"seed": settings["seed"]} if "seed" in settings else {})


def _parse_execution(raw: dict[str, Any]) -> ExecutionSettings:
    """The jobs that ``plan.json`` holds so."""
    return ExecutionSettings(
        **_read_fields(ExecutionSettings, raw) | {"callbacks": _to_texts(raw.get("callbacks", []))}
    )


def _fields_to_dict(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _read_fields(dataclass_type: type, raw: dict[str, Any]) -> dict[str, Any]:
    """A kind's fields as they are held; those with a default may be missing, as in a plan of before there were such."""
    fields = dataclasses.fields(dataclass_type)
    return {field.name: raw[field.name] for field in fields if field.name in raw or not _has_default(field)}


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)


def _to_texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(values)
    return tuple(values)


def _require_match(pattern: str, names: Iterable[Any]) -> None:
    """Refuse names that are not such as a plan gives; what is no text at all is a TypeError."""
    for name in names:
        if not re.fullmatch(pattern, name):
            raise ValueError(name)


def _require_ints(values: Iterable[Any]) -> None:
    for value in values:
        if type(value) is not int:
            raise TypeError(value)


def _is_keep_models(value: Any) -> bool:
    return value in ("all", "last") or _is_count(value)


def _is_execution(jobs: ExecutionSettings) -> bool:
    is_valid = _is_count(jobs.stack) or jobs.stack == "auto"
    is_valid &= all(count is None or _is_count(count) for count in (jobs.rounds_per_job, jobs.clients_per_job))
    is_valid &= type(jobs.graphs) is bool
    return is_valid and jobs.device in ("auto", "cpu", "cuda")


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
