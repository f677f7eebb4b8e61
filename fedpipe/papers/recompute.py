"""Recomputes a round of a stored run: trains the run again up to this round, and compares its accuracies."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedpipe.core.components import code_digest
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import files, layout
from fedpipe.core.storage.layout import RunFiles
from fedpipe.data import store
from fedpipe.engine import collect
from fedpipe.engine.replay import ENVIRONMENT_KEYS
from fedpipe.engine.run import Run
from fedpipe.engine.stack.stack import parse_stack_width
from fedpipe.papers import stored_runs
from fedpipe.papers.stored_runs import RunStore, StoredRun
from fedpipe.planning import download, partition, planner, search
from fedpipe.planning.planner import NewPlan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.report import contrasts, results

MAX_STANDARD_ERRORS = 3  #: of the difference of two accuracies on separate test sets, for other code or devices


@dataclass(frozen=True)
class DrawnRound:
    """A round of a stored run of a study."""

    study: Path
    run: StoredRun
    round: int

    def __str__(self) -> str:
        run = self.run
        point = f" ({run.point})" if run.point else ""
        return f"{self.study}, {run.algorithm}{point}, seed {run.seed}, {run.key}, round {self.round}"


@dataclass(frozen=True)
class Recomputation:
    """The recorded and the recomputed accuracies of a round by protocol, and what has changed in between."""

    drawn_round: DrawnRound
    recorded: Mapping[str, float]
    recomputed: Mapping[str, float]
    changes: tuple[str, ...]  #: components whose code differs, and differences of the environment

    @property
    def largest_difference(self) -> float:
        """The largest difference in percentage points."""
        return max(100 * abs(self.recomputed[protocol] - value) for protocol, value in self.recorded.items())

    @property
    def is_reproduced(self) -> bool:
        """Whether all stored digits agree. After changes, whether the difference may be chance."""
        if not self.changes:
            return self.largest_difference == 0
        return all(
            100 * abs(self.recomputed[protocol] - value) <= self._get_tolerance(protocol)
            for protocol, value in self.recorded.items()
        )

    def _get_tolerance(self, protocol: str) -> float:
        """The tolerance in percentage points: some standard errors of a difference."""
        mean = 50 * (self.recorded[protocol] + self.recomputed[protocol])
        test_samples = self.drawn_round.run.count_test_samples(protocol)
        return MAX_STANDARD_ERRORS * 2**0.5 * contrasts.compute_sampling_error(mean, test_samples)

    @property
    def message(self) -> str:
        """The result in words."""
        changes = f". Changed since then: {', '.join(self.changes)}" if self.changes else ""
        if not self.largest_difference:
            names = ", ".join(self.recorded)
            return f"{self.drawn_round}: recomputed with the same accuracies ({names}){changes}"
        texts = [
            f"{protocol} {100 * value:.2f} (now {100 * self.recomputed[protocol]:.2f})"
            for protocol, value in self.recorded.items()
        ]
        judgment = "The difference may be chance" if self.is_reproduced else "The difference is not chance"
        cause = changes or ", although code, device and libraries are the same"
        note = f". {judgment}" if self.changes else ""
        return f"{self.drawn_round}: recomputed with other accuracies: {', '.join(texts)}{cause}{note}"


def draw_random_rounds(studies: list[Path], preset: str, count: int, rng: random.Random) -> list[DrawnRound]:
    """Draw stored runs of these studies at a preset, and an evaluated round of each.

    Raises a SettingsError if there is no stored run, and an ArtifactError if a store is damaged.
    """
    all_runs = [(study, run) for study in studies for run in RunStore.read(study).runs]
    runs = [(study, run) for study, run in all_runs if run.preset == preset]
    if not runs:
        names, presets = ", ".join(map(str, studies)), sorted({run.preset for _, run in all_runs})
        advice = f"Use --preset {' or '.join(presets)}." if presets else "Type `fedpipe store` first."
        raise SettingsError(f"--stored: {names}: no stored run at preset {preset}. {advice}")
    drawn_runs = rng.sample(runs, min(count, len(runs)))
    return [DrawnRound(study, run, rng.choice(run.accuracies_by_round["round"].tolist())) for study, run in drawn_runs]


def recompute_round(drawn_round: DrawnRound) -> Recomputation:
    """Train a run again with today's code, in a temporary folder, and compare the accuracies of a round.

    Missing data and partitions are stored in `results`, as `fedpipe run` does.

    Raises an ArtifactError if the study now has other settings, and a SettingsError if it can't be planned or data are
    missing.
    """
    stored_run = drawn_round.run
    plan = planner.make_plan(drawn_round.study, stored_run.preset)
    settings = _find_run_settings(plan, stored_run)
    if settings is None:
        commit = stored_run.commit.partition("-")[0] or "COMMIT"
        raise ArtifactError(
            f"{drawn_round}: can't be recomputed, because {drawn_round.study} has other settings now. Type "
            f"`git checkout {commit}` to use the study and the code of that run."
        )
    planner.write_plan(plan)
    dataset_path = store.get_stored_dataset_path(settings.dataset)
    if not dataset_path.is_file():
        download.download_dataset(dataset_path.stem)
    partition_key = compute_json_digest(settings.partition_settings)
    if not layout.get_assignment_path(partition_key).is_file():
        partition.partition_dataset(partition_key)
    with tempfile.TemporaryDirectory(prefix="fedpipe-stored-") as folder:
        run_files = RunFiles(Path(folder) / settings.key)
        files.write_bytes(run_files.settings, settings.to_yaml().encode())
        stack_width = parse_stack_width(stored_run.executor)
        execution = plan.execution.model_copy(update={"stack": stack_width, "callbacks": ()})
        run = Run(run_files, execution, keep_models="last")
        for _ in run.run_segment(drawn_round.round):
            pass
        metrics = files.table_to_frame(collect.merge_rounds(run_files, drawn_round.round).metrics)
    environment, frame = run.get_environment(), results.compute_accuracies(metrics)
    frame = frame[frame["average"] == stored_run.curves[0].average]
    current_digests = stored_runs.get_code_and_sample_digests(vars(settings), code_digest.compute_shared_code_digest())
    return Recomputation(
        drawn_round,
        _select_accuracies_of_round(stored_run.accuracies_by_round, drawn_round.round),
        _select_accuracies_of_round(frame, drawn_round.round),
        (
            *stored_run.list_code_and_sample_changes(current_digests),
            *(
                f"{name} {getattr(stored_run, name)} (now {environment[name]})"
                for name in ENVIRONMENT_KEYS
                if getattr(stored_run, name) != environment[name]
            ),
        ),
    )


def _find_run_settings(plan: NewPlan, stored_run: StoredRun) -> RunSettings | None:
    """Find the settings of a stored run. Any draw of `tune` may have won, because the rungs may not be here."""
    candidates = [plan.run_settings[run.key] for run in plan.runs if run.algorithm == stored_run.algorithm]
    tuning = plan.tuning.replace_tpe_draws(plan.read_rungs()) if plan.tuning else None
    for planned_search in tuning.searches if tuning else ():
        if planned_search.algorithm == stored_run.algorithm:
            for draw in planned_search.draws:
                candidates += search.list_winner_settings(
                    plan, planned_search, draw.draw, lambda files: plan.run_settings[files.path.name]
                )
    for settings in candidates:
        if stored_runs.compute_settings_digest(vars(settings)) == stored_run.settings:
            return settings
    return None


def _select_accuracies_of_round(accuracies: pd.DataFrame, round_number: int) -> dict[str, float]:
    """The accuracies of a round by protocol, in the stored digits."""
    rows = accuracies[accuracies["round"] == round_number]
    return {
        protocol: float(stored_runs.format_stored_accuracy(value))
        for protocol, value in zip(rows["protocol"], rows["accuracy"], strict=True)
    }
