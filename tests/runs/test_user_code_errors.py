"""Errors of a custom algorithm that violates the contract are one message without a traceback."""

from pathlib import Path

import pytest

from tests import small_studies as studies
from tests.small_studies import RunFedpipe

OWN = """
from dataclasses import dataclass

import torch

from fedpipe.algorithms.base import Train
from fedpipe.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Own(FedAvg):
    {}
"""

BRANCH = "return self.risk(client, batch) * (1 if batch.y.sum() > 3 else 2)"
SUM = "return {'model': initial_model(0) + initial_model(0).without(['head.bias'])}"
HALF = "return self.net(client['model'].only(self.net.body_names), batch.x).mean()"
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


@pytest.mark.parametrize(("method", "body", "stack", "problem"), MISTAKES, ids=[problem for *_, problem in MISTAKES])
def test_segment_reports_error_in_custom_algorithm(
    method: str, body: str, stack: int, problem: str, own_module: Path, run_fedpipe: RunFedpipe
) -> None:
    own_module.write_text(OWN.format(f"def {method}:\n        {body}"))
    plan = studies.prepare(studies.settings(("own",), rounds=1, algorithms={"own": {"algorithm": "own.Own"}}))
    message = run_with_error(run_fedpipe, "segment", str(plan.runs[0].path), "--stop", "1", "--stack", str(stack))
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


def test_error_about_running_statistics_shows_net_parameters(own_module: Path, run_fedpipe: RunFedpipe) -> None:
    """The message shows the method that omits running statistics."""
    body = "return {'model': initial_model(0) - self.net.parameters(initial_model(0))}"
    own_module.write_text(
        OWN.format(f"def init(self, initial_model):\n        {body}") + "\n\ndef normed(shape, classes):\n"
        "    inner = [torch.nn.Flatten(), torch.nn.BatchNorm1d(64)]\n"
        "    return torch.nn.Sequential(*inner), torch.nn.Linear(64, classes)\n"
    )
    params = studies.settings(("own",), rounds=1, algorithms={"own": {"algorithm": "own.Own"}})
    plan = studies.prepare(params | {"model": {"name": "own.normed"}})
    message = run_with_error(run_fedpipe, "segment", str(plan.runs[0].path), "--stop", "1", "--stack", "1")
    assert message.startswith(
        f"fedpipe: own.Own.init (own.py, line 13): `{body}` combines Tensors with different names: only one of them "
        "has body.1.running_mean, body.1.running_var. Use self.net.parameters(model)"
    ), message
