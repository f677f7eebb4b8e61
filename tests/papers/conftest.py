"""Measured cells as a study would give them, made from print with some noise."""

import numpy as np
import pytest

from fedpipe.papers import comparison, layouts, published
from fedpipe.papers.comparison import MeasuredCell
from fedpipe.papers.published import CellId
from fedpipe.report.contrasts import Number

CLASSES = {"MNIST": 10, "FMNIST": 10, "CIFAR-100": 100, "IMDB": 2, "Tiny": 200, "AG News": 4}
OTHERS = {"time": 2.5, "communication_cost": 2.0, "best_epsilon": 1e-5, "best_wb_iterations": 150, "counterexamples": 4}


def made_of_others(place):
    """Whether a cell is made of other cells, so that nobody measures it."""
    paper = layouts.load_papers()[place.paper]
    if place.table == "text":
        text = next(text for text in paper.text if (text.row, text.column, text.metric) == place[2:])
        return bool(text.minus or text.largest)
    return place.row in paper.tables[place.table].rows and bool(paper.tables[place.table].rows[place.row].minus)


def measured_cells(seeds=(0, 1, 2), shift=0.0, keep=lambda place: True):
    """All cells that can be measured and that ``keep`` keeps, around the printed values, by their places."""
    chance, numbers, found = np.random.default_rng(5), published.load_published(), {}
    for place in comparison.list_cell_ids():
        if made_of_others(place) or place.row == "(unnamed)" or not keep(place):
            continue
        number = numbers.get(place)
        center = number.mean if number and number.mean is not None else OTHERS.get(place.metric, 12.0)
        accuracy = place.metric == "accuracy_pct"
        noise = chance.normal(shift, 1.2, len(seeds)) if accuracy else np.zeros(len(seeds))
        values = {
            seed: float(np.clip(center + off, 0, 100 if accuracy else None))
            for seed, off in zip(seeds, noise, strict=True)
        }
        found[place] = MeasuredCell(
            Number.from_values(values),
            keys=tuple(f"{chance.integers(16**12):012x}" for _ in seeds),
            test_samples=10_000 if accuracy else None,
            classes=next((n for name, n in CLASSES.items() if name in place.column), 10) if accuracy else None,
            expected=2.0 if place.metric == "communication_cost" else None,
            trace_command=f"fedpipe trace results/studies/papers/{place.table}/tables/results.md {place.row}",
        )
    return found


@pytest.fixture(scope="session")
def measured_table():
    """All cells, of three seeds."""
    return measured_cells()


@pytest.fixture(scope="session")
def make():
    """A function that makes measured cells."""
    return measured_cells


@pytest.fixture(scope="session")
def judged(measured_table):
    """All cells compared, by preset."""
    return {preset: comparison.compare_cells(measured_table, preset) for preset in ("full", "reduced", "smoke")}


@pytest.fixture
def find_cell():
    """A cell's place by its paper, table, row and column."""

    def find(paper, table, row, column):
        return CellId(paper, table, row, column, layouts.load_papers()[paper].tables[table].get_metric(row, column))

    return find
