"""Forecasts the hours, disk space and traffic of a study from runs of the same kind on this machine.

Runs with the same algorithm, model and data set are of one kind. Real numbers among the parameters of the algorithm may
differ, such as FedProx's mu. Seconds of training grow with the trained samples, and those of aggregation and evaluation
with the rounds and the size of the data set. A forecast counts the runs of new kinds without an estimate.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fedpipe.core.errors import UserError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import RESULTS, read_json, read_parquet, read_recorded_sha256
from fedpipe.core.storage.layout import RunFiles
from fedpipe.data.store import get_stored_dataset_path
from fedpipe.planning import search
from fedpipe.planning.plan import PlannedRun
from fedpipe.planning.planner import NewPlan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.report.words import format_bytes, format_duration

RUNS_PER_KIND = 3  #: newest runs of each kind to average


class RunKind(NamedTuple):
    """Digests of the settings on which the time per sample and the bytes of a state depend."""

    algorithm: str
    model: str
    dataset: str

    @classmethod
    def from_settings(cls, settings: RunSettings) -> RunKind:
        """Get the kind of a run from its settings."""
        algorithm = {key: value for key, value in settings.algorithm.items() if not isinstance(value, float)}
        digests = [compute_json_digest({**section, "code": None}) for section in (algorithm, settings.model)]
        return cls(digests[0], digests[1], get_stored_dataset_path(settings.dataset).name)


class Rates(NamedTuple):
    """Seconds per trained sample, seconds per sample of the data set and round, and bytes of a run."""

    train: float
    rest: float
    server: float  #: bytes of a server's state
    client: float  #: bytes of a participant's kept state
    sent: float  #: bytes that a participant receives and sends in a round
    trained_samples: float  #: trained samples in all rounds, as the weight of the run


@dataclass(frozen=True)
class Forecast:
    """Remaining runs of studies, with seconds, and bytes stored and sent, of those that have a forecast."""

    runs: int
    rounds: int  #: incomplete rounds of these runs
    known_runs: int  #: runs that have a forecast
    parallel_runs: int  #: runs that train at the same time, one per core of this machine
    seconds: float
    stored_bytes: float
    traffic_bytes: float
    is_upper_bound: bool = False  #: some runs are complete, and a search may need fewer others than assumed

    def __str__(self) -> str:
        unknown_runs = self.runs - self.known_runs
        unknown_note = f" The other {unknown_runs} have no such earlier runs." if unknown_runs else ""
        parallel_note = f"{self.parallel_runs} runs at the same time" if self.parallel_runs > 1 else "one run at a time"
        duration = f"{'at most about' if self.is_upper_bound else 'about'} {format_duration(self.seconds)}"
        return (
            f"{self.known_runs} of {self.runs} remaining runs would take {duration} on this machine "
            f"with {parallel_note}, store {format_bytes(self.stored_bytes)} and send "
            f"{format_bytes(self.traffic_bytes)}. The forecast is from earlier runs with the same algorithm, model and "
            f"data set (real-valued parameters of the algorithm may differ).{unknown_note}"
        )


def forecast_remaining_work(*plans: NewPlan) -> Forecast:
    """Forecast the incomplete runs of studies, one per core at the same time.

    Shared runs count once, and runs without available data are omitted. With `tune`, the draws with the fewest complete
    rounds are assumed to continue.
    """
    has_incomplete_search = any(plan.tuning and len(plan.read_rungs()) < len(plan.tuning.rungs) for plan in plans)
    plans = tuple(map(_assume_search_results, plans))
    remaining_runs: dict[Path, tuple[PlannedRun, NewPlan]] = {}
    for plan in plans:
        for run in plan.runs:
            is_included = len(plans) == 1 or str(run.path) not in plan.unavailable_runs
            if is_included and not run.merged_files.marker.is_file():
                remaining_runs[run.path] = max(
                    remaining_runs.get(run.path, (run, plan)), (run, plan), key=lambda pair: pair[0].rounds
                )
    rates = _load_mean_rates(
        {RunKind.from_settings(plan.run_settings[run.key]) for run, plan in remaining_runs.values()}
    )
    seconds, stored_bytes, traffic_bytes, total_rounds = [], 0.0, 0.0, 0
    for run, plan in remaining_runs.values():
        settings = plan.run_settings[run.key]
        rounds = max(run.rounds - len(run.files.list_complete_rounds()[1:]), 0)  # a longer study may have more
        total_rounds += rounds
        run_rates = rates.get(RunKind.from_settings(settings))
        if not run_rates:
            continue
        seconds.append(rounds * _estimate_round_seconds(plan, run, run_rates))
        clients = settings.build_federation_settings().clients
        states = _count_stored_states(plan.keep_models, run.rounds)
        if rounds < run.rounds:
            states -= _count_stored_states(plan.keep_models, run.rounds - rounds)
            clients = 0  # those of clients that have not trained are counted already
        stored_bytes += states * run_rates.server + (states * run.participants + clients) * run_rates.client
        traffic_bytes += rounds * run.participants * run_rates.sent
    parallel_runs = max(min(count_available_cores(), len(seconds)), 1)
    return Forecast(
        len(remaining_runs),
        total_rounds,
        len(seconds),
        parallel_runs,
        max([sum(seconds) / parallel_runs, *seconds], default=0.0),
        stored_bytes,
        traffic_bytes,
        has_incomplete_search and len(remaining_runs) < len({run.path for plan in plans for run in plan.runs}),
    )


def count_available_cores() -> int:
    """Number of cores that this process may use, as Snakemake counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _assume_search_results(plan: NewPlan) -> NewPlan:
    """Add the draws of `tune` with the rounds that they may need, and the runs of winners."""
    rungs, winners = search.assume_search_results(plan, plan.run_settings)
    return dataclasses.replace(
        plan.add_search_results(has_draws=True, rungs=rungs), run_settings=plan.run_settings | winners
    )


