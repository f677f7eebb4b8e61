"""Shows the progress of a segment: a bar on a terminal, one line per round in a log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def show_round_progress(path: Path, stop: int, rounds: Iterator[int], console: Console | None = None) -> Iterator[int]:
    """Pass on the rounds of a segment, which ends with round ``stop``, and show each.

    ``path`` is the run's folder. ``rounds`` are the numbers of :meth:`~fedpipe.engine.run.Run.run_segment`: complete
    rounds first, then each new round.
    """
    console = console or Console()
    complete_count = next(rounds)
    if not console.is_terminal:
        typer.echo(f"{path}: {complete_count} of {stop} rounds are complete")
        for number in rounds:
            typer.echo(f"{path}: round {number} of {stop}")
            yield number
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        bar = progress.add_task(str(path), total=stop, completed=complete_count)
        for number in rounds:
            progress.update(bar, completed=number)
            yield number
