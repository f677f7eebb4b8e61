"""The download stage: obtains a data set, checks it and stores its samples as one file.

`fedpipe download` also fills in the SHA-256 of a study's files in params.yaml.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedpipe.core.components import pinned_files, registry
from fedpipe.core.components.component import DATASET, MODEL, PARTITION, ComponentKind
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files
from fedpipe.core.yaml_text import read_verified_settings, read_yaml
from fedpipe.data import store
from fedpipe.data.datasets.base import Dataset, DatasetInfo, PinnedDataset, PublishedDataset
from fedpipe.data.datasets.huggingface import HuggingFace
from fedpipe.data.samples import Samples
from fedpipe.data.sources.fetch import Fetcher
from fedpipe.planning import grid
from fedpipe.settings import loader, parser
from fedpipe.settings.dataset import Data
from fedpipe.settings.federation import Federation
from fedpipe.settings.loader import convert_to_mapping

if TYPE_CHECKING:
    import torch

MAX_CLASS_NAMES = 10  #: class names that `fedpipe download` prints


def is_planned_dataset(name: str) -> bool:
    """Whether a plan has a data set with this name, such as ``imdb-0123456789ab``."""
    return store.get_dataset_settings_path(name).is_file()


def download_dataset(name: str) -> Path:
    """Obtain and store a data set by its name in a plan, such as ``imdb-0123456789ab``. Return the stored file.

    Raises an ArtifactError if no plan has it, or its settings file was edited.
    """
    path = store.get_dataset_settings_path(name)
    settings = read_verified_settings(path, name, lambda settings: parser.parse_dataset(settings).dataset_path.stem)
    section = parser.parse_dataset(settings)
    return load_and_save_dataset(section.effective_dataset, section.fetcher)


def load_and_save_dataset(dataset: Dataset, fetch: Fetcher, path: Path | None = None) -> Path:
    """Load a data set, compare it with the digest in keys, and save it with a manifest of its facts. Return the file.

    ``path`` is by default :func:`~fedpipe.data.store.get_stored_dataset_path`. Raises an ArtifactError, and saves
    nothing, if a file can't be downloaded or the samples differ from the data set's class.
    """
    loaded = dataset.load(fetch)
    arrays = store.convert_to_canonical_arrays(loaded)
    samples = loaded._replace(x=arrays["x"], y=arrays["y"], test=arrays["test"])
    name = registry.get_component_name(DATASET, type(dataset))
    samples_checksum = store.compute_samples_sha256(samples)
    if samples_checksum != dataset.expected_checksum and (dataset.expected_checksum or not dataset.content_digest):
        raise ArtifactError(
            f"dataset.name: the samples of '{name}' have checksum {samples_checksum}, but "
            f"{dataset.expected_checksum or 'none'} was expected. Get the original again, with the versions in "
            f"requirements.lock. If you mean the new samples, set {type(dataset).__qualname__}.checksum to theirs."
        )
    measured_facts = dataset.infer_info(samples)
    _check_samples(name, samples, measured_facts, dataset.info)
    path = path or store.get_stored_dataset_path(registry.get_component_key_settings(DATASET, dataset))
    sha256 = store.save_samples(path, samples)
    texts = {"class_names": samples.class_names, "omitted_columns": dict(samples.omitted_columns)}
    named = {name: text for name, text in texts.items() if text}
    files.write_json(path.with_suffix(".json"), {path.name: sha256, **measured_facts._asdict(), **named})
    return path


def download_and_pin_dataset(name: str | None, params: Path, stored: set[Path] | None = None) -> str:
    """Obtain and store a data set, and fill in each SHA-256 that the study lacks, and the commit of the hub.

    For the study's own data set, this includes the files of its partition and its model's weights. Without a name, it
    also includes the data sets of the study's grid and presets. ``stored`` are the data sets that other studies have
    obtained. New ones are added. Returns a description of what was done and what remains to be done.

    Raises a SettingsError if there is no such data set or study, or a file of the study is missing, and an
    ArtifactError if the data set's files can't be downloaded or differ from their checksums.
    """
    settings = loader.read_params(params) if name is None or params.is_file() else {}
    section = parser.parse_dataset(settings.get("dataset", {}))
    is_study_dataset = name is None or name == section.name
    if not is_study_dataset:
        section = parser.parse_dataset({"name": name, "mirror": section.mirror})
    source, sha256 = section.configured_dataset, None  # also if synthetic samples could replace it
    revision = source.find_current_commit() if isinstance(source, HuggingFace) else None
    if isinstance(source, HuggingFace) and revision is not None:
        source = dataclasses.replace(source, revision=revision)
    if isinstance(source, PinnedDataset) and (sha256 := source.compute_unpinned_sha256(section.fetcher)) is not None:
        source = dataclasses.replace(source, sha256=sha256)
    stored = set() if stored is None else stored
    path = store.get_stored_dataset_path(registry.get_component_key_settings(DATASET, source))
    if path not in stored:
        stored.add(load_and_save_dataset(source, section.fetcher))
    messages = [f"{path} is stored."]
    labels = store.load_samples(path).y
    if isinstance(source, PinnedDataset) and not isinstance(source, PublishedDataset):
        messages += _describe_samples(store.read_dataset_info(path), store.read_class_names(path), labels)
    if (lowest_label := int(labels.min())) > 0:
        messages.append(
            f"Its labels are {lowest_label} to {int(labels.max())}, but classes are numbered from 0, so class 0 has "
            "no samples. If your data have no class 0, number the labels from 0."
        )
    for key, entry in (("revision", revision), ("sha256", sha256)):
        if entry is not None and is_study_dataset:
            _write_key_or_advise(params, ("dataset",), key, entry, messages)
        elif entry is not None:
            messages.append(f"Add this to {params}, under dataset with name {section.name}:\n  {key}: {entry}")
    if is_study_dataset:
        _write_weights_sha256_into_study(params, settings, section.fetcher, messages)
        for kind in (PARTITION, MODEL):
            _write_component_sha256_into_study(kind, params, settings, store.read_dataset_info(path), messages)
    if name is None:
        _write_grid_dataset_sha256_into_study(params, section, messages)
        messages += _load_and_save_grid_datasets(params)
    return "\n".join(messages)


def _load_and_save_grid_datasets(params: Path) -> list[str]:
    """Obtain and store the data sets of the study's grid and presets, also if one of them can't be obtained."""
    messages, errors = [], {}
    for data in _iterate_grid_datasets(loader.read_params(params)):
        dataset = data.effective_dataset
        is_pinned = isinstance(dataset, PublishedDataset) or getattr(dataset, "sha256", None)
        if is_pinned and data.dataset_path not in errors and not data.dataset_path.is_file():
            try:
                messages.append(f"{load_and_save_dataset(dataset, data.fetcher)} is stored.")
            except ArtifactError as error:
                errors[data.dataset_path] = str(error)
    if errors:
        raise ArtifactError("\n".join(errors.values()))
    return messages


def _describe_samples(facts: DatasetInfo, class_names: Sequence[str], labels: torch.Tensor) -> list[str]:
    """Describe the samples of a user's file, with a warning if its labels are probably no classes."""
    listed_names = [repr(name) if name != name.strip() else name for name in class_names[:MAX_CLASS_NAMES]]
    if len(class_names) > MAX_CLASS_NAMES:
        listed_names.append(f"and {len(class_names) - MAX_CLASS_NAMES:,} more")
    name_list = f": {', '.join(listed_names)}" if class_names else ""
    messages = [f"It has {facts.size:,} samples of shape {facts.shape} in {facts.classes:,} classes{name_list}."]
    class_sizes = labels.bincount()
    class_count, single_count = int((class_sizes > 0).sum()), int((class_sizes == 1).sum())
    if fraction := _find_fractional_class_name(class_names):
        messages.append(
            f"Warning: its labels are numbers with fractions, such as {fraction}, and each number is a class. Use "
            "labels that are classes."
        )
    elif single_count > class_count / 2:
        messages.append(
            f"Warning: {single_count:,} of its {class_count:,} classes have one sample. Use labels that are classes."
        )
    return messages


