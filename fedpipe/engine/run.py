"""One run: its rounds, what they leave on disk, and how it goes on from what it finds there.

A round is three steps, ``train``, ``aggregate`` and ``evaluate``. In one process they make a segment; as jobs of their
own they make the DAG of single rounds. Both leave the same files with the same bits. The server's state and
whatever travels stay on the job's device, also where they come from files; only what is written goes to the host.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

import fedpipe
from fedpipe import artifacts, code, pins, rng
from fedpipe.algorithms.base import Algorithm, State, Uploads
from fedpipe.artifacts import RunFiles
from fedpipe.config import Execution, several
from fedpipe.data import store
from fedpipe.data.assignment import Assignment, checksum
from fedpipe.engine import contract, evaluation, frozen, gpus, numerics, redo
from fedpipe.engine.block import Block
from fedpipe.engine.capture import cuda_graph
from fedpipe.engine.checkpoint import Checkpoint, prune
from fedpipe.engine.clients import Clients
from fedpipe.engine.device import on_device_of
from fedpipe.engine.executor import Executor, Score, Test, init_client
from fedpipe.engine.loop import Loop
from fedpipe.engine.server import aggregate, init_server, send
from fedpipe.engine.stack import Stack
from fedpipe.engine.trees import contiguous, finite, move, size_in_bytes
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.models.base import Model, Net, Network
from fedpipe.plan import Settings, digest
from fedpipe.tensors import Tensors

WIDTH_ON_GPU = 32  #: clients of a stack where `execution.stack` is auto
#: Of the server's states before and after a round, and of what its participants send and keep, that lie on a GPU; where
#: there is more, all of it rests on the host. A fixed number, since bits depend on where the server computes.
RESTING_BYTES = 2**32


class Weighed(NamedTuple):
    """The participants of a round and what each counts for; an update that is not finite counts for nothing."""

    block: Block
    finite: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.int64]

    @property
    def uploads(self) -> Uploads:
        """Those that count, as the server reads them."""
        rows = np.flatnonzero(self.finite).tolist()
        ids, weights, sent = self.block.ids, self.weights.tolist(), self.block.uploads
        return Uploads([ids[row] for row in rows], [weights[row] for row in rows], [sent[row] for row in rows])

    @property
    def kept(self) -> list[State]:
        """What they keep."""
        return list(itertools.compress(self.block.kept, self.finite))


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
        bare = cast(Algorithm, settings.build_algorithm())
        shape = tuple(self.clients.x.shape[1:])
        build = functools.partial(family.network, shape, self.clients.classes)
        if family.frozen_base:
            whole, base = build, frozen.parted(family, shape, self.clients.classes)
            self.clients = frozen.featured(self.clients, base, frozen.place(settings), threads, self._versions())
            build = functools.partial(_above_base, family, whole)
        self._one_model = family.whole
        federation = self.federation
        net = Net(lambda: bare.adapt(build()), dtype, self._device, federation.buffers, federation.precision)
        self.algorithm = bare.bind(net, self.federation)
        self._stack, self._graphs = execution.stack if family.stackable else 1, execution.graphs
        with torch.no_grad(), contract.told(self.algorithm):
            server = init_server(self.algorithm, self.fresh)
            first = contiguous(init_client(self.algorithm, server, self.fresh))
        self._rests = self._resting_place(server, first)
        self._first = move(first, self._rests)
        self.checkpoint = Checkpoint(files, self._first, self._rests)
        self.executor = self.executor_of(self.algorithm)
        self._made_of = family.made_of(), bare.made_of()
        self._digests = [code.of(*objects).text for objects in self._made_of]
        self._watched = {path: pins.stamp(path) for path in _read_later(family, bare)}
        self._begun: dict[int, Mapping[Test, Score]] = {}
        self._was_complete: dict[int, bool] = {}  #: by round, whether there was a marker when it was begun here
        self._is_copy = False

    def _resting_place(self, server: State, first: State) -> torch.device:
        """Where states lie between passes: on the device, or on the host where there are too many of them."""
        if self._device.type == "cpu":
            return self._device
        client = size_in_bytes([self.fresh(0), first, first])  # sent, kept and kept before
        needed = 2 * size_in_bytes(server) + self.federation.participants * client
        return self._device if needed <= RESTING_BYTES else torch.device("cpu")

    def at(self, files: RunFiles) -> Run:
        """The same run in another folder, a copy of what it left up to some round."""
        other = copy.copy(self)
        other.files, other.checkpoint, other._is_copy = files, Checkpoint(files, self._first, self._rests), True
        other._was_complete = {}
        return other

    def executor_of(self, algorithm: Algorithm) -> Executor:
        """The run's executor, at work for this algorithm: the run's, or one that probes make of it."""
        stack, epochs, cuda = self._stack, self.evaluation.finetune_epochs, self._device.type == "cuda"
        width = stack if isinstance(stack, int) else WIDTH_ON_GPU if cuda else 1
        if self._graphs and not (cuda and width > 1):
            reason = "clients train one by one" if cuda else "there is no GPU"
            print(f"execution.graphs: steps run one by one, since {reason} here", file=sys.stderr)
        if width > 1:
            record = cuda_graph() if self._graphs and cuda and algorithm is self.algorithm else None
            return Stack(algorithm, self.clients, width, epochs, record, self._rests)
        return Loop(algorithm, self.clients, self._threads, epochs, self._rests)

    def fresh(self, index: int) -> Tensors:
        """The run's ``index``-th initial model.

        Raises
        ------
        SettingsError
            There is but one, since `model.weights` names a file.
        """
        if index and self._one_model:
            raise SettingsError(several(self.settings.algorithm["name"]))
        return self.algorithm.net.fresh(rng.entropy(self.settings.seed, f"init/{index}"))

    def participants(self, number: int) -> list[int]:
        """The clients of a round, in ascending order."""
        draw = rng.generator(self.settings.seed, "participants", number)
        count = self.federation.participants
        return sorted(draw.choice(self.federation.clients, count, replace=False).tolist())

    def kept(self, client: int, number: int) -> State:
        """What a client keeps after a round."""
        return self.checkpoint.kept(client, number)

    def server(self, number: int) -> State:
        """The server's state after a round."""
        return self.checkpoint.server(number)

    def initialize(self) -> None:
        """Round 0: the server's initial state."""
        with torch.no_grad(), contract.told(self.algorithm):
            server = move(contiguous(init_server(self.algorithm, self.fresh)), self._rests)
        nobody = [-1] * self.federation.clients
        facts = {"observed": {}, "made_by": [self.made_by()], "trained_on": dict(self.clients.trained_on)}
        self.checkpoint.seal(0, server, [], [], {}, last=nobody, **facts)
        self.checkpoint.finish(0, {})

    def train(self, number: int, ids: Sequence[int]) -> Block:
        """Local training of some participants."""
        self._may_go_on(number)
        begin = time.perf_counter()
        sends = functools.partial(send, self.algorithm.in_round(number), self.server(number - 1))
        kept = functools.partial(self.kept, number=number - 1)
        due = evaluation.due(self.evaluation, self._measured(number)).values()
        tests: list[Test] = sorted({test for on in due for test in on})
        everyone = self.participants(number)
        block = Block(self.settings.key, number, self.made_by(), stacks=self.executor.stacks(everyone))
        for outcome in self.executor.run("train", number, ids, kept, sends, tests, everyone):
            contract.alike(self.algorithm, "keep", outcome.keep, self._first, "init_client")
            contract.alike(
                self.algorithm, "upload", outcome.upload, (block.uploads or [outcome.upload])[0], "another client"
            )
            block.add(outcome)
        self._same_code()  # a block is another job's to aggregate
        block.seconds = time.perf_counter() - begin
        return block

    def aggregate(self, number: int, blocks: Sequence[Block]) -> None:
        """The server's next state, and what the participants keep.

        Raises
        ------
        ArtifactError
            A block is of another run or of another round, or the blocks have other clients than the round.
        """
        self._refuse_others(number, blocks)
        self._may_go_on(number)
        begin, sent = time.perf_counter(), self._weigh(number, Block.joined(blocks, self._rests))
        server = self.server(number - 1)
        if len(sent.uploads):  # otherwise the round leaves everything as it was
            before = server
            with torch.no_grad(), contract.told(self.algorithm):
                server = contiguous(aggregate(self.algorithm.in_round(number), before, sent.uploads))
            contract.alike(self.algorithm, "aggregate", server, before, "init")
        hashes = self._record(number, sent) | self._record_matrices(number, server, sent.uploads)
        made_by = _distinct([block.made_by for block in blocks])
        here = self.made_by()
        if all((made["shared"], made["device"]) != (here["shared"], here["device"]) for made in made_by):
            made_by.append(here)  # its blocks are of other code or of another device than the server
        with on_device_of(server):
            observed = contract.metrics(self.algorithm, self.algorithm.metrics(server))
        self._same_code()
        facts = {"observed": observed, "made_by": made_by, "trained_on": dict(self.clients.trained_on)}
        facts |= {"stacks": sent.block.stacks} if sent.block.stacks else {}
        self.checkpoint.seal(number, server, list(sent.uploads.ids), sent.kept, hashes, **facts)
        passes = [self.federation.epochs(int(self.clients.sizes[client])) for client in sent.block.ids]
        epoch = statistics.fmean(seconds / count for seconds, count in zip(sent.block.spent, passes, strict=True))
        self._record_times(number, train=sent.block.seconds, epoch=epoch, aggregate=time.perf_counter() - begin)

    def _refuse_others(self, number: int, blocks: Sequence[Block]) -> None:
        """Refuse blocks of another run or of another round."""
        for index, block in enumerate(blocks):
            if (block.run, block.round) != (self.settings.key, number):
                raise ArtifactError(
                    f"{self.files.round(number).block(index)} is of round {block.round} of run {block.run}, and should "
                    f"be of round {number} of run {self.settings.key}; delete it and run again."
                )

    def _weigh(self, number: int, block: Block) -> Weighed:
        """What each participant of a round counts for."""
        if block.ids != self.participants(number):
            path = self.files.round(number).path
            raise ArtifactError(f"{path}: its blocks hold the clients {block.ids}, not the round's participants.")
        sent = zip(block.uploads, block.kept, strict=True)
        whole = np.array(torch.stack([finite(states) for states in sent]).tolist())
        return Weighed(
            block, whole, whole * (self.clients.sizes[block.ids] if self.federation.weighting == "count" else 1)
        )

    def _record(self, number: int, sent: Weighed) -> dict[str, str]:
        """Write who took part, and how their models did right after training; gives the files' hashes."""
        files, block = self.files.round(number), sent.block
        participants = {
            "client": pa.array(block.ids, pa.int32()),
            "samples": pa.array(self.clients.sizes[block.ids], pa.int64()),
            "finite": pa.array(sent.finite, pa.bool_()),
            "weight": pa.array(sent.weights / max(sent.weights.sum(), 1), pa.float64()),
            "bytes_down": pa.array(block.down, pa.int64()),
            "bytes_up": pa.array(block.up, pa.int64()),
        }
        hashes = {files.participants.name: artifacts.write_parquet(files.participants, pa.table(participants))}
        trained = dict(zip(block.ids, block.scores, strict=True))  # also what failed: to leave it out would flatter
        scores = {"trained": trained, "kept": dict(itertools.compress(trained.items(), sent.finite))}
        for model, tests in evaluation.due(self.evaluation, self._measured(number)).items():
            measured = {client: {test: found[test] for test in tests} for client, found in scores[model].items()}
            path = {"trained": files.trained, "kept": files.kept}[model]
            hashes[path.name] = artifacts.write_parquet(path, evaluation.table(number, model, measured))
        return hashes

    def _record_matrices(self, number: int, server: State, uploads: Uploads) -> dict[str, str]:
        """Write the matrices that travelled, if any did; gives the file's hash."""
        with on_device_of(server):
            matrices = {-1: self.algorithm.matrices(server)}
            matrices |= {client: self.algorithm.matrices(upload) for client, _, upload in uploads}
        if not matrices[-1]:
            return {}
        path = self.files.round(number).exchanged
        return {path.name: artifacts.write_parquet(path, evaluation.matrices(number, "exchanged", matrices))}

    def evaluate(self, number: int) -> None:
        """Accuracies and matrices of a round; then the round is complete."""
        self.checkpoint.sealed(number)  # what is evaluated has to be there
        self._may_go_on(number)
        self._same_data(number)
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
                again=self.participants(number + 1),
            )
            metrics = found.metrics
            if evaluation.tests(self.evaluation, "kept"):
                last = self.checkpoint.sealed(number)["last"]
                rows = evaluation.kept(self.evaluation, number, last, self._recorded, self._begin)
                metrics = pa.concat_tables([metrics, rows])
            hashes[files.metrics.name] = artifacts.write_parquet(files.metrics, metrics)
            if found.matrices is not None:
                hashes[files.matrices.name] = artifacts.write_parquet(files.matrices, found.matrices)
        self._same_code()
        self._record_times(number, evaluate=time.perf_counter() - begin)
        self.checkpoint.finish(number, hashes)

    def _record_times(self, number: int, **seconds: float) -> None:
        """Write what steps of a round took, unless another process has completed it since it was begun here."""
        files = self.files.round(number)
        if self._was_complete.get(number) or not artifacts.exists(files.marker):
            artifacts.write_json(files.times, self.checkpoint.times(number) | seconds)

    def _recorded(self, number: int) -> pa.Table:
        """What a round recorded of its participants for the kept protocols."""
        path = self.files.round(number).kept
        return artifacts.read_parquet(path, self.checkpoint.sealed(number)["sha256"][path.name])

    def _begin(self, ids: Sequence[int], tests: Sequence[Test]) -> dict[int, Mapping[Test, Score]]:
        """Scores of the models with which clients begin round 1, each measured once in this process."""
        sends, kept = functools.partial(send, self.algorithm, self.server(0)), functools.partial(self.kept, number=0)
        new = [client for client in ids if client not in self._begun]
        outcomes = self.executor.run("begin", 1, new, kept, sends, tests)
        self._begun |= {outcome.client: outcome.scores for outcome in outcomes}
        return {client: self._begun[client] for client in ids}

    def round(self, number: int) -> None:
        """All of a round in this process."""
        self.aggregate(number, [self.train(number, self.participants(number))])
        self.evaluate(number)

    def segment(self, stop: int) -> Iterator[int]:
        """The rounds up to ``stop`` that are not complete; yields how many were, then each number as it is done."""
        artifacts.sweep(self.files.path)
        done = self.checkpoint.complete(stop, self._keep_models)
        if done < 0:
            self.initialize()
            done = 0
        self._same_data(done)
        yield done
        numbers = range(done + 1, stop + 1)
        there = [number for number in numbers if artifacts.exists(self.files.round(number).marker)]  # and not whole
        for number in numbers:
            if number in there or not artifacts.exists(self.files.round(number).marker):
                self.round(number)  # else another study has done it meanwhile
            prune(self.files, number, self._keep_models)
            yield number
        artifacts.pack(self.files.history)
        markers = {number: self.files.round(number).marker for number in range(stop + 1)}
        hashes = {str(number): artifacts.sha256_of(marker) for number, marker in markers.items()}
        artifacts.write_json(self.files.segment(stop), {"rounds": hashes})

    def place(self) -> str:
        """Where and how this process works, in words."""
        made_by, granted = self.made_by(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
        words = f"{made_by['executor']} executor on {made_by['device']}, {self._threads} threads of {platform.node()}"
        if granted not in ("", "-1"):
            words += f", GPU {granted}" + (" was granted but PyTorch sees none" if self._device.type == "cpu" else "")
        return words

    def _may_go_on(self, number: int) -> None:
        """Before a round: the data are those of the round before it, and the shared code does that round the same."""
        self._was_complete.setdefault(number, artifacts.exists(self.files.round(number).marker))
        if not self._is_copy:
            self._same_data(number - 1)
            redo.check(self, number - 1)

    def _same_code(self) -> None:
        """Refuse what was computed while files changed that own code may read at any time, and that its key is of."""
        now = {path: pins.stamp(path) for path in self._watched}
        changed = [path for path, mark in self._watched.items() if now[path] != mark]
        if changed and code.again(*self._made_of) == self._digests:  # touched, or a comment
            self._watched = now
        elif changed:
            raise ArtifactError(
                f"{self.files.path}: {changed[0]} has changed since this job began, and its key is of the one before; "
                "type `fedpipe run`, which plans again, or restore that file."
            )

    def _same_data(self, number: int) -> None:
        """Refuse to go on after a round where it, or round 0, was made with other data than lies here."""
        here = self.clients.trained_on
        for earlier in (0, number):
            if not artifacts.exists(self.files.round(earlier).state):
                continue
            recorded = self.checkpoint.sealed(earlier).get("trained_on", {})
            for name in here:
                if recorded.get(name) != here[name]:
                    lies = {**places(self.settings), "features": frozen.place(self.settings)}
                    raise ArtifactError(
                        f"{self.files.path}: round {earlier} was made with another {name} (SHA-256 of its content: "
                        f"{recorded.get(name, 'not recorded')}) than lies in {lies[name]} "
                        f"({here[name]}); bring that one back, as `dvc checkout` does where DVC has recorded it, or "
                        f"delete {self.files.path} and type `fedpipe run` to make the run anew."
                    )

    def _measured(self, number: int) -> bool:
        return number % self.evaluation.every == 0

    def made_by(self) -> dict[str, Any]:
        """What else a result's bits depend on: executor, device, versions."""
        return {"executor": self.executor.name, **self._versions()}

    def _versions(self) -> dict[str, Any]:
        device = self._device
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
            "fedpipe": fedpipe.__version__,
            "shared": code.shared(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }


def places(settings: Settings) -> dict[str, Path]:
    """Where a run's data set and its partition lie."""
    dealt = artifacts.assignment_file(digest(settings.partition_settings))
    return {"data set": store.place(settings.dataset), "partition": dealt}


def _above_base(family: Model, whole: Callable[[], Network]) -> Network:
    return family.parted(whole())[1]


def open_clients(settings: Settings, dtype: torch.dtype, device: torch.device) -> Clients:
    """A run's data set and partition, on the device."""
    data, dealt = places(settings).values()
    samples = store.load(data, artifacts.manifest(data))
    table = artifacts.read_parquet(dealt, artifacts.manifest(dealt))
    assignment = Assignment.of(table)
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
        trained_on={"data set": store.checksum(samples), "partition": checksum(table)},
    )


def open_run(path: Path, execution: Execution, threads: int = 1, keep_models: str | int = "all") -> Run:
    """The run that lies at ``path``."""
    return Run(RunFiles(path), execution, threads, keep_models)


def _read_later(*components: Model | Algorithm) -> Iterator[Path]:
    """Files that the digests of components are of, and that this process has yet to read: data, and later imports."""
    paths = {path for component in components for path in code.of(*component.made_of()).files}
    names = {path.name for path in paths}
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    here = {Path(name).resolve() for name in loaded if name and Path(name).name in names}
    yield from (path for path in paths if path.suffix != ".py" or path not in here)


def _distinct(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [value for index, value in enumerate(values) if value not in values[:index]]


@functools.cache
def _processor() -> str:
    """The kind of CPU, which decides how kernels round."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{platform.machine()}, {line.partition(':')[2].strip()}"
    return platform.machine()


def _device(execution: Execution) -> torch.device:
    """The device to use."""
    numerics.set_up()
    if execution.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("execution.device: cuda can't be used; PyTorch sees no GPU here. It should be auto or cpu.")
    if execution.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", _gpu(count) if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


@functools.cache
def _gpu(count: int) -> int:
    """The index of this process's own of so many GPUs."""
    return gpus.own(gpus.names(count))
