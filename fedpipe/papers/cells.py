"""What is measured, put beside what is printed: cells with their verdicts, columns with their order, claims.

Measured cells come by their places, those of `published` or of `layouts`; what is not there was not run. `compare`
joins the two, and `csv` writes what it finds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import pandas as pd

from fedpipe.papers import layouts, published, verdicts
from fedpipe.papers.layouts import Claim, Paper, Text
from fedpipe.papers.published import Place, Published
from fedpipe.papers.verdicts import Contrast, Number, Order, Scale, Verdict

UNJUDGED = "not judged"  #: measured, but there is nothing that it could be judged by
UNMEASURED = "not measured"
STOOD_IN = "not judged (generated data)"  #: measured on noise in the shape of data that are not here
UNPRINTED = "not in print"
NOT_RUN = "not run"  #: the reason of a cell that no row tells of
COLUMNS = (  #: of cells.csv
    *Place._fields,
    *("published_mean", "published_std", "published_runs", "status"),
    *("measured_mean", "measured_std", "measured_runs", "scale", "verdict", "keys"),
)


@dataclass(frozen=True)
class Measured:
    """A cell as it was measured here, or the reason why it was not: then ``number`` is None.

    ``keys`` are those of the runs, ``settings`` what differs from the study's. ``tests`` is the number of test samples
    that an accuracy is of, ``classes`` that of its data set's classes, ``diverged`` the number of runs that failed,
    ``expected`` what a printed formula gives with the study's parameters. ``hours`` are those of the runs, or what they
    would take, ``lacking`` what those would take that are missing beside them (None where none is). ``generated`` tells
    that the data are not the real ones, ``trace`` is the command that leads to them.
    """

    number: Number | None
    keys: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    hours: float = math.nan
    lacking: float | None = None
    diverged: int = 0
    tests: int | None = None
    classes: int | None = None
    expected: float | None = None
    generated: bool = False
    trace: str = ""
    reason: str = ""

    @property
    def compared(self) -> Number | None:
        """The number as it is compared with others, varying as its test set asks; None where its data are generated."""
        if self.number is None or self.generated:
            return None
        least = verdicts.sampling(self.number.mean, self.tests) if self.tests else 0.0
        return replace(self.number, least=least)


@dataclass(frozen=True)
class Cell:
    """A cell: what is printed, what is measured, and what is said of the two; ``word`` is never empty."""

    place: Place
    published: Published | None
    measured: Measured | None
    verdict: Verdict | None
    word: str

    @property
    def number(self) -> Number | None:
        """What was measured, None where nothing was."""
        return self.measured.number if self.measured else None


class Checked(NamedTuple):
    """A claim in one column: the contrast in print, the one measured, and with which row each is."""

    column: str
    printed: Contrast | None
    printed_over: str
    measured: Contrast | None
    measured_over: str


@dataclass(frozen=True)
class Comparison:
    """All cells by place, and the order of each column with at least two methods, by paper, table and column."""

    scale: Scale
    cells: Mapping[Place, Cell]
    orders: Mapping[tuple[str, str, str], Order]


def compare(measured: Mapping[Place, Measured], scale: Scale) -> Comparison:
    """Join what is measured with what is printed, and judge what the scale allows: values only at scale ``paper``.

    Raises
    ------
    ValueError
        The scale or a place is unknown, a cell is made of others, or a number is no accuracy, or lacks what it is of.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale {scale!r} is unknown; it should be one of {', '.join(get_args(Scale))}.")
    known = set(places())
    if unknown := [tuple(place) for place in measured if place not in known]:
        raise ValueError(f"measured cells: {unknown[0]} is no cell of a paper.")
    for place, cell in measured.items():
        if place.metric == "accuracy_pct" and cell.number:
            _check_accuracy(place, cell, cell.number)
    printed = published.load()
    there = dict(measured)
    for paper in layouts.papers().values():
        made = _derived(paper, there)
        if twice := [tuple(place) for place in made if place in measured]:
            raise ValueError(f"measured cells: {twice[0]} is made of other cells, and can't be measured beside them.")
        there |= made
    spreads = _spreads(printed, there)
    cells = {}
    for place in places():
        both = printed.get(place), there.get(place)
        verdict = _verdict(*both, spreads.get(_column(place)), scale)
        cells[place] = Cell(place, *both, verdict, _word(*both, verdict))
    return Comparison(scale, cells, {} if scale == "smoke" else _orders(printed, there))


