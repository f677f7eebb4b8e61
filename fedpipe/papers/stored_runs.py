"""Stored runs: accuracies of finished runs as text in the repository, because `results` is lost with its machine.

The runs of `studies/papers/PAPER/STUDY.yaml` are in two files of the folder `measured` next to the study.
``STUDY.runs.csv`` has one line per run, and ``STUDY.accuracies.csv`` has one line per run and protocol. A new run adds
lines and changes none, so that `git merge` can join both sides (see `.gitattributes`). A run's ``id`` is a hash of all
of its lines.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import pandas as pd
from pydantic import Field, TypeAdapter

from fedpipe.core.errors import ArtifactError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage.files import write_bytes
from fedpipe.papers.runs import LocalRun, Traffic
from fedpipe.planning.code_changes import COMPONENT_SECTIONS

FOLDER = "measured"  #: name of the folder next to the studies
#: What the digests of a run identify, by the field of `StoredRun`.
DIGEST_LABELS = {f"{section}_code": label for section, label in COMPONENT_SECTIONS.items()} | {
    "shared_code": "shared code",
    "samples": "samples (another copy of the data set)",
}
RESTORE_ADVICE = "Restore the file from git, or delete the lines of this run."
Text = Annotated[str, Field(min_length=1)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{12}$")]

csv.field_size_limit(2**31 - 1)  # a curve of 15,000 evaluated rounds is longer than the default


@dataclass(frozen=True, kw_only=True)
class AccuracyCurve:
    """Accuracies of a run by one protocol. Each field is a column of ``STUDY.accuracies.csv``."""

    protocol: Text
    average: Text  #: average over clients
    test_samples: Annotated[int, Field(ge=1)]
    rounds: Text  #: evaluated rounds, such as ``1-20`` or ``10-500/10``
    accuracies: Text  #: in [0, 1], with six significant digits

    @classmethod
    def from_accuracies(cls, protocol: str, average: str, test_samples: int, accuracies: pd.DataFrame) -> AccuracyCurve:
        """Format the accuracies of one protocol, which have columns ``round`` and ``accuracy``."""
        return cls(
            protocol=protocol,
            average=average,
            test_samples=test_samples,
            rounds=format_rounds(accuracies["round"].tolist()),
            accuracies=" ".join(map(format_stored_accuracy, accuracies["accuracy"])),
        )

    def to_frame(self) -> pd.DataFrame:
        """The accuracies by ``protocol`` and ``round``."""
        accuracies = [float(text) for text in self.accuracies.split(" ")]
        return pd.DataFrame({"protocol": self.protocol, "round": parse_rounds(self.rounds), "accuracy": accuracies})


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A stored run. Each field except ``curves`` is a column of ``STUDY.runs.csv``, which begins with ``id``."""

    preset: Text  #: preset of the study with which it was recorded
    point: str  #: its points of the study's grid
    algorithm: Text  #: its label in the study
    seed: int
    rounds: Annotated[int, Field(ge=1)]
    key: Digest  #: key of the run, with the code
    settings: Digest  #: hash of ``run.yaml`` without digests of code and of the data
    samples: Digest  #: SHA-256 of the data set, cut
    dataset_code: Digest
    partition_code: Digest
    model_code: Digest
    algorithm_code: Digest
    shared_code: Text
    commit: str  #: commit of the code, see `fedpipe.papers.recording`
    date: Text  #: day and time at which its rounds were merged (UTC)
    fedpipe: Text
    python: Text
    torch: Text
    numpy: Text
    device: Text  #: model of the CPU or GPU
    executor: Text
    is_generated: bool
    is_diverged: bool
    classes: Annotated[int, Field(ge=2)]
    round_seconds: float  #: mean seconds of a round
    epoch_seconds: float  #: mean seconds of a client's local epoch
    bytes_down: float  #: mean bytes of a participant in the last round
    bytes_up: float
    curves: Annotated[tuple[AccuracyCurve, ...], Field(min_length=1)] = field(repr=False)

    @cached_property
    def id(self) -> str:
        """The hash of all lines of the run."""
        return _compute_run_id(format_csv_fields(self), [format_csv_fields(curve) for curve in self.curves])

    @cached_property
    def accuracies_by_round(self) -> pd.DataFrame:
        """Accuracies in [0, 1] by ``protocol`` and ``round`` in the stored average."""
        return pd.concat([curve.to_frame() for curve in self.curves], ignore_index=True)

    @property
    def last_round_traffic(self) -> Traffic:
        """Traffic of the last round."""
        return Traffic(self.bytes_down, self.bytes_up)

    def count_test_samples(self, protocol: str) -> int:
        """Number of test samples of the last round, each once."""
        return next(curve.test_samples for curve in self.curves if curve.protocol == protocol)

    def list_code_and_sample_changes(self, current_digests: Mapping[str, str]) -> list[str]:
        """What differs now: components by their code, and the samples, compared with the current digests."""
        return [label for name, label in DIGEST_LABELS.items() if getattr(self, name) != current_digests[name]]

    def describe_origin(self, current_digests: Mapping[str, str]) -> str:
        """Describe the commit, the date, and what differs now."""
        origin = f"stored, computed on {self.date} by the code of commit {self.commit or 'unknown'}"
        changes = self.list_code_and_sample_changes(current_digests)
        return f"{origin}. Different now: {', '.join(changes)}" if changes else origin


