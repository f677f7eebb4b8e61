"""Which states a study's probes look at, and under which key what they find lies: the section `probes` of a study.

A probe's key is a hash of its settings, of its run's key and round, and of its own code; it is in no run's key.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedpipe.core.components import code_digest
from fedpipe.core.errors import ArtifactError, SettingsError, suggest_name
from fedpipe.core.hashing import digest_json
from fedpipe.core.storage.layout import ProbeFiles
from fedpipe.core.yaml_text import format_yaml, read_yaml
from fedpipe.planning.plan import Cell, PlannedProbe
from fedpipe.settings.diagnostics import HeadNorms, Probe
from fedpipe.settings.params import Params


def plan_probes(study_params: Params, cells: Iterable[Cell]) -> tuple[PlannedProbe, ...]:
    """All probes of a study, each once, however many cells its run serves.

    Raises
    ------
    SettingsError
        An entry names what the study does not have.
    """
    planned_probes: dict[tuple[str, Path], PlannedProbe] = {}
    cells = list(cells)
    for name, probe in study_params.probes.items():
        _check_probe(study_params, name, probe)
        matching_cells = [cell for cell in cells if _is_selected(probe, cell)]
        if not matching_cells:
            raise SettingsError(f"probes.{name}: no run of the study is at such a point; its `where` should name one.")
        for cell in matching_cells:
            for number in probe.rounds:
                planned_probe = _plan_probe(name, probe, cell, cell.rounds if number == "last" else number)
                planned_probes[name, planned_probe.files.path] = planned_probe
    return tuple(planned_probes.values())


def format_probe_settings(study_params: Params, probe: PlannedProbe) -> str:
    """The text of a probe's settings file, which its job reads."""
    head = "# All that this probe depends on; the key in the file's name is a hash of it.\n"
    return head + format_yaml(_build_probe_settings(study_params.probes[probe.name], probe.run_key, probe.round))


def read_probe_settings(files: ProbeFiles) -> dict[str, Any]:
    """The settings in a probe's file.

    Raises
    ------
    ArtifactError
        It is missing, is not the one that its name holds the key of, or is of other code than lies here.
    """
    path = files.settings
    try:
        settings: dict[str, Any] = read_yaml(path.read_text(), path)
        kind, key = str(settings["kind"]), digest_json(settings)
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing; run `fedpipe plan` to write it again.") from None
    except (LookupError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path} is damaged ({error}); delete it and run `fedpipe plan`.") from None
    names = [f"{kind}-{key}", f"{settings['round']:04d}", settings["run"]]
    if (
        names != [path.stem, *(parent.name for parent in list(path.parents)[:2])]
        or kind not in code_digest.PROBE_MODULES
    ):
        raise ArtifactError(f"{path} was edited: its key would be {key}; change the study's `probes` instead.")
    if settings["code"] != code_digest.compute_probe_digest(kind):
        raise ArtifactError(f"{path} is of other code of {kind} than lies here; type `fedpipe run`, which plans again.")
    return settings


def _plan_probe(name: str, probe: Probe, cell: Cell, number: int) -> PlannedProbe:
    if number > cell.rounds:
        raise SettingsError(
            f"probes.{name}.rounds: {number} is beyond the last round, {cell.rounds}; it should be that at most."
        )
    key = digest_json(_build_probe_settings(probe, cell.key, number))
    return PlannedProbe(
        name=name,
        kind=probe.kind,
        algorithm=cell.algorithm,
        run_key=cell.key,
        rounds=cell.rounds,
        round=number,
        key=key,
    )


def _build_probe_settings(probe: Probe, run: str, number: int) -> dict[str, Any]:
    return {"run": run, "round": number, **probe.settings, "code": code_digest.compute_probe_digest(probe.kind)}


def _is_selected(probe: Probe, cell: Cell) -> bool:
    """Whether a probe looks at a cell's run; what does not concern the cell's method can't keep it out."""
    for name, selection in probe.where.items():
        values = selection if isinstance(selection, list) else [selection]
        if name in cell.grid and cell.grid[name] not in values and [cell.grid[name]] != [selection]:
            return False
    return cell.algorithm in (probe.algorithms or [cell.algorithm]) and cell.seed in (probe.seeds or [cell.seed])


def _check_probe(study_params: Params, name: str, probe: Probe) -> None:
    allowed_values: dict[str, Any] = {"algorithms": study_params.study.algorithms, "seeds": study_params.study.seeds}
    for key, options in allowed_values.items():
        for value in getattr(probe, key) or ():
            if value not in options:
                raise SettingsError(
                    f"probes.{name}.{key}: the study has no '{value}'; {_suggest_value(value, options)}"
                )
    for grid_name, selection in probe.where.items():
        if grid_name not in study_params.study.grid:
            raise SettingsError(
                f"probes.{name}.where: '{grid_name}' is not in study.grid; "
                f"{_suggest_value(grid_name, study_params.study.grid)}"
            )
        options = list(study_params.study.grid[grid_name])
        for value in selection if isinstance(selection, list) and selection not in options else [selection]:
            if value not in options:
                raise SettingsError(
                    f"probes.{name}.where: '{grid_name}' is never {value!r} in study.grid; "
                    f"{_suggest_value(value, options)}"
                )
    if isinstance(probe, HeadNorms) and "class" in probe.models:
        from fedpipe.algorithms.cwfedavg import CwFedAvg  # here, since the table's commands import no torch

        for label in probe.algorithms or study_params.study.algorithms:
            if not isinstance(study_params.algorithms[label].algorithm, CwFedAvg):
                raise SettingsError(
                    f"probes.{name}.models: 'class' can't be used with {label}, which has no models of classes; "
                    f"probes.{name}.algorithms should do without it."
                )
    clients = getattr(probe, "clients", None) or ()
    if too_large := [client for client in clients if client >= study_params.federation.clients]:
        raise SettingsError(
            f"probes.{name}.clients: there is no client {too_large[0]}; it should be less than federation.clients "
            f"({study_params.federation.clients})."
        )


def _suggest_value(value: Any, options: Iterable[Any]) -> str:
    return suggest_name(str(value), [str(option) for option in options])
