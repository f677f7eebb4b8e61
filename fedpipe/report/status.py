"""How far a study has come, read from what its runs and Snakemake have written; touches nothing, imports no torch."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fedpipe import artifacts, callbacks
from fedpipe.artifacts import RunFiles
from fedpipe.errors import ArtifactError
from fedpipe.planned import Plan, PlannedRun
from fedpipe.report import results
from fedpipe.report.tables import DASH
from fedpipe.report.words import duration

#: In the order in which they are shown.
RunState = Literal["failed", "running", "queued", "stopped", "waiting", "done"]
RUN_STATES: tuple[RunState, ...] = ("failed", "running", "queued", "stopped", "waiting", "done")
STYLES = {"failed": "bold red", "running": "green", "queued": "cyan", "stopped": "yellow", "waiting": "dim", "done": ""}
RECENT = 5  #: rounds over which the rate is taken
LINES = 5  #: of the log of a failed job
INTERVAL = 2  #: seconds between two drawings

SNAKEMAKE = Path(".snakemake")
FAILED = (
    r"^Command '.*fedpipe (\w+) (\S+).* > (\S+) 2>&1' "
    r"(?:returned non-zero exit status (?!130\.)\d+|died with <Signals\.(?!SIGINT)\w+: \d+>)\.$"
)
INTERRUPTED = r"^Command '.* > (\S+) 2>&1' (?:returned non-zero exit status 130|died with <Signals\.SIGINT: 2>)\.$"
CTRL_C = "Terminating processes on user request"  #: all errors below it are of jobs that Snakemake ended
STOPPED = r": stopped by SIGTERM after round \d+;[^\n]*\s*\Z"  #: the end of a segment's log, which is no failure


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Parameters
    ----------
    name
        Algorithm, grid point and seed, in words.
    state
        ``failed``: its last job failed, and no other was begun; ``running``: a job writes its log; ``queued``: a job
        was submitted; ``stopped``: begun, but Snakemake is not at work, or Ctrl+C ended its last job, or SIGTERM did
        after a round; ``waiting``: not begun; ``done``.
    rounds, total
        Rounds complete, and rounds of the study.
    accuracy
        In [0, 1] over all test samples, of the last round measured and the study's first protocol, which is one for
        all runs; NaN where the method has no such model, None before anything is measured.
    seconds
        Of a round, mean over the last few.
    """

    name: str
    state: RunState
    rounds: int
    total: int
    accuracy: float | None
    seconds: float | None

    @property
    def left(self) -> float | None:
        """Seconds until it is done, if it runs without pause."""
        return None if self.seconds is None else self.seconds * (self.total - self.rounds)


@dataclass(frozen=True)
class Failure:
    """A job that failed, and was not begun again since.

    Parameters
    ----------
    run
        The run that it is of, in words; empty where it is of several.
    rule
        Its rule.
    log
        Its log.
    lines
        The last lines of the log, or of Slurm's own where the job left none.
    """

    run: str
    rule: str
    log: Path
    lines: list[str]

    def told(self) -> str:
        """The failure in a line, with the last one of its log."""
        return f"{f'{self.run}: ' if self.run else ''}{self.rule} failed: {self.lines[-1].strip()} ({self.log})"


@dataclass(frozen=True)
class Job:
    """What Snakemake last said of a job."""

    rule: str
    failed: bool
    outputs: list[Path]
    logs: list[Path]  #: its own, then Slurm's
    when: float  #: seconds since the epoch, whole
    since: float = 0.0  #: when it was submitted, as far as Snakemake told
    interrupted: bool = False  #: by Ctrl+C

    @property
    def begun(self) -> bool:
        """Whether it has written its log since it was submitted."""
        return any(moment >= self.when for moment in _moments(self.logs[:1]))

    @property
    def stopped(self) -> bool:
        """Whether Ctrl+C ended it, or it is a segment that SIGTERM ended in good order: its log's last line says so.

        Not a segment that died before it wrote a log: what is there is that of the job before it.
        """
        if self.interrupted:
            return True
        with suppress(FileNotFoundError):
            own = self.logs[0].stat().st_mtime >= self.since
            return self.failed and own and bool(re.search(STOPPED, self.logs[0].read_text(errors="replace")))
        return False


def progress(plan: Plan) -> tuple[list[Progress], list[Failure]]:
    """All runs of a study, in the plan's order, and the jobs that failed."""
    jobs = {job.logs[0]: job for job in _said()}
    planned = sorted(plan.runs, key=lambda run: plan.algorithms.index(run.algorithm))
    made = {run.path: run.joined.marker for run in planned}
    unfinished = [job for job in jobs.values() if not all(made.get(path, path).exists() for path in job.outputs)]
    locks = _moments((SNAKEMAKE / "locks").glob("*"))
    runs = [_of(plan, run, unfinished, min(locks, default=None)) for run in planned]
    partitions = {artifacts.assignment_file(key).parent for key in plan.partitions}
    ours = {plan.study.tables, plan.study.figures, *made, *partitions}
    ours |= {artifacts.dataset_file(run.dataset) for run in planned} | {probe.files.table for probe in plan.probes}
    broken = [job for job in unfinished if job.failed and not job.stopped]
    failed = [job for job in broken if any(ours & {path, *path.parents} for path in job.outputs)]
    names = dict(zip(made, (run.name for run in runs), strict=True))
    return runs, [Failure(_named(names, job), job.rule, job.logs[0], _tail(job.logs)) for job in failed]


