"""Errors of a custom algorithm that violates the contract are one message without a traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import small_studies as studies
from tests.small_studies import RunFedpipe

OWN = """
from dataclasses import dataclass

import torch

from fedpipe.algorithms.base import Train, draw_normal
from fedpipe.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Own(FedAvg):
    {}
"""

BRANCH = "return self.risk(client, batch) * (1 if batch.y.sum() > 3 else 2)"
SUM = "return {'model': initial_model(0) + initial_model(0).without(['head.bias'])}"
HALF = "return self.net(client['model'].only(self.net.body_names), batch.x).mean()"
ANNEAL = "return {'model': download['model'], 'mu': 1 - info.round / self.federation.rounds}"
NOISE = "return self.risk(client, batch) + draw_normal(batch.noise_key, 'noise', batch.x).mean()"
BUFFERS = "return {'model': download['model'], 'buffers': self.net.buffers(download['model'])}"
NOTHING = "return {'model': initial_model(0)['nothing']}"
#: A method, its body, the stack, and the error after `own.Own.METHOD (own.py, line `
MISTAKES = [
    ("loss(self, client, batch)", BRANCH, 2, f"13): `{BRANCH}` reads a tensor's value"),
    (
        *("upload(self, client)", "return {'model': client['model'], 'n': 0.5}", 1),
        "12) returned 'n' as 0.5, a Python float. Return a tensor, such as torch.tensor(0.5)",
    ),
    ("start(self, state, download, info)", "{'model': download['model']}", 2, "12) returned None. Return a dict"),
    (
        *("keep(self, client)", "return {'last': torch.ones(2)}", 1),
        "12) returned 'last' as float32 of shape (2,), but init_client ",
    ),
    (
        *("aggregate(self, server, uploads)", "return {'model': uploads.mean('model'), 'n': torch.ones(1)}", 1),
        "12) returned 'n' as float32 of shape (1,), but init ",
    ),
    (
        *("metrics(self, server)", "return {'participants': torch.ones(())}", 1),
        "12) returned 'participants', which is already a column",
    ),
    (
        *("extra_models(self, server)", "return {'global': server['model']}", 1),
        "12) returned 'global', which is already the model of a protocol",
    ),
    ("loss(self, client, batch)", HALF, 1, f"13): `{HALF}` calls the network without 'head.bias'"),
    ("loss(self, client, batch)", HALF, 2, f"13): `{HALF}` calls the network without 'head.bias'"),
    (
        *("global_model(self, server)", "return server['model'].only(self.net.body_names)", 1),
        "12) returned a model without 'head.",
    ),
    (
        *("extra_models(self, server)", "return {'flat': server['model'].map(torch.sum)}", 1),
        "12) returned 'head.bias' as float32 of shape () instead of shape (10,). Return Tensors",
    ),
    (
        *("metrics(self, server)", "return {'bias': server['model']['head.bias']}", 1),
        "12) returned 'bias' as float32 of shape (10,). Return one number",
    ),
    ("metrics(self, server)", "return {'norm': server['modle']}", 1, "13): `return {'norm': server['modle']}` reads "),
    ("global_model(self, server)", "return server['modle']", 1, "13): `return server['modle']` reads 'modle'"),
    (
        *("matrices(self, state)", "return {'bias': state['model']['head.bias']}", 1),
        "12) returned 'bias' as float32 of shape (10,). Return a tensor of shape (classes, classes)",
    ),
    ("local_passes(self)", "return Train(self.loss)", 1, "12) returned a Train. Return a tuple of passes"),
    (
        *("loss(self, client, batch)", "return 0.5", 1),
        "12) returned 0.5, a Python float. Return a floating-point scalar tensor",
    ),
    (
        *("start(self, state, download, info)", ANNEAL, 1),
        f"13): `{ANNEAL}` failed. self.federation.rounds can't be read in a hook",
    ),
    ("loss(self, client, batch)", NOISE, 1, f"13): `{NOISE}` failed. The key of draw_normal and draw_uniform is None"),
    ("start(self, state, download, info)", BUFFERS, 1, "12) returned 'buffers', which is fedpipe's name"),
    ("init(self, initial_model)", NOTHING, 1, f"13): `{NOTHING}` reads 'nothing'"),
    (
        *("init(self, initial_model)", SUM, 1),
        f"13): `{SUM}` combines Tensors with different names: only one of them has head.bias",
    ),
]


def run_with_error(run_fedpipe: RunFedpipe, *arguments: str) -> str:
    """Run a command with an error. Return its message."""
    status, _, error = run_fedpipe(*arguments)
    assert status == 2
    assert "Traceback" not in error
    return error.splitlines()[-1]


@pytest.fixture
def run_mistake(own_module: Path, run_fedpipe: RunFedpipe) -> Callable[..., str]:
    """``run_mistake(method, body)`` runs a method with this body. It returns the error."""

    def run(method: str, body: str, stack: int = 1, network: str = "", **federation: Any) -> str:
        own_module.write_text(OWN.format(f"def {method}:\n        {body}") + network)
        methods = {"own": {"algorithm": "own.Own"}}
        params = studies.settings(("own",), rounds=1, algorithms=methods, federation=federation)
        plan = studies.prepare(params | ({"model": {"name": "own.normed"}} if network else {}))
        return run_with_error(run_fedpipe, "segment", str(plan.runs[0].path), "--stop", "1", "--stack", str(stack))

    return run


@pytest.mark.parametrize(("method", "body", "stack", "problem"), MISTAKES, ids=[problem for *_, problem in MISTAKES])
def test_segment_reports_error_in_custom_algorithm(
    method: str, body: str, stack: int, problem: str, run_mistake: Callable[..., str]
) -> None:
    message = run_mistake(method, body, stack)
    assert message.startswith(f"fedpipe: own.Own.{method.partition('(')[0]} (own.py, line {problem}"), message


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["segment", "--stop", "1", "--stack", "wide"], "execution.stack: 'wide' can't be used"),
        (["diagnostic", "--stack", "wide"], "execution.stack: 'wide' can't be used"),
        (["segment", "--stop", "1", "--keep-models", "some"], "artifacts.keep_models: 'some' can't be used"),
        (["collect", "--rounds", "1", "--keep-models", "0"], "artifacts.keep_models: 0 can't be used"),
    ],
)
def test_invalid_option_of_job_is_rejected(command: list[str], sentence: str, run_fedpipe: RunFedpipe) -> None:
    plan = studies.prepare(studies.settings(rounds=1))
    name, *options = command
    message = run_with_error(run_fedpipe, name, str(plan.runs[0].path), *options)
    assert message.startswith(f"fedpipe: {sentence}")


NORMED = """

