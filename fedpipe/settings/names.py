"""Replaces names of clients and classes in section federation by numbers, and counts the clients of the data set.

Keys contain the numbers, so that both spellings have the same key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedpipe.core.components import registry
from fedpipe.core.components.component import PARTITION, Component
from fedpipe.core.errors import SettingsError, UserError, find_nearest_name
from fedpipe.data import assignment, store
from fedpipe.data.partitions.base import ColumnScheme
from fedpipe.data.samples import Column
from fedpipe.settings.dataset import Data
from fedpipe.settings.federation import Federation
from fedpipe.settings.loader import convert_to_mapping, override_settings

MAX_LISTED = 10  #: maximum number of known names in a message


def replace_names_by_numbers(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace names of clients and classes by numbers. Fill in the number of clients of the scheme ``natural``.

    Reject an unknown name, and a number that is also the name of another client or class. If the data set or the
    partition can't be used, for example because the data set is not stored, the result lacks the settings with names.
    Then the validation reports why.
    """
    if not isinstance(settings.get("federation") or {}, Mapping):
        return settings
    federation = convert_to_mapping(settings.get("federation"))
    drift = convert_to_mapping(federation.get("drift"))
    scheme_settings = convert_to_mapping(settings.get("partition"))
    client_lists: dict[str, Any] = {
        f"federation.{key}": clients
        for key, clients in (("held_out", federation.get("held_out")), ("drift.clients", drift.get("clients")))
        if isinstance(clients, (list, tuple))
    }
    label_map: Any = drift.get("label_map")
    needs_count = scheme_settings.get(PARTITION.selector) == "natural" and "clients" not in federation
    if not (needs_count or client_lists or isinstance(label_map, Mapping)):
        return settings
    try:
        Federation.model_validate({"clients": federation.get("clients", 1)})
        dataset, scheme = _parse_dataset_and_partition(settings)
    except (ValidationError, UserError):
        if not (needs_count or any(map(_has_names, [*client_lists.values(), label_map]))):
            return settings
        unnamed = {key: value for key, value in federation.items() if key not in {"held_out", "drift"}}
        return settings | {"federation": unnamed}
    changes: dict[str, Any] = {}
    if needs_count:
        changes["federation.clients"] = _count_clients(dataset, scheme)
    default = federation.get("clients", Federation.model_fields["clients"].default)
    num_clients = changes.get("federation.clients", default)
    for key, clients in client_lists.items():
        changes[key] = _find_client_numbers(key, clients, settings, dataset, scheme, num_clients)
    if isinstance(label_map, Mapping):
        changes["federation.drift.label_map"] = _replace_class_names_by_numbers(label_map, dataset)
    return override_settings(settings | {"federation": federation}, changes)


def _has_names(value: Any) -> bool:
    """Whether a list or mapping contains text."""
    parts = [*value, *value.values()] if isinstance(value, Mapping) else value
    return isinstance(parts, (list, tuple)) and any(isinstance(part, str) for part in parts)


def _parse_dataset_and_partition(settings: dict[str, Any]) -> tuple[Data, Component]:
    """Parse the data set and the partition. Raise an error if the names of their clients and classes are not known."""
    dataset = Data.model_validate(settings.get("dataset") or {})
    scheme = registry.parse_component(PARTITION, settings.get("partition") or {})
    if isinstance(scheme, ColumnScheme):
        scheme.find_column(dataset.extra_columns, dataset.omitted_columns)
    assert dataset.dataset_info
    return dataset, scheme


def _load_columns(dataset: Data) -> tuple[Any, Any, dict[str, Column]]:
    """Load the labels, the mask of the test set and the columns of a stored data set, or of its subset."""
    samples = store.load_samples(dataset.dataset_path)
    labels, test = np.asarray(samples.y), np.asarray(samples.test)
    subset = dataset.subset
    indices = np.arange(len(labels)) if subset is None else assignment.select_sample_subset(labels, test, subset)
    columns = {name: Column(column.codes[indices], column.names) for name, column in samples.columns.items()}
    return labels[indices], test[indices], columns


def _count_samples_by_value(dataset: Data, scheme: ColumnScheme) -> dict[str, int]:
    """Count the samples of each value in a column (:func:`~fedpipe.data.assignment.count_samples_by_value`)."""
    _, test, columns = _load_columns(dataset)
    return assignment.count_samples_by_value(scheme, test, dataset.split, columns)


