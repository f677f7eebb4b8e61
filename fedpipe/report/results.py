"""All runs of a plan in tidy frames: accuracy by run, protocol and round; bytes; seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from fedpipe import artifacts
from fedpipe.config import Protocol, validating
from fedpipe.errors import SettingsError
from fedpipe.planned import Cell, Plan, ReportedRound

AVERAGES = ("sample", "client", "worst")  #: over test samples; over clients; over the worst tenth of the clients
REPORTED_ROUNDS: tuple[ReportedRound, ...] = get_args(ReportedRound)
SECONDS = ("train", "aggregate", "evaluate")  #: of a round, all of it
EPOCH = "epoch"  #: of a client
HEADS = ("algorithm", "protocol", "seeds", "shown")  #: of people's tables, beside those of the grid


def cells(plan: Plan) -> list[Cell]:
    """The cells as the table shows them, by algorithm, then by grid point and seed, each in the order of params.yaml.

    One run may serve several cells: of points that make no difference to it.
    """
    return sorted(plan.cells, key=lambda cell: plan.algorithms.index(cell.algorithm))


def point(plan: Plan, cell: Cell) -> dict[str, str]:
    """A cell's grid point as text, one entry a name of the grid: empty where it does not concern the algorithm."""
    return {name: _text(cell.grid[name]) if name in cell.grid else "" for name in plan.grid}


def short(names: Iterable[str]) -> list[str]:
    """The last part of each dotted key, or the whole key where that is ambiguous or heads another column."""
    names = list(names)
    last = [name.rpartition(".")[2] for name in names]
    taken = [*last, *HEADS]
    return [part if taken.count(part) == 1 else name for part, name in zip(last, names, strict=True)]


def label(point: Mapping[str, str]) -> str:
    """A grid point in words, as ``alpha=0.1, mu=1``, without what does not concern the algorithm."""
    return ", ".join(f"{name}={value}" for name, value in zip(short(point), point.values(), strict=True) if value)


def line(name: str, point: Mapping[str, str]) -> str:
    """Algorithm and grid point in words, as ``feddw (alpha=0.1)``."""
    told = label(point)
    return f"{name} ({told})" if told else name


def own_settings(plan: Plan) -> list[str]:
    """A sentence for each method, and each of its own points of the grid, that has settings for itself alone.

    Examples
    --------
    >>> own_settings(plan)  # doctest: +SKIP
    ['scaffold has settings of its own: federation.optimizer=sgd, federation.learning_rate=0.05.']
    """
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells(plan):
        by_own = found.setdefault(cell.algorithm, {})
        by_own.setdefault(own(cell), []).append(label(point(plan, cell)))
    sentences = []
    for algorithm, by_own in found.items():
        for told, points in by_own.items():
            where = "; ".join(dict.fromkeys(points)) if len(by_own) > 1 else ""
            name = f"{plan.title(algorithm)} ({where})" if where else plan.title(algorithm)
            sentences += [f"{name} has settings of its own: {told}."] if told else []
    return sentences


def own(cell: Cell) -> str:
    """The settings in words that a cell's method has for itself alone, as ``federation.local_epochs=15``."""
    return ", ".join(f"{key}={_text(value)}" for key, value in cell.own.items())


def load(plan: Plan) -> pd.DataFrame:
    """Accuracies of all cells.

    Returns
    -------
    pandas.DataFrame
        One row a cell, protocol, round and average: ``algorithm``, a column a name of the grid (text), ``seed``,
        ``key``, ``protocol``, ``round``, ``average`` and ``accuracy`` in [0, 1]. Average ``sample`` is over all test
        samples; ``client`` is the mean of the clients' accuracies, ``worst`` that of the lowest tenth of them (at
        least one client); clients without test samples are left out. Rounds ascend within a run.

    Raises
    ------
    ArtifactError
        A run is not complete.
    """
    frames = [labeled(plan, cell, accuracies(_read(cell.joined.metrics))) for cell in cells(plan)]
    return pd.concat(frames, ignore_index=True)


