"""Finds and removes runs with their diagnostics, partitions, data and features that no study or commit needs.

A key is needed by the studies in this folder (params.yaml, ``studies/**/*.yaml``) and by every commit of any branch,
tag or experiment whose ``results/keys`` name it. Only files in DVC's cache are removed, so that nothing is lost. `dvc
gc` cleans the cache itself.
"""

from __future__ import annotations

import glob
import hashlib
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import RESULTS, remove_path
from fedpipe.core.storage.layout import PARAMS, STUDIES, RunFiles
from fedpipe.data import store
from fedpipe.data.datasets.base import PinnedDataset, PublishedDataset
from fedpipe.engine.clients import frozen
from fedpipe.planning import planner
from fedpipe.planning.combined import read_plans
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings import loader, parser
from fedpipe.settings.base import KEY_PATTERN


@dataclass(frozen=True)
class UnneededFiles:
    """A folder, or files, that no study or commit needs."""

    paths: tuple[Path, ...]
    size: int  #: in bytes
    uncached_count: int  #: number of its files that are not in DVC's cache and would be lost

    @classmethod
    def from_paths(cls, paths: Iterable[Path], cache: Path) -> UnneededFiles:
        """Measure files and folders, and look each file up in the cache."""
        paths = tuple(paths)
        files = [file for path in paths for file in _list_files(path)]
        return cls(
            paths, sum(file.stat().st_size for file in files), sum(not _is_in_dvc_cache(file, cache) for file in files)
        )

    def __str__(self) -> str:
        return str(self.paths[0])


def find_unneeded_files() -> list[UnneededFiles]:
    """Find everything that no study or commit needs, in order of path.

    Raises a SettingsError if a study can't be planned, so that its runs are unknown, and an ArtifactError if the
    current folder is not in a repository of git and DVC.
    """
    cache = Path(_run_command("dvc", "cache", "dir")) / "files" / "md5"
    runs, needed_partitions, needed_data = _find_needed_paths()
    runs |= _find_named_runs(_read_committed_keys())
    partition_folders = set(RESULTS.glob("partitions/*"))
    dataset_files = {path.with_suffix(".pt") for path in RESULTS.glob("data/*") if path.is_file()}
    feature_files, needed_features = {path.with_suffix(".pt") for path in RESULTS.glob("features/*")}, set[Path]()
    for settings in filter(Path.is_file, (RunFiles(path).settings for path in runs)):
        try:
            run_settings = RunSettings.read(settings)
        except ArtifactError:  # written by another version of fedpipe: it may need any of them
            needed_partitions |= partition_folders
            needed_data |= dataset_files
            needed_features |= feature_files
            continue
        needed_partitions.add(layout.get_assignment_path(compute_json_digest(run_settings.partition_settings)).parent)
        needed_data.add(store.get_stored_dataset_path(run_settings.dataset))
        needed_features.add(frozen.get_features_path(run_settings))
    needed_diagnostics = {RESULTS / "diagnostics" / path.relative_to(RESULTS / "runs") for path in runs}
    unneeded_folders = [
        *sorted(set(RESULTS.glob("runs/*/*")) - runs),
        *sorted(set(RESULTS.glob("diagnostics/*/*")) - needed_diagnostics),
        *sorted(partition_folders - needed_partitions),
    ]
    unneeded_files = [*sorted(dataset_files - needed_data), *sorted(feature_files - needed_features)]
    return [
        *(UnneededFiles.from_paths([path], cache) for path in unneeded_folders),
        *(UnneededFiles.from_paths(sorted(path.parent.glob(f"{path.stem}.*")), cache) for path in unneeded_files),
    ]


def find_plans_of_missing_studies() -> dict[Path, Path]:
    """Find the plans whose study file, the value, does not exist here. Shared runs keep states for these studies."""
    return {path: plan.params for path, plan in read_plans() if plan and not plan.params.exists()}


