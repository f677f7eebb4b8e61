"""Numbers as people write them: durations and sizes."""

from __future__ import annotations


def format_duration(seconds: float) -> str:
    """Seconds in words.

    Examples
    --------
    >>> duration(59), duration(3700), duration(200000)
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
    """A number of bytes in three digits, in powers of 1000.

    Examples
    --------
    >>> size(54824)
    '54.8 kB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
