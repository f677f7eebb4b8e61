"""Checks an algorithm's class before it runs: names that are similar to a hook's, and hooks with wrong arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator
from typing import cast

from fedpipe.algorithms.base import Algorithm
from fedpipe.core import overrides
from fedpipe.core.components import component, registry
from fedpipe.core.errors import suggest_name
from fedpipe.settings.federation import Federation

#: Former names of hooks. A class that still has one would silently do what FedAvg does.
FORMER_HOOKS = {
    "combine": "aggregate",
    "work": "local_passes",
    "prepare": "personal_passes",
    "personalize": "personal_passes",
    "finetune": "finetune_passes",
    "first": "init_client",
    "deploy": "global_model",
    "beside": "extra_models",
    "observe": "metrics",
    "exchanged": "matrices",
    "nearest": "prototype_logits",
    "averaged": "server_optimizer_part",
    "several": "needs_several_models",
    "ignores": "unsupported_settings",
    "prototypes": "has_prototype_logits",
    "needs_epochs": "local_steps_conflict",
    "in_round": "bind_round",
    "without_dw": "dw_conflict",
    "training": "training_pass",
}
FIELDS = frozenset(field.name for field in dataclasses.fields(Algorithm))
HOOKS = tuple(name for name in dir(Algorithm) if not name.startswith("_") and name not in FIELDS)


def get_algorithm_name(algorithm: Algorithm) -> str:
    """Name of an algorithm in params.yaml or its dotted path, without extensions."""
    classes = [base for base in type(algorithm).__mro__ if issubclass(base, Algorithm)]
    named_classes = [base for base in classes if not base.__module__.startswith("fedpipe.algorithms.extensions")]
    return registry.get_component_name(component.ALGORITHM, named_classes[0])


def find_naming_mistakes(algorithm: Algorithm) -> Iterator[str]:
    """Messages about names in an algorithm's class and settings, and about arguments of its hooks."""
    label = get_algorithm_name(algorithm)
    yield from _find_class_mistakes(cast(Hashable, type(algorithm)), label)
    for key in algorithm.unsupported_settings:
        if key not in Federation.model_fields:
            yield (
                f"{label}.unsupported_settings: '{key}' is not a key of the section federation. "
                f"{suggest_name(key, [*Federation.model_fields])}"
            )


@functools.cache
def _find_class_mistakes(algorithm_class: type[Algorithm], label: str) -> list[str]:
    """Messages about an algorithm's class. Cached in a process, because many runs share a class."""
    declaration_mistakes = component.find_field_declaration_mistakes(component.ALGORITHM, algorithm_class)
    mistakes = [f"{label} {mistake}" for mistake in declaration_mistakes]
    classes = [base for base in algorithm_class.__mro__ if base not in Algorithm.__mro__]
    fields = {field.name for field in dataclasses.fields(algorithm_class)}
    known_names = {*HOOKS, *FIELDS, *fields, *overrides.find_names_in_methods(classes)}
    for base in classes:
        for name, value in vars(base).items():
            if name in HOOKS and callable(getattr(Algorithm, name)):
                mistakes += overrides.find_override_mistakes(label, name, value, Algorithm)
            elif (
                not name.startswith("_")
                and name not in known_names
                and (similar_name := overrides.find_similar_name(name, (*HOOKS, *FORMER_HOOKS)))
            ):  # if it is not a hook, it has no effect
                hook = FORMER_HOOKS.get(similar_name, similar_name)
                mistakes.append(f"{label}.{name} is never used, because no hook has that name. Did you mean '{hook}'?")
    for name in fields:
        if name in HOOKS:
            mistakes.append(f"{label}: the field '{name}' hides the hook with that name. Rename the field.")
    return mistakes
