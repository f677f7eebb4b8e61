"""The progress of studies as a web page: learning curves, runs, failed jobs and links.

A page is one file. It contains its style and its curves, runs no script and requests nothing. All text is escaped.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import typer

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files, layout
from fedpipe.core.storage.layout import StudyFiles
from fedpipe.planning.plan import Plan
from fedpipe.report import contents, status, web_pages
from fedpipe.report.status import RUN_STATES, RunProgress, RunState
from fedpipe.report.status_table import format_accuracy
from fedpipe.report.words import format_duration, format_mean, format_metric_label

COLOR_COUNT = 10  #: configurations with a color, the best ones if there are more
OPEN_ROWS = 60  #: rows of a table that is open at first
LISTED_FAILURES = 20  #: failed jobs with the end of their logs
LISTED_PARTITIONS = 12
REFRESH_SECONDS = 10  #: seconds between two updates of a page
CHART_SIZE = 600, 260  #: size of a chart in pixels, without labels
SPARKLINE_SIZE = 96, 22
CURVE_POINTS, SPARKLINE_POINTS = 100, 32  #: most points of a line


class Link(NamedTuple):
    """A link to a file."""

    name: str
    path: Path


class PlansOfStudies(NamedTuple):
    """The plans of a study or of a folder of studies."""

    readable: list[Plan]
    missing: list[Path]  #: files of the studies without a plan
    damage: list[str]  #: messages about plans that can't be read


class Row(NamedTuple):
    """A row of the table of runs."""

    run: RunProgress
    description: dict[str, str]  #: texts by head of the column
    curve: str  #: points of an SVG polyline
    partition: Link | None


class Line(NamedTuple):
    """The learning curve of a run in a chart."""

    name: str
    color: str  #: class in the style
    points: str  #: points of an SVG polyline


class Chart(NamedTuple):
    """The learning curves of a study by one protocol. Labels of axes have their position in pixels."""

    protocol: str
    lines: list[Line]
    round_labels: list[tuple[float, str]]
    accuracy_labels: list[tuple[float, str]]


@dataclass(frozen=True)
class Configuration:
    """The runs of an algorithm at a grid point, one per seed."""

    name: str
    runs: list[RunProgress]
    protocol: str  #: with which the table reports the algorithm

    @cached_property
    def summarized_runs(self) -> list[RunProgress]:
        """Runs that the page summarizes: the complete ones or, if none is complete, all with an accuracy."""
        complete_runs = [run for run in self.runs if run.state == "done"]
        return complete_runs or [run for run in self.runs if run.curves]

    def compute_last_accuracies(self, protocol: str) -> list[float]:
        """Compute the accuracy in [0, 1] of each counted run in its last evaluated round."""
        last_rounds = [run.curves[max(run.curves)] for run in self.summarized_runs]
        return [accuracies[protocol] for accuracies in last_rounds if protocol in accuracies]

    def format_last_accuracy(self, protocol: str) -> str:
        """Format the mean and the standard deviation (over n - 1) of the last accuracies in percent."""
        accuracies = [100 * accuracy for accuracy in self.compute_last_accuracies(protocol)]
        deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else math.nan
        return format_mean(statistics.fmean(accuracies), deviation) if accuracies else ""

    @property
    def summarized_round_range(self) -> str:
        """Smallest and largest number of complete rounds of the counted runs."""
        counts = [run.rounds for run in self.summarized_runs]
        return "–".join(str(count) for count in dict.fromkeys((min(counts), max(counts))))


class StudyProgress:
    """The progress of a study with everything that its section of the page shows."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan.add_search_results(has_draws=True)
        self.runs, self.failures = status.load_progress_and_failures(self.plan, has_curves=True)
        planned_runs = status.sort_runs(self.plan)
        self.partitions = [run.partition for run in planned_runs]
        self.protocols = [self.plan.get_method_protocol(run.algorithm) for run in planned_runs]

    @property
    def name(self) -> str:
        """Path of the study's file, and its preset."""
        preset = "" if self.plan.preset == layout.FULL_PRESET else f" (preset {self.plan.preset})"
        return f"{self.plan.params}{preset}"

    @cached_property
    def state_counts(self) -> dict[RunState, int]:
        """Number of runs by state."""
        return status.count_runs_by_state(self.runs)

    @property
    def is_done(self) -> bool:
        """Whether all runs are complete."""
        return self.state_counts.keys() == {"done"} and not self.plan.is_searching

    @property
    def complete_rounds(self) -> int:
        """Complete rounds of all runs."""
        return sum(run.rounds for run in self.runs)

    @property
    def total_rounds(self) -> int:
        """Rounds of all runs."""
        return sum(run.total for run in self.runs)

    @property
    def time_left(self) -> str:
        """Remaining time. Empty if there is no estimate, or all runs are complete."""
        seconds = None if self.is_done else status.estimate_seconds_left(self.runs)
        return "" if seconds is None else format_duration(seconds)

    @cached_property
    def configurations(self) -> list[Configuration]:
        """All configurations, in the order of the study."""
        configurations: dict[str, Configuration] = {}
        names = status.describe_run_configurations(self.plan)
        for run, name, protocol in zip(self.runs, names, self.protocols, strict=True):
            configurations.setdefault(name, Configuration(name, [], protocol)).runs.append(run)
        return [*configurations.values()]

    @cached_property
    def ranked_configurations(self) -> list[Configuration]:
        """Configurations with an accuracy, the highest mean of the reported accuracy first."""
        begun = [configuration for configuration in self.configurations if configuration.summarized_runs]

        def compute_mean_accuracy(configuration: Configuration) -> float:
            accuracies = configuration.compute_last_accuracies(configuration.protocol)
            return statistics.fmean(accuracies) if accuracies else -math.inf

        return sorted(begun, key=compute_mean_accuracy, reverse=True)

    @cached_property
    def css_color_classes(self) -> dict[str, str]:
        """Class of the color by configuration. If there are many, only the best ones have a color."""
        is_colored = {configuration.name for configuration in self.ranked_configurations[:COLOR_COUNT]}
        colored = [configuration.name for configuration in self.configurations if configuration.name in is_colored]
        return {name: f"color-{index}" for index, name in enumerate(colored)}

    @cached_property
    def accuracy_charts(self) -> list[Chart]:
        """A chart for each protocol that has been evaluated."""
        charts = [self._make_chart(protocol) for protocol in self.plan.protocols]
        return [chart for chart in charts if chart.lines]

    @cached_property
    def run_rows(self) -> list[Row]:
        """Rows of the table of runs, active runs first."""
        low, high = self._get_accuracy_range(self.protocols)
        rows = [
            Row(
                run,
                description,
                _format_polyline_points(run, protocol, run.total, low, high, SPARKLINE_SIZE, SPARKLINE_POINTS),
                self.partition_links.get(partition),
            )
            for run, description, protocol, partition in zip(
                self.runs, status.format_run_labels(self.plan), self.protocols, self.partitions, strict=True
            )
        ]
        return sorted(rows, key=lambda row: RUN_STATES.index(row.run.state))

    @cached_property
    def partition_links(self) -> dict[str, Link]:
        """Figures of partitions by their key."""
        study_files = self.plan.study_files
        names = self.plan.partition_names  # those of draws have no figure
        links = {key: Link(name, study_files.get_partition_figure_path(f"{name}.svg")) for key, name in names.items()}
        return {key: link for key, link in links.items() if link.path.is_file()}

    @property
    def links_by_heading(self) -> dict[str, list[Link]]:
        """Links to existing files by heading. Tables and figures only if they contain the runs of the plan."""
        study_files = self.plan.study_files
        formats = {"table": "html", "Markdown": "md", "CSV": "csv"}
        tables = [Link(name, study_files.get_result_table_path(suffix)) for name, suffix in formats.items()]
        tables += [Link("statistics", study_files.statistics_table), Link("times", study_files.times_table)]
        tables += [Link("ranks", study_files.ranks_table)] if self.plan.report.rank_test else []
        figures = [Link(name, study_files.figures_folder / f"{name}.svg") for name in self.plan.figure_labels]
        links = {
            "Study": [Link(self.plan.params.name, self.plan.params)],
            "Tables": tables if self.has_current_tables else [],
            "Figures": figures if self.has_current_tables else [],
            "Partitions": list(self.partition_links.values()),
        }
        existing = {head: [link for link in group if link.path.is_file()] for head, group in links.items()}
        return {head: group for head, group in existing.items() if group}

    @cached_property
    def has_current_tables(self) -> bool:
        """Whether the tables contain the runs of the plan, and not those of an earlier plan."""
        return not contents.find_outdated_files(contents.build_run_key_files(self.plan))

    def _get_accuracy_range(self, protocols: list[str]) -> tuple[float, float]:
        """Get the lowest and the highest accuracy in percent of all curves, by the protocol of each run."""
        accuracies = [
            100 * accuracies[protocol]
            for run, protocol in zip(self.runs, protocols, strict=True)
            for accuracies in run.curves.values()
            if protocol in accuracies
        ]
        return (min(accuracies), max(accuracies)) if accuracies else (0.0, 100.0)

    def _make_chart(self, protocol: str) -> Chart:
        from matplotlib.ticker import MaxNLocator  # here, because a terminal's progress needs no matplotlib

        locator = MaxNLocator(5, steps=[1, 2, 5, 10])
        low, high = self._get_accuracy_range([protocol] * len(self.runs))
        ticks = locator.tick_values(low, max(high, low + 1))
        low, high = ticks[0], ticks[-1]
        rounds = max(run.total for run in self.runs)
        lines = [
            Line(run.name, self.css_color_classes.get(configuration.name, "rest"), points)
            for configuration in reversed(self.ranked_configurations)  # the best ones are on top
            for run in configuration.runs
            if (points := _format_polyline_points(run, protocol, rounds, low, high, CHART_SIZE, CURVE_POINTS))
        ]
        width, height = CHART_SIZE
        round_ticks = sorted({1, *(round(tick) for tick in locator.tick_values(0, rounds) if 1 <= tick <= rounds)})
        return Chart(
            protocol,
            lines,
            [(width * _get_relative_position(tick, 1, rounds), f"{tick:,}") for tick in round_ticks],
            [(height * (1 - _get_relative_position(tick, low, high)), f"{tick:g}") for tick in ticks],
        )


