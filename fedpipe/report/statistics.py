"""Statistics beside mean accuracy: spread over clients, what a target took, classes, differences to a baseline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd

from fedpipe.planned import Cell, Plan, Statistic
from fedpipe.report import results

CONFIDENCE = 0.95  #: of intervals
EQUAL = 1e-9  #: half an interval, in points, up to which differences are equal but for rounding
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
SPREAD = {"client_std": "std", "worst_tenth": "worst", "lowest": "lowest"}  #: columns of :func:`fairness`
BY_CLASS = ("macro_f1", "balanced_accuracy")
TO_TARGET = {"rounds_to_target": "round", "bytes_to_target": "bytes"}  #: columns of :func:`to_target`


class Difference(NamedTuple):
    """The mean of differences that are paired by seed."""

    mean: float
    std: float  #: of the differences; this and the next are NaN of one seed
    half_width: float  #: of the mean's confidence interval, by Student's t
    seeds: int

    @property
    def exceeds(self) -> bool:
        """Whether the interval leaves out zero; of differences that are all equal it has no width, and says nothing."""
        return EQUAL < self.half_width < abs(self.mean)

    @property
    def told(self) -> str:
        """In two decimals, as ``+1.20 ± 0.45 *``, with the star where it exceeds."""
        if math.isnan(self.half_width):
            return f"{self.mean:+.2f} (one seed)"
        return f"{self.mean:+.2f} ± {self.half_width:.2f}{' *' if self.exceeds else '  '}"


#: What a table says of such differences.
PAIRED = (
    f"paired by seed: mean ± half of its {CONFIDENCE:.0%} confidence interval (Student's t), with a * where it exceeds "
    "that; of one seed nothing can be said of chance."
)


def difference(one: pd.Series[float], other: pd.Series[float]) -> Difference | None:
    """Other minus one, by seed, over the seeds that both have; None if there is none."""
    from scipy import stats

    paired = (other - one).dropna()
    count = len(paired)
    if not count:
        return None
    std = float(paired.std()) if count > 1 else math.nan
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
    return Difference(float(paired.mean()), std, quantile * std / math.sqrt(count), count)


def keys(plan: Plan) -> list[str]:
    """The columns that tell a run, and its cell of the table."""
    return ["algorithm", *plan.grid, "seed", "key"]


def fairness(metrics: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """How alike clients' accuracies are in the last round measured: a row a run and protocol with a row a client.

    ``mean``, standard deviation ``std`` (of all clients: over n), ``worst`` (mean of the lowest tenth, at least one
    client) and ``lowest`` of the accuracies of ``clients`` clients; those without test samples are left out.
    """
    own = metrics[(metrics["client"] >= 0) & (metrics["total"] > 0)]
    keys = [*keys, "protocol"]
    own = own[own["round"] == own.groupby(keys)["round"].transform("max")]
    by_run = own.assign(accuracy=own["correct"] / own["total"]).groupby(keys, sort=False)["accuracy"]
    return by_run.agg(
        mean="mean",
        std=lambda found: found.std(ddof=0),
        worst=lambda found: found.nsmallest(max(1, len(found) // 10)).mean(),
        lowest="min",
        clients="count",
    ).reset_index()


def to_target(accuracies: pd.DataFrame, traffic: pd.DataFrame, keys: Sequence[str], target: float) -> pd.DataFrame:
    """What it took to reach an accuracy over all test samples: a row a run and protocol, with ``round`` and ``bytes``.

    The round is the first one measured that has it, the bytes those that all participants received and sent until its
    end; both are NaN where a run never did.

    Parameters
    ----------
    accuracies
        As :func:`fedpipe.report.results.load` gives them.
    traffic
        By run and round: ``participants``, mean ``bytes_down`` and ``bytes_up`` of one.
    keys
        The columns that tell a run.
    target
        In (0, 1].
    """
    run, protocol = list(keys), [*keys, "protocol"]
    found = accuracies[accuracies["average"] == "sample"]
    first = found[found["accuracy"] >= target].groupby(protocol, sort=False)["round"].min()
    sent = traffic.assign(bytes=traffic["participants"] * (traffic["bytes_down"] + traffic["bytes_up"]))
    sent["bytes"] = sent.groupby(run, sort=False)["bytes"].cumsum()
    runs = found[protocol].drop_duplicates().merge(first.reset_index(), how="left", on=protocol)
    return runs.merge(sent[[*run, "round", "bytes"]], how="left", on=[*run, "round"])


def by_class(metrics: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """``macro_f1`` and ``balanced_accuracy`` in the last round measured: a row a run and protocol.

    Both are over the test samples of all clients together, as scikit-learn's: the mean F1 of the classes that are there
    or were told, and the mean recall of those that are there.
    """
    keys = [*keys, "protocol"]
    if "hits" not in metrics:  # of runs from before classes were counted
        return pd.DataFrame(columns=[*keys, *BY_CLASS])
    tested = metrics[(metrics["total"] > 0) & metrics["hits"].notna()]
    last = tested[tested["round"] == tested.groupby(keys)["round"].transform("max")]
    rows = []
    for run, lines in last.groupby(keys, sort=False):
        hits, support, predicted = (np.stack(list(lines[name])).sum(0) for name in ("hits", "support", "predicted"))
        there, named = support > 0, support + predicted > 0
        f1 = 2 * hits[named] / (support + predicted)[named]
        found = dict(zip(BY_CLASS, (f1.mean(), (hits[there] / support[there]).mean()), strict=True))
        rows.append({**dict(zip(keys, run, strict=True)), **found})
    return pd.DataFrame(rows, columns=[*keys, *BY_CLASS])


def table(plan: Plan) -> pd.DataFrame:
    """All statistics of every algorithm and grid point by protocol.

    Returns
    -------
    pandas.DataFrame
        ``algorithm``, a column a name of the grid, ``protocol``, ``statistic``; ``mean`` and ``std`` over so many
        ``seeds``, and of differences the ``half_width`` of the mean's confidence interval. Accuracies, F1 and their
        differences are in percent. A target that some seeds did not reach counts those that did. Protocols without a
        row a client have no spread; without `report.target` and `report.baseline` there is nothing of theirs.
    """
    metrics, accuracies, run = results.metrics(plan), results.asked(results.load(plan)), keys(plan)
    parts = [
        (fairness(metrics, run), SPREAD, 100),
        (by_class(metrics, run), dict(zip(BY_CLASS, BY_CLASS, strict=True)), 100),
    ]
    if plan.report.target is not None:
        parts.append((to_target(accuracies, results.rounds(plan), run, plan.report.target), TO_TARGET, 1))
    values = [
        frame[[*run, "protocol"]].assign(statistic=name, value=factor * frame[column].astype(float))
        for frame, columns, factor in parts
        for name, column in columns.items()
    ]
    row = ["algorithm", *plan.grid]
    cell = [*row, "protocol", "statistic"]
    means = pd.concat(values).groupby(cell, sort=False)["value"].agg(["mean", "std", "count"])
    found = means.rename(columns={"count": "seeds"}).assign(half_width=math.nan)
    if differences := _differences(plan, accuracies):
        found = pd.concat([found, pd.DataFrame(differences).set_index(cell)])
    rows = dict.fromkeys((cell.algorithm, *results.point(plan, cell).values()) for cell in results.cells(plan))
    order = itertools.product(rows, results.protocols(plan, accuracies), STATISTICS)
    wanted = [(*place, protocol, name) for place, protocol, name in order]
    made = found.reindex([key for key in wanted if key in found.index]).reset_index()
    return made.astype({"seeds": int})


def _differences(plan: Plan, accuracies: pd.DataFrame) -> list[dict[str, Any]]:
    """What each method's reported accuracies are above the baseline's at the same point of the grid.

    Of what `report.best_over` searches, the baseline is there with its best.
    """
    report, rows = plan.report, list[dict[str, Any]]()
    if report.baseline is None:
        return rows
    frame, row = results.reported(accuracies, report.round, report.last_k), ["algorithm", *plan.grid, "protocol"]
    frame = frame[frame["average"] == report.average]
    shown = results.best(plan, results.over_seeds(frame, row))
    by_seed: dict[tuple[Hashable, ...], pd.Series[float]] = {
        key: 100 * lines.set_index("seed")["accuracy"] for key, lines in frame.groupby(row, sort=False)
    }
    places = {(cell.algorithm, *results.point(plan, cell).values()): cell for cell in results.cells(plan)}
    for place, cell in places.items():
        base = _base(plan, cell, shown)
        if base is None or cell.algorithm == report.baseline:
            continue
        there = (base.algorithm, *results.point(plan, base).values())
        for protocol in dict.fromkeys(accuracies["protocol"]):
            one, other = by_seed.get((*there, protocol)), by_seed.get((*place, protocol))
            found = None if one is None or other is None else difference(one, other)
            if found is not None:
                told = {"algorithm": cell.algorithm, **results.point(plan, cell), "protocol": protocol}
                rows.append(told | {"statistic": "difference", **found._asdict()})
    return rows


def _base(plan: Plan, cell: Cell, shown: Collection[tuple[Hashable, ...]]) -> Cell | None:
    """The baseline's cell at a cell's point of the grid, as far as the point concerns it; None if there are several."""

    def beside(base: Cell) -> bool:
        fixed = {name: value for name, value in base.grid.items() if name not in plan.report.best_over}
        return all(name in cell.grid and cell.grid[name] == value for name, value in fixed.items())

    found = [
        base
        for base in plan.cells
        if base.algorithm == plan.report.baseline
        and (base.algorithm, *results.point(plan, base).values()) in shown
        and beside(base)
    ]
    return found[0] if len({str(sorted(base.grid.items())) for base in found}) == 1 else None
