"""Custom models as functions: `model: {name: my_module.make}`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, get_type_hints

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedpipe.core.errors import SettingsError
from fedpipe.models.base import Model, Network
from fedpipe.models.purity import cache_check, compute_example_logits

Factory = Callable[..., Network | tuple[nn.Module, nn.Module]]


@functools.cache
def make_model_class(factory: Factory) -> type[Model]:
    """Make the model class of a function that builds a network.

    Parameters
    ----------
    factory
        Function of the input shape and the number of classes C. It returns a body that maps inputs of shape
        (B, *shape) to features of shape (B, d), and a head that maps features to C logits. Its other arguments are the
        model's parameters, with the types of their annotations or defaults.

    Raises
    ------
    SettingsError
        A parameter has the name of a model attribute, or a mutable default.
    """
    fields = _read_signature_parameters(factory)

    def make_network(self: Model, shape: tuple[int, ...], num_classes: int) -> Any:
        return factory(shape, num_classes, **{name: getattr(self, name) for name, _, _ in fields})

    @cache_check
    def check(self: Model, shape: tuple[int, ...], num_classes: int) -> None:
        _check_factory(
            _format_factory_name(factory), lambda: make_network(self, shape, num_classes), shape, num_classes
        )

    def build(self: Model, shape: tuple[int, ...], num_classes: int) -> Network:
        network_or_parts = make_network(self, shape, num_classes)
        network = network_or_parts if isinstance(network_or_parts, Network) else Network(*network_or_parts)
        if any(map(is_lazy, network.state_dict().values())):
            with torch.no_grad():  # lazy layers get their sizes and weights in the first call
                compute_example_logits(network.eval(), shape)
        return network.train()

    def list_hashed_code(self: Model) -> tuple[Any, ...]:
        return factory, make_model_class

    metadata: dict[str, Any] = {name: getattr(factory, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods: dict[str, Any] = {"check": check, "build": build, "list_hashed_code": list_hashed_code}
    return dataclasses.make_dataclass(
        factory.__name__, fields, bases=(Model,), namespace=metadata | methods, frozen=True, kw_only=True
    )


def _read_signature_parameters(factory: Factory) -> list[tuple[str, Any, Any]]:
    """Read the function's other arguments as dataclass fields: names, types and defaults."""
    try:
        types = get_type_hints(factory, include_extras=True)
    except Exception as error:  # an annotation may be any expression
        raise SettingsError(
            f"model.name: the annotations of '{_format_factory_name(factory)}' can't be read ({error})."
        ) from error
    fields = []
    for parameter in list(inspect.signature(factory).parameters.values())[2:]:
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        subject, default = f"'{_format_factory_name(factory)}' has a parameter '{parameter.name}'", parameter.default
        if parameter.name in {*dir(Model), *(field.name for field in dataclasses.fields(Model)), "name", "code"}:
            raise SettingsError(f"model.name: {subject}. Rename it, because every model uses this name.")
        if isinstance(default, (list, dict, set)):
            raise SettingsError(f"model.name: {subject} whose default is a {type(default).__name__}. Use a tuple.")
        required = default is Parameter.empty
        type_ = types.get(parameter.name, Any if required or default is None else type(default))
        fields.append((parameter.name, type_, dataclasses.field() if required else dataclasses.field(default=default)))
    return fields


def _format_factory_name(factory: Factory) -> str:
    return f"{factory.__module__}.{factory.__qualname__}"


def _check_factory(name: str, make: Callable[[], Any], shape: tuple[int, ...], num_classes: int) -> None:
    """Build one network before any job starts.

    Raises
    ------
    SettingsError
        The function fails, or does not return a body and a head that map such inputs to C logits.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            result = make()
    except Exception as error:  # a user's code may raise anything
        raise SettingsError(
            f"model.name: '{name}' fails for inputs of shape {shape} and {num_classes} classes "
            f"({type(error).__name__}: {error}). It must return a body and a head."
        ) from error
    modules = (result.body, result.head) if isinstance(result, Network) else result
    if not (
        isinstance(modules, tuple) and len(modules) == 2 and all(isinstance(module, nn.Module) for module in modules)
    ):
        raise SettingsError(
            f"model.name: '{name}' returns {type(result).__name__}. It must return a body and a head, both modules."
        )
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = compute_example_logits(Network(*modules).eval(), shape)
    except Exception as error:  # body and head may not fit together
        raise SettingsError(
            f"model.name: the network of '{name}' fails for inputs of shape {shape} ({type(error).__name__}: {error})."
        ) from error
    if logits.shape != (2, num_classes):
        raise SettingsError(
            f"model.name: the network of '{name}' returns outputs of shape {tuple(logits.shape)} for two inputs. "
            f"It must return {(2, num_classes)}, one logit per class."
        )
