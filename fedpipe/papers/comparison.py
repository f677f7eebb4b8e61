"""Measured cells next to published ones: values with verdicts, orders of columns, claims, and `cells.csv`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias, cast

import pandas as pd

from fedpipe.papers import layouts, published
from fedpipe.papers.layouts import Claim, Paper
from fedpipe.papers.published import CellId, PublishedNumber
from fedpipe.report import contrasts
from fedpipe.report.contrasts import ColumnOrder, Contrast, RunMean, Spread

Preset: TypeAlias = Literal["full", "reduced", "smoke"]
ColumnKey: TypeAlias = tuple[str, str, str, str]  #: paper, table, column and metric
AGREES, DIFFERS = "agrees", "differs"
UNJUDGED = "not judged"  #: measured, but without a criterion
UNMEASURED = "not measured"
ON_GENERATED_DATA = "not judged (generated data)"
UNPUBLISHED = "not published"
NOT_RUN = "not run"  #: default reason
PARTITION_STD_DF = 4  #: degrees of freedom of `layouts.Table.partition_std`: two schemes with three draws each
DIFFERENCE_STD_DF = 2  #: degrees of freedom of `layouts.Table.difference_std`: three draws
CSV_COLUMNS = (  #: columns of cells.csv
    *CellId._fields,
    *("published_mean", "published_std", "published_runs", "status"),
    *("measured_mean", "measured_std", "measured_runs", "preset", "verdict", "keys", "origin"),
)


@dataclass(frozen=True)
class MeasuredCell:
    """A measured cell. If ``number`` is None, ``reason`` explains why.

    ``keys`` are those of the runs, and ``origins`` describes each run by its key. An accuracy has its number of
    ``test_samples`` and ``classes``. ``expected`` is the value of a published formula. ``is_incomplete``: some seeds or
    searched values have not run. ``trace_command`` prints where the number comes from.
    """

    number: RunMean | None
    keys: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    diverged_runs: int = 0
    test_samples: int | None = None
    classes: int | None = None
    expected: float | None = None
    is_generated: bool = False
    is_incomplete: bool = False
    trace_command: str = ""
    reason: str = ""

    @property
    def comparable_number(self) -> RunMean | None:
        """The number with the sampling error of its test set. None on generated data."""
        return None if self.number is None or self.is_generated else self.add_sampling_error(self.number)

    def add_sampling_error(self, number: RunMean) -> RunMean:
        """The number with the sampling error of this cell's test set."""
        error = contrasts.compute_sampling_error(number.mean, self.test_samples) if self.test_samples else 0.0
        return replace(number, min_std=error)

    def compute_scaled_difference(self, other: MeasuredCell, factor: float = 1.0) -> MeasuredCell:
        """The difference, times a factor. If one of both has no number, its reason."""
        if not (self.number and other.number):
            return other if self.number else self
        return MeasuredCell(
            self.number.compute_scaled_difference(other.number, factor),
            tuple(dict.fromkeys((*self.keys, *other.keys))),
            {**self.origins, **other.origins},
            diverged_runs=self.diverged_runs + other.diverged_runs,
            is_generated=self.is_generated or other.is_generated,
            is_incomplete=self.is_incomplete or other.is_incomplete,
        )


class Verdict(NamedTuple):
    """Whether a measured value agrees with the published one, and their difference."""

    agrees: bool
    contrast: Contrast | None = None


@dataclass(frozen=True)
class ComparedCell:
    """A cell: what is published, what is measured, and the verdict. ``verdict_text`` is never empty."""

    cell_id: CellId
    published_number: PublishedNumber | None
    measurement: MeasuredCell
    verdict: Verdict | None

    @property
    def verdict_text(self) -> str:
        """The verdict in words, or why there is none."""
        if self.verdict:
            return AGREES if self.verdict.agrees else DIFFERS
        if self.published_number is None or self.published_number.status == "absent":
            return UNPUBLISHED
        if self.measurement.number:
            return ON_GENERATED_DATA if self.measurement.is_generated else UNJUDGED
        return UNMEASURED


class ClaimCheck(NamedTuple):
    """A claim in one column: the published and the measured difference, each with its rival row."""

    column: str
    published_contrast: Contrast | None
    published_rival: str
    measured_contrast: Contrast | None
    measured_rival: str


@dataclass(frozen=True)
class PaperComparison:
    """All cells by id, the targets and measured numbers of each column by row, and the orders of columns.

    An order has the name of paper, table and column, and the kind of its methods: ``all``, ``global`` or ``personal``.
    If a column has methods of only one kind, it has no order of ``all``.
    """

    preset: Preset
    cells: Mapping[CellId, ComparedCell]
    columns: Mapping[ColumnKey, tuple[dict[str, RunMean], dict[str, RunMean]]]
    orders: Mapping[tuple[str, str, str, str], ColumnOrder]


