"""Models of one's own, as functions: `model: {name: my_module.make}`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedpipe.errors import SettingsError
from fedpipe.models._steady import logits_of
from fedpipe.models.base import Model, Network

Factory = Callable[[tuple[int, ...], int], Network | tuple[nn.Module, nn.Module]]


@functools.cache
def family_of(factory: Factory) -> type[Model]:
    """The family whose networks a function makes.

    Parameters
    ----------
    factory
        Takes the shape of the inputs and the number of classes C; returns a body, which turns inputs of shape
        (B, *shape) into features of shape (B, d), and a head, which turns features into C logits.
    """

    def check(self: Model, shape: tuple[int, ...], classes: int) -> None:
        _try(factory, shape, classes)

    def build(self: Model, shape: tuple[int, ...], classes: int) -> Network:
        made = factory(shape, classes)
        network = made if isinstance(made, Network) else Network(*made)
        if any(map(is_lazy, network.state_dict().values())):
            with torch.no_grad():  # lazy layers learn their sizes in the first call, and draw their weights there
                logits_of(network.eval(), shape)
        return network.train()

    def made_of(self: Model) -> tuple[Any, ...]:
        return factory, family_of

    own = {"__module__": factory.__module__, "__qualname__": factory.__qualname__, "__doc__": factory.__doc__}
    found = type(factory.__name__, (Model,), {**own, "check": check, "build": build, "made_of": made_of})
    return dataclass(frozen=True, kw_only=True)(found)


@functools.cache
def _try(factory: Factory, shape: tuple[int, ...], classes: int) -> None:
    """Make one network before any job does.

    Raises
    ------
    SettingsError
        The function fails, or returns something else than a body and a head that turn such inputs into C logits.
    """
    name = f"{factory.__module__}.{factory.__qualname__}"
    try:
        with torch.random.fork_rng(devices=[]):
            made = factory(shape, classes)
    except Exception as error:  # it is the user's own code
        raise SettingsError(
            f"model.name: '{name}' fails for inputs of shape {shape} and {classes} classes "
            f"({type(error).__name__}: {error}); it should return a body and a head."
        ) from error
    parts = (made.body, made.head) if isinstance(made, Network) else made
    if not (isinstance(parts, tuple) and len(parts) == 2 and all(isinstance(part, nn.Module) for part in parts)):
        raise SettingsError(
            f"model.name: '{name}' returns {type(made).__name__}; it should return a body and a head, both modules."
        )
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = logits_of(Network(*parts).eval(), shape)
    except Exception as error:  # body and head may not fit
        raise SettingsError(
            f"model.name: the network of '{name}' fails for inputs of shape {shape} ({type(error).__name__}: {error})."
        ) from error
    if logits.shape != (2, classes):
        raise SettingsError(
            f"model.name: the network of '{name}' turns two inputs into outputs of shape {tuple(logits.shape)}; "
            f"it should be {(2, classes)}, a logit a class."
        )
