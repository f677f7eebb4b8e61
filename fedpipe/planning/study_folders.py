"""Selects the studies of a folder that run together."""

from __future__ import annotations

from pathlib import Path

from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import PAPERS

READINGS = "readings"  #: folder of a paper whose studies run only if they or this folder are selected


def list_studies_without_readings(params: Path) -> list[Path]:
    """List the studies of a path: the file, or all studies below the folder, without the readings of the papers.

    Readings are listed if ``params`` is their folder.

    Raises
    ------
    SettingsError
        There is no study in the folder.
    """
    paths, is_selected = layout.list_studies(params), is_in_readings_folder(layout.normalize_study_path(params))
    return [path for path in paths if is_selected or not is_in_readings_folder(path)]


def is_in_readings_folder(path: Path) -> bool:
    """Whether a path is a folder ``studies/papers/PAPER/readings`` or in it."""
    return path.is_relative_to(PAPERS) and READINGS in path.parts
