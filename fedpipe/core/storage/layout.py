"""Paths of all files of a study, a run and a round, relative to the project's folder."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import archive, files
from fedpipe.core.storage.files import RESULTS

if TYPE_CHECKING:
    import pyarrow as pa

PARAMS = Path("params.yaml")  #: the main study
ROUND_GLOB = "[0-9][0-9][0-9][0-9]"  #: number of a round in names of files
FULL_PRESET = "full"  #: preset of the unchanged study
STUDIES = Path("studies")  #: folder of other studies
PAPERS = STUDIES / "papers"  #: studies of the four papers
READINGS = "readings"  #: folder of a paper whose studies run only if they or this folder are selected
DVC_YAML = "dvc.yaml"  #: file of DVC next to studies
PLOTS = ("curves", "clients", "matrices", "partition")  #: names of the figures' numbers
FIGURE_FORMATS = ("svg", "pdf", "png")


class FolderEntry:
    """The path of a file in the folder ``path`` of an object, such as :class:`RoundFiles`, by the file's name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, owner_type: type) -> Path:
        return owner.path / self._name


@dataclass(frozen=True)
class RoundFiles:
    """The files of one round.

    The aggregation writes ``state.json`` last, when the states are complete. ``round.json`` is written last of all,
    when the round is complete. Both contain the SHA-256 of the other files. Times have no checksum.
    """

    path: Path

    server_state = FolderEntry("server.pt")  #: server state after the aggregation (round 0: initial state)
    client_states = FolderEntry("clients.pt")  #: kept states of the round's participants, stacked along the first axis
    participants = FolderEntry("participants.parquet")  #: one row per participant: weight, bytes down and up
    trained_accuracies = FolderEntry("trained.parquet")  #: accuracies of the participants after training
    kept_accuracies = FolderEntry("kept.parquet")  #: accuracies for the kept protocols until a client trains again
    metrics = FolderEntry("metrics.parquet")  #: accuracies of this round, one row per client and protocol
    exchanged_matrices = FolderEntry("exchanged.parquet")  #: matrices that the algorithm exchanged in this round
    matrices = FolderEntry("matrices.parquet")  #: SL and CR matrices of this round's global model
    times = FolderEntry("times.json")  #: seconds of training, aggregation and evaluation, and of a client's local epoch
    complete_states_marker = FolderEntry("state.json")  #: marker of complete states
    marker = FolderEntry("round.json")  #: marker of a complete round

    def get_block_uploads_path(self, index: int) -> Path:
        """Uploads of one job's participants (only in the DAG of single rounds, until aggregated)."""
        return self.path / f"block-{index:04d}.pt"


@dataclass(frozen=True)
class MergedRoundFiles:
    """The first rounds of a run merged into one file per kind, for tables with that number of rounds.

    The name of their folder is the number of rounds, so that studies of other lengths have their own files.
    ``joined.json`` is written last. It contains the number and the SHA-256 of all other files.
    """

    path: Path

    metrics = FolderEntry("metrics.parquet")  #: all rounds' accuracies
    matrices = FolderEntry("matrices.parquet")  #: all rounds' SL and CR matrices
    rounds = FolderEntry("rounds.parquet")  #: one row per round: participants, traffic, metrics of the algorithm
    times = FolderEntry("times.json")  #: seconds of each round, and the environment
    marker = FolderEntry("joined.json")  #: marker of complete files

    @property
    def all_files(self) -> tuple[Path, ...]:
        """All of these files, the marker last."""
        return self.metrics, self.matrices, self.rounds, self.times, self.marker

    @property
    def round_count(self) -> int:
        """The number of rounds."""
        return int(self.path.name)

    def read_recorded_sha256(self, path: Path) -> str:
        """Read the recorded SHA-256 of one of the files. The record must have the number of rounds."""
        recorded_sha256 = files.read_recorded_sha256(path, self.marker.name)
        if (recorded_rounds := files.read_hash_record(self.marker).get("rounds")) != self.round_count:
            raise ArtifactError(
                f"{self.marker} contains {recorded_rounds} rounds instead of {self.round_count}. Delete "
                f"{self.path} and run again."
            )
        return recorded_sha256

    def check_hashes(self) -> None:
        """Hash all files. Raises an error if one is missing, damaged, or has another number of rounds."""
        for path in self.all_files[:-1]:
            files.read_verified_bytes(path, self.read_recorded_sha256(path))