def render(runs: list[Progress], failures: list[Failure], protocol: str, height: int | None = None) -> RenderableType:
    """The study's progress for a terminal; with a height, of as many runs as fit, those at work first."""
    shown = sorted(runs, key=lambda run: RUN_STATES.index(run.state))
    below = [line for failure in failures for line in _told(failure)]
    room = len(shown) if height is None else max(height - len(below) - 6, 1)
    right = functools.partial(Column, justify="right")
    columns = ("run", "", right("rounds"), right(protocol), right("s/round"), right("left"), "state")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for run in shown[:room]:
        table.add_row(
            run.name,
            ProgressBar(run.total, run.rounds, width=20),
            f"{run.rounds}/{run.total}",
            "" if run.accuracy is None else DASH if math.isnan(run.accuracy) else f"{100 * run.accuracy:.2f} %",
            "" if run.seconds is None else f"{run.seconds:.2f}",
            "" if run.left is None or run.state == "done" else duration(run.left),
            Text(run.state, STYLES[run.state]),
        )
    hidden = [Text(f"… and {len(shown) - room} more", "dim")] if len(shown) > room else []
    return Group(Text(summary(runs)), Text(), table, *hidden, *below)


def show(plan: Plan, watch: bool = False) -> None:
    """Print the study's progress; or draw it again and again, until all runs are done or Ctrl+C."""
    console = Console()
    if not watch:
        console.print(render(*progress(plan), plan.protocols[0]))
        return
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            runs, failures = progress(plan)
            live.update(render(runs, failures, plan.protocols[0], console.height), refresh=True)
            if all(run.state == "done" for run in runs):
                return
            time.sleep(INTERVAL)


def summary(runs: list[Progress]) -> str:
    """The study in a line."""
    count = {state: sum(run.state == state for run in runs) for state in RUN_STATES}
    states = ", ".join(f"{count[state]} {state}" for state in reversed(RUN_STATES) if count[state])
    rounds = f"{sum(run.rounds for run in runs)} of {sum(run.total for run in runs)} rounds"
    left = time_left(runs)
    ahead = "" if left is None or count["done"] == len(runs) else f"; about {duration(left)} left"
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''} ({states}), {rounds}{ahead}"


def time_left(runs: list[Progress]) -> float | None:
    """Seconds until all runs are done, if as many go on at once as do now.

    A run without a complete round is taken to be as slow as the others on average. None where no run has one.
    """
    known = [run.seconds for run in runs if run.seconds is not None]
    if not known:
        return None
    usual = sum(known) / len(known)
    lefts = [(usual if run.seconds is None else run.seconds) * (run.total - run.rounds) for run in runs]
    at_once = max(sum(run.state == "running" for run in runs), 1)
    return max(sum(lefts) / at_once, *lefts)


def _of(plan: Plan, run: PlannedRun, unfinished: list[Job], since: float | None) -> Progress:
    """A run's progress; Snakemake is at work ``since`` then, if at all."""
    files, total = run.files, run.rounds
    done = _complete(files, total)
    jobs = [job for job in unfinished if any(files.path in {path, *path.parents} for path in job.outputs)]
    state: RunState
    if run.joined.marker.exists() and done == total:
        state = "done"
    elif any(job.failed and not job.stopped for job in jobs):
        state = "failed"
    elif jobs and all(job.failed for job in jobs):
        state = "stopped"
    elif since is not None and (jobs or _written(files, since)):  # without jobs: a quiet Snakemake tells only failures
        state = "running" if not jobs or any(job.begun for job in jobs) else "queued"
    else:
        state = "stopped" if done or jobs else "waiting"
    accuracy = _accuracy(plan.protocols[0], files, done)
    return Progress(_name(plan, run), state, done, total, accuracy, _seconds(files, done))


def _name(plan: Plan, run: PlannedRun) -> str:
    """A run in words, with all grid points that it serves."""
    cells = [cell for cell in plan.cells if run.serves(cell)]
    points = "; ".join(filter(None, (results.label(results.point(plan, cell)) for cell in cells)))
    return " ".join(filter(None, (run.algorithm, points, f"seed {run.seed}")))


def _named(names: dict[Path, str], job: Job) -> str:
    """The run that a job is of, in words."""
    places = {place for path in job.outputs for place in (path, *path.parents)}
    return next((name for path, name in names.items() if path in places), "")


