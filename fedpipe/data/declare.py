"""`fedpipe download`: obtaining a study's data set, and declaring in its file which files the study is of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from fedpipe import artifacts, config, pins, registry
from fedpipe.data import store
from fedpipe.data.datasets.base import Declared
from fedpipe.errors import SettingsError


def download(name: str | None, params: Path) -> str:
    """Obtain a data set and store it; where the study should declare the SHA-256 of a file and does not, fill it in.

    With the study's own data set go the file of its partition and that of its model's weights.

    Parameters
    ----------
    name
        As in ``dataset.name``; by default the study's own, and its other files.
    params
        The study.

    Returns
    -------
    str
        What was done, and what is left to do.

    Raises
    ------
    SettingsError
        There is no such data set or study, or a file that the study names is missing.
    ArtifactError
        The data set's files can't be had or are not what they should be.
    """
    settings = config.read(params) if name is None or params.is_file() else {}
    section = config.dataset(settings.get("dataset", {}))
    named_there = name is None or name == section.name
    if not named_there:
        section = config.dataset({"name": name, "mirror": section.mirror})
    source, sha256 = section.source, None
    if isinstance(source, Declared) and (sha256 := source.undeclared(section.fetcher)) is not None:
        source = dataclasses.replace(source, sha256=sha256)
    done = [f"{store.obtain(source, section.fetcher)} is stored."]
    if sha256 is not None and not (named_there and _fill_in(params, "dataset", sha256, done)):
        done.append(f"Declare it in {params}, under dataset, where name is {section.name}:\n  sha256: {sha256}")
    for kind in (registry.PARTITION, registry.MODEL) if named_there else ():
        pin = config.component(kind, settings.get(kind.section, {})).pin
        if pin is None or pin.sha256:
            continue
        if not pin.path.is_file():
            raise SettingsError(f"{kind.section}.{pin.field}: {pin.path} is missing; it should be a file.")
        sha256 = pins.content(pin.path)
        if not _fill_in(params, kind.section, sha256, done):
            done.append(f"Declare {pin.path} in {params}, under {kind.section}:\n  sha256: {sha256}")
    return "\n".join(done)


def _fill_in(params: Path, section: str, sha256: str, done: list[str]) -> bool:
    """Add a section's ``sha256`` to a YAML file, and leave all else as it is; False, and nothing done, if it fails."""
    text = params.read_text()
    node = _mapping(yaml.compose(text, Loader=yaml.SafeLoader), section)
    if node is None or not node.value:
        return False
    if node.flow_style:
        end = node.value[0][1].end_mark.index
        filled = f"{text[:end]}, sha256: {sha256}{text[end:]}"
    else:
        before = node.value[:2][-1][0].start_mark  # of the second key, or the only one
        filled = f"{text[: before.index]}sha256: {sha256}\n{' ' * before.column}{text[before.index :]}"
    wanted = config.override(config.read(params), {f"{section}.sha256": sha256})
    try:
        if yaml.safe_load(filled) != wanted:
            return False
    except (yaml.YAMLError, SettingsError):
        return False
    artifacts.write_bytes(params, filled.encode())
    done.append(f"{params} declares it now: {section}.sha256 is {sha256}.")
    return True


def _mapping(node: yaml.Node | None, key: str) -> yaml.MappingNode | None:
    """The mapping that stands under a key."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == key and isinstance(value, yaml.MappingNode):
                return value
    return None
