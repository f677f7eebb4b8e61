"""How the papers lay out their tables and figures: a YAML file a paper, in this folder.

A table's rows are methods, each with the label that its study has for it; ``shown`` names the protocol of a method that
is not shown by the table's own, as in the studies. Columns are nested as their heads are; the innermost level names the
column of `published`. ``minus`` is a row made of two others, ``repeats`` what another table holds, too, and ``claims``
are what the paper says of the table, each a contrast of one row with another or with the best of the others. A figure
names its runs, panels and lines by the names of the study's grid.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedpipe.papers.published import CellId

PAPER_STEMS = ("feddw", "feddual", "pfps_lwc", "cwfedavg")
TEXT_TABLE = "text"  #: the table of numbers in running text
FigureForm: TypeAlias = Literal[
    "diagram", "curves", "sweep", "bars", "heatmaps", "circles", "scatter", "surface", "layers", "traces", "paths"
]
DIAGRAM_REASON = "A diagram: nothing of it is measured."


class _LayoutModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_LayoutModel):
    """A row: the study's label for its method, or the rows that it is the difference of; ``stub`` stands left of it."""

    method: str | None = None
    stub: tuple[str, ...] = ()
    minus: tuple[str, str] | None = None


class Repeat(_LayoutModel):
    """Which rows and columns of another table this one's are; all, where none are named."""

    of: str
    rows: Mapping[str, str] = Field(default_factory=dict)
    columns: Mapping[str, str] = Field(default_factory=dict)


class Claim(_LayoutModel):
    """What a paper says of a table: that one row is above another, or above the best of the others."""

    says: str
    own: str
    over: str | None = None
    columns: tuple[str, ...] = ()


class Head(NamedTuple):
    """A cell of a table's head, and how many columns and rows it spans."""

    label: str
    columns: int
    rows: int


class Table(_LayoutModel):
    """A table; without ``columns`` it has no numbers, and ``reason`` says why.

    Of a table of settings, ``parameters`` names by row and column the method's parameter that stands there.
    """

    caption: str
    study: str | None = None
    reason: str = ""
    metric: str = ""
    metrics: Mapping[str, str] = Field(default_factory=dict)
    protocol: str = ""
    shown: Mapping[str, str] = Field(default_factory=dict)
    decimals: int | None = 2
    transposed: bool = False
    flat: bool = False
    stub: tuple[str, ...] = ()
    columns: Mapping[str, Any] = Field(default_factory=dict)
    rows: Mapping[str, Row] = Field(default_factory=dict)
    repeats: tuple[Repeat, ...] = ()
    claims: tuple[Claim, ...] = ()
    parameters: Mapping[str, Mapping[str, str]] = Field(default_factory=dict)

    @field_validator("rows", mode="before")
    @classmethod
    def _name_rows(cls, rows: Mapping[str, Any]) -> dict[str, Any]:
        """A row that is only a method is called by its name in print."""
        entries = {name: {"method": row} if isinstance(row, str) else row for name, row in rows.items()}
        return {name: {"stub": (name,), **entry} for name, entry in entries.items()}

    @property
    def column_labels(self) -> dict[str, str]:
        """The columns' names, each with its label in the head's last row, in the order of print."""
        return {name: label for label, name in _iter_leaf_columns(self.columns)}

    @property
    def heads(self) -> list[list[Head]]:
        """The rows of the head, from its top."""
        depth = _get_head_depth(self.columns)
        rows: list[list[Head]] = [[] for _ in range(depth)]
        _fill_head_rows(rows, self.columns, 0)
        return rows

    def get_metric(self, row: str, column: str) -> str:
        """What is measured in a cell."""
        return self.metrics.get(row) or self.metrics.get(column) or self.metric

    def get_protocol(self, row: str) -> str:
        """By which protocol a row's method is shown; empty where the table is not of accuracies."""
        method = self.rows[row].method
        return self.shown.get(method or "", self.protocol)


class Text(_LayoutModel):
    """A number in running text: what the paper says, and the cells that it is made of.

    ``minus`` names two cells, as table, row and column, whose difference it is, ``factor`` times; ``largest`` a table
    and row whose largest number it is. Of others, ``study`` has the runs: the number is a method's ``parameter`` (that
    with the highest accuracy, where the study varies it), or how much higher its accuracy is ``than`` another's.
    """

    row: str
    column: str
    metric: str
    says: str
    minus: tuple[tuple[str, str, str], tuple[str, str, str]] | None = None
    factor: float = 1
    largest: tuple[str, str] | None = None
    study: str | None = None
    method: str = ""
    parameter: str = ""
    than: str = ""


