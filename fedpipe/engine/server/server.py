"""The server's side of a round: an algorithm's rule, and what the federation says of the model that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.server.device import use_device_of
from fedpipe.settings.federation import Server

M, V = "server/m", "server/v"  #: parts of the server's state: the moments of its optimizer


def init_server(algorithm: Algorithm, fresh: Callable[[int], Tensors]) -> State:
    """The server's state before round 1: the algorithm's parts, and the moments of the server's optimizer."""
    state = contract.validate_state(algorithm, "init", algorithm.init(fresh))
    rule, part = algorithm.federation.server, algorithm.server_optimizer_part
    if rule.is_plain_averaging or part is None:
        return state
    return state | init_moments(rule, algorithm.net.parameters(state[part]))


def make_download(algorithm: Algorithm, server: State, ids: Sequence[int]) -> tuple[State, State]:
    """What some clients receive, as the algorithm's ``make_download`` gives it."""
    with use_device_of(server):
        return algorithm.send(server, ids)


def aggregate_uploads(algorithm: Algorithm, server: State, uploads: Uploads) -> State:
    """The server's state after a round.

    An algorithm's rule is for parameters, and so is the server's optimizer, for which the change that the rule makes is
    a step. Running statistics are no points of their space: whatever the rule makes of them, those of a part that
    clients upload under its own name, as ``model``, are the mean of the uploads, of the federation's weights or equal
    ones as the rule took.
    """
    with use_device_of(server):
        state = contract.validate_state(algorithm, "aggregate", algorithm.aggregate(server, uploads))
    _, _, first_upload = uploads[0]
    net, rule, part = algorithm.net, algorithm.federation.server, algorithm.server_optimizer_part
    if not rule.is_plain_averaging and part is not None:
        x, target = net.parameters(server[part]), net.parameters(state[part])
        new_parameters, optimizer_state = apply_server_optimizer(rule, x, target - x, server)
        state = state | {part: state[part] | new_parameters} | optimizer_state
    shared_parts = [name for name, value in state.items() if isinstance(value, Tensors) and name in first_upload]
    return state | {
        name: state[name] | uploads.effective_uploads.mean(name, net.buffers(first_upload[name]))
        for name in shared_parts
    }


def init_moments(rule: Server, x: Tensors) -> State:
    """What the server's optimizer remembers before round 1: no step, and for v the least that its source allows."""
    if rule.tau is None:
        return {M: x.zeros()} if rule.optimizer == "momentum" else {}
    return {M: x.zeros(), V: x.ones() * rule.tau**2}


def apply_server_optimizer(rule: Server, x: Tensors, delta: Tensors, server: State) -> tuple[Tensors, State]:
    r"""Where the server's optimizer moves parameters x, and what it remembers then.

    Sources: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Alg. 2, with the mean update :math:`\Delta`,

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) \Delta, \qquad x \leftarrow x + \eta \, m / (\sqrt v + \tau), \\
        v &\leftarrow v + \Delta^2 \; \text{(adagrad)}, \quad
        v - (1 - \beta_2) \Delta^2 sign(v - \Delta^2) \; \text{(yogi)}, \quad
        \beta_2 v + (1 - \beta_2) \Delta^2 \; \text{(adam)},

    from :math:`m = 0` and :math:`v = \tau^2`, without bias correction; and Hsu, Qi and Brown, Measuring the Effects of
    Non-Identical Data Distribution for Federated Visual Classification, 2019 (FedAvgM), :math:`m \leftarrow \beta m +
    \Delta, \; x \leftarrow x + \eta m`.
    """
    eta, delta_2 = rule.learning_rate, delta * delta
    beta, beta1, beta2, tau = (float(getattr(rule, name) or 0) for name in ("momentum", "beta1", "beta2", "tau"))
    match rule.optimizer:
        case "sgd":
            return x + eta * delta, {}
        case "momentum":
            m = beta * server[M] + delta
            return x + eta * m, {M: m}
        case "adagrad":
            v = server[V] + delta_2
        case "yogi":
            v = server[V] - (1 - beta2) * delta_2 * (server[V] - delta_2).map(torch.sign)
        case "adam":
            v = beta2 * server[V] + (1 - beta2) * delta_2
    m = beta1 * server[M] + (1 - beta1) * delta
    return x + eta * (m / (v.map(torch.sqrt) + tau)), {M: m, V: v}
