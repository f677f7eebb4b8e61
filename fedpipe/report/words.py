"""Texts for numbers and metrics: durations, sizes, and labels of protocols."""

from __future__ import annotations

from collections.abc import Iterable

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


def format_metric(protocol: str) -> str:
    """Format the label of a protocol. Other names stay as they are.

    Examples
    --------
    >>> format_metric("personal-on-local"), format_metric("mean-on-global")
    ('Local test accuracy (personalized)', 'mean-on-global')
    """
    model, _, samples = protocol.partition("-on-")
    return f"{SAMPLES[samples]} accuracy ({MODELS[model]})" if model in MODELS and samples in SAMPLES else protocol


def explain_metrics(protocols: Iterable[str]) -> str:
    """Explain the name of each metric in params.yaml and results.csv."""
    names = [f"{format_metric(protocol)} is {protocol}" for protocol in dict.fromkeys(protocols)]
    return f"In params.yaml and results.csv, {', '.join(names)}."


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
