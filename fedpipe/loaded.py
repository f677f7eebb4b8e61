"""A study's results in Python: tidy frames, and models as torch modules, each with what it was made of."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from fedpipe import artifacts, pins
from fedpipe.artifacts import PARAMS, RESULTS, RunFiles, StudyFiles
from fedpipe.errors import ArtifactError, SettingsError, nearest
from fedpipe.planned import Cell, Plan
from fedpipe.report import results, statistics, tables

if TYPE_CHECKING:
    from torch import Tensor

    from fedpipe.algorithms.base import State
    from fedpipe.engine.clients import Clients
    from fedpipe.engine.run import Run
    from fedpipe.fitted import Fitted


class Results:
    """A study's results; :func:`fedpipe.load` makes it.

    Every frame is tidy: a row is one observation. Those of runs begin with the same columns: ``algorithm``, one a name
    of the study's grid (as text, empty where it does not concern the algorithm), ``seed`` and ``key``. By its key, and
    the algorithm, a row is found again in :attr:`provenance`. A frame is read when it is first asked for, and every
    file is checked against its recorded SHA-256 on the way.

    Parameters
    ----------
    folder
        The clone: the folder of params.yaml.
    plan
        The study's plan.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan

    def __repr__(self) -> str:
        listed, seeds = ", ".join(self.plan.algorithms), ", ".join(map(str, self.plan.seeds))
        return f"<results of {self.folder / self.plan.params}: {listed}; seeds {seeds}>"

    # -- frames ------------------------------------------------------------------------------------------------------

    @cached_property
    def table(self) -> pd.DataFrame:
        """The result table as ``results.csv`` holds it: means and deviations over seeds, in percent."""
        with self._here():
            return tables.table(self.plan)

    @cached_property
    def accuracies(self) -> pd.DataFrame:
        """Accuracy in [0, 1] by ``protocol``, ``round`` and ``average`` (``sample``, ``client``, ``worst``)."""
        with self._here():
            return results.load(self.plan)

    @cached_property
    def clients(self) -> pd.DataFrame:
        """Models on test sets: ``protocol``, ``round``, ``client``, ``correct``, ``total``, ``loss``, ``accuracy``.

        Client -1 is a model of the server on the global test set. A client without test samples has no accuracy. By
        class, ``hits`` were told right, ``support`` are there, and ``predicted`` were told to be of it: arrays.
        """
        with self._here():
            found = results.metrics(self.plan)
        return found.assign(accuracy=found["correct"] / found["total"].where(found["total"] > 0))

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """By ``round``: ``participants``, updates ``left_out``, mean bytes of one (``bytes_down``, ``bytes_up``).

        Further columns are what a method recorded of itself.
        """
        with self._here():
            return results.rounds(self.plan)

    @cached_property
    def times(self) -> pd.DataFrame:
        """Seconds by ``round``: ``train``, ``aggregate``, ``evaluate``. They tell of the machine, not of the method."""
        with self._here():
            return self._frames(lambda cell: pd.DataFrame(results.seconds(cell)["rounds"]))

    @cached_property
    def matrices(self) -> pd.DataFrame:
        """Entries (``row``, ``column``, ``value``) of a ``matrix`` by ``round``, ``source``, ``client`` (-1: server).

        Source ``measured`` is of the global model on the global test set, ``exchanged`` what an algorithm sent.
        """
        found = self._joined("matrices")
        if "matrix" not in found:  # no method has a global model, or exchanges any
            columns = ["round", "source", "client", "matrix", "row", "column", "value"]
            return found.reindex(columns=[*found.columns, *columns])
        keys = [name for name in found.columns if not name.isdecimal()]
        long = found.melt(id_vars=keys, var_name="column", value_name="value").rename(columns={"class": "row"})
        long = long.astype({"column": int}).sort_values(
            [*long.columns.drop(["row", "column", "value"]), "row", "column"]
        )
        made: pd.DataFrame = long.dropna(subset=["value"]).reset_index(drop=True)
        return made

    @cached_property
    def partitions(self) -> pd.DataFrame:
        """Who owns which ``sample`` (its place in the data set) for which ``split``, by ``partition`` and ``client``.

        Client -1: nobody's, a sample of the global test set alone. ``label`` is its class, ``class_name`` what that is
        called. :attr:`provenance` tells which runs have which partition.
        """
        frames: list[pd.DataFrame] = []
        with self._here():
            for run in {run.partition: run for run in self.plan.runs}.values():
                path = artifacts.assignment_file(run.partition)
                frame = artifacts.frame(artifacts.read_parquet(path, artifacts.manifest(path)))
                frame.insert(0, "partition", run.partition)
                names = dict(enumerate(_class_names(run.dataset)))
                frames.append(frame.assign(class_name=frame["label"].map(names)))
        joined: pd.DataFrame = pd.concat(frames, ignore_index=True)
        return joined

    @cached_property
    def provenance(self) -> pd.DataFrame:
        """What each run was made of and by: rounds, folder, partition, data, the SHA-256 of its numbers, versions."""

        def of(cell: Cell) -> pd.DataFrame:
            (run,) = [run for run in self.plan.runs if run.serves(cell)]
            makers = results.seconds(cell)["made_by"]
            names = dict.fromkeys(name for maker in makers for name in maker)
            made_by = {
                name: "; ".join(dict.fromkeys(str(maker[name]) for maker in makers if name in maker)) for name in names
            }
            facts = {
                "rounds": cell.rounds,
                "run": str(cell.files.path),
                "partition": run.partition,
                "dataset": run.dataset,
                "sha256": cell.joined.sha256(cell.joined.metrics),
            }
            return pd.DataFrame([facts | made_by])

        with self._here():
            return self._frames(of)

    # -- statistics --------------------------------------------------------------------------------------------------

    @cached_property
    def fairness(self) -> pd.DataFrame:
        """See :func:`fedpipe.report.statistics.fairness`: ``mean``, ``std``, ``worst``, ``lowest`` of ``clients``."""
        return statistics.fairness(self.clients, self._keys)

    def to_target(self, accuracy: float, protocol: str | None = None) -> pd.DataFrame:
        """What it took to reach an accuracy: a row a run, with ``round`` and ``bytes`` (NaN where it never did).

        Parameters
        ----------
        accuracy
            In (0, 1], over all test samples; reached in the first round measured that has it.
        protocol
            By default the study's first.

        Raises
        ------
        SettingsError
            The accuracy is no share, or nothing is measured by that protocol.
        """
        protocol = self.plan.protocols[0] if protocol is None else protocol
        if not 0 < accuracy <= 1:
            raise SettingsError(f"accuracy: {accuracy} can't be used; it should be a share, as 0.7 for 70 %.")
        found = self.accuracies[(self.accuracies["average"] == "sample") & (self.accuracies["protocol"] == protocol)]
        if found.empty:
            measured = list(dict.fromkeys(self.accuracies["protocol"]))
            raise SettingsError(f"protocol: nothing is measured by '{protocol}'; {nearest(protocol, measured)}")
        return statistics.to_target(found, self.traffic, self._keys, accuracy).drop(columns="protocol")

    @cached_property
    def statistics(self) -> pd.DataFrame:
        """All statistics as ``statistics.csv`` holds them: means and deviations over seeds, by protocol."""
        with self._here():
            return statistics.table(self.plan)

    @property
    def _keys(self) -> list[str]:
        return statistics.keys(self.plan)

    # -- single runs -------------------------------------------------------------------------------------------------

    def settings(self, algorithm: str, seed: int | None = None, **grid: Any) -> dict[str, Any]:
        """All that a run's bits depend on, as its ``run.yaml`` holds it.

        Parameters
        ----------
        algorithm, seed
            Which run; without a seed, that of the study's first.
        grid
            Its point of the grid, by the last part of each name, as ``alpha=0.1``, or by the name itself, as
            ``**{"partition.alpha": 0.1}``.
        """
        with self._here():
            found: dict[str, Any] = yaml.safe_load(self._cell(algorithm, seed, grid).files.settings.read_text())
        return found

    def model(
        self,
        algorithm: str,
        seed: int | None = None,
        *,
        client: int | None = None,
        round: int | None = None,
        **grid: Any,
    ) -> Fitted:
        """A model as a torch module in evaluation mode, with the weights that it had after a round.

        Its ``class_names`` are those of its outputs, its ``provenance`` is where the weights are from. It takes inputs
        as :meth:`test` gives them.

        Parameters
        ----------
        algorithm, seed, grid
            Which run; see :meth:`settings`.
        client
            Whose personal model: after it received the server's state, before local training. Without it, the global
            model.
        round
            After which round; by default the last.

        Raises
        ------
        SettingsError
            There is no such run, client or round, or the method has no such model.
        ArtifactError
            The state of that round was not kept (`artifacts.keep_models`), or is damaged.
        """
        from fedpipe import fitted

        with self._here():
            cell, number = self._round(algorithm, seed, grid, round)
            _refuse_pruned(cell.files, number)
            run = self._open(cell)
            if client is not None:
                _refuse_unknown(client, len(run.clients))
                _refuse_pruned(cell.files, number, client)
            names = _class_names(self._dataset(cell))
            state = cell.files.round(number)
            provenance = {
                "params": str(self.folder / self.plan.params),
                "algorithm": cell.algorithm,
                "grid": cell.grid,
                "seed": cell.seed,
                "key": cell.key,
                "round": number,
                "client": client,
                "state": str(state.server),
                "sha256": artifacts.hashes(state, state.state)[state.server.name],
                "made_by": artifacts.read_json(state.state)["made_by"],
            }
            return fitted.model(run, number, client, names, provenance)

    def state(
        self,
        algorithm: str,
        seed: int | None = None,
        *,
        client: int | None = None,
        round: int | None = None,
        **grid: Any,
    ) -> State:
        """What is stored after a round: the server's state, or what a client keeps until it trains again.

        A dict of named parts, each a tensor or a dict of tensors, as the method's `init` and `keep` give them
        (``{"model": {"body.1.weight": ...}}``); empty for a client that keeps nothing. Tensors are on the CPU. A client
        that has not trained yet keeps what `init_client` gave it. What clients send is not stored.

        Parameters
        ----------
        algorithm, seed, grid
            Which run; see :meth:`settings`.
        client
            Whose state; without it, the server's.
        round
            After which round, 0 being before the first; by default the last.

        Raises
        ------
        SettingsError
            There is no such run, client or round.
        ArtifactError
            The state was not kept (`artifacts.keep_models`), or is damaged.
        """
        with self._here():
            cell, number = self._round(algorithm, seed, grid, round)
            run = self._open(cell)
            if client is not None:
                _refuse_unknown(client, len(run.clients))
            _refuse_pruned(cell.files, number, client)
            return run.server(number) if client is None else run.kept(client, number)

    def test(
        self, algorithm: str, seed: int | None = None, *, client: int | None = None, **grid: Any
    ) -> tuple[Tensor, Tensor]:
        """Inputs, as the run's models take them, and classes of the global test set, or of a client's own."""
        with self._here():
            clients: Clients = self._open(self._cell(algorithm, seed, grid)).clients
            if client is not None:
                _refuse_unknown(client, len(clients))
            return clients.gather(clients.global_test if client is None else clients.test[client])

    # -- how they are found ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """While the study's folder is the current one: all of its paths are relative to that."""
        with contextlib.chdir(self.folder):
            yield

    def _frames(self, of: Any) -> pd.DataFrame:
        frames = [results.labeled(self.plan, cell, of(cell)) for cell in results.cells(self.plan)]
        return pd.concat(frames, ignore_index=True)

    def _joined(self, name: str) -> pd.DataFrame:
        with self._here():
            return self._frames(lambda cell: artifacts.frame(artifacts.read_joined(getattr(cell.joined, name))))

    def _cell(self, algorithm: str, seed: int | None, grid: dict[str, Any]) -> Cell:
        if algorithm not in self.plan.algorithms:
            raise SettingsError(f"'{algorithm}' is not in the study; {nearest(algorithm, self.plan.algorithms)}")
        seed = self.plan.seeds[0] if seed is None else seed
        if seed not in self.plan.seeds:
            raise SettingsError(f"seed: {seed} is not in the study; it should be one of {list(self.plan.seeds)}.")
        shorts = dict(zip(results.short(self.plan.grid), self.plan.grid, strict=True))
        names = {name: name for name in self.plan.grid} | shorts
        if unknown := [name for name in grid if name not in names]:
            raise SettingsError(f"{unknown[0]}: not varied by the study's grid; {nearest(unknown[0], list(shorts))}")
        point = {names[name]: value for name, value in grid.items()}
        found = [
            cell
            for cell in self.plan.cells
            if (cell.algorithm, cell.seed) == (algorithm, seed)
            and all(name in cell.grid and cell.grid[name] == value for name, value in point.items())
        ]
        if len(found) != 1:
            short = dict(zip(self.plan.grid, results.short(self.plan.grid), strict=True))
            cells = [cell for cell in self.plan.cells if (cell.algorithm, cell.seed) == (algorithm, seed)]
            points = "; ".join(
                ", ".join(f"{short[name]}={value!r}" for name, value in cell.grid.items()) for cell in cells
            )
            raise SettingsError(f"{algorithm}: name one point of the grid, which are {points}.")
        return found[0]

    def _round(self, algorithm: str, seed: int | None, grid: dict[str, Any], round: int | None) -> tuple[Cell, int]:
        """A cell, and one of its rounds: by default the last."""
        cell = self._cell(algorithm, seed, grid)
        number = cell.rounds if round is None else round
        if not 0 <= number <= cell.rounds:
            raise SettingsError(f"round: {number} is none of the run's; it should be from 0 to {cell.rounds}.")
        return cell, number

    def _dataset(self, cell: Cell) -> str:
        return next(run.dataset for run in self.plan.runs if run.serves(cell))

    def _open(self, cell: Cell) -> Run:
        from fedpipe import fitted

        return fitted.open_run(cell.files)


