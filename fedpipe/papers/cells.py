"""What is measured, put beside what is printed: cells with their verdicts, columns with their order, claims.

Measured cells come by their places, those of `published` or of `layouts`; what is not there was not run.
`compare_cells`
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
from fedpipe.papers.published import CellId, PublishedNumber
from fedpipe.papers.verdicts import Contrast, Number, OrderComparison, Scale, Verdict

UNJUDGED = "not judged"  #: measured, but there is nothing that it could be judged by
UNMEASURED = "not measured"
ON_GENERATED_DATA = "not judged (generated data)"  #: measured on noise in the shape of data that are not here
UNPUBLISHED = "not in print"
NOT_RUN = "not run"  #: the reason of a cell that no row tells of
CSV_COLUMNS = (  #: of cells.csv
    *CellId._fields,
    *("published_mean", "published_std", "published_runs", "status"),
    *("measured_mean", "measured_std", "measured_runs", "scale", "verdict", "keys"),
)


@dataclass(frozen=True)
class MeasuredCell:
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
    missing_hours: float | None = None
    diverged_runs: int = 0
    test_samples: int | None = None
    classes: int | None = None
    expected: float | None = None
    is_generated: bool = False
    trace_command: str = ""
    reason: str = ""

    @property
    def comparable_number(self) -> Number | None:
        """The number as it is compared with others, varying as its test set asks; None where its data are generated."""
        if self.number is None or self.is_generated:
            return None
        min_std = verdicts.compute_sampling_error(self.number.mean, self.test_samples) if self.test_samples else 0.0
        return replace(self.number, min_std=min_std)


@dataclass(frozen=True)
class ComparedCell:
    """A cell: what is printed, what is measured, and what is said of the two; ``word`` is never empty."""

    cell_id: CellId
    published_number: PublishedNumber | None
    measurement: MeasuredCell | None
    verdict: Verdict | None
    word: str

    @property
    def number(self) -> Number | None:
        """What was measured, None where nothing was."""
        return self.measurement.number if self.measurement else None


class ClaimCheck(NamedTuple):
    """A claim in one column: the contrast in print, the one measured, and with which row each is."""

    column: str
    published_contrast: Contrast | None
    published_rival: str
    measured_contrast: Contrast | None
    measured_rival: str


@dataclass(frozen=True)
class PaperComparison:
    """All cells by place, and the order of each column with at least two methods, by paper, table and column."""

    scale: Scale
    cells: Mapping[CellId, ComparedCell]
    orders: Mapping[tuple[str, str, str], OrderComparison]


def compare_cells(measured_cells: Mapping[CellId, MeasuredCell], scale: Scale) -> PaperComparison:
    """Join what is measured with what is printed, and judge what the scale allows: values only at scale ``paper``.

    Raises
    ------
    ValueError
        The scale or a place is unknown, a cell is made of others, or a number is no accuracy, or lacks what it is of.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale {scale!r} is unknown; it should be one of {', '.join(get_args(Scale))}.")
    known_ids = set(iter_cell_ids())
    if unknown_ids := [tuple(cell_id) for cell_id in measured_cells if cell_id not in known_ids]:
        raise ValueError(f"measured cells: {unknown_ids[0]} is no cell of a paper.")
    for cell_id, cell in measured_cells.items():
        if cell_id.metric == "accuracy_pct" and cell.number:
            _check_accuracy(cell_id, cell, cell.number)
    published_numbers = published.load_published()
    all_measured = dict(measured_cells)
    for paper in layouts.load_papers().values():
        derived_cells = _derive_cells(paper, all_measured)
        if duplicate_ids := [tuple(cell_id) for cell_id in derived_cells if cell_id in measured_cells]:
            raise ValueError(
                f"measured cells: {duplicate_ids[0]} is made of other cells, and can't be measured beside them."
            )
        all_measured |= derived_cells
    spreads = _compute_spreads(published_numbers, all_measured)
    cells = {}
    for cell_id in iter_cell_ids():
        cell_pair = published_numbers.get(cell_id), all_measured.get(cell_id)
        verdict = _judge_cell(*cell_pair, spreads.get(_get_column_key(cell_id)), scale)
        cells[cell_id] = ComparedCell(cell_id, *cell_pair, verdict, _choose_word(*cell_pair, verdict))
    return PaperComparison(
        scale, cells, {} if scale == "smoke" else _compare_column_orders(published_numbers, all_measured)
    )


def encode_comparison_csv(comparison: PaperComparison) -> bytes:
    """A row for every printed number, in the order of `published`: columns as `CSV_COLUMNS`."""
    rows = []
    for cell_id, number in published.load_published().items():
        cell = comparison.cells[cell_id]
        measured_number = cell.number or Number(math.nan)
        rows.append(
            (
                *cell_id,
                *(number.mean, number.std, number.runs, number.status),
                *(measured_number.mean, measured_number.std, measured_number.runs, comparison.scale, cell.word),
                " ".join(cell.measurement.keys) if cell.measurement else "",
            )
        )
    frame = pd.DataFrame(rows, columns=list(CSV_COLUMNS)).astype({"published_runs": "Int64", "measured_runs": "Int64"})
    return frame.to_csv(index=False, lineterminator="\n").encode()


