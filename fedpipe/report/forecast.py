"""Forecasts the hours, disk space and traffic of a study from runs of the same kind on this machine.

Runs with the same algorithm, model, data set, batch size, precision and evaluation are of one kind (:class:`RunKind`).
Seconds of training grow with the trained samples, those of aggregation with the participants, and those of evaluation
with the evaluated rounds and the size of the data set. A forecast counts the runs of new kinds without an estimate.
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
from fedpipe.settings.execution import is_state_retained

RUNS_PER_KIND = 3  #: newest runs of each kind to average
#: Keys of `federation` on which the seconds per sample or the bytes of a state depend.
COST_KEYS = ("batch_size", "optimizer", "buffers", "dtype", "precision")


class RunKind(NamedTuple):
    """Digests of the settings on which the time per sample and the bytes of a state depend.

    Real numbers among the parameters of the algorithm may differ, such as FedProx's mu, and so may `evaluation.every`.
    """

    algorithm: str
    model: str
    dataset: str
    computation: str

    @classmethod
    def from_settings(cls, settings: RunSettings) -> RunKind:
        """Get the kind of a run from its settings."""
        algorithm = {key: value for key, value in settings.algorithm.items() if not isinstance(value, float)}
        federation = settings.federation
        computation = {
            "federation": {key: federation[key] for key in COST_KEYS},
            "has_clipping": federation["clip_norm"] is not None,
            "server": federation["server"]["optimizer"],
            "transforms": settings.transforms,
            "evaluation": settings.evaluation | {"every": None},
        }
        return cls(
            compute_json_digest(algorithm | {"code": None}),
            compute_json_digest(settings.model | {"code": None}),
            get_stored_dataset_path(settings.dataset).name,
            compute_json_digest(computation),
        )


class Rates(NamedTuple):
    """Seconds and bytes of a run, by the number with which they grow."""

    train: float  #: seconds per trained sample
    aggregate: float  #: seconds per participant and round
    evaluate: float  #: seconds per sample of the data set and evaluated round
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
            f"{format_bytes(self.traffic_bytes)}. The forecast is from earlier runs with the same algorithm, model, "
            f"data set, batch size, precision and evaluation (real-valued parameters of the algorithm may differ)."
            f"{unknown_note}"
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
        complete_rounds = min(len(run.files.list_complete_rounds()[1:]), run.rounds)  # a longer study may have more
        rounds = run.rounds - complete_rounds
        total_rounds += rounds
        run_rates = rates.get(RunKind.from_settings(settings))
        if not run_rates:
            continue
        seconds.append(_estimate_seconds(plan, run, complete_rounds, run_rates))
        stored_bytes += _estimate_stored_bytes(plan, run, run.rounds, run_rates)
        if complete_rounds:
            stored_bytes -= _estimate_stored_bytes(plan, run, complete_rounds, run_rates)
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


def _estimate_seconds(plan: NewPlan, run: PlannedRun, complete_rounds: int, rates: Rates) -> float:
    """Estimate the seconds of a run's remaining rounds."""
    settings = plan.run_settings[run.key]
    train_samples, all_samples = plan.sample_counts[run.partition]
    federation, every = settings.build_federation_settings(), settings.build_evaluation_settings().every
    samples_per_client = train_samples / federation.clients
    epochs = federation.count_epochs(round(samples_per_client))
    round_seconds = run.participants * (rates.train * samples_per_client * epochs + rates.aggregate)
    evaluations = run.rounds // every - complete_rounds // every
    return (run.rounds - complete_rounds) * round_seconds + evaluations * rates.evaluate * all_samples


def _estimate_stored_bytes(plan: NewPlan, run: PlannedRun, rounds: int, rates: Rates) -> float:
    """Estimate the bytes of all states that a run stores after some rounds."""
    clients = plan.run_settings[run.key].build_federation_settings().clients
    server_states, client_states = _count_stored_states(plan.keep_models, rounds, run.participants, clients)
    return server_states * rates.server + client_states * rates.client


@functools.cache
def _count_stored_states(keep_models: str | int, rounds: int, participants: int, clients: int) -> tuple[int, float]:
    """Count the states of the server, with that of round 0, and of clients that a run keeps after some rounds.

    The states of a round's participants stay until all of them have trained again before the last round. The number of
    such rounds is an expectation.
    """
    missed = 1 - participants / clients  # probability that a client does not participate in a round
    server_rounds, client_rounds = 1, 0.0
    for number in range(1, rounds + 1):
        if number >= rounds - 1 or is_state_retained(number, keep_models):
            server_rounds, client_rounds = server_rounds + 1, client_rounds + 1
        else:
            client_rounds += 1 - (1 - missed ** (rounds - 1 - number)) ** participants
    return server_rounds, client_rounds * participants


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
    train, aggregate, evaluate, server, client, sent, weights = zip(*kind_rates, strict=True)
    return Rates(
        *(fmean(train, weights), fmean(aggregate, weights), fmean(evaluate, weights)),
        *(fmean(server), fmean(client), fmean(sent)),
        sum(weights),
    )


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
    evaluations = [seconds["evaluate"] for seconds in times if "evaluate" in seconds]
    last = files.get_round_files(rounds)
    return Rates(
        train=sum(seconds["train"] for seconds in times) / trained_samples,
        aggregate=sum(seconds["aggregate"] for seconds in times) / sum(participants),
        evaluate=fmean(evaluations) / all_samples,
        server=float(last.server_state.stat().st_size),
        client=last.client_states.stat().st_size / participants[-1] if last.client_states.is_file() else 0.0,
        sent=fmean(table["bytes_down"].to_pylist()) + fmean(table["bytes_up"].to_pylist()),
        trained_samples=trained_samples,
    )


@functools.cache
def _count_train_and_all_samples(assignment: Path) -> tuple[int, int]:
    split = read_parquet(assignment, read_recorded_sha256(assignment))["split"].to_pylist()
    return split.count("train"), len(split)
