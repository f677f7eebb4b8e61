"""Verifies results: compares files with their recorded hashes, and repeated rounds with their recorded bits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedpipe.core.components import code_digest
from fedpipe.core.errors import UserError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import archive, layout
from fedpipe.core.storage.archive import RESTORE_ADVICE
from fedpipe.core.storage.files import (
    compute_file_sha256,
    find_file_or_pack,
    is_intact,
    is_same_table,
    is_stored,
    read_json,
    read_parquet,
    read_recorded_sha256,
)
from fedpipe.core.storage.layout import RunFiles
from fedpipe.data import store
from fedpipe.engine import collect, replay
from fedpipe.engine.run import Run
from fedpipe.engine.stack.stack import parse_stack_width
from fedpipe.planning import freshness, partition
from fedpipe.planning.code_changes import has_other_shared_code, read_round_environments
from fedpipe.planning.plan import Plan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.report import contents, results, tuning
from fedpipe.report.data import StudyData
from fedpipe.settings.execution import Execution, is_state_retained

#: Name of each kind of compared items in the summary.
SUBJECT_NAMES = {
    "run": "run",
    "partition": "partition",
    "file": "file",
    "round": "repeated round",
    "stored": "recomputed round",
}


class VerificationResult(NamedTuple):
    """The verdict about a run, a partition, a file or a repeated round."""

    message: str
    is_ok: bool
    subject: str = ""  #: kind of the compared items, a key of `SUBJECT_NAMES`
    number: int = 1  #: number of items
    note: str = ""  #: a reservation, which the summary repeats


def verify_study(plan: Plan) -> VerificationResult:
    """Recompute a study's plan and all its numbers and compare them. Check that its diagnostics are complete."""
    study_files = plan.study_files
    current = freshness.compare_with_new_plan(plan)
    changed_files = current.changed_files
    try:
        if current.error and not changed_files:
            raise current.error
        if current.state != "fresh" and not changed_files:
            command = plan.run_command
            message = f"{study_files.plan}: differs from the plan of {plan.params}. Delete it and type `{command}`."
            return VerificationResult(message, False)
        for cell in results.sort_cells(plan):
            cell.merged_files.check_hashes()
        for diagnostic in plan.diagnostics:
            read_parquet(diagnostic.files.table, read_recorded_sha256(diagnostic.files.table))
        plan.require_finished_search()
        report_files = contents.build_report_files(StudyData(plan)) | tuning.build_rung_files(plan)
    except UserError as error:
        return VerificationResult(f"{study_files.path}: {error}", False)
    if outdated_files := contents.find_outdated_files(report_files):
        outdated_list = ", ".join(map(str, outdated_files))
        advice = f"Delete these files and type `{plan.run_command}`."
        return VerificationResult(
            f"{study_files.path}: differs from the runs of {plan.params}: {outdated_list}. {advice}", False
        )
    more_files = f" (and {len(changed_files) - 1} more)" if len(changed_files) > 1 else ""
    note = f"{changed_files[0]}{more_files} has changed since the results were computed" if changed_files else ""
    message = f"{study_files.path}: {len(report_files)} files agree with the runs of {plan.params}"
    return VerificationResult(". ".join(filter(None, [message, note])), True, "file", len(report_files), note)


def summarize_verification(verification_results: list[VerificationResult]) -> str:
    """Summarize all verdicts in one line."""
    if not all(result.is_ok for result in verification_results):
        return "Verification failed. See the lines above."
    counts = Counter[str]()
    for result in verification_results:
        counts[result.subject] += result.number
    count_texts = [
        f"{counts[subject]:,} {name if counts[subject] == 1 else f'{name}s'}"
        for subject, name in SUBJECT_NAMES.items()
        if counts[subject]
    ]
    notes = dict.fromkeys(result.note for result in verification_results if result.note)
    return ". ".join([f"All verified: {', '.join(count_texts)}", *notes])


