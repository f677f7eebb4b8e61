"""Prints the progress of a study in a terminal, one line per run."""

from __future__ import annotations

import math
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

STYLES = {"failed": "bold red", "running": "green", "queued": "cyan", "stopped": "yellow", "waiting": "dim", "done": ""}
MIN_BAR_WIDTH = 7  #: characters of the shortest progress bar, with the gap before it
MAX_BAR_WIDTH = 20
PRINTED_LOG_LINES = 5  #: last lines of a failed job's log
REFRESH_SECONDS = 2  #: seconds between two updates
PROGRESS_HEADS = ("rounds", "accuracy", "s/round", "time left", "state")


def show_progress(read_plan: Callable[[], Plan], watch: bool = False) -> None:
    """Print the progress, or update it until all runs of the current plan are done or Ctrl+C."""
    console = Console()
    if not watch:
        plan = read_plan().add_search_results(has_draws=True)
        console.print(render_progress_table(plan, *status.load_run_progress(plan), console.width))
        return
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            plan = read_plan().add_search_results(has_draws=True)
            runs, failures = status.load_run_progress(plan)
            display = render_progress_table(plan, runs, failures, console.width, console.height)
            live.update(display, refresh=True)
            if all(run.state == "done" for run in runs) and not plan.is_searching:
                return
            time.sleep(REFRESH_SECONDS)


def render_progress_table(
    plan: Plan, runs: list[RunProgress], failures: list[Failure], width: int, height: int | None = None
) -> RenderableType:
    """Render the progress for a terminal of this width, one line per run, active runs first.

    With a height, the first failed jobs are above the runs, because the terminal shows only the first lines.
    """
    summary = [status.summarize_progress(runs), *status.describe_search_progress(plan)]
    head_lines = [Text(line) for line in (*summary, f"accuracy: {status.describe_reported_metrics(plan)}")]
    rows = sorted(
        zip(runs, status.list_run_descriptions(plan), strict=True),
        key=lambda row: status.RUN_STATES.index(row[0].state),
    )
    table = _build_run_table(rows)
    if Console(width=width).measure(table).maximum + MIN_BAR_WIDTH <= width:
        table = _build_run_table(rows, has_bars=True)
    if height is None:
        return Group(*head_lines, table, *_render_failures(failures))
    count = max(height // 2 // (PRINTED_LOG_LINES + 2), 1)
    failure_lines = _render_failures(failures[:count], len(failures[count:]))
    return Group(*head_lines, *failure_lines, *([Text()] if failure_lines else []), table)


def _build_run_table(rows: Sequence[tuple[RunProgress, dict[str, str]]], has_bars: bool = False) -> Table:
    """Build the table of runs and their descriptions. Rich shortens descriptions that are too wide."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in rows[0][1]:
        table.add_column(Text(head, no_wrap=True, overflow="ellipsis"))
    if has_bars:
        table.add_column(max_width=MAX_BAR_WIDTH)
    for head in PROGRESS_HEADS:
        table.add_column(head, justify="left" if head == "state" else "right", no_wrap=True)
    for run, description in rows:
        labels = (Text(text, no_wrap=True, overflow="ellipsis") for text in description.values())
        bar = [ProgressBar(run.total, run.rounds)] if has_bars else []
        *numbers, state = _format_run_row(run)
        table.add_row(*labels, *bar, *numbers, Text(state, STYLES[run.state]))
    return table


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


def _render_failures(failures: list[Failure], hidden: int = 0) -> list[Text]:
    """Render failed jobs, and the number of ``hidden`` ones."""
    lines: list[Text] = []
    for failure in failures:
        head = Text(f"{failure.rule} failed: {failure.log}", STYLES["failed"])
        lines += [Text(), head, *(Text(f"  {line}") for line in failure.lines[-PRINTED_LOG_LINES:])]
    return [*lines, Text(), Text(f"failed jobs not shown: {hidden}", STYLES["failed"])] if hidden else lines
