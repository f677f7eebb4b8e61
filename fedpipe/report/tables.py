"""The result table: tidy for programs, wide for people, and one number a method for `dvc exp show`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from html import escape
from statistics import mean
from typing import Any, NamedTuple

import pandas as pd

from fedpipe import artifacts, changes
from fedpipe.config import Data, as_number
from fedpipe.data.heterogeneity import Overall
from fedpipe.planned import Plan
from fedpipe.report import results, statistics
from fedpipe.report.results import AVERAGES, EPOCH, REPORTED_ROUNDS, SECONDS
from fedpipe.report.words import size

STYLE = (  #: of the page
    "body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem;color:#222}p{max-width:60rem}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .8rem;text-align:left;white-space:nowrap}"
    "tr{border-bottom:1px solid #ddd}th{border-bottom:2px solid #444}.number{text-align:right}"
)
FORMULAS = tuple("=+-@\t\r＝＋－＠")  #: what a spreadsheet takes for the beginning of one
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"  #: what it reads as a number in any case
DASH = "–"  #: stands for a protocol that an algorithm does not have

REPORTED = {
    "last": "in the last round measured",
    "best": "in each run's best round, which was chosen on the test samples themselves",
    "mean-last": "as the mean of the last {last_k} rounds measured",
}
CHOSEN_ON = {"test": "test samples themselves", "validation": "clients' validation samples"}
AVERAGED = {"sample": "over all test samples", "client": "as the mean of the clients' accuracies"}


def table(plan: Plan) -> pd.DataFrame:
    """Accuracy of every algorithm and grid point by every protocol, average and reported round.

    Returns
    -------
    pandas.DataFrame
        ``algorithm``, a column a name of the grid, ``protocol``, ``average``, ``round``; ``mean`` and ``std`` over
        ``seeds`` of the accuracy in percent; ``bytes_down`` and ``bytes_up`` of a participant in a round, mean over
        rounds and seeds; ``left_out``, updates that were not finite, and ``diverged``, runs with a round in which all
        failed. A protocol that an algorithm does not have has no mean and 0 seeds. What methods have measured beside
        the study's protocols is here, too, though people's table does not show it. There are no times, so that the
        same runs give the same bytes.
    """
    frame = results.load(plan)
    cell = [*_row(plan), "protocol", "average"]
    last_k = plan.report.last_k
    found = pd.concat(
        results.over_seeds(results.reported(frame, round, last_k), cell).assign(round=round)
        for round in REPORTED_ROUNDS
    )
    cells = _rows(plan)
    for name, values in (
        ("protocol", results.protocols(plan, frame)),
        ("average", AVERAGES),
        ("round", REPORTED_ROUNDS),
    ):
        cells = cells.merge(pd.DataFrame({name: list(values)}), how="cross")
    bytes_sent = results.traffic(plan).groupby(_row(plan), sort=False)[["bytes_down", "bytes_up"]].mean().reset_index()
    lost = results.left_out(plan).assign(diverged=lambda rows: rows["diverged"] > 0)
    failed = lost.groupby(_row(plan), sort=False)[["left_out", "diverged"]].sum().reset_index()
    made = cells.merge(found, how="left", on=[*cell, "round"]).merge(bytes_sent, how="left", on=_row(plan))
    made = made.merge(failed, how="left", on=_row(plan))
    return made.assign(seeds=made["seeds"].fillna(0).astype(int))


def times(plan: Plan) -> pd.DataFrame:
    """Seconds of a run by algorithm and grid point, mean over seeds: the columns of `results.times`."""
    return results.times(plan).groupby(_row(plan), sort=False)[[*SECONDS, EPOCH]].mean().reset_index()


def metrics(plan: Plan, table: pd.DataFrame) -> dict[str, Any]:
    """One number a method, for `dvc exp show`: the mean by the study's first protocol, in percent, as the table has it.

    A grid adds a level, as ``{"fedavg": {"alpha=0.1": 71.25}}``. A method without such a model has no number.
    """
    found: dict[str, Any] = {}
    shown = reported(plan, table)
    for cell in shown[(shown["protocol"] == plan.protocols[0]) & (shown["seeds"] > 0)].to_dict("records"):
        point = results.label({name: cell[name] for name in plan.grid})
        place, name = (found.setdefault(cell["algorithm"], {}), point) if point else (found, cell["algorithm"])
        place[name] = round(cell["mean"], 2)
    return found


class Shown(NamedTuple):
    """A table as people see it: cells of text, of which the first columns are aligned to the left."""

    frame: pd.DataFrame
    left: int

    @property
    def markdown(self) -> str:
        """As Markdown."""
        sides = ["left" if column < self.left else "right" for column in range(self.frame.shape[1])]
        shown = self.frame.map(_unmarked).rename(columns=_unmarked)
        return str(shown.to_markdown(index=False, disable_numparse=True, colalign=sides))

    @property
    def html(self) -> str:
        """As HTML."""
        head = "".join(f"<th{self._side(place)}>{escape(str(name))}" for place, name in enumerate(self.frame.columns))
        rows = (
            "".join(f"<td{self._side(place)}>{escape(str(cell))}" for place, cell in enumerate(row))
            for row in self.frame.itertuples(index=False)
        )
        return f"<table>\n<tr>{head}\n" + "\n".join(f"<tr>{row}" for row in rows) + "\n</table>"

    def _side(self, place: int) -> str:
        return "" if place < self.left else ' class="number"'


def markdown(plan: Plan, table: pd.DataFrame) -> str:
    """The table for people: what it shows, a row an algorithm and grid point, and what it was made by."""
    told = [part.markdown if isinstance(part, Shown) else _unmarked(part) for part in parts(plan, table)]
    return "\n\n".join(told) + "\n"


def _unmarked(text: Any) -> str:
    """Text in which Markdown finds no markup of HTML."""
    return escape(str(text), quote=False)


def html(plan: Plan, table: pd.DataFrame) -> str:
    """The same as a page that needs nothing else, for Snakemake's report."""
    told = [part.html if isinstance(part, Shown) else f"<p>{escape(part)}</p>" for part in parts(plan, table)]
    title = escape(f"Results of {plan.params}" + ("" if plan.scale == artifacts.PAPER else f", scale {plan.scale}"))
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n<style>{STYLE}</style>\n'
        + "\n".join(told)
        + "\n</html>\n"
    )