@dataclass(frozen=True)
class RunFiles:
    """The files of one run, below ``results/runs/<algorithm>/<key>``."""

    path: Path

    settings = FolderEntry("run.yaml")  #: complete settings, from which the key is computed
    rounds_folder = FolderEntry("rounds")  #: folder of the rounds, whose small files are packed at the end of a segment

    @classmethod
    def from_key(cls, label: str, key: str) -> RunFiles:
        """Get the files of the run with this key."""
        return cls(RESULTS / "runs" / label / key)

    def get_round_files(self, round_number: int) -> RoundFiles:
        """The files of one round."""
        return RoundFiles(self.rounds_folder / f"{round_number:04d}")

    def list_complete_rounds(self) -> list[int]:
        """List the complete rounds, ascending, including 0."""
        markers = [  # a round moves from the folder into the pack, so that this order finds it
            *map(str, self.rounds_folder.glob(f"{ROUND_GLOB}/round.json")),
            *archive.list_pack_members(archive.get_pack_path(self.rounds_folder)),
        ]
        return sorted({int(name.split("/")[-2]) for name in markers if name.endswith("/round.json")})

    def get_segment_manifest_path(self, stop: int) -> Path:
        """Manifest of the segment that ends with round ``stop``."""
        return self.path / "segments" / f"{stop:04d}.json"

    def get_replay_record_path(self, round_number: int, shared_digest: str) -> Path:
        """Result of repeating a round before the run resumed with other shared code."""
        return self.path / "continued" / f"{round_number:04d}-{shared_digest}.json"

    def list_segment_manifests(self) -> list[Path]:
        """List the manifests of all segments, ascending."""
        return sorted(self.path.glob(f"segments/{ROUND_GLOB}.json"))

    def get_merged_files(self, rounds: int) -> MergedRoundFiles:
        """The merged files of the rounds 1 to ``rounds``."""
        return MergedRoundFiles(self.path / "joined" / f"{rounds:04d}")

    def list_merged_files(self) -> list[MergedRoundFiles]:
        """List the merged files of any number of rounds, ascending."""
        return [MergedRoundFiles(path.parent) for path in sorted(self.path.glob(f"joined/{ROUND_GLOB}/joined.json"))]


@dataclass(frozen=True)
class DiagnosticFiles:
    """The files of one diagnostic, below ``results/diagnostics/<algorithm>/<run's key>/<round>``."""

    path: Path  #: path without suffix

    @classmethod
    def from_key(cls, label: str, run: str, round_number: int, kind: str, key: str) -> DiagnosticFiles:
        """Get the files of a diagnostic of a round."""
        return cls(RESULTS / "diagnostics" / label / run / f"{round_number:04d}" / f"{kind}-{key}")

    @property
    def settings(self) -> Path:
        """All settings of the diagnostic, from which its key is computed."""
        return self.path.with_suffix(".yaml")

    @property
    def table(self) -> Path:
        """Table of the diagnostic."""
        return self.path.with_suffix(".parquet")

    @property
    def marker(self) -> Path:
        """SHA-256 of the table, and the environment."""
        return self.path.with_suffix(".json")