def protocols(plan: Plan, frame: pd.DataFrame) -> list[str]:
    """The study's protocols, then those that only points of its grid have or that methods have measured beside them."""
    return list(dict.fromkeys([*plan.protocols, *frame["protocol"]]))


def asked(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of protocols that a study can ask for, without what methods have measured beside them."""
    found: pd.DataFrame = frame[frame["protocol"].isin(get_args(Protocol))]
    return found


def reported(frame: pd.DataFrame, round: ReportedRound = "last", last_k: int = 5) -> pd.DataFrame:
    """One accuracy for each run, protocol and average of :func:`load`: a row each, without the column ``round``.

    Parameters
    ----------
    frame
        What :func:`load` returned.
    round
        ``last``: of the last round measured; ``best``: the highest of all rounds; ``mean-last``: the mean of the
        last ``last_k`` rounds measured.
    last_k
        Number of rounds in the mean.
    """
    keys = [name for name in frame.columns if name not in {"round", "accuracy"}]
    by_run = frame.groupby(keys, sort=False)["accuracy"]  # rounds ascend within a run
    found = {
        "last": by_run.last,
        "best": by_run.max,
        "mean-last": lambda: by_run.apply(lambda rounds: rounds.tail(last_k).mean()),
    }[round]()
    return found.reset_index()


def over_seeds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Mean, standard deviation (over n - 1; NaN for one seed) and number of seeds of the accuracies, in percent."""
    found = (100 * frame.set_index(list(keys))["accuracy"]).groupby(level=list(range(len(keys))), sort=False)
    return found.agg(["mean", "std", "count"]).rename(columns={"count": "seeds"}).reset_index()


def metrics(plan: Plan) -> pd.DataFrame:
    """Models on test sets, as ``metrics.parquet`` of all cells has them; client -1 is a model of the server."""
    return pd.concat([labeled(plan, cell, _read(cell.joined.metrics)) for cell in cells(plan)], ignore_index=True)


def rounds(plan: Plan) -> pd.DataFrame:
    """Traffic by round: ``participants``, updates ``left_out``, mean bytes of one; and what methods recorded."""
    return pd.concat([labeled(plan, cell, _read(cell.joined.rounds)) for cell in cells(plan)], ignore_index=True)


def traffic(plan: Plan) -> pd.DataFrame:
    """Bytes that a participant receives and sends in a round: the mean over rounds, one row a cell."""
    names = ["bytes_down", "bytes_up"]
    means = [_read(cell.joined.rounds)[names].mean().to_frame().T for cell in cells(plan)]
    frames = [labeled(plan, cell, mean) for cell, mean in zip(cells(plan), means, strict=True)]
    return pd.concat(frames, ignore_index=True)


def left_out(plan: Plan) -> pd.DataFrame:
    """Updates that were not finite, one row a cell.

    Returns
    -------
    pandas.DataFrame
        ``left_out``: how many updates were left out of their rounds; ``diverged``: the first round in which no
        participant's update was left, 0 if there was none.
    """
    frames = []
    for cell in cells(plan):
        rounds = _read(cell.joined.rounds)
        alone = rounds[rounds["left_out"] == rounds["participants"]]["round"]
        found = {"left_out": [int(rounds["left_out"].sum())], "diverged": [int(alone.min()) if len(alone) else 0]}
        frames.append(labeled(plan, cell, pd.DataFrame(found)))
    return pd.concat(frames, ignore_index=True)


def times(plan: Plan) -> pd.DataFrame:
    """Seconds, one row a cell; NaN where one is lost.

    Returns
    -------
    pandas.DataFrame
        ``train``, ``aggregate`` and ``evaluate``: the sums over rounds; ``epoch``: a client's local epoch, the mean
        over participants and rounds of its passes' seconds, without tests, over `federation.local_epochs`.
    """
    frames = []
    for cell in cells(plan):
        rounds = seconds(cell)["rounds"]
        sums = {name: [sum(float(spent.get(name, math.nan)) for spent in rounds)] for name in SECONDS}
        sums[EPOCH] = [sum(float(spent.get(EPOCH, math.nan)) for spent in rounds) / len(rounds)]
        frames.append(labeled(plan, cell, pd.DataFrame(sums)))
    return pd.concat(frames, ignore_index=True)


def provenance(plan: Plan) -> list[dict[str, str]]:
    """What the runs were made by (executor, device, versions), each once; `fedpipe trace` tells the code's hash too."""
    made_by = [maker for cell in cells(plan) for maker in seconds(cell)["made_by"]]
    makers = [{name: value for name, value in maker.items() if name != "code"} for maker in made_by]
    return [maker for index, maker in enumerate(makers) if maker not in makers[:index]]


def accuracies(metrics: pd.DataFrame) -> pd.DataFrame:
    """A run's accuracies by ``average``, ``protocol`` and ``round``, of the rows of its ``metrics.parquet``."""
    tested = metrics[metrics["total"] > 0]
    by_round = tested.assign(accuracy=tested["correct"] / tested["total"]).groupby(["protocol", "round"])
    sums = by_round[["correct", "total"]].sum()
    averages = {
        "sample": sums["correct"] / sums["total"],
        "client": by_round["accuracy"].mean(),
        "worst": by_round["accuracy"].agg(lambda clients: np.sort(clients)[: max(1, len(clients) // 10)].mean()),
    }
    return pd.concat(averages, names=["average"]).rename("accuracy").reset_index()


def labeled(plan: Plan, cell: Cell, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with columns before it that tell the cell."""
    columns: dict[str, Any] = {"algorithm": cell.algorithm, **point(plan, cell), "seed": cell.seed, "key": cell.key}
    for place, (name, value) in enumerate(columns.items()):
        if name in frame:
            raise SettingsError(
                f"study.grid.{name}: {cell.algorithm} records something of that name; the axis should have another "
                "one, which runs nothing anew."
            )
        frame.insert(place, name, value)
    return frame


def best(plan: Plan, means: pd.DataFrame) -> list[tuple[Hashable, ...]]:
    """The rows that a table shows, as algorithm and values of the grid: all, or the best of what is searched.

    The best of `report.best_over` has the highest mean by the method's own protocol, or the study's first that it has;
    or by that model on the clients' validation samples (`report.best_on`).

    Parameters
    ----------
    plan
        The study.
    means
        A row a row of the table and protocol, with ``mean`` and ``seeds``, of the round and average reported.
    """
    row, over, report = ["algorithm", *plan.grid], plan.report.best_over, plan.report
    rows: list[tuple[Hashable, ...]] = [key for key, _ in means.groupby(row, sort=False)]
    if not over:
        return rows
    found = []
    for key, cells in means.groupby([name for name in row if name not in over], sort=False):
        protocols = [plan.shown.get(str(key[0]), plan.protocols[0]), *plan.protocols]
        protocol = next((name for name in protocols if cells[cells["protocol"] == name]["seeds"].any()), protocols[0])
        protocol = validating(protocol) if report.best_on == "validation" else protocol
        ranked = cells[cells["protocol"] == protocol].sort_values("mean", ascending=False, kind="stable")
        found.append(tuple(ranked.iloc[0][row]))
    return [key for key in rows if key in found]


def _read(path: Path) -> pd.DataFrame:
    frame: pd.DataFrame = artifacts.frame(artifacts.read_joined(path))
    return frame


def seconds(cell: Cell) -> dict[str, Any]:
    """Seconds of each round of a cell, as ``rounds``, and what made them, as ``made_by``."""
    joined = cell.joined
    found: dict[str, Any] = artifacts.read_json(joined.times, joined.sha256(joined.times))
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
