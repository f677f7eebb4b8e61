"""The rounds of a run, and their files.

A round has three steps, ``train``, ``aggregate`` and ``evaluate``. A segment runs them in one process. In the DAG of
single rounds each step is a job. Both give the same files with the same bits. The server's state, downloads and uploads
stay on the job's device, and only files are written on the CPU.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core import garbage, rng
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage.files import is_stored, read_parquet, write_json, write_parquet
from fedpipe.core.storage.layout import RunFiles
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.blocks import Block
from fedpipe.engine.checkpoint import Checkpoint
from fedpipe.engine.clients import drift, evaluation, frozen
from fedpipe.engine.clients.executor import (
    FIRST,
    ClientTask,
    Executor,
    Phase,
    Score,
    TestSet,
    count_client_steps,
    make_initial_client_state,
)
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.load import get_data_paths, load_federated_data
from fedpipe.engine.clients.loop import LoopExecutor
from fedpipe.engine.environment import ComponentCode, configure_device, get_device_and_versions
from fedpipe.engine.new_clients import NewClients
from fedpipe.engine.server.device import choose_storage_device
from fedpipe.engine.server.server import (
    aggregate_uploads,
    call_server_hooks,
    make_download,
    make_initial_server_state,
)
from fedpipe.engine.stack.graphs import make_cuda_graph_backend
from fedpipe.engine.stack.stack import StackExecutor
from fedpipe.engine.torch_env.trees import is_finite, make_contiguous, move_state
from fedpipe.engine.user_errors import explain_user_errors
from fedpipe.engine.weights import WeightedUploads, compute_aggregation_weights, select_participants
from fedpipe.models.base import FunctionalNetwork, Model, Network
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings.execution import Execution
from fedpipe.settings.params import make_single_initial_model_error

WIDTH_ON_GPU = 32  #: clients per stack if `execution.stack` is auto


class Rounds:
    """The rounds of a run in this process, without the checks before a round is resumed.

    The run's folder ``files`` contains its ``run.yaml``. ``threads`` are the cores of this job, and ``keep_models`` is
    `artifacts.keep_models`. ``clients`` are by default those of the run's data set and partition.
    """

    def __init__(
        self,
        files: RunFiles,
        execution: Execution | None = None,
        threads: int = 1,
        keep_models: str | int = "all",
        *,
        clients: FederatedData | None = None,
    ) -> None:
        execution = execution or Execution()
        self.files, self._keep_models = files, keep_models
        self.settings = settings = RunSettings.read(files.settings)
        self.federation, self.evaluation = settings.build_federation_settings(), settings.build_evaluation_settings()
        self._device, self._threads = configure_device(execution), threads
        dtype = getattr(torch, self.federation.dtype)
        clients = clients or load_federated_data(settings, dtype, self._device)
        model, unbound_algorithm = cast(Model, settings.build_model()), cast(Algorithm, settings.build_algorithm())
        build: Callable[[], Network] = functools.partial(
            model.build_initial_network, tuple(clients.x.shape[1:]), clients.classes
        )
        if model.has_frozen_base:
            path, versions = frozen.get_features_path(settings), get_device_and_versions(self._device)
            clients, build = frozen.replace_frozen_base(model, build, clients, path, threads, versions)
        all_clients = drift.add_drift(clients, self.federation)
        new_ids = self.federation.draw_held_out_clients(settings.seed)
        #: Data of all clients except the held-out ones.
        self.clients = all_clients.select_clients({*all_clients.ids} - {*new_ids}) if new_ids else all_clients
        self._has_single_model = model.has_full_weights
        federation = self.federation
        net = FunctionalNetwork(
            lambda: unbound_algorithm.adapt(build()),
            dtype,
            self._device,
            federation.buffers,
            federation.precision,
            rng.derive_entropy(settings.seed, "init/0"),
        )
        self.algorithm = unbound_algorithm.bind(net, federation.exclude_held_out_clients())
        self._stack_width, self._graphs = execution.stack if model.is_stackable else 1, execution.graphs
        with torch.no_grad(), explain_user_errors(self.algorithm):
            server = make_initial_server_state(self._bind_algorithm(0), self.make_initial_model)
            initial_kept_state = make_contiguous(
                make_initial_client_state(self._bind_algorithm(0), server, self.make_initial_model)
            )
        self._storage_device = choose_storage_device(
            self._device, server, initial_kept_state, self.make_initial_model, federation.participants
        )
        self._initial_kept_state = move_state(initial_kept_state, self._storage_device)
        self.checkpoint = Checkpoint(files, self._initial_kept_state, self._storage_device)
        self.executor = self.make_executor(self.algorithm)
        self.new_clients = (
            NewClients(
                self.algorithm.bind(net, federation.exclude_held_out_clients(extra=1)),
                self.algorithm,
                self.evaluation,
                all_clients.select_clients(new_ids),
                self.make_executor,
                self.make_initial_model,
            )
            if new_ids
            else None
        )
        self._code = ComponentCode(model, unbound_algorithm)
        self._initial_score_caches = defaultdict[FederatedData, dict[int, Mapping[TestSet, Score]]](dict)
        self._was_complete: dict[int, bool] = {}  #: whether each round had a marker when this process began it
        self.get_environment()  # hashes the shared code, before Python looks for garbage more often
        garbage.restore_collections()

    def open_in_other_folder(self, files: RunFiles) -> Rounds:
        """Open a copy of these rounds in another folder. It skips the checks before a resume."""
        other = Rounds.__new__(Rounds)
        vars(other).update(vars(self), files=files, _was_complete={})
        other.checkpoint = Checkpoint(files, self._initial_kept_state, self._storage_device)
        return other

    def make_executor(self, algorithm: Algorithm, clients: FederatedData | None = None) -> Executor:
        """Make the run's executor for an algorithm, such as the extended one of a diagnostic, and some clients."""
        stack_width, epochs, is_cuda = self._stack_width, self.evaluation.finetune_epochs, self._device.type == "cuda"
        width = stack_width if isinstance(stack_width, int) else WIDTH_ON_GPU if is_cuda else 1
        if width > 1:
            backend = make_cuda_graph_backend() if self._graphs and is_cuda and algorithm is self.algorithm else None
            return StackExecutor(algorithm, clients or self.clients, width, epochs, backend, self._storage_device)
        return LoopExecutor(algorithm, clients or self.clients, self._threads, epochs, self._storage_device)

    def make_initial_model(self, index: int) -> Tensors:
        """Make the run's ``index``-th initial model.

        Raises
        ------
        SettingsError
            There is only one, because `model.weights` is a file.
        """
        if index and self._has_single_model:
            raise SettingsError(make_single_initial_model_error(self.settings.algorithm["name"]))
        return self.algorithm.net.make_initial_model(rng.derive_entropy(self.settings.seed, f"init/{index}"))

    def _bind_algorithm(self, round_number: int) -> Algorithm:
        """Bind the algorithm to a round, with the run's seed."""
        return self.algorithm.bind_round(round_number, self.settings.seed)

    def select_participants(self, round_number: int) -> list[int]:
        """Select the participants of a round, in ascending order."""
        algorithm, load_server = self._bind_algorithm(round_number), lambda: self.load_server_state(round_number - 1)
        ids = self.clients.ids
        sizes = self.clients.sizes[list(ids)]
        return [ids[i] for i in select_participants(algorithm, self.settings.seed, round_number, sizes, load_server)]

    def load_kept_state(self, client: int, round_number: int) -> State:
        """Load a client's kept state after a round, with the flag that it has not trained yet."""
        first = float(self.checkpoint.read_state_json(round_number)["last"][client] < 0)
        return self.checkpoint.load_kept_state(client, round_number) | {FIRST: torch.tensor(first)}

    def load_server_state(self, round_number: int) -> State:
        """Load the server's state after a round."""
        return self.checkpoint.load_server_state(round_number)

    def make_task(
        self,
        phase: Phase,
        round_number: int,
        ids: Sequence[int],
        tests: Sequence[TestSet] = (),
        participants: Sequence[int] | None = None,
        samples_round: int | None = None,
    ) -> ClientTask:
        """Make the task of a phase, which begins with the states of the previous round."""
        return ClientTask(
            phase,
            round_number,
            ids,
            functools.partial(self.load_kept_state, round_number=round_number - 1),
            self._make_download_function(round_number),
            tests,
            participants,
            metrics=self.evaluation.recorded_metrics,
            samples_round=samples_round,
        )

    def _make_download_function(self, round_number: int) -> Callable[[Sequence[int]], tuple[State, State]]:
        """Make the function that makes the downloads of some clients in a round."""
        server = self.load_server_state(round_number - 1)
        algorithm, get_positions = self._bind_algorithm(round_number), self.clients.get_client_positions
        return functools.partial(make_download, algorithm, server, get_positions)

    def write_initial_round(self) -> None:
        """Write round 0: the server's initial state."""
        with torch.no_grad(), explain_user_errors(self.algorithm):
            server = move_state(
                make_contiguous(make_initial_server_state(self._bind_algorithm(0), self.make_initial_model)),
                self._storage_device,
            )
        last_rounds = [-1] * self.federation.clients
        extra_entries = {
            "observed": {},
            "made_by": [self.get_environment()],
            "trained_on": dict(self.clients.data_checksums),
        }
        self.checkpoint.write_round_states(0, server, [], [], {}, last_rounds, **extra_entries)
        self.checkpoint.mark_round_complete(0, {})

    def _begin_round_step(self, round_number: int) -> None:
        """Remember before a step of a round whether the round was complete when this process began it."""
        self._was_complete.setdefault(round_number, is_stored(self.files.get_round_files(round_number).marker))

    def train(self, round_number: int, ids: Sequence[int]) -> Block:
        """Train some participants."""
        self._begin_round_step(round_number)
        start_time = time.perf_counter()
        test_lists = evaluation.get_test_sets_after_training(self.evaluation, self._is_evaluated(round_number)).values()
        tests: list[TestSet] = sorted({test for test_list in test_lists for test in test_list})
        participants = self.select_participants(round_number)
        block = Block(self.settings.key, round_number, self.get_environment())
        for outcome in self.executor.run(self.make_task("train", round_number, ids, tests, participants)):
            contract.require_same_structure(
                self.algorithm, "keep", outcome.kept_state, self._initial_kept_state, "init_client"
            )
            contract.require_same_structure(
                self.algorithm, "upload", outcome.upload, (block.uploads or [outcome.upload])[0]
            )
            block.outcomes.append(outcome)
        self._code.require_unchanged(self.files.path)  # another job aggregates the block
        block.seconds = time.perf_counter() - start_time
        return block

    def aggregate(self, round_number: int, blocks: Sequence[Block]) -> None:
        """Aggregate the uploads to the server's next state, and write all states.

        Raises
        ------
        ArtifactError
            A block belongs to another run or round, or the blocks have other clients than the round.
        """
        self._reject_foreign_blocks(round_number, blocks)
        self._begin_round_step(round_number)
        start_time, block = time.perf_counter(), Block.from_blocks(blocks, self._storage_device)
        weighted_uploads = self._compute_upload_weights(round_number, block)
        uploads, server = weighted_uploads.finite_uploads, self.load_server_state(round_number - 1)
        if len(uploads):  # otherwise the round changes nothing
            previous_server = server
            with torch.no_grad(), explain_user_errors(self.algorithm):
                numbered = weighted_uploads.renumber_uploads(self.clients.get_client_positions(block.ids))
                server = make_contiguous(aggregate_uploads(self._bind_algorithm(round_number), server, numbered))
            contract.require_same_structure(self.algorithm, "aggregate", server, previous_server, "init")
        hashes = self._write_participants_and_accuracies(round_number, weighted_uploads)
        hashes |= self._write_exchanged_matrices(round_number, server, uploads)
        made_by = [block.made_by for block in blocks]
        made_by = [entry for index, entry in enumerate(made_by) if entry not in made_by[:index]]
        environment = self.get_environment()
        if all(
            (entry["shared"], entry["device"]) != (environment["shared"], environment["device"]) for entry in made_by
        ):
            made_by.append(environment)  # blocks were made in another environment than the server's state
        with call_server_hooks(self.algorithm, server):
            metric_values = contract.validate_metrics(self.algorithm, self.algorithm.metrics(server))
        self._code.require_unchanged(self.files.path)
        self.checkpoint.write_round_states(
            round_number,
            server,
            list(uploads.ids),
            weighted_uploads.finite_kept_states,
            hashes,
            observed=metric_values,
            made_by=made_by,
            trained_on=dict(self.clients.data_checksums),
        )
        epoch_seconds = statistics.fmean(
            outcome.seconds / self._count_epochs_in_round(outcome.client, round_number) for outcome in block.outcomes
        )
        seconds = {"train": block.seconds, "epoch": epoch_seconds, "aggregate": time.perf_counter() - start_time}
        self._record_times(round_number, **seconds)

    def _count_epochs_in_round(self, client: int, round_number: int) -> float:
        """Count the epochs of a client in a round, which may be a fraction."""
        steps = count_client_steps(self._bind_algorithm(round_number), self.clients, client, round_number)
        return self.federation.count_epochs(int(self.clients.sizes[client]), steps)

    def _reject_foreign_blocks(self, round_number: int, blocks: Sequence[Block]) -> None:
        """Reject blocks of another run or round."""
        for index, block in enumerate(blocks):
            if (block.run, block.round) != (self.settings.key, round_number):
                path = self.files.get_round_files(round_number).get_block_uploads_path(index)
                raise ArtifactError(
                    f"{path} belongs to round {block.round} of run {block.run} instead of round {round_number} of run "
                    f"{self.settings.key}. Delete it and run again."
                )

    def _compute_upload_weights(self, round_number: int, block: Block) -> WeightedUploads:
        """Compute the weights of a round's uploads."""
        if block.ids != (participants := self.select_participants(round_number)):
            path = self.files.get_round_files(round_number).path
            raise ArtifactError(
                f"{path}: its blocks contain the clients {block.ids} instead of {participants}. Delete the folder and "
                "run again."
            )
        is_finite_flags = [is_finite((outcome.upload, outcome.kept_state)) for outcome in block.outcomes]
        finite_mask = np.array(torch.stack(is_finite_flags).tolist())
        weights = compute_aggregation_weights(self.federation, self.clients.sizes[block.ids])
        return WeightedUploads(block, finite_mask, finite_mask * weights)

    def _write_participants_and_accuracies(
        self, round_number: int, weighted_uploads: WeightedUploads
    ) -> dict[str, str]:
        """Write the participants and their accuracies after training. Return the files' hashes."""
        files, block = self.files.get_round_files(round_number), weighted_uploads.block
        total_weight = float(weighted_uploads.weights.sum())
        participants = {
            "client": pa.array(block.ids, pa.int32()),
            "samples": pa.array(self.clients.sizes[block.ids], pa.int64()),
            "finite": pa.array(weighted_uploads.finite_mask, pa.bool_()),
            "weight": pa.array(weighted_uploads.weights / max(total_weight, 1), pa.float64()),
            "bytes_down": pa.array([outcome.bytes_down for outcome in block.outcomes], pa.int64()),
            "bytes_up": pa.array([outcome.bytes_up for outcome in block.outcomes], pa.int64()),
        }
        hashes = {files.participants.name: write_parquet(files.participants, pa.table(participants))}
        # The trained accuracies include failed updates, because omitting them would flatter the result.
        scores_by_client = {outcome.client: outcome.scores for outcome in block.outcomes}
        scores = {
            "trained": scores_by_client,
            "kept": dict(itertools.compress(scores_by_client.items(), weighted_uploads.finite_mask)),
        }
        for model, tests in evaluation.get_test_sets_after_training(
            self.evaluation, self._is_evaluated(round_number)
        ).items():
            model_scores = {
                client: {test: client_scores[test] for test in tests} for client, client_scores in scores[model].items()
            }
            path = {"trained": files.trained_accuracies, "kept": files.kept_accuracies}[model]
            table = evaluation.make_metrics_table(self.evaluation, round_number, model, model_scores)
            hashes[path.name] = write_parquet(path, table)
        return hashes

    def _write_exchanged_matrices(self, round_number: int, server: State, uploads: Uploads) -> dict[str, str]:
        """Write exchanged matrices, if any. Return the file's hash."""
        states = {-1: server, **{client: upload for client, _, upload in uploads}}
        with call_server_hooks(self.algorithm, server):
            matrices = {
                client: contract.validate_matrices(self.algorithm, self.algorithm.matrices(state))
                for client, state in states.items()
            }
        if not matrices[-1]:
            return {}
        path = self.files.get_round_files(round_number).exchanged_matrices
        return {
            path.name: write_parquet(path, evaluation.make_class_matrices_table(round_number, "exchanged", matrices))
        }

    def evaluate(self, round_number: int) -> None:
        """Evaluate a round and mark it as complete."""
        self.checkpoint.read_state_json(round_number)  # requires the round's states
        self._begin_round_step(round_number)
        self._require_same_data(round_number)
        start_time, files, hashes = time.perf_counter(), self.files.get_round_files(round_number), {}
        if self._is_evaluated(round_number):
            server = self.load_server_state(round_number)
            get_kept_state = functools.partial(self.load_kept_state, round_number=round_number)
            result = evaluation.evaluate_round(
                self.evaluation,
                self.executor,
                self.algorithm,
                self.clients,
                server,
                self._make_download_function(round_number + 1),
                get_kept_state,
                round_number,
                next_participants=self.select_participants(round_number + 1),
            )
            metrics = result.metrics
            if self.new_clients:
                new_metrics = self.new_clients.evaluate(server, get_kept_state, round_number)
                metrics = pa.concat_tables([metrics, new_metrics])
            if evaluation.get_test_sets(self.evaluation, "kept"):
                last = self.checkpoint.read_state_json(round_number)["last"]
                last_rounds = {client: last[client] for client in self.clients.ids}
                kept_table = evaluation.make_kept_model_table(
                    self.evaluation,
                    round_number,
                    self.clients,
                    last_rounds,
                    self._read_kept_accuracies,
                    functools.partial(self._score_initial_models, round_number),
                )
                metrics = pa.concat_tables([metrics, kept_table])
            hashes[files.metrics.name] = write_parquet(files.metrics, metrics)
            if result.matrices is not None:
                hashes[files.matrices.name] = write_parquet(files.matrices, result.matrices)
        self._code.require_unchanged(self.files.path)
        self._record_times(round_number, evaluate=time.perf_counter() - start_time)
        self.checkpoint.mark_round_complete(round_number, hashes)

    def _record_times(self, round_number: int, **seconds: float) -> None:
        """Write the seconds of a round's steps, unless another process has completed the round."""
        files = self.files.get_round_files(round_number)
        if self._was_complete.get(round_number) or not is_stored(files.marker):
            write_json(files.times, self.checkpoint.read_times(round_number) | seconds)

    def _read_kept_accuracies(self, round_number: int) -> pa.Table:
        """Read the recorded accuracies of a round's participants for the kept protocols."""
        path = self.files.get_round_files(round_number).kept_accuracies
        return read_parquet(path, self.checkpoint.read_state_json(round_number)["sha256"][path.name])

    def _score_initial_models(
        self, round_number: int, ids: Sequence[int], tests: Sequence[TestSet]
    ) -> dict[int, Mapping[TestSet, Score]]:
        """Score the initial models of clients on their samples of a round, each once per process."""
        cache = self._initial_score_caches[self.clients.select_round_samples(round_number)]
        if missing_ids := [client for client in ids if client not in cache]:
            task = self.make_task("begin", 1, missing_ids, tests, None, round_number)
            cache |= {outcome.client: outcome.scores for outcome in self.executor.run(task)}
        return {client: cache[client] for client in ids}

    def run_round(self, round_number: int) -> None:
        """Run a complete round in this process."""
        self.aggregate(round_number, [self.train(round_number, self.select_participants(round_number))])
        self.evaluate(round_number)

    def _require_same_data(self, round_number: int) -> None:
        """Require that round 0 and this round were computed with the current data."""
        checksums = self.clients.data_checksums
        for earlier_round in (0, round_number):
            if not is_stored(self.files.get_round_files(earlier_round).complete_states_marker):
                continue
            recorded_checksums = self.checkpoint.read_state_json(earlier_round).get("trained_on", {})
            for name in checksums:
                if recorded_checksums.get(name) != checksums[name]:
                    paths = {**get_data_paths(self.settings), "features": frozen.get_features_path(self.settings)}
                    raise ArtifactError(
                        f"{self.files.path}: {paths[name]} has changed since round {earlier_round}. The content of "
                        f"the {name} has the SHA-256 {checksums[name]} instead of "
                        f"{recorded_checksums.get(name, '(not recorded)')}. Restore it, for example by `dvc checkout`, "
                        f"or delete {self.files.path} and type `fedpipe run` to recompute the run."
                    )

    def _is_evaluated(self, round_number: int) -> bool:
        return round_number % self.evaluation.every == 0

    def get_environment(self) -> dict[str, Any]:
        """Get the environment on which bits depend: executor, device, versions."""
        return {"executor": self.executor.name, **get_device_and_versions(self._device)}
