"""How often Python looks for garbage: rarely while a command imports and hashes code, as usual while a run trains."""

from __future__ import annotations

import gc

#: New objects after which Python looks for garbage until a run opens. With its default, a third of a job's start would
#: be searches, because imports and digests create many objects that stay.
START_THRESHOLD = 10_000
_default_thresholds = gc.get_threshold()


def reduce_collections() -> None:
    """Let Python look for garbage rarely, until :func:`restore_collections`."""
    gc.set_threshold(START_THRESHOLD)


def restore_collections() -> None:
    """Let Python look for garbage as often as by default, because cycles of user code may contain large tensors."""
    gc.set_threshold(*_default_thresholds)
