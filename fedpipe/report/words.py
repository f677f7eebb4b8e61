"""The metrics, and texts for numbers: durations, sizes, and labels of protocols."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fedpipe.settings.base import NEW_CLIENTS_PREFIX, Metric


class MetricWords(NamedTuple):
    """How tables and figures show a metric."""

    name: str
    unit: str
    factor: float = 100.0  #: from the recorded value to the unit
    is_lower_better: bool = False

    @property
    def name_with_unit(self) -> str:
        """Name with unit, such as ``ECE (%)``."""
        return f"{self.name} ({self.unit})"

    @property
    def improvement_sign(self) -> int:
        """Sign of an improvement: 1 if larger values are better, otherwise -1."""
        return -1 if self.is_lower_better else 1


METRICS: dict[Metric, MetricWords] = {
    "accuracy": MetricWords("accuracy", "%"),
    "auc": MetricWords("AUC", "%"),
    "ece": MetricWords("ECE", "%", is_lower_better=True),
    "nll": MetricWords("NLL", "nats", factor=1.0, is_lower_better=True),
}
MODELS = {  #: text by the model of a protocol
    "global": "global model",
    "personal": "personalized",
    "trained": "after local training",
    "kept": "last local model",
    "finetuned": "fine-tuned",
    "prototype": "prototypes",
}
SAMPLES = {  #: text by the samples of a protocol
    "global": "Global test",
    "local": "Local test",
    "train": "Local training",
    "validation": "Local validation",
}
SCIENTIFIC = 1e6  #: smallest number in scientific notation, such as the NLL of a model that diverged
DASH = "–"  #: a protocol that an algorithm lacks


def format_metric_label(protocol: str, metric: Metric = "accuracy") -> str:
    """Format the label of a metric by a protocol. The names of other protocols stay as they are.

    Examples
    --------
    >>> format_metric_label("personal-on-local", "ece"), format_metric_label("mean-on-global")
    ('Local test ECE (personalized)', 'mean-on-global')
    >>> format_metric_label("new-personal-on-local")
    'Local test accuracy (new clients, personalized)'
    """
    samples, model, clients = describe_protocol(protocol)
    new_clients = "new clients, " if clients == "new" else ""
    return f"{samples} {METRICS[metric].name} ({new_clients}{model})" if model else protocol


def get_reported_column_header(metric: Metric) -> str:
    """Get the head of the column with each method's number, if protocols differ."""
    return f"reported {METRICS[metric].name}"


def describe_protocol(protocol: str) -> tuple[str, str, str]:
    """Describe a protocol in the head of a table: samples, model and clients. Each text may be empty.

    Examples
    --------
    >>> describe_protocol("new-personal-on-local"), describe_protocol("global-on-global")
    (('Local test', 'personalized', 'new'), ('Global test', 'global model', ''))
    """
    model, _, samples = protocol.removeprefix(NEW_CLIENTS_PREFIX).partition("-on-")
    if model not in MODELS or samples not in SAMPLES:
        return protocol, "", ""
    clients = "new" if protocol.startswith(NEW_CLIENTS_PREFIX) else "" if protocol == "global-on-global" else "seen"
    return SAMPLES[samples], MODELS[model], clients


def explain_metrics(protocols: Iterable[str], metrics: Sequence[Metric] = ("accuracy",)) -> str:
    """Explain the name of each metric in params.yaml and results.csv. Those of new clients are only in results.csv."""
    protocols = list(dict.fromkeys(protocols))
    has_new_clients = any(protocol.startswith(NEW_CLIENTS_PREFIX) for protocol in protocols)
    names = [
        f"{format_metric_label(protocol, metric)} is {'' if metric == 'accuracy' else f'{metric} of '}{protocol}"
        for protocol in protocols
        for metric in metrics
    ]
    return f"In {'' if has_new_clients else 'params.yaml and '}results.csv, {', '.join(names)}."


def join_words(words: Sequence[str]) -> str:
    """Join words by commas and "and".

    Examples
    --------
    >>> join_words(["AUC", "ECE", "NLL"])
    'AUC, ECE and NLL'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def format_number(value: float, sign: str = "") -> str:
    """Format a number with two decimals, and from a million on in scientific notation. ``sign`` is + to show a plus.

    Examples
    --------
    >>> format_number(86.572), format_number(-999999.4), format_number(67011889239508.705), format_number(math.inf, "+")
    ('86.57', '-999999.40', '6.70e+13', '+∞')
    """
    if math.isinf(value):
        return f"{value:{sign}}".replace("inf", "∞")
    return f"{value:{sign}.2f}" if abs(value) < SCIENTIFIC else f"{value:{sign}.2e}"


def format_mean(mean: float, std: float, format_value: Callable[[float], str] = format_number) -> str:
    """Format a mean and its standard deviation, such as ``50.00 ± 35.36``. It is NaN for one value."""
    return format_value(mean) + ("" if math.isnan(std) else f" ± {format_value(std)}")


def format_duration(seconds: float) -> str:
    """Format a duration.

    Examples
    --------
    >>> format_duration(59), format_duration(3700), format_duration(200000)
    ('59 s', '1 h 01 min', '2 d 07 h')
    """
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02} s"
    if whole_seconds < 86400:
        return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02} min"
    return f"{whole_seconds // 86400} d {whole_seconds % 86400 // 3600:02} h"


def format_bytes(count: float) -> str:
    """Format a number of bytes with three digits, in powers of 1000.

    Examples
    --------
    >>> format_bytes(54824)
    '54.8 kB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
