"""Write the tables of docs/readings.md from the stored runs of studies/papers/*/readings.

    fedpipe run --params studies/papers/pfps_lwc/readings/p2.yaml
    fedpipe store --params studies/papers/pfps_lwc/readings/p2.yaml
    python benchmarks/readings.py

The first line of a study is its hypothesis. A line `# Published: Table 2, FedPer, 0.1/0.3` names a published number of
the paper by table, row and column. The table shows it next to the row's method. If the number belongs to another
method of the study, write its label in front (`# Published: wide: Table 2, FedPer, 0.1/0.3`). If it belongs to one
point of the grid, write the point at the end (`at alpha=0.1`). A study without a table on the page gets one at the end.

A reading can also be a preset of another study, such as ``two_classes_150`` of cwFedAvg's Table 1. The page has a table
of each such preset with stored runs, except those of the papers' own pages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from all_methods import replace_tables

from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import PAPERS
from fedpipe.papers import layouts, published, stored_runs
from fedpipe.papers.comparison import Preset
from fedpipe.papers.layouts import Paper
from fedpipe.papers.stored_runs import RunStore, StoredRun
from fedpipe.planning import planner
from fedpipe.planning.plan import Cell
from fedpipe.planning.planner import NewPlan
from fedpipe.report import results
from fedpipe.report.words import DASH

PAGE = Path(__file__).parents[1] / "docs/readings.md"
HEAD = ("method", "point", "seed", "protocol", "accuracy", "second half", "published", "key", "commit")
OPTIONAL_COLUMNS = ("point", "seed", "protocol", "second half")  #: omitted if all rows have the same value
MIN_ROUNDS = 4  #: evaluated rounds of which the second half is shown
PUBLISHED = re.compile(r"# Published: (?:(?P<label>\w+): )?(?P<table>[^,]+), (?P<row>[^,]+), (?P<column>.+)")


class PublishedReference(NamedTuple):
    """A published number, as text, and the method and grid point to which it belongs. An empty point is every point."""

    label: str
    point: str
    text: str

    def has_cell(self, label: str, point: str) -> bool:
        """Whether the number belongs to a method at a grid point."""
        return label == self.label and {*self.point.split(", ")} - {""} <= {*point.split(", ")}


class Reading(NamedTuple):
    """A study that tests a hypothesis. ``preset`` is empty for a study of a folder `readings`."""

    study: Path
    preset: str = ""

    @property
    def name(self) -> str:
        """Its name on the page."""
        return f"{self.study.parts[2]}/{self.study.stem} {self.preset}".rstrip()

    @property
    def title(self) -> str:
        """The preset, or the first line of the study without a line for editors."""
        if self.preset:
            return f"Preset {self.preset}"
        lines = (line for line in self.study.read_text().splitlines() if not line.startswith("# yaml-language-server"))
        return next(lines, "").removeprefix("#").strip().removesuffix(".")


def list_readings() -> list[Reading]:
    """List the studies of all folders `readings`, and the stored presets that the papers' own pages do not have."""
    readings = []
    for study in layout.list_studies(PAPERS):
        if layout.is_in_readings_folder(study):
            readings.append(Reading(study))
        else:
            presets = dict.fromkeys(run.preset for run in RunStore.read(study).runs)
            readings += [Reading(study, preset) for preset in presets if preset not in get_args(Preset)]
    return readings


def read_published_references(study: Path, paper: Paper) -> list[PublishedReference]:
    """Read the lines `# Published:` of a study."""
    references = []
    for line in study.read_text().splitlines():
        if not line.strip().startswith("# Published:"):
            continue
        match = PUBLISHED.fullmatch(line.strip())
        names, _, point = (match["column"] if match else "").partition(" at ")
        table = paper.tables.get(match["table"]) if match else None
        row = table.rows.get(match["row"]) if table and match else None
        cell_id = paper.make_cell_id(match["table"], match["row"], names) if match and row else None
        number = published.load_published_numbers().get(cell_id) if cell_id else None
        if match is None or row is None or number is None:
            raise ValueError(f"{study}: '{line}' is not a published number. Use '# Published: TABLE, ROW, COLUMN'.")
        references.append(PublishedReference(match["label"] or row.method or "", point, number.text))
    return references


