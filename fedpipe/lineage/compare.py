"""The result table of several commits or experiments side by side, what differs in their settings, and by how much."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from fedpipe import artifacts
from fedpipe.artifacts import PARAMS, StudyFiles
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.lineage.diff import flat
from fedpipe.planned import Cell, Plan, Reported
from fedpipe.report import results, tables
from fedpipe.report.statistics import PAIRED, difference
from fedpipe.report.tables import DASH

WORKSPACE = "workspace"  #: what lies here, as DVC calls it

Row = tuple[str, str]  #: of the table: algorithm, and grid point in words


class Revision(NamedTuple):
    """A study as a commit, an experiment or this folder has it."""

    name: str
    plan: Plan
    accuracies: dict[tuple[Row, str], pd.Series[float]]  #: by row and protocol: in percent, by seed
    made_of: dict[Row, set[tuple[str, int]]]  #: its runs by their keys, each with its number of rounds
    settings: dict[Row, dict[str, Any]]  #: by dotted name


def compare(names: Sequence[str]) -> str:
    """What ``fedpipe compare`` prints.

    Parameters
    ----------
    names
        Commits, tags, branches or experiments, the first of which is the baseline; one alone is compared with what lies
        here, and without any that is HEAD.

    Raises
    ------
    SettingsError
        There is no such revision, or it has recorded no results.
    ArtifactError
        Files of it are neither here nor in DVC's cache or remote.
    """
    names = [*(names or ["HEAD"]), *([WORKSPACE] if len(names) < 2 else [])]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingsError(f"'{twice[0]}' is named twice; each revision may be named once.")
    report: Reported | None = None
    revisions: list[Revision] = []
    for name in names:
        with _at(name):
            revisions.append(_read(name, report))
        report = revisions[0].plan.report
    return f"{_table(revisions)}\n\n{_settings(revisions)}"


# -- what a revision has -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _at(name: str) -> Iterator[None]:
    """While the current folder holds what is compared of a revision."""
    if name == WORKSPACE:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        _fetch(name, Path(folder))
        with contextlib.chdir(folder):
            yield


def _read(name: str, report: Reported | None) -> Revision:
    """The revision whose files are in the current folder, as the baseline reports its numbers."""
    place = StudyFiles.of(PARAMS).plan
    if name == WORKSPACE and not place.is_file():
        raise ArtifactError(f"{place} is missing; type `{artifacts.making(PARAMS)}` first.")
    try:
        plan = Plan.read(place)
    except ArtifactError:
        if name == WORKSPACE:
            raise
        raise ArtifactError(f"{name}: its {place} is of another version of fedpipe, and can't be compared.") from None
    chosen = report or plan.report
    frame = results.asked(results.reported(results.load(plan), chosen.round, chosen.last_k))
    frame = frame[frame["average"] == chosen.average]
    rows = [_row(plan, cell) for cell in results.cells(plan)]
    found: dict[tuple[Row, str], dict[int, float]] = {}
    for line in frame.to_dict("records"):
        by_seed = found.setdefault((_row_of(plan, line), line["protocol"]), {})
        by_seed[line["seed"]] = 100 * line["accuracy"]
    return Revision(
        name,
        plan,
        {cell: pd.Series(by_seed) for cell, by_seed in found.items()},
        {row: {(cell.key, cell.rounds) for cell in plan.cells if _row(plan, cell) == row} for row in rows},
        {
            row: _held(next(cell for cell in results.cells(plan) if _row(plan, cell) == row))
            for row in dict.fromkeys(rows)
        },
    )


def _row(plan: Plan, cell: Cell) -> Row:
    return cell.algorithm, results.label(results.point(plan, cell))


def _row_of(plan: Plan, found: dict[Any, Any]) -> Row:
    return str(found["algorithm"]), results.label({name: found[name] for name in plan.grid})


def _held(cell: Cell) -> dict[str, Any]:
    """The settings of a cell's run, but for its seed."""
    held = yaml.safe_load(cell.files.settings.read_text())
    return {name: value for name, value in flat(held).items() if name != "seed"} | {"federation.rounds": cell.rounds}