def _find_fractional_class_name(class_names: Sequence[str]) -> str | None:
    """Find a number with a fraction, if all names are numbers."""
    with suppress(ValueError):
        numbers = [float(name) for name in class_names]
        return next((name for name, number in zip(class_names, numbers, strict=True) if number % 1), None)
    return None


def _write_weights_sha256_into_study(
    params: Path, settings: dict[str, Any], fetcher: Fetcher, messages: list[str]
) -> None:
    """Get the weights that a library publishes for the study's model, and fill in their SHA-256."""
    model: Any = registry.parse_component(MODEL, settings.get(MODEL.section, {}))
    if (path := model.obtain_weights(fetcher.fetch_unpinned)) is None:
        return
    sha256 = pinned_files.compute_content_sha256(path)
    messages.append(f"{path} is stored.")
    if model.sha256 is None:
        _write_key_or_advise(params, (MODEL.section,), "sha256", sha256, messages)


def _write_component_sha256_into_study(
    kind: ComponentKind, params: Path, settings: dict[str, Any], facts: DatasetInfo, messages: list[str]
) -> None:
    """Fill in the SHA-256 of the user's file that the study's partition or model reads."""
    pin = registry.parse_component(kind, settings.get(kind.section, {})).pinned_file
    if pin is None or pin.sha256:
        return
    if not pin.path.is_file():
        raise SettingsError(f"{kind.section}.{pin.parameter}: {pin.path} is missing. Use an existing file.")
    sha256 = pinned_files.compute_content_sha256(pin.path)
    _require_usable_component_file(kind, settings | {kind.section: settings[kind.section] | {"sha256": sha256}}, facts)
    _write_key_or_advise(params, (kind.section,), "sha256", sha256, messages)