def parts(plan: Plan, table: pd.DataFrame) -> list[str | Shown]:
    """Paragraphs and tables that people read, in order."""
    shown, seeds, kept = reported(plan, table), _seeds(plan), best(plan, table)
    rows = []
    for key, cells in shown.groupby(_row(plan), sort=False):
        if key not in kept:
            continue
        algorithm, *point = key
        rows.append(
            {
                "algorithm": plan.title(str(algorithm)),
                **dict(zip(results.short(plan.grid), (value or DASH for value in point), strict=True)),
                **seeds.get(key, {}),
                **_by_own_protocol(plan, cells),
                **{cell["protocol"]: accuracy(cell) for cell in cells.to_dict("records")},
                "bytes down": size(cells["bytes_down"].iloc[0]),
                "bytes up": size(cells["bytes_up"].iloc[0]),
            }
        )
    body = Shown(pd.DataFrame(rows), len(_row(plan)))
    warnings = [f"Warning: {warning}" for warning in plan.warnings]
    told = [*failures(plan), *warnings, *_heterogeneity(plan), *made_by(plan), *changes.elsewhere(plan)]
    alone = results.own_settings(plan)
    return [caption(plan), body, *alone, *edges(plan, table), *_statistics(plan, kept), *told]


def caption(plan: Plan) -> str:
    """What the table shows: the reported round and average, seeds, rounds, data set and partition."""
    report = plan.report
    own = f"Column `shown`: by {plan.protocols[0]}, or by the protocol that stands there. " if plan.shown else ""
    if report.best_over:
        own += (
            f"Of {' and '.join(report.best_over)}, each row has the value that is best for it, which was chosen on the "
            f"{CHOSEN_ON[report.best_on]}. "
        )
    if on := [
        name for name in ("train", "validation") if any(given.endswith(f"-on-{name}") for given in plan.protocols)
    ]:
        own += f"Columns on-{' and on-'.join(on)} are of those samples of the clients. "
    return (
        f"{measured(plan)} Bytes are those of one participant in one round. "
        f"{own}A dash: the method has no such model. {data(plan)}"
    )


