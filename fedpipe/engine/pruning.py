"""Which states of a run stay."""

from __future__ import annotations

from fedpipe import artifacts
from fedpipe.artifacts import RunFiles


def kept(number: int, keep_models: str | int) -> bool:
    """Whether `artifacts.keep_models` keeps a round's states when later rounds need them no more."""
    return keep_models == "all" or (isinstance(keep_models, int) and number % keep_models == 0)


def prune(files: RunFiles, number: int, keep_models: str | int) -> None:
    """Delete states of the rounds before ``number`` that are not kept, and that nothing needs.

    Those that a round and the one before it begin with stay, so that the last round can be done again.
    """
    if keep_models == "all":
        return
    lasting = (number - 1, number)
    needed = {last for each in lasting for last in artifacts.read_json(files.round(each).state)["last"]}
    for earlier in range(1, number - 1):
        if not kept(earlier, keep_models):
            files.round(earlier).server.unlink(missing_ok=True)
            if earlier not in needed:
                files.round(earlier).clients.unlink(missing_ok=True)
