"""What a study's ``plan.json`` holds: its runs, the cells of its tables, and what jobs and figures are told.

All that a study's commands and its Snakefile know of it is read from there. Every node that parses the Snakefile does
so: nothing here imports torch or pydantic.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from fedpipe import artifacts
from fedpipe.artifacts import RESULTS, JoinedFiles, ProbeFiles, RunFiles, StudyFiles
from fedpipe.errors import ArtifactError, SettingsError

ReportedRound = Literal["last", "best", "mean-last"]
Average = Literal["sample", "client"]
Statistic = Literal[
    "client_std",
    "worst_tenth",
    "lowest",
    "macro_f1",
    "balanced_accuracy",
    "rounds_to_target",
    "bytes_to_target",
    "difference",
]

#: In the environment of what `fedpipe run` starts on this machine: how many runs go on at once. While some are missing,
#: a plan is made anew, and refused if they would take more than a day.
AT_ONCE = "FEDPIPE_AT_ONCE"

LABEL = r"[a-z][a-z0-9_]*"  #: of an algorithm
KIND = r"[a-z][a-z-]*"  #: of a probe
KEY = r"[0-9a-f]{12}"  #: of a run or partition
DATASET = r"[A-Za-z0-9_.]+-[0-9a-f]{12}"


@dataclass(frozen=True, kw_only=True)
class _Rounds:
    """The first so many rounds of a run."""

    algorithm: str  #: its label in the study
    seed: int
    key: str  #: the run's
    rounds: int

    @cached_property
    def files(self) -> RunFiles:
        """The run's files."""
        return RunFiles.of(self.algorithm, self.key)

    @property
    def joined(self) -> JoinedFiles:
        """The files that join these rounds."""
        return self.files.joined(self.rounds)


@dataclass(frozen=True, kw_only=True)
class PlannedRun(_Rounds):
    """A run of the study, which stands in its plan once, however many cells it serves."""

    partition: str  #: the key of its partition
    dataset: str  #: its stored data set, as ``digits-0123456789ab``
    participants: int  #: clients in a round, m

    @cached_property
    def path(self) -> Path:
        """Its folder."""
        return self.files.path

    def serves(self, cell: Cell) -> bool:
        """Whether a cell's number is of this run."""
        return (self.algorithm, self.key) == (cell.algorithm, cell.key)

    def held(self) -> dict[str, Any]:
        """As ``plan.json`` holds it."""
        return _held(self) | {"path": str(self.path)}

    @classmethod
    def of(cls, held: dict[str, Any]) -> PlannedRun:
        """The run that ``plan.json`` holds so; see :meth:`Plan.of`."""
        run = cls(**_fields(cls, held))
        _refuse_others(LABEL, [run.algorithm])
        _refuse_others(KEY, [run.key, run.partition])
        _refuse_others(DATASET, [run.dataset])
        _refuse_no_numbers([run.seed, run.rounds, run.participants])
        if held["path"] != str(run.path):
            raise ValueError(held["path"])
        return run