def csv(comparison: Comparison) -> bytes:
    """A row for every printed number, in the order of `published`: columns as `COLUMNS`."""
    rows = []
    for place, number in published.load().items():
        cell = comparison.cells[place]
        here = cell.number or Number(math.nan)
        rows.append(
            (
                *place,
                *(number.mean, number.std, number.runs, number.status),
                *(here.mean, here.std, here.runs, comparison.scale, cell.word),
                " ".join(cell.measured.keys) if cell.measured else "",
            )
        )
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"published_runs": "Int64", "measured_runs": "Int64"})
    return frame.to_csv(index=False, lineterminator="\n").encode()


def places() -> Iterator[Place]:
    """All cells, those of print first."""
    printed = published.load()
    yield from printed
    for paper in layouts.papers().values():
        for name in paper.tables:
            yield from (place for place in paper.places(name) if place not in printed)


def counts(paper: Paper, tables: Sequence[str], comparison: Comparison, once: bool = False) -> dict[str, int]:
    """How many cells some tables of a paper have (``all``), how many were ``measured``, and how often each word stands.

    ``once`` leaves out what another table has, too.
    """
    places = [place for name in tables for place in of_table(paper, name) if not (once and paper.original(place))]
    words = Counter(comparison.cells[place].word for place in places)
    there = sum(comparison.cells[place].number is not None for place in places)
    return {"all": len(places), "measured": there, **words}


def of_table(paper: Paper, name: str) -> list[Place]:
    """The places of a table; of one that is no grid of rows and columns, those that print fills."""
    printed = published.load()
    return [place for place in paper.places(name) if place in printed or not paper.tables[name].flat]


def checked(paper: Paper, name: str, claim: Claim, comparison: Comparison) -> list[Checked]:
    """A claim, column by column, in print and as measured; not by what ran at scale smoke or on generated data."""
    table = paper.tables[name]
    found = []
    for column in claim.columns or table.leaves:
        cells = {
            row: comparison.cells[_at(paper, name, row, column)] for row in table.rows if not table.rows[row].minus
        }
        in_print = {row: cell.published for row, cell in cells.items() if cell.published}
        printed = {row: _number(number) for row, number in in_print.items() if number.status == "target"}
        here = {
            row: number
            for row, cell in cells.items()
            if comparison.scale != "smoke" and cell.measured and (number := cell.measured.compared)
        }
        theirs = _contrast(claim, printed, verdicts.pooled(printed.values()))
        ours = _contrast(claim, here, verdicts.pooled([*printed.values(), *here.values()]))
        found.append(Checked(column, *theirs, *ours))
    return found


def _check_accuracy(place: Place, cell: Measured, number: Number) -> None:
    if not 0 <= number.mean <= 100:
        raise ValueError(f"measured cells: {tuple(place)}: {number.mean} is no accuracy in percent.")
    if cell.tests is None or cell.classes is None:
        raise ValueError(f"measured cells: {tuple(place)}: an accuracy needs its tests and classes.")


def _verdict(
    printed: Published | None, here: Measured | None, spread: verdicts.Spread | None, scale: Scale
) -> Verdict | None:
    """What is said of a measured value; nothing at a scale other than that of the paper."""
    if printed is None or here is None or here.number is None or here.generated or scale != "paper":
        return None
    match printed.status:
        case "target":
            return verdicts.value(_number(printed), here.number, spread, here.tests or 1)
        case "failed":
            return verdicts.failed(here.number, here.diverged, here.classes or 1)
        case "formula" | "setting":
            expected = here.expected if printed.mean is None else printed.mean
            return None if expected is None else verdicts.exactly(expected, here.number.mean)
    return None


def _word(printed: Published | None, here: Measured | None, verdict: Verdict | None) -> str:
    if verdict:
        return verdict.word
    if printed is None or printed.status == "absent":
        return UNPRINTED
    if here and here.number:
        return STOOD_IN if here.generated else UNJUDGED
    return UNMEASURED


