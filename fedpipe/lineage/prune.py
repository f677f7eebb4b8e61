"""What nothing needs any more: runs with their probes, partitions, data and features that no study and no commit names.

A key is needed by the studies that lie here (params.yaml, ``studies/**/*.yaml``) and by every commit of any branch, tag
or experiment whose ``results/keys`` name it. Only what lies in DVC's cache is removed, so that nothing is lost by it;
what the cache itself no longer needs, `dvc gc` removes.
"""

from __future__ import annotations

import base64
import binascii
import glob
import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedpipe import artifacts, plan
from fedpipe.artifacts import PARAMS, RESULTS, STUDIES, RunFiles
from fedpipe.data import store
from fedpipe.engine import frozen
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.plan import Settings, digest
from fedpipe.planned import KEY

PROVENANCE = RESULTS / ".provenance"


@dataclass(frozen=True)
class Unneeded:
    """Something that nothing needs.

    Parameters
    ----------
    paths
        Its folder, or its files.
    size
        Bytes.
    uncached
        How many of its files are not in DVC's cache, and would be lost.
    """

    paths: tuple[Path, ...]
    size: int
    uncached: int

    @classmethod
    def of(cls, paths: Iterable[Path], cache: Path) -> Unneeded:
        """Measure files and folders, and look each file up in the cache."""
        paths = tuple(paths)
        files = [file for path in paths for file in _files(path)]
        return cls(paths, sum(file.stat().st_size for file in files), sum(not _cached(file, cache) for file in files))

    def __str__(self) -> str:
        return str(self.paths[0])


def unneeded() -> list[Unneeded]:
    """Everything that no study and no commit needs, in order of path.

    Raises
    ------
    SettingsError
        A study can't be read, so that nobody knows what it needs.
    ArtifactError
        Here is no repository of git and DVC.
    """
    cache = Path(_told("dvc", "cache", "dir")) / "files" / "md5"
    runs, partitions, data = _studies()
    committed = _commits()
    runs |= {path for path in RESULTS.glob("runs/*/*") if path.name in committed}
    dealt = set(RESULTS.glob("partitions/*"))
    stored = {path.with_suffix(".pt") for path in RESULTS.glob("data/*") if path.is_file()}
    computed, features = {path.with_suffix(".pt") for path in RESULTS.glob("features/*")}, set[Path]()
    for settings in filter(Path.is_file, (RunFiles(path).settings for path in runs)):
        try:
            needed = Settings.read(settings)
        except ArtifactError:  # written by another version of fedpipe: it may need any of them
            partitions, data, features = partitions | dealt, data | stored, features | computed
            continue
        partitions.add(artifacts.assignment_file(digest(needed.partition_settings)).parent)
        data.add(store.place(needed.dataset))
        features.add(frozen.place(needed))
    spare: list[tuple[Path, ...]] = [(path,) for path in sorted(RESULTS.glob("runs/*/*")) if path not in runs]
    looked = {RESULTS / "probes" / path.relative_to(RESULTS / "runs") for path in runs}
    spare += [(path,) for path in sorted(RESULTS.glob("probes/*/*")) if path not in looked]
    spare += [(path,) for path in sorted(dealt - partitions)]
    spare += [tuple(sorted(path.parent.glob(f"{path.stem}.*"))) for path in sorted(stored - data)]
    spare += [tuple(sorted(path.parent.glob(f"{path.stem}.*"))) for path in sorted(computed - features)]
    return [Unneeded.of(paths, cache) for paths in spare]


def remove(found: Iterable[Unneeded]) -> None:
    """Delete from the workspace what the cache holds, with Snakemake's records of it.

    Raises
    ------
    ArtifactError
        Something is not in DVC's cache; nothing is removed.
    """
    found = list(found)
    for part in found:
        if part.uncached:
            raise ArtifactError(f"{part} is not in DVC's cache ({part.uncached} of its files); nothing was removed.")
    for part in found:
        for path in part.paths:
            artifacts.remove(path)
    gone = {str(path) for part in found for path in part.paths}
    for record, output in _records():
        if any(output == path or output.startswith(f"{path}/") for path in gone):
            artifacts.remove(record)


def _studies() -> tuple[set[Path], set[Path], set[Path]]:
    """Runs, partitions and data sets that the studies of this folder need."""
    runs, partitions, data = set(), set(), set()
    others = glob.glob(f"{STUDIES}/**/*.yaml", recursive=True, include_hidden=True)  # noqa: PTH207  # follows links
    for path in [PARAMS, *(path for path in map(Path, sorted(others)) if path.name != artifacts.DVC)]:
        try:
            plans = [plan.make(path, scale) for scale in plan.scales(path)]
        except SettingsError as error:
            raise SettingsError(f"{path}: what this study needs can't be known. {error}") from None
        for made in plans:
            runs |= {run.path for run in made.runs}
            partitions |= {artifacts.assignment_file(key).parent for key in made.partitions}
            data |= {artifacts.dataset_file(run.dataset) for run in made.runs}
    return runs, partitions, data


def _commits() -> set[str]:
    """Keys of runs that some commit's ``results/keys`` name: of branches, tags, experiments, stashes and HEAD."""
    keys = str(RESULTS / "keys")
    listed = _told("git", "rev-list", "--all", "HEAD", "--objects", "--full-history", "--", keys)
    blobs = [line.partition(" ")[0] for line in listed.splitlines() if line.endswith(".json")]
    printed = _told("git", "cat-file", "--batch=%(objectname)", given="\n".join(blobs))
    return {*re.findall(f'"({KEY})"', printed)}  # also those of a merge that was committed with its conflicts


def _records() -> Iterator[tuple[Path, str]]:
    """Snakemake's records, each with the output that it is of: the file's name, encoded, cut where it is long."""
    for record in PROVENANCE.rglob("*"):
        if record.is_file():
            parts = record.relative_to(PROVENANCE).parts
            try:
                yield record, base64.urlsafe_b64decode("".join(part.removeprefix("@") for part in parts)).decode()
            except (binascii.Error, UnicodeDecodeError):
                continue  # no record of an output


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _cached(file: Path, cache: Path) -> bool:
    with file.open("rb") as stream:
        md5 = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return (cache / md5[:2] / md5[2:]).is_file()


def _told(*command: str, given: str = "") -> str:
    """What a command prints, which may read what is given."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.stderr.strip().partition("\n")[0]
        raise ArtifactError(
            f"`{' '.join(command)}` fails here ({reason}); prune needs a clone with git, a commit and DVC."
        ) from error
    return done.stdout.strip()