class RunSelection(_LayoutModel):
    """Some runs of a study: of these methods (all), at these points of its grid (all), and what a probe found there.

    ``models`` are those that a probe of norms has looked at.
    """

    study: str
    algorithms: tuple[str, ...] = ()
    where: Mapping[str, Any] = Field(default_factory=dict)
    models: tuple[str, ...] = ()


class Figure(_LayoutModel):
    """A figure: its form, what the paper says that it shows, and the study and probe that its numbers come from.

    Its runs are those of ``study`` (``algorithms``, ``where`` and ``models`` as in `RunSelection`) and of ``beside``.
    Each is
    in a panel by the values that ``panels`` names (names of the grid, ``algorithm`` or ``client``), and a line by those
    of ``lines``; ``x`` is the name of the grid on the horizontal axis, logarithmic if ``log``. ``measures`` are what is
    shown: accuracy, loss, error (R, of the estimated class shares), counts (of samples), or matrices.
    """

    form: FigureForm
    says: str
    study: str | None = None
    probe: str | None = None
    algorithms: tuple[str, ...] = ()
    where: Mapping[str, Any] = Field(default_factory=dict)
    models: tuple[str, ...] = ()
    beside: tuple[RunSelection, ...] = ()
    panels: tuple[str, ...] = ()
    lines: tuple[str, ...] = ("algorithm",)
    x: str = ""
    x_label: str = ""
    log: bool = False
    measures: tuple[Literal["accuracy", "loss", "error", "counts", "matrices"], ...] = ("accuracy",)

    @property
    def run_selections(self) -> tuple[RunSelection, ...]:
        """All runs that it is made of; none, where it has no study."""
        if self.study is None:
            return ()
        study_selection = RunSelection(
            study=self.study, algorithms=self.algorithms, where=self.where, models=self.models
        )
        return (study_selection, *self.beside)


class Deviation(_LayoutModel):
    """A point that print leaves open, or where print, the authors' code and this project differ."""

    about: str
    print: str
    code: str
    here: str


class Paper(_LayoutModel):
    """A paper; ``stem`` is the name of its page and of its folder below `studies/papers`."""

    stem: str
    paper: str
    title: str
    code: str | None
    tables: Mapping[str, Table]
    text: tuple[Text, ...]
    figures: Mapping[str, Figure]
    deviations: tuple[Deviation, ...]

    def iter_cell_ids(self, name: str) -> Iterator[CellId]:
        """The places of a table's cells, row by row."""
        table = self.tables[name]
        for row in table.rows:
            for column in table.column_labels:
                yield CellId(self.paper, name, row, column, table.get_metric(row, column))

    def find_original(self, cell_id: CellId) -> CellId | None:
        """The place in another table that has the same number, None where there is none."""
        table = self.tables.get(cell_id.table)
        for repeat in table.repeats if table else ():
            row = repeat.rows.get(cell_id.row) if repeat.rows else cell_id.row
            column = repeat.columns.get(cell_id.column) if repeat.columns else cell_id.column
            if row and column:
                return cell_id._replace(table=repeat.of, row=row, column=column)
        return None


@functools.cache
def load_papers() -> dict[str, Paper]:
    """The four papers by their names in print."""
    papers_by_name = {}
    for stem in PAPER_STEMS:
        text = resources.files(__package__).joinpath(f"{stem}.yaml").read_text(encoding="utf-8")
        paper = Paper.model_validate({"stem": stem, **yaml.safe_load(text)})
        papers_by_name[paper.paper] = paper
    return papers_by_name


def _iter_leaf_columns(columns: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for label, subcolumns in columns.items():
        if isinstance(subcolumns, str):
            yield label, subcolumns
        else:
            yield from _iter_leaf_columns(subcolumns)


def _get_head_depth(columns: Mapping[str, Any]) -> int:
    return 1 + max(
        (_get_head_depth(subcolumns) for subcolumns in columns.values() if not isinstance(subcolumns, str)), default=0
    )


def _fill_head_rows(rows: list[list[Head]], columns: Mapping[str, Any], level: int) -> None:
    for label, subcolumns in columns.items():
        if isinstance(subcolumns, str):
            rows[level].append(Head(label, 1, len(rows) - level))
        else:
            rows[level].append(Head(label, len(list(_iter_leaf_columns(subcolumns))), 1))
            _fill_head_rows(rows, subcolumns, level + 1)
