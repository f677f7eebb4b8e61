"""Whether a network computes what its tensors, its inputs and a batch's key say, and nothing else."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedpipe.errors import SettingsError
from fedpipe.layers import Mode, functional
from fedpipe.models.base import Model, Network

KINDS = {True: "token ids", False: "numbers", None: "inputs"}
Check = Callable[..., None]


def once(check: Check) -> Check:
    """Let a check of a model be made once for the same parameters, which may be lists, and the same inputs."""
    passed = set()

    @functools.wraps(check)
    def checked(family: Model, *inputs: Any) -> None:
        what = type(family), repr(dataclasses.asdict(family)), inputs
        if what not in passed:
            check(family, *inputs)
            passed.add(what)

    return checked


@once
def refuse_unsteady(family: Model, shape: tuple[int, ...], classes: int, has_tokens: bool | None = None) -> None:
    """Refuse networks whose results would hang on more than their run's settings.

    BatchNorm and dropout layers act as the pass at work says. Any other layer is taken to act alike in training and in
    evaluation, without random numbers and without writing into itself; one that does not is found by calling it.

    Parameters
    ----------
    family
        One of its networks is made and called.
    shape, classes
        What it is for.
    has_tokens
        Whether inputs are token ids; None if that is not known.

    Raises
    ------
    SettingsError
        A sentence that names the layer, or the buffer.
    """
    name, mode = f"{type(family).__module__}.{type(family).__qualname__}", Mode()
    try:
        with torch.random.fork_rng(devices=[]):
            network = family.build(shape, classes)
    except Exception:  # a file that it reads may not be here yet: the job tells
        return
    try:
        functional(network, mode, track=True)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _drawing(network) as drawing:
            before = {place: value.clone() for place, value in network.named_buffers()}
            with mode.of(True, key=torch.tensor(0)):
                logits_of(network.train(), shape, has_tokens)
            with mode.of(False):
                as_in_training = logits_of(network, shape, has_tokens)
                alone = logits_of(network.eval(), shape, has_tokens)
    except Exception as error:  # it is the user's own code
        raise SettingsError(
            f"model.name: the network of '{name}' can't be trained on {KINDS[has_tokens]} of shape {shape} "
            f"({type(error).__name__}: {error})."
        ) from error
    if drawing:
        raise SettingsError(
            f"model.name: {drawing[0]} of '{name}' draws random numbers that no seed of the study gives; layers of "
            "nn.Dropout are what a network should have, in place of F.dropout, RReLU and the dropout within attention "
            "and recurrent layers."
        )
    for place, value in network.named_buffers():
        if not torch.equal(value, before[place]):
            raise SettingsError(
                f"model.name: '{name}' changes its buffer '{place}' as it is called, which no client would send or "
                "keep; only BatchNorm should have statistics of its own."
            )
    if not torch.allclose(as_in_training, alone, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise SettingsError(
            f"model.name: '{name}' computes otherwise after .train() than after .eval(); only BatchNorm and nn.Dropout "
            "should."
        )


def logits_of(network: Network, shape: tuple[int, ...], has_tokens: bool | None = None) -> Tensor:
    """The logits of two inputs: of numbers, or of token ids; where neither is known, a row may be either."""
    inputs = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    tokens = torch.zeros(2, *shape, dtype=torch.int64)
    try:
        made: Tensor = network(tokens if has_tokens else inputs)
    except RuntimeError:
        if len(shape) != 1 or has_tokens is not None:
            raise
        made = network(tokens)
    return made


@contextmanager
def _drawing(network: nn.Module) -> Iterator[list[str]]:
    """The layers within whose calls PyTorch's generator moves on, the innermost first."""
    found: list[str] = []
    states: list[Tensor] = []
    hooks = []
    for name, layer in network.named_modules():
        told = f"the layer '{name}' ({type(layer).__name__})" if name else "the network"

        def begin(*_: Any) -> None:
            states.append(torch.random.get_rng_state())

        def end(*_: Any, told: str = told) -> None:
            if not torch.equal(states.pop(), torch.random.get_rng_state()):
                found.append(told)

        hooks += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
