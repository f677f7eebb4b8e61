"""What a study will take: hours, disk and traffic, by what runs of the same kind took on this machine.

Runs are of one kind where algorithm, model and data set have the same names. Seconds of training grow with the samples
that are trained on, those of aggregation and evaluation with rounds and with the size of the data set. A forecast
guesses nothing for a kind of which no run was made here; `hours_a_round`, for the papers' pages, takes the nearest
kind.
"""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from fedpipe import artifacts
from fedpipe.artifacts import RESULTS, RunFiles
from fedpipe.errors import ArtifactError
from fedpipe.plan import NewPlan, Settings, digest
from fedpipe.planned import PlannedRun
from fedpipe.report.words import duration, size

DAY = 86400  #: seconds: a longer study is not started unasked
RUNS = 3  #: of each kind, the newest, whose means are taken
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a study may have a thousand runs


class Kind(NamedTuple):
    """What runs that take as long for a sample have in common."""

    algorithm: str
    model: str
    dataset: str

    @classmethod
    def of(cls, settings: Settings) -> Kind:
        """The kind of a run by its settings."""
        return cls(*(getattr(settings, section)["name"] for section in cls._fields))

    @property
    def nearest(self) -> list[Kind]:
        """First this kind, then that of other data, then other algorithms of this model; an empty name is any."""
        return [self, self._replace(dataset=""), self._replace(algorithm=""), Kind("", self.model, "")]


@dataclass(frozen=True)
class Rates:
    """What a run took: seconds for each sample that is trained on, and for each in the data set in a round; bytes."""

    train: float
    rest: float
    server: float  #: bytes of a server's state
    client: float  #: bytes of what a participant keeps
    sent: float  #: bytes that a participant receives and sends in a round
    trained: float  #: how many samples it trained on, in all its rounds: short runs say little


@dataclass(frozen=True)
class Forecast:
    """What is left of studies: runs, of which so many are ``known`` by their kind; seconds, bytes kept and sent."""

    runs: int
    rounds: int  #: of all these runs, that are not complete
    known: int
    seconds: float
    kept: float
    sent: float

    def __str__(self) -> str:
        others = self.runs - self.known
        rest = f"; nothing like the other {others} was run here" if others else ""
        bytes_ = f"{size(self.kept)} of artifacts, and send {size(self.sent)}"
        return (
            f"{self.known} of {self.runs} runs that are left would take about {duration(self.seconds)} on this "
            f"machine, {bytes_}, as runs of their kind did here{rest}."
        )


def forecast(*plans: NewPlan, cores: int | None = None) -> Forecast:
    """What the runs of studies will take that are not complete, with so many of them at once as there are cores.

    Of several studies, runs that they share count once, and those whose data are not here, which are left out, never.
    """
    left: dict[Path, tuple[PlannedRun, NewPlan]] = {}
    for plan in plans:
        for run in plan.runs:
            taken = len(plans) == 1 or str(run.path) not in plan.absent
            if taken and not run.joined.marker.is_file():
                left[run.path] = max(left.get(run.path, (run, plan)), (run, plan), key=lambda pair: pair[0].rounds)
    rates = _measured({Kind.of(plan.settings[run.key]) for run, plan in left.values()})
    seconds, kept, sent, total = [], 0.0, 0.0, 0
    for run, plan in left.values():
        settings = plan.settings[run.key]
        rounds = max(run.rounds - len(run.files.complete()[1:]), 0)  # a longer study may have made more
        total += rounds
        found = rates.get(Kind.of(settings))
        if not found:
            continue
        seconds.append(rounds * _round(plan, run, found))
        states, clients = _states(plan.keep_models, run), settings.build_federation().clients
        kept += states * found.server + (states * run.participants + clients) * found.client
        sent += rounds * run.participants * found.sent
    at_once = max(min(cores or os.cpu_count() or 1, len(seconds)), 1)
    return Forecast(len(left), total, len(seconds), max([sum(seconds) / at_once, *seconds], default=0.0), kept, sent)


