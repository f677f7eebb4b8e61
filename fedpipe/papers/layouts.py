"""The tables, figures and claims of each paper, from one YAML file per paper in this folder.

Rows are methods, by the labels of their study. Columns are nested as the table's head is, and the innermost level names
the column of `fedpipe.papers.published`. A figure names its runs, panels and lines by the names of the study's grid.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedpipe.papers.published import CellId

PAPER_STEMS = ("feddw", "feddual", "pfps_lwc", "cwfedavg")
TEXT_TABLE = "text"  #: the table of numbers in running text
MethodKind: TypeAlias = Literal["global", "personal"]


class _LayoutModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_LayoutModel):
    """A row: the study's label of its method, or the two rows whose difference it is. ``stub`` are its first cells."""

    method: str | None = None
    stub: tuple[str, ...] = ()
    minus: tuple[str, str] | None = None


class Repeat(_LayoutModel):
    """The rows and columns that a table repeats from another table. Without names, all of them."""

    table: str
    rows: Mapping[str, str] = Field(default_factory=dict)
    columns: Mapping[str, str] = Field(default_factory=dict)


class Claim(_LayoutModel):
    """A paper's claim about a table: ``row`` is above row ``rival``, or above the best other row."""

    statement: str
    row: str
    rival: str | None = None
    columns: tuple[str, ...] = ()


