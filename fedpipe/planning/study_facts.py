"""Facts of a study, with which algorithms warn before it runs, and checks of their passes and models."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from fedpipe.algorithms.base import Algorithm, StudyFacts
from fedpipe.algorithms.fedcm import FedCM
from fedpipe.algorithms.passes import Train
from fedpipe.algorithms.scaffold import Scaffold
from fedpipe.core.components import registry
from fedpipe.core.components.component import MODEL
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.data.datasets.base import DatasetInfo
from fedpipe.models.base import FunctionalNetwork, Model, seed_generator
from fedpipe.models.purity import compute_example_logits
from fedpipe.planning.diagnostics import is_cell_selected
from fedpipe.planning.grid import add_location_to_errors
from fedpipe.planning.plan import Cell
from fedpipe.settings.diagnostics import HeadNorms, Locals
from fedpipe.settings.params import Params

MINIMUM_RELATIVE_RATE = 1e-12  #: smallest rate of a round, over the base rate, that is not 0 except for rounding
_networks: dict[tuple[Any, ...], FunctionalNetwork | None] = {}
_softmax_networks: dict[tuple[Any, ...], bool] = {}


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
    """Reject an algorithm with a pass that would train nothing, because it trains only the body of a frozen model."""
    if not params.model.has_frozen_base or (network := _build_empty_network(algorithm, params)) is None:
        return
    bound = algorithm.bind(network, params.federation)
    passes = (*bound.local_passes(), *bound.personal_passes())
    if any(isinstance(one, Train) and one.only == () and one.epochs != 0 for one in passes):
        raise SettingsError(
            f"model.frozen: true can't be used with {label}, which has a pass that trains only the body. Use false, or "
            f"remove {label} from study.algorithms."
        )


def require_learning_rate_of_personal_passes(
    algorithm: Algorithm, label: str, params: Params, protocols: Sequence[str], rounds: Sequence[int]
) -> None:
    """Require that the passes which make the personal models of ``protocols`` also train after these rounds."""
    federation = params.federation
    rates = {number: federation.with_round_learning_rate(number + 1).learning_rate for number in rounds}
    has_personal_protocol = any(protocol.startswith("personal") for protocol in protocols)
    if not has_personal_protocol or all(rates.values()) or not federation.learning_rate:
        return
    if (network := _build_empty_network(algorithm, params)) is None:
        return
    passes = algorithm.bind(network, federation).personal_passes()
    if any(isinstance(one, Train) and one.step is None and one.epochs != 0 for one in passes):
        raise SettingsError(
            f"federation.schedule: after round {min(number for number in rounds if not rates[number])} the learning "
            f"rate is 0, so the pass that makes the personal models of {label} would not change them. Use a minimum "
            "above 0, or another period."
        )


def require_learning_rate_of_each_round(algorithm: Algorithm, label: str, params: Params) -> None:
    """Require a learning rate in all rounds but the last if the method computes gradients as update / learning rate."""
    federation = params.federation
    # By class: an attribute of these methods would change the keys of their runs.
    divides_by_rate = isinstance(algorithm, FedCM) or (
        isinstance(algorithm, Scaffold) and federation.optimizer != "adam"
    )
    if not divides_by_rate:
        return
    for number in range(1, federation.rounds):
        rate = federation.with_round_learning_rate(number).learning_rate
        if rate < MINIMUM_RELATIVE_RATE * federation.learning_rate:
            raise SettingsError(
                f"federation.schedule: the learning rate of round {number} is 0, and {label} divides the clients' "
                "updates by it. Use a minimum above 0, or another period."
            )


def has_model(algorithm: Algorithm, params: Params, protocol: str) -> bool:
    """Whether an algorithm has the model of a protocol. True if it can't be computed without values."""
    model = protocol.partition("-on-")[0]
    if model == "prototype":
        return algorithm.has_prototype_logits
    if model != "global" or (network := _build_empty_network(algorithm, params)) is None:
        return True
    if params.federation.buffers == "keep" and network.buffer_names:
        return False  # its running statistics are at the clients
    bound = algorithm.bind(network, params.federation.exclude_held_out_clients()).bind_round(0, 0)
    try:
        with torch.device("meta"), torch.no_grad():
            initial_model = _make_empty_model(network)
            return bound.global_model(bound.init(lambda _: initial_model.map(torch.empty_like))) is not None
    except Exception:  # a custom algorithm whose state depends on values
        return True


