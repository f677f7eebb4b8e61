"""Compares two runs: settings that differ, and the first round with different numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedpipe.core.errors import ArtifactError, SettingsError, UserError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import RESULTS, is_stored, make_unreadable_file_error
from fedpipe.core.storage.layout import PARAMS, RoundFiles, RunFiles, StudyFiles
from fedpipe.core.yaml_text import flatten_mapping
from fedpipe.planning.plan import Plan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.report import results
from fedpipe.report.words import DASH

MAX_LISTED_RUNS = 19  #: maximum number of runs listed for an unknown key


def find_run(key: str) -> RunFiles:
    """Find the run with this key, prefix or path, or ``ALGORITHM/KEY`` if several algorithms share it.

    Raises a SettingsError if no run, or several runs, have such a key.
    """
    label, start = ["*", *key.rstrip("/").split("/")][-2:]
    run_folders = sorted(path.parent for path in (RESULTS / "runs").glob(f"{label or '*'}/{start}*/run.yaml"))
    if len(run_folders) != 1:
        if run_folders:
            folder_list = ", ".join(map(str, run_folders))
            raise SettingsError(f"'{key}' is the beginning of several keys: {folder_list}. Type more of the key.")
        raise SettingsError(f"'{key}' is not the beginning of a run's key. {_describe_planned_runs()}")
    return RunFiles(run_folders[0])


def _describe_planned_runs() -> str:
    """Advice for an unknown key: the planned runs of params.yaml, if there are few."""
    try:
        lines = Plan.read(StudyFiles.from_params(PARAMS).plan).run_descriptions
    except UserError:
        return "Type `ls results/runs/*` to list the keys."
    remaining_note = (
        [f"and {len(lines) - MAX_LISTED_RUNS} more (type `fedpipe plan --dry-run` to list them)"]
        if len(lines) > MAX_LISTED_RUNS
        else []
    )
    return "\n  ".join([f"The runs of {PARAMS} are:", *lines[:MAX_LISTED_RUNS], *remaining_note])


def diff_runs(first: RunFiles, second: RunFiles) -> str:
    """Describe the settings that differ, and by protocol the first round with different accuracies."""
    lines = [f"{'':<35} {first.path.name:<23} {second.path.name}"]
    settings = [flatten_mapping(dataclasses.asdict(RunSettings.read(run.settings))) for run in (first, second)]
    for name in dict.fromkeys([*settings[0], *settings[1]]):
        first_value, second_value = (str(run_settings.get(name, DASH)) for run_settings in settings)
        if first_value != second_value:
            lines.append(f"{name:<35} {first_value:<23} {second_value}")
    if len(lines) == 1:
        lines.append("The settings are the same.")
    return "\n".join([*lines, "", _describe_first_state_difference(first, second), *_compare_accuracies(first, second)])


def _describe_first_state_difference(first: RunFiles, second: RunFiles) -> str:
    """Find the first round with different server states, from their recorded hashes."""
    number = 0
    while True:
        rounds = [run.get_round_files(number) for run in (first, second)]
        if not all(is_stored(files.marker) for files in rounds):
            return f"server state: the same bits in all {number} rounds that both runs contain, including round 0"
        first_sha256, second_sha256 = map(_read_server_state_sha256, rounds)
        if first_sha256 != second_sha256:
            return f"server state: differs from round {number} on"
        number += 1


def _read_server_state_sha256(files: RoundFiles) -> str:
    try:
        return layout.read_round_hashes(files, files.marker)[files.server_state.name]
    except KeyError:
        raise make_unreadable_file_error(files.marker, "the SHA-256 of the server state is missing") from None


def _compare_accuracies(first: RunFiles, second: RunFiles) -> list[str]:
    """Compare the accuracies in the merged files of each run's longest study."""
    frames = []
    for files in (first, second):
        if not (merged_files := files.list_merged_files()):
            raise ArtifactError(f"{files.path}: the run has no complete results. Run its study (`fedpipe run`) first.")
        frame = results.compute_accuracies(results.read_merged_frame(merged_files[-1].metrics))
        frames.append(frame[frame["average"] == "sample"].set_index(["protocol", "round"])["accuracy"])
    lines = []
    for protocol in dict.fromkeys(name for frame in frames for name in frame.index.get_level_values("protocol")):
        has_protocol = [protocol in frame.index.get_level_values("protocol") for frame in frames]
        if all(has_protocol):
            lines.append(f"{protocol}: {_describe_first_accuracy_difference(*(frame[protocol] for frame in frames))}")
        else:
            lines.append(f"{protocol}: only {(first, second)[has_protocol.index(True)].path.name} measures it")
    return lines


def _describe_first_accuracy_difference(first: Any, second: Any) -> str:
    """Describe the first round with different accuracies, which are series by round."""
    common_rounds = first.index.intersection(second.index)
    if not len(common_rounds):
        return "the runs measure it in different rounds"

    def describe_round(number: int) -> str:
        return f"{100 * first[number]:.2f} % and {100 * second[number]:.2f} % in round {number}"

    differing_rounds = common_rounds[(first[common_rounds] != second[common_rounds]).to_numpy()]
    if not len(differing_rounds):
        return f"the same in all {len(common_rounds)} rounds that both runs measure"
    first_round, last_round = differing_rounds[0], common_rounds[-1]
    end = f", then {describe_round(last_round)}" if last_round != first_round else ""
    return f"first differs with {describe_round(first_round)}{end}"