def _written(files: RunFiles, since: float) -> bool:
    """Whether some job of a run has written its log since then."""
    logs = Path("results/logs").glob(f"*/{files.path.parent.name}-{files.path.name}*.log")
    return any(moment >= since for moment in _moments(logs))


def _complete(files: RunFiles, total: int) -> int:
    done = 0
    while done < total and artifacts.exists(files.round(done + 1).marker):
        done += 1
    return done


def _accuracy(protocol: str, files: RunFiles, done: int) -> float | None:
    for number in range(done, 0, -1):
        if artifacts.exists(files.round(number).metrics):  # a round that is measured
            return callbacks.accuracies(files, number).get(protocol, math.nan)
    return None


def _seconds(files: RunFiles, done: int) -> float | None:
    found: list[float] = []
    for number in range(max(done - RECENT, 0) + 1, done + 1):
        try:
            times = artifacts.read_json(files.round(number).times)
            found.append(sum(times.get(name, 0) for name in results.SECONDS))
        except ArtifactError:  # times are vouched for by nobody
            continue
    return sum(found) / len(found) if found else None


def _said() -> Iterator[Job]:
    """What Snakemake's logs say of each job, in the order of time."""
    for log in sorted((SNAKEMAKE / "log").glob("*.log"), key=lambda path: path.name):
        size = log.stat().st_size
        yield from (job for job in _exceptions(log, size) if not job.begun)
        yield from _jobs(log, size)


@functools.cache
def _exceptions(log: Path, size: int) -> list[Job]:
    """The jobs whose commands failed by a log of this size: all that a quiet Snakemake tells of errors.

    It does not name their outputs; what each works for stands for them. What Ctrl+C ends is no failure.
    """
    found = re.findall(FAILED, log.read_text(errors="replace").partition(CTRL_C)[0], re.M)
    when = log.stat().st_mtime
    return [Job(rule, True, [_made(rule, of, Path(job))], [Path(job)], when) for rule, of, job in found]


def _made(command: str, of: str, log: Path) -> Path:
    """What a stage's command works for, by its first argument and the place of its log: a run, or a file."""
    match command:
        case "download":
            return artifacts.dataset_file(of)
        case "partition":
            return artifacts.assignment_file(of)
        case "probe":
            return Path(of).with_suffix(".parquet")
        case "table":
            return log.parents[1] / "tables" / "results.md"
        case "figure" if of == "partition":
            return log.parents[2] / "figures" / f"partition-{log.stem}.svg"
        case "figure":
            return log.parents[1] / "figures" / f"{of}.svg"
    return Path(of)


@functools.cache
def _jobs(log: Path, size: int) -> list[Job]:
    """The jobs that a log of this size speaks of."""
    found: list[Job] = []
    submitted: dict[Path, float] = {}  #: by log
    interrupted: set[str] = set()  #: logs
    when, rule, failed, fields, ended = 0.0, "", False, dict[str, str](), False
    for line in [*log.read_text(errors="replace").splitlines(), ""]:
        if begin := re.fullmatch(r"(Error in )?(?:local)?rule (\w+):", line):
            rule, failed, fields = begin[2], bool(begin[1]), {}
        elif field := re.fullmatch(r"    (output|log): (.+)", line):
            fields[field[1]] = field[2]
        elif time_of := re.fullmatch(r"\[(\w{3} \w{3} +\d+ [\d:]+ \d{4})\]", line):
            when = datetime.strptime(time_of[1], "%a %b %d %H:%M:%S %Y").timestamp()
        elif command := re.fullmatch(INTERRUPTED, line):
            interrupted.add(command[1])
        elif line.startswith(CTRL_C):
            ended = True
        if rule and len(fields) == 2:  # the output, then the log
            # An error's log line ends with advice in brackets, and has the cluster's log behind the job's own.
            logs = [*map(Path, re.sub(r" \(.*\)$", "", fields["log"]).split(", "))]
            outputs = [*map(Path, fields["output"].split(", "))]
            if not failed:
                submitted[logs[0]] = when
                interrupted.discard(str(logs[0]))
            by_user = failed and (ended or str(logs[0]) in interrupted)
            found.append(Job(rule, failed, outputs, logs, when, submitted.get(logs[0], 0.0), by_user))
            rule = ""
    return found


def _moments(paths: Iterable[Path]) -> list[float]:
    """When these files were last written; Snakemake may remove one meanwhile."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            found.append(path.stat().st_mtime)
    return found


def _tail(logs: list[Path]) -> list[str]:
    for log in logs:
        with suppress(FileNotFoundError):
            if text := log.read_text(errors="replace").strip():
                return text.splitlines()[-LINES:]
    return ["its log is empty: it was killed, or did not start"]


def _told(failure: Failure) -> list[Text]:
    head = Text(f"\n{failure.rule} failed: {failure.log}", STYLES["failed"])
    return [head, *(Text(f"  {line}") for line in failure.lines)]