def normed(shape, classes):
    inner = [torch.nn.Flatten(), torch.nn.BatchNorm1d(64)]
    return torch.nn.Sequential(*inner), torch.nn.Linear(64, classes)
"""


def test_error_about_running_statistics_shows_net_parameters(run_mistake: Callable[..., str]) -> None:
    """The message shows the method that omits running statistics."""
    body = "return {'model': initial_model(0) - self.net.parameters(initial_model(0))}"
    message = run_mistake("init(self, initial_model)", body, network=NORMED)
    assert message.startswith(
        f"fedpipe: own.Own.init (own.py, line 13): `{body}` combines Tensors with different names: only one of them "
        "has body.1.running_mean, body.1.running_var. Use self.net.parameters(model)"
    ), message


@pytest.mark.parametrize(
    ("name", "group", "suggestion"),
    [("head.weigth", "model", "'head.weight'"), ("model/head.bais", ("model",), "'model/head.bias'")],
)
def test_error_about_unknown_trained_tensor_suggests_nearest_name(
    name: str, group: str | tuple[str, ...], suggestion: str, run_mistake: Callable[..., str]
) -> None:
    message = run_mistake("training_pass(self)", f"return Train(self.loss, only=({name!r},), group={group!r})")
    assert message.startswith(f"fedpipe: own.Own: `only` of a Train pass has '{name}', "), message
    assert f"Did you mean {suggestion}" in message


def test_server_optimizer_names_missing_part_of_server_state(run_mistake: Callable[..., str]) -> None:
    server = {"optimizer": "momentum"}
    message = run_mistake("init(self, initial_model)", "return {'body': initial_model(0)}", server=server)
    assert message.startswith("fedpipe: own.Own.init (own.py, line 12) returned no model 'model', "), message
    assert "federation.server: momentum" in message
    assert "server_optimizer_part" in message
