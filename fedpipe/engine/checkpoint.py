"""A run's states on disk: sealed by markers, read back checked, how far the run has come, and which of them stay.

torch is imported where states are read or written: `collect` prunes without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from fedpipe import artifacts
from fedpipe.archive import ArchiveError
from fedpipe.artifacts import RunFiles
from fedpipe.errors import ArtifactError
from fedpipe.planned import plans

if TYPE_CHECKING:
    import torch

    from fedpipe.algorithms.base import State


Pack = tuple[dict[int, int], "State"]  #: what some clients keep: the row of each, and all of them stacked


class Checkpoint:
    """The states of a run's rounds.

    Parameters
    ----------
    files
        Where the run lies.
    first
        What a client keeps before its first round; empty for methods without client state.
    device
        Where the server's state lies, and what the participants of the last round keep if they trained in this job; of
        the other clients, of whom there may be thousands, it is on the host.
    """

    def __init__(self, files: RunFiles, first: State, device: torch.device) -> None:
        self.files, self._first, self._device = files, first, device
        self._sealed: dict[int, dict[str, Any]] = {}
        self._servers: dict[int, State] = {}
        self._packs: dict[int, Pack] = {}
        self._latest: dict[int, Pack] = {}  #: of the last round, on the device

    # -- reading -----------------------------------------------------------------------------------------------------

    def sealed(self, number: int) -> dict[str, Any]:
        """What ``state.json`` of a round says: participants, each client's last round, observations, hashes."""
        if number not in self._sealed:
            self._sealed[number] = artifacts.read_json(self.files.round(number).state)
        return self._sealed[number]

    def server(self, number: int) -> State:
        """The server's state after a round (0: as initialized)."""
        from fedpipe.engine.block import named
        from fedpipe.engine.trees import move

        if number not in self._servers:
            files = self.files.round(number)
            tree = artifacts.read_pt(files.server, self.sealed(number)["sha256"][files.server.name])
            self._servers = {number: move(named(tree), self._device)}
        return self._servers[number]

    def kept(self, client: int, number: int) -> State:
        """What a client keeps after a round: stored in the last round that it took part in."""
        from fedpipe.engine.block import named
        from fedpipe.engine.trees import unstack

        last = self.sealed(number)["last"][client]
        if last < 0 or not self._first:
            return self._first
        if last in self._latest:
            places, states = self._latest[last]
            return unstack(states, places[client])
        if last not in self._packs:
            files = self.files.round(last)
            tree = artifacts.read_pt(files.clients, self.sealed(last)["sha256"][files.clients.name])
            places = {client: place for place, client in enumerate(tree["ids"].tolist())}
            self._packs[last] = (places, named(tree["kept"]))
        places, states = self._packs[last]
        return unstack(states, places[client])

    def times(self, number: int) -> dict[str, float]:
        """Seconds of a round's steps; nobody vouches for them, so that they may be missing or damaged."""
        try:
            found = artifacts.read_json(self.files.round(number).times)
        except ArchiveError:
            raise
        except ArtifactError:
            return {}
        return found if isinstance(found, dict) else {}

    # -- writing -----------------------------------------------------------------------------------------------------

    def seal(
        self, number: int, server: State, ids: list[int], keeps: list[State], hashes: dict[str, str], **facts: Any
    ) -> None:
        """Write a round's states, then the marker that they are whole.

        Parameters
        ----------
        number
            The round; 0 for the initial state.
        server
            The server's state.
        ids, keeps
            The participants and what they keep.
        hashes
            SHA-256 of the round's other files so far.
        facts
            What else ``state.json`` shall hold.
        """
        import torch

        from fedpipe.engine.trees import stack

        files = self.files.round(number)
        hashes = hashes | {files.server.name: artifacts.write_pt(files.server, server)}
        kept = stack(keeps) if self._first else {}
        if kept:
            hashes[files.clients.name] = artifacts.write_pt(files.clients, {"ids": torch.tensor(ids), "kept": kept})
        before = self.sealed(number - 1)["last"] if number else facts.pop("last")
        trained = set(ids)
        last = [number if client in trained else round for client, round in enumerate(before)]
        sealed = {"round": number, "participants": ids, "last": last, "sha256": hashes, **facts}
        artifacts.write_json(files.state, sealed)
        self._sealed[number], self._servers = sealed, {number: server}
        if self._device.type != "cpu":
            self._latest = {number: ({client: row for row, client in enumerate(ids)}, kept)} if kept else {}
        needed = set(last) - {number}
        self._packs = {round: pack for round, pack in self._packs.items() if round in needed}

    def finish(self, number: int, hashes: dict[str, str]) -> None:
        """Write the marker that a round is complete."""
        files = self.files.round(number)
        hashes = hashes | self.sealed(number)["sha256"] | {files.state.name: artifacts.sha256_of(files.state)}
        artifacts.write_json(files.marker, {"round": number, "sha256": hashes})

    # -- how far it has come -----------------------------------------------------------------------------------------

    def complete(self, stop: int, keep_models: str | int = "all") -> int:
        """The last round, at most ``stop``, up to which nothing is missing; -1 if the run has yet to begin.

        The next round must be able to start from it: the server's state and all clients' last states must be intact.
        Where it is ``stop`` itself, there is no next round, and states may be absent that ``keep_models`` prunes.
        """
        done = -1
        while done < stop and self._whole(done + 1):
            done += 1
        while done > -1 and not self._usable(done, done == stop and not kept(done, keep_models)):
            done -= 1
        return done

    def _whole(self, number: int) -> bool:
        """Whether a round is complete, and intact but for its states, which are checked where they are read."""
        files = self.files.round(number)
        try:
            hashes = artifacts.hashes(files, files.marker)
        except ArchiveError:  # nobody knows which rounds there were
            raise
        except ArtifactError:
            return False
        if number and not self.times(number):  # a power failure may have taken them, and collect wants them
            return False
        states = {files.server.name, files.clients.name}
        return all(name in states or artifacts.intact(files.path / name, hashes[name]) for name in hashes)

    def _usable(self, number: int, may_be_absent: bool) -> bool:
        states = [(number, self.files.round(number).server)]
        if self._first:
            last = {round for round in self.sealed(number)["last"] if round >= 0}
            states += [(round, self.files.round(round).clients) for round in sorted(last)]
        return all(
            artifacts.intact(path, self.sealed(round)["sha256"][path.name]) or (may_be_absent and not path.exists())
            for round, path in states
        )


