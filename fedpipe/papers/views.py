"""What the pages' templates are told: tables, figures and cells as they are shown, in words, signs and links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedpipe.papers import cells, layouts, published
from fedpipe.papers.cells import Cell, Comparison, Measured
from fedpipe.papers.layouts import DIAGRAM, Head, Paper, Table
from fedpipe.papers.published import Place
from fedpipe.papers.svg import Drawn, inline
from fedpipe.papers.verdicts import Contrast, Number, Order

DASH = "–"
SIGNS = {  #: of verdicts, which colors repeat
    "agrees": "✓",
    "agrees (one seed)": "✓¹",
    "agrees (two seeds)": "✓²",
    "near": "≈",
    "differs": "✗",
}
DIVERGED = "diverged: in some round no participant's update was finite"
GENERATED = "on generated data of the data set's shape, since the data are not here"
LACKING = "not of all its runs: seeds, or values that its parameters are searched in, are missing"


@dataclass
class Notes:
    """The notes below a table, each once, by the letters that refer to them."""

    texts: list[str] = field(default_factory=list)

    def letter(self, text: str) -> str:
        """The letter of a note."""
        if text not in self.texts:
            self.texts.append(text)
        return _letters(self.texts.index(text))


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


def index(comparison: Comparison, figures: Mapping[tuple[str, str], Drawn | str]) -> dict[str, Any]:
    """What `index.html` is told: how each paper's cells and orders came out."""
    papers = list(layouts.papers().values())
    return {
        "title": "Four papers, made again",
        "summaries": {paper.paper: _summary(paper, comparison) for paper in papers},
        "totals": {paper.paper: _counted(paper, comparison) for paper in papers},
        "drawn": {
            paper.paper: sum(isinstance(figures.get((paper.paper, name)), Drawn) for name in paper.figures)
            for paper in papers
        },
    }


def paper(
    paper: Paper,
    comparison: Comparison,
    figures: Mapping[tuple[str, str], Drawn | str],
    changed: Mapping[tuple[str, str], str],
) -> dict[str, Any]:
    """What `paper.html` is told of a paper; figures and changes by paper and name, as `fedpipe.papers.pages.write`."""
    return {
        "changed": {name: told for (title, name), told in changed.items() if title == paper.paper},
        "title": paper.paper,
        "paper": paper,
        "summary": _summary(paper, comparison),
        "tables": [_table(paper, name, comparison) for name in paper.tables],
        "figures": [_figure(paper, name, figures.get((paper.paper, name), "")) for name in paper.figures],
        "texts": [_text(paper, text, comparison) for text in paper.text],
        "costs": _costs(paper, comparison),
    }


def _summary(paper: Paper, comparison: Comparison) -> list[dict[str, Any]]:
    """A row a table: how many cells have which verdict, and how near the orders are."""
    return [
        {"heading": name, "id": _id(name), "reason": table.reason}
        | _words(paper, [name], comparison)
        | _ordered([order for at, order in comparison.orders.items() if at[:2] == (paper.paper, name)])
        for name, table in paper.tables.items()
    ]


def _counted(paper: Paper, comparison: Comparison) -> dict[str, Any]:
    """The same of a whole paper, where a number, or a column, that stands in two tables counts once."""
    orders = [order for at, order in comparison.orders.items() if at[0] == paper.paper and not _again(paper, *at[1:])]
    return _words(paper, list(paper.tables), comparison) | _ordered(orders)


def _again(paper: Paper, table: str, column: str) -> bool:
    """Whether a column is another table's."""
    return all(paper.original(place) for place in cells.of_table(paper, table) if place.column == column)


def _words(paper: Paper, tables: Sequence[str], comparison: Comparison) -> dict[str, Any]:
    """How many cells these tables have, how many were measured, and how many have which verdict."""
    counts = cells.counts(paper, tables, comparison, once=len(tables) > 1)
    few = counts.get("agrees (one seed)", 0) + counts.get("agrees (two seeds)", 0)
    return {word: counts.get(word, 0) for word in ("all", "measured", "agrees", "near", "differs")} | {"few": few}


