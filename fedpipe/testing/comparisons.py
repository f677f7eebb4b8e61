"""Comparisons for the checks: runs of a small federation by several executors."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.passes import Measure
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.core.user_code import read_generator_states
from fedpipe.engine import contract
from fedpipe.engine.clients.executor import ClientTask, Outcome, Phase, TestSet, activate_eval_mode, get_passes
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.loop import ClientRun
from fedpipe.engine.server.device import use_server_device
from fedpipe.engine.torch_env.trees import stack_states, unstack_client
from fedpipe.models.base import FunctionalNetwork
from fedpipe.testing.trial import Trial, describe_difference, make_trial

Check = Callable[[Algorithm], list[str]]

TESTS: tuple[TestSet, ...] = ("local", "global")
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01}
ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.01}
ROUNDING = 1e-12  #: tolerance for sums in another order in float64, relative to a tensor's largest entry
BATCH_NORM_ROUNDING = 1e-10  #: tolerance with batch normalization, which divides by small variances

PADDING_ADVICE = (
    "Use batch.mean, batch.sum and batch.size, which leave out the samples that pad a batch, and share nothing between "
    "clients."
)


def call_recorded_hooks(trial: Trial) -> None:
    """Call the hooks whose results are recorded."""
    algorithm, server = trial.algorithm, trial.server
    with use_server_device(server):
        contract.compute_global_model(algorithm, server)
        contract.compute_extra_models(algorithm, server)
        contract.validate_matrices(algorithm, algorithm.matrices(server))
        contract.validate_metrics(algorithm, algorithm.metrics(server))


def find_invalid_tensors(trial: Trial) -> Iterator[str]:
    """Tensors of a round that can't be stored or counted."""
    states = {"aggregate": [trial.server], "send": list(trial.send([0]))}
    states["upload"] = [outcome.upload for outcome in trial.outcomes]
    states["keep"] = [outcome.kept_state for outcome in trial.outcomes]
    for hook, hook_states in states.items():
        for value in pytree.tree_leaves(hook_states):
            if value.requires_grad:
                yield f"`{hook}` returns a tensor that requires a gradient. Detach it."
            elif value.dtype == torch.bool or value.is_complex():
                yield f"`{hook}` returns a tensor of {value.dtype}. Convert it to floating point or integers."
            elif not value.isfinite().all():
                yield f"`{hook}` returns infinity or NaN on simple data. Keep divisions and logarithms away from 0."
            else:
                continue
            break


def check_omitted_parts(trial: Trial, outcomes: Sequence[Outcome], received_states: Sequence[State]) -> Iterator[str]:
    """Check that other values in the parts that `traffic` leaves out have no effect."""
    states = dict(zip((outcome.client for outcome in outcomes), received_states, strict=True))

    def make_scrambled_download(ids: Sequence[int]) -> tuple[State, State]:
        return {}, stack_states([_scramble_omitted_parts(trial.algorithm, states[client]) for client in ids])

    task = ClientTask("train", trial.rounds + 1, list(states), trial.client_states.__getitem__, make_scrambled_download)
    new_outcomes = list(trial.executor.run(task))
    advice = "Leave out only what no hook reads."
    for new_outcome, old_outcome in zip(new_outcomes, outcomes, strict=True):
        if describe_difference(
            (new_outcome.upload, new_outcome.kept_state), (old_outcome.upload, old_outcome.kept_state)
        ):
            yield f"`traffic` leaves out a part of the download that clients read. {advice}"
            return
    ids, weights = zip(*((client, weight) for client, weight, _ in trial.collect_uploads(outcomes)), strict=True)
    scrambled_uploads = Uploads(
        ids, weights, [_scramble_omitted_parts(trial.algorithm, outcome.upload) for outcome in outcomes]
    )
    if describe_difference(trial.aggregate(scrambled_uploads), trial.aggregate(trial.collect_uploads(outcomes))):
        yield f"`traffic` leaves out a part of the upload that the server reads. {advice}"


def _scramble_omitted_parts(algorithm: Algorithm, state: State) -> State:
    """Change the values that `traffic` leaves out. Single numbers stay, because they may be counts of filled slots."""
    counted_state = algorithm.traffic(state)

    def scramble_tensor(value: Tensor, counted_tensor: Tensor | None) -> Tensor:
        if value.numel() < 2 or (
            counted_tensor is not None and (counted_tensor.dim() == 0 or counted_tensor.shape[1:] != value.shape[1:])
        ):
            return value
        value, first = value.clone(), 0 if counted_tensor is None else len(counted_tensor)
        value[first:] = value[first:] * 3 + 1
        return value

    new_state: State = {}
    for part, value in state.items():
        counted_part = counted_state.get(part)
        if isinstance(value, Tensors):
            new_state[part] = Tensors(
                (name, scramble_tensor(tensor, counted_part and counted_part.get(name)))
                for name, tensor in value.items()
            )
        else:
            new_state[part] = scramble_tensor(value, counted_part)
    return new_state