class Wish(NamedTuple):
    """What a study wants kept of a run that it shares."""

    rounds: int
    keep_models: str | int
    probed: frozenset[int] = frozenset()  #: rounds whose states, and those of the round before, it looks at


def kept(number: int, keep_models: str | int) -> bool:
    """Whether `artifacts.keep_models` keeps a round's states when later rounds need them no more."""
    return keep_models == "all" or (isinstance(keep_models, int) and number % keep_models == 0)


def prune(files: RunFiles, number: int, keep_models: str | int) -> None:
    """Delete states of the rounds before ``number`` that are not kept, and that nothing needs.

    Those that a round and the one before it begin with stay, so that the last round can be done again, and so does each
    that a probe looks into. Where studies of other lengths or another `artifacts.keep_models` share the run, what any
    of them keeps stays.
    """
    wishes = [Wish(number, keep_models), *_wishes(files)] if keep_models != "all" else []
    if any(wish.keep_models == "all" for wish in wishes) or not wishes:
        return
    ends = {end for wish in wishes for end in (wish.rounds, *wish.probed)}
    ends = {end for end in ends if artifacts.exists(files.round(end).state)} | {number}
    lasting = ends | {end - 1 for end in ends}
    # Else a power failure could leave none to go on from: a round has several files, and all of them count.
    artifacts.settle(*files.round(number - 1).path.glob("[!.]*"))
    needed = {last for end in lasting for last in artifacts.read_json(files.round(end).state)["last"]}
    for earlier in range(1, number):
        if earlier not in lasting and not any(kept(earlier, wish.keep_models) for wish in wishes):
            artifacts.remove(files.round(earlier).server)
            if earlier not in needed:
                artifacts.remove(files.round(earlier).clients)


def _wishes(files: RunFiles) -> Iterator[Wish]:
    """Of all studies that were planned here; one whose plan can't be read may want everything."""
    for _, plan in plans():
        if plan is None:
            yield Wish(0, "all")
        else:
            probed = frozenset(probe.round for probe in plan.probes if probe.run == files)
            yield from (Wish(rounds, plan.keep_models, probed) for rounds in plan.lengths.get(files.path, ()))
