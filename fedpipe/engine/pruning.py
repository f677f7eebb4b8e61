"""Deletes states of a run that no study needs. It imports no torch, so that `collect` starts fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fedpipe.core.storage.files import TENSOR_FILES, fsync_files, is_stored, read_json, remove_path
from fedpipe.core.storage.layout import RunFiles
from fedpipe.planning.combined import read_plans
from fedpipe.settings.execution import is_state_retained


class RetentionRequest(NamedTuple):
    """States of a shared run that a study needs."""

    rounds: int
    keep_models: str | int
    diagnosed_rounds: frozenset[int] = frozenset()  #: rounds whose states, and previous states, diagnostics read


class StatePruner:
    """Deletes the states of a run that no study needs.

    It lists the states on disk once, and then remembers those that a later round may not need. So the time that it
    takes does not grow with the number of earlier rounds.
    """

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._pruned_round, self._rules = -1, list[Any]()  #: round of the last call, and what all studies kept then
        self._server_rounds, self._client_rounds = set[int](), set[int]()  #: rounds with states that may be deleted
        self._last_by_round: dict[int, set[int]] = {}  #: by protected round, the last round of each client

    def prune(self, round_number: int, keep_models: str | int) -> None:
        """Delete states of rounds before ``round_number`` that are not needed.

        The states of the last two rounds stay, so that the last round can be repeated, and so do states that a
        diagnostic reads. If studies with another length or `artifacts.keep_models` share the run, a state stays if
        any of them keeps it.
        """
        other_requests = list(_read_retention_requests(self._files)) if keep_models != "all" else []
        requests = [RetentionRequest(round_number, keep_models), *other_requests]
        if any(request.keep_models == "all" for request in requests):
            return
        rules = [keep_models, *other_requests]
        if rules != self._rules or round_number != self._pruned_round + 1:
            self._scan_stored_states(round_number)
        protected_rounds = self._find_protected_rounds(round_number, requests)
        # Otherwise a power failure could leave no complete round to resume from.
        fsync_files(*self._files.get_round_files(round_number - 1).path.glob("[!.]*"))
        retained_rounds = {
            earlier_round
            for earlier_round in (self._server_rounds | self._client_rounds) - protected_rounds
            if any(is_state_retained(earlier_round, request.keep_models) for request in requests)
        }
        for earlier_round in sorted(self._server_rounds - protected_rounds - retained_rounds):
            remove_path(self._files.get_round_files(earlier_round).server_state)
        needed_rounds = protected_rounds.union(*self._last_by_round.values())
        for earlier_round in sorted(self._client_rounds - needed_rounds - retained_rounds):
            remove_path(self._files.get_round_files(earlier_round).client_states)
        self._server_rounds = self._server_rounds & protected_rounds | {round_number}
        self._client_rounds = self._client_rounds & needed_rounds - retained_rounds | {round_number}
        self._pruned_round, self._rules = round_number, rules

    def _scan_stored_states(self, round_number: int) -> None:
        """Find the rounds before ``round_number``, except for round 0, that have states on disk."""
        paths = list(self._files.rounds_folder.glob("[0-9]*/*.pt"))
        self._server_rounds, self._client_rounds = (
            {int(path.parent.name) for path in paths if path.name == name} & {*range(1, round_number)}
            for name in TENSOR_FILES
        )

    def _find_protected_rounds(self, round_number: int, requests: Sequence[RetentionRequest]) -> set[int]:
        """Find the rounds whose states a study needs to resume, or to compute a diagnostic."""
        ends = {end for request in requests for end in (request.rounds, *request.diagnosed_rounds)}
        ends = {end for end in ends if is_stored(self._files.get_round_files(end).complete_states_marker)} | {
            round_number
        }
        protected_rounds = ends | {end - 1 for end in ends}
        self._last_by_round = {
            end: self._last_by_round.get(end)
            or set(read_json(self._files.get_round_files(end).complete_states_marker)["last"])
            for end in protected_rounds
        }
        return protected_rounds


def prune_states(files: RunFiles, round_number: int, keep_models: str | int) -> None:
    """Delete states of rounds before ``round_number`` that are not needed, see `StatePruner.prune`."""
    StatePruner(files).prune(round_number, keep_models)


def _read_retention_requests(files: RunFiles) -> Iterator[RetentionRequest]:
    """Read the requests of all planned studies, including those planned after this job began.

    A study whose plan can't be read may need all states.
    """
    for _, plan in read_plans():
        if plan is None:
            yield RetentionRequest(0, "all")
        else:
            diagnosed_rounds = frozenset(
                diagnostic.round for diagnostic in plan.diagnostics if diagnostic.run_files == files
            )
            yield from (
                RetentionRequest(rounds, plan.keep_models, diagnosed_rounds)
                for rounds in plan.round_counts_by_run.get(files.path, ())
            )
