"""One run: its rounds, what they leave on disk, and how it goes on from what it finds there.

A round is three steps, ``train``, ``aggregate`` and ``evaluate``. In one process they make a segment; as jobs of their
own they make the DAG of single rounds. Both leave the same files with the same bits.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch

import fedpipe
from fedpipe import artifacts, registry, streams
from fedpipe.algorithms.base import Algorithm, State, Uploads
from fedpipe.artifacts import RoundFiles, RunFiles
from fedpipe.config import Execution
from fedpipe.data import store
from fedpipe.data.assignment import Assignment
from fedpipe.data.datasets.base import Dataset
from fedpipe.engine import evaluation
from fedpipe.engine.clients import Clients
from fedpipe.engine.executor import Executor, Score, Test, canonical, move, size_in_bytes, stack, unstack
from fedpipe.engine.loop import Loop
from fedpipe.engine.pruning import prune
from fedpipe.engine.stack import Stack
from fedpipe.errors import ArtifactError
from fedpipe.models.base import Model, Net
from fedpipe.plan import Settings, digest
from fedpipe.tensors import Tensors

WIDTH_ON_GPU = 32  #: clients of a stack where `execution.stack` is auto


@dataclass
class Block:
    """What some participants of a round send, stacked along the first axis in the order of their ids."""

    ids: list[int]
    uploads: list[State]
    kept: list[State]
    down: list[int]  #: bytes received by each
    up: list[int]  #: bytes sent by each
    scores: list[dict[Test, Score]]  #: right after training
    seconds: float

    def tree(self) -> dict[str, Any]:
        """As tensors, for a file."""
        return {
            "ids": torch.tensor(self.ids),
            "uploads": stack(self.uploads),
            "kept": stack(self.kept),
            "bytes": torch.tensor([self.down, self.up]),
            "scores": {
                test: torch.tensor([list(scores[test]) for scores in self.scores], dtype=torch.float64)
                for test in self.scores[0]
            },
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
        }

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Block:
        """From a file's tensors."""
        ids, (down, up) = tree["ids"].tolist(), tree["bytes"].tolist()
        uploads, kept = named(tree["uploads"]), named(tree["kept"])

        def scores(row: int) -> dict[Test, Score]:
            rows = {test: values[row].tolist() for test, values in tree["scores"].items()}
            return {test: Score(int(correct), int(total), loss) for test, (correct, total, loss) in rows.items()}

        return cls(
            ids=ids,
            uploads=[unstack(uploads, row) for row in range(len(ids))],
            kept=[unstack(kept, row) for row in range(len(ids))],
            down=down,
            up=up,
            scores=[scores(row) for row in range(len(ids))],
            seconds=float(tree["seconds"]),
        )