def _fetch(name: str, folder: Path) -> None:
    """Bring the plan of a revision, and what its table is made of, into a folder, by DVC's record of that revision."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCMError
    from pygit2 import GitError

    try:
        with Repo(".") as repo, repo.switch(name):  # also where the repository of git begins further up
            recorded, plan = repo.dvcfs, StudyFiles.of(PARAMS).plan
            if not recorded.exists(str(plan)):
                raise SettingsError(f"'{name}' records no results; run `dvc repro` there, and commit.")
            _get(recorded, name, plan, folder)
            with contextlib.chdir(folder):
                cells = Plan.read(plan).cells
            for cell in cells:
                for path in (cell.joined.marker, cell.joined.metrics, cell.files.settings):
                    if not (folder / path).exists():
                        _get(recorded, name, path, folder)
    except SCMError:
        raise SettingsError(
            f"'{name}' is no commit or experiment here; `git log` and `dvc exp list` show their names."
        ) from None
    except (DvcException, GitError, OSError) as error:
        raise SettingsError(f"'{name}' can't be read: {' '.join(str(error).split())}") from None


def _get(recorded: Any, name: str, path: Path, folder: Path) -> None:
    """Copy a file of a revision: from here, where it is the same, or from DVC's cache or remote."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    try:
        info = recorded.info(str(path))
        if path.is_file() and hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() == info.get("md5"):
            (folder / path).write_bytes(path.read_bytes())
        else:
            recorded.get_file(str(path), str(folder / path))
    except FileNotFoundError:
        raise ArtifactError(
            f"{path} of '{name}' is neither here nor in DVC's cache or remote; `dvc fetch --all-commits` may bring it."
        ) from None


# -- what is said of them ----------------------------------------------------------------------------------------------


def _table(revisions: Sequence[Revision]) -> str:
    base, *others = revisions
    rows = list(dict.fromkeys(row for revision in revisions for row in revision.settings))
    rows = [
        row for algorithm in dict.fromkeys(algorithm for algorithm, _ in rows) for row in rows if row[0] == algorithm
    ]
    asked = dict.fromkeys(name for revision in revisions for name in revision.plan.protocols)
    lines = []
    for row in rows:
        for protocol in asked:
            found = [revision.accuracies.get((row, protocol)) for revision in revisions]
            if all(accuracies is None for accuracies in found):
                continue
            line = {"algorithm": row[0], "point": row[1], "protocol": protocol}
            line |= {revision.name: _mean(part) for revision, part in zip(revisions, found, strict=True)}
            for revision, part in zip(others, found[1:], strict=True):
                same = row in base.made_of and base.made_of[row] == revision.made_of.get(row)
                line[f"{revision.name} − {base.name}"] = "same runs" if same else _told(found[0], part)
            lines.append(line)
    frame = pd.DataFrame(lines)
    if not frame["point"].any():
        frame = frame.drop(columns="point")
    sides = ["left" if name in ("algorithm", "point", "protocol") else "right" for name in frame.columns]
    report = base.plan.report
    caption = (
        f"Test accuracy (%) {tables.REPORTED[report.round].format(last_k=report.last_k)}, "
        f"{tables.AVERAGED[report.average]}; mean ± standard deviation over seeds.\n"
        f"Differences are {PAIRED}"
    )
    return f"{caption}\n\n{frame.to_markdown(index=False, disable_numparse=True, colalign=sides)}"


def _mean(accuracies: pd.Series[float] | None) -> str:
    if accuracies is None:
        return DASH
    return f"{accuracies.mean():.2f}" + (f" ± {accuracies.std():.2f}" if len(accuracies) > 1 else "")


def _told(one: pd.Series[float] | None, other: pd.Series[float] | None) -> str:
    found = None if one is None or other is None else difference(one, other)
    return DASH if found is None else found.told


def _settings(revisions: Sequence[Revision]) -> str:
    """The settings that differ between runs of the same row, and the studies' seeds."""
    rows = [row for row in revisions[0].settings if all(row in revision.settings for revision in revisions)]
    names = dict.fromkeys(name for revision in revisions for row in rows for name in revision.settings[row])
    lines: list[list[str]] = []
    for name in names:
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            values = tuple(str(revision.settings[row].get(name, DASH)) for revision in revisions)
            if len(set(values)) > 1:
                groups.setdefault(values, []).append(row)
        for values, concerned in groups.items():
            which = (
                "all" if len(concerned) == len(rows) else ", ".join(" ".join(filter(None, row)) for row in concerned)
            )
            lines.append([name, which, *values])
    seeds = [", ".join(map(str, revision.plan.seeds)) for revision in revisions]
    if len(set(seeds)) > 1:
        lines.append(["study.seeds", "all", *seeds])
    if not lines:
        return "No setting differs between the methods that all of them have."
    head = ["setting that differs", "of", *(revision.name for revision in revisions)]
    return pd.DataFrame(lines, columns=head).to_markdown(index=False, disable_numparse=True)
