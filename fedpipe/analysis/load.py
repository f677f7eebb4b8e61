"""A study's results in Python: tidy frames, and models as torch modules with their provenance."""

from __future__ import annotations

import contextlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpipe.analysis import stored_files
from fedpipe.analysis.cells import find_cell
from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import RESULTS, read_parquet, read_recorded_sha256, table_to_frame
from fedpipe.core.storage.layout import PARAMS
from fedpipe.core.yaml_text import read_generated_yaml
from fedpipe.planning.code_changes import read_round_environments
from fedpipe.planning.plan import Cell, Plan
from fedpipe.report import results, statistics, tuning
from fedpipe.report.data import StudyData

if TYPE_CHECKING:
    from torch import Tensor

    from fedpipe.algorithms.batch import State
    from fedpipe.analysis.models import FittedNetwork
    from fedpipe.engine.run import Run


class Results:
    """Results of a study, from :func:`fedpipe.load`.

    Every frame is tidy: a row is one observation. Frames of runs begin with the same columns: ``algorithm``, one column
    per name of the study's grid (as text, empty if it does not concern the algorithm), ``seed`` and ``key``. Key and
    algorithm identify a row of :attr:`provenance`. A frame is read at its first use, and every file is checked against
    its recorded SHA-256.

    Parameters
    ----------
    folder
        The folder of params.yaml. Paths in the plan are relative to it.
    plan
        The study's plan.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        plan.require_finished_search()
        self.folder, self.plan = folder, plan
        self._data = StudyData(plan)

    def __repr__(self) -> str:
        algorithms, seeds = ", ".join(self.plan.algorithms), ", ".join(map(str, self.plan.seeds))
        return f"<results of {self.folder / self.plan.params}: {algorithms}; seeds {seeds}>"

    # -- frames ------------------------------------------------------------------------------------------------------

    @cached_property
    def table(self) -> pd.DataFrame:
        """The result table, as in ``results.csv``: means and deviations over seeds, in percent (NLL in nats)."""
        with contextlib.chdir(self.folder):
            return self._data.score_table

    @cached_property
    def accuracies(self) -> pd.DataFrame:
        """Accuracy in [0, 1] by ``protocol``, ``round`` and ``average`` (``sample``, ``client``, ``worst``)."""
        with contextlib.chdir(self.folder):
            return self._data.accuracies

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The same for every ``metric`` of the study, in column ``score``. NLL is in nats."""
        with contextlib.chdir(self.folder):
            return self._data.scores

    @cached_property
    def clients(self) -> pd.DataFrame:
        """Models on test sets: ``protocol``, ``round``, ``client``, ``correct``, ``total``, ``loss``, ``accuracy``.

        ``client_name`` is the client's value in the partition's column, such as its writer, or its number. Client -1
        is a model of the server on the global test set. A client without test samples has no accuracy. Arrays
        by class: ``hits`` (correctly classified), ``support`` (present), and ``predicted``. Further metrics of the
        study have ``auc``, and sums by bin of the confidence: ``bin_samples``, ``bin_hits`` and ``bin_confidences``.
        """
        with contextlib.chdir(self.folder):
            metrics, client_names = self._data.metrics, self._data.name_clients(self._data.metrics)
        accuracy = metrics["correct"] / metrics["total"].where(metrics["total"] > 0)
        return metrics.assign(accuracy=accuracy, client_name=client_names)

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """By ``round``: ``participants``, updates ``left_out``, mean bytes of one (``bytes_down``, ``bytes_up``).

        Further columns are values that the method records.
        """
        with contextlib.chdir(self.folder):
            return self._data.round_summaries

    @cached_property
    def times(self) -> pd.DataFrame:
        """Seconds by ``round``: ``train``, ``aggregate``, ``evaluate``. They depend on the machine."""
        with contextlib.chdir(self.folder):
            return self._data.round_times

    @cached_property
    def draws(self) -> pd.DataFrame:
        """The draws of `tune` in each rung: values, ``rank``, ``score`` (`fedpipe.report.tuning`)."""
        with contextlib.chdir(self.folder):
            return tuning.build_draws_frame(self.plan)

    @cached_property
    def matrices(self) -> pd.DataFrame:
        """Entries (``row``, ``column``, ``value``) of a ``matrix`` by ``round``, ``source``, ``client`` (-1: server).

        Source ``measured``: the global model on the global test set. ``exchanged``: what an algorithm sent.
        """
        with contextlib.chdir(self.folder):
            merged_frame = self._data.concatenate_cell_frames(
                lambda cell: results.read_merged_frame(cell.merged_files.matrices)
            )
        if "matrix" not in merged_frame:  # no method has a global model, or exchanges any
            columns = ["round", "source", "client", "matrix", "row", "column", "value"]
            return merged_frame.reindex(columns=[*merged_frame.columns, *columns])
        keys = [name for name in merged_frame.columns if not name.isdecimal()]
        long_frame = merged_frame.melt(id_vars=keys, var_name="column", value_name="value").rename(
            columns={"class": "row"}
        )
        long_frame = long_frame.astype({"column": int}).sort_values(
            [*long_frame.columns.drop(["row", "column", "value"]), "row", "column"]
        )
        return long_frame.dropna(subset=["value"]).reset_index(drop=True)

    @cached_property
    def partitions(self) -> pd.DataFrame:
        """Samples of clients: ``partition``, ``client``, ``sample`` (index in the data set), ``split`` and class.

        Client -1 is for samples that are only in the global test set. ``label`` is the class, and ``class_name`` and
        ``client_name`` are names. :attr:`provenance` has the partition of each run.
        """
        frames: list[pd.DataFrame] = []
        with contextlib.chdir(self.folder):
            for run in {run.partition: run for run in self.plan.runs}.values():
                path = layout.get_assignment_path(run.partition)
                frame = table_to_frame(read_parquet(path, read_recorded_sha256(path)))
                frame.insert(0, "partition", run.partition)
                names = dict(enumerate(stored_files.get_class_names(run.dataset)))
                client_names = frame["client"].map(self._data.client_names_by_partition[run.partition])
                frames.append(frame.assign(class_name=frame["label"].map(names), client_name=client_names))
        return pd.concat(frames, ignore_index=True)

    @cached_property
    def provenance(self) -> pd.DataFrame:
        """Provenance of each run: rounds, folder, partition, data, the SHA-256 of its numbers, versions.

        The columns are ``partition_key`` and ``dataset_name`` if the grid varies these complete sections.
        """

        def build_provenance_row(cell: Cell) -> dict[str, Any]:
            run = self.plan.get_run(cell)
            made_by = results.join_environments(self._data.get_run_times(cell)["made_by"])
            grid = self.plan.grid
            facts = {
                "rounds": cell.rounds,
                "run": str(cell.files.path),
                "partition_key" if "partition" in grid else "partition": run.partition,
                "dataset_name" if "dataset" in grid else "dataset": run.dataset,
                "sha256": cell.merged_files.read_recorded_sha256(cell.merged_files.metrics),
            }
            return facts | made_by

        with contextlib.chdir(self.folder):
            return self._data.build_frame_with_cell_rows(build_provenance_row)

    # -- statistics --------------------------------------------------------------------------------------------------

    @cached_property
    def fairness(self) -> pd.DataFrame:
        """``mean``, ``std``, ``worst``, ``lowest`` of clients (`fedpipe.report.statistics.compute_fairness`)."""
        return statistics.compute_fairness(self.clients, self._run_key_columns)

    def to_target(self, accuracy: float, protocol: str | None = None) -> pd.DataFrame:
        """Cost of reaching an accuracy: one row per run, with ``round`` and ``bytes`` (NaN if it was not reached).

        Parameters
        ----------
        accuracy
            In (0, 1], over all test samples. The first measured round with this accuracy counts.
        protocol
            By default the study's first.

        Raises
        ------
        SettingsError
            The accuracy is not a fraction, or the study does not measure that protocol.
        """
        protocol = self.plan.protocols[0] if protocol is None else protocol
        if not 0 < accuracy <= 1:
            raise SettingsError(f"accuracy: {accuracy} can't be used. Use a fraction, such as 0.7 for 70 %.")
        protocol_accuracies = self.accuracies[
            (self.accuracies["average"] == "sample") & (self.accuracies["protocol"] == protocol)
        ]
        if protocol_accuracies.empty:
            measured_protocols = list(dict.fromkeys(self.accuracies["protocol"]))
            raise SettingsError(
                f"protocol: '{protocol}' is not measured in this study. {suggest_name(protocol, measured_protocols)}"
            )
        return statistics.compute_cost_to_target(
            protocol_accuracies, self.traffic, self._run_key_columns, accuracy
        ).drop(columns="protocol")

    @cached_property
    def statistics(self) -> pd.DataFrame:
        """All statistics, as in ``statistics.csv``: means and deviations over seeds, by protocol."""
        with contextlib.chdir(self.folder):
            return self._data.statistics

    @property
    def _run_key_columns(self) -> list[str]:
        return statistics.get_run_key_columns(self.plan)

    # -- single runs -------------------------------------------------------------------------------------------------

    def settings(self, algorithm: str, seed: int | None = None, **grid: Any) -> dict[str, Any]:
        """All settings that a run depends on, as in its ``run.yaml``.

        Parameters
        ----------
        algorithm, seed
            The run. By default, the study's first seed.
        grid
            Its point of the grid, by the last part of each name, such as ``alpha=0.1``, or by the full name, such as
            ``**{"partition.alpha": 0.1}``. The texts in frames can be used, too.
        """
        with contextlib.chdir(self.folder):
            run_settings: dict[str, Any] = read_generated_yaml(
                find_cell(self.plan, algorithm, seed, grid).files.settings
            )
        return run_settings

    def model(
        self,
        algorithm: str,
        seed: int | None = None,
        *,
        client: int | str | None = None,
        round: int | None = None,
        **grid: Any,
    ) -> FittedNetwork:
        """A model as a torch module in evaluation mode, with the weights after a round.

        ``class_names`` are the names of its outputs, and ``provenance`` is the origin of its weights. Use it with
        inputs from :meth:`test`.

        Parameters
        ----------
        algorithm, seed, grid
            The run, as in :meth:`settings`.
        client
            Load the personal model of this client (number or name), after it received the server's state and before
            local training. By default, the global model.
        round
            The model after this round. By default, the last.

        Raises
        ------
        SettingsError
            The run, client or round does not exist, or the method has no such model.
        ArtifactError
            The state of that round is not stored (`artifacts.keep_models`), or is damaged.
        """
        from fedpipe.analysis import models

        with contextlib.chdir(self.folder):
            cell, number = self._find_cell_and_round(algorithm, seed, grid, round)
            stored_files.require_stored_state(cell.files, number)
            run = self._open_run(cell)
            client = None if client is None else self._get_client_number(cell, client)
            if client is not None:
                stored_files.require_stored_state(cell.files, number, client)
            names = stored_files.get_class_names(self.plan.get_run(cell).dataset)
            state = cell.files.get_round_files(number)
            provenance = {
                "params": str(self.folder / self.plan.params),
                "algorithm": cell.algorithm,
                "grid": cell.grid,
                "seed": cell.seed,
                "key": cell.key,
                "round": number,
                "client": client,
                "state": str(state.server_state),
                "sha256": layout.read_round_hashes(state, state.complete_states_marker)[state.server_state.name],
                "made_by": read_round_environments(state),
            }
            return models.load_model(run, number, client, names, provenance)

    def state(
        self,
        algorithm: str,
        seed: int | None = None,
        *,
        client: int | str | None = None,
        round: int | None = None,
        **grid: Any,
    ) -> State:
        """The stored state after a round: the server's state, or the state that a client keeps until it trains again.

        A dict of named parts, each a tensor or a dict of tensors, as the method's `init` and `keep` return them
        (``{"model": {"body.1.weight": ...}}``). It is empty if clients keep no state. Tensors are on the CPU. A client
        that has not trained yet has the state of `init_client`. Uploads are not stored.

        Parameters
        ----------
        algorithm, seed, grid
            The run, as in :meth:`settings`.
        client
            Load the state of this client (number or name). By default, the server's.
        round
            The state after this round, or 0 for the initial state. By default, the last.

        Raises
        ------
        SettingsError
            The run, client or round does not exist.
        ArtifactError
            The state is not stored (`artifacts.keep_models`), or is damaged.
        """
        with contextlib.chdir(self.folder):
            cell, number = self._find_cell_and_round(algorithm, seed, grid, round)
            run = self._open_run(cell)
            client = None if client is None else self._get_client_number(cell, client)
            stored_files.require_stored_state(cell.files, number, client)
            return run.load_server_state(number) if client is None else run.checkpoint.load_kept_state(client, number)

    def participants(self, algorithm: str, seed: int | None = None, *, round: int, **grid: Any) -> list[int]:
        """The participants of a round in ascending order, including those whose update was left out.

        Parameters
        ----------
        algorithm, seed, grid
            The run, as in :meth:`settings`.
        round
            Number of the round, from 1.

        Raises
        ------
        SettingsError
            The run or round does not exist.
        ArtifactError
            The method selects participants by a server state that is not stored (`artifacts.keep_models`).
        """
        with contextlib.chdir(self.folder):
            cell, number = self._find_cell_and_round(algorithm, seed, grid, round, first=1)
            return self._open_run(cell).select_participants(number)

    def batches(
        self,
        algorithm: str,
        seed: int | None = None,
        *,
        client: int | str,
        round: int,
        stream: str = "batches",
        **grid: Any,
    ) -> list[list[int]]:
        """The samples of each training step of a client in a round, as rows of :meth:`samples`.

        With them you can compare a method with your own training loop. Each client has batches in each round, also if
        it does not participate. The rows are those of the data set, and of the column ``sample`` of
        :attr:`partitions`, except with ``dataset.feature_noise``, ``label_noise`` or ``federation.drift``. With these,
        clients have their own rows, in another order.

        Parameters
        ----------
        algorithm, seed, grid
            The run, as in :meth:`settings`.
        client, round
            The client (number or name), and the number of the round, from 1.
        stream
            The ``stream`` of the Train passes. By default that of the local training.

        Raises
        ------
        SettingsError
            The run, client, round or stream does not exist.
        """
        from fedpipe.analysis import models

        with contextlib.chdir(self.folder):
            cell, number = self._find_cell_and_round(algorithm, seed, grid, round, first=1)
            run = self._open_run(cell)
            return models.list_batches(run, self._get_client_number(cell, client), number, stream)

    def samples(self, algorithm: str, seed: int | None = None, **grid: Any) -> tuple[Tensor, Tensor]:
        """All samples of the run, without augmentation: inputs, shape ``(n, *shape)``, and classes, shape ``(n,)``.

        They have the noise of ``dataset.feature_noise`` and ``label_noise``. With ``federation.drift``, the last rows
        are those of the new concept. :meth:`batches` has rows of them.
        """
        from fedpipe.analysis import models

        with contextlib.chdir(self.folder):
            clients = models.load_clients(find_cell(self.plan, algorithm, seed, grid).files)
            return clients.gather_samples(np.arange(len(clients.y)))

    def test(
        self,
        algorithm: str,
        seed: int | None = None,
        *,
        client: int | str | None = None,
        round: int | None = None,
        **grid: Any,
    ) -> tuple[Tensor, Tensor]:
        """Inputs and classes of the global test set, or of a client's local test set.

        With ``federation.drift``, the samples of a client depend on the ``round``, which is the last by default.
        """
        from fedpipe.analysis import models

        with contextlib.chdir(self.folder):
            cell, number = self._find_cell_and_round(algorithm, seed, grid, round)
            clients = models.load_clients(cell.files)
            if client is None:
                return clients.gather_samples(clients.global_test)
            rows = clients.select_round_samples(number).test[self._get_client_number(cell, client)]
            return clients.gather_samples(rows)

    def _get_client_number(self, cell: Cell, client: int | str) -> int:
        partition = self.plan.get_run(cell).partition
        return stored_files.get_client_number(client, self._data.assignments[partition].names)

    # -- finding runs ------------------------------------------------------------------------------------------------

    def _find_cell_and_round(
        self, algorithm: str, seed: int | None, grid: dict[str, Any], round: int | None, first: int = 0
    ) -> tuple[Cell, int]:
        """Find a cell and a number of its rounds, at least ``first``. By default this is the last round."""
        cell = find_cell(self.plan, algorithm, seed, grid)
        number = cell.rounds if round is None else round
        if not first <= number <= cell.rounds:
            raise SettingsError(
                f"round: {number} is not a round of this run. Use a number from {first} to {cell.rounds}."
            )
        return cell, number

    def _open_run(self, cell: Cell) -> Run:
        from fedpipe.analysis import models

        return models.open_run_on_cpu(cell.files)


def load(path: str | Path = PARAMS) -> Results:
    """See :func:`fedpipe.load`."""
    absolute_path = Path(path).absolute()
    folders = [ancestor for ancestor in (absolute_path, *absolute_path.parents) if (ancestor / PARAMS).is_file()]
    if not folders:
        raise SettingsError(
            f"{path}: params.yaml is not in this folder or a folder above it. Use the folder of a study."
        )
    # A study in a subfolder may be named params.yaml, too.
    folder = next((ancestor for ancestor in folders if (ancestor / "Snakefile").is_file()), folders[0])
    with contextlib.chdir(folder):
        relative_path = absolute_path.relative_to(folder)
        if relative_path.parts[:1] == RESULTS.parts:
            if not absolute_path.is_dir():
                raise SettingsError(
                    f"{path}: the folder does not exist. Type `fedpipe run` to compute a study's results."
                )
            plan = Plan.read(relative_path / "plan.json")
        else:
            plan = stored_files.read_current_plan(PARAMS if relative_path == Path() else relative_path)
        return Results(folder, plan)