def _ordered(orders: Sequence[Order]) -> dict[str, Any]:
    taus = [order.tau for order in orders if order.tau is not None]
    ceilings = [order.ceiling for order in orders if order.ceiling is not None]
    held = sum(order.holds for order in orders)
    return {
        "tau": _fixed(sum(taus) / len(taus)) if taus else DASH,
        "ceiling": _fixed(sum(ceilings) / len(ceilings)) if ceilings else DASH,
        "held": f"{held} of {len(orders)}" if orders else DASH,
    }


def _table(paper: Paper, name: str, comparison: Comparison) -> dict[str, Any]:
    table, notes = paper.tables[name], Notes()
    costs = {reason: _cost(of) for reason, of in _not_run(paper, name, comparison).items()}
    hours = {reason: f": {cost}" for reason, cost in costs.items() if cost}
    view = {place: _cell(paper, comparison.cells[place], notes, hours) for place in cells.of_table(paper, name)}
    stub, heads, body = _grid(table, view)
    return {
        "heading": name,
        "id": _id(name),
        "table": table,
        "stub": stub,
        "heads": heads,
        "body": body,
        "notes": [(_letters(index), text) for index, text in enumerate(notes.texts)],
        "protocols": _protocols(table),
        "orders": _orders(paper, name, comparison),
        "claims": [_claim(paper, name, claim, comparison) for claim in table.claims],
        "made_of": [_made_of(paper, comparison.cells[place]) for place in view if comparison.cells[place].number],
    }


def _grid(
    table: Table, view: Mapping[Place, CellView]
) -> tuple[tuple[str, ...], list[list[Head]], list[tuple[tuple[str, ...], list[CellView]]]]:
    """The head's cells left of the columns, the head, and rows: their first cells, then those with numbers."""
    by_place = {(place.row, place.column): cell for place, cell in view.items()}
    body: list[tuple[tuple[str, ...], list[CellView]]]
    if table.flat:
        body = [((place.row, table.leaves[place.column]), [cell]) for place, cell in view.items()]
        return (*table.stub, "Parameter"), [[Head("Value", 1, 1)]], body
    if table.transposed:
        body = [((label,), [by_place[row, name] for row in table.rows]) for name, label in table.leaves.items()]
        return table.stub, [[Head(", ".join(row.stub), 1, 1) for row in table.rows.values()]], body
    body = [(row.stub, [by_place[name, column] for column in table.leaves]) for name, row in table.rows.items()]
    return table.stub, table.heads, body


def _cell(paper: Paper, cell: Cell, notes: Notes, hours: Mapping[str, str] | None = None) -> CellView:
    decimals = _decimals(paper, cell.place)
    number, printed = cell.number, cell.published.printed if cell.published else ""
    shown, note, runs = DASH, "", ""
    if number:
        shown, runs = _shown(number, decimals), f"n={number.runs}" if number.runs else ""
        diverged = DIVERGED if cell.measured and cell.measured.diverged else ""
        generated = GENERATED if cell.measured and cell.measured.generated else ""
        lacking = LACKING if cell.measured and cell.measured.lacking is not None else ""
        note = ", ".join(map(notes.letter, filter(None, (diverged, generated, lacking))))
    else:
        reason = _reason(cell.measured)
        note = notes.letter(reason + (hours or {}).get(reason, ""))
    printed_note = ""
    if cell.published is None or cell.published.status == "absent":
        printed_note = notes.letter(cells.UNPRINTED)
    elif cell.published.status in {"failed", "suspect"}:
        printed_note = notes.letter(published.STATUS[cell.published.status])
    kind = cell.word.partition(" ")[0] if cell.verdict else "plain"
    target = _cell_id(paper, cell.place) if number else ""
    sign = SIGNS.get(cell.word, "")
    return CellView(kind, cell.word, sign, shown, runs, printed or DASH, target, note, printed_note)


def _decimals(paper: Paper, place: Place) -> int | None:
    if place.table == layouts.TEXT:
        return 2 if place.metric.endswith(("_points", "_epoch")) else None
    return paper.tables[place.table].decimals