class Table(_LayoutModel):
    """A table. Without ``columns`` it has no numbers, and ``reason`` explains it.

    ``method_protocols`` names the protocols of methods that differ from the table's ``protocol``. ``global_methods``
    give all clients the same model, although the protocol tests personalized models. ``parameters`` names, by row and
    column, the method's parameter that the cell contains or that its formula uses. ``partition_std`` is, by column, the
    standard deviation of an accuracy between draws of the partition, in points, and ``difference_std`` that of the
    difference of two methods.
    """

    caption: str
    study: str | None = None
    reason: str = ""
    metric: str = ""
    metrics: Mapping[str, str] = Field(default_factory=dict)
    protocol: str = ""
    method_protocols: Mapping[str, str] = Field(default_factory=dict)
    global_methods: tuple[str, ...] = ()
    partition_std: Mapping[str, float] = Field(default_factory=dict)
    difference_std: Mapping[str, float] = Field(default_factory=dict)
    decimals: int | None = 2
    stub: tuple[str, ...] = ()
    columns: Mapping[str, Any] = Field(default_factory=dict)
    rows: Mapping[str, Row] = Field(default_factory=dict)
    repeats: tuple[Repeat, ...] = ()
    claims: tuple[Claim, ...] = ()
    parameters: Mapping[str, Mapping[str, str]] = Field(default_factory=dict)

    @field_validator("rows", mode="before")
    @classmethod
    def _expand_row_labels(cls, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Expand a row that is only a label to a method with the row's name."""
        entries = {name: {"method": row} if isinstance(row, str) else row for name, row in rows.items()}
        return {name: {"stub": (name,), **entry} for name, entry in entries.items()}

    @property
    def column_paths(self) -> dict[str, tuple[str, ...]]:
        """The labels above each column, by its name, in the order of the published table."""
        return {name: path for path, name in _iterate_column_paths(self.columns)}

    @property
    def header_rows(self) -> list[list[tuple[str, int]]]:
        """The rows of the head from its top: labels with the number of columns that each spans."""
        paths = list(self.column_paths.values())
        depth = max(map(len, paths), default=0)
        prefixes = [[(*path, *[""] * depth)[: level + 1] for path in paths] for level in range(depth)]
        return [[(prefix[-1], len(list(group))) for prefix, group in itertools.groupby(row)] for row in prefixes]

    def get_metric(self, row: str, column: str) -> str:
        """The metric of a cell."""
        return self.metrics.get(row) or self.metrics.get(column) or self.metric

    def get_protocol(self, row: str) -> str:
        """The protocol of a row's method. Empty if the table is not of accuracies."""
        return self.method_protocols.get(self.rows[row].method or "", self.protocol)

    def get_model_kind(self, row: str) -> MethodKind:
        """Whether a row's method is measured by one global model or by a model for each client."""
        is_global = self.get_protocol(row).startswith("global-") or self.rows[row].method in self.global_methods
        return "global" if is_global else "personal"

    def get_row_label(self, row: str) -> str:
        """A row's published name, or its key if the published name consists of several cells."""
        stub = self.rows[row].stub if row in self.rows else ()
        return stub[0] if len(stub) == 1 else row


class Text(_LayoutModel):
    """A number in running text: ``factor`` times the difference of two cells (``minus``: table, row and column).

    Or the largest number of a table's row (``largest``), or from a ``study`` a method's ``parameter`` (if the study
    varies it, the one with the highest accuracy) or its accuracy minus that of ``rival``.
    """

    row: str
    column: str
    metric: str
    statement: str
    minus: tuple[tuple[str, str, str], tuple[str, str, str]] | None = None
    factor: float = 1
    largest: tuple[str, str] | None = None
    study: str | None = None
    method: str = ""
    parameter: str = ""
    rival: str = ""


class RunSelection(_LayoutModel):
    """Some runs of a study: these methods (default: all) at these points of its grid (default: all).

    ``models`` are those whose norms are drawn.
    """

    study: str | None = None
    algorithms: tuple[str, ...] = ()
    where: Mapping[str, Any] = Field(default_factory=dict)
    models: tuple[str, ...] = ()


class Figure(RunSelection):
    """A figure: its form, the paper's claim, and its runs, from its selection and those of ``more_runs``.

    ``form`` is a key of `fedpipe.papers.figures.FRAME_BUILDERS`, or ``none``.

    ``panels`` and ``lines`` name the values by which a run is in a panel and on a line (of the grid, ``algorithm`` or
    ``client``). ``x`` is the name of the grid on the horizontal axis, and ``x_label`` may name each panel's.
    ``measures`` are on the vertical axis. ``error`` is R, the error of the estimated class shares.
    """

    form: str
    statement: str
    reason: str = "A diagram: it contains no measurements."
    more_runs: tuple[RunSelection, ...] = ()
    panels: tuple[str, ...] = ()
    lines: tuple[str, ...] = ("algorithm",)
    x: str = ""
    x_label: str | Mapping[str, str] = ""
    log: bool = False
    measures: tuple[Literal["accuracy", "loss", "error"], ...] = ("accuracy",)

    @property
    def run_selections(self) -> tuple[RunSelection, ...]:
        """All runs of the figure. Empty for a figure without a study."""
        return (self, *self.more_runs) if self.study else ()


class Deviation(_LayoutModel):
    """A point that the paper leaves open, or on which the paper, the authors' code and fedpipe differ."""

    topic: str
    paper: str
    code: str
    fedpipe: str


class Paper(_LayoutModel):
    """A paper. ``stem`` is the name of its page and of its folder in `studies/papers`."""

    stem: str
    paper: str
    title: str
    code: str | None
    tables: Mapping[str, Table]
    text: tuple[Text, ...]
    figures: Mapping[str, Figure]
    deviations: tuple[Deviation, ...]

    def make_cell_id(self, table: str, row: str, column: str) -> CellId:
        """The id of a table's cell."""
        return CellId(self.paper, table, row, column, self.tables[table].get_metric(row, column))

    def iterate_cell_ids(self, table_name: str) -> Iterator[CellId]:
        """The ids of a table's cells, row by row."""
        table = self.tables[table_name]
        return (self.make_cell_id(table_name, row, column) for row in table.rows for column in table.column_paths)

    def make_prose_number_id(self, text: Text) -> CellId:
        """The id of a number in running text."""
        return CellId(self.paper, TEXT_TABLE, text.row, text.column, text.metric)

    def find_original_cell(self, cell_id: CellId) -> CellId | None:
        """The cell of another table that a cell repeats, or None."""
        table = self.tables.get(cell_id.table)
        for repeat in table.repeats if table else ():
            row = repeat.rows.get(cell_id.row) if repeat.rows else cell_id.row
            column = repeat.columns.get(cell_id.column) if repeat.columns else cell_id.column
            if row and column:
                return cell_id._replace(table=repeat.table, row=row, column=column)
        return None

    @property
    def main_claim(self) -> tuple[str, Claim]:
        """The paper's first claim that its method is above a named baseline, with the claim's table."""
        return next((name, claim) for name, table in self.tables.items() for claim in table.claims if claim.rival)


@functools.cache
def load_papers() -> dict[str, Paper]:
    """The four papers by their names."""
    folder = resources.files(__package__)
    texts = {stem: folder.joinpath(f"{stem}.yaml").read_text(encoding="utf-8") for stem in PAPER_STEMS}
    papers = [Paper.model_validate({"stem": stem, **yaml.safe_load(text)}) for stem, text in texts.items()]
    return {paper.paper: paper for paper in papers}


def _iterate_column_paths(
    columns: Mapping[str, Any], parents: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    for label, entry in columns.items():
        path = (*parents, label)
        yield from _iterate_column_paths(entry, path) if not isinstance(entry, str) else [(path, entry)]