def verify_run_files(files: RunFiles, keep_models: str | int = "last") -> VerificationResult:
    """Hash every file of a run, its partition and its data set, and merge its rounds again.

    States that `artifacts.keep_models` has pruned may be missing. Their hashes remain recorded. If a state is missing
    that ``keep_models`` keeps, the result is a note, because the study may have had another value before.
    """
    damaged_files: dict[str, Path] = {}  #: differing files, and what to delete
    missing_states: list[int] = []  #: round of each state that is not stored
    count = 0
    settings = RunSettings.read(files.settings)
    dataset_path = store.get_stored_dataset_path(settings.dataset)
    key = compute_json_digest(settings.partition_settings)
    assignment_path, heterogeneity_path = layout.get_assignment_path(key), layout.get_heterogeneity_path(key)
    for path, path_to_delete in (
        (dataset_path, dataset_path),
        (assignment_path, assignment_path),
        (heterogeneity_path, assignment_path),
    ):
        count += 1
        if not is_intact(path, read_recorded_sha256(path, path_to_delete.with_suffix(".json").name)):
            damaged_files[str(path)] = path_to_delete
    if not archive.is_pack_intact(archive_path := archive.get_pack_path(files.rounds_folder)):
        damaged_files[str(archive_path)] = files.path
    rounds = files.list_complete_rounds()
    for number in rounds if not damaged_files else ():
        folder = files.get_round_files(number)
        for name, sha256 in layout.read_round_hashes(folder, folder.marker).items():
            path = folder.path / name
            if path in (folder.server_state, folder.client_states) and not path.exists():
                missing_states.append(number)
                continue
            count += 1
            if not is_intact(path, sha256):
                damaged_files[str(find_file_or_pack(path))] = files.path
    if not damaged_files:
        damaged_files |= _find_wrong_segment_manifests(files)
        damaged_files |= _find_wrong_merged_files(files)
    if damaged_files:
        folders_to_delete = ", ".join(map(str, dict.fromkeys(damaged_files.values())))
        return VerificationResult(
            f"{files.path}: differs from the record: {', '.join(damaged_files)}. Delete {folders_to_delete}. Then "
            f"{RESTORE_ADVICE}.",
            False,
        )
    if not rounds:
        return VerificationResult(
            f"{files.path} has no complete round. Run its study (`fedpipe run`) to compute its rounds.", False
        )
    message = f"{files.path}: {count} files of {len(rounds)} rounds are as recorded"
    retained_rounds = {0, *rounds[-2:], *(number for number in rounds if is_state_retained(number, keep_models))}
    lost_states = [number for number in missing_states if number in retained_rounds]
    if pruned_count := len(missing_states) - len(lost_states):
        message += f", pruned states: {pruned_count} (artifacts.keep_models)"
    if not lost_states:
        return VerificationResult(message, True, "run")
    first, *others = dict.fromkeys(lost_states)
    more_rounds = f" (and {len(others)} more)" if others else ""
    message += (
        f". artifacts.keep_models keeps the states of round {first}{more_rounds}, but they are missing. To compute "
        f"them again, delete {files.path} and run its study (`fedpipe run`)"
    )
    return VerificationResult(message, True, "run", note="States are missing, see above")


def verify_partition(key: str) -> VerificationResult:
    """Recompute a partition with the current code and compare it."""
    path, is_same = layout.get_assignment_path(key), partition.is_partition_reproducible(key)
    advice = f"Restore the code that computed it, or delete {path.parent} and the runs that use it."
    message = "recomputed with the same samples" if is_same else f"recomputed, but clients have other samples. {advice}"
    return VerificationResult(f"{path}: {message}", is_same, "partition")


def replay_random_round(files: RunFiles, rng: random.Random) -> VerificationResult:
    """Repeat one round, drawn from those whose previous states exist, and compare all bits."""
    candidates = [
        number
        for number in files.list_complete_rounds()
        if number > 0 and files.get_round_files(number - 1).server_state.exists()
    ]
    rng.shuffle(candidates)
    for number in candidates:
        first_environment = read_round_environments(files.get_round_files(number))[0]
        run = Run(files, Execution(stack=parse_stack_width(first_environment.get("executor", ""))))
        comparison = replay.replay_round(run, number)
        if comparison is not None:  # None: a client's previous state was pruned
            return _make_replay_result(files, comparison, run.federation.compute_dtype)
    return VerificationResult(
        f"{files.path}: no round can be repeated, because no state before a round is stored", True
    )