def hours_a_round(plan: NewPlan) -> dict[str, float]:
    """About how many hours a round of each run takes, by its key, as runs of the nearest kind did; others are left out.

    Where only short runs on few samples lie here, their rates are high, and so is what they foretell.
    """
    known: dict[Kind, list[Rates]] = {}
    for kind, found in _measured(None).items():
        for near in kind.nearest:
            known.setdefault(near, []).append(found)
    told = {}
    for run in plan.runs:
        rates = next((known[near] for near in Kind.of(plan.settings[run.key]).nearest if near in known), None)
        if rates:
            told[run.key] = _round(plan, run, _mean(rates)) / 3600
    return told


def _round(plan: NewPlan, run: PlannedRun, rates: Rates) -> float:
    """Seconds of a round at these rates."""
    train, whole = plan.samples[run.partition]
    federation = plan.settings[run.key].build_federation()
    epochs = federation.epochs(round(train / federation.clients))
    return rates.train * train * run.participants / federation.clients * epochs + rates.rest * whole


def _states(keep_models: str | int, run: PlannedRun) -> int:
    """How many rounds' states a run keeps."""
    if isinstance(keep_models, int):
        return run.rounds // keep_models + 2
    return run.rounds if keep_models == "all" else 2


def _measured(wanted: set[Kind] | None) -> dict[Kind, Rates]:
    """The mean rates of each kind, or of each that is wanted, of which runs lie here."""
    found: dict[Kind, list[Rates]] = {}
    done = [path for path in RESULTS.glob("runs/*/*/joined/*/joined.json") if path.is_file()]
    for marker in sorted(done, key=lambda path: path.stat().st_mtime, reverse=True):
        if wanted is not None and all(len(found.get(kind, ())) >= RUNS for kind in wanted):
            break
        with suppress(ArtifactError, OSError, LookupError, TypeError, ValueError, yaml.YAMLError):
            files = RunFiles(marker.parent.parent.parent)
            settings = Settings(**yaml.load(files.settings.read_text(), Loader=_LOADER))
            kind = Kind.of(settings)
            if wanted is None or (kind in wanted and len(found.get(kind, ())) < RUNS):
                rates = _rates(files, int(marker.parent.name), settings)
                found.setdefault(kind, []).append(rates)
    return {kind: _mean(several) for kind, several in found.items()}


def _mean(several: list[Rates]) -> Rates:
    """The mean of several runs of a kind, where each counts for the samples that it trained on."""
    weights = [rates.trained for rates in several]
    train, rest = (fmean([getattr(one, name) for one in several], weights) for name in ("train", "rest"))
    server, client, sent = (fmean(getattr(one, name) for one in several) for name in ("server", "client", "sent"))
    return Rates(train, rest, server, client, sent, trained=sum(weights))


def _rates(files: RunFiles, rounds: int, settings: Settings) -> Rates:
    joined = files.joined(rounds)
    times = artifacts.read_json(joined.times)["rounds"]
    table = artifacts.read_joined(joined.rounds)
    participants = table["participants"].to_pylist()
    train, whole = _samples(artifacts.assignment_file(digest(settings.partition_settings)))
    federation = settings.build_federation()
    share = sum(participants) / federation.clients
    trained = train * share * federation.epochs(round(train / federation.clients))
    last = files.round(rounds)
    return Rates(
        train=sum(seconds["train"] for seconds in times) / trained,
        rest=sum(seconds["aggregate"] + seconds.get("evaluate", 0) for seconds in times) / rounds / whole,
        server=float(last.server.stat().st_size),
        client=last.clients.stat().st_size / participants[-1] if last.clients.is_file() else 0.0,
        sent=fmean(table["bytes_down"].to_pylist()) + fmean(table["bytes_up"].to_pylist()),
        trained=trained,
    )


@functools.cache
def _samples(assignment: Path) -> tuple[int, int]:
    """How many samples are trained on, and how many there are."""
    split = artifacts.read_parquet(assignment, artifacts.manifest(assignment))["split"].to_pylist()
    return split.count("train"), len(split)
