"""Which states of a run stay."""

from __future__ import annotations

from fedpipe import artifacts
from fedpipe.artifacts import RunFiles


def prune(files: RunFiles, number: int, keep_models: str | int) -> None:
    """Delete states of earlier rounds that `artifacts.keep_models` does not keep and no later round needs."""
    if keep_models == "all":
        return
    needed = set(artifacts.read_json(files.round(number).state)["last"])
    for earlier in range(1, number):
        if isinstance(keep_models, int) and earlier % keep_models == 0:
            continue
        files.round(earlier).server.unlink(missing_ok=True)
        if earlier not in needed:
            files.round(earlier).clients.unlink(missing_ok=True)
