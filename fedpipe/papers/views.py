"""What the pages' templates are told: tables, figures and cells as they are shown, in words, signs and links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedpipe.papers import cells, layouts, published
from fedpipe.papers.cells import ComparedCell, MeasuredCell, PaperComparison
from fedpipe.papers.layouts import DIAGRAM_REASON, Head, Paper, Table
from fedpipe.papers.published import CellId
from fedpipe.papers.svg import SvgFigure, inline_svg
from fedpipe.papers.verdicts import Contrast, Number, OrderComparison

DASH = "–"
SIGNS = {  #: of verdicts, which colors repeat
    "agrees": "✓",
    "agrees (one seed)": "✓¹",
    "agrees (two seeds)": "✓²",
    "near": "≈",
    "differs": "✗",
}
DIVERGED_NOTE = "diverged: in some round no participant's update was finite"
GENERATED_NOTE = "on generated data of the data set's shape, since the data are not here"
INCOMPLETE_NOTE = "not of all its runs: seeds, or values that its parameters are searched in, are missing"


@dataclass
class Notes:
    """The notes below a table, each once, by the letters that refer to them."""

    texts: list[str] = field(default_factory=list)

    def get_letter(self, text: str) -> str:
        """The letter of a note."""
        if text not in self.texts:
            self.texts.append(text)
        return _format_letters(self.texts.index(text))


@dataclass(frozen=True)
class CellView:
    """A cell as it is shown; ``kind`` names its colors, ``target`` the row that tells what it is made of."""

    kind: str
    word: str
    sign: str
    measured: str
    runs: str
    printed: str
    target: str
    measured_note: str = ""
    printed_note: str = ""


def build_index_context(
    comparison: PaperComparison, figures: Mapping[tuple[str, str], SvgFigure | str]
) -> dict[str, Any]:
    """What `index.html` is told: how each paper's cells and orders came out."""
    papers = list(layouts.load_papers().values())
    return {
        "title": "Four papers, made again",
        "summaries": {paper.paper: _summarize_tables(paper, comparison) for paper in papers},
        "totals": {paper.paper: _summarize_paper(paper, comparison) for paper in papers},
        "drawn": {
            paper.paper: sum(isinstance(figures.get((paper.paper, name)), SvgFigure) for name in paper.figures)
            for paper in papers
        },
    }


def build_paper_context(
    paper: Paper,
    comparison: PaperComparison,
    figures: Mapping[tuple[str, str], SvgFigure | str],
    scale_changes: Mapping[tuple[str, str], str],
) -> dict[str, Any]:
    """The variables of `paper.html`; figures and changes as in `fedpipe.papers.pages.write_pages`."""
    return {
        "changed": {
            name: changes_text for (title, name), changes_text in scale_changes.items() if title == paper.paper
        },
        "title": paper.paper,
        "paper": paper,
        "summary": _summarize_tables(paper, comparison),
        "tables": [_build_table_view(paper, name, comparison) for name in paper.tables],
        "figures": [_build_figure_view(paper, name, figures.get((paper.paper, name), "")) for name in paper.figures],
        "texts": [_build_text_view(paper, text, comparison) for text in paper.text],
        "costs": _build_cost_rows(paper, comparison),
    }


def _summarize_tables(paper: Paper, comparison: PaperComparison) -> list[dict[str, Any]]:
    """A row a table: how many cells have which verdict, and how near the orders are."""
    return [
        {"heading": name, "id": _slugify(name), "reason": table.reason}
        | _count_words(paper, [name], comparison)
        | _summarize_orders(
            [order for order_key, order in comparison.orders.items() if order_key[:2] == (paper.paper, name)]
        )
        for name, table in paper.tables.items()
    ]


def _summarize_paper(paper: Paper, comparison: PaperComparison) -> dict[str, Any]:
    """The same of a whole paper, where a number, or a column, that stands in two tables counts once."""
    orders = [
        order
        for order_key, order in comparison.orders.items()
        if order_key[0] == paper.paper and not _is_repeated_column(paper, *order_key[1:])
    ]
    return _count_words(paper, list(paper.tables), comparison) | _summarize_orders(orders)