def _require_usable_component_file(kind: ComponentKind, settings: dict[str, Any], facts: DatasetInfo) -> None:
    """Reject a partition table or weights that no plan would accept."""
    component: Any = registry.parse_component(kind, settings[kind.section])
    if kind is MODEL:
        component.check_weights_file(facts.shape, facts.classes)
    elif component.is_index_based:
        clients = Federation.from_settings(settings.get("federation", {}), "federation").clients
        component.check(clients, facts.classes, facts.size)


def _write_grid_dataset_sha256_into_study(params: Path, section: Data, messages: list[str]) -> None:
    """Fill in the SHA-256 of each mirror's substitute for a data set of the study's grid and presets.

    If a data set of the grid needs none, but the section `dataset` has one, null is filled in.
    """
    settings = loader.read_params(params)
    is_declared = bool((settings.get("dataset") or {}).get("sha256"))
    for key_path, key, named in list(_iterate_datasets_without_sha256(settings)):
        data = parser.parse_dataset({"name": named, **({"mirror": section.mirror} if section.mirror else {})})
        if not isinstance(data.configured_dataset, PublishedDataset):
            continue
        sha256 = data.configured_dataset.compute_unpinned_sha256(data.fetcher)
        if sha256 is None and not (is_declared and key != "sha256"):
            continue
        _write_key_or_advise(params, key_path, key, sha256, messages)


