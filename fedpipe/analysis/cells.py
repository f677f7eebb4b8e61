"""Finds a cell of a plan from what a user names."""

from __future__ import annotations

from typing import Any

from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.planning.plan import Cell, Plan
from fedpipe.report import results


def find_cell(plan: Plan, algorithm: str, seed: int | None, grid: dict[str, Any]) -> Cell:
    """Find the cell of an algorithm, a seed (by default the first) and values of the study's grid.

    Raises
    ------
    SettingsError
        No cell or several cells match.
    """
    if algorithm not in plan.algorithms:
        raise SettingsError(f"'{algorithm}' is not in the study. {suggest_name(algorithm, plan.algorithms)}")
    seed = plan.seeds[0] if seed is None else seed
    if seed not in plan.seeds:
        raise SettingsError(f"seed: {seed} is not in the study. Use one of {list(plan.seeds)}.")
    heads = results.shorten_dotted_keys(plan.grid)
    full_names = {head: name for name, head in heads.items()}
    names = {name: name for name in plan.grid} | full_names
    if unknown_names := [name for name in grid if name not in names]:
        raise SettingsError(
            f"'{unknown_names[0]}' is not in the study's grid. {suggest_name(unknown_names[0], list(full_names))}"
        )
    point = {names[name]: value for name, value in grid.items()}
    matching_cells = [
        cell
        for cell in plan.cells
        if (cell.algorithm, cell.seed) == (algorithm, seed)
        and all(name in cell.grid and cell.grid[name] == value for name, value in point.items())
    ]
    if len(matching_cells) != 1:
        cells = [cell for cell in plan.cells if (cell.algorithm, cell.seed) == (algorithm, seed)]
        points = "; ".join(", ".join(f"{heads[name]}={value!r}" for name, value in cell.grid.items()) for cell in cells)
        raise SettingsError(f"{algorithm}: {len(matching_cells)} points of the grid match. Name one of: {points}.")
    return matching_cells[0]