def _is_repeated_column(paper: Paper, table: str, column: str) -> bool:
    """Whether a column is another table's."""
    return all(
        paper.find_original(cell_id) for cell_id in cells.get_table_cell_ids(paper, table) if cell_id.column == column
    )


def _count_words(paper: Paper, tables: Sequence[str], comparison: PaperComparison) -> dict[str, Any]:
    """How many cells these tables have, how many were measured, and how many have which verdict."""
    word_counts = cells.count_verdicts(paper, tables, comparison, is_without_repeats=len(tables) > 1)
    few_seeds = word_counts.get("agrees (one seed)", 0) + word_counts.get("agrees (two seeds)", 0)
    return {word: word_counts.get(word, 0) for word in ("all", "measured", "agrees", "near", "differs")} | {
        "few": few_seeds
    }


def _summarize_orders(orders: Sequence[OrderComparison]) -> dict[str, Any]:
    taus = [order.tau for order in orders if order.tau is not None]
    ceilings = [order.expected_tau for order in orders if order.expected_tau is not None]
    confirmed_count = sum(order.is_winner_confirmed for order in orders)
    return {
        "tau": _format_fixed(sum(taus) / len(taus)) if taus else DASH,
        "ceiling": _format_fixed(sum(ceilings) / len(ceilings)) if ceilings else DASH,
        "held": f"{confirmed_count} of {len(orders)}" if orders else DASH,
    }


def _build_table_view(paper: Paper, name: str, comparison: PaperComparison) -> dict[str, Any]:
    table, notes = paper.tables[name], Notes()
    costs = {
        reason: _format_cost(missing_hours)
        for reason, missing_hours in _collect_missing_hours(paper, name, comparison).items()
    }
    hours = {reason: f": {cost}" for reason, cost in costs.items() if cost}
    views_by_id = {
        cell_id: _build_cell_view(paper, comparison.cells[cell_id], notes, hours)
        for cell_id in cells.get_table_cell_ids(paper, name)
    }
    stub, heads, body = _build_grid(table, views_by_id)
    return {
        "heading": name,
        "id": _slugify(name),
        "table": table,
        "stub": stub,
        "heads": heads,
        "body": body,
        "notes": [(_format_letters(index), text) for index, text in enumerate(notes.texts)],
        "protocols": _list_protocols(table),
        "orders": _build_order_rows(paper, name, comparison),
        "claims": [_build_claim_view(paper, name, claim, comparison) for claim in table.claims],
        "made_of": [
            _build_cell_details(paper, comparison.cells[cell_id])
            for cell_id in views_by_id
            if comparison.cells[cell_id].number
        ],
    }


def _build_grid(
    table: Table, views_by_id: Mapping[CellId, CellView]
) -> tuple[tuple[str, ...], list[list[Head]], list[tuple[tuple[str, ...], list[CellView]]]]:
    """The head's cells left of the columns, the head, and rows: their first cells, then those with numbers."""
    views_by_position = {(cell_id.row, cell_id.column): cell for cell_id, cell in views_by_id.items()}
    body: list[tuple[tuple[str, ...], list[CellView]]]
    if table.flat:
        body = [((cell_id.row, table.column_labels[cell_id.column]), [cell]) for cell_id, cell in views_by_id.items()]
        return (*table.stub, "Parameter"), [[Head("Value", 1, 1)]], body
    if table.transposed:
        body = [
            ((label,), [views_by_position[row, name] for row in table.rows])
            for name, label in table.column_labels.items()
        ]
        return table.stub, [[Head(", ".join(row.stub), 1, 1) for row in table.rows.values()]], body
    body = [
        (row.stub, [views_by_position[name, column] for column in table.column_labels])
        for name, row in table.rows.items()
    ]
    return table.stub, table.heads, body