def require_model_of_tune_protocol(algorithm: Algorithm, label: str, params: Params, protocol: str) -> None:
    """Require that an algorithm has the model by which `tune` ranks its draws."""
    if not has_model(algorithm, params, protocol):
        raise SettingsError(
            f"tune.by: {protocol} can't be used with {label}, which has no such model. Set algorithms.{label}.protocol "
            "to a model that it has, such as personal-on-local."
        )


def require_models_of_diagnostics(algorithm: Algorithm, params: Params, cell: Cell) -> None:
    """Require that the algorithm of a cell has the models that the study's diagnostics analyze."""
    label = cell.algorithm
    for name, diagnostic in params.diagnostics.items():
        if not is_cell_selected(diagnostic, cell):
            continue
        if diagnostic.needs_global_model and not has_model(algorithm, params, "global-on-global"):
            raise SettingsError(
                f"diagnostics.{name}: {diagnostic.kind} can't be used with {label}, which has no global model. Leave "
                f"{label} out of diagnostics.{name}.algorithms."
            )
        for number in diagnostic.rounds:
            round_number = cell.rounds if number == "last" else number
            if isinstance(diagnostic, HeadNorms) and "finetuned" in diagnostic.models:
                with add_location_to_errors([f"diagnostics.{name}.models"]):
                    params.federation.require_rate_of_finetuning(round_number)
            if isinstance(diagnostic, Locals) and diagnostic.clients is not None:
                key = f"diagnostics.{name}.clients"
                _require_participants(algorithm, params, cell, diagnostic.clients, key, round_number)
        network = _build_empty_network(algorithm, params) if diagnostic.needs_linear_head else None
        if network and "head.weight" not in _make_empty_model(network):
            raise SettingsError(
                f"diagnostics.{name}: {diagnostic.kind} can't be used with {label}, whose models have no head.weight. "
                f"Use a model with a linear head, or leave {label} out of diagnostics.{name}.algorithms."
            )


def _require_participants(
    algorithm: Algorithm, params: Params, cell: Cell, required: Sequence[int], key: str, round_number: int
) -> None:
    """Require that clients train in a round. If a method selects participants, only held-out clients are known."""
    federation = params.federation
    held_out = federation.draw_held_out_clients(cell.seed)
    clients = [client for client in range(federation.clients) if client not in held_out]
    if type(algorithm).select_participants is Algorithm.select_participants:
        positions = federation.exclude_held_out_clients().draw_participants(cell.seed, round_number)
        clients = [clients[position] for position in positions]
    if missing := [client for client in required if client not in clients]:
        raise SettingsError(
            f"{key}: with seed {cell.seed}, client {missing[0]} does not train in round {round_number}. Use "
            f"participants, {clients}, or remove the key to analyze all of them."
        )


def list_missing_accuracy_warnings(algorithm: Algorithm, label: str, params: Params) -> list[str]:
    """List a warning if an algorithm has no accuracy, because it lacks the model of each protocol of the study."""
    protocols = params.evaluation.protocols
    by_cost = sorted(protocols, key=lambda protocol: protocol.startswith("global"))
    if any(has_model(algorithm, params, protocol) for protocol in by_cost):
        return []
    return [
        f"evaluation.protocols: {label} has no model for {', '.join(protocols)}, so it has no accuracy. Add another "
        "protocol, such as personal-on-local."
    ]


def list_model_warnings(params: Params) -> list[str]:
    """List a warning if a custom network ends with a softmax, although losses take logits."""
    model, info, has_tokens = params.model, params.dataset.dataset_info, params.dataset.has_tokens
    name = registry.get_component_name(MODEL, type(model))
    cache_key = (type(model), repr(model), info.shape, info.classes, has_tokens)
    if "." in name and cache_key not in _softmax_networks:
        _softmax_networks[cache_key] = _has_softmax_outputs(model, info, has_tokens)
    if not _softmax_networks.get(cache_key):
        return []
    return [
        f"model.name: the outputs of '{name}' are at least 0 and sum to 1, as after a softmax. Remove the softmax, "
        "because losses take logits."
    ]


def _has_softmax_outputs(model: Model, info: DatasetInfo, has_tokens: bool | None) -> bool:
    """Whether the outputs for two inputs are probabilities. False if the network can't be built here."""
    with suppress(Exception), seed_generator(0), torch.no_grad():
        outputs = compute_example_logits(model.build(info.shape, info.classes).eval(), info.shape, has_tokens)
        return bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), torch.ones(2, dtype=outputs.dtype))
    return False


@functools.cache
def _make_empty_model(network: FunctionalNetwork) -> Tensors:
    """Make a model without values. Cached in a process, because a network is built again for each model."""
    with torch.device("meta"):
        return network.make_initial_model(0)


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
