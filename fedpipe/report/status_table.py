"""Prints the progress of a study in a terminal, one line per run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedpipe.planning.plan import Plan
from fedpipe.report import status
from fedpipe.report.status import Failure, RunProgress
from fedpipe.report.words import DASH, format_duration

STYLES = {"damaged": "bold red", "failed": "bold red", "running": "green", "queued": "cyan", "stopped": "yellow"}
STYLES |= {"waiting": "dim", "done": ""}
BAR_WIDTHS = range(5, 21)  #: characters of a progress bar
PRINTED_LOG_LINES = 5  #: last lines of a failed job's log
REFRESH_SECONDS = 2  #: seconds between two updates
PROGRESS_HEADS = ("rounds", "accuracy", "s/round", "time left", "state")
MIN_HEAD_WIDTH = 5  #: characters to which heads are shortened, before cells are shortened
MIN_CELL_WIDTH = 4
GAP = 2  #: spaces between two columns


def show_progress(read_plan: Callable[[], Plan], watch: bool = False) -> None:
    """Print the progress, or update it until all runs of the current plan are done or Ctrl+C.

    Raises
    ------
    ArtifactError
        Files of runs are damaged. The progress of all runs is printed before.
    """
    console = Console()
    if not watch:
        plan = read_plan().add_search_results(has_draws=True)
        runs, failures = status.load_progress_and_failures(plan)
        console.print(render_progress_table(plan, runs, failures, console.width))
        status.require_intact_runs(runs)
        return
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            plan = read_plan().add_search_results(has_draws=True)
            runs, failures = status.load_progress_and_failures(plan)
            display = render_progress_table(plan, runs, failures, console.width, console.height)
            live.update(display, refresh=True)
            if not status.has_runs_to_do(plan, runs):
                status.require_intact_runs(runs)
                return
            time.sleep(REFRESH_SECONDS)


def render_progress_table(
    plan: Plan, runs: list[RunProgress], failures: list[Failure], width: int, height: int | None = None
) -> RenderableType:
    """Render the progress for a terminal of this width, one line per run.

    With a height, as many runs as fit, active runs first.
    """
    descriptions = {run.name: cells for run, cells in zip(runs, status.format_run_labels(plan), strict=True)}
    sorted_runs = sorted(runs, key=lambda run: status.RUN_STATES.index(run.state))
    search_lines, accuracy_line = status.describe_search_progress(plan), status.describe_reported_metrics(plan)
    summary = [*status.summarize_progress(runs, width), *search_lines, f"accuracy: {accuracy_line}"]
    head_lines, failure_lines = [*map(Text, summary)], _render_failures(failures, width, height)
    # The table's head, the note about hidden runs and a spare line need three more.
    other_lines = _count_wrapped_lines([*head_lines, *failure_lines], width) + 3
    visible_runs = len(sorted_runs) if height is None else max(height - other_lines, 1)
    progress = [PROGRESS_HEADS, *map(_format_run_row, sorted_runs[:visible_runs])]
    remaining_width = width - _get_table_width(progress) - GAP
    rows = [[*descriptions[run.name].values()] for run in sorted_runs[:visible_runs]]
    labels = shorten_columns_to_width([[*descriptions[sorted_runs[0].name]], *rows], remaining_width)
    bar_width = min(remaining_width - _get_table_width(labels) - GAP, BAR_WIDTHS[-1])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in labels[0]:
        table.add_column(Text(head), no_wrap=True)
    if bar_width >= BAR_WIDTHS[0]:
        table.add_column()
    for head in PROGRESS_HEADS:
        table.add_column(head, justify="left" if head == "state" else "right", no_wrap=True)
    for run, cells, (*numbers, state) in zip(sorted_runs, labels[1:], progress[1:], strict=False):
        bar = [ProgressBar(run.total, run.rounds, width=bar_width)] if bar_width >= BAR_WIDTHS[0] else []
        table.add_row(*map(Text, cells), *bar, *numbers, Text(state, STYLES[run.state]))
    hidden_note = (
        [Text(f"… and {len(sorted_runs) - visible_runs} more", "dim")] if len(sorted_runs) > visible_runs else []
    )
    return Group(*head_lines, table, *hidden_note, *failure_lines)


def shorten_columns_to_width(rows: list[list[str]], width: int) -> list[list[str]]:
    """Shorten the texts of a table, whose first row is its head, until it fits into ``width`` characters.

    The middle of heads is omitted first, then that of the longest texts.

    Examples
    --------
    >>> shorten_columns_to_width([["run", "learning_rate"], ["FedDW", "0.05"]], 14)
    [['run', 'lea…ate'], ['FedDW', '0.05']]
    """
    columns = [*zip(*rows, strict=True)]
    full_width = max(len(text) for row in rows for text in row)
    limits = [(size, full_width) for size in range(full_width, MIN_HEAD_WIDTH, -1)]
    limits += [(min(size, MIN_HEAD_WIDTH), size) for size in range(full_width, MIN_CELL_WIDTH - 1, -1)]
    for head_size, cell_size in limits:
        short_columns = [
            [shorten_middle(head, head_size), *shorten_texts_to_width(cells, cell_size)] for head, *cells in columns
        ]
        short_rows = [list(row) for row in zip(*short_columns, strict=True)]
        if _get_table_width(short_rows) <= width:
            break
    return short_rows


def shorten_texts_to_width(texts: Sequence[str], width: int) -> list[str]:
    """Omit the middle of the texts that are wider than ``width`` characters. Distinct texts stay distinct if possible.

    Examples
    --------
    >>> shorten_texts_to_width(["momentum of clients", "momentum at the clients"], 8)
    ['…of …nts', '…at …nts']
    """
    short_texts = {text: shorten_middle(text, width) for text in texts}
    texts_by_short_text: dict[str, list[str]] = {}
    for text, short_text in short_texts.items():
        texts_by_short_text.setdefault(short_text, []).append(text)
    for equal_texts in texts_by_short_text.values():
        prefix = os.path.commonprefix(equal_texts) if len(equal_texts) > 1 else ""  # noqa: RUF071 - by character
        short_texts |= {text: shorten_middle(f"…{text.removeprefix(prefix)}", width) for text in equal_texts if prefix}
    return [short_texts[text] for text in texts]


def shorten_middle(text: str, width: int) -> str:
    """Omit the middle of a text that is wider than ``width`` characters.

    Examples
    --------
    >>> shorten_middle("learning_rate", 6)
    'lea…te'
    """
    if len(text) <= width:
        return text
    end = max(width - 1, 0) // 2
    return f"{text[: max(width - 1, 0) - end]}…{text[len(text) - end :]}"


def format_accuracy(accuracy: float | None) -> str:
    """Format an accuracy in percent. A dash means that the method has no such model."""
    return "" if accuracy is None else DASH if math.isnan(accuracy) else f"{100 * accuracy:.2f} %"


def _format_run_row(run: RunProgress) -> tuple[str, str, str, str, str]:
    """Format rounds, accuracy, seconds per round, time left and state of a run."""
    return (
        f"{run.rounds}/{run.total}",
        format_accuracy(run.accuracy),
        "" if run.seconds is None else f"{run.seconds:.2f}",
        "" if run.seconds_left is None or run.state == "done" else format_duration(run.seconds_left),
        run.state,
    )


def _get_table_width(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in zip(*rows, strict=True)) + GAP * (len(rows[0]) - 1)


def _render_failures(failures: list[Failure], width: int, height: int | None) -> list[Text]:
    """Render the failed jobs. With a height, as many as fit into half of it, at least one."""
    lines: list[Text] = []
    for index, failure in enumerate(failures):
        head = Text(f"{failure.rule} failed: {failure.log}", STYLES["failed"])
        failure_lines = [Text(), head, *(Text(f"  {line}") for line in failure.lines[-PRINTED_LOG_LINES:])]
        if height is not None and lines and _count_wrapped_lines(lines + failure_lines, width) > height // 2:
            return [*lines, Text(), Text(f"failed jobs not shown: {len(failures) - index}", STYLES["failed"])]
        lines += failure_lines
    return lines


def _count_wrapped_lines(texts: list[Text], width: int) -> int:
    console = Console(width=width)
    return sum(len(text.wrap(console, width)) for text in texts)