def _build_cell_view(
    paper: Paper, cell: ComparedCell, notes: Notes, hours: Mapping[str, str] | None = None
) -> CellView:
    decimals = _get_decimals(paper, cell.cell_id)
    number, printed_text = cell.number, cell.published_number.printed_text if cell.published_number else ""
    number_text, note, runs = DASH, "", ""
    if number:
        number_text, runs = _format_number(number, decimals), f"n={number.runs}" if number.runs else ""
        diverged_note = DIVERGED_NOTE if cell.measurement and cell.measurement.diverged_runs else ""
        generated_note = GENERATED_NOTE if cell.measurement and cell.measurement.is_generated else ""
        incomplete_note = INCOMPLETE_NOTE if cell.measurement and cell.measurement.missing_hours is not None else ""
        note = ", ".join(map(notes.get_letter, filter(None, (diverged_note, generated_note, incomplete_note))))
    else:
        reason = _get_reason(cell.measurement)
        note = notes.get_letter(reason + (hours or {}).get(reason, ""))
    printed_note = ""
    if cell.published_number is None or cell.published_number.status == "absent":
        printed_note = notes.get_letter(cells.UNPUBLISHED)
    elif cell.published_number.status in {"failed", "suspect"}:
        printed_note = notes.get_letter(published.STATUS_MEANINGS[cell.published_number.status])
    kind = cell.word.partition(" ")[0] if cell.verdict else "plain"
    target = _make_cell_anchor(paper, cell.cell_id) if number else ""
    sign = SIGNS.get(cell.word, "")
    return CellView(kind, cell.word, sign, number_text, runs, printed_text or DASH, target, note, printed_note)


def _get_decimals(paper: Paper, cell_id: CellId) -> int | None:
    if cell_id.table == layouts.TEXT_TABLE:
        return 2 if cell_id.metric.endswith(("_points", "_epoch")) else None
    return paper.tables[cell_id.table].decimals


def _format_number(number: Number, decimals: int | None) -> str:
    if not math.isfinite(number.mean):
        return "not finite"
    mean = f"{number.mean:.6g}" if decimals is None else f"{number.mean:.{decimals}f}"
    std = "" if number.std is None else f"{number.std:.3g}" if decimals is None else f"{number.std:.{decimals}f}"
    return (f"{mean} ± {std}" if std else mean).replace("-", "−")


def _get_reason(measured_cell: MeasuredCell | None) -> str:
    return (measured_cell.reason if measured_cell else "") or cells.NOT_RUN


def _list_protocols(table: Table) -> list[tuple[str, str]]:
    """The protocols that a table's methods are shown by, the others' methods named."""
    names: dict[str, list[str]] = {}
    for name, row in table.rows.items():
        if row.method and table.protocol:
            names.setdefault(table.get_protocol(name), []).append(name)
    ordered = sorted(names.items(), key=lambda entry: entry[0] != table.protocol)
    return [(protocol, "" if protocol == table.protocol else ", ".join(rows)) for protocol, rows in ordered]


def _build_order_rows(paper: Paper, name: str, comparison: PaperComparison) -> list[dict[str, Any]]:
    table, rows = paper.tables[name], []
    for column, label in _get_column_paths(table).items():
        order = comparison.orders.get((paper.paper, name, column))
        if order:
            rows.append(
                {
                    "column": label,
                    "tau": DASH if order.tau is None else _format_fixed(order.tau),
                    "ceiling": DASH if order.expected_tau is None else _format_fixed(order.expected_tau),
                    "pairs": f"{order.concordant_pairs} of {order.resolved_pairs}",
                    "best": _get_row_name(table, order.best_published),
                    "ours": _get_row_name(table, order.best_measured),
                    "holds": order.is_winner_confirmed,
                    "methods": order.methods,
                }
            )
    return rows


