"""Draws docs/images/partitions.svg: the training samples that each scheme gives to each client, at the same alpha.

python docs/images/draw_partitions.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits

from fedpipe.core.components import registry
from fedpipe.core.components.component import PARTITION, list_parameters
from fedpipe.data.partitions.base import ColumnScheme
from fedpipe.report.figures import panels

IMAGE = Path(__file__).with_name("partitions.svg")
ALPHA, CLIENTS, SEED = 0.3, 10, 0


def count_samples() -> pd.DataFrame:
    """Count the samples of each client and class: ``panel``, ``row``, ``column`` and ``value``."""
    labels = load_digits().target.astype(np.int64)
    rows = []
    for name in registry.list_components(PARTITION):
        component = registry.find_component(PARTITION, name)
        parameters = {parameter.name for parameter in list_parameters(component)}
        if name in ("file", "flwr-datasets") or issubclass(component, ColumnScheme):
            continue  # digits have no table or column, and the other library has its own schemes
        scheme = component(**{"alpha": ALPHA} if "alpha" in parameters else {})
        pairs = scheme.partition_samples(labels, np.arange(len(labels)), CLIENTS, np.random.default_rng(SEED))
        counts = np.zeros((CLIENTS, 10), dtype=np.int64)
        np.add.at(counts, (pairs.client, labels[pairs.sample]), 1)
        rows += [(name, *position, count) for position, count in np.ndenumerate(counts)]
    return pd.DataFrame(rows, columns=["panel", "row", "column", "value"])


def draw_partitions() -> str:
    """Draw all schemes as SVG, except those of another library, a table or a column of the data set."""
    frame = count_samples()
    note = f"Digits: {len(load_digits().target):,} samples, {CLIENTS} clients, seed {SEED}. All dirichlet schemes and "
    note += f"quantity have alpha = {ALPHA}. The other schemes have their default parameters."
    return panels.plot_heatmap_panels(frame, "class", "client", "training samples", 0.5, note)


if __name__ == "__main__":
    IMAGE.write_text(draw_partitions(), encoding="utf-8")