def load(path: str | Path = PARAMS) -> Results:
    """See :func:`fedpipe.load`."""
    place = Path(path).absolute()
    folder = next((above for above in (place, *place.parents) if (above / PARAMS).is_file()), None)
    if folder is None:
        raise SettingsError(f"{path}: there is no params.yaml in that folder or above it.")
    with contextlib.chdir(folder):
        inside = place.relative_to(folder)
        if inside.parts[:1] == RESULTS.parts:
            if not place.is_dir():
                raise SettingsError(f"{path}: there is no such folder; `fedpipe run` makes a study's results.")
            plan = Plan.read(inside / "plan.json")
        else:
            plan = _current(PARAMS if inside == Path() else inside)
        return Results(folder, plan)


def _current(params: Path) -> Plan:
    """The plan of a study as its file now is.

    Raises
    ------
    ArtifactError
        It has no plan yet, or that is of an earlier state of the file.
    """
    if not params.is_file():
        raise SettingsError(f"{params}: there is no such file; it should be a study's, or a folder of results.")
    files = StudyFiles.of(params)
    if not files.plan.is_file():
        raise ArtifactError(f"{files.plan} is missing; type `{artifacts.making(params)}` first.")
    plan = Plan.read(files.plan)
    sources = artifacts.read_json(files.sources) if files.sources.is_file() else None
    if sources is None or any(pins.changed(Path(path), mark) for path, mark in sources.items()):
        from fedpipe import plan as planning

        if artifacts.json_bytes(planning.make(params).held()) != artifacts.json_bytes(plan.held()):
            raise ArtifactError(
                f"{files.plan} is not the plan of {params} as it is now; type `{artifacts.making(params)}`, or load "
                f"the folder {files.path} for the results of the earlier one."
            )
    return plan