def measured(plan: Plan) -> str:
    """What a number of the table is: the scale, the reported round and average, and over which seeds."""
    report, seeds = plan.report, len(plan.seeds)
    spread = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    told = REPORTED[report.round].format(last_k=report.last_k)
    lengths = " or ".join(str(rounds) for rounds in sorted({cell.rounds for cell in plan.cells}))
    scale = "" if plan.scale == artifacts.PAPER else f"Scale {plan.scale}. "
    return f"{scale}Test accuracy (%) {told} ({lengths} rounds), {AVERAGED[report.average]}; {spread}."


def data(plan: Plan) -> str:
    """The data sets and partitions of the table."""
    return f"Data: {'; '.join(dict.fromkeys(setups(plan).values()))}."


def setups(plan: Plan) -> dict[str, str]:
    """The setup of each partition by its key; data sets of the same words are told apart by their SHA-256."""
    told = {key: (setup(made), made["dataset"].get("sha256", "")) for key, made in partitions(plan).items()}
    words = [text for text, _ in dict.fromkeys(told.values())]
    return {
        key: text if words.count(text) == 1 else f"{text}, data {sha256[:12]}…" for key, (text, sha256) in told.items()
    }


def setup(partition: dict[str, Any]) -> str:
    """Data set, clients and partition in words; ``partition`` holds the settings of ``partition.yaml``."""
    dataset, scheme = partition["dataset"], partition["partition"]
    samples = [f"{dataset['subset']} samples"] if "subset" in dataset else []
    fields = {name: field.default for name, field in Data.model_fields.items()}
    told = {"name", "subset", "split", "code", "sha256"}
    others = [f"{name}={value}" for name, value in dataset.items() if name not in told and value != fields.get(name)]
    given = {name: f"{value[:12]}…" if name == "sha256" else value for name, value in scheme.items()}
    parameters = ", ".join(f"{name}={value}" for name, value in given.items() if name not in {"scheme", "code"})
    dealt = f"{scheme['scheme']} ({parameters})" if parameters else scheme["scheme"]
    split = f"{dataset['split']} split" if "split" in dataset else "split as the file says"
    data = ", ".join([*samples, split, *others])
    return f"{dataset['name']} ({data}), {partition['clients']} clients, partition {dealt}"


def dealing(partition: dict[str, Any], told: str = "") -> str:
    """The same, or what is ``told`` in its place, with the seed that it was dealt with, if with any."""
    seed = f"seed {partition['seed']}" if "seed" in partition else "all seeds"
    return f"{told or setup(partition)}, {seed}"


def plain(text: str) -> str:
    """Text for a cell of a CSV file: with an apostrophe before it if a spreadsheet would take it for a formula.

    Examples
    --------
    >>> plain("=1+2"), plain("-x"), plain("-0.5"), plain("fedavg")
    ("'=1+2", "'-x", '-0.5', 'fedavg')
    """
    return f"'{text}" if text.startswith(FORMULAS) and not re.fullmatch(NUMBER, text) else text


def csv(frame: pd.DataFrame, spell: Callable[[str], str] = plain) -> bytes:
    """A frame as CSV: floats in as few digits as give them back exactly, text as ``spell`` gives it."""
    texts = {
        str(name): column.map({value: spell(value) if isinstance(value, str) else value for value in column.unique()})
        for name, column in frame.select_dtypes(exclude="number").items()
    }
    return frame.assign(**texts).rename(columns=spell).to_csv(index=False, lineterminator="\n").encode()


def _row(plan: Plan) -> list[str]:
    return ["algorithm", *plan.grid]


def _rows(plan: Plan) -> pd.DataFrame:
    """Algorithms and grid points, each once, in the order of the cells."""
    rows = [{"algorithm": cell.algorithm, **results.point(plan, cell)} for cell in results.cells(plan)]
    return pd.DataFrame(rows).drop_duplicates(ignore_index=True)


def best(plan: Plan, table: pd.DataFrame) -> list[tuple[Hashable, ...]]:
    """The rows that people's table shows, as algorithm and values of the grid: all, or only the best of some lists.

    See :func:`fedpipe.report.results.best`, which chooses.
    """
    return results.best(plan, reported(plan, table))


