"""Simulated measured cells: the published numbers with noise."""

import numpy as np
import pytest

from fedpipe.papers import comparison, layouts, published
from fedpipe.papers.comparison import MeasuredCell
from fedpipe.report.contrasts import RunMean

CLASSES = {"MNIST": 10, "FMNIST": 10, "CIFAR-100": 100, "IMDB": 2, "Tiny": 200, "AG News": 4}
OTHERS = {"time": 2.5, "communication_cost": 2.0, "best_epsilon": 1e-5, "best_wb_iterations": 150, "counterexamples": 4}


def is_derived(cell_id):
    """Whether a cell is computed from other cells instead of measured."""
    paper = layouts.load_papers()[cell_id.paper]
    if cell_id.table == "text":
        text = next(text for text in paper.text if (text.row, text.column, text.metric) == cell_id[2:])
        return bool(text.minus or text.largest)
    return cell_id.row in paper.tables[cell_id.table].rows and bool(paper.tables[cell_id.table].rows[cell_id.row].minus)


def measured_cells(seeds=(0, 1, 2), shift=0.0, keep=lambda cell_id: True):
    """Make measured cells by id, with values near the published ones. ``keep`` selects the cells."""
    chance, numbers, cells = np.random.default_rng(5), published.load_published_numbers(), {}
    for cell_id in comparison.list_all_cell_ids():
        if is_derived(cell_id) or cell_id.row == "(unnamed)" or not keep(cell_id):
            continue
        number = numbers.get(cell_id)
        center = number.mean if number and number.mean is not None else OTHERS.get(cell_id.metric, 12.0)
        accuracy = cell_id.metric == "accuracy_pct"
        noise = chance.normal(shift, 1.2, len(seeds)) if accuracy else np.zeros(len(seeds))
        values = {
            seed: float(np.clip(center + off, 0, 100 if accuracy else None))
            for seed, off in zip(seeds, noise, strict=True)
        }
        cells[cell_id] = MeasuredCell(
            RunMean.from_values(values),
            keys=tuple(f"{chance.integers(16**12):012x}" for _ in seeds),
            test_samples=10_000 if accuracy else None,
            classes=next((n for name, n in CLASSES.items() if name in cell_id.column), 10) if accuracy else None,
            expected=2.0 if cell_id.metric == "communication_cost" else None,
            trace_command=f"fedpipe trace results/studies/papers/{cell_id.table}/tables/results.md {cell_id.row}",
        )
    return cells


@pytest.fixture(scope="session")
def measured_table():
    """All measured cells, with three seeds."""
    return measured_cells()


@pytest.fixture(scope="session")
def make():
    """A function that makes measured cells."""
    return measured_cells


@pytest.fixture(scope="session")
def compared(measured_table):
    """The comparison of all cells by preset."""
    return {
        preset: comparison.compare_with_published_cells(measured_table, preset)
        for preset in ("full", "reduced", "smoke")
    }
