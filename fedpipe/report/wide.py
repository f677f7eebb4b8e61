"""The table for papers, as LaTeX and CSV: one row per method, one column per common grid point."""

from __future__ import annotations

import csv
import io
import itertools
import shlex
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from string import ascii_lowercase
from typing import NamedTuple

from fedpipe.core.storage import layout
from fedpipe.planning.plan import Plan
from fedpipe.planning.rungs import TUNED, TUNING
from fedpipe.report import results, statistics, table_notes, tables, words
from fedpipe.report.data import StudyData
from fedpipe.report.table_parts import TextTable
from fedpipe.report.tuning import build_search_section, list_winners
from fedpipe.settings.base import NEW_CLIENTS_PREFIX, Metric

MISSING = "…"  #: cell of incomplete runs
GREEK_LETTERS = (  #: Greek letters with LaTeX names. Capitals with Latin shapes have none
    "αalpha βbeta γgamma δdelta εvarepsilon ζzeta ηeta θtheta ιiota κkappa λlambda μmu \N{MICRO SIGN}mu νnu ξxi πpi "
    "ρrho σsigma τtau υupsilon φvarphi χchi ψpsi ωomega ΓGamma ΔDelta ΘTheta ΛLambda ΞXi ΠPi ΣSigma ΥUpsilon ΦPhi ΨPsi "
    "ΩOmega"
)
LATEX_ESCAPES = {
    **{char: f"\\{char}" for char in "_%&#${}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"±": r"$\pm$", "−": r"$-$", "×": r"$\times$", "–": "--", MISSING: r"\dots{}"},
    **{"≤": r"$\le$", "≥": r"$\ge$", "∞": r"$\infty$", "→": r"$\to$"},
    **{word[0]: rf"$\{word[1:]}$" for word in GREEK_LETTERS.split()},
}


class Entry(NamedTuple):
    """A cell of the table."""

    text: str
    number: float | None = None  #: rounded mean
    notes: tuple[str, ...] = ()  #: notes about this number
    is_significant: bool = False  #: whether it differs from the baseline, if `report.statistics` has `difference`


class Column(NamedTuple):
    """A column of numbers."""

    heads: tuple[str, ...]  #: from the top level to the metric
    protocol: str
    metric: Metric
    is_reported: bool = False  #: whether methods have numbers by their own protocols


class Row(NamedTuple):
    """A row of the table."""

    labels: tuple[str, ...]
    entries: list[Entry]
    overrides: str
    winners: dict[str, str]  #: the winners of `tune`, by the head of a column


class WideTable(NamedTuple):
    """The table."""

    label_heads: tuple[str, ...]  #: heads of the labels
    columns: list[Column]
    rows: list[Row]


def render_latex_table(data: StudyData, full_plan: Plan | None = None) -> str:
    """Render a tabular for the package booktabs, with text for its caption in comments.

    The best number of each column is bold and the second best is underlined, after rounding. The lowest ECE or NLL is
    the best. If runs are missing, ``full_plan`` is the plan of the complete study.
    """
    wide_table, notes = build_wide_table(data, full_plan), dict[str, str]()
    marks_by_column = [
        _choose_latex_marks(
            [row.entries[index].number for row in wide_table.rows], words.METRICS[column.metric].improvement_sign
        )
        for index, column in enumerate(wide_table.columns)
    ]
    body: list[list[str]] = []
    for index, row in enumerate(wide_table.rows):
        title, *labels = row.labels
        name = _render_latex_entry(Entry(title, notes=tuple(filter(None, [row.overrides]))), "", notes)
        entries = [
            _render_latex_entry(entry, marks[index], notes)
            for entry, marks in zip(row.entries, marks_by_column, strict=True)
        ]
        body.append([name, *map(escape_latex, labels), *entries])
    search_section = build_search_section(data.plan)
    search_notes = [part for part in search_section if isinstance(part, str)]
    width = len(wide_table.label_heads) + len(wide_table.columns)
    footnotes = [
        rf"\multicolumn{{{width}}}{{l}}{{\textsuperscript{{{mark}}} {escape_latex(note)}}}"
        for note, mark in notes.items()
    ]
    lines = [
        *(f"% {line}" for text in _build_caption_lines(data, wide_table, search_notes) for line in text.splitlines()),
        rf"\begin{{tabular}}{{{'l' * len(wide_table.label_heads)}{'c' * len(wide_table.columns)}}}",
        r"\toprule",
        *_render_latex_table_head(wide_table),
        r"\midrule",
        *(_join_latex_cells(row) for row in body),
        r"\bottomrule",
        *(line + r" \\" for line in footnotes),
        r"\end{tabular}",
    ]
    for part in search_section:
        if isinstance(part, TextTable):
            lines += ["", "% The winners of the search:", *_render_latex_text_table(part)]
    return "\n".join(lines) + "\n"


def render_wide_csv(data: StudyData, full_plan: Plan | None = None) -> str:
    """Render the same table as CSV, with levels of heads joined by `` / `` and notes in parentheses.

    The last columns are the winning values of `tune`.
    """
    wide_table, text = build_wide_table(data, full_plan), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    winner_heads = dict.fromkeys(head for row in wide_table.rows for head in row.winners)
    columns = [" / ".join(column.heads) for column in wide_table.columns]
    writer.writerow(map(tables.escape_spreadsheet_formula, [*wide_table.label_heads, *columns, *winner_heads]))
    for row in wide_table.rows:
        title, *labels = row.labels
        name = f"{title} ({row.overrides})" if row.overrides else title
        entries = [entry.text + (f" ({', '.join(entry.notes)})" if entry.notes else "") for entry in row.entries]
        winners = [row.winners.get(head, words.DASH) for head in winner_heads]
        writer.writerow(map(tables.escape_spreadsheet_formula, [name, *labels, *entries, *winners]))
    return text.getvalue()


def escape_latex(text: str) -> str:
    r"""Escape text for LaTeX.

    Examples
    --------
    >>> print(escape_latex("fedavg_m, 5% & #1"))
    fedavg\_m, 5\% \& \#1
    """
    return "".join(LATEX_ESCAPES.get(char, char) for char in " ".join(text.split()))


def build_wide_table(data: StudyData, full_plan: Plan | None = None) -> WideTable:
    """Build the table: one row per method, one column per grid point, protocol and metric.

    Names of the grid that some methods lack are part of the row. Protocols on validation samples are omitted.
    """
    return _WideTableBuilder(data, full_plan or data.plan).build()


class _WideTableBuilder:
    """Builds the table from the rows of the narrow one.

    A row has ``labels``: the method, and its values of the grid in ``row_names``. A column has a ``point``: values of
    the grid in ``column_names``.
    """

    def __init__(self, data: StudyData, full_plan: Plan) -> None:
        self.plan = plan = data.plan
        self.column_names = _sort_column_grid_names(full_plan)
        self.row_names = [
            name for name in full_plan.grid if name not in {*self.column_names, *full_plan.report.best_over}
        ]
        self.short_names = results.shorten_dotted_keys(plan.grid)
        protocols = data.reported_rows["protocol"].unique()
        self.test_protocols = [name for name in protocols if not name.endswith("-on-validation")]
        self.cells = data.reported_rows.set_index([*plan.row_key_columns, "protocol", "metric"]).to_dict("index")
        self.run_counts = results.count_runs_by_row(plan)
        self.shown_keys = {self._split_row_key(key): tuple(map(str, key)) for key in data.table_row_keys}
        self.planned_cells = dict.fromkeys(
            self._split_row_key(results.get_row_key(full_plan, cell)) for cell in results.sort_cells(full_plan)
        )
        self.cell_overrides = {
            results.get_row_key(plan, cell): results.format_method_overrides(cell) for cell in plan.cells
        }
        self.row_overrides = self._collect_overrides_of_rows()
        needs_stars = "difference" in plan.report.statistics
        self.significant_keys = statistics.find_significant_differences(plan, data.statistics) if needs_stars else set()

    def build(self) -> WideTable:
        """Build the table. A column without a number is omitted, unless all columns are."""
        plan = self.plan
        row_labels = list(dict.fromkeys(labels for labels, _ in self.planned_cells if labels in self.row_overrides))
        points = _sort_grid_points(dict.fromkeys(point for _, point in self.planned_cells))
        entries_by_column = {
            head: [self._build_entry(labels, *head) for labels in row_labels]
            for head in itertools.product(points, self.test_protocols, plan.metrics)
        }
        shown = {
            head: entries
            for head, entries in entries_by_column.items()
            if any(entry.number is not None for entry in entries)
        } or entries_by_column
        columns = []
        for point, protocol, metric in shown:
            is_reported = any(plan.get_method_protocol(label, protocol) != protocol for label, *_ in row_labels)
            head = words.format_metric_label(protocol, metric)
            if is_reported:
                is_next = protocol != plan.protocols[0]
                head = words.get_reported_column_header(metric) + (" (new clients)" if is_next else "")
            columns.append(Column((*self._format_grid_headers(point), head), protocol, metric, is_reported))
        winners = self._collect_winners()
        rows = [
            Row(
                (plan.get_method_title(labels[0]), *(value or words.DASH for value in labels[1:])),
                list(entries),
                self.row_overrides[labels],
                winners.get(labels, {}),
            )
            for labels, *entries in zip(row_labels, *shown.values(), strict=True)
        ]
        return WideTable(("algorithm", *(self.short_names[name] for name in self.row_names)), columns, rows)

    def _split_row_key(self, key: Iterable[Hashable]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Split the key of a narrow table's row into the labels of a row and the grid point of a column."""
        values = dict(zip(self.plan.row_key_columns, map(str, key), strict=True))
        return (
            tuple(values[name] for name in ("algorithm", *self.row_names)),
            tuple(values[name] for name in self.column_names),
        )

    def _collect_overrides_of_rows(self) -> dict[tuple[str, ...], str]:
        """Collect the overrides that all cells of a row share, as text by its labels."""
        overrides_by_row: dict[tuple[str, ...], set[str]] = {}
        for (labels, _), key in self.shown_keys.items():
            overrides_by_row.setdefault(labels, set()).add(self.cell_overrides[key])
        return {
            labels: overrides.pop() if len(overrides) == 1 else "" for labels, overrides in overrides_by_row.items()
        }

    def _build_entry(self, labels: tuple[str, ...], point: tuple[str, ...], protocol: str, metric: Metric) -> Entry:
        """Build the cell of a row and a column, with notes about what differs from the other cells."""
        plan, key = self.plan, self.shown_keys.get((labels, point))
        if key is None:
            return Entry(MISSING if (labels, point) in self.planned_cells else words.DASH)
        shown_protocol = plan.get_method_protocol(labels[0], protocol)
        cell = self.cells[*key, shown_protocol, metric]
        if not cell["seeds"]:
            return Entry(words.DASH)
        overrides, runs = self.cell_overrides[key], self.run_counts[key]
        notes = [overrides] if overrides != self.row_overrides[labels] else []
        notes += [words.format_metric_label(shown_protocol, metric)] if shown_protocol != protocol else []
        notes += [f"{cell['seeds']} of {len(plan.seeds)} seeds"] if cell["seeds"] < len(plan.seeds) else []
        if cell["diverged"]:
            notes.append(f"diverged in {int(cell['diverged'])} of {runs} run{'s' if runs > 1 else ''}")
        is_significant = metric == plan.metrics[0] and (*key, shown_protocol) in self.significant_keys
        return Entry(tables.format_score(cell), round(float(cell["mean"]), 2), tuple(notes), is_significant)

    def _format_grid_headers(self, point: tuple[str, ...]) -> list[str]:
        """Format the grid values in a column's heads: the name of an axis's value, or a list's value with its key."""
        return [
            (f"{self.short_names[name]}={value}" if "." in name else value) if value else words.DASH
            for name, value in zip(self.column_names, point, strict=True)
        ]

    def _collect_winners(self) -> dict[tuple[str, ...], dict[str, str]]:
        """Collect the winners of `tune` by the labels of their row, as text by the heads of their column."""
        winners: dict[tuple[str, ...], dict[str, str]] = {}
        for winner in list_winners(self.plan):
            grid_point = results.format_grid_point(self.plan, winner.search) | {TUNING: TUNED}
            key = [winner.search.algorithm, *(grid_point[name] for name in self.plan.grid)]
            labels, point = self._split_row_key(key)
            heads = self._format_grid_headers(point)
            winners.setdefault(labels, {}).update(
                {" / ".join([*heads, head]): text for head, text in winner.texts.items()}
            )
        return winners


def _sort_column_grid_names(plan: Plan) -> list[str]:
    """Sort the names of the grid that are columns: those of all methods, except `report.best_over`.

    Names in plan.json are sorted. The cells show the order of params.yaml, because an earlier name changes less often
    from cell to cell.
    """
    column_names = plan.column_grid_names
    points = dict.fromkeys(
        tuple(results.format_grid_point(plan, cell)[name] for name in column_names) for cell in results.sort_cells(plan)
    )
    change_counts = [
        sum(first_value != second_value for first_value, second_value in itertools.pairwise(values))
        for values in zip(*points, strict=True)
    ]
    return [name for _, name in sorted(zip(change_counts, column_names, strict=True), key=lambda pair: pair[0])]


def _sort_grid_points(points: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Group points with the same first values, in the order of appearance."""
    points = list(points)
    value_positions = [
        {value: positions for positions, value in enumerate(dict.fromkeys(values))}
        for values in zip(*points, strict=True)
    ]
    return sorted(
        points, key=lambda point: [positions[value] for positions, value in zip(value_positions, point, strict=True)]
    )


def _join_latex_cells(cells: Sequence[str]) -> str:
    """Join the cells of a row. It must not begin with `*` or `[`, which the end of the previous row would take."""
    return ("{}" if cells[0][:1] in ("*", "[") else "") + " & ".join(cells) + r" \\"


def _render_latex_text_table(table: TextTable) -> Iterator[str]:
    width, left_aligned_columns = table.frame.shape[1], table.left_aligned_columns
    yield rf"\begin{{tabular}}{{{'l' * left_aligned_columns}{'r' * (width - left_aligned_columns)}}}"
    yield r"\toprule"
    yield " & ".join(map(escape_latex, table.frame.columns)) + r" \\"
    yield r"\midrule"
    for row in table.frame.itertuples(index=False):
        yield _join_latex_cells([*map(escape_latex, row)])
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _choose_latex_marks(numbers: Sequence[float | None], sign: int) -> list[str]:
    """Choose the LaTeX command that marks each number of a column. Empty if there is only one row.

    ``sign`` is 1 if larger numbers are better, and -1 if smaller ones are.
    """
    if len(numbers) < 2:
        return [""] * len(numbers)
    ranked_numbers = sorted({number for number in numbers if number is not None}, key=lambda number: -sign * number)
    marks: dict[float | None, str] = dict(zip(ranked_numbers, (r"\textbf", r"\underline"), strict=False))
    return [marks.get(number, "") for number in numbers]


def _render_latex_entry(entry: Entry, mark: str, notes: dict[str, str]) -> str:
    """Render an entry as LaTeX with a star and the letters of its notes. Add the letters of new notes to ``notes``."""
    for note in entry.notes:
        notes.setdefault(note, ascii_lowercase[len(notes) % 26] * (len(notes) // 26 + 1))
    signs = ",".join(["*"] * entry.is_significant + [notes[note] for note in entry.notes])
    text = escape_latex(entry.text)
    return (f"{mark}{{{text}}}" if mark else text) + (rf"\textsuperscript{{{signs}}}" if signs else "")


def _render_latex_table_head(wide_table: WideTable) -> Iterator[str]:
    """Render the levels of the head. Below cells that span the columns of several cells are rules."""
    columns = _build_latex_column_heads(wide_table)
    label_count, level_count = len(wide_table.label_heads), len(columns[0])
    for level in range(1, level_count):
        cells, rules, start = [""] * label_count, [], label_count + 1
        groups = [(heads, len(list(group))) for heads, group in itertools.groupby(head[:level] for head in columns)]
        for heads, width in groups:
            cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(heads[-1])}}}")
            rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
            start += width
        yield " & ".join(cells).lstrip() + r" \\"
        if len(groups) < len(list(itertools.groupby(head[: level + 1] for head in columns))):
            yield " ".join(rules)
    yield " & ".join(map(escape_latex, [*wide_table.label_heads, *(heads[-1] for heads in columns)])) + r" \\"


def _build_latex_column_heads(wide_table: WideTable) -> list[tuple[str, ...]]:
    """Build the heads of the columns. With new clients, samples, model and clients have a level each to save width."""
    columns = wide_table.columns
    if any(column.protocol.startswith(NEW_CLIENTS_PREFIX) for column in columns):
        has_metrics = len({column.metric for column in columns}) > 1
        all_heads = []
        for heads, protocol, metric, is_reported in columns:
            samples, model, clients = words.describe_protocol(protocol)
            metric_heads = [words.METRICS[metric].name] if has_metrics else []
            if is_reported:
                samples, model = "reported", "" if has_metrics else words.METRICS[metric].name
            all_heads.append((*heads[:-1], samples, model, clients, *metric_heads))
        return all_heads
    has_single_protocol = len({column.heads[-1] for column in columns}) == 1
    return [column.heads[:-1] if has_single_protocol and len(column.heads) > 1 else column.heads for column in columns]


def _build_caption_lines(data: StudyData, wide_table: WideTable, search_notes: Sequence[str]) -> list[str]:
    plan = data.plan
    preset = [] if plan.preset == layout.FULL_PRESET else ["--preset", plan.preset]
    command = shlex.join(["fedpipe", "show", "--params", str(plan.params), *preset, "--format", "latex"])
    protocols = dict.fromkeys(column.protocol for column in wide_table.columns)
    metric_labels = [words.format_metric_label(protocol, metric) for metric in plan.metrics for protocol in protocols]
    return [
        f"Made with `{command}`. The table needs \\usepackage{{booktabs}}.",
        table_notes.describe_reported_numbers(plan),
        f"Metrics: {', '.join(metric_labels)}. {table_notes.explain_missing_values(plan)}",
        words.explain_metrics(protocols, plan.metrics),
        *(
            f"Column {words.get_reported_column_header(metric)}: "
            f"{words.format_metric_label(plan.protocols[0], metric)}, or the metric in a note."
            for metric in plan.metrics
            if plan.method_protocols
        ),
        *search_notes,
        *results.describe_method_overrides(plan),
        *(
            ["In each column, the best number is bold and the second best is underlined."]
            if len(wide_table.rows) > 1
            else []
        ),
        *([tables.describe_stars(plan)] if "difference" in plan.report.statistics else []),
        table_notes.describe_data_and_partitions(plan),
        *_describe_best_values(data),
        *table_notes.describe_best_values_at_grid_edges(data),
        *table_notes.describe_omitted_updates(data),
        *(f"Warning: {warning}" for warning in plan.warnings),
        *table_notes.describe_environments(data),
        *data.shared_code_notes,
    ]


def _describe_best_values(data: StudyData) -> list[str]:
    """Describe the values of `report.best_over` that each number uses, one line per method. Empty without it."""
    plan, searched_names = data.plan, data.plan.report.best_over
    if not searched_names:
        return []
    texts_by_algorithm: dict[str, list[tuple[str, str]]] = {}
    for key in data.table_row_keys:
        algorithm, *values = map(str, key)
        point = dict(zip(plan.grid, values, strict=True))
        searched_text = results.describe_grid_point(point | dict.fromkeys(point.keys() - {*searched_names}, ""))
        if searched_text:
            rest_text = results.describe_grid_point(point | dict.fromkeys(searched_names, ""))
            texts_by_algorithm.setdefault(algorithm, []).append((searched_text, rest_text))
    lines = []
    for algorithm, value_texts in texts_by_algorithm.items():
        has_single_value = len({searched_text for searched_text, _ in value_texts}) == 1
        texts = [f"{searched_text} ({rest_text})" for searched_text, rest_text in value_texts]
        value_list = value_texts[0][0] if has_single_value else "; ".join(texts)
        lines.append(f"  {plan.get_method_title(algorithm)}: {value_list}")
    selection_phrase = tables.SELECTION_PHRASES[plan.report.best_on]
    head = f"Each number uses its best value of {' and '.join(searched_names)}, selected on the {selection_phrase}:"
    return [head, *lines]


TABLE_RENDERERS: dict[str, Callable[[StudyData, Plan | None], str]] = {
    "latex": render_latex_table,
    "csv": render_wide_csv,
}  #: by format of `fedpipe show`