def edges(plan: Plan, table: pd.DataFrame) -> list[str]:
    """A sentence for each list of numbers that `report.best_over` searches, where the best of a row lies at its end."""
    shown, over, sentences = reported(plan, table), plan.report.best_over, []
    there = {key for key, cells in shown.groupby(_row(plan), sort=False) if cells["seeds"].any()}
    rows = [dict(zip(_row(plan), map(str, key), strict=True)) for key in best(plan, table) if key in there]
    for name, word in zip(plan.grid, results.short(plan.grid), strict=True):
        numbers = [value for value in plan.grid[name] if "." in name and type(as_number(value)) in (int, float)]
        if name not in over or len(numbers) < max(2, len(plan.grid[name])):
            continue
        found = []
        for value in map(str, (min(numbers, key=float), max(numbers, key=float))):
            methods = []
            for algorithm in plan.algorithms:
                own = [row for row in rows if row["algorithm"] == algorithm]
                at = [row for row in own if row[name] == value]
                points = [results.label({key: "" if key in over else row[key] for key in plan.grid}) for row in at]
                title = plan.title(algorithm)
                methods += [title] if at and at == own else [f"{title} ({point})" for point in points]
            if methods:
                found.append((", ".join(methods), value))
        if found:
            (first, value), *others = found
            told = "".join(f"; that of {methods} at {value}" for methods, value in others)
            sentences.append(
                f"{word}: the best of {first} lies at the edge of the grid, {value}{told}: a wider grid may be better."
            )
    return sentences


def _seeds(plan: Plan) -> dict[tuple[Hashable, ...], dict[str, str]]:
    """Where not all cells are there, a column by row that tells of how many seeds it is."""
    rows = [(cell.algorithm, *results.point(plan, cell).values()) for cell in plan.cells]
    wanted = len(plan.seeds)
    if all(rows.count(row) == wanted for row in rows):
        return {}
    return {row: {"seeds": f"{rows.count(row)} of {wanted}"} for row in rows}


def partitions(plan: Plan) -> dict[str, Any]:
    """The settings of all partitions by key, in the order of the runs."""
    return {run.partition: plan.partitions[run.partition] for run in plan.runs}


def reported(plan: Plan, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the round and average that people's table shows, by the protocols that a study can ask for."""
    report = plan.report
    return results.asked(table[(table["round"] == report.round) & (table["average"] == report.average)])


def accuracy(cell: Mapping[Hashable, Any]) -> str:
    """Mean and deviation of a row of the table as people read them, or a dash."""
    if not cell["seeds"]:
        return DASH
    return f"{cell['mean']:.2f}" + (f" ± {cell['std']:.2f}" if cell["seeds"] > 1 else "")


def _by_own_protocol(plan: Plan, cells: pd.DataFrame) -> dict[str, str]:
    """The column `shown`, where some method is shown by a protocol of its own, which stands beside the row's number."""
    if not plan.shown:
        return {}
    algorithm = cells["algorithm"].iloc[0]
    protocol = plan.shown.get(algorithm, plan.protocols[0])
    (cell,) = cells[cells["protocol"] == protocol].to_dict("records")
    return {"shown": f"{accuracy(cell)} ({protocol})" if algorithm in plan.shown else accuracy(cell)}


def _statistics(plan: Plan, kept: list[tuple[Hashable, ...]]) -> list[str | Shown]:
    """The statistics that are asked for (`report.statistics`): what they are, and a row for each of these rows."""
    report, first = plan.report, plan.protocols[0]
    if not report.statistics:
        return []
    frame = statistics.table(plan)
    found = {
        (*[row[name] for name in _row(plan)], row["protocol"], row["statistic"]): row
        for row in frame.to_dict("records")
    }
    share = f"{100 * report.target:g} %" if report.target is not None else ""
    heads = {
        "client_std": "std of clients",
        "worst_tenth": "worst tenth",
        "lowest": "lowest client",
        "macro_f1": "macro F1",
        "balanced_accuracy": "balanced accuracy",
        "rounds_to_target": f"rounds to {share}",
        "bytes_to_target": f"bytes to {share}",
        "difference": f"− {plan.title(str(report.baseline))}",
    }
    rows = []
    for key in kept:
        algorithm, *point = map(str, key)
        protocol = plan.shown.get(algorithm, first)
        rows.append(
            {
                "algorithm": plan.title(algorithm),
                **dict(zip(results.short(plan.grid), (value or DASH for value in point), strict=True)),
                **({"protocol": protocol} if plan.shown else {}),
                **{heads[name]: _statistic(plan, found.get((*key, protocol, name))) for name in report.statistics},
            }
        )
    wide = pd.DataFrame(rows)
    by = "each method's own protocol" if plan.shown else first
    seeds = "; mean ± standard deviation over seeds" if len(plan.seeds) > 1 else ""
    told = [f"By {by}{seeds}."]
    if {*statistics.SPREAD} & {*report.statistics}:
        told.append("Of the clients' accuracies (%), in the last round measured: worst tenth is its mean.")
    if {*statistics.BY_CLASS} & {*report.statistics}:
        told.append(
            "Macro F1 and balanced accuracy (%) are over all clients' test samples, in the last round measured."
        )
    if {*statistics.TO_TARGET} & {*report.statistics}:
        told.append(f"A target is reached where {share} of all test samples are told right; bytes are all clients'.")
    if "difference" in report.statistics:
        baseline = plan.title(str(report.baseline))
        whose = f"the best of {baseline}" if report.best_over else f"{baseline}'s"
        at = " at the same point of the grid" if {*plan.grid} - {*report.best_over} else ""
        told.append(f"Differences of the accuracies above to {whose}{at} are {statistics.PAIRED}")
    return [" ".join(told), Shown(wide, wide.shape[1] - len(report.statistics))]


def _statistic(plan: Plan, row: dict[Hashable, Any] | None) -> str:
    if row is None or not row["seeds"]:
        return DASH
    name, mean, std, seeds = (row[key] for key in ("statistic", "mean", "std", "seeds"))
    if name == "difference":
        return statistics.Difference(mean, std, row["half_width"], seeds).told
    if name == "bytes_to_target":
        told = size(mean) + (f" ± {size(std)}" if seeds > 1 else "")
    else:
        digits = 1 if name == "rounds_to_target" else 2
        told = f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if seeds > 1 else "")
    some = name in statistics.TO_TARGET and seeds < len(plan.seeds)
    return f"{told} ({seeds} of {len(plan.seeds)} seeds)" if some else told


