"""What a study's ``plan.json`` holds: its runs, the cells of its tables, and what jobs and figures are told.

All that a study's commands and its Snakefile know of it is read from there. Every node that parses the Snakefile does
so: nothing here imports torch.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    computed_field,
    with_config,
)

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage.files import read_json, read_verified, write_json
from fedpipe.core.storage.layout import DiagnosticFiles, MergedFiles, RunFiles, StudyFiles
from fedpipe.settings.base import Label
from fedpipe.settings.execution import Artifacts, Execution
from fedpipe.settings.report import Report

KEY_PATTERN = r"[0-9a-f]{12}"
Key = Annotated[str, Field(pattern=f"^{KEY_PATTERN}$")]  #: of a run, partition or diagnostic
DiagnosticKind = Annotated[str, Field(pattern=r"^[a-z][a-z-]*$")]
DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+-[0-9a-f]{12}$")]
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

    algorithm: Label  #: its label in the study
    seed: int
    key: Key  #: the run's
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

    partition: Key  #: the key of its partition
    dataset: DatasetName  #: its stored data set, as ``digits-0123456789ab``
    participants: int  #: clients in a round, m

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def path(self) -> Path:
        """Its folder."""
        return self.files.path

    def has_cell(self, cell: Cell) -> bool:
        """Whether a cell's number is of this run."""
        return (self.algorithm, self.key) == (cell.algorithm, cell.key)


@dataclass(frozen=True, kw_only=True)
class Cell(_RunRounds):
    """What tables and figures show: so many rounds of a run, at a point of the grid."""

    grid: dict[str, Any]  #: its point, where that concerns the algorithm
    own: dict[str, Any] = field(default_factory=dict)  #: the settings that the method has alone, by key (`overrides`)


@dataclass(frozen=True, kw_only=True)
class PlannedDiagnostic:
    """What the study looks at in the states after a round of a run."""

    name: Label  #: of its entry in `diagnostics`
    kind: DiagnosticKind
    algorithm: Label  #: the label and
    run_key: Key  #: the key of the run
    rounds: int  #: of the run, in this study
    round: int
    key: Key  #: a hash of its settings, of the run's key and of the diagnostic's code

    @property
    def run(self) -> RunFiles:
        """The run's files."""
        return RunFiles.from_key(self.algorithm, self.run_key)

    @property
    def files(self) -> DiagnosticFiles:
        """Its own files."""
        return DiagnosticFiles.from_key(self.algorithm, self.run_key, self.round, self.kind, self.key)

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def path(self) -> Path:
        """What it finds."""
        return self.files.table


def _require_own_path(raw: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Refuse a run or diagnostic that leads elsewhere than to its own files."""
    planned = handler(raw)
    if raw.get("path") != str(planned.path):
        raise ValueError("it leads elsewhere")
    return planned


@with_config(ConfigDict(strict=True))  # a number is no text, and a Boolean no number
@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study's plan."""

    params: Path  #: the study's file
    preset: Label  #: which of its presets
    algorithms: tuple[Label, ...]  #: labels, in the order of the study
    seeds: tuple[int, ...]
    grid: dict[str, list[Any]]  #: names and values
    protocols: Annotated[tuple[str, ...], Field(min_length=1)]
    method_protocols: dict[str, str]  #: by label the protocol of a method that tables show by another than the first
    partitions: dict[Key, dict[str, Any]]  #: by key, all that each depends on
    runs: tuple[Annotated[PlannedRun, WrapValidator(_require_own_path)], ...]
    cells: tuple[Cell, ...]
    warnings: tuple[str, ...]
    files: tuple[str, ...]  #: what is written with the plan, for jobs to read, by name
    shared: Key  #: the digest of the code that all runs share
    execution: Execution
    artifacts: Artifacts
    report: Report
    diagnostics: tuple[Annotated[PlannedDiagnostic, WrapValidator(_require_own_path)], ...] = ()
    titles: dict[str, str] = field(default_factory=dict)  #: by label what tables and figures call a method, if not that

    @property
    def keep_models(self) -> str | int:
        """Which rounds' states stay: `artifacts.keep_models`."""
        return self.artifacts.keep_models

    def title(self, label: str) -> str:
        """What tables and figures call a method."""
        return self.titles.get(label, label)

    @property
    def study_files(self) -> StudyFiles:
        """Where the study's own files lie."""
        return StudyFiles.from_params(self.params, self.preset)

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
        content: dict[str, Any] = _get_adapter().dump_python(self, mode="json")
        return content

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
        data = read_verified(path, None)
        try:
            plan = _get_adapter().validate_json(data)
            is_valid = plan._is_consistent() and plan.study_files.plan.resolve() == path.resolve()
        except ValueError:  # pydantic's, or of a study's file that has no place
            read_json(path)  # its error is another one if the file holds no JSON at all
            is_valid = False
        if not is_valid:
            raise ArtifactError(f"{path} is not the plan of the study that belongs there; delete it and run again.")
        return plan

    def _is_consistent(self) -> bool:
        """Whether each name that a part of the plan gives is one of another part, as in each plan that is written."""
        run_keys = {(run.algorithm, run.key) for run in self.runs}
        return (
            run_keys >= {(cell.algorithm, cell.key) for cell in self.cells}
            and run_keys >= {(diagnostic.algorithm, diagnostic.run_key) for diagnostic in self.diagnostics}
            and {run.algorithm for run in self.runs} == set(self.algorithms)
            and {run.partition for run in self.runs} == set(self.partitions)
            and all(run.rounds == max(self.round_counts.get(run.path, (0,))) for run in self.runs)
            and all(cell.grid.keys() <= self.grid.keys() for cell in self.cells)
            and self.method_protocols.keys() | self.titles.keys() | {*filter(None, [self.report.baseline])}
            <= {*self.algorithms}
            and set(self.method_protocols.values()) <= set(self.protocols)
            and set(self.report.best_over) <= self.grid.keys()
        )


@cache
def _get_adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


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