def write_status_page(plans: PlansOfStudies, path: Path, refresh_seconds: int | None = None) -> list[StudyProgress]:
    """Write the page of these studies, and return their progress.

    A browser loads the page again after ``refresh_seconds``, if given.
    """
    studies = [StudyProgress(plan) for plan in plans.readable]
    templates = web_pages.build_template_environment(
        Path(__file__).parent,
        "status_page.css",
        *(format_accuracy, format_duration, format_metric_label, status.describe_reported_metrics),
        COLOR_COUNT=COLOR_COUNT,
        CHART_SIZE=CHART_SIZE,
        SPARKLINE_SIZE=SPARKLINE_SIZE,
        OPEN_ROWS=OPEN_ROWS,
        LISTED_FAILURES=LISTED_FAILURES,
        LISTED_PARTITIONS=LISTED_PARTITIONS,
    )
    text = templates.get_template("status_page.html").render(
        studies=studies,
        unplanned=plans.missing,
        damaged_plans=plans.damage,
        refresh_seconds=refresh_seconds,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
        link=lambda target: quote(os.path.relpath(target, path.parent)),
    )
    files.write_bytes(path, text.encode("utf-8", "replace"))
    return studies


def update_status_page(params: Path, preset: str, path: Path, watch: bool = False) -> None:
    """Write the page of a study, or of all planned studies in a folder. Optionally update it until all runs are done.

    Raises
    ------
    SettingsError
        The path is not that of an HTML page.
    ArtifactError
        There is no plan. Or files are damaged: the page is written before, with everything that can be read.
    """
    if path.suffix != ".html":
        raise SettingsError(f"--html: {path} is not a page. Use a name that ends with .html.")
    _read_plans(params, preset)
    if watch:
        typer.echo(f"{path} is updated every {REFRESH_SECONDS} seconds until all runs are complete. Stop with Ctrl+C.")
        with suppress(KeyboardInterrupt):
            while any(
                status.has_runs_to_do(study.plan, study.runs)
                for study in write_status_page(_read_plans(params, preset), path, REFRESH_SECONDS)
            ):
                time.sleep(REFRESH_SECONDS)
    plans = _read_plans(params, preset)
    studies = write_status_page(plans, path)
    typer.echo(f"The page is in {path}. Open it in a browser.")
    if plans.damage:
        raise ArtifactError("\n".join(plans.damage))
    status.require_intact_runs(run for study in studies for run in study.runs)