def find_dependent_download(trial: Trial) -> str | None:
    """Describe how a client's download depends on the other clients of `send`, or return None."""
    for ids in ([*range(len(trial.clients))], [0, 1, 2], [2, 2]):
        common, client_parts = trial.send(ids)
        for index, client in enumerate(ids):
            download = common | unstack_client(client_parts, index)
            if message := describe_difference(download, get_received_state(trial, client), ROUNDING):
                return f"client {client} with ids {ids} and with ids [{client}]: {message}"
    return None


def find_measure_sum_mismatch(trial: Trial) -> str | None:
    """Describe how the sums of a Measure pass over two halves differ from those over all samples, or return None."""
    client = int(np.argmax(trial.clients.sizes))  # the one whose halves have most samples
    algorithm = trial.algorithm.bind_round(trial.rounds + 1, trial.clients.seed)
    phases: tuple[Phase, ...] = ("train", "finetune")
    for phase in phases:
        client_run, state = ClientRun(algorithm, trial.clients, trial.rounds + 1, client), trial.start(client)
        for pass_ in get_passes(algorithm, phase, 1):
            has_noise = algorithm.needs_step_noise and isinstance(pass_, Measure) and pass_.is_augmented
            if isinstance(pass_, Measure) and not has_noise:  # the noise of a batch differs from that of its halves
                samples = trial.clients.train if pass_.on == "train" else trial.clients.validation_or_train
                batch = Batch(*trial.clients.gather_samples(samples[client]))
                with activate_eval_mode(algorithm, state):
                    all_sums, first_sums, last_sums = (
                        contract.compute_measure_pass_sums(algorithm, pass_, state, part)
                        for part in (batch, *batch.split(2))
                    )
                sums = {name: first_sums[name] + value for name, value in last_sums.items()}
                if message := describe_difference(sums, all_sums, ROUNDING):
                    return message
            state = client_run.run_pass(pass_, state)
    return None


# -- runs and their results --------------------------------------------------------------------------------------------


def compare_loop_and_stacks(
    algorithm: Algorithm, widths: Sequence[int], rounds: int, model: str = "mlp", **settings: Any
) -> Iterator[str]:
    """Run rounds in the loop and the same rounds in stacks."""
    loop = make_trial(algorithm, model, **settings)
    stacks = [make_trial(algorithm, model, width=width, **settings) for width in widths]
    trained_clients = set()
    for _ in range(rounds):
        loop.run(tests=TESTS)
        trained_clients |= {outcome.client for outcome in loop.outcomes}
        for trial in stacks:
            trial.run(tests=TESTS)
            if message := describe_trial_difference(trial, loop, ROUNDING):
                yield (
                    f"clients trained in one call differ from clients trained one after the other ({message}). "
                    f"{PADDING_ADVICE}"
                )
                return
    assert rounds < 3 or 0 in trained_clients, "the client with a single sample must be a participant"


def describe_trial_difference(trial: Trial, other: Trial, tolerance: float) -> str | None:
    """Describe how two trials differ after a round, or return None."""
    results, other_results = (
        collect_client_results(side.outcomes) | {"server": side.server} for side in (trial, other)
    )
    return describe_difference(results, other_results, tolerance)


