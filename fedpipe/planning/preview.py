"""Computes a study's partitions before any job, for `fedpipe partition --preview`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedpipe.core.yaml_text import read_yaml
from fedpipe.data import class_names, store
from fedpipe.data.assignment import Assignment
from fedpipe.planning import planner
from fedpipe.planning.partition import get_partition_settings_path, make_assignment_table
from fedpipe.settings import loader, parser
from fedpipe.settings.dataset import format_download_command


class PartitionPreview(NamedTuple):
    """A partition before it is written."""

    key: str
    settings: dict[str, Any]  #: of :meth:`~fedpipe.planning.plan.Plan.get_partition_settings_to_describe`
    assignment: Assignment
    class_names: tuple[str, ...]  #: names or numbers of the classes, C of them
    held_out: tuple[int, ...]  #: clients that are held out
    unused_keys: tuple[str, ...]  #: keys of the data set that have no effect


def preview_partitions(params: Path) -> Iterator[PartitionPreview]:
    """Yield each partition of a study. Nothing is written.

    If the data set is not stored, it is read from the source of `fedpipe download`.
    """
    study_plan = planner.make_plan(params)
    section = parser.parse_params(loader.read_params(params), format_download_command(params)).dataset
    for key in study_plan.partitions:
        settings_path = get_partition_settings_path(key)
        settings = read_yaml(study_plan.file_texts[str(settings_path)], settings_path)
        path = store.get_stored_dataset_path(settings["dataset"])
        if path.is_file() or path != section.dataset_path:
            table, own_names = make_assignment_table(settings, store.load_samples(path)), store.read_class_names(path)
        else:
            samples = section.effective_dataset.load(section.fetcher)
            table, own_names = make_assignment_table(settings, samples), samples.class_names
        assignment = Assignment.from_table(table)
        names = class_names.select_class_names(settings["dataset"]["name"], assignment.class_counts.shape[1], own_names)
        held_out, unused_keys = study_plan.held_out.get(key, ()), study_plan.unused_keys.get(key, ())
        yield PartitionPreview(
            key, study_plan.get_partition_settings_to_describe(key), assignment, names, held_out, unused_keys
        )