STORED_RUN = TypeAdapter(StoredRun)
FinishedRun: TypeAlias = LocalRun | StoredRun  #: a run of a paper's study


class RunStore:
    """The stored runs of a study, in a fixed order."""

    def __init__(self, study: Path, runs: Iterable[StoredRun] = ()) -> None:
        self.study = study
        self.runs = sorted({run.id: run for run in runs}.values(), key=_get_sort_key)

    @classmethod
    def read(cls, study: Path) -> RunStore:
        """Read the stored runs of a study, and check each of them. A study without these files has none.

        Raises an ArtifactError, which names the line, if a file is damaged.
        """
        runs_path, accuracies_path = get_stored_runs_path(study), get_stored_accuracies_path(study)
        curves: dict[str, dict[tuple[str, ...], int]] = {}
        for line, (run_id, *values) in _read_csv_lines(accuracies_path, AccuracyCurve):
            curves.setdefault(run_id, {}).setdefault(tuple(values), line)
        runs: dict[str, StoredRun] = {}
        for line, (run_id, *values) in _read_csv_lines(runs_path, StoredRun):
            run_curves = curves.get(run_id, {})
            place = f"{runs_path}, line {line}"
            if not run_curves:
                raise ArtifactError(f"{place}: {accuracies_path} has no accuracies of run {run_id}. {RESTORE_ADVICE}")
            fields = dict(zip(_list_csv_columns(StoredRun), values, strict=True))
            curve_fields = [dict(zip(_list_csv_columns(AccuracyCurve), curve, strict=True)) for curve in run_curves]
            if _compute_run_id(fields, curve_fields) != run_id:
                lines = ", ".join(map(str, run_curves.values()))
                raise ArtifactError(
                    f"{place}: run {run_id} was edited or is damaged, here or in {accuracies_path}, line {lines}. "
                    f"{RESTORE_ADVICE}"
                )
            try:
                runs[run_id] = STORED_RUN.validate_python(fields | {"curves": curve_fields})
            except ValueError as error:
                raise ArtifactError(f"{place}: {error}. {RESTORE_ADVICE}") from None
        for run_id in curves.keys() - runs.keys():
            line = min(curves[run_id].values())
            raise ArtifactError(f"{accuracies_path}, line {line}: {runs_path} has no run {run_id}. {RESTORE_ADVICE}")
        return cls(study, runs.values())

    def add_run(self, run: StoredRun) -> bool:
        """Add a run. Return False if a run with the same settings, key and numbers is already stored."""
        others = self.find_runs(run.settings, run.rounds, run.curves[0].average)
        if any(other.key == run.key and set(other.curves) == set(run.curves) for other in others):
            return False
        self.runs = sorted([*self.runs, run], key=_get_sort_key)
        return True

    def find_runs(self, settings: str, rounds: int, average: str) -> list[StoredRun]:
        """Find the runs with these settings, number of rounds and average, the newest first."""
        runs = [
            run for run in self.runs if (run.settings, run.rounds, run.curves[0].average) == (settings, rounds, average)
        ]
        return sorted(runs, key=lambda run: run.date, reverse=True)

    def write(self) -> None:
        """Write both files."""
        lines = [[run.id, *format_csv_fields(run).values()] for run in self.runs]
        curves = [[run.id, *format_csv_fields(curve).values()] for run in self.runs for curve in run.curves]
        write_bytes(get_stored_accuracies_path(self.study), _encode_csv(AccuracyCurve, curves))
        write_bytes(get_stored_runs_path(self.study), _encode_csv(StoredRun, lines))


