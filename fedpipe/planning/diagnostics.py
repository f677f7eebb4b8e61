"""Plans the diagnostics of a study: which states they read, and the keys of their results.

A diagnostic's key is a hash of its settings, its run's key and round, and its code. It does not enter a run's key.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedpipe.core.components import code_digest
from fedpipe.core.errors import ArtifactError, SettingsError, suggest_name
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage.layout import DiagnosticFiles
from fedpipe.core.yaml_text import format_yaml, read_verified_settings
from fedpipe.planning.grid import is_key_within_section, iterate_grid_points
from fedpipe.planning.plan import Cell, PlannedDiagnostic
from fedpipe.settings.diagnostics import Diagnostic, Features, HeadNorms
from fedpipe.settings.params import Params


def plan_diagnostics(study_params: Params, cells: Iterable[Cell]) -> tuple[PlannedDiagnostic, ...]:
    """Plan all diagnostics of a study, each once.

    Raises a SettingsError if an entry has a method, seed or grid value that the study lacks.
    """
    planned_diagnostics: dict[tuple[str, Path], PlannedDiagnostic] = {}
    cells = list(cells)
    for name, diagnostic in study_params.diagnostics.items():
        _check_diagnostic(study_params, name, diagnostic)
        matching_cells = [cell for cell in cells if is_cell_selected(diagnostic, cell)]
        if not matching_cells:
            raise SettingsError(
                f"diagnostics.{name}: no run of the study matches. Change its `algorithms`, `seeds` or `where`."
            )
        for cell in matching_cells:
            for number in diagnostic.rounds:
                round_number = cell.rounds if number == "last" else number
                planned_diagnostic = _plan_diagnostic(name, diagnostic, cell, round_number)
                planned_diagnostics[name, planned_diagnostic.path] = planned_diagnostic
    return tuple(planned_diagnostics.values())


def format_diagnostic_settings(study_params: Params, diagnostic: PlannedDiagnostic) -> str:
    """Format the settings file that a diagnostic's job reads."""
    head = "# All settings of this diagnostic. The key in the file's name is their hash.\n"
    return head + format_yaml(
        _build_diagnostic_settings(study_params.diagnostics[diagnostic.name], diagnostic.run_key, diagnostic.round)
    )


def read_diagnostic_settings(files: DiagnosticFiles) -> dict[str, Any]:
    """Read the settings file of a diagnostic. It must match the key in its name, and belong to this code."""
    path = files.settings
    settings = read_verified_settings(path, "/".join(path.with_suffix("").parts[-3:]), _compute_relative_path)
    kind = settings["kind"]
    if kind not in code_digest.DIAGNOSTIC_MODULES or settings["code"] != code_digest.compute_diagnostic_digest(kind):
        raise ArtifactError(f"{path} belongs to another version of {kind}. Run its study (`fedpipe run`) again.")
    return settings


def _compute_relative_path(settings: dict[str, Any]) -> str:
    """Compute the end of the path of a diagnostic's settings file, with its run and its round."""
    return f"{settings['run']}/{settings['round']:04d}/{settings['kind']}-{compute_json_digest(settings)}"


def _plan_diagnostic(name: str, diagnostic: Diagnostic, cell: Cell, round_number: int) -> PlannedDiagnostic:
    if round_number > cell.rounds:
        raise SettingsError(
            f"diagnostics.{name}.rounds: {round_number} is after the last round. Use at most {cell.rounds}."
        )
    return PlannedDiagnostic(
        name=name,
        kind=diagnostic.kind,
        algorithm=cell.algorithm,
        run_key=cell.key,
        rounds=cell.rounds,
        round=round_number,
        key=compute_json_digest(_build_diagnostic_settings(diagnostic, cell.key, round_number)),
    )


def _build_diagnostic_settings(diagnostic: Diagnostic, run: str, round_number: int) -> dict[str, Any]:
    return {
        "run": run,
        "round": round_number,
        **diagnostic.settings,
        "code": code_digest.compute_diagnostic_digest(diagnostic.kind),
    }


def is_cell_selected(diagnostic: Diagnostic, cell: Cell) -> bool:
    """Whether a diagnostic selects a cell's run. Grid values that do not concern the method are ignored."""
    for name, selection in diagnostic.where.items():
        values = selection if isinstance(selection, list) else [selection]
        if name in cell.grid and cell.grid[name] not in values and [cell.grid[name]] != [selection]:
            return False
    return cell.algorithm in (diagnostic.algorithms or [cell.algorithm]) and cell.seed in (
        diagnostic.seeds or [cell.seed]
    )


def _check_diagnostic(study_params: Params, name: str, diagnostic: Diagnostic) -> None:
    allowed_values: dict[str, Any] = {"algorithms": study_params.study.algorithms, "seeds": study_params.study.seeds}
    for key, options in allowed_values.items():
        for value in getattr(diagnostic, key) or ():
            if value not in options:
                raise SettingsError(
                    f"diagnostics.{name}.{key}: the study has no '{value}'. {_suggest_option(value, options)}"
                )
    for grid_name, selection in diagnostic.where.items():
        if grid_name not in study_params.study.grid:
            raise SettingsError(
                f"diagnostics.{name}.where: '{grid_name}' is not in study.grid. "
                f"{_suggest_option(grid_name, study_params.study.grid)}"
            )
        options = list(study_params.study.grid[grid_name])
        for value in selection if isinstance(selection, list) and selection not in options else [selection]:
            if value not in options:
                raise SettingsError(
                    f"diagnostics.{name}.where: '{grid_name}' has no value {value!r} in study.grid. "
                    f"{_suggest_option(value, options)}"
                )
    if isinstance(diagnostic, Features):
        _check_perplexity(study_params, name, diagnostic)
    if isinstance(diagnostic, HeadNorms) and "class" in diagnostic.models:
        from fedpipe.algorithms.cwfedavg import CwFedAvg  # here, because commands for tables import no torch

        for label in diagnostic.algorithms or study_params.study.algorithms:
            if not isinstance(study_params.algorithms[label].algorithm, CwFedAvg):
                raise SettingsError(
                    f"diagnostics.{name}.models: 'class' can't be used with {label}, which has no class models. "
                    f"Leave {label} out of diagnostics.{name}.algorithms."
                )
    clients = getattr(diagnostic, "clients", None) or ()
    if too_large := [client for client in clients if client >= study_params.federation.clients]:
        raise SettingsError(
            f"diagnostics.{name}.clients: there is no client {too_large[0]}. Use 0 to "
            f"{study_params.federation.clients - 1}."
        )


def _check_perplexity(study_params: Params, name: str, diagnostic: Features) -> None:
    """Require fewer neighbors than vectors. With a grid over data sets, only the diagnostic's job knows the classes."""
    changed_keys = {key for point in iterate_grid_points(study_params) for key in point.changes}
    if any(is_key_within_section(key, "dataset") for key in changed_keys):
        return
    dataset, info, samples = study_params.dataset, study_params.dataset.dataset_info, diagnostic.samples
    if dataset.split == "official" and not study_params.partition.has_fixed_splits:
        samples = min(samples, info.tests * (dataset.subset or info.size) // info.size)
    vectors = samples + info.classes
    if diagnostic.perplexity >= vectors:
        raise SettingsError(
            f"diagnostics.{name}.perplexity: {diagnostic.perplexity:g} can't be used with {vectors} vectors, "
            f"{samples} test samples and a row of the head for each class. Use less than {vectors}."
        )


def _suggest_option(value: Any, options: Iterable[Any]) -> str:
    return suggest_name(str(value), [str(option) for option in options])