def _make_replay_result(files: RunFiles, comparison: replay.Comparison, compute_dtype: str) -> VerificationResult:
    """Judge a repeated round: its bits are equal, or its numbers are close on a different device."""
    reason = ""
    if comparison.differing_files:
        recorded_environment = comparison.made_by[0]
        environment_changes = [
            f"{name} {recorded_environment.get(name)} (now {current_value})"
            for name, current_value in comparison.replayed_by.items()
            if current_value != recorded_environment.get(name)
        ]
        reason = f". Computed with {', '.join(environment_changes)}" if environment_changes else ""
        reason += ". The difference is within rounding" if comparison.is_reproduced(compute_dtype) else ""
    return VerificationResult(
        f"{files.path}: round {comparison.round} repeated: {comparison.describe_difference()}{reason}",
        comparison.is_reproduced(compute_dtype),
        "round",
    )


def verify_runs(
    paths: list[Path], rerun_count: int, rng: random.Random, keep_models: str | int = "last"
) -> Iterator[VerificationResult]:
    """Hash all runs, recompute their partitions, and repeat a round of some of them.

    Rounds are repeated for all runs of other shared code, and for the given number of random other runs.
    """
    intact_paths: list[Path] = []
    for path in paths:
        try:
            result = verify_run_files(RunFiles(path), keep_models)
        except UserError as error:
            result = VerificationResult(f"{path}: {error}", False)
        if result.is_ok:
            intact_paths.append(path)
        yield result
    for key in dict.fromkeys(
        compute_json_digest(RunSettings.read(RunFiles(path).settings).partition_settings) for path in intact_paths
    ):
        try:
            yield verify_partition(key)
        except UserError as error:
            yield VerificationResult(f"{layout.get_assignment_path(key)}: can't be recomputed. {error}", True)
    other_code_paths = [
        path for path in intact_paths if has_other_shared_code(RunFiles(path), code_digest.compute_shared_code_digest())
    ]
    same_code_paths = [path for path in intact_paths if path not in other_code_paths]
    for path in [
        *(other_code_paths if rerun_count else []),
        *rng.sample(same_code_paths, min(rerun_count, len(same_code_paths))),
    ]:
        try:
            yield replay_random_round(RunFiles(path), rng)
        except UserError as error:
            yield VerificationResult(f"{path}: {error}", False)


def _find_wrong_segment_manifests(files: RunFiles) -> dict[str, Path]:
    """Find segment manifests that differ from the existing rounds, which you should delete."""
    wrong_manifests = {}
    for path in files.list_segment_manifests():
        markers = {str(number): files.get_round_files(number).marker for number in range(int(path.stem) + 1)}
        rounds = {number: compute_file_sha256(marker) for number, marker in markers.items() if is_stored(marker)}
        if read_json(path) != {"rounds": rounds}:
            wrong_manifests[str(path)] = path
    return wrong_manifests


def _find_wrong_merged_files(files: RunFiles) -> dict[str, Path]:
    """Find merged files that differ from the rounds, with their folders, which you should delete."""
    wrong_files: dict[str, Path] = {}
    for merged_files in files.list_merged_files():
        merged_rounds, times = collect.merge_rounds(files, merged_files.round_count), merged_files.times
        tables = {
            merged_files.metrics: merged_rounds.metrics,
            merged_files.matrices: merged_rounds.matrices,
            merged_files.rounds: merged_rounds.rounds,
        }
        is_same_by_path = {
            path: is_intact(path, merged_files.read_recorded_sha256(path)) and is_same_table(read_parquet(path), table)
            for path, table in tables.items()
        }
        is_same_by_path[times] = (
            is_intact(times, merged_files.read_recorded_sha256(times)) and read_json(times) == merged_rounds.times
        )
        wrong_files |= {str(path): merged_files.path for path, is_same in is_same_by_path.items() if not is_same}
    return wrong_files
