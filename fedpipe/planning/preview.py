"""Computes a study's partitions before any job, for `fedpipe partition --preview`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedpipe.core.storage import layout
from fedpipe.core.yaml_text import read_yaml
from fedpipe.data import store
from fedpipe.data.assignment import Assignment
from fedpipe.planning import planner
from fedpipe.planning.partition import make_assignment_table
from fedpipe.settings import loader, parser
from fedpipe.settings.dataset import format_download_command


def preview_partitions(params: Path) -> Iterator[tuple[str, dict[str, Any], Assignment, tuple[int, ...]]]:
    """Yield key, settings, assignment and held-out clients of each partition of a study. Nothing is written.

    If the data set is not stored, it is read from the source of `fedpipe download`.
    """
    study_plan = planner.make_plan(params)
    section = parser.parse_params(loader.read_params(params), format_download_command(params)).dataset
    for key in study_plan.partitions:
        settings_path = layout.assignment_file(key).with_name("partition.yaml")
        settings = read_yaml(study_plan.file_texts[str(settings_path)], settings_path)
        path = store.locate_dataset(settings["dataset"])
        if path.is_file() or path != section.file:
            table = make_assignment_table(settings, store.load_samples(path))
        else:
            table = make_assignment_table(settings, section.effective_dataset.load(section.fetcher))
        yield key, settings, Assignment.from_table(table), study_plan.held_out.get(key, ())