def _build_claim_view(paper: Paper, name: str, claim: layouts.Claim, comparison: PaperComparison) -> dict[str, Any]:
    table = paper.tables[name]
    labels = _get_column_paths(table)
    rows = [
        {
            "column": labels[claim_check.column],
            "printed": _format_contrast(claim_check.published_contrast),
            "printed_over": _get_row_name(table, claim_check.published_rival),
            "measured": _format_contrast(claim_check.measured_contrast),
            "measured_over": _get_row_name(table, claim_check.measured_rival),
            "sign": claim_check.measured_contrast.sign if claim_check.measured_contrast else "",
        }
        for claim_check in cells.check_claim(paper, name, claim, comparison)
        if claim_check.published_contrast or claim_check.measured_contrast
    ]
    return {"says": claim.says, "own": _get_row_name(table, claim.own), "rows": rows}


def _format_contrast(contrast: Contrast | None) -> str:
    if contrast is None:
        return DASH
    if contrast.low is None or contrast.high is None:
        return f"{_format_signed(contrast.difference)}"
    return f"{_format_signed(contrast.difference)} [{_format_signed(contrast.low)}, {_format_signed(contrast.high)}]"


def _build_cell_details(paper: Paper, cell: ComparedCell) -> dict[str, Any]:
    """What a cell is made of, for the list at a page's end."""
    if not (cell.measurement and cell.number):
        raise ValueError(f"{cell.cell_id} was not measured.")
    decimals = _get_decimals(paper, cell.cell_id)
    band = cell.verdict.band if cell.verdict else None
    words = [cell.word]
    if cell.verdict and cell.verdict.difference is not None:
        words.append(f"difference {_format_signed(cell.verdict.difference)}")
    if band:
        words.append(f"band ±{band.width:.2f} (t·SE {band.t * band.error:.2f}, floor {band.floor:.2f})")
    table = paper.tables.get(cell.cell_id.table)
    return {
        "id": _make_cell_anchor(paper, cell.cell_id),
        "back": _slugify(cell.cell_id.table),
        "row": _get_row_name(table, cell.cell_id.row) if table else cell.cell_id.row,
        "column": _get_column_paths(table).get(cell.cell_id.column, cell.cell_id.column)
        if table
        else cell.cell_id.column,
        "measured": _format_number(cell.number, decimals),
        "runs": cell.number.runs,
        "values": {seed: f"{value:.6g}" for seed, value in cell.number.values.items()},
        "printed": (cell.published_number.printed_text if cell.published_number else "") or DASH,
        "notes": cell.published_number.notes if cell.published_number else "",
        "verdict": "; ".join(words),
        "settings": {name: _format_value(value) for name, value in cell.measurement.settings.items()},
        "keys": cell.measurement.keys,
        "hours": _format_hours(cell.measurement.hours) if math.isfinite(cell.measurement.hours) else "",
        "diverged": cell.measurement.diverged_runs,
        "trace": cell.measurement.trace_command,
    }


def _build_figure_view(paper: Paper, name: str, drawn_figure: SvgFigure | str) -> dict[str, Any]:
    figure = paper.figures[name]
    figure_context = {"heading": name, "id": _slugify(name), "says": figure.says, "study": figure.study}
    if isinstance(drawn_figure, SvgFigure):
        label = f"{paper.paper}, {name}: {figure.says}"
        svg = inline_svg(drawn_figure.svg, f"{get_figure_stem(paper, name)}-", label)
        csv = f"figures/{get_figure_stem(paper, name)}.csv"
        note = GENERATED_NOTE if drawn_figure.is_generated else ""
        return figure_context | {"svg": svg, "csv": csv, "reason": "", "note": note, "missing": drawn_figure.missing}
    return figure_context | {
        "note": "",
        "missing": "",
        "svg": "",
        "csv": "",
        "reason": DIAGRAM_REASON if figure.form == "diagram" else drawn_figure or "Not run.",
    }


