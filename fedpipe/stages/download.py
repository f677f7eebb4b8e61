"""The download stage: from a data set's name to its samples as one stored file, checked.

`fedpipe download` also declares in a study's file which files the study is of.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fedpipe import artifacts, config, grid, pins, registry
from fedpipe.data import store
from fedpipe.data.datasets.base import Dataset, Declared, Facts, Published
from fedpipe.data.fetch import Fetcher
from fedpipe.data.samples import Samples
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.yaml_text import read_yaml


def is_planned(name: str) -> bool:
    """Whether some plan calls a data set so, as ``imdb-0123456789ab``."""
    return store.settings_file(name).is_file()


def download(name: str) -> Path:
    """Obtain and store a data set of a plan.

    Parameters
    ----------
    name
        As the plan calls it, ``imdb-0123456789ab``.

    Returns
    -------
    Path
        Where it lies now.

    Raises
    ------
    ArtifactError
        No plan has it, or what the plan said of it was edited; or see :func:`obtain`.
    """
    settings = store.settings_file(name)
    if not is_planned(name):
        raise ArtifactError(f"{settings} is missing; '{name}' should be a data set of a plan.")
    try:
        section = config.dataset(read_yaml(settings.read_text(), settings))
        found = section.file.stem
    except SettingsError as error:
        raise ArtifactError(
            f"{settings} is damaged ({' '.join(str(error).split())}); `fedpipe plan` writes it again."
        ) from None
    if found != name:
        raise ArtifactError(
            f"{settings} was edited: it names {found}; `fedpipe plan` writes it again, and params.yaml is what to "
            "change."
        )
    return obtain(section.source, section.fetcher)


def obtain(dataset: Dataset, fetch: Fetcher, path: Path | None = None) -> Path:
    """Load a data set, check that it is the one the keys of runs speak of, and save it with a manifest of its facts.

    Parameters
    ----------
    dataset
        The data set.
    fetch
        Where its files come from.
    path
        Where to save it; by default its :func:`~fedpipe.data.store.place`.

    Returns
    -------
    Path
        Where it lies now.

    Raises
    ------
    ArtifactError
        A file could not be fetched, or the samples are not those that the data set's class speaks of; nothing is saved.
    """
    samples = Samples(**store.canonical(dataset.load(fetch)))
    name, found = registry.name_of(registry.DATASET, type(dataset)), store.checksum(samples)
    if found != dataset.expected and (dataset.expected or not dataset.identity):
        raise ArtifactError(
            f"dataset.name: the samples of '{name}' have checksum {found}, but {dataset.expected or 'none'} was "
            f"expected; obtain the original again (with the versions in requirements.lock), or, if the new samples are "
            f"meant, set {type(dataset).__qualname__}.checksum to theirs."
        )
    measured = dataset.measure(samples)
    _agree(name, samples, measured, dataset.facts)
    path = path or store.place(registry.described(registry.DATASET, dataset))
    sha256 = store.save(path, samples)
    artifacts.write_json(path.with_suffix(".json"), {path.name: sha256, **measured._asdict()})
    return path


def declare(name: str | None, params: Path, stored: set[Path] | None = None) -> str:
    """Obtain a data set and store it; where the study should declare the SHA-256 of a file and does not, fill it in.

    With the study's own data set go the file of its partition and that of its model's weights, and the data sets that
    its grid and its scales declare, where a plan could know nothing of them before.

    Parameters
    ----------
    name
        As in ``dataset.name``; by default the study's own, and its other files.
    params
        The study.
    stored
        What was obtained for other studies and is not obtained twice; what this one adds is added.

    Returns
    -------
    str
        What was done, and what is left to do.

    Raises
    ------
    SettingsError
        There is no such data set or study, or a file that the study names is missing.
    ArtifactError
        The data set's files could not be fetched or are not what they should be.
    """
    settings = config.read(params) if name is None or params.is_file() else {}
    section = config.dataset(settings.get("dataset", {}))
    named_there = name is None or name == section.name
    if not named_there:
        section = config.dataset({"name": name, "mirror": section.mirror})
    source, sha256 = section.named, None  # also where generated samples would do (`dataset.absent`)
    if isinstance(source, Declared) and (sha256 := source.undeclared(section.fetcher)) is not None:
        source = dataclasses.replace(source, sha256=sha256)
    stored = set() if stored is None else stored
    path = store.place(registry.described(registry.DATASET, source))
    if path not in stored:
        stored.add(obtain(source, section.fetcher))
    done = [f"{path} is stored."]
    labels = store.load(path).y
    if (lowest := int(labels.min())) > 0:
        done.append(
            f"Its labels are {lowest} to {int(labels.max())}, and classes count from 0: class 0 has no samples. "
            "If it should not be there, number the labels from 0."
        )
    if sha256 is not None and not (named_there and _fill_in(params, ("dataset",), "sha256", sha256, done)):
        done.append(f"Declare it in {params}, under dataset, where name is {section.name}:\n  sha256: {sha256}")
    for kind in (registry.PARTITION, registry.MODEL) if named_there else ():
        pin = registry.parsed(kind, settings.get(kind.section, {})).pin
        if pin is None or pin.sha256:
            continue
        if not pin.path.is_file():
            raise SettingsError(f"{kind.section}.{pin.field}: {pin.path} is missing; it should be a file.")
        sha256 = pins.content(pin.path)
        _refuse_file(kind, settings | {kind.section: settings[kind.section] | {"sha256": sha256}}, store.facts(path))
        if not _fill_in(params, (kind.section,), "sha256", sha256, done):
            done.append(f"Declare {pin.path} in {params}, under {kind.section}:\n  sha256: {sha256}")
    if name is None:
        _declare_elsewhere(params, section, done)
        settings = config.read(params) if params.is_file() else settings
    for other in _elsewhere(settings) if name is None else ():
        if getattr(other.source, "sha256", None) and other.lacking(config.DOWNLOAD):
            done.append(f"{obtain(other.source, other.fetcher)} is stored.")
    return "\n".join(done)


def _refuse_file(kind: registry.Kind, settings: dict[str, Any], facts: Facts) -> None:
    """Refuse to declare a file that no plan would take: a partition's table, or a model's weights."""
    component: Any = registry.parsed(kind, settings[kind.section])
    if kind is registry.MODEL:
        component.check_weights(facts.shape, facts.classes)
    elif component.by_index:
        clients = config.parse_federation(settings.get("federation", {})).clients
        component.check(clients, facts.classes, facts.size)


def _declare_elsewhere(params: Path, section: config.Data, done: list[str]) -> None:
    """Fill in the SHA-256 of each mirror's file that stands in for a data set of the study's grid and scales.

    Where a data set of the grid needs none, but that of the section has one, it is filled in as null.
    """
    settings = config.read(params)
    is_declared = bool((settings.get("dataset") or {}).get("sha256"))
    for place, key, named in list(_places(settings)):
        data = config.dataset({"name": named, **({"mirror": section.mirror} if section.mirror else {})})
        if not isinstance(data.named, Published):
            continue
        sha256 = data.named.undeclared(data.fetcher)
        if sha256 is None and not (is_declared and key != "sha256"):
            continue
        if not _fill_in(params, place, key, sha256, done):
            done.append(f"Declare it in {params}, under {'.'.join(place)}:\n  {key}: {sha256 or 'null'}")


def _places(settings: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Where grid and scales name a data set without its SHA-256: the mapping, the key that it lacks, and the name."""
    for key, value in settings.items():
        if key == "dataset.name" and "dataset.sha256" not in settings and isinstance(value, str):
            yield above, "dataset.sha256", value
        elif key == "dataset" and above and isinstance(value, dict) and "sha256" not in value and "name" in value:
            yield (*above, key), "sha256", str(value["name"])
        elif isinstance(value, dict) and (above or key in ("study", "scales")):
            yield from _places(value, (*above, key))