def _number(printed: Published) -> Number:
    if printed.mean is None:
        raise ValueError(f"{printed.place} has no number in print.")
    return Number(printed.mean, printed.std, printed.runs)


def _column(place: Place) -> tuple[str, str, str, str]:
    return place.paper, place.table, place.column, place.metric


def _columns(
    printed: Mapping[Place, Published], there: Mapping[Place, Measured]
) -> dict[tuple[str, str, str, str], tuple[dict[str, Number], dict[str, Number]]]:
    """Of each column that print has targets in, these and the measured numbers by row."""
    found: dict[tuple[str, str, str, str], tuple[dict[str, Number], dict[str, Number]]] = {}
    for place, number in printed.items():
        if number.status == "target":
            targets, here = found.setdefault(_column(place), ({}, {}))
            targets[place.row] = _number(number)
            if (cell := there.get(place)) and (found_here := cell.compared):
                here[place.row] = found_here
    return found


def _spreads(
    printed: Mapping[Place, Published], there: Mapping[Place, Measured]
) -> dict[tuple[str, str, str, str], verdicts.Spread | None]:
    """How runs vary in each column, by all standard deviations of print and of ours."""
    columns = _columns(printed, there)
    return {name: verdicts.pooled([*theirs.values(), *ours.values()]) for name, (theirs, ours) in columns.items()}


def _orders(printed: Mapping[Place, Published], there: Mapping[Place, Measured]) -> dict[tuple[str, str, str], Order]:
    orders = {name[:3]: verdicts.order(theirs, ours) for name, (theirs, ours) in _columns(printed, there).items()}
    return {name: order for name, order in orders.items() if order}


def _at(paper: Paper, table: str, row: str, column: str) -> Place:
    return Place(paper.paper, table, row, column, paper.tables[table].metric_of(row, column))


def _contrast(
    claim: Claim, numbers: Mapping[str, Number], spread: verdicts.Spread | None
) -> tuple[Contrast | None, str]:
    """The contrast that a claim is, with the row that it is to."""
    others = [row for row in numbers if row not in {claim.own} and claim.over in {None, row}]
    if claim.own not in numbers or not others:
        return None, ""
    best = max(others, key=lambda row: numbers[row].mean)
    return verdicts.contrast(numbers[claim.own], numbers[best], spread), best


def _derived(paper: Paper, there: Mapping[Place, Measured]) -> dict[Place, Measured]:
    """What is made of other cells, where they are there: rows that are differences, then numbers in running text."""
    found: dict[Place, Measured] = {}
    for name, table in paper.tables.items():
        for row, entry in table.rows.items():
            for column in table.leaves if entry.minus else ():
                first, second = (there.get(_at(paper, name, other, column)) for other in entry.minus or ())
                found |= _minus(_at(paper, name, row, column), first, second, 1)
    for text in paper.text:
        found |= _text(paper, text, {**there, **found})
    return found


def _text(paper: Paper, text: Text, there: Mapping[Place, Measured]) -> dict[Place, Measured]:
    place = Place(paper.paper, layouts.TEXT, text.row, text.column, text.metric)
    if text.minus:
        first, second = (there.get(_at(paper, *names)) for names in text.minus)
        return _minus(place, first, second, text.factor)
    if text.largest:
        table, row = text.largest
        cells = [there.get(_at(paper, table, row, column)) for column in paper.tables[table].leaves]
        gains = [cell for cell in cells if cell and cell.number]
        if len(gains) == len(cells):
            return {place: max(gains, key=lambda cell: cell.number.mean if cell.number else -math.inf)}
    return {}


def _minus(place: Place, one: Measured | None, two: Measured | None, factor: float) -> dict[Place, Measured]:
    """A cell that is the difference of two others."""
    if not (one and two and one.number and two.number):
        return {}
    return {
        place: Measured(
            one.number.minus(two.number, factor),
            tuple(dict.fromkeys((*one.keys, *two.keys))),
            diverged=one.diverged + two.diverged,
            generated=one.generated or two.generated,
        )
    }