def failures(plan: Plan) -> list[str]:
    """A sentence for each algorithm and grid point of which some update was not finite."""
    sentences = []
    for key, cells in results.left_out(plan).groupby(_row(plan), sort=False):
        algorithm, *values = map(str, key)
        name = results.line(plan.title(algorithm), dict(zip(plan.grid, values, strict=True)))
        lost, diverged = cells["left_out"].sum(), cells[cells["diverged"] > 0]["diverged"]
        if not lost:
            continue
        updates = "1 update was not finite and was" if lost == 1 else f"{lost} updates were not finite and were"
        sentence = f"{name}: {updates} left out"
        if len(diverged):
            runs = f"{len(cells)} run{'s' if len(cells) > 1 else ''}"
            sentence += f"; diverged (in round {diverged.min()} all failed) in {len(diverged)} of {runs}"
        sentences.append(f"{sentence}.")
    return sentences


def _heterogeneity(plan: Plan) -> list[str | Shown]:
    """How unlike the clients are: a row a data set and partition, mean over seeds."""
    found: dict[str, list[Overall]] = {}
    for key, told in setups(plan).items():
        path = artifacts.heterogeneity_file(key)
        table = artifacts.read_parquet(path, artifacts.manifest(path, "assignment.json"))
        found.setdefault(told, []).append(Overall.read(table))
    rows = []
    for name, overalls in found.items():
        entropy, js_distance, gini = (mean(values) for values in zip(*overalls, strict=True))
        rows.append([name, f"{entropy:.2f}", f"{js_distance:.3f}", f"{gini:.3f}"])
    head = ["data", "label entropy (bits)", "Jensen-Shannon distance", "Gini of sizes"]
    told = (
        "How unlike the clients are: label entropy and distance to the label distribution of all (mean over clients), "
        "inequality of sizes; mean over seeds."
    )
    return [told, Shown(pd.DataFrame(rows, columns=head), 1)]


def made_by(plan: Plan) -> list[str]:
    """A sentence for each executor, device and set of versions that made runs."""
    lines = []
    for made in results.provenance(plan):
        versions = ", ".join(f"{name} {made[name]}" for name in sorted(made) if name not in {"executor", "device"})
        lines.append(f"Made by the {made['executor']} executor on {made['device']}, with {versions}.")
    return lines