def _count_clients(dataset: Data, scheme: Component) -> int:
    """Count the clients of the data set with the scheme ``natural``."""
    assert isinstance(scheme, ColumnScheme)
    minimum: int = vars(scheme)["minimum"]
    if count := sum(size >= minimum for size in _count_samples_by_value(dataset, scheme).values()):
        return count
    raise SettingsError(f"partition.minimum: no client of the data set has {minimum} samples. Use a smaller minimum.")


def _find_client_numbers(
    key: str, clients: Iterable[Any], settings: dict[str, Any], dataset: Data, scheme: Component, num_clients: Any
) -> list[Any]:
    """Numbers of clients. A value of the column, such as a domain, means all of its clients."""
    if not isinstance(scheme, ColumnScheme):
        if name := next((client for client in clients if isinstance(client, str)), None):
            raise SettingsError(
                f"{key}: '{name}' can't be used, because only clients of the partitions natural and by-domain have "
                "names. Use numbers from 0."
            )
        return list(clients)
    seed_lists = [
        convert_to_mapping(settings.get(section)).get("seeds", default)
        for section, default in (("study", [0]), ("tune", []))
    ]
    seeds = [seed for seeds in seed_lists if isinstance(seeds, list) for seed in seeds if isinstance(seed, int)]
    seeds = seeds if scheme.seed is None else [scheme.seed]
    labels, test, columns = _load_columns(dataset)
    draws = {
        tuple(assignment.list_client_column_values(scheme, labels, test, num_clients, dataset.split, seed, columns))
        for seed in seeds or [0]
    }
    if len(draws) > 1 and _has_names(clients):
        raise SettingsError(
            f"{key}: names can't be used, because the seeds draw different clients. Set partition.seed, or remove "
            "federation.clients to use all clients of the data set."
        )
    numbers: list[Any] = []
    for values, client in itertools.product(draws, clients):
        names = assignment.make_unique_client_names(values)
        matches = [number for number, texts in enumerate(zip(names, values, strict=True)) if str(client) in texts]
        if not isinstance(client, str):
            _reject_ambiguous_number(key, client, matches)
            matches = [client]
        elif not matches:
            reason = _explain_missing_client(client, dataset, scheme) or _suggest_listed_name(client, [*names, *values])
            raise SettingsError(f"{key}: '{client}' is not a client. {reason}")
        numbers += matches
    return numbers if len(draws) == 1 else list(clients)


def _reject_ambiguous_number(key: str, value: Any, matches: Sequence[int]) -> None:
    """Reject a number that is also the name of another client or class. ``matches``: the numbers with this name."""
    if matches and [*matches] != [value]:
        raise SettingsError(
            f"{key}: {value} is also a name, of number {', '.join(map(str, matches))}. Put names into quotes, as in "
            f"'{value}'."
        )


def _explain_missing_client(value: str, dataset: Data, scheme: ColumnScheme) -> str | None:
    """Explain why a value of the scheme's column is not a client. A sentence with advice. None if it is not a value."""
    size, minimum = _count_samples_by_value(dataset, scheme).get(value), getattr(scheme, "minimum", 1)
    if not size:
        return None
    if size < minimum:
        return f"It has {size} samples, but partition.minimum is {minimum}. Use at most {size}, or remove the name."
    return "The seed has drawn other clients. Remove federation.clients to use all clients of the data set."


def _replace_class_names_by_numbers(label_map: Mapping[Any, Any], dataset: Data) -> dict[Any, Any]:
    """Replace names of classes in `federation.drift.label_map`."""
    names = dataset.class_names

    def find_class(label: Any) -> Any:
        if not isinstance(label, str):
            matches = [names.index(str(label))] if str(label) in names else []
            _reject_ambiguous_number("federation.drift.label_map", label, matches)
            return label
        if label not in names:
            raise SettingsError(
                f"federation.drift.label_map: '{label}' is not a class. {_suggest_listed_name(label, names)}"
            )
        return names.index(label)

    return {find_class(old): find_class(new) for old, new in label_map.items()}


def _suggest_listed_name(name: str, names: Sequence[str]) -> str:
    """Suggest the nearest name, or list the first ones. A sentence."""
    if nearest_name := find_nearest_name(name, names):
        return f"Did you mean '{nearest_name}'?"
    distinct_names = list(dict.fromkeys(names))
    listed_names = ", ".join(distinct_names[:MAX_LISTED])
    return f"Use one of: {listed_names}{', …' if len(distinct_names) > MAX_LISTED else ''}."