def is_recorded_by_dvc(path: Path) -> bool:
    """Whether `dvc commit` records a path. Of the runs, dvc.yaml has only those of the algorithms in params.yaml."""
    algorithms = (loader.read_params(PARAMS).get("study") or {}).get("algorithms") or ()
    return path.parent.parent != RESULTS / "runs" or path.parent.name in algorithms


def remove_files(unneeded_files: Iterable[UnneededFiles]) -> None:
    """Delete files from the workspace, if all of them are in DVC's cache."""
    unneeded_files = list(unneeded_files)
    for entry in unneeded_files:
        if entry.uncached_count:
            raise ArtifactError(
                f"{entry}: DVC's cache lacks {entry.uncached_count} of its files, so nothing was removed. Type "
                "`dvc commit` first."
            )
    for entry in unneeded_files:
        for path in entry.paths:
            remove_path(path)


def _find_needed_paths() -> tuple[set[Path], set[Path], set[Path]]:
    """Find runs, partitions and data sets that the studies of this folder need."""
    runs, partitions, data = set[Path](), set[Path](), set[Path]()
    study_paths = glob.glob(f"{STUDIES}/**/*.yaml", recursive=True, include_hidden=True)  # noqa: PTH207  # follows links
    for path in [PARAMS, *(path for path in map(Path, sorted(study_paths)) if path.name != layout.DVC_YAML)]:
        try:
            plans = [planner.make_plan(path, preset) for preset in planner.list_presets(path)]
        except SettingsError as error:
            if _is_dataset_sha256_missing(path):
                continue
            raise SettingsError(f"{path}: the study can't be planned, so its runs are unknown. {error}") from None
        for study_plan in plans:
            needed_runs = study_plan.add_search_results(has_draws=True).runs
            runs |= {run.path for run in needed_runs}
            # Runs of the search's winners and of TPE's draws, also if the study was edited after the search.
            results = study_plan.study_files.tables_folder.glob("tuning-*.json")
            runs |= _find_named_runs("".join(path.read_text() for path in results if path.is_file()))
            partitions |= {layout.get_assignment_path(run.partition).parent for run in needed_runs}
            data |= {layout.get_dataset_path(run.dataset) for run in study_plan.runs}
    return runs, partitions, data


def _find_named_runs(text: str) -> set[Path]:
    """Find the runs whose keys are in JSON files, also in those of a merge that was committed with its conflicts."""
    keys = {*re.findall(f'"({KEY_PATTERN})"', text)}
    return {path for path in RESULTS.glob("runs/*/*") if path.name in keys}


def _is_dataset_sha256_missing(params: Path) -> bool:
    """Whether the SHA-256 of a study's own data is still missing, so that the study has no runs."""
    try:
        dataset = parser.parse_dataset(loader.read_params(params).get("dataset", {})).configured_dataset
    except SettingsError:
        return False
    return isinstance(dataset, PinnedDataset) and not isinstance(dataset, PublishedDataset) and not dataset.sha256


def _read_committed_keys() -> str:
    """Read ``results/keys`` of all commits: branches, tags, experiments, stashes and HEAD."""
    keys = str(RESULTS / "keys")
    object_list = _run_command("git", "rev-list", "--all", "HEAD", "--objects", "--full-history", "--", keys)
    blobs = [line.partition(" ")[0] for line in object_list.splitlines() if line.endswith(".json")]
    return _run_command("git", "cat-file", "--batch=%(objectname)", stdin_text="\n".join(blobs))


def _list_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _is_in_dvc_cache(file: Path, cache: Path) -> bool:
    with file.open("rb") as stream:
        md5 = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return (cache / md5[:2] / md5[2:]).is_file()


def _run_command(*command: str, stdin_text: str = "") -> str:
    """Run a command with this text on its standard input. Return its output."""
    try:
        completed_process = subprocess.run(command, input=stdin_text, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.stderr.strip().partition("\n")[0]
        raise ArtifactError(
            f"`{' '.join(command)}` failed ({reason}). Type `fedpipe prune` in a clone with git, a commit and DVC."
        ) from error
    return completed_process.stdout.strip()
