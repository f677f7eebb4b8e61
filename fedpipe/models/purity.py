"""Checks that a network's output depends only on its tensors, its inputs and a batch's noise key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedpipe.core.errors import SettingsError
from fedpipe.core.user_code import read_generator_states
from fedpipe.models.base import Model, Network, seed_generator
from fedpipe.models.layers import Mode, replace_stateful_layers

KINDS = {True: "token ids", False: "numbers", None: "inputs"}
ModelCheck = Callable[..., None]


def cache_check(check: ModelCheck) -> ModelCheck:
    """Cache a check of a model by its parameters, which may be lists, and its inputs."""
    passed_keys = set()

    @functools.wraps(check)
    def run_check(model: Model, *inputs: Any) -> None:
        cache_key = type(model), repr(dataclasses.asdict(model)), inputs
        if cache_key not in passed_keys:
            check(model, *inputs)
            passed_keys.add(cache_key)

    return run_check


@cache_check
def require_pure_network(
    model: Model, shape: tuple[int, ...], num_classes: int, has_tokens: bool | None = None
) -> None:
    """Reject networks whose results would depend on more than the run's settings.

    BatchNorm and dropout layers follow the mode of the current pass. Any other layer must be the same function in
    training and evaluation, without random numbers and without changing itself. The check calls the network to
    find layers that are not.

    Inputs are token ids if ``has_tokens`` is true, and of unknown kind if it is None.

    Raises
    ------
    SettingsError
        The message names the layer or the buffer.
    """
    name, mode = f"{type(model).__module__}.{type(model).__qualname__}", Mode()
    try:
        network, twin = (_build_with_same_seed(model, shape, num_classes) for _ in range(2))
    except Exception:  # a file that it reads may be missing until the job runs
        return
    tensors, twin_tensors = (dict((*net.named_parameters(), *net.named_buffers())) for net in (network, twin))
    for tensor_name in tensors | twin_tensors:
        value, twin_value = tensors.get(tensor_name), twin_tensors.get(tensor_name)
        is_lazy = value is not None and nn.parameter.is_lazy(value)
        if value is None or twin_value is None or not (is_lazy or torch.equal(value, twin_value)):
            raise SettingsError(
                f"model.name: '{name}' draws '{tensor_name}' with random numbers that do not depend on the study's "
                "seeds. Use PyTorch's, such as those of nn.init, instead of NumPy's or Python's."
            )
    try:
        replace_stateful_layers(network, mode, track=True)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _record_random_layers(network) as random_layers:
            buffer_versions = {buffer_name: value._version for buffer_name, value in network.named_buffers()}
            initial_buffers = {buffer_name: value.clone() for buffer_name, value in network.named_buffers()}
            with mode.activate(True, noise_key=torch.tensor(0)):
                compute_example_logits(network.train(), shape, has_tokens)
            with mode.activate(False):
                train_logits = compute_example_logits(network, shape, has_tokens)
                eval_logits = compute_example_logits(network.eval(), shape, has_tokens)
    except Exception as error:  # a user's code may raise anything
        reason: BaseException = error
        if has_tokens is None and error.__context__ and "'indices'" not in str(error.__context__):
            reason = error.__context__  # of numbers, which were tried first. An embedding rejects them as 'indices'
        raise SettingsError(
            f"model.name: the network of '{name}' can't be trained on {KINDS[has_tokens]} of shape {shape} "
            f"({type(reason).__name__}: {reason})."
        ) from error
    if random_layers:
        raise SettingsError(
            f"model.name: {random_layers[0]} of '{name}' draws random numbers that do not depend on the study's seeds. "
            "Use layers of nn.Dropout instead of F.dropout, RReLU, and dropout within attention or recurrent layers."
        )
    for buffer_name, value in network.named_buffers():
        # an iteration that has converged writes the same values
        is_written = value._version != buffer_versions[buffer_name]
        if is_written or not torch.equal(value, initial_buffers[buffer_name]):
            raise SettingsError(
                f"model.name: '{name}' changes its buffer '{buffer_name}' when it is called, but clients do not send "
                "or store it. Only BatchNorm may have running statistics."
            )
    if not torch.allclose(train_logits, eval_logits, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise SettingsError(
            f"model.name: '{name}' has other outputs in train mode than in eval mode. Only BatchNorm and nn.Dropout "
            "may depend on the mode."
        )


def _build_with_same_seed(model: Model, shape: tuple[int, ...], num_classes: int) -> Network:
    """Build a network with seed 0 of PyTorch's generator."""
    with seed_generator(0):
        return model.build(shape, num_classes)


def compute_example_logits(network: Network, shape: tuple[int, ...], has_tokens: bool | None = None) -> Tensor:
    """Logits of two inputs: floats or token ids. If the kind is unknown, both are tried."""
    inputs = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    tokens = torch.zeros(2, *shape, dtype=torch.int64)
    try:
        logits: Tensor = network(tokens if has_tokens else inputs)
    except RuntimeError:
        if len(shape) != 1 or has_tokens is not None:
            raise
        logits = network(tokens)
    return logits


@contextmanager
def _record_random_layers(network: nn.Module) -> Iterator[list[str]]:
    """Layers whose calls use a global random generator, innermost first."""
    random_layers: list[str] = []
    states: list[dict[str, Any]] = []
    hooks = []
    for name, layer in network.named_modules():
        description = f"the layer '{name}' ({type(layer).__name__})" if name else "the network"

        def save_rng_state(*_: Any) -> None:
            states.append(read_generator_states())

        def compare_rng_state(*_: Any, description: str = description) -> None:
            if states.pop() != read_generator_states():
                random_layers.append(description)

        hooks += [layer.register_forward_pre_hook(save_rng_state), layer.register_forward_hook(compare_rng_state)]
    try:
        yield random_layers
    finally:
        for hook in hooks:
            hook.remove()
