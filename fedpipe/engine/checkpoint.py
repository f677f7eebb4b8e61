"""A run's states on disk: writing and markers, checked reading, progress, and pruning.

torch is imported only to read or write states, because `collect` prunes without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import layout
from fedpipe.core.storage.archive import PackError
from fedpipe.core.storage.files import (
    TENSOR_FILES,
    compute_file_sha256,
    fsync_files,
    is_intact,
    is_stored,
    read_json,
    read_pt,
    remove_path,
    write_json,
    write_pt,
)
from fedpipe.core.storage.layout import RunFiles
from fedpipe.planning.combined import read_plans

if TYPE_CHECKING:
    import torch

    from fedpipe.algorithms.batch import State


StackedStates = tuple[dict[int, int], "State"]  #: what some clients keep: the row of each, and all of them stacked


class Checkpoint:
    """The states of a run's rounds.

    Parameters
    ----------
    files
        Files of the run.
    initial_kept_state
        State that a client keeps before its first round. Empty for methods without client state.
    device
        Device of the server's state and of the kept states of the last round's participants, if this job trained them.
        The states of other clients, which may be thousands, are on the CPU.
    """

    def __init__(self, files: RunFiles, initial_kept_state: State, device: torch.device) -> None:
        self.files, self._initial_kept_state, self._device = files, initial_kept_state, device
        self._state_json_by_round: dict[int, dict[str, Any]] = {}
        self._servers: dict[int, State] = {}
        self._stacked_states: dict[int, StackedStates] = {}
        self._latest: dict[int, StackedStates] = {}  #: kept states of the last round, on the device

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_state_json(self, round_number: int) -> dict[str, Any]:
        """Read ``state.json`` of a round: participants, each client's last round, observations, hashes."""
        if round_number not in self._state_json_by_round:
            self._state_json_by_round[round_number] = read_json(
                self.files.get_round_files(round_number).complete_states_marker
            )
        return self._state_json_by_round[round_number]

    def load_server_state(self, round_number: int) -> State:
        """Load the server's state after a round (0: initial)."""
        from fedpipe.engine.blocks import restore_state
        from fedpipe.engine.torch_env.trees import move_state

        if round_number not in self._servers:
            files = self.files.get_round_files(round_number)
            tree = read_pt(files.server_state, self.read_state_json(round_number)["sha256"][files.server_state.name])
            self._servers = {round_number: move_state(restore_state(tree), self._device)}
        return self._servers[round_number]

    def load_kept_state(self, client: int, round_number: int) -> State:
        """Load a client's kept state after a round. It is stored in the client's last round."""
        from fedpipe.engine.blocks import restore_state
        from fedpipe.engine.torch_env.trees import unstack_client

        last = self.read_state_json(round_number)["last"][client]
        if last < 0 or not self._initial_kept_state:
            return self._initial_kept_state
        if last in self._latest:
            rows, states = self._latest[last]
            return unstack_client(states, rows[client])
        if last not in self._stacked_states:
            files = self.files.get_round_files(last)
            tree = read_pt(files.client_states, self.read_state_json(last)["sha256"][files.client_states.name])
            rows = {client: row for row, client in enumerate(tree["ids"].tolist())}
            self._stacked_states[last] = (rows, restore_state(tree["kept"]))
        rows, states = self._stacked_states[last]
        return unstack_client(states, rows[client])

    def read_times(self, round_number: int) -> dict[str, float]:
        """Read the seconds of a round's steps, which have no checksum. Empty if they are missing or damaged."""
        try:
            times = read_json(self.files.get_round_files(round_number).times)
        except PackError:
            raise
        except ArtifactError:
            return {}
        return times if isinstance(times, dict) else {}

    # -- writing -----------------------------------------------------------------------------------------------------

    def write_round_states(
        self,
        round_number: int,
        server: State,
        ids: list[int],
        kept_states: list[State],
        hashes: dict[str, str],
        initial_last_rounds: Sequence[int] = (),
        **extra_entries: Any,
    ) -> None:
        """Write a round's states, then the marker that they are complete.

        Parameters
        ----------
        round_number
            Number of the round (0: initial state).
        server
            The server's state.
        ids, kept_states
            Participants and their kept states.
        hashes
            SHA-256 of the round's other files so far.
        initial_last_rounds
            The last round of each client before round 1. Only for round 0.
        extra_entries
            Further content of ``state.json``.
        """
        import torch

        from fedpipe.engine.torch_env.trees import stack_states

        files = self.files.get_round_files(round_number)
        hashes = hashes | {files.server_state.name: write_pt(files.server_state, server)}
        stacked_states = stack_states(kept_states) if self._initial_kept_state else {}
        if stacked_states:
            hashes[files.client_states.name] = write_pt(
                files.client_states, {"ids": torch.tensor(ids), "kept": stacked_states}
            )
        previous_last = self.read_state_json(round_number - 1)["last"] if round_number else initial_last_rounds
        participants = set(ids)
        last = [round_number if client in participants else round for client, round in enumerate(previous_last)]
        state_json = {"round": round_number, "participants": ids, "last": last, "sha256": hashes, **extra_entries}
        write_json(files.complete_states_marker, state_json)
        self._state_json_by_round[round_number], self._servers = state_json, {round_number: server}
        if self._device.type != "cpu":
            self._latest = (
                {round_number: ({client: row for row, client in enumerate(ids)}, stacked_states)}
                if stacked_states
                else {}
            )
        needed_rounds = set(last) - {round_number}
        self._stacked_states = {round: pack for round, pack in self._stacked_states.items() if round in needed_rounds}

    def mark_round_complete(self, round_number: int, hashes: dict[str, str]) -> None:
        """Write the marker that a round is complete."""
        files = self.files.get_round_files(round_number)
        hashes = (
            hashes
            | self.read_state_json(round_number)["sha256"]
            | {files.complete_states_marker.name: compute_file_sha256(files.complete_states_marker)}
        )
        write_json(files.marker, {"round": round_number, "sha256": hashes})

    # -- how far it has come -----------------------------------------------------------------------------------------

    def find_last_complete_round(self, stop: int, keep_models: str | int = "all") -> int:
        """Find the last round, at most ``stop``, up to which the run is complete. -1 if it has not begun.

        The next round needs the server's state and all clients' last states, so they must be intact. If the result is
        ``stop``, there is no next round, and states that ``keep_models`` prunes may be missing.
        """
        last_complete = -1
        while last_complete < stop and self._is_round_complete(last_complete + 1):
            last_complete += 1
        newest = last_complete
        while last_complete > -1 and not self._has_usable_states(
            last_complete, last_complete == stop and not is_state_retained(last_complete, keep_models)
        ):
            last_complete -= 1
        if last_complete < newest < stop and self._is_round_complete(newest + 1):
            # Another job has completed rounds meanwhile, and deleted states that they do not need.
            return self.find_last_complete_round(stop, keep_models)
        return last_complete

    def _is_round_complete(self, round_number: int) -> bool:
        """Whether a round is complete and intact, except for its states, which are checked when they are read."""
        files = self.files.get_round_files(round_number)
        try:
            hashes = layout.read_round_digests(files, files.marker)
        except PackError:  # the pack's rounds are unknown
            raise
        except ArtifactError:
            return False
        # `collect` needs the times, and a power failure may have lost them.
        if round_number and not self.read_times(round_number):
            return False
        states = {files.server_state.name, files.client_states.name}
        return all(name in states or is_intact(files.path / name, hashes[name]) for name in hashes)

    def _has_usable_states(self, round_number: int, can_be_absent: bool) -> bool:
        states = [(round_number, self.files.get_round_files(round_number).server_state)]
        if self._initial_kept_state:
            last = {round for round in self.read_state_json(round_number)["last"] if round >= 0}
            states += [(round, self.files.get_round_files(round).client_states) for round in sorted(last)]
        return all(
            is_intact(path, self.read_state_json(round)["sha256"][path.name]) or (can_be_absent and not path.exists())
            for round, path in states
        )


class RetentionRequest(NamedTuple):
    """States of a shared run that a study needs."""

    rounds: int
    keep_models: str | int
    diagnosed_rounds: frozenset[int] = frozenset()  #: rounds whose states, and previous states, diagnostics read


def is_state_retained(round_number: int, keep_models: str | int) -> bool:
    """Whether `artifacts.keep_models` keeps a round's states after later rounds."""
    return keep_models == "all" or (isinstance(keep_models, int) and round_number % keep_models == 0)


class StatePruner:
    """Deletes the states of a run that no study needs.

    It lists the states on disk once, and then remembers those that a later round may not need. So the time that it
    takes does not grow with the number of earlier rounds.

    Parameters
    ----------
    files
        Files of the run.
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
            self._list_states(round_number)
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

    def _list_states(self, round_number: int) -> None:
        """List the rounds before ``round_number``, except for round 0, that have states on disk."""
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
            diagnosed_rounds = frozenset(diagnostic.round for diagnostic in plan.diagnostics if diagnostic.run == files)
            yield from (
                RetentionRequest(rounds, plan.keep_models, diagnosed_rounds)
                for rounds in plan.round_counts_by_run.get(files.path, ())
            )