@dataclass(frozen=True)
class StudyFiles:
    """The files of one study. All studies share runs, partitions and data."""

    path: Path

    plan = FolderEntry("plan.json")  #: plan of the study, which the Snakefile reads
    completion_mark = FolderEntry("complete.txt")  #: fingerprint of the plan whose tables and figures all exist
    metrics = FolderEntry("metrics.json")  #: accuracies for `dvc exp show`
    tables_folder = FolderEntry("tables")  #: folder of the tables
    plots_folder = FolderEntry("plots")  #: folder of the plots' numbers
    figures_folder = FolderEntry("figures")  #: folder of the figures
    statistics_table = FolderEntry("tables/statistics.csv")  #: table of all statistics
    ranks_table = FolderEntry("tables/ranks.csv")  #: table of mean ranks and p-values, if the study has a rank test
    times_table = FolderEntry("tables/times.csv")  #: table of times

    @classmethod
    def from_params(cls, params: Path, preset: str = FULL_PRESET) -> StudyFiles:
        """Get the files of a study. With a preset, its folder ends with ``@`` and the preset's name.

        Raises an error if the path would collide with another study's, or if `fedpipe prune` would not find it.
        """
        params = normalize_study_path(params)
        suffix = "" if preset == FULL_PRESET else f"@{preset}"
        if not re.fullmatch("[a-z][a-z0-9_]*", preset):
            raise SettingsError(f"'{preset}' is not a preset. Use a name from the section presets, or {FULL_PRESET}.")
        if params == PARAMS:
            return cls(RESULTS / "studies" / suffix if suffix else RESULTS)
        name = params.name.removesuffix(".yaml")
        parts = (*params.parts[1:-1], name)
        if params.parts[:1] != STUDIES.parts or name == params.name or not all(part.strip(".") for part in parts):
            projects = [folder for folder in params.parents if folder.name and (folder / "Snakefile").is_file()]
            advice = f"Use {PARAMS}, or move the file to {STUDIES / params.stem}.yaml."
            if projects:
                advice = f"It belongs to another project. Type `cd {shlex.quote(str(projects[0]))}` first."
            raise SettingsError(f"{params}: not the path of a study. {advice}")
        for parent, part in itertools.pairwise(parts):
            if part.lower() in RESERVED_NAMES:
                raise SettingsError(
                    f"{params}: '{parent}/{part}' is for files of the study '{parent}'. Rename '{part}'."
                )
        if invalid_character := re.search(r"[^\w ./+()=-]", str(params)):
            raise SettingsError(
                f"{str(params)!r}: {invalid_character[0]!r} can't be part of a study's path. Use letters, digits, "
                "spaces and ./_-+=()."
            )
        return cls(RESULTS / "studies" / Path(*parts[:-1], f"{name}{suffix}"))

    @property
    def source_hashes(self) -> Path:
        """Hashes of the plan's source files, in Snakemake's folder because they belong to this clone."""
        return Path(".snakemake", "fedpipe", self.path / "sources.json")

    @property
    def unavailable_runs(self) -> Path:
        """Runs that need a network, with the reason, next to the hashes of the sources."""
        return self.source_hashes.with_name("absent.json")

    @property
    def earlier_completion_mark(self) -> Path:
        """The completion mark of the plan before the present one, next to the hashes of the sources."""
        return self.source_hashes.with_name("complete.txt")

    def get_run_keys_path(self, label: str) -> Path:
        """Keys of all runs of an algorithm, each with its number of rounds."""
        return self.path / "keys" / f"{label}.json"

    def get_result_table_path(self, file_format: str) -> Path:
        """Result table as ``csv``, ``md`` or ``html``."""
        return self.tables_folder / f"results.{file_format}"

    def get_rung_result_path(self, rounds: int) -> Path:
        """Result of the rung of section `tune` with this number of rounds."""
        return self.tables_folder / f"tuning-{rounds:04d}.json"

    def get_plot_data_path(self, name: str) -> Path:
        """Numbers of one of the `PLOTS`."""
        return self.plots_folder / f"{name}.csv"

    def get_partition_figure_path(self, name: str) -> Path:
        """Figure of the partition with this name, without suffix."""
        return self.figures_folder / f"partition-{name}"

    def list_table_rule_files(self, algorithm_labels: Iterable[str]) -> list[Path]:
        """List all files of rule `table` for these algorithms."""
        return [
            *map(self.get_result_table_path, ("csv", "md", "html")),
            self.statistics_table,
            self.times_table,
            self.metrics,
            *map(self.get_plot_data_path, PLOTS),
            *map(self.get_run_keys_path, algorithm_labels),
        ]

    def list_figure_files(self, names: Iterable[str], partition_names: Iterable[str]) -> list[Path]:
        """Figures with these names and of these partitions, in each format."""
        stems = [*(self.figures_folder / name for name in names), *map(self.get_partition_figure_path, partition_names)]
        return [stem.with_name(f"{stem.name}.{file_format}") for stem in stems for file_format in FIGURE_FORMATS]


