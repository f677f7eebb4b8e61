"""The federation's optimizers as pure functions on named tensors, for one client and for a stack.

They are equal to ``torch.optim`` (tests compare them). PyTorch's classes change tensors in place, so vmap can't map
them over clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from typing_extensions import override

from fedpipe.core.tensors import Tensors
from fedpipe.settings.federation import Federation

Slots = dict[str, Any]


class Optimizer(Protocol):
    """An update rule for parameters. Its slots (such as momentum) are reset in every round."""

    def init_slots(self, parameters: Tensors) -> Slots:
        """Make the initial slots."""

    def update_parameters(
        self, parameters: Tensors, gradient: Tensors, slots: Slots, can_overwrite_gradient: bool = False
    ) -> tuple[Tensors, Slots]:
        """Take a step. With ``can_overwrite_gradient`` the result may reuse the gradient's memory."""


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with heavy-ball momentum, like ``torch.optim.SGD``."""

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    @override
    def init_slots(self, parameters: Tensors) -> Slots:
        """Make a momentum buffer of zeros. Empty without momentum."""
        return {"buffer": parameters.zeros()} if self.momentum else {}

    @override
    def update_parameters(
        self, parameters: Tensors, gradient: Tensors, slots: Slots, can_overwrite_gradient: bool = False
    ) -> tuple[Tensors, Slots]:
        """Update ``buffer = momentum * buffer + gradient``, and step along -buffer."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * parameters
        if self.momentum:
            gradient = self.momentum * slots["buffer"] + gradient
            slots = {"buffer": gradient}
        # Allocating memory costs as much as a small layer.
        out_tensors = gradient if can_overwrite_gradient and not self.momentum else {}
        new_parameters = (
            (name, torch.add(value, gradient[name], alpha=-self.learning_rate, out=out_tensors.get(name)))
            for name, value in parameters.items()
        )
        return Tensors(new_parameters), slots


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, like ``torch.optim.Adam`` with PyTorch's defaults."""

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    @override
    def init_slots(self, parameters: Tensors) -> Slots:
        """Make moments of zeros."""
        step = next(iter(parameters.values())).new_zeros(())
        return {"first": parameters.zeros(), "second": parameters.zeros(), "step": step}

    @override
    def update_parameters(
        self, parameters: Tensors, gradient: Tensors, slots: Slots, can_overwrite_gradient: bool = False
    ) -> tuple[Tensors, Slots]:
        """Update the moments, and step along their bias-corrected ratio."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * parameters
        step = slots["step"] + 1
        first = self.beta1 * slots["first"] + (1 - self.beta1) * gradient
        second = self.beta2 * slots["second"] + (1 - self.beta2) * (gradient * gradient)
        scale = torch.sqrt(1 - self.beta2**step)
        denominator = second.map(torch.sqrt) / scale + self.epsilon
        new_parameters = parameters - self.learning_rate / (1 - self.beta1**step) * (first / denominator)
        return new_parameters, {"first": first, "second": second, "step": step}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, like ``torch.optim.AdamW`` (Loshchilov and Hutter, ICLR 2019)."""

    @override
    def update_parameters(
        self, parameters: Tensors, gradient: Tensors, slots: Slots, can_overwrite_gradient: bool = False
    ) -> tuple[Tensors, Slots]:
        """Shrink the parameters, and take a step of Adam without weight decay."""
        adam = Adam(self.learning_rate, 0.0, self.beta1, self.beta2, self.epsilon)
        if self.weight_decay:
            parameters = (1 - self.learning_rate * self.weight_decay) * parameters
        return adam.update_parameters(parameters, gradient, slots, can_overwrite_gradient)


def build_optimizer(federation: Federation) -> Optimizer:
    """Build the optimizer of the federation's settings."""
    if federation.optimizer == "adam":
        return Adam(federation.learning_rate, federation.weight_decay)
    if federation.optimizer == "adamw":
        return AdamW(federation.learning_rate, federation.weight_decay)
    return SGD(federation.learning_rate, federation.momentum, federation.weight_decay)