def _elsewhere(settings: dict[str, Any]) -> Iterator[config.Data]:
    """The data sets at the points of a study's grid, and of that of each of its scales."""
    for changes in ({}, *(settings.get("scales") or {}).values()):
        there = config.override(settings, changes)
        lists = (there.get("study") or {}).get("grid") or {}
        for parts in itertools.product(*(_of_data(name, values) for name, values in lists.items())):
            yield config.dataset(config.override(there, *parts).get("dataset", {}))


def _of_data(name: str, values: Any) -> list[dict[str, Any]]:
    """What the values of a list or an axis say of the data set, each once."""
    axis = values.values() if isinstance(values, dict) else [{name: value} for value in values]
    said = [{key: value for key, value in part.items() if grid.within(key, "dataset")} for part in axis]
    return [part for index, part in enumerate(said) if part not in said[:index]]


def _agree(name: str, samples: Samples, measured: Facts, known: Facts | None) -> None:
    """Refuse samples that are not what the data set says of itself."""
    lengths = {len(array) for array in samples}
    inside = len(lengths) == 1 and samples.x.shape[1:] == measured.shape and samples.y.max() < measured.classes
    if known not in (None, measured) or not inside:
        wanted = known or measured
        raise ArtifactError(
            f"dataset.name: the files of '{name}' hold {len(samples.y)} samples of shape {samples.x.shape[1:]} in "
            f"{samples.y.max() + 1} classes; it should be {wanted.size} of shape {wanted.shape} in {wanted.classes}."
        )


def _fill_in(params: Path, place: tuple[str, ...], key: str, sha256: str | None, done: list[str]) -> bool:
    """Add a key to a mapping of a YAML file, and leave all else as it is; False, and nothing done, if it fails."""
    text, value = params.read_bytes().decode(), sha256 or "null"
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for part in place:
        node = _mapping(node, part)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return False
    if node.flow_style:
        end = node.value[0][1].end_mark.index
        filled = f"{text[:end]}, {key}: {value}{text[end:]}"
    else:
        before = node.value[:2][-1][0].start_mark  # of the second key, or the only one
        filled = f"{text[: before.index]}{key}: {value}\n{' ' * before.column}{text[before.index :]}"
    wanted = config.read(params)
    functools.reduce(lambda mapping, part: mapping[part], place, wanted)[key] = sha256
    try:
        if read_yaml(filled, params) != wanted:
            return False
    except SettingsError:
        return False
    artifacts.write_bytes(params.resolve(), filled.encode())  # a link stays one
    done.append(f"{params} declares it now: {'.'.join((*place, key))} is {value}.")
    return True


def _mapping(node: yaml.Node | None, key: str) -> yaml.MappingNode | None:
    """The mapping that stands under a key."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == key and isinstance(value, yaml.MappingNode):
                return value
    return None