#: Entries of a study's folder. A study in a subfolder can't have these names.
RESERVED_NAMES = ("plan.json", "metrics.json", "tables", "plots", "figures", "keys", "logs")


def normalize_study_path(params: Path) -> Path:
    """Normalize the path of a study: relative to this folder, if it is in it."""
    cwd, shell_cwd = Path.cwd(), Path(os.environ.get("PWD", ""))
    is_same_folder = shell_cwd.is_absolute() and shell_cwd.is_dir() and shell_cwd.samefile(cwd)
    for folder in (cwd, shell_cwd) if is_same_folder else (cwd,):  # the second may be a link to this folder
        if ".." not in params.parts and params.is_relative_to(folder):
            return params.relative_to(folder)
    return params


def list_studies(params: Path) -> list[Path]:
    """List the studies of a path: the file, or all studies below the folder, which must contain one."""
    if not params.is_dir():
        return [normalize_study_path(params)]
    paths = [normalize_study_path(path) for path in sorted(params.rglob("*.yaml")) if path.name != DVC_YAML]
    if not paths:
        raise SettingsError(f"{params}: the folder contains no study. Add a study as NAME.yaml.")
    return paths


def list_studies_without_readings(params: Path) -> list[Path]:
    """List the studies of a path, with the readings of the papers only if ``params`` is in their folder."""
    paths, is_selected = list_studies(params), is_in_readings_folder(normalize_study_path(params))
    return [path for path in paths if is_selected or not is_in_readings_folder(path)]


def is_in_readings_folder(path: Path) -> bool:
    """Whether a path is a folder ``studies/papers/PAPER/readings`` or in it."""
    return path.is_relative_to(PAPERS) and READINGS in path.parts


def format_command(command: str, params: Path, preset: str = FULL_PRESET, overrides: Iterable[str] = ()) -> str:
    """Format a command of fedpipe for a study, such as `fedpipe run`, with options `-S`."""
    params_option = [] if params == PARAMS else ["--params", str(params)]
    preset_option = [] if preset == FULL_PRESET else ["--preset", preset]
    override_options = [word for override in overrides for word in ("-S", override)]
    return shlex.join(["fedpipe", command, *params_option, *preset_option, *override_options])


def get_dataset_path(name: str) -> Path:
    """File with a data set's tensors."""
    return RESULTS / "data" / f"{name}.pt"


def get_assignment_path(key: str) -> Path:
    """File of the partition with this key."""
    return RESULTS / "partitions" / key / "assignment.parquet"


def get_heterogeneity_path(key: str) -> Path:
    """File with the heterogeneity of a partition."""
    return get_assignment_path(key).with_name("heterogeneity.parquet")


def read_merged_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a merged table, or some columns, checked against its ``joined.json``."""
    return files.read_parquet(path, MergedRoundFiles(path.parent).read_recorded_sha256(path), columns)


def read_round_hashes(round_files: RoundFiles, record: Path) -> dict[str, str]:
    """Read the SHA-256 of a round's files, and of nothing else, from ``state.json`` or ``round.json``.

    Raises an ArtifactError if the record is missing or damaged.
    """
    content = files.read_json(record)
    digests = content.get("sha256") if isinstance(content, dict) else None
    if not isinstance(digests, dict):
        raise files.make_unreadable_file_error(record, "the SHA-256 of the round's files are missing")
    for name, sha256 in digests.items():
        is_packable = "/" not in name and archive.is_packable(round_files.path / name)
        if not (is_packable or name in files.TENSOR_FILES) or not isinstance(sha256, str):
            raise files.make_unreadable_file_error(record, f"{name!r} is not a file of its round")
    return digests


def summarize_round(round_files: RoundFiles, state: Mapping[str, Any]) -> dict[str, float]:
    """Summarize a round by name: participants, updates that were left out, mean bytes, and the method's own metrics.

    ``state`` is the content of its ``state.json``.
    """
    traffic = files.read_parquet(round_files.participants, state["sha256"][round_files.participants.name])
    mean_bytes = {name: sum(traffic[name].to_pylist()) / len(traffic) for name in ("bytes_down", "bytes_up")}
    left_out = traffic["finite"].to_pylist().count(False)
    return {"participants": len(traffic), "left_out": left_out, **mean_bytes, **state["observed"]}