def compute_largest_accuracy_difference(run: FinishedRun, other: FinishedRun) -> float:
    """The largest difference of the accuracies of two runs with the same settings, in their stored digits.

    It is 0 if the runs have no common round with the same protocol.
    """
    first, second = (
        each.accuracies_by_round.set_index(["protocol", "round"])["accuracy"].map(
            lambda value: float(format_stored_accuracy(value))
        )
        for each in (run, other)
    )
    return float(max((first - second).abs().dropna(), default=0.0))


def get_stored_runs_path(study: Path) -> Path:
    """The file with a line per stored run of a study."""
    return study.parent / FOLDER / f"{study.stem}.runs.csv"


def get_stored_accuracies_path(study: Path) -> Path:
    """The file with the accuracies of the stored runs of a study."""
    return study.parent / FOLDER / f"{study.stem}.accuracies.csv"


def compute_settings_digest(settings: Mapping[str, Any]) -> str:
    """Hash the content of a ``run.yaml`` without digests of code and data, and without paths of files."""
    sections = {name: section for name, section in settings.items() if name != "origin"}
    for name in COMPONENT_SECTIONS:
        digest_keys = {"code", "sha256"} if name == "dataset" else {"code"}
        sections[name] = {key: value for key, value in sections[name].items() if key not in digest_keys}
    return compute_json_digest(sections)


def get_code_and_sample_digests(settings: Mapping[str, Any], shared_code: str) -> dict[str, str]:
    """The digests of code and samples in the content of a ``run.yaml``, by the fields of `StoredRun`."""
    code = {f"{section}_code": str(settings[section]["code"]) for section in COMPONENT_SECTIONS}
    return {**code, "shared_code": shared_code, "samples": str(settings["dataset"]["sha256"])[:12]}


def format_stored_accuracy(accuracy: float) -> str:
    """Format an accuracy with six significant digits, which distinguish one of 100,000 samples."""
    return f"{accuracy:.6g}"


def format_rounds(rounds: Sequence[int]) -> str:
    """Format ascending rounds.

    Examples
    --------
    >>> format_rounds([1, 2, 3]), format_rounds([10, 20, 30]), format_rounds([5, 6, 8])
    ('1-3', '10-30/10', '5 6 8')
    """
    steps = {after - before for before, after in itertools.pairwise(rounds)}
    if len(steps) != 1:
        return " ".join(map(str, rounds))
    (step,) = steps
    return f"{rounds[0]}-{rounds[-1]}" + (f"/{step}" if step > 1 else "")


def parse_rounds(text: str) -> list[int]:
    """Parse the result of :func:`format_rounds`."""
    if "-" not in text:
        return [int(number) for number in text.split(" ")]
    limits, _, step = text.partition("/")
    first, _, last = limits.partition("-")
    return [*range(int(first), int(last) + 1, int(step or 1))]


def format_csv_fields(record: AccuracyCurve | StoredRun) -> dict[str, str]:
    """Format the fields of a line by the name of their column."""
    return {name: _format_csv_value(getattr(record, name)) for name in _list_csv_columns(type(record))}


def _format_csv_value(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _compute_run_id(fields: Mapping[str, str], curves: Iterable[Mapping[str, str]]) -> str:
    return compute_json_digest([fields, sorted([*curve.values()] for curve in curves)])


def _list_csv_columns(kind: type[Any]) -> tuple[str, ...]:
    """The columns after ``id``."""
    return tuple(entry.name for entry in dataclasses.fields(kind) if entry.name != "curves")


def _get_sort_key(run: StoredRun) -> tuple[Any, ...]:
    return run.preset, run.point, run.algorithm, run.seed, run.rounds, run.date, run.id


def _read_csv_lines(path: Path, kind: type[Any]) -> Iterator[tuple[int, list[str]]]:
    """The lines of a file with their numbers. None if it does not exist."""
    if not path.is_file():
        return
    columns = ["id", *_list_csv_columns(kind)]
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # names may contain other line breaks
    except UnicodeDecodeError:
        raise ArtifactError(f"{path} is damaged: it is not text. {RESTORE_ADVICE}") from None
    for number, line in enumerate(lines, start=1):
        values = next(csv.reader([line]), [""])
        if number == 1 and values != columns:
            raise ArtifactError(f"{path}, line 1: the columns are not {', '.join(columns)}. {RESTORE_ADVICE}")
        if len(values) != len(columns):
            raise ArtifactError(
                f"{path}, line {number}: {len(values)} values instead of {len(columns)}. {RESTORE_ADVICE}"
            )
        if number > 1:
            yield number, values


def _encode_csv(kind: type[Any], lines: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["id", *_list_csv_columns(kind)], *lines])
    return text.getvalue().encode()
