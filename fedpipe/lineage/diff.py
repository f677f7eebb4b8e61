"""Two runs side by side: which settings differ, and where their numbers part."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedpipe import artifacts
from fedpipe.artifacts import PARAMS, RESULTS, RunFiles, StudyFiles
from fedpipe.errors import ArtifactError, SettingsError, UserError
from fedpipe.plan import Settings
from fedpipe.planned import Plan
from fedpipe.report import results
from fedpipe.report.tables import DASH

SHOWN = 19  #: lines of runs where a key is unknown


def find(key: str) -> RunFiles:
    """The run with this key, or its beginning; ``ALGORITHM/KEY`` where several algorithms share it.

    Raises
    ------
    SettingsError
        There is none, or there are several.
    """
    label, _, start = key.rpartition("/")
    found = sorted(path.parent for path in (RESULTS / "runs").glob(f"{label or '*'}/{start}*/run.yaml"))
    if len(found) != 1:
        listed = f"several do: {', '.join(map(str, found))}." if found else _known()
        raise SettingsError(f"'{key}' should begin the key of one run; {listed}")
    return RunFiles(found[0])


def _known() -> str:
    """The end of a sentence about an unknown key: the runs of params.yaml, where they are planned and not too many."""
    try:
        lines = Plan.read(StudyFiles.of(PARAMS).plan).listed
    except UserError:
        return "`ls results/runs/*` lists the keys."
    more = [f"and {len(lines) - SHOWN} more, which `fedpipe plan --dry-run` lists"] if len(lines) > SHOWN else []
    return "\n  ".join([f"those of {PARAMS} are", *lines[:SHOWN], *more])


def diff(one: RunFiles, other: RunFiles) -> str:
    """The settings that differ, one a line; then by protocol the round in which the accuracies part."""
    lines = [f"{'':<36}{one.path.name:<24}{other.path.name}"]
    ours, theirs = (flat(dataclasses.asdict(Settings.read(run.settings))) for run in (one, other))
    for name in dict.fromkeys([*ours, *theirs]):
        pair = [str(settings.get(name, DASH)) for settings in (ours, theirs)]
        if pair[0] != pair[1]:
            lines.append(f"{name:<36}{pair[0]:<24}{pair[1]}")
    if len(lines) == 1:
        lines.append("The settings are the same.")
    return "\n".join([*lines, "", _states(one, other), *_accuracies(one, other)])


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    if not isinstance(value, dict):
        return {place: value}
    return {
        name: leaf
        for key, part in value.items()
        for name, leaf in flat(part, f"{place}.{key}" if place else str(key)).items()
    }


def _states(one: RunFiles, other: RunFiles) -> str:
    """In which round the server's states part; their hashes stay where the states were pruned."""
    number = 0
    while True:
        markers = [run.round(number).marker for run in (one, other)]
        if not all(artifacts.exists(marker) for marker in markers):
            return f"server's state: the same bits in all {number} rounds that both have, round 0 included"
        ours, theirs = (artifacts.read_json(marker)["sha256"]["server.pt"] for marker in markers)
        if ours != theirs:
            return f"server's state: differs from round {number} on"
        number += 1


def _accuracies(one: RunFiles, other: RunFiles) -> list[str]:
    """What the rounds say that were joined for the longest study of each run."""
    frames = []
    for files in (one, other):
        if not (joined := files.all_joined()):
            raise ArtifactError(f"{files.path}: no study's rounds of it are complete; type `fedpipe run` first.")
        frame = results.accuracies(artifacts.frame(artifacts.read_joined(joined[-1].metrics)))
        frames.append(frame[frame["average"] == "sample"].set_index(["protocol", "round"])["accuracy"])
    lines = []
    for protocol in dict.fromkeys(name for frame in frames for name in frame.index.get_level_values("protocol")):
        have = [protocol in frame.index.get_level_values("protocol") for frame in frames]
        if not all(have):
            lines.append(f"{protocol}: only {(one, other)[have.index(True)].path.name} has it")
            continue
        ours, theirs = (frame[protocol] for frame in frames)
        both = ours.index.intersection(theirs.index)
        if not len(both):
            lines.append(f"{protocol}: no round is measured in both")
            continue

        def told(number: int, ours: Any = ours, theirs: Any = theirs) -> str:
            return f"{100 * ours[number]:.2f} % and {100 * theirs[number]:.2f} % in round {number}"

        apart = both[(ours[both] != theirs[both]).to_numpy()]
        if not len(apart):
            lines.append(f"{protocol}: the same in all {len(both)} rounds that both measured")
        else:
            last = f"; {told(both[-1])}" if both[-1] != apart[0] else ""
            lines.append(f"{protocol}: first apart with {told(apart[0])}{last}")
    return lines
