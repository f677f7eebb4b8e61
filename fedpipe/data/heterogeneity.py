"""Measures of label heterogeneity, computed from the number of samples of each client and class.

Counts have shape (N, C). A client without samples has no label distribution, so its values are NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedpipe.data.partitions.base import Floats, Integers

if TYPE_CHECKING:
    import pyarrow as pa


class HeterogeneitySummary(NamedTuple):
    """Three measures of how heterogeneous the clients are."""

    entropy: float  #: mean of the clients' label entropies, in bits
    js_distance: float  #: mean of the clients' Jensen-Shannon distances to the label distribution of all
    gini: float  #: Gini index of the clients' sizes

    @classmethod
    def from_counts(cls, counts: Integers) -> HeterogeneitySummary:
        """Compute the measures from the counts of all clients, shape (N, C)."""
        return cls(
            float(compute_label_entropy(counts).mean()),
            float(compute_js_distance(counts).mean()),
            compute_gini(counts.sum(axis=1)),
        )

    @classmethod
    def from_table(cls, table: pa.Table) -> HeterogeneitySummary:
        """Read the measures from the metadata of :func:`make_heterogeneity_table`."""
        return cls(*(float(table.schema.metadata[name.encode()]) for name in cls._fields))

    def __str__(self) -> str:
        """One line of text."""
        return (
            f"mean label entropy {self.entropy:.2f} bits   ·   mean Jensen-Shannon distance {self.js_distance:.3f}   ·"
            f"   Gini index of sizes {self.gini:.3f}"
        )


def compute_label_entropy(counts: Integers) -> Floats:
    """Entropy of each client's label distribution in bits, shape (N,): 0 for one class, log2 C for a uniform one."""
    distributions = _compute_label_distributions(counts)
    return 0.0 - _compute_kl_divergence(distributions, np.ones_like(distributions))


def compute_js_distance(counts: Integers) -> Floats:
    """Jensen-Shannon distance of each client's label distribution to the global one, base 2, shape (N,), in [0, 1].

    The square root of :math:`(KL(p_k | m) + KL(q | m)) / 2` with :math:`m = (p_k + q) / 2`.

    Source: Endres and Schindelin, A New Metric for Probability Distributions, IEEE Trans. Inf. Theory 49, 2003.
    """
    client_distributions, overall_distribution = (
        _compute_label_distributions(counts),
        _compute_label_distributions(counts.sum(axis=0, keepdims=True)),
    )
    mixture = (client_distributions + overall_distribution) / 2
    squared = (
        _compute_kl_divergence(client_distributions, mixture)
        + _compute_kl_divergence(np.broadcast_to(overall_distribution, client_distributions.shape), mixture)
    ) / 2
    return np.sqrt(np.maximum(squared, 0))


def compute_gini(sizes: Integers) -> float:
    """Gini index of the clients' sizes, 0 for equal sizes, close to 1 if one client has all samples.

    This is the mean absolute difference of all pairs divided by twice the mean, computed from ranks.
    """
    sorted_sizes, n = np.sort(sizes), len(sizes)
    ranks = np.arange(1, n + 1)
    return float(((2 * ranks - n - 1) * sorted_sizes).sum() / (n * sorted_sizes.sum()))


def make_heterogeneity_table(counts: Integers) -> pa.Table:
    """Table with one row per client.

    Returns
    -------
    pyarrow.Table
        Columns ``client`` (int32), ``samples`` and ``classes`` (int64), ``entropy`` (bits) and ``js_distance``. The
        schema's metadata contain the values of :class:`HeterogeneitySummary` as text.
    """
    import pyarrow as pa

    table = pa.table(
        {
            "client": pa.array(np.arange(len(counts)), pa.int32()),
            "samples": pa.array(counts.sum(axis=1), pa.int64()),
            "classes": pa.array((counts > 0).sum(axis=1), pa.int64()),
            "entropy": pa.array(compute_label_entropy(counts), pa.float64()),
            "js_distance": pa.array(compute_js_distance(counts), pa.float64()),
        }
    )
    return table.replace_schema_metadata(
        {name: repr(value) for name, value in HeterogeneitySummary.from_counts(counts)._asdict().items()}
    )


def _compute_label_distributions(counts: Integers) -> Floats:
    with np.errstate(invalid="ignore"):
        return np.asarray(counts / counts.sum(axis=1, keepdims=True), dtype=np.float64)


def _compute_kl_divergence(p: Floats, q: Floats) -> Floats:
    """Sum of p log2(p / q) along the last axis, with 0 log 0 = 0."""
    ratio = np.divide(p, q, out=np.ones_like(p), where=p != 0)
    return np.asarray((p * np.log2(ratio)).sum(axis=-1), dtype=np.float64)