def _estimate_round_seconds(plan: NewPlan, run: PlannedRun, rates: Rates) -> float:
    train_samples, all_samples = plan.sample_counts[run.partition]
    federation = plan.run_settings[run.key].build_federation_settings()
    epochs = federation.count_epochs(round(train_samples / federation.clients))
    return rates.train * train_samples * run.participants / federation.clients * epochs + rates.rest * all_samples


def _count_stored_states(keep_models: str | int, rounds: int) -> int:
    """Count the rounds whose states a run with this number of rounds keeps."""
    if isinstance(keep_models, int):
        return rounds // keep_models + 2
    return rounds if keep_models == "all" else 2


def _load_mean_rates(requested_kinds: set[RunKind]) -> dict[RunKind, Rates]:
    rates_by_kind: dict[RunKind, list[Rates]] = {}
    markers = [path for path in RESULTS.glob("runs/*/*/joined/*/joined.json") if path.is_file()]
    for marker in sorted(markers, key=lambda path: path.stat().st_mtime, reverse=True):
        if all(len(rates_by_kind.get(kind, ())) >= RUNS_PER_KIND for kind in requested_kinds):
            break
        with suppress(UserError, OSError, LookupError, TypeError, ValueError, ArithmeticError):
            files = RunFiles(marker.parent.parent.parent)
            settings = RunSettings.read_unchecked(files.settings)
            kind = RunKind.from_settings(settings)
            if kind in requested_kinds and len(rates_by_kind.get(kind, ())) < RUNS_PER_KIND:
                rates = _compute_run_rates(files, int(marker.parent.name), settings)
                rates_by_kind.setdefault(kind, []).append(rates)
    return {kind: _average_rates(kind_rates) for kind, kind_rates in rates_by_kind.items()}


def _average_rates(kind_rates: list[Rates]) -> Rates:
    """Average the rates of several runs: seconds weighted by trained samples, and bytes."""
    train, rest, server, client, sent, weights = zip(*kind_rates, strict=True)
    return Rates(fmean(train, weights), fmean(rest, weights), fmean(server), fmean(client), fmean(sent), sum(weights))


def _compute_run_rates(files: RunFiles, rounds: int, settings: RunSettings) -> Rates:
    merged_files = files.get_merged_files(rounds)
    times = read_json(merged_files.times)["rounds"]
    table = layout.read_merged_table(merged_files.rounds)
    participants = table["participants"].to_pylist()
    train_samples, all_samples = _count_train_and_all_samples(
        layout.get_assignment_path(compute_json_digest(settings.partition_settings))
    )
    federation = settings.build_federation_settings()
    participation_sum = sum(participants) / federation.clients
    trained_samples = (
        train_samples * participation_sum * federation.count_epochs(round(train_samples / federation.clients))
    )
    last = files.get_round_files(rounds)
    return Rates(
        train=sum(seconds["train"] for seconds in times) / trained_samples,
        rest=sum(seconds["aggregate"] + seconds.get("evaluate", 0) for seconds in times) / rounds / all_samples,
        server=float(last.server_state.stat().st_size),
        client=last.client_states.stat().st_size / participants[-1] if last.client_states.is_file() else 0.0,
        sent=fmean(table["bytes_down"].to_pylist()) + fmean(table["bytes_up"].to_pylist()),
        trained_samples=trained_samples,
    )


@functools.cache
def _count_train_and_all_samples(assignment: Path) -> tuple[int, int]:
    split = read_parquet(assignment, read_recorded_sha256(assignment))["split"].to_pylist()
    return split.count("train"), len(split)