def _iterate_datasets_without_sha256(
    settings: dict[str, Any], parent_keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Iterate over data sets of grid and presets without SHA-256: the mapping, the missing key, and the name."""
    for key, value in settings.items():
        if key == "dataset.name" and "dataset.sha256" not in settings and isinstance(value, str):
            yield parent_keys, "dataset.sha256", value
        elif key == "dataset" and parent_keys and isinstance(value, dict) and "sha256" not in value and "name" in value:
            yield (*parent_keys, key), "sha256", str(value["name"])
        elif isinstance(value, dict) and (parent_keys or key in ("study", "presets")):
            yield from _iterate_datasets_without_sha256(value, (*parent_keys, key))


def _iterate_grid_datasets(settings: dict[str, Any]) -> Iterator[Data]:
    """Iterate over the data sets of the grid, with and without each preset. Skip what the plan rejects."""
    presets = convert_to_mapping(settings.get("presets")).values()
    for changes in ({}, *map(convert_to_mapping, presets)):
        named_changes = {key: value for key, value in changes.items() if isinstance(key, str)}
        point_settings = loader.override_settings(settings, named_changes)
        grid_lists = convert_to_mapping(convert_to_mapping(point_settings.get("study")).get("grid"))
        for dataset_settings in itertools.product(
            *(_select_distinct_dataset_settings(name, values) for name, values in grid_lists.items())
        ):
            yield parser.parse_dataset(loader.override_settings(point_settings, *dataset_settings).get("dataset", {}))


def _select_distinct_dataset_settings(axis_name: str, values: Any) -> list[dict[str, Any]]:
    """Select the distinct data set settings of a list or an axis."""
    dataset_settings = [
        {key: value for key, value in changes.items() if grid.is_key_within_section(key, "dataset")}
        for changes in grid.list_axis_changes(axis_name, values)
    ]
    return [entry for index, entry in enumerate(dataset_settings) if entry not in dataset_settings[:index]]


def _check_samples(
    name: str, samples: Samples, measured_facts: DatasetInfo, declared_facts: DatasetInfo | None
) -> None:
    """Reject samples that differ from the data set's facts."""
    lengths = {len(array) for array in (samples.x, samples.y, samples.test)}
    lengths |= {len(column.codes) for column in samples.columns.values()}
    is_consistent = (
        len(lengths) == 1
        and samples.x.shape[1:] == measured_facts.shape
        and 0 <= samples.y.min() <= samples.y.max() < measured_facts.classes
    )
    if declared_facts not in (None, measured_facts) or not is_consistent:
        expected_facts = declared_facts or measured_facts
        raise ArtifactError(
            f"dataset.name: the files of '{name}' contain {len(samples.y)} samples of shape {samples.x.shape[1:]} in "
            f"{samples.y.max() + 1} classes. Use files with {expected_facts.size} samples of shape "
            f"{expected_facts.shape} in {expected_facts.classes} classes."
        )


def _write_key_or_advise(
    params: Path, key_path: tuple[str, ...], key: str, entry: str | None, messages: list[str]
) -> None:
    """Add a key to a mapping of the study's file. If this fails, advise the user to add it."""
    if not _write_key_into_study(params, key_path, key, entry, messages):
        messages.append(f"Add this to {params}, under {'.'.join(key_path)}:\n  {key}: {entry or 'null'}")


def _write_key_into_study(
    params: Path, key_path: tuple[str, ...], key: str, entry: str | None, messages: list[str]
) -> bool:
    """Add a key to a mapping of a YAML file and keep everything else. Return False, without a change, if it fails.

    A mapping with an anchor gets the key once, for all its aliases.
    """
    text, value = params.read_bytes().decode(), entry or "null"
    root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    node = root
    for part in key_path:
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for name, value in entries if name.value == part), None)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return False
    if any(name.value == key for name, _ in node.value):
        # An alias has added the key.
        return bool(_get_nested_mapping(loader.read_params(params), key_path)[key] == entry)
    if node.flow_style:
        end = node.value[0][1].end_mark.index
        edited_text = f"{text[:end]}, {key}: {value}{text[end:]}"
    else:
        insert_mark = node.value[:2][-1][0].start_mark  # of the second key, or of the only one
        edited_text = (
            f"{text[: insert_mark.index]}{key}: {value}\n{' ' * insert_mark.column}{text[insert_mark.index :]}"
        )
    expected_settings = loader.read_params(params)
    for alias_path in _iterate_alias_paths(root, node):
        _get_nested_mapping(expected_settings, alias_path)[key] = entry
    try:
        if read_yaml(edited_text, params) != expected_settings:
            return False
    except SettingsError:
        return False
    files.write_bytes(params.resolve(), edited_text.encode())  # through a link
    messages.append(f"{params} now contains {'.'.join((*key_path, key))}: {value}.")
    return True


def _get_nested_mapping(settings: dict[str, Any], key_path: tuple[str, ...]) -> dict[str, Any]:
    return functools.reduce(lambda parent, part: parent[part], key_path, settings)


def _iterate_alias_paths(
    root: yaml.Node | None, node: yaml.Node, parent_keys: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Iterate over all positions of a mapping in a YAML file, including its aliases."""
    if root is node:
        yield parent_keys
    elif isinstance(root, yaml.MappingNode):
        for name, value in root.value:
            yield from _iterate_alias_paths(value, node, (*parent_keys, name.value))