def _shown(number: Number, decimals: int | None) -> str:
    if not math.isfinite(number.mean):
        return "not finite"
    mean = f"{number.mean:.6g}" if decimals is None else f"{number.mean:.{decimals}f}"
    std = "" if number.std is None else f"{number.std:.3g}" if decimals is None else f"{number.std:.{decimals}f}"
    return (f"{mean} ± {std}" if std else mean).replace("-", "−")


def _reason(measured: Measured | None) -> str:
    return (measured.reason if measured else "") or cells.NOT_RUN


def _protocols(table: Table) -> list[tuple[str, str]]:
    """The protocols that a table's methods are shown by, the others' methods named."""
    names: dict[str, list[str]] = {}
    for name, row in table.rows.items():
        if row.method and table.protocol:
            names.setdefault(table.protocol_of(name), []).append(name)
    ordered = sorted(names.items(), key=lambda entry: entry[0] != table.protocol)
    return [(protocol, "" if protocol == table.protocol else ", ".join(rows)) for protocol, rows in ordered]


def _orders(paper: Paper, name: str, comparison: Comparison) -> list[dict[str, Any]]:
    table, rows = paper.tables[name], []
    for column, label in _paths(table).items():
        order = comparison.orders.get((paper.paper, name, column))
        if order:
            rows.append(
                {
                    "column": label,
                    "tau": DASH if order.tau is None else _fixed(order.tau),
                    "ceiling": DASH if order.ceiling is None else _fixed(order.ceiling),
                    "pairs": f"{order.concordant} of {order.resolved}",
                    "best": _row_name(table, order.best),
                    "ours": _row_name(table, order.ours),
                    "holds": order.holds,
                    "methods": order.methods,
                }
            )
    return rows


def _claim(paper: Paper, name: str, claim: layouts.Claim, comparison: Comparison) -> dict[str, Any]:
    table = paper.tables[name]
    labels = _paths(table)
    rows = [
        {
            "column": labels[found.column],
            "printed": _difference(found.printed),
            "printed_over": _row_name(table, found.printed_over),
            "measured": _difference(found.measured),
            "measured_over": _row_name(table, found.measured_over),
            "sign": found.measured.sign if found.measured else "",
        }
        for found in cells.checked(paper, name, claim, comparison)
        if found.printed or found.measured
    ]
    return {"says": claim.says, "own": _row_name(table, claim.own), "rows": rows}


def _difference(contrast: Contrast | None) -> str:
    if contrast is None:
        return DASH
    if contrast.low is None or contrast.high is None:
        return f"{_signed(contrast.difference)}"
    return f"{_signed(contrast.difference)} [{_signed(contrast.low)}, {_signed(contrast.high)}]"


def _made_of(paper: Paper, cell: Cell) -> dict[str, Any]:
    """What a cell is made of, for the list at a page's end."""
    if not (cell.measured and cell.number):
        raise ValueError(f"{cell.place} was not measured.")
    decimals = _decimals(paper, cell.place)
    band = cell.verdict.band if cell.verdict else None
    words = [cell.word]
    if cell.verdict and cell.verdict.difference is not None:
        words.append(f"difference {_signed(cell.verdict.difference)}")
    if band:
        words.append(f"band ±{band.width:.2f} (t·SE {band.t * band.error:.2f}, floor {band.floor:.2f})")
    table = paper.tables.get(cell.place.table)
    return {
        "id": _cell_id(paper, cell.place),
        "back": _id(cell.place.table),
        "row": _row_name(table, cell.place.row) if table else cell.place.row,
        "column": _paths(table).get(cell.place.column, cell.place.column) if table else cell.place.column,
        "measured": _shown(cell.number, decimals),
        "runs": cell.number.runs,
        "values": {seed: f"{value:.6g}" for seed, value in cell.number.values.items()},
        "printed": (cell.published.printed if cell.published else "") or DASH,
        "notes": cell.published.notes if cell.published else "",
        "verdict": "; ".join(words),
        "settings": {name: _value(value) for name, value in cell.measured.settings.items()},
        "keys": cell.measured.keys,
        "hours": _hours(cell.measured.hours) if math.isfinite(cell.measured.hours) else "",
        "diverged": cell.measured.diverged,
        "trace": cell.measured.trace,
    }