def _build_text_view(paper: Paper, text: layouts.Text, comparison: PaperComparison) -> dict[str, Any]:
    cell = comparison.cells[CellId(paper.paper, layouts.TEXT_TABLE, text.row, text.column, text.metric)]
    notes = Notes()
    view = _build_cell_view(paper, cell, notes)
    status = cell.published_number.status if cell.published_number else "absent"
    return {
        "says": text.says,
        "cell": view,
        "notes": notes.texts,
        "status": published.STATUS_MEANINGS[status],
        "made_of": [_build_cell_details(paper, cell)] if cell.number else [],
    }


def _build_cost_rows(paper: Paper, comparison: PaperComparison) -> list[dict[str, Any]]:
    """What was not run, by table and reason: of how many cells, and the hours that it would take."""
    return [
        {
            "heading": name,
            "id": _slugify(name),
            "reason": reason,
            "cells": len(hours),
            "hours": _format_cost(hours) or "unknown",
        }
        for name in paper.tables
        for reason, hours in _collect_missing_hours(paper, name, comparison).items()
    ]


def _collect_missing_hours(paper: Paper, name: str, comparison: PaperComparison) -> dict[str, list[float]]:
    """The hours of what was not run of each cell of a table, by reason; NaN where nobody told them."""
    hours_by_reason: dict[str, list[float]] = {}
    for cell_id in cells.get_table_cell_ids(paper, name):
        cell = comparison.cells[cell_id]
        if cell.number is None and not paper.tables[name].rows[cell_id.row].minus:
            hours = cell.measurement.hours if cell.measurement else math.nan
            hours_by_reason.setdefault(_get_reason(cell.measurement), []).append(hours)
        elif cell.measurement and cell.measurement.missing_hours is not None:
            hours_by_reason.setdefault(INCOMPLETE_NOTE, []).append(cell.measurement.missing_hours)
    return hours_by_reason


def _format_cost(hours: Sequence[float]) -> str:
    """What cells would take, as far as it is known of them; empty where it is of none."""
    known_hours = [cell_hours for cell_hours in hours if math.isfinite(cell_hours)]
    cells_text = f"{len(hours)} cells" if len(hours) > 1 else "1 cell"
    known_text = cells_text if len(known_hours) == len(hours) else f"{len(known_hours)} of {cells_text}"
    return f"some {_format_hours(sum(known_hours))} for {known_text}" if known_hours else ""


def _get_column_paths(table: Table) -> dict[str, str]:
    """The whole head of each column in one line."""
    return {name: ", ".join(path) for path, name in _iter_column_paths(table.columns, ())}


def _iter_column_paths(
    columns: Mapping[str, Any], parent_labels: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    for label, subcolumns in columns.items():
        if isinstance(subcolumns, str):
            yield (*parent_labels, label), subcolumns
        else:
            yield from _iter_column_paths(subcolumns, (*parent_labels, label))


def _get_row_name(table: Table, row: str) -> str:
    """A row by its name in print, or, where that is marks alone, by its own."""
    stub = table.rows[row].stub if row in table.rows else ()
    return stub[0] if len(stub) == 1 else row


def _format_hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 10 else f"{hours:,.0f} h"


def _format_fixed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _format_signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _format_letters(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else _format_letters(index // 26 - 1) + _format_letters(index % 26)


def get_figure_stem(paper: Paper, heading: str) -> str:
    """The name of a figure's files, and of what its SVG holds."""
    return f"{paper.stem}-{_slugify(heading)}"


def _slugify(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _make_cell_anchor(paper: Paper, cell_id: CellId) -> str:
    """A name for links: the table's, and the numbers of row and column, which hold no odd characters."""
    if cell_id.table == layouts.TEXT_TABLE:
        text_index = [(text.row, text.column, text.metric) for text in paper.text].index(cell_id[2:])
        return f"text-{text_index + 1}"
    table = paper.tables[cell_id.table]
    row, column = list(table.rows).index(cell_id.row), list(table.column_labels).index(cell_id.column)
    return f"{_slugify(cell_id.table)}-{row + 1}-{column + 1}"