def render_reading(reading: Reading) -> str:
    """Render the hypothesis of a reading and the table of its stored runs."""
    study = reading.study
    paper = next(paper for paper in layouts.load_papers().values() if paper.stem == study.parts[2])
    references, run_store = read_published_references(study, paper), RunStore.read(study)
    rows: list[Sequence[str]] = []
    presets = [reading.preset] if reading.preset else ["full", *(run.preset for run in run_store.runs)]
    for preset in dict.fromkeys(presets):
        plan = planner.make_plan(study, preset)
        for cell in results.sort_cells(plan):
            point = results.describe_grid_point(results.format_grid_point(plan, cell))
            text = next((entry.text for entry in references if entry.has_cell(cell.algorithm, point)), DASH)
            names = (plan.get_method_title(cell.algorithm), point, str(cell.seed))
            rows += [(*names, *values[:3], text, *values[3:]) for values in _iterate_values(run_store, plan, cell)]
    columns = [
        index
        for index, name in enumerate(HEAD)
        if name not in OPTIONAL_COLUMNS or len({row[index] for row in rows}) > 1
    ]
    lines = [[row[index] for index in columns] for row in (HEAD, ["---"] * len(HEAD), *rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{reading.title}** ([{study.name}](../{study}))\n\n{table}"


def _iterate_values(run_store: RunStore, plan: NewPlan, cell: Cell) -> Iterator[tuple[str, str, str, str, str]]:
    """Protocol, accuracies, key and commit of each stored run of a cell, the newest first, or dashes."""
    settings = stored_runs.compute_settings_digest(vars(plan.run_settings[cell.key]))
    runs = run_store.find_runs(settings, cell.rounds, plan.report.average)
    method_protocol = plan.method_protocols.get(cell.algorithm)
    for run, protocol in itertools.product(runs, [method_protocol] if method_protocol else plan.protocols):
        if accuracy := _format_accuracy(run, protocol, plan):
            yield protocol, accuracy, _format_second_half(run, protocol), f"`{run.key[:8]}`", run.commit
    if not runs:
        yield method_protocol or plan.protocols[0], "not run", DASH, DASH, DASH


def _format_accuracy(run: StoredRun, protocol: str, plan: NewPlan) -> str:
    """Format the reported accuracy in percent. Empty if the method has no such model."""
    scores = run.accuracies_by_round.query("protocol == @protocol").rename(columns={"accuracy": "score"})
    frame = results.compute_reported_scores(scores.assign(metric="accuracy"), plan.report.round, plan.report.last_k)
    texts = [f"{100 * score:.2f}{' (diverged)' if run.is_diverged else ''}" for score in frame["score"]]
    return texts[0] if texts else ""


def _format_second_half(run: StoredRun, protocol: str) -> str:
    """Format the mean of the accuracies in the second half of the evaluated rounds, with the lowest and the highest."""
    accuracies = 100 * run.accuracies_by_round.query("protocol == @protocol").sort_values("round")["accuracy"]
    if len(accuracies) < MIN_ROUNDS:
        return DASH
    half = accuracies[len(accuracies) // 2 :]
    return f"{half.mean():.1f} ({half.min():.1f} to {half.max():.1f})"


def write_tables(page: str) -> str:
    """Write the tables of the page, and add those that it lacks at its end."""
    readings = list_readings()
    for reading in readings:
        if f"<!-- {reading.name} -->\n" not in page:
            page += f"\n<!-- {reading.name} -->\n<!-- end -->\n"
    return replace_tables(page, {reading.name: render_reading(reading) for reading in readings})


def main() -> None:
    """Write the tables."""
    PAGE.write_text(write_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
