"""A run's states on disk: writing and markers, checked reading, and progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedpipe.algorithms.batch import State
from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import layout
from fedpipe.core.storage.archive import PackError
from fedpipe.core.storage.files import compute_file_sha256, is_intact, read_json, read_pt, write_json, write_pt
from fedpipe.core.storage.layout import RunFiles
from fedpipe.engine.blocks import convert_tree_to_state
from fedpipe.engine.torch_env.trees import move_state, stack_states, unstack_client
from fedpipe.settings.execution import is_state_retained

StackedStates = tuple[dict[int, int], State]  #: row of each client, and the stacked kept states


class Checkpoint:
    """The states of a run's rounds.

    ``initial_kept_state`` is empty for methods without client state. On ``device`` are the server's state and the kept
    states of the last round's participants, if this job trained them. The states of other clients, which may be
    thousands, are on the CPU.
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
        if round_number not in self._servers:
            files = self.files.get_round_files(round_number)
            tree = read_pt(files.server_state, self.read_state_json(round_number)["sha256"][files.server_state.name])
            self._servers = {round_number: move_state(convert_tree_to_state(tree), self._device)}
        return self._servers[round_number]

    def load_kept_state(self, client: int, round_number: int) -> State:
        """Load a client's kept state after a round. It is stored in the client's last round."""
        last = self.read_state_json(round_number)["last"][client]
        if last < 0 or not self._initial_kept_state:
            return self._initial_kept_state
        if last not in self._latest and last not in self._stacked_states:
            files = self.files.get_round_files(last)
            tree = read_pt(files.client_states, self.read_state_json(last)["sha256"][files.client_states.name])
            rows = {client: row for row, client in enumerate(tree["ids"].tolist())}
            self._stacked_states[last] = (rows, convert_tree_to_state(tree["kept"]))
        rows, states = self._latest.get(last) or self._stacked_states[last]
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
        """Write a round's states, then the marker that they are complete, ``state.json``.

        ``hashes`` are the SHA-256 of the round's other files so far. ``initial_last_rounds`` has the last round of each
        client before round 1, and only round 0 needs it. ``extra_entries`` are further content of the marker.
        """
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
            rows = {client: row for row, client in enumerate(ids)}
            self._latest = {round_number: (rows, stacked_states)} if stacked_states else {}
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

    # -- progress ----------------------------------------------------------------------------------------------------

    def find_last_resumable_round(self, stop: int, keep_models: str | int = "all") -> int:
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
            return self.find_last_resumable_round(stop, keep_models)
        return last_complete

    def _is_round_complete(self, round_number: int) -> bool:
        """Whether a round is complete and intact, except for its states, which are checked when they are read."""
        files = self.files.get_round_files(round_number)
        try:
            hashes = layout.read_round_hashes(files, files.marker)
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
