"""`fedpipe download`: obtaining a study's data set, and declaring in its file which one that is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from fedpipe import artifacts, config
from fedpipe.data import store
from fedpipe.data.datasets.base import Declared
from fedpipe.errors import SettingsError


def download(name: str | None, params: Path) -> str:
    """Obtain a data set and store it; where params.yaml should declare its SHA-256 and does not, fill it in.

    Parameters
    ----------
    name
        As in ``dataset.name``; by default the study's own.
    params
        The study.

    Returns
    -------
    str
        What was done, and what is left to do.

    Raises
    ------
    SettingsError
        There is no such data set or study.
    ArtifactError
        Its files can't be had or are not what they should be.
    """
    settings = config.read(params) if name is None or params.is_file() else {}
    section = config.dataset(settings.get("dataset", {}))
    named_there = name is None or name == section.name
    if not named_there:
        section = config.dataset({"name": name, "mirror": section.mirror})
    source, sha256 = section.source, None
    if isinstance(source, Declared) and (sha256 := source.undeclared(section.fetcher)) is not None:
        source = dataclasses.replace(source, sha256=sha256)
    done = f"{store.obtain(source, section.fetcher)} is stored."
    if sha256 is None:
        return done
    if named_there and _fill_in(params, sha256):
        return f"{done} {params} declares it now: dataset.sha256 is {sha256}."
    return f"{done} Declare it in {params}, under dataset, where name is {section.name}:\n  sha256: {sha256}"


def _fill_in(params: Path, sha256: str) -> bool:
    """Add ``dataset.sha256`` to a YAML file, and leave all else as it is; False, and nothing done, if that fails."""
    text = params.read_text()
    node = _mapping(yaml.compose(text, Loader=yaml.SafeLoader), "dataset")
    if node is None or not node.value:
        return False
    if node.flow_style:
        end = node.value[0][1].end_mark.index
        filled = f"{text[:end]}, sha256: {sha256}{text[end:]}"
    else:
        before = node.value[:2][-1][0].start_mark  # of the second key, or the only one
        filled = f"{text[: before.index]}sha256: {sha256}\n{' ' * before.column}{text[before.index :]}"
    wanted = config.override(config.read(params), {"dataset.sha256": sha256})
    try:
        if yaml.safe_load(filled) != wanted:
            return False
    except (yaml.YAMLError, SettingsError):
        return False
    artifacts.write_bytes(params, filled.encode())
    return True


def _mapping(node: yaml.Node | None, key: str) -> yaml.MappingNode | None:
    """The mapping that stands under a key."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == key and isinstance(value, yaml.MappingNode):
                return value
    return None