def collect_client_results(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Uploads, kept states, scores and bytes of clients as one tree."""
    return {
        f"client {outcome.client}": {
            "upload": outcome.upload,
            "keep": outcome.kept_state,
            "scores": {test: tuple(score) for test, score in outcome.scores.items()},
            "bytes": (outcome.bytes_down, outcome.bytes_up),
        }
        for outcome in outcomes
    }


def collect_results_and_states(trial: Trial) -> dict[str, Any]:
    """Results of the last round and all states as one tree."""
    return collect_client_results(trial.outcomes) | {"server": trial.server, "kept": trial.client_states}


def list_models(state: State, net: FunctionalNetwork) -> list[Tensors]:
    """The models of a state: parts whose running statistics have the network's shapes, also of several models."""
    return [
        part
        for part in state.values()
        if isinstance(part, Tensors)
        and all(part[name].shape[-1:] == net.shapes[name][-1:] for name in net.buffer_names if name in part)
    ]


def get_received_state(trial: Trial, client: int) -> State:
    """What a client receives."""
    common, client_parts = trial.send([client])
    return common | unstack_client(client_parts, 0)


def explain_outlying_statistic(
    name: str, value: Tensor, old_models: Sequence[Tensors], uploaded_models: Sequence[Tensors]
) -> str | None:
    """Explain why a running statistic of the server can't be an average of models or changes, or return None."""
    advice = "Average running statistics at the server, and apply other rules only to self.net.parameters."
    if name.endswith("running_var") and bool((value < 0).any()):
        return f"the server's '{name}' has a negative variance ({value.min():.3g}). {advice}"
    old_values, uploads = (
        [model[name] for model in models if name in model] for models in (old_models, uploaded_models)
    )
    if not all(tensor.is_floating_point() for tensor in (value, *uploads)):  # codes, whose scale is unknown
        return None
    changes = [value - old_value for old_value in old_values if old_value.shape == value.shape]
    if _is_in_range(value, old_values + uploads) or any(_is_in_range(change, uploads) for change in changes):
        return None
    return f"the server's '{name}' is outside the range of the clients' uploads. {advice}"


def _is_in_range(value: Tensor, known_values: Sequence[Tensor]) -> bool:
    """Whether each entry is between the smallest and the largest known entry, up to rounding."""
    if not known_values:
        return False
    rows = torch.cat([known_value.reshape(-1, *value.shape[-1:]) for known_value in known_values])
    low, high = rows.min(0).values, rows.max(0).values
    slack = BATCH_NORM_ROUNDING * rows.abs().max()
    return bool(((value >= low - slack) & (value <= high + slack)).all())


def list_attributes_and_globals(algorithm: Algorithm) -> dict[str, Any]:
    """Values that an algorithm could change: its attributes, those of its classes, and globals of their modules."""
    values: dict[str, Any] = {}
    for base in _list_derived_classes(algorithm):
        values |= {f"{base.__name__}.{name}": value for name, value in vars(base).items() if not name.startswith("__")}
        module = sys.modules.get(base.__module__)
        module_values = (
            {name: value for name, value in vars(module).items() if not name.startswith("__")} if module else {}
        )
        values |= {f"{base.__module__}.{name}": value for name, value in module_values.items()}
    return list_attributes(algorithm) | {name: _convert_to_comparable(value) for name, value in values.items()}


def list_attributes(algorithm: Algorithm) -> dict[str, Any]:
    """Attributes of an algorithm and of its network, except cached properties."""
    attributes = {f"self.{name}": value for name, value in vars(algorithm).items() if name not in ("net", "federation")}
    attributes |= {f"self.net.{name}": value for name, value in vars(algorithm.net).items()}
    for base in _list_derived_classes(algorithm):
        for name, value in vars(base).items():
            if isinstance(value, functools.cached_property):
                attributes.pop(f"self.{name}", None)
    return {name: _convert_to_comparable(value) for name, value in attributes.items()}


def watch_round_copies(algorithm: Algorithm) -> list[tuple[Algorithm, dict[str, Any]]]:
    """Record each copy that an algorithm makes for a round, with its attributes at that time."""
    copies = []

    def bind_round(round_number: int, seed: int) -> Algorithm:
        bound = type(algorithm).bind_round(algorithm, round_number, seed)
        copies.append((bound, list_attributes(bound)))
        return bound

    object.__setattr__(algorithm, "bind_round", bind_round)
    return copies


def _list_derived_classes(algorithm: Algorithm) -> list[type]:
    return [base for base in type(algorithm).__mro__ if base not in Algorithm.__mro__]


def _convert_to_comparable(value: Any) -> Any:
    """Convert a value so that numbers, tensors and their containers compare by content, other objects by identity."""
    match value:
        case Tensor():
            return (value.shape, repr(value.detach().cpu().contiguous().view(-1).tolist()))
        case np.ndarray():
            return (value.shape, value.tobytes())
        case dict():
            return {repr(name): _convert_to_comparable(item) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_convert_to_comparable(item) for item in value]
        case bool() | int() | float() | str() | None:
            return repr(value)  # a text, because NaN differs from itself
    return id(value)


@contextmanager
def seed_and_watch_generators(seed: int) -> Iterator[list[str]]:
    """Seed the global generators and restore them afterwards. Yields the libraries whose generators were used."""
    saved_states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    used_generators: list[str] = []
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    seeded_states, module_count = read_generator_states(), len(sys.modules)
    try:
        yield used_generators
    finally:
        states = read_generator_states()
        if len(sys.modules) > module_count:  # libraries may draw from Python's generator while they are imported
            del states["Python"]
        used_generators += [library for library, state in states.items() if state != seeded_states[library]]
        torch.set_rng_state(saved_states[0])
        np.random.set_state(saved_states[1])  # noqa: NPY002
        random.setstate(saved_states[2])


def compute_mean_loss(outcomes: Sequence[Outcome]) -> float:
    """Mean loss of the clients."""
    scores = [outcome.scores["local"] for outcome in outcomes]
    return sum(score.loss for score in scores) / sum(score.total for score in scores)


@functools.cache
def make_digit_clients(device: torch.device) -> FederatedData:
    """Ten clients with 30 training and 6 test images of handwritten digits, of three classes each."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    train, test = [], []
    for client in range(10):
        class_indices = [
            np.flatnonzero(labels == (client + step) % 10)[12 * step : 12 * step + 12] for step in range(3)
        ]
        train.append(np.concatenate([indices[:10] for indices in class_indices]))
        test.append(np.concatenate([indices[10:] for indices in class_indices]))
    x = torch.as_tensor(images.reshape(-1, 1, 8, 8) / 16, dtype=torch.float32)
    return FederatedData(x, torch.as_tensor(labels), train, test, np.concatenate(test), 10, 0, device=device)