def iter_cell_ids() -> Iterator[CellId]:
    """All cells, those of print first."""
    published_numbers = published.load_published()
    yield from published_numbers
    for paper in layouts.load_papers().values():
        for name in paper.tables:
            yield from (cell_id for cell_id in paper.iter_cell_ids(name) if cell_id not in published_numbers)


def count_verdicts(
    paper: Paper, tables: Sequence[str], comparison: PaperComparison, is_without_repeats: bool = False
) -> dict[str, int]:
    """How many cells some tables of a paper have (``all``), how many were ``measured``, and how often each word stands.

    ``is_without_repeats`` leaves out what another table has, too.
    """
    cell_ids = [
        cell_id
        for name in tables
        for cell_id in get_table_cell_ids(paper, name)
        if not (is_without_repeats and paper.find_original(cell_id))
    ]
    words = Counter(comparison.cells[cell_id].word for cell_id in cell_ids)
    measured_count = sum(comparison.cells[cell_id].number is not None for cell_id in cell_ids)
    return {"all": len(cell_ids), "measured": measured_count, **words}


def get_table_cell_ids(paper: Paper, name: str) -> list[CellId]:
    """The places of a table; of one that is no grid of rows and columns, those that print fills."""
    published_numbers = published.load_published()
    return [
        cell_id for cell_id in paper.iter_cell_ids(name) if cell_id in published_numbers or not paper.tables[name].flat
    ]


def check_claim(paper: Paper, name: str, claim: Claim, comparison: PaperComparison) -> list[ClaimCheck]:
    """A claim, column by column, in print and as measured; not by what ran at scale smoke or on generated data."""
    table = paper.tables[name]
    claim_checks = []
    for column in claim.columns or table.column_labels:
        cells = {
            row: comparison.cells[_make_cell_id(paper, name, row, column)]
            for row in table.rows
            if not table.rows[row].minus
        }
        published_cells = {row: cell.published_number for row, cell in cells.items() if cell.published_number}
        published_by_row = {
            row: _get_published_number(number) for row, number in published_cells.items() if number.status == "target"
        }
        measured_by_row = {
            row: number
            for row, cell in cells.items()
            if comparison.scale != "smoke" and cell.measurement and (number := cell.measurement.comparable_number)
        }
        published_contrast = _compute_claim_contrast(
            claim, published_by_row, verdicts.pool_spreads(published_by_row.values())
        )
        measured_contrast = _compute_claim_contrast(
            claim, measured_by_row, verdicts.pool_spreads([*published_by_row.values(), *measured_by_row.values()])
        )
        claim_checks.append(ClaimCheck(column, *published_contrast, *measured_contrast))
    return claim_checks


def _check_accuracy(cell_id: CellId, cell: MeasuredCell, number: Number) -> None:
    if not 0 <= number.mean <= 100:
        raise ValueError(f"measured cells: {tuple(cell_id)}: {number.mean} is no accuracy in percent.")
    if cell.test_samples is None or cell.classes is None:
        raise ValueError(f"measured cells: {tuple(cell_id)}: an accuracy needs its tests and classes.")


def _judge_cell(
    published_cell: PublishedNumber | None,
    measured_cell: MeasuredCell | None,
    spread: verdicts.Spread | None,
    scale: Scale,
) -> Verdict | None:
    """What is said of a measured value; nothing at a scale other than that of the paper."""
    if (
        published_cell is None
        or measured_cell is None
        or measured_cell.number is None
        or measured_cell.is_generated
        or scale != "paper"
    ):
        return None
    match published_cell.status:
        case "target":
            return verdicts.judge_value(
                _get_published_number(published_cell), measured_cell.number, spread, measured_cell.test_samples or 1
            )
        case "failed":
            return verdicts.judge_failure(measured_cell.number, measured_cell.diverged_runs, measured_cell.classes or 1)
        case "formula" | "setting":
            expected = measured_cell.expected if published_cell.mean is None else published_cell.mean
            return None if expected is None else verdicts.judge_exact_value(expected, measured_cell.number.mean)
    return None


def _choose_word(
    published_cell: PublishedNumber | None, measured_cell: MeasuredCell | None, verdict: Verdict | None
) -> str:
    if verdict:
        return verdict.word
    if published_cell is None or published_cell.status == "absent":
        return UNPUBLISHED
    if measured_cell and measured_cell.number:
        return ON_GENERATED_DATA if measured_cell.is_generated else UNJUDGED
    return UNMEASURED


def _get_published_number(published_cell: PublishedNumber) -> Number:
    if published_cell.mean is None:
        raise ValueError(f"{published_cell.cell_id} has no number in print.")
    return Number(published_cell.mean, published_cell.std, published_cell.runs)