@functools.cache
def _names_of(dataset: str, stamp: str) -> tuple[str, ...]:
    from fedpipe.data import classes, store

    held = artifacts.read_json(artifacts.dataset_file(dataset).with_suffix(".json"))
    origin = yaml.safe_load(store.settings_file(dataset).read_text())
    return classes.names(origin, held["classes"])


def _class_names(dataset: str) -> tuple[str, ...]:
    """What the classes of a stored data set are called."""
    return _names_of(dataset, pins.stamp(artifacts.dataset_file(dataset).absolute()))


def _refuse_pruned(files: RunFiles, number: int, client: int | None = None) -> None:
    """Refuse a round of which the server's state, or what a client keeps, is not there any more."""

    def is_there(number: int) -> bool:
        if client is None:
            return files.round(number).server.is_file()
        last = artifacts.read_json(files.round(number).state)["last"][client]  # where what it keeps is stored
        held = files.round(last)
        return last < 0 or held.clients.is_file() or held.clients.name not in artifacts.hashes(held, held.state)

    if is_there(number):
        return
    there = [str(number) for number in files.complete() if is_there(number)]
    whose = "the state" if client is None else f"what client {client} keeps"
    raise ArtifactError(
        f"{files.path}: {whose} of round {number} is not there (see artifacts.keep_models, or `dvc pull`); "
        f"of these rounds it is: {', '.join(there) or 'none'}."
    )


def _refuse_unknown(client: int, count: int) -> None:
    if not 0 <= client < count:
        raise SettingsError(f"client: {client} is none of the run's; it should be from 0 to {count - 1}.")
