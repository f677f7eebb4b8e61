"""Names and descriptions of a study's partitions, for files, figures and Snakemake's report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

#: Parts of a partition's name that appear only if they differ, with their prefix. The seed always appears.
OPTIONAL_NAME_PARTS = {
    "name": "",
    "subset": "subset",
    "split": "",
    "minimum": "minimum",
    "clients": "clients",
    "seed": "seed",
}


def name_partitions(partitions: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Name the partitions of a study by key, such as ``dirichlet-0.2-seed0``.

    A name has the scheme, its parameters and seed, other settings that differ between the partitions, and the key if
    the name would be ambiguous.
    """
    parts_by_key = {key: _get_name_parts(settings) for key, settings in partitions.items()}
    varied_names = {
        name for name in OPTIONAL_NAME_PARTS if len({str(parts.get(name)) for parts in parts_by_key.values()}) > 1
    }
    names = {
        key: "-".join(
            re.sub(r"[^A-Za-z0-9.]+", "_", f"{OPTIONAL_NAME_PARTS.get(name, '')}{value}")
            for name, value in parts.items()
            if name not in OPTIONAL_NAME_PARTS or name in varied_names or name == "seed"
        )
        for key, parts in parts_by_key.items()
    }
    count = Counter(names.values())
    return {key: name if count[name] == 1 else f"{name}-{key}" for key, name in names.items()}


def build_partition_report_labels(settings: dict[str, Any]) -> dict[str, str]:
    """Build the labels of a partition in Snakemake's report: data set, scheme and parameters, clients, seed."""
    texts = {name: replace_html_tag_brackets(str(value)) for name, value in _get_name_parts(settings).items()}
    return {"data set": texts.pop("name"), **texts}


def replace_html_tag_brackets(text: str) -> str:
    """Replace the ``<`` of tags by a wide one, for scripts in pages of Snakemake and DVC, which escape nothing.

    Examples
    --------
    >>> replace_html_tag_brackets("a < b</script>")
    'a < b＜/script>'
    """
    return re.sub(r"<(?=[A-Za-z/!?])", "＜", text)


def _get_name_parts(settings: dict[str, Any]) -> dict[str, Any]:
    """Get the settings that distinguish a partition, by name."""
    dataset, scheme = settings["dataset"], settings["partition"]
    parts = {name: dataset[name] for name in ("name", "subset", "split") if name in dataset}
    parts |= {"scheme": scheme["scheme"]}
    parts |= {
        name: value
        for name, value in sorted(scheme.items())
        if name not in {"scheme", "code", "sha256", *OPTIONAL_NAME_PARTS}
    }
    parts |= {"sha256": scheme["sha256"][:6]} if "sha256" in scheme else {}
    parts |= {"minimum": scheme["minimum"]} if "minimum" in scheme else {}
    return parts | {"clients": settings["clients"]} | ({"seed": settings["seed"]} if "seed" in settings else {})