def compare_with_published_cells(measured_cells: Mapping[CellId, MeasuredCell], preset: Preset) -> PaperComparison:
    """Join measured with published cells, and judge what the preset allows: values only at preset ``full``."""
    all_measured, cell_ids = dict(measured_cells), list_all_cell_ids()
    for cell_id in measured_cells.keys() - set(cell_ids):
        raise ValueError(f"measured cells: {tuple(cell_id)} is not a cell of a paper.")
    for cell_id, cell in measured_cells.items():
        if cell_id.metric == "accuracy_pct" and cell.number:
            name = f"measured cells: {tuple(cell_id)}"
            if not 0 <= cell.number.mean <= 100:
                raise ValueError(f"{name}: {cell.number.mean} is not an accuracy in percent.")
            if cell.test_samples is None or cell.classes is None:
                raise ValueError(f"{name}: an accuracy needs its numbers of test samples and classes.")
    for paper in layouts.load_papers().values():
        all_measured = _add_derived_cells(paper, all_measured)
    columns = _pair_targets_with_measured_means({} if preset == "smoke" else all_measured)
    cells, missing = {}, MeasuredCell(None, reason=NOT_RUN)
    for cell_id in cell_ids:
        pair = published.load_published_numbers().get(cell_id), all_measured.get(cell_id, missing)
        spread = _pool_standard_deviations(*columns.get(_get_column_key(cell_id), ({}, {})))
        cells[cell_id] = ComparedCell(
            cell_id, *pair, _compute_cell_verdict(*pair, spread) if preset == "full" else None
        )
    return PaperComparison(preset, cells, columns, _compare_all_orders(columns))


def encode_comparison_csv(comparison: PaperComparison) -> bytes:
    """A row for each published number, in the order of `published.csv`, with the columns `CSV_COLUMNS`."""
    rows = []
    for cell_id, number in published.load_published_numbers().items():
        cell = comparison.cells[cell_id]
        ours = cell.measurement.number or RunMean(math.nan)
        numbers = number.mean, number.std, number.runs, number.status, ours.mean, ours.std, ours.runs
        keys, origin = " ".join(cell.measurement.keys), "; ".join(dict.fromkeys(cell.measurement.origins.values()))
        rows.append((*cell_id, *numbers, comparison.preset, cell.verdict_text, keys, origin))
    frame = pd.DataFrame(rows, columns=list(CSV_COLUMNS)).astype({"published_runs": "Int64", "measured_runs": "Int64"})
    return frame.to_csv(index=False, lineterminator="\n").encode()


def list_all_cell_ids() -> list[CellId]:
    """The ids of all cells, published ones first."""
    papers = layouts.load_papers().values()
    cell_ids = [cell_id for paper in papers for name in paper.tables for cell_id in paper.iterate_cell_ids(name)]
    return list(dict.fromkeys([*published.load_published_numbers(), *cell_ids]))


def list_table_cell_ids(paper: Paper, table_name: str) -> list[CellId]:
    """List the ids of a table's cells. A table of settings has only those that the paper fills."""
    if table_name == layouts.TEXT_TABLE:
        return [paper.make_prose_number_id(text) for text in paper.text]
    table, published_numbers = paper.tables[table_name], published.load_published_numbers()
    is_sparse = table.metric == "hyperparameter"
    return [cell_id for cell_id in paper.iterate_cell_ids(table_name) if cell_id in published_numbers or not is_sparse]


def compute_claim_checks(paper: Paper, name: str, claim: Claim, comparison: PaperComparison) -> list[ClaimCheck]:
    """Check a claim column by column. Runs at preset smoke or on generated data show nothing.

    At preset ``full``, the interval includes the variation between partitions, if the table has it.
    """
    checks = []
    for column in claim.columns or paper.tables[name].column_paths:
        key = _get_column_key(paper.make_cell_id(name, claim.row, column))
        targets, ours = comparison.columns.get(key, ({}, {}))
        paper_contrast = _compute_claim_contrast(claim, targets, _pool_standard_deviations(targets, {}))
        difference_std = paper.tables[name].difference_std.get(column) if comparison.preset == "full" else None
        our_contrast = _compute_claim_contrast(claim, ours, _pool_standard_deviations(targets, ours), difference_std)
        checks.append(ClaimCheck(column, *paper_contrast, *our_contrast))
    return checks


def _compute_cell_verdict(number: PublishedNumber | None, cell: MeasuredCell, spread: Spread | None) -> Verdict | None:
    """Whether a measured value agrees: the interval of the difference contains zero, or a formula's value is equal.

    The interval includes the sampling error and, if the table has it, the variation between partitions.

    A method that failed in the paper agrees if a run diverged, or if it is not above twice the accuracy of chance.
    """
    if number is None or cell.number is None or cell.is_generated:
        return None
    if number.status == "target":
        table = layouts.load_papers()[number.cell_id.paper].tables.get(number.cell_id.table)
        partition_std = table.partition_std.get(number.cell_id.column) if table else None
        partition_spread = Spread(partition_std, PARTITION_STD_DF) if partition_std else None
        target = cell.add_sampling_error(_make_run_mean(number))
        contrast = contrasts.compute_contrast(cell.add_sampling_error(cell.number), target, spread, partition_spread)
        return None if contrast.low is None else Verdict(contrast.sign == "?", contrast)
    if number.status == "failed":
        return Verdict(bool(cell.diverged_runs) or cell.number.mean <= 200 / (cell.classes or 1))
    expected = cell.expected if number.mean is None else number.mean
    if number.status in {"formula", "setting"} and expected is not None:
        difference = cell.number.mean - expected
        return Verdict(abs(difference) <= contrasts.RELATIVE_TOLERANCE * abs(expected), Contrast(difference))
    return None