@dataclass(frozen=True, kw_only=True)
class Cell(_Rounds):
    """What tables and figures show: so many rounds of a run, at a point of the grid."""

    grid: dict[str, Any]  #: its point, where that concerns the algorithm
    own: dict[str, Any] = field(default_factory=dict)  #: the settings that the method has alone, by key (`with`)

    def held(self) -> dict[str, Any]:
        """As ``plan.json`` holds it."""
        return {name: value for name, value in _held(self).items() if name != "own" or value}  # else as it was before

    @classmethod
    def of(cls, held: dict[str, Any]) -> Cell:
        """The cell that ``plan.json`` holds so; see :meth:`Plan.of`."""
        cell = cls(**_fields(cls, held))
        _refuse_others(LABEL, [cell.algorithm])
        _refuse_others(KEY, [cell.key])
        _refuse_no_numbers([cell.seed, cell.rounds])
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
        return RunFiles.of(self.algorithm, self.run_key)

    @property
    def files(self) -> ProbeFiles:
        """Its own files."""
        return ProbeFiles.of(self.algorithm, self.run_key, self.round, self.kind, self.key)

    def held(self) -> dict[str, Any]:
        """As ``plan.json`` holds it."""
        return _held(self) | {"path": str(self.files.table)}

    @classmethod
    def of(cls, held: dict[str, Any]) -> PlannedProbe:
        """The probe that ``plan.json`` holds so; see :meth:`Plan.of`."""
        probe = cls(**_fields(cls, held))
        _refuse_others(LABEL, [probe.name, probe.algorithm])
        _refuse_others(KIND, [probe.kind])
        _refuse_others(KEY, [probe.run_key, probe.key])
        _refuse_no_numbers([probe.rounds, probe.round])
        if held["path"] != str(probe.files.table):
            raise ValueError(held["path"])
        return probe


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """How jobs are cut and where they run: section `execution`."""

    rounds_per_job: int | None
    clients_per_job: int | None
    device: str
    stack: int | str
    graphs: bool
    callbacks: tuple[str, ...] = ()  #: what looks on


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What the tables show: section `report`."""

    round: ReportedRound
    last_k: int
    average: Average
    best_over: tuple[str, ...] = ()
    best_on: str = "test"  #: test or validation
    statistics: tuple[Statistic, ...] = ()
    target: float | None = None
    baseline: str | None = None  #: the label of a method

    def held(self) -> dict[str, Any]:
        """As ``plan.json`` holds it."""
        return _held(self) | {"best_over": list(self.best_over), "statistics": list(self.statistics)}

    @classmethod
    def of(cls, held: dict[str, Any]) -> Reported:
        """What ``plan.json`` holds so."""
        texts: dict[str, Any] = {name: _texts(held.get(name, [])) for name in ("best_over", "statistics")}
        return cls(**_fields(cls, held) | texts)


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
    execution: Jobs
    keep_models: str | int  #: see `artifacts.keep_models`
    report: Reported
    probes: tuple[PlannedProbe, ...] = ()
    titles: dict[str, str] = field(default_factory=dict)  #: by label what tables and figures call a method, if not that

    def title(self, label: str) -> str:
        """What tables and figures call a method."""
        return self.titles.get(label, label)

    @property
    def study(self) -> StudyFiles:
        """Where the study's own files lie."""
        return StudyFiles.of(self.params, self.scale)

    @property
    def listed(self) -> list[str]:
        """A line a run: method, seed, the points of the grid that it serves, key."""
        points: dict[tuple[str, str], list[str]] = {}
        for cell in self.cells:
            point = ", ".join(f"{name}={value}" for name, value in cell.grid.items())
            points.setdefault((cell.algorithm, cell.key), []).append(point)
        told = {run: "; ".join(points[run.algorithm, run.key]) for run in self.runs}
        return [
            f"{run.algorithm:<16} seed {run.seed}  {f'{told[run]}  ' if told[run] else ''}{run.key}"
            for run in self.runs
        ]

    @cached_property
    def partition_names(self) -> dict[str, str]:
        """By key, what files that show a partition are called, as ``dirichlet-0.2-seed0``.

        A name tells scheme, its parameters and seed, and what else differs between the study's partitions; and the key,
        where that is not enough.
        """
        told = {key: _dealt(settings) for key, settings in self.partitions.items()}
        varied = {
            name
            for name in {name for parts in told.values() for name in parts if name in OTHERS}
            if len({str(parts.get(name)) for parts in told.values()}) > 1
        }
        names = {
            key: "-".join(
                re.sub(r"[^A-Za-z0-9.]+", "_", f"{OTHERS.get(name, '')}{value}")
                for name, value in parts.items()
                if name not in OTHERS or name in varied or name == "seed"
            )
            for key, parts in told.items()
        }
        count = Counter(names.values())
        return {key: name if count[name] == 1 else f"{name}-{key}" for key, name in names.items()}

    def partition_told(self, key: str) -> dict[str, str]:
        """What a partition is, by name, for Snakemake's report: data set, scheme with its parameters, clients, seed."""
        told = _dealt(self.partitions[key])
        return {{"name": "data set"}.get(name, name): widen_tags(str(value)) for name, value in told.items()}

    @cached_property
    def joined(self) -> tuple[JoinedFiles, ...]:
        """What its tables are made of, each once: so many rounds of a run."""
        return tuple(dict.fromkeys(cell.joined for cell in self.cells))

    @cached_property
    def lengths(self) -> dict[Path, tuple[int, ...]]:
        """By run the numbers of rounds that cells show, ascending: several, where the grid varies nothing else."""
        found: dict[Path, set[int]] = {}
        for cell in self.cells:
            found.setdefault(cell.files.path, set()).add(cell.rounds)
        return {path: tuple(sorted(lengths)) for path, lengths in found.items()}

    def held(self) -> dict[str, Any]:
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
            "runs": [run.held() for run in self.runs],
            "cells": [cell.held() for cell in self.cells],
            "warnings": list(self.warnings),
            "files": list(self.files),
            "shared": self.shared,
            "execution": _held(self.execution),
            "artifacts": {"keep_models": self.keep_models},
            "report": self.report.held(),
            "probes": [probe.held() for probe in self.probes],
            **({"titles": self.titles} if self.titles else {}),  # else a plan is as it was before
        }

    def write(self) -> None:
        """Write ``plan.json``."""
        artifacts.write_json(self.study.plan, self.held())

    @classmethod
    def read(cls, place: Path) -> Plan:
        """The plan in a ``plan.json``, all of whose names are such as a plan gives: none leads out of the folder.

        Raises
        ------
        ArtifactError
            It is missing, damaged, or of another study.
        """
        found = artifacts.read_json(place)
        try:
            plan = cls.of(found)
            ours = plan.study.plan.resolve() == place.resolve()
        except (LookupError, TypeError, ValueError, AttributeError):
            ours = False
        if not ours:
            raise ArtifactError(f"{place} is not the plan of the study that belongs there; delete it and run again.")
        return plan

    @classmethod
    def of(cls, held: dict[str, Any]) -> Plan:
        """The plan that a ``plan.json`` holds so.

        Raises
        ------
        LookupError, TypeError, ValueError, AttributeError
            Something is missing, of another type than a plan gives it, or leads elsewhere.
        """
        plan = cls(
            params=Path(held["params"]),
            scale=held["scale"],
            algorithms=_texts(held["algorithms"]),
            seeds=tuple(held["seeds"]),
            grid={name: list(values) for name, values in held["grid"].items()},
            protocols=_texts(held["protocols"]),
            shown=dict(held["shown"]),
            partitions={key: dict(settings) for key, settings in held["partitions"].items()},
            runs=tuple(map(PlannedRun.of, held["runs"])),
            cells=tuple(map(Cell.of, held["cells"])),
            warnings=_texts(held["warnings"]),
            files=_texts(held["files"]),
            shared=held["shared"],
            execution=_jobs(held["execution"]),
            keep_models=held["artifacts"]["keep_models"],
            report=Reported.of(held["report"]),
            probes=tuple(map(PlannedProbe.of, held["probes"])),
            titles=dict(held.get("titles", {})),
        )
        _refuse_others(LABEL, [plan.scale, *plan.algorithms])
        _refuse_others(KEY, [*plan.partitions, plan.shared])
        _refuse_no_numbers([*plan.seeds, plan.report.last_k])
        made = {(run.algorithm, run.key) for run in plan.runs}
        whole = made >= {(cell.algorithm, cell.key) for cell in plan.cells}
        whole &= made >= {(probe.algorithm, probe.run_key) for probe in plan.probes}
        whole &= {run.algorithm for run in plan.runs} == set(plan.algorithms)
        whole &= {run.partition for run in plan.runs} == set(plan.partitions)
        whole &= all(run.rounds == max(plan.lengths.get(run.path, (0,))) for run in plan.runs)
        whole &= all(cell.grid.keys() <= plan.grid.keys() for cell in plan.cells) and bool(plan.protocols)
        whole &= all(type(cell.own) is dict for cell in plan.cells)
        whole &= plan.shown.keys() <= set(plan.algorithms) and set(plan.shown.values()) <= set(plan.protocols)
        whole &= plan.titles.keys() <= set(plan.algorithms) and all(type(name) is str for name in plan.titles.values())
        whole &= set(plan.report.best_over) <= plan.grid.keys()
        whole &= set(plan.report.statistics) <= set(get_args(Statistic))
        whole &= plan.report.target is None or 0 < plan.report.target <= 1
        whole &= plan.report.baseline in (None, *plan.algorithms)
        whole &= plan.report.round in get_args(ReportedRound) and plan.report.average in get_args(Average)
        whole &= _is_keep_models(plan.keep_models) and _are_jobs(plan.execution)
        if not whole:
            raise ValueError(held["params"])
        return plan