def _get_column_key(cell_id: CellId) -> tuple[str, str, str, str]:
    return cell_id.paper, cell_id.table, cell_id.column, cell_id.metric


def _group_by_column(
    published_numbers: Mapping[CellId, PublishedNumber], measured_cells: Mapping[CellId, MeasuredCell]
) -> dict[tuple[str, str, str, str], tuple[dict[str, Number], dict[str, Number]]]:
    """Of each column that print has targets in, these and the measured numbers by row."""
    columns: dict[tuple[str, str, str, str], tuple[dict[str, Number], dict[str, Number]]] = {}
    for cell_id, number in published_numbers.items():
        if number.status == "target":
            targets, measured_by_row = columns.setdefault(_get_column_key(cell_id), ({}, {}))
            targets[cell_id.row] = _get_published_number(number)
            if (cell := measured_cells.get(cell_id)) and (comparable_number := cell.comparable_number):
                measured_by_row[cell_id.row] = comparable_number
    return columns


def _compute_spreads(
    published_numbers: Mapping[CellId, PublishedNumber], measured_cells: Mapping[CellId, MeasuredCell]
) -> dict[tuple[str, str, str, str], verdicts.Spread | None]:
    """How runs vary in each column, by all standard deviations of print and of ours."""
    columns = _group_by_column(published_numbers, measured_cells)
    return {
        name: verdicts.pool_spreads([*published_by_row.values(), *measured_by_row.values()])
        for name, (published_by_row, measured_by_row) in columns.items()
    }


def _compare_column_orders(
    published_numbers: Mapping[CellId, PublishedNumber], measured_cells: Mapping[CellId, MeasuredCell]
) -> dict[tuple[str, str, str], OrderComparison]:
    orders = {
        name[:3]: verdicts.compare_orders(published_by_row, measured_by_row)
        for name, (published_by_row, measured_by_row) in _group_by_column(published_numbers, measured_cells).items()
    }
    return {name: order for name, order in orders.items() if order}


def _make_cell_id(paper: Paper, table: str, row: str, column: str) -> CellId:
    return CellId(paper.paper, table, row, column, paper.tables[table].get_metric(row, column))


def _compute_claim_contrast(
    claim: Claim, numbers: Mapping[str, Number], spread: verdicts.Spread | None
) -> tuple[Contrast | None, str]:
    """The contrast that a claim is, with the row that it is to."""
    other_rows = [row for row in numbers if row not in {claim.own} and claim.over in {None, row}]
    if claim.own not in numbers or not other_rows:
        return None, ""
    best = max(other_rows, key=lambda row: numbers[row].mean)
    return verdicts.compute_contrast(numbers[claim.own], numbers[best], spread), best


def _derive_cells(paper: Paper, measured_cells: Mapping[CellId, MeasuredCell]) -> dict[CellId, MeasuredCell]:
    """What is made of other cells, where they are there: rows that are differences, then numbers in running text."""
    derived_cells: dict[CellId, MeasuredCell] = {}
    for name, table in paper.tables.items():
        for row, entry in table.rows.items():
            for column in table.column_labels if entry.minus else ():
                first, second = (
                    measured_cells.get(_make_cell_id(paper, name, operand_row, column))
                    for operand_row in entry.minus or ()
                )
                derived_cells |= _subtract_cells(_make_cell_id(paper, name, row, column), first, second, 1)
    for text in paper.text:
        derived_cells |= _derive_text_number(paper, text, {**measured_cells, **derived_cells})
    return derived_cells


def _derive_text_number(
    paper: Paper, text: Text, measured_cells: Mapping[CellId, MeasuredCell]
) -> dict[CellId, MeasuredCell]:
    cell_id = CellId(paper.paper, layouts.TEXT_TABLE, text.row, text.column, text.metric)
    if text.minus:
        first, second = (measured_cells.get(_make_cell_id(paper, *names)) for names in text.minus)
        return _subtract_cells(cell_id, first, second, text.factor)
    if text.largest:
        table, row = text.largest
        cells = [
            measured_cells.get(_make_cell_id(paper, table, row, column)) for column in paper.tables[table].column_labels
        ]
        gains = [cell for cell in cells if cell and cell.number]
        if len(gains) == len(cells):
            return {cell_id: max(gains, key=lambda cell: cell.number.mean if cell.number else -math.inf)}
    return {}


def _subtract_cells(
    cell_id: CellId, first: MeasuredCell | None, second: MeasuredCell | None, factor: float
) -> dict[CellId, MeasuredCell]:
    """A cell that is the difference of two others."""
    if not (first and second and first.number and second.number):
        return {}
    return {
        cell_id: MeasuredCell(
            first.number.subtract(second.number, factor),
            tuple(dict.fromkeys((*first.keys, *second.keys))),
            diverged_runs=first.diverged_runs + second.diverged_runs,
            is_generated=first.is_generated or second.is_generated,
        )
    }