def _make_run_mean(number: PublishedNumber) -> RunMean:
    return RunMean(cast(float, number.mean), number.std, number.runs)


def _get_column_key(cell_id: CellId) -> ColumnKey:
    return cell_id.paper, cell_id.table, cell_id.column, cell_id.metric


def _pair_targets_with_measured_means(
    measured_cells: Mapping[CellId, MeasuredCell],
) -> dict[ColumnKey, tuple[dict[str, RunMean], dict[str, RunMean]]]:
    """The targets of each column by row, and the measured numbers of these rows."""
    columns: dict[ColumnKey, tuple[dict[str, RunMean], dict[str, RunMean]]] = {}
    for cell_id, number in published.load_published_numbers().items():
        if number.status == "target":
            targets, ours = columns.setdefault(_get_column_key(cell_id), ({}, {}))
            targets[cell_id.row] = _make_run_mean(number)
            if (cell := measured_cells.get(cell_id)) and (comparable_number := cell.comparable_number):
                ours[cell_id.row] = comparable_number
    return columns


def _compare_all_orders(
    columns: Mapping[ColumnKey, tuple[Mapping[str, RunMean], Mapping[str, RunMean]]],
) -> dict[tuple[str, str, str, str], ColumnOrder]:
    """Compare the orders of each column's methods: all, those with one global model, and personalized ones."""
    orders = {}
    for (paper, table, column, _), (targets, ours) in columns.items():
        layout = layouts.load_papers()[paper].tables.get(table)
        kinds = {row: layout.get_model_kind(row) if layout and row in layout.rows else "personal" for row in targets}
        names = [*dict.fromkeys(kinds[row] for row in targets if row in ours)]
        for name in ["all", *sorted(names)] if len(names) > 1 else names:
            published_side, measured_side = (
                {row: number for row, number in side.items() if name in ("all", kinds[row])} for side in (targets, ours)
            )
            if order := contrasts.compare_method_orders(published_side, measured_side):
                orders[paper, table, column, name] = order
    return orders


def _pool_standard_deviations(targets: Mapping[str, RunMean], ours: Mapping[str, RunMean]) -> Spread | None:
    return contrasts.pool_standard_deviations([*targets.values(), *ours.values()])


def _compute_claim_contrast(
    claim: Claim, numbers: Mapping[str, RunMean], spread: Spread | None, difference_std: float | None = None
) -> tuple[Contrast | None, str]:
    """The difference that a claim is about, with the rival row.

    ``difference_std`` is its standard deviation between draws of the partition.
    """
    rivals = [row for row in numbers if row != claim.row and claim.rival in {None, row}]
    if claim.row not in numbers or not rivals:
        return None, ""
    best = max(rivals, key=lambda row: numbers[row].mean)
    # `compute_contrast` adds the variance of each of both runs
    partition_spread = Spread(difference_std / math.sqrt(2), DIFFERENCE_STD_DF) if difference_std else None
    return contrasts.compute_contrast(numbers[claim.row], numbers[best], spread, partition_spread), best


def _add_derived_cells(paper: Paper, measured_cells: Mapping[CellId, MeasuredCell]) -> dict[CellId, MeasuredCell]:
    """Add rows that are differences of rows, then numbers in running text, as far as their cells were measured."""
    cells = dict(measured_cells)
    differences = [
        (paper.make_cell_id(name, row, column), [(name, operand, column) for operand in entry.minus], 1.0)
        for name, table in paper.tables.items()
        for row, entry in table.rows.items()
        if entry.minus
        for column in table.column_paths
    ]
    differences += [
        (paper.make_prose_number_id(text), list(text.minus), text.factor) for text in paper.text if text.minus
    ]
    for cell_id, operands, factor in differences:
        first, second = (cells.get(paper.make_cell_id(*names)) for names in operands)
        if first and second and first.number and second.number:
            cells[cell_id] = first.compute_scaled_difference(second, factor)
    for text in paper.text:
        if text.largest:
            name, row = text.largest
            gains = [cells.get(paper.make_cell_id(name, row, column)) for column in paper.tables[name].column_paths]
            measured = [(cell.number.mean, index) for index, cell in enumerate(gains) if cell and cell.number]
            if len(measured) == len(gains) and (best := gains[max(measured)[1]]):
                cells[paper.make_prose_number_id(text)] = best
    return cells