class Run:
    """A run at work.

    Parameters
    ----------
    files
        Where it lies; ``run.yaml`` must be there.
    execution
        Device and executor.
    threads
        Cores that this job was granted.
    keep_models
        Which rounds' states stay: see `artifacts.keep_models`.
    """

    def __init__(
        self,
        files: RunFiles,
        execution: Execution | None = None,
        threads: int = 1,
        keep_models: str | int = "all",
        *,
        clients: Clients | None = None,
    ) -> None:
        execution = execution or Execution()
        self.files, self.keep_models = files, keep_models
        self.settings = settings = Settings.read(files.settings)
        self.federation, self.evaluation = settings.build_federation(), settings.build_evaluation()
        device = torch.device(
            execution.device if execution.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        dtype = getattr(torch, self.federation.dtype)
        self.clients = clients or open_clients(settings, dtype, device)
        family = cast(Model, settings.build_model())
        bare = cast(Algorithm, settings.build_algorithm())
        shape = tuple(self.clients.x.shape[1:])
        net = Net(lambda: bare.adapt(family.build(shape, self.clients.classes)), dtype, device)
        self.algorithm = bare.bind(net, self.federation)
        width = execution.stack if execution.stack != "auto" else WIDTH_ON_GPU if device.type == "cuda" else 1
        epochs = self.evaluation.finetune_epochs
        self.executor: Executor = (
            Stack(self.algorithm, self.clients, width, epochs)
            if width > 1
            else Loop(self.algorithm, self.clients, threads, epochs)
        )
        self._server: tuple[int, State] | None = None

    # -- states ------------------------------------------------------------------------------------------------------

    def fresh(self, index: int) -> Tensors:
        """The run's ``index``-th initial model."""
        return self.algorithm.net.fresh(streams.entropy(self.settings.seed, f"init/{index}"))

    def server(self, number: int) -> State:
        """The server's state after a round (0: as initialised)."""
        if self._server is None or self._server[0] != number:
            files = self.files.round(number)
            tree = artifacts.read_pt(files.server, self._sealed(number)["sha256"][files.server.name])
            self._server = (number, move(named(tree), self.clients.device))
        return self._server[1]

    @functools.cached_property
    def _first(self) -> State:
        return canonical(self.algorithm.first(self.algorithm.init(self.fresh), self.fresh))

    def kept(self, client: int, number: int) -> State:
        """What a client keeps after a round: stored in the last round that it took part in."""
        last = self._sealed(number)["last"][client]
        if last < 0 or not self._first:
            return self._first
        ids, states = self._stored(last)
        return unstack(states, ids.index(client))

    @functools.lru_cache(maxsize=64)  # noqa: B019  (a run lives as long as its process)
    def _stored(self, number: int) -> tuple[list[int], State]:
        files = self.files.round(number)
        tree = artifacts.read_pt(files.clients, self._sealed(number)["sha256"][files.clients.name])
        return tree["ids"].tolist(), named(tree["kept"])

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _sealed(self, number: int) -> dict[str, Any]:
        sealed: dict[str, Any] = artifacts.read_json(self.files.round(number).state)
        return sealed

    def participants(self, number: int) -> list[int]:
        """The clients of a round, in ascending order."""
        draw = streams.generator(self.settings.seed, "participants", number)
        count = self.federation.participants
        return sorted(draw.choice(self.federation.clients, count, replace=False).tolist())

    # -- the steps of a round ----------------------------------------------------------------------------------------

    def initialise(self) -> None:
        """Round 0: the server's initial state."""
        files = self.files.round(0)
        with torch.no_grad():
            server = canonical(self.algorithm.init(self.fresh))
        self._seal(files, 0, server, [], [-1] * self.federation.clients, {})
        self._finish(files, 0, {})

    def train(self, number: int, ids: Sequence[int]) -> Block:
        """Local training of some participants."""
        begin = time.perf_counter()
        server = self.server(number - 1)
        send = functools.partial(self.algorithm.send, server)
        tests = evaluation.tests(self.evaluation, "trained") if self._measured(number) else []
        block = Block([], [], [], [], [], [], 0.0)
        outcomes = self.executor.run("train", number, ids, lambda client: self.kept(client, number - 1), send, tests)
        for outcome in outcomes:
            block.ids.append(outcome.client)
            block.uploads.append(outcome.upload)
            block.kept.append(move(outcome.keep, torch.device("cpu")))
            block.up.append(size_in_bytes(outcome.upload))
            block.scores.append(outcome.scores)
        common, own = send(ids)
        block.down = [size_in_bytes(common) + size_in_bytes(own) // len(ids)] * len(ids)
        block.seconds = time.perf_counter() - begin
        return block

    def aggregate(self, number: int, blocks: Sequence[Block]) -> None:
        """The server's next state, and what the participants keep."""
        begin = time.perf_counter()
        ids = [client for block in blocks for client in block.ids]
        if ids != self.participants(number):
            raise ArtifactError(
                f"{self.files.round(number).path}: its blocks hold {ids}, not the round's participants."
            )
        sizes = self.clients.sizes[ids].tolist()
        weights = sizes if self.federation.weighting == "count" else [1] * len(ids)
        uploads = Uploads(ids, weights, [upload for block in blocks for upload in block.uploads])
        with torch.no_grad():
            server = canonical(self.algorithm.combine(self.server(number - 1), uploads))
        files = self.files.round(number)
        hashes = {}
        kept = [state for block in blocks for state in block.kept]
        if kept[0]:
            hashes[files.clients.name] = artifacts.write_pt(
                files.clients, {"ids": torch.tensor(ids), "kept": stack(kept)}
            )
        traffic = {
            "client": pa.array(ids, pa.int32()),
            "samples": pa.array(sizes, pa.int64()),
            "weight": pa.array(uploads.weights, pa.float64()),
            "bytes_down": pa.array([count for block in blocks for count in block.down], pa.int64()),
            "bytes_up": pa.array([count for block in blocks for count in block.up], pa.int64()),
        }
        hashes[files.participants.name] = artifacts.write_parquet(files.participants, pa.table(traffic))
        scores = [each for block in blocks for each in block.scores]
        if scores[0]:
            table = evaluation.table(number, "trained", dict(zip(ids, scores, strict=True)))
            hashes[files.trained.name] = artifacts.write_parquet(files.trained, table)
        matrices = {-1: self.algorithm.exchanged(server)} | {i: self.algorithm.exchanged(up) for i, _, up in uploads}
        if matrices[-1]:
            table = evaluation.matrices(number, "exchanged", matrices)
            hashes[files.exchanged.name] = artifacts.write_parquet(files.exchanged, table)
        last = list(self._sealed(number - 1)["last"])
        for client in ids:
            last[client] = number
        self._seal(files, number, server, ids, last, hashes)
        times = {"train": sum(block.seconds for block in blocks), "aggregate": time.perf_counter() - begin}
        artifacts.write_json(files.times, times)

    def evaluate(self, number: int) -> None:
        """Accuracies and matrices of a round; then the round is complete."""
        begin = time.perf_counter()
        files, hashes = self.files.round(number), {}
        if self._measured(number):
            found = evaluation.measure(self, number)
            hashes[files.metrics.name] = artifacts.write_parquet(files.metrics, found.metrics)
            if found.matrices is not None:
                hashes[files.matrices.name] = artifacts.write_parquet(files.matrices, found.matrices)
        times = artifacts.read_json(files.times) | {"evaluate": time.perf_counter() - begin}
        artifacts.write_json(files.times, times)
        self._finish(files, number, hashes)

    def segment(self, stop: int) -> Iterator[int]:
        """All rounds up to ``stop`` that are not complete yet; yields the number of each as it is done."""
        artifacts.sweep(self.files.path)
        done = self.complete(stop)
        if done < 0:
            self.initialise()
        for number in range(max(done, 0) + 1, stop + 1):
            self.aggregate(number, [self.train(number, self.participants(number))])
            self.evaluate(number)
            prune(self.files, number, self.keep_models)
            yield number
        manifest = {str(number): artifacts.sha256_of(self.files.round(number).marker) for number in range(stop + 1)}
        artifacts.write_json(self.files.segment(stop), {"rounds": manifest})

    def complete(self, stop: int) -> int:
        """The last of the rounds 0 to ``stop`` that all are complete and whose states are whole; -1 if none is."""
        done = -1
        while done < stop and self._whole(done + 1):
            done += 1
        while done >= 0 and not self._resumable(done):
            done -= 1
        return done

    # -- markers -----------------------------------------------------------------------------------------------------

    def _measured(self, number: int) -> bool:
        return number % self.evaluation.every == 0

    def _seal(
        self, files: RoundFiles, number: int, server: State, ids: list[int], last: list[int], hashes: dict[str, str]
    ) -> None:
        hashes = hashes | {files.server.name: artifacts.write_pt(files.server, server)}
        observed = {name: float(value) for name, value in self.algorithm.observe(server).items()}
        sealed = {"round": number, "participants": ids, "last": last, "observed": observed, "sha256": hashes}
        artifacts.write_json(files.state, sealed)
        self._sealed.cache_clear()
        self._stored.cache_clear()
        self._server = (number, server)

    def _finish(self, files: RoundFiles, number: int, hashes: dict[str, str]) -> None:
        hashes = hashes | self._sealed(number)["sha256"] | {files.state.name: artifacts.sha256_of(files.state)}
        artifacts.write_json(files.marker, {"round": number, "sha256": hashes, "made_by": self.provenance()})

    def provenance(self) -> dict[str, Any]:
        """What else a result's bits depend on: executor, device, versions."""
        device = self.clients.device
        return {
            "executor": self.executor.name,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "fedpipe": fedpipe.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }

    def _whole(self, number: int) -> bool:
        """Whether a round is complete and everything but its states, which may have been pruned, is intact."""
        files = self.files.round(number)
        try:
            hashes = artifacts.read_json(files.marker)["sha256"]
        except (ArtifactError, KeyError, TypeError):
            return False
        states = {files.server.name, files.clients.name}
        return all(name in states or artifacts.intact(files.path / name, sha256) for name, sha256 in hashes.items())

    def _resumable(self, number: int) -> bool:
        """Whether the next round can start from this one: its server state and all clients' last states are intact."""
        needed = {(number, self.files.round(number).server.name)}
        if self._first:
            needed |= {
                (last, self.files.round(last).clients.name) for last in self._sealed(number)["last"] if last >= 0
            }
        return all(
            artifacts.intact(self.files.round(each).path / name, self._sealed(each)["sha256"][name])
            for each, name in needed
        )


def open_clients(settings: Settings, dtype: torch.dtype, device: torch.device) -> Clients:
    """A run's data set and partition, on the device."""
    samples = store.load(artifacts.dataset_file(settings.dataset["name"]))
    assignment = Assignment.read(artifacts.assignment_file(digest(settings.partition_settings)))
    source = cast(type[Dataset], registry.find(registry.DATASET, settings.dataset["name"]))
    parts = assignment.train, assignment.test, assignment.global_test
    return Clients(samples.x, samples.y, *parts, source.classes, settings.seed, dtype, device)


def named(tree: dict[str, Any]) -> State:
    """A state as it comes from a file: its inner dicts become :class:`~fedpipe.tensors.Tensors` again."""
    return {part: Tensors(value) if isinstance(value, dict) else value for part, value in tree.items()}


def open_run(path: Path, execution: dict[str, Any], threads: int, keep_models: str | int) -> Run:
    """The run that lies at ``path``, with the plan's execution settings."""
    return Run(RunFiles(path), Execution(**execution), threads, keep_models)