def _read_plans(params: Path, preset: str) -> PlansOfStudies:
    """Read the plans of a study or of a folder.

    Raises
    ------
    ArtifactError
        No study has a plan, or none can be read.
    """
    plans = PlansOfStudies([], [], [])
    for study in layout.list_studies_without_readings(params):
        plan_path = StudyFiles.from_params(study, preset).plan
        if not plan_path.is_file():
            plans.missing.append(study)
            continue
        try:
            plans.readable.append(Plan.read(plan_path))
        except ArtifactError as error:
            plans.damage.append(str(error))
    if not plans.readable:
        advice = f"--params: no study in {params} has a plan. Type `fedpipe plan --params {params}` first."
        raise ArtifactError("\n".join(plans.damage) or advice)
    return plans


def _format_polyline_points(
    run: RunProgress, protocol: str, rounds: int, low: float, high: float, size: tuple[int, int], max_points: int
) -> str:
    """Draw a learning curve as points of a polyline, on an axis up to ``rounds``. Empty if the run has no accuracy."""
    curve = [(number, run.curves[number][protocol]) for number in sorted(run.curves) if protocol in run.curves[number]]
    steps = max(math.ceil(len(curve) / max_points), 1)
    selected_points = [point for index, point in enumerate(curve) if index % steps == 0 or index == len(curve) - 1]
    selected_points *= 2 if len(selected_points) == 1 else 1  # a line between equal points is a dot
    width, height = size
    return " ".join(
        f"{width * _get_relative_position(number, 1, rounds):.4g},"
        f"{height * (1 - _get_relative_position(100 * accuracy, low, high)):.4g}"
        for number, accuracy in selected_points
    )


def _get_relative_position(value: float, low: float, high: float) -> float:
    """Get the position of a value in a range, in [0, 1]."""
    return (value - low) / (high - low) if high > low else 0.0
