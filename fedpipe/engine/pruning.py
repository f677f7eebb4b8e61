"""Which states of a run stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedpipe import artifacts
from fedpipe.artifacts import RESULTS, RunFiles
from fedpipe.errors import ArtifactError


class Wish(NamedTuple):
    """What a study wants kept of a run that it shares."""

    rounds: int
    keep_models: str | int


def kept(number: int, keep_models: str | int) -> bool:
    """Whether `artifacts.keep_models` keeps a round's states when later rounds need them no more."""
    return keep_models == "all" or (isinstance(keep_models, int) and number % keep_models == 0)


def prune(files: RunFiles, number: int, keep_models: str | int) -> None:
    """Delete states of the rounds before ``number`` that are not kept, and that nothing needs.

    Those that a round and the one before it begin with stay, so that the last round can be done again. Where studies of
    other lengths or another `artifacts.keep_models` share the run, what any of them keeps stays.
    """
    wishes = [Wish(number, keep_models), *_wishes(files)] if keep_models != "all" else []
    if any(wish.keep_models == "all" for wish in wishes) or not wishes:
        return
    ends = {wish.rounds for wish in wishes if artifacts.exists(files.round(wish.rounds).state)} | {number}
    lasting = ends | {end - 1 for end in ends}
    # Else a power failure could leave none to go on from: a round has several files, and all of them count.
    artifacts.settle(*files.round(number - 1).path.glob("[!.]*"))
    needed = {last for each in lasting for last in artifacts.read_json(files.round(each).state)["last"]}
    for earlier in range(1, number):
        if earlier not in lasting and not any(kept(earlier, wish.keep_models) for wish in wishes):
            files.round(earlier).server.unlink(missing_ok=True)
            if earlier not in needed:
                files.round(earlier).clients.unlink(missing_ok=True)


def _wishes(files: RunFiles) -> Iterator[Wish]:
    """Of all studies that were planned here; one whose plan can't be read may want everything."""
    for path in (RESULTS / "plan.json", *RESULTS.glob("studies/**/plan.json")):
        try:
            plan = artifacts.read_json(path) if path.exists() else {"runs": []}
            mine = [run for run in plan["runs"] if run["path"] == str(files.path)]
            yield from (Wish(run["rounds"], plan["artifacts"]["keep_models"]) for run in mine)
        except (ArtifactError, LookupError, TypeError):
            yield Wish(0, "all")
