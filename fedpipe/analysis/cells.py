"""Finds a cell of a plan from what a user names."""

from __future__ import annotations

from typing import Any

from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.planning.plan import Cell, Plan
from fedpipe.report import results


def find_cell(plan: Plan, algorithm: str, seed: int | None, grid: dict[str, Any]) -> Cell:
    """Find the only cell of an algorithm, a seed (by default the first) and values of the study's grid.

    Values may be texts, as in frames of results, which are empty for a name that does not concern the algorithm. Raises
    a SettingsError if no cell or several cells match.
    """
    if algorithm not in plan.algorithms:
        raise SettingsError(f"'{algorithm}' is not in the study. {suggest_name(algorithm, plan.algorithms)}")
    seed = plan.seeds[0] if seed is None else seed
    if seed not in plan.seeds:
        raise SettingsError(f"seed: {seed} is not in the study. Use one of {list(plan.seeds)}.")
    short_names = results.shorten_dotted_keys(plan.grid)
    names = {name: name for name in plan.grid} | {short: name for name, short in short_names.items()}
    if unknown_names := [name for name in grid if name not in names]:
        hint = suggest_name(unknown_names[0], list(short_names.values()))
        raise SettingsError(f"'{unknown_names[0]}' is not in the study's grid. {hint}")
    point = {names[name]: value for name, value in grid.items()}
    cells = [cell for cell in plan.cells if (cell.algorithm, cell.seed) == (algorithm, seed)]
    for name in grid:
        if point[names[name]] != "" and all(names[name] not in cell.grid for cell in cells):
            raise SettingsError(f"{name}: it does not concern {algorithm}. Leave it out.")
    matching_cells = [
        cell
        for cell in cells
        for texts in [results.format_grid_point(plan, cell)]
        if all(value in (cell.grid.get(name, ""), texts[name]) for name, value in point.items())
    ]
    if len(matching_cells) != 1:
        points = "; ".join(
            ", ".join(f"{short_names[name]}={value!r}" for name, value in cell.grid.items()) for cell in cells
        )
        raise SettingsError(f"{algorithm}: {len(matching_cells)} points of the grid match. Name one of: {points}.")
    return matching_cells[0]
