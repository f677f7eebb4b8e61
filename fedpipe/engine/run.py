"""One run: its rounds, what they leave on disk, and how it goes on from what it finds there.

A round is three steps, ``train``, ``aggregate`` and ``evaluate``. In one process they make a segment; as jobs of their
own they make the DAG of single rounds. Both leave the same files with the same bits. The server's state and whatever
travels lie on the host; only training and evaluation use the device.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch

import fedpipe
from fedpipe import artifacts, streams
from fedpipe.algorithms._dw import complete
from fedpipe.algorithms.base import Algorithm, State, Uploads
from fedpipe.artifacts import RunFiles
from fedpipe.config import Execution
from fedpipe.data import store
from fedpipe.data.assignment import Assignment
from fedpipe.engine import evaluation
from fedpipe.engine.block import Block
from fedpipe.engine.checkpoint import Checkpoint
from fedpipe.engine.clients import Clients
from fedpipe.engine.executor import Executor, canonical, finite, first
from fedpipe.engine.loop import Loop
from fedpipe.engine.pruning import prune
from fedpipe.engine.stack import Stack
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.models.base import Model, Net
from fedpipe.plan import Settings, code, digest
from fedpipe.tensors import Tensors

WIDTH_ON_GPU = 32  #: clients of a stack where `execution.stack` is auto


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
    clients
        Who owns which samples; by default the run's data set and partition are read.
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
        self.files, self._keep_models = files, keep_models
        self.settings = settings = Settings.read(files.settings)
        self.federation, self.evaluation = settings.build_federation(), settings.build_evaluation()
        self._device, self._threads = _device(execution), threads
        dtype = getattr(torch, self.federation.dtype)
        self.clients = clients or open_clients(settings, dtype, self._device)
        family = cast(Model, settings.build_model())
        bare = complete(cast(Algorithm, settings.build_algorithm()))
        shape = tuple(self.clients.x.shape[1:])
        build = functools.partial(family.build, shape, self.clients.classes)
        net = Net(lambda: bare.adapt(build()), dtype, self._device, self.federation.buffers)
        self.algorithm = bare.bind(net, self.federation)
        self.executor = self._executor(execution.stack if family.stackable else 1, threads)
        with torch.no_grad():
            kept = canonical(first(self.algorithm, self.algorithm.init(self.fresh), self.fresh))
        self.checkpoint = Checkpoint(files, kept)

    def _executor(self, stack: int | str, threads: int) -> Executor:
        width = stack if isinstance(stack, int) else WIDTH_ON_GPU if self._device.type == "cuda" else 1
        epochs = self.evaluation.finetune_epochs
        if width > 1:
            return Stack(self.algorithm, self.clients, width, epochs)
        return Loop(self.algorithm, self.clients, threads, epochs)

    def fresh(self, index: int) -> Tensors:
        """The run's ``index``-th initial model."""
        return self.algorithm.net.fresh(streams.entropy(self.settings.seed, f"init/{index}"))

    def participants(self, number: int) -> list[int]:
        """The clients of a round, in ascending order."""
        draw = streams.generator(self.settings.seed, "participants", number)
        count = self.federation.participants
        return sorted(draw.choice(self.federation.clients, count, replace=False).tolist())

    def kept(self, client: int, number: int) -> State:
        """What a client keeps after a round."""
        return self.checkpoint.kept(client, number)

    def server(self, number: int) -> State:
        """The server's state after a round."""
        return self.checkpoint.server(number)

    def initialise(self) -> None:
        """Round 0: the server's initial state."""
        with torch.no_grad():
            server = canonical(self.algorithm.init(self.fresh))
        nobody = [-1] * self.federation.clients
        self.checkpoint.seal(0, server, [], [], {}, last=nobody, observed={}, made_by=[self._made_by()])
        self.checkpoint.finish(0, {})

    def train(self, number: int, ids: Sequence[int]) -> Block:
        """Local training of some participants."""
        begin = time.perf_counter()
        send = functools.partial(self.algorithm.send, self.server(number - 1))
        kept = functools.partial(self.kept, number=number - 1)
        tests = evaluation.tests(self.evaluation, "trained") if self._measured(number) else []
        block = Block(self._made_by())
        for outcome in self.executor.run("train", number, ids, kept, send, tests):
            block.add(outcome)
        block.seconds = time.perf_counter() - begin
        return block

    def aggregate(self, number: int, blocks: Sequence[Block]) -> None:
        """The server's next state, and what the participants keep."""
        begin, files = time.perf_counter(), self.files.round(number)
        ids = [client for block in blocks for client in block.ids]
        if ids != self.participants(number):
            raise ArtifactError(f"{files.path}: its blocks hold the clients {ids}, not the round's participants.")
        sizes = self.clients.sizes[ids]
        sent, kept = ([each for block in blocks for each in getattr(block, part)] for part in ("uploads", "kept"))
        whole = np.array([finite(upload) and finite(keep) for upload, keep in zip(sent, kept, strict=True)])
        weights = whole * (sizes if self.federation.weighting == "count" else 1)
        server = self.server(number - 1)
        uploads = Uploads([], [], [])
        if whole.any():  # otherwise the round leaves everything as it was
            rows = np.flatnonzero(whole)
            uploads = Uploads([ids[row] for row in rows], weights[rows].tolist(), [sent[row] for row in rows])
            with torch.no_grad():
                server = canonical(self.algorithm.combine(server, uploads))
        traffic = {
            "client": pa.array(ids, pa.int32()),
            "samples": pa.array(sizes, pa.int64()),
            "finite": pa.array(whole, pa.bool_()),
            "weight": pa.array(weights / max(weights.sum(), 1), pa.float64()),
            "bytes_down": pa.array([count for block in blocks for count in block.down], pa.int64()),
            "bytes_up": pa.array([count for block in blocks for count in block.up], pa.int64()),
        }
        hashes = {files.participants.name: artifacts.write_parquet(files.participants, pa.table(traffic))}
        scores = [each for block in blocks for each in block.scores]
        if scores[0]:
            measured = {client: each for client, each, fine in zip(ids, scores, whole, strict=True) if fine}
            table = evaluation.table(number, "trained", measured)
            hashes[files.trained.name] = artifacts.write_parquet(files.trained, table)
        matrices = {-1: self.algorithm.exchanged(server)} | {i: self.algorithm.exchanged(up) for i, _, up in uploads}
        if matrices[-1]:
            table = evaluation.matrices(number, "exchanged", matrices)
            hashes[files.exchanged.name] = artifacts.write_parquet(files.exchanged, table)
        observed = {name: float(value) for name, value in self.algorithm.observe(server).items()}
        made_by = _distinct([block.made_by for block in blocks])
        kept = [state for state, fine in zip(kept, whole, strict=True) if fine]
        self.checkpoint.seal(number, server, list(uploads.ids), kept, hashes, observed=observed, made_by=made_by)
        times = {"train": sum(block.seconds for block in blocks), "aggregate": time.perf_counter() - begin}
        before = artifacts.read_json(files.times) if artifacts.exists(files.times) else {}
        artifacts.write_json(files.times, before | times)  # of a round that another has done, they stay whole

    def evaluate(self, number: int) -> None:
        """Accuracies and matrices of a round; then the round is complete."""
        begin, files, hashes = time.perf_counter(), self.files.round(number), {}
        if self._measured(number):
            found = evaluation.measure(
                self.evaluation,
                self.executor,
                self.algorithm,
                self.clients,
                self.server(number),
                functools.partial(self.kept, number=number),
                number,
            )
            hashes[files.metrics.name] = artifacts.write_parquet(files.metrics, found.metrics)
            if found.matrices is not None:
                hashes[files.matrices.name] = artifacts.write_parquet(files.matrices, found.matrices)
        times = artifacts.read_json(files.times) | {"evaluate": time.perf_counter() - begin}
        artifacts.write_json(files.times, times)
        self.checkpoint.finish(number, hashes)

    def round(self, number: int) -> None:
        """All of a round in this process."""
        self.aggregate(number, [self.train(number, self.participants(number))])
        self.evaluate(number)

    def segment(self, stop: int) -> Iterator[int]:
        """The rounds up to ``stop`` that are not complete; yields how many were, then each number as it is done."""
        artifacts.sweep(self.files.path)
        done = self.checkpoint.complete(stop, self._keep_models)
        if done < 0:
            self.initialise()
            done = 0
        yield done
        for number in range(done + 1, stop + 1):
            self.round(number)
            prune(self.files, number, self._keep_models)
            yield number
        artifacts.pack(self.files.history)
        markers = {number: self.files.round(number).marker for number in range(stop + 1)}
        hashes = {str(number): artifacts.sha256_of(marker) for number, marker in markers.items()}
        artifacts.write_json(self.files.segment(stop), {"rounds": hashes})

    def place(self) -> str:
        """Where and how this process works, in words."""
        made_by, granted = self._made_by(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
        words = f"{made_by['executor']} executor on {made_by['device']}, {self._threads} threads of {platform.node()}"
        if granted not in ("", "-1"):
            words += f", GPU {granted}" + (" was granted but PyTorch sees none" if self._device.type == "cpu" else "")
        return words

    def _measured(self, number: int) -> bool:
        return number % self.evaluation.every == 0

    def _made_by(self) -> dict[str, Any]:
        """What else a result's bits depend on: executor, device, versions."""
        device = self._device
        return {
            "executor": self.executor.name,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "fedpipe": fedpipe.__version__,
            "code": code(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }


def open_clients(settings: Settings, dtype: torch.dtype, device: torch.device) -> Clients:
    """A run's data set and partition, on the device."""
    data = store.place(settings.dataset)
    dealt = artifacts.assignment_file(digest(settings.partition_settings))
    samples = store.load(data, artifacts.manifest(data))
    assignment = Assignment.read(dealt, artifacts.manifest(dealt))
    parts = assignment.train, assignment.test, assignment.global_test
    return Clients(
        samples.x,
        samples.y,
        *parts,
        store.facts(data).classes,
        settings.seed,
        dtype,
        device,
        validation=assignment.validation,
        transforms=settings.build_transforms(),
    )


def open_run(path: Path, execution: Execution, threads: int = 1, keep_models: str | int = "all") -> Run:
    """The run that lies at ``path``."""
    return Run(RunFiles(path), execution, threads, keep_models)


def _distinct(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _device(execution: Execution) -> torch.device:
    """The device to use, with deterministic kernels."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms, which imports a compiler too
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    if execution.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("execution.device: cuda can't be used; PyTorch sees no GPU here. It should be auto or cpu.")
    if execution.device != "auto":
        return torch.device(execution.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