def _figure(paper: Paper, name: str, found: Drawn | str) -> dict[str, Any]:
    figure = paper.figures[name]
    told = {"heading": name, "id": _id(name), "says": figure.says, "study": figure.study}
    if isinstance(found, Drawn):
        label = f"{paper.paper}, {name}: {figure.says}"
        svg = inline(found.svg, f"{file(paper, name)}-", label)
        csv = f"figures/{file(paper, name)}.csv"
        note = GENERATED if found.generated else ""
        return told | {"svg": svg, "csv": csv, "reason": "", "note": note, "missing": found.missing}
    return told | {
        "note": "",
        "missing": "",
        "svg": "",
        "csv": "",
        "reason": DIAGRAM if figure.form == "diagram" else found or "Not run.",
    }


def _text(paper: Paper, text: layouts.Text, comparison: Comparison) -> dict[str, Any]:
    cell = comparison.cells[Place(paper.paper, layouts.TEXT, text.row, text.column, text.metric)]
    notes = Notes()
    view = _cell(paper, cell, notes)
    status = cell.published.status if cell.published else "absent"
    return {
        "says": text.says,
        "cell": view,
        "notes": notes.texts,
        "status": published.STATUS[status],
        "made_of": [_made_of(paper, cell)] if cell.number else [],
    }


def _costs(paper: Paper, comparison: Comparison) -> list[dict[str, Any]]:
    """What was not run, by table and reason: of how many cells, and the hours that it would take."""
    return [
        {
            "heading": name,
            "id": _id(name),
            "reason": reason,
            "cells": len(hours),
            "hours": _cost(hours) or "unknown",
        }
        for name in paper.tables
        for reason, hours in _not_run(paper, name, comparison).items()
    ]


def _not_run(paper: Paper, name: str, comparison: Comparison) -> dict[str, list[float]]:
    """The hours of what was not run of each cell of a table, by reason; NaN where nobody told them."""
    found: dict[str, list[float]] = {}
    for place in cells.of_table(paper, name):
        cell = comparison.cells[place]
        if cell.number is None and not paper.tables[name].rows[place.row].minus:
            hours = cell.measured.hours if cell.measured else math.nan
            found.setdefault(_reason(cell.measured), []).append(hours)
        elif cell.measured and cell.measured.lacking is not None:
            found.setdefault(LACKING, []).append(cell.measured.lacking)
    return found


def _cost(hours: Sequence[float]) -> str:
    """What cells would take, as far as it is known of them; empty where it is of none."""
    known = [one for one in hours if math.isfinite(one)]
    of = f"{len(hours)} cells" if len(hours) > 1 else "1 cell"
    which = of if len(known) == len(hours) else f"{len(known)} of {of}"
    return f"some {_hours(sum(known))} for {which}" if known else ""


def _paths(table: Table) -> dict[str, str]:
    """The whole head of each column in one line."""
    return {name: ", ".join(path) for path, name in _walk(table.columns, ())}


def _walk(columns: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for label, below in columns.items():
        if isinstance(below, str):
            yield (*above, label), below
        else:
            yield from _walk(below, (*above, label))


def _row_name(table: Table, row: str) -> str:
    """A row by its name in print, or, where that is marks alone, by its own."""
    stub = table.rows[row].stub if row in table.rows else ()
    return stub[0] if len(stub) == 1 else row


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 10 else f"{hours:,.0f} h"


def _fixed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _value(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _letters(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else _letters(index // 26 - 1) + _letters(index % 26)


def file(paper: Paper, heading: str) -> str:
    """The name of a figure's files, and of what its SVG holds."""
    return f"{paper.stem}-{_id(heading)}"


def _id(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _cell_id(paper: Paper, place: Place) -> str:
    """A name for links: the table's, and the numbers of row and column, which hold no odd characters."""
    if place.table == layouts.TEXT:
        at = [(text.row, text.column, text.metric) for text in paper.text].index(place[2:])
        return f"text-{at + 1}"
    table = paper.tables[place.table]
    return f"{_id(place.table)}-{list(table.rows).index(place.row) + 1}-{list(table.leaves).index(place.column) + 1}"