def widen_tags(text: str) -> str:
    """Text for a script in a page of Snakemake or DVC, neither of which escapes it: the ``<`` of a tag is a wide one.

    Examples
    --------
    >>> widen_tags("a < b</script>")
    'a < b＜/script>'
    """
    return re.sub(r"<(?=[A-Za-z/!?])", "＜", text)


def plans() -> Iterator[tuple[Path, Plan | None]]:
    """The plans of all studies that were planned here, by their places; None for one that can't be read."""
    for place in filter(Path.exists, [RESULTS / "plan.json", *sorted(RESULTS.glob("studies/**/plan.json"))]):
        try:
            yield place, Plan.read(place)
        except ArtifactError:
            yield place, None


#: What a partition's name tells only where it differs, with what stands before its value; the seed it always tells.
OTHERS = {"name": "", "subset": "subset", "split": "", "minimum": "minimum", "clients": "clients", "seed": "seed"}


def _dealt(settings: dict[str, Any]) -> dict[str, Any]:
    """What tells a partition from others, by name."""
    dataset, scheme = settings["dataset"], settings["partition"]
    found = {name: dataset[name] for name in ("name", "subset", "split") if name in dataset}
    found |= {"scheme": scheme["scheme"]}
    found |= {
        name: value for name, value in sorted(scheme.items()) if name not in {"scheme", "code", "sha256", *OTHERS}
    }
    found |= {"sha256": scheme["sha256"][:6]} if "sha256" in scheme else {}
    found |= {"minimum": scheme["minimum"]} if "minimum" in scheme else {}
    return found | {"clients": settings["clients"]} | ({"seed": settings["seed"]} if "seed" in settings else {})


