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

from fedpipe.papers.published import Place

PAPERS = ("feddw", "feddual", "pfps_lwc", "cwfedavg")
TEXT = "text"  #: the table of numbers in running text
Form: TypeAlias = Literal[
    "diagram", "curves", "sweep", "bars", "heatmaps", "circles", "scatter", "surface", "layers", "traces", "paths"
]
DIAGRAM = "A diagram: nothing of it is measured."


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Entry):
    """A row: the study's label for its method, or the rows that it is the difference of; ``stub`` stands left of it."""

    method: str | None = None
    stub: tuple[str, ...] = ()
    minus: tuple[str, str] | None = None


class Repeat(_Entry):
    """Which rows and columns of another table this one's are; all, where none are named."""

    of: str
    rows: Mapping[str, str] = Field(default_factory=dict)
    columns: Mapping[str, str] = Field(default_factory=dict)


class Claim(_Entry):
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


class Table(_Entry):
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
    def _named(cls, rows: Mapping[str, Any]) -> dict[str, Any]:
        """A row that is only a method is called by its name in print."""
        entries = {name: {"method": row} if isinstance(row, str) else row for name, row in rows.items()}
        return {name: {"stub": (name,), **entry} for name, entry in entries.items()}

    @property
    def leaves(self) -> dict[str, str]:
        """The columns' names, each with its label in the head's last row, in the order of print."""
        return {name: label for label, name in _leaves(self.columns)}

    @property
    def heads(self) -> list[list[Head]]:
        """The rows of the head, from its top."""
        depth = _depth(self.columns)
        rows: list[list[Head]] = [[] for _ in range(depth)]
        _fill(rows, self.columns, 0)
        return rows

    def metric_of(self, row: str, column: str) -> str:
        """What is measured in a cell."""
        return self.metrics.get(row) or self.metrics.get(column) or self.metric

    def protocol_of(self, row: str) -> str:
        """By which protocol a row's method is shown; empty where the table is not of accuracies."""
        method = self.rows[row].method
        return self.shown.get(method or "", self.protocol)


class Text(_Entry):
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


class Part(_Entry):
    """Some runs of a study: of these methods (all), at these points of its grid (all), and what a probe found there.

    ``models`` are those that a probe of norms has looked at.
    """

    study: str
    algorithms: tuple[str, ...] = ()
    where: Mapping[str, Any] = Field(default_factory=dict)
    models: tuple[str, ...] = ()


class Figure(_Entry):
    """A figure: its form, what the paper says that it shows, and the study and probe that its numbers come from.

    Its runs are those of ``study`` (``algorithms``, ``where`` and ``models`` as in `Part`) and of ``beside``. Each is
    in a panel by the values that ``panels`` names (names of the grid, ``algorithm`` or ``client``), and a line by those
    of ``lines``; ``x`` is the name of the grid on the horizontal axis, logarithmic if ``log``. ``measures`` are what is
    shown: accuracy, loss, error (R, of the estimated class shares), counts (of samples), or matrices.
    """

    form: Form
    says: str
    study: str | None = None
    probe: str | None = None
    algorithms: tuple[str, ...] = ()
    where: Mapping[str, Any] = Field(default_factory=dict)
    models: tuple[str, ...] = ()
    beside: tuple[Part, ...] = ()
    panels: tuple[str, ...] = ()
    lines: tuple[str, ...] = ("algorithm",)
    x: str = ""
    x_label: str = ""
    log: bool = False
    measures: tuple[Literal["accuracy", "loss", "error", "counts", "matrices"], ...] = ("accuracy",)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All runs that it is made of; none, where it has no study."""
        if self.study is None:
            return ()
        own = Part(study=self.study, algorithms=self.algorithms, where=self.where, models=self.models)
        return (own, *self.beside)


class Deviation(_Entry):
    """A point that print leaves open, or where print, the authors' code and this project differ."""

    about: str
    print: str
    code: str
    here: str


class Paper(_Entry):
    """A paper; ``stem`` is the name of its page and of its folder below `studies/papers`."""

    stem: str
    paper: str
    title: str
    code: str | None
    tables: Mapping[str, Table]
    text: tuple[Text, ...]
    figures: Mapping[str, Figure]
    deviations: tuple[Deviation, ...]

    def places(self, name: str) -> Iterator[Place]:
        """The places of a table's cells, row by row."""
        table = self.tables[name]
        for row in table.rows:
            for column in table.leaves:
                yield Place(self.paper, name, row, column, table.metric_of(row, column))

    def original(self, place: Place) -> Place | None:
        """The place in another table that has the same number, None where there is none."""
        table = self.tables.get(place.table)
        for repeat in table.repeats if table else ():
            row = repeat.rows.get(place.row) if repeat.rows else place.row
            column = repeat.columns.get(place.column) if repeat.columns else place.column
            if row and column:
                return place._replace(table=repeat.of, row=row, column=column)
        return None


@functools.cache
def papers() -> dict[str, Paper]:
    """The four papers by their names in print."""
    found = {}
    for stem in PAPERS:
        text = resources.files(__package__).joinpath(f"{stem}.yaml").read_text(encoding="utf-8")
        paper = Paper.model_validate({"stem": stem, **yaml.safe_load(text)})
        found[paper.paper] = paper
    return found


def _leaves(columns: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for label, below in columns.items():
        if isinstance(below, str):
            yield label, below
        else:
            yield from _leaves(below)


def _depth(columns: Mapping[str, Any]) -> int:
    return 1 + max((_depth(below) for below in columns.values() if not isinstance(below, str)), default=0)


def _fill(rows: list[list[Head]], columns: Mapping[str, Any], level: int) -> None:
    for label, below in columns.items():
        if isinstance(below, str):
            rows[level].append(Head(label, 1, len(rows) - level))
        else:
            rows[level].append(Head(label, len(list(_leaves(below))), 1))
            _fill(rows, below, level + 1)
