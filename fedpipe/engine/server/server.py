"""The server side of a round: the algorithm's aggregation and the federation's server optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.server.device import use_server_device
from fedpipe.engine.user_errors import explain_user_errors
from fedpipe.settings.federation import Server

M, V = "server/m", "server/v"  #: parts of the server's state: moments of its optimizer


@contextmanager
def call_server_hooks(algorithm: Algorithm, server: State) -> Iterator[None]:
    """Within the block, new tensors are on the server's device, have no gradients, and user errors are explained."""
    with torch.no_grad(), use_server_device(server), explain_user_errors(algorithm):
        yield


def make_initial_server_state(algorithm: Algorithm, initial_model: Callable[[int], Tensors]) -> State:
    """Make the initial server state: the algorithm's parts and the moments of the server's optimizer."""
    state = contract.validate_state(algorithm, "init", algorithm.init(initial_model))
    rule, part = algorithm.federation.server, algorithm.server_optimizer_part
    if rule.is_plain_averaging or part is None:
        return state
    contract.validate_server_optimizer_part(algorithm, part, state)
    return state | init_server_optimizer_moments(rule, algorithm.net.parameters(state[part]))


def make_download(
    algorithm: Algorithm, server: State, get_client_positions: Callable[[Sequence[int]], list[int]], ids: Sequence[int]
) -> tuple[State, State]:
    """Make the downloads of some clients with the algorithm's ``send``.

    ``get_client_positions`` gives their numbers in the algorithm.
    """
    with use_server_device(server):
        return algorithm.send(server, get_client_positions(ids))


def aggregate_uploads(algorithm: Algorithm, server: State, uploads: Uploads) -> State:
    """Compute the server's state after a round.

    The algorithm's rule and the server's optimizer are for parameters. Running statistics are always averaged: those of
    a part that clients upload with the same name, such as ``model``, are the mean of the uploads, with the weights that
    the rule used.
    """
    with use_server_device(server):
        state = contract.validate_state(algorithm, "aggregate", algorithm.aggregate(server, uploads))
    _, _, first_upload = uploads[0]
    net, rule, part = algorithm.net, algorithm.federation.server, algorithm.server_optimizer_part
    if not rule.is_plain_averaging and part is not None:
        x, target = net.parameters(server[part]), net.parameters(state[part])
        new_parameters, optimizer_state = apply_server_optimizer(rule, x, target - x, server)
        state = state | {part: state[part] | new_parameters} | optimizer_state
    shared_parts = [
        name for name in state if isinstance(state[name], Tensors) and isinstance(first_upload.get(name), Tensors)
    ]
    contract.validate_uploaded_statistics(algorithm, shared_parts, uploads, server)
    return state | {
        name: state[name] | uploads.get_uploads_with_part_weights(name).mean(name, net.buffers(first_upload[name]))
        for name in shared_parts
    }


def init_server_optimizer_moments(rule: Server, x: Tensors) -> State:
    """Make the initial moments of the server's optimizer: m = 0, and v = tau squared."""
    if rule.tau is None:
        return {M: x.zeros()} if rule.optimizer == "momentum" else {}
    return {M: x.zeros(), V: x.ones() * rule.tau**2}


def apply_server_optimizer(rule: Server, x: Tensors, delta: Tensors, server: State) -> tuple[Tensors, State]:
    r"""Apply the server's optimizer to parameters x. Return them and the moments.

    Sources: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Alg. 2, with the mean update :math:`\Delta`,

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) \Delta, \qquad x \leftarrow x + \eta \, m / (\sqrt v + \tau), \\
        v &\leftarrow v + \Delta^2 \; \text{(adagrad)}, \quad
        v - (1 - \beta_2) \Delta^2 sign(v - \Delta^2) \; \text{(yogi)}, \quad
        \beta_2 v + (1 - \beta_2) \Delta^2 \; \text{(adam)},

    from :math:`m = 0` and :math:`v = \tau^2`, without bias correction. Hsu, Qi and Brown, Measuring the Effects of
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
