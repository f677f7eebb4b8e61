"""Facts of a study, with which algorithms warn before it runs, and a check of what they train."""

from __future__ import annotations

import functools
from typing import Any

from fedpipe.algorithms.base import Algorithm, StudyFacts
from fedpipe.algorithms.passes import Train
from fedpipe.core.errors import SettingsError
from fedpipe.models.base import FunctionalNetwork
from fedpipe.settings.params import Params

_networks: dict[tuple[Any, ...], FunctionalNetwork | None] = {}


def build_study_facts(algorithm: Algorithm, params: Params) -> StudyFacts:
    """Get the facts of a study for one of its algorithms."""
    return StudyFacts(
        rounds=params.federation.rounds,
        momentum=params.federation.momentum,
        has_validation=bool(params.dataset.validation_fraction or params.partition.has_validation),
        has_batch_norm_setting=hasattr(params.model, "batch_norm"),
        build_network=functools.partial(_build_empty_network, algorithm, params),
    )


def reject_passes_of_frozen_body(algorithm: Algorithm, label: str, params: Params) -> None:
    """Reject an algorithm with a pass that trains only the body, if the body of the model is frozen.

    Raises
    ------
    SettingsError
        A pass would have no tensor to train.
    """
    if not params.model.has_frozen_base or (network := _build_empty_network(algorithm, params)) is None:
        return
    bound = algorithm.bind(network, params.federation)
    passes = (*bound.local_passes(), *bound.personal_passes())
    if any(isinstance(one, Train) and one.only == () and one.epochs != 0 for one in passes):
        raise SettingsError(
            f"model.frozen: true can't be used with {label}, which has a pass that trains only the body. Use false, or "
            f"remove {label} from study.algorithms."
        )


def _build_empty_network(algorithm: Algorithm, params: Params) -> FunctionalNetwork | None:
    """Build the network that an algorithm trains, without values. Cached in a process."""
    info, model = params.dataset.dataset_info, params.model
    cache_key = (type(algorithm), repr(algorithm), type(model), repr(model), info.shape, info.classes)
    if cache_key not in _networks:
        try:
            _networks[cache_key] = FunctionalNetwork(
                lambda: algorithm.adapt(model.build_without_weights(info.shape, info.classes)), device="meta"
            )
        except Exception:  # a custom model that can't be built here: its jobs report why
            _networks[cache_key] = None
    return _networks[cache_key]