@dataclass(frozen=True)
class Work:
    """What one call of Snakemake makes: a study, or several, whose runs are made once, with the most rounds asked for.

    Parameters
    ----------
    plans
        One of each study.
    absent
        Runs by their paths that are left out with all that is made of them.
    """

    plans: tuple[Plan, ...]
    absent: frozenset[str] = frozenset()

    @cached_property
    def runs(self) -> dict[str, PlannedRun]:
        """All runs by their paths."""
        found: dict[str, PlannedRun] = {}
        for run in (run for plan in self.plans for run in plan.runs if str(run.path) not in self.absent):
            other = found.get(str(run.path), run)
            found[str(run.path)] = run if run.rounds > other.rounds else other
        return found

    @cached_property
    def whole(self) -> tuple[Plan, ...]:
        """The studies that none of their runs is left out of: those that have a table."""
        return tuple(plan for plan in self.plans if all(str(run.path) in self.runs for run in plan.runs))

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """The keys of all partitions."""
        return tuple(dict.fromkeys(run.partition for run in self.runs.values()))

    @cached_property
    def joined(self) -> tuple[JoinedFiles, ...]:
        """What all tables are made of, each once."""
        cells = (cell for plan in self.plans for cell in plan.cells if str(cell.files.path) in self.runs)
        return tuple(dict.fromkeys(cell.joined for cell in cells))

    @cached_property
    def lengths(self) -> dict[str, tuple[int, ...]]:
        """By run the numbers of rounds that cells of any study show, ascending."""
        found: dict[str, set[int]] = {}
        for plan in self.plans:
            for path, lengths in plan.lengths.items():
                found.setdefault(str(path), set()).update(lengths)
        return {path: tuple(sorted(lengths)) for path, lengths in found.items()}

    @cached_property
    def probes(self) -> dict[str, PlannedProbe]:
        """All probes by their tables."""
        probes = (probe for plan in self.plans for probe in plan.probes if str(probe.run.path) in self.runs)
        return {str(probe.files.table): probe for probe in probes}

    @property
    def execution(self) -> Jobs:
        """How jobs are cut and where they run, which is one for all.

        Raises
        ------
        SettingsError
            The studies differ in it, or in what they keep.
        """
        for plan in self.plans[1:]:
            for section in ("execution", "keep_models"):
                if getattr(plan, section) != getattr(self.plans[0], section):
                    name = "artifacts.keep_models" if section == "keep_models" else section
                    raise SettingsError(
                        f"{plan.params}: {name} differs from that of {self.plans[0].params}; studies that are made "
                        "together should have it in common."
                    )
        return self.plans[0].execution


def _jobs(held: dict[str, Any]) -> Jobs:
    """The jobs that ``plan.json`` holds so."""
    return Jobs(**_fields(Jobs, held) | {"callbacks": _texts(held.get("callbacks", []))})


def _held(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _fields(kind: type, held: dict[str, Any]) -> dict[str, Any]:
    """A kind's fields as they are held; those with a default may be missing, as in a plan of before there were such."""
    fields = dataclasses.fields(kind)
    return {field.name: held[field.name] for field in fields if field.name in held or not _has_default(field)}


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(values)
    return tuple(values)


def _refuse_others(pattern: str, names: Iterable[Any]) -> None:
    """Refuse names that are not such as a plan gives; what is no text at all is a TypeError."""
    for name in names:
        if not re.fullmatch(pattern, name):
            raise ValueError(name)


def _refuse_no_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if type(value) is not int:
            raise TypeError(value)


def _is_keep_models(value: Any) -> bool:
    return value in ("all", "last") or _is_count(value)


def _are_jobs(jobs: Jobs) -> bool:
    whole = _is_count(jobs.stack) or jobs.stack == "auto"
    whole &= all(count is None or _is_count(count) for count in (jobs.rounds_per_job, jobs.clients_per_job))
    whole &= type(jobs.graphs) is bool
    return whole and jobs.device in ("auto", "cpu", "cuda")


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
