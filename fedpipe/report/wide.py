"""The table as papers have it: a row a method, a column a point of the grid that all methods share; LaTeX and CSV."""

from __future__ import annotations

import csv as comma
import io
import itertools
import shlex
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from string import ascii_lowercase
from typing import NamedTuple

import pandas as pd

from fedpipe import artifacts, changes
from fedpipe.planned import Plan
from fedpipe.report import results, tables

MISSING = "…"  #: stands for a number whose runs are not complete
GREEK = (  #: each letter with LaTeX's name of it; capitals that are Latin ones, too, have none
    "αalpha βbeta γgamma δdelta εvarepsilon ζzeta ηeta θtheta ιiota κkappa λlambda μmu \N{MICRO SIGN}mu νnu ξxi πpi "
    "ρrho σsigma τtau υupsilon φvarphi χchi ψpsi ωomega ΓGamma ΔDelta ΘTheta ΛLambda ΞXi ΠPi ΣSigma ΥUpsilon ΦPhi ΨPsi "
    "ΩOmega"
)
SPECIAL = {
    **{char: f"\\{char}" for char in "_%&#${}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"±": r"$\pm$", "−": r"$-$", "×": r"$\times$", "–": "--", MISSING: r"\dots{}"},
    **{"≤": r"$\le$", "≥": r"$\ge$", "∞": r"$\infty$", "→": r"$\to$"},
    **{word[0]: rf"$\{word[1:]}$" for word in GREEK.split()},
}


class Entry(NamedTuple):
    """A cell of the table."""

    text: str
    number: float | None = None  #: its mean as printed
    notes: tuple[str, ...] = ()  #: what is true of this number and not of its column


class Wide(NamedTuple):
    """The table: of each row its labels and entries."""

    stubs: tuple[str, ...]  #: heads of the labels
    columns: list[tuple[str, ...]]  #: of each column its heads from the top level to the last, its protocol
    labels: list[tuple[str, ...]]
    rows: list[list[Entry]]
    own: list[str]  #: of each row the settings that all its numbers have for themselves alone, in words


def latex(plan: Plan, table: pd.DataFrame, whole: Plan | None = None) -> str:
    """The table for a paper: a tabular for the package booktabs, and in comments above it what its caption has to say.

    The best of each column is bold and the second best underlined, by the numbers as they are printed.

    Parameters
    ----------
    plan
        The study.
    table
        As :func:`fedpipe.report.tables.table` gives it.
    whole
        The study that ``plan`` is a part of, where runs are missing.
    """
    found, notes = wide(plan, table, whole), dict[str, str]()
    marks = [_marks([row[place].number for row in found.rows]) for place in range(len(found.columns))]
    body: list[list[str]] = []
    for (title, *labels), row, own in zip(found.labels, found.rows, found.own, strict=True):
        name = _entry(Entry(title, notes=(own,) if own else ()), "", notes)
        entries = [_entry(entry, mark, notes) for entry, mark in zip(row, (m[len(body)] for m in marks), strict=True)]
        body.append([name, *map(escape, labels), *entries])
    width = len(found.stubs) + len(found.columns)
    below = [
        rf"\multicolumn{{{width}}}{{l}}{{\textsuperscript{{{mark}}} {escape(note)}}}" for note, mark in notes.items()
    ]
    lines = [
        *(f"% {line}" for told in _told(plan, table, found) for line in told.splitlines()),
        rf"\begin{{tabular}}{{{'l' * len(found.stubs)}{'c' * len(found.columns)}}}",
        r"\toprule",
        *_head(found),
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in body),
        r"\bottomrule",
        *(line + r" \\" for line in below),
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def csv(plan: Plan, table: pd.DataFrame, whole: Plan | None = None) -> str:
    """The same table as CSV: the levels of a column's head with `` / `` between, notes in parentheses."""
    found, text = wide(plan, table, whole), io.StringIO()
    writer = comma.writer(text, lineterminator="\n")
    writer.writerow(map(tables.plain, [*found.stubs, *map(" / ".join, found.columns)]))
    for (title, *labels), row, own in zip(found.labels, found.rows, found.own, strict=True):
        entries = [entry.text + (f" ({', '.join(entry.notes)})" if entry.notes else "") for entry in row]
        writer.writerow(map(tables.plain, [f"{title} ({own})" if own else title, *labels, *entries]))
    return text.getvalue()


def escape(text: str) -> str:
    r"""Text as LaTeX prints it.

    Examples
    --------
    >>> print(escape("fedavg_m, 5% & #1"))
    fedavg\_m, 5\% \& \#1
    """
    return "".join(SPECIAL.get(char, char) for char in " ".join(text.split()))


def wide(plan: Plan, table: pd.DataFrame, whole: Plan | None = None) -> Wide:
    """The numbers of people's table, a row a method and a column a point and protocol that any number is of.

    Names of the grid that some method does not have are part of the row. Protocols on validation samples are left out.
    """
    whole = whole or plan
    shared, own = _shared(whole), _own(whole)
    place = {name: position for position, name in enumerate(["algorithm", *plan.grid])}

    def row(key: Sequence[Hashable]) -> tuple[str, ...]:
        return tuple(str(key[place[name]]) for name in ("algorithm", *own))

    def column(key: Sequence[Hashable]) -> tuple[str, ...]:
        return tuple(str(key[place[name]]) for name in shared)

    shown = tables.reported(plan, table)
    tested = [name for name in shown["protocol"].unique() if not name.endswith("-on-validation")]
    cells = {(*[cell[name] for name in place], cell["protocol"]): cell for cell in shown.to_dict("records")}
    runs = Counter((cell.algorithm, *results.point(plan, cell).values()) for cell in plan.cells)
    kept = {(row(key), column(key)): tuple(map(str, key)) for key in tables.best(plan, table)}
    planned = dict.fromkeys((cell.algorithm, *results.point(whole, cell).values()) for cell in results.cells(whole))
    wanted = {(row(key), column(key)) for key in planned}
    there = {labels for labels, _ in kept}
    alone = {(cell.algorithm, *results.point(plan, cell).values()): results.own(cell) for cell in plan.cells}
    by_row: dict[tuple[str, ...], set[str]] = {}
    for (stub, _), key in kept.items():
        by_row.setdefault(stub, set()).add(alone[key])
    of_row = {stub: next(iter(told)) if len(told) == 1 else "" for stub, told in by_row.items()}

    def entry(labels: tuple[str, ...], point: tuple[str, ...], protocol: str) -> Entry:
        key = kept.get((labels, point))
        if key is None:
            return Entry(MISSING if (labels, point) in wanted else tables.DASH)
        by = plan.shown.get(labels[0], protocol) if protocol == plan.protocols[0] else protocol
        cell = cells[*key, by]
        if not cell["seeds"]:
            return Entry(tables.DASH)
        notes = [alone[key]] if alone[key] != of_row[labels] else []
        notes += [f"by {by}"] if by != protocol else []
        notes += [f"{cell['seeds']} of {len(plan.seeds)} seeds"] if cell["seeds"] < len(plan.seeds) else []
        notes += (
            [f"diverged in {int(cell['diverged'])} of {runs[key]} run{'s' if runs[key] > 1 else ''}"]
            if cell["diverged"]
            else []
        )
        return Entry(tables.accuracy(cell), round(float(cell["mean"]), 2), tuple(notes))

    labels = [name for name in dict.fromkeys(map(row, planned)) if name in there]
    points = list(itertools.product(_grouped(dict.fromkeys(map(column, planned))), tested))
    full = {(point, by): [entry(name, point, by) for name in labels] for point, by in points}
    columns = [head for head, found in full.items() if any(one.number is not None for one in found)] or points
    words = dict(zip(plan.grid, results.short(plan.grid), strict=True))
    heads = [
        (*(_value(name, words[name], value) for name, value in zip(shared, point, strict=True)), by)
        for point, by in columns
    ]
    return Wide(
        stubs=("algorithm", *(words[name] for name in own)),
        columns=heads,
        labels=[(plan.title(name), *(value or tables.DASH for value in values)) for name, *values in labels],
        rows=[[full[head][index] for head in columns] for index in range(len(labels))],
        own=[of_row[name] for name in labels],
    )


def _concerned(plan: Plan) -> dict[str, set[str]]:
    """By name of the grid the methods that have it."""
    return {name: {cell.algorithm for cell in plan.cells if name in cell.grid} for name in plan.grid}


def _shared(plan: Plan) -> list[str]:
    """The names of the grid that are columns: those of all methods, of which not only the best is shown.

    They are in the order of params.yaml, which only the cells tell, since a plan.json has names by the alphabet: a name
    that stands before another changes less often from cell to cell.
    """
    every = {cell.algorithm for cell in plan.cells}
    shared = [
        name
        for name, methods in _concerned(plan).items()
        if methods == every and not name.startswith("algorithms.") and name not in plan.report.best_over
    ]
    points = dict.fromkeys(tuple(results.point(plan, cell)[name] for name in shared) for cell in results.cells(plan))
    changes = [sum(one != other for one, other in itertools.pairwise(values)) for values in zip(*points, strict=True)]
    return [name for _, name in sorted(zip(changes, shared, strict=True), key=lambda pair: pair[0])]


def _grouped(points: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Points so that those with the same first values stand together; values in the order in which they appear."""
    points = list(points)
    places = [
        {value: place for place, value in enumerate(dict.fromkeys(values))} for values in zip(*points, strict=True)
    ]
    return sorted(points, key=lambda point: [place[value] for place, value in zip(places, point, strict=True)])


def _own(plan: Plan) -> list[str]:
    """The names of the grid that are part of the row."""
    return [name for name in plan.grid if name not in {*_shared(plan), *plan.report.best_over}]


def _value(name: str, word: str, value: str) -> str:
    """A value in the head of a column: an axis's as it is called, a list's with its key."""
    if not value:
        return tables.DASH
    return f"{word}={value}" if "." in name else value


def _marks(numbers: Sequence[float | None]) -> list[str]:
    """Of each number of a column the command that marks it, if any: a row alone is compared with nothing."""
    if len(numbers) < 2:
        return [""] * len(numbers)
    first, second, *_ = [*sorted({number for number in numbers if number is not None}, reverse=True), None, None]
    return [
        "" if one is None else r"\textbf" if one == first else r"\underline" if one == second else "" for one in numbers
    ]


def _entry(entry: Entry, mark: str, notes: dict[str, str]) -> str:
    """An entry as LaTeX; ``notes`` has the letter of each note, and grows."""
    for note in entry.notes:
        notes.setdefault(note, ascii_lowercase[len(notes) % 26] * (len(notes) // 26 + 1))
    letters = ",".join(notes[note] for note in entry.notes)
    text = escape(entry.text)
    return (f"{mark}{{{text}}}" if mark else text) + (rf"\textsuperscript{{{letters}}}" if letters else "")


def _head(found: Wide) -> Iterator[str]:
    """The levels of the head, each but the last with rules below what spans columns."""
    one = len({heads[-1] for heads in found.columns}) == 1
    columns = [heads[:-1] if one and len(heads) > 1 else heads for heads in found.columns]
    before = len(found.stubs)
    for level in range(1, len(columns[0])):
        cells, rules, start = [""] * before, [], before + 1
        for heads, group in itertools.groupby(above[:level] for above in columns):
            width = len(list(group))
            cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape(heads[-1])}}}")
            rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
            start += width
        yield " & ".join(cells).lstrip() + r" \\"
        yield " ".join(rules)
    yield " & ".join([*map(escape, found.stubs), *(escape(heads[-1]) for heads in columns)]) + r" \\"


def _told(plan: Plan, table: pd.DataFrame, found: Wide) -> list[str]:
    """What the caption of a paper's table has to say."""
    scale = [] if plan.scale == artifacts.PAPER else ["--scale", plan.scale]
    command = shlex.join(["fedpipe", "show", "--params", str(plan.params), *scale, "--format", "latex"])
    by = list(dict.fromkeys(heads[-1] for heads in found.columns))
    told = [
        f"made by fedpipe: `{command}`; needs \\usepackage{{booktabs}}.",
        tables.measured(plan),
        f"Protocol{'s' if len(by) > 1 else ''}: {', '.join(by)}. A dash: the method has no such model.",
        *results.own_settings(plan),
        "Of each column the best is bold and the second best underlined.",
        tables.data(plan),
    ]
    if any(name.endswith("-on-train") for name in by):
        told.append("Columns on-train are of those samples of the clients.")
    if plan.report.best_over:
        told += [*_chosen(plan, table), *tables.edges(plan, table)]
    warnings = [f"Warning: {warning}" for warning in plan.warnings]
    return [*told, *tables.failures(plan), *warnings, *tables.made_by(plan), *changes.elsewhere(plan)]


def _chosen(plan: Plan, table: pd.DataFrame) -> list[str]:
    """Of what `report.best_over` searches, the value that each number has: a line a method."""
    over = plan.report.best_over
    values: dict[str, list[tuple[str, str]]] = {}
    for key in tables.best(plan, table):
        algorithm, *point = map(str, key)
        searched, rest = (
            results.label({name: v if (name in over) == part else "" for name, v in zip(plan.grid, point, strict=True)})
            for part in (True, False)
        )
        if searched:
            values.setdefault(algorithm, []).append((searched, rest))
    lines = []
    for algorithm, found in values.items():
        alike = len({searched for searched, _ in found}) == 1
        told = [found[0][0]] if alike else [f"{searched} ({rest})" for searched, rest in found]
        lines.append(f"  {plan.title(algorithm)}: {'; '.join(told)}")
    on = tables.CHOSEN_ON[plan.report.best_on]
    return [f"Of {' and '.join(over)}, each number has the value that is best for it, chosen on the {on}:", *lines]


FORMS: dict[str, Callable[[Plan, pd.DataFrame, Plan | None], str]] = {"latex": latex, "csv": csv}  #: of `fedpipe show`
