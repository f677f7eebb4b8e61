"""Errors of a custom algorithm that violates the contract are one message without a traceback."""

import sys
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

BRANCH = "def loss(self, client, batch):\n        return self.risk(client, batch) * (1 if batch.y.sum() > 3 else 2)"


@pytest.mark.parametrize(
    ("body", "stack", "expected_message"),
    [
        (
            BRANCH,
            "2",
            "own.Own.loss (own.py, line 13): `return self.risk(client, batch) * (1 if batch.y.sum() > 3 else 2)` reads "
            "a tensor's value",
        ),
        (
            "def upload(self, client):\n        return {'model': client['model'], 'n': 0.5}",
            "1",
            "own.Own.upload (own.py, line 12) returned 'n' as 0.5, a Python float. Return a tensor, such as "
            "torch.tensor(0.5)",
        ),
        (
            "def start(self, state, download, info):\n        {'model': download['model']}",
            "2",
            "own.Own.start (own.py, line 12) returned None. Return a dict",
        ),
        (
            "def keep(self, client):\n        return {'last': torch.ones(2)}",
            "1",
            "own.Own.keep (own.py, line 12) returned 'last' as float32 of shape (2,), but init_client ",
        ),
        (
            "def aggregate(self, server, uploads):\n"
            "        return {'model': uploads.mean('model'), 'n': torch.ones(1)}",
            "1",
            "own.Own.aggregate (own.py, line 12) returned 'n' as float32 of shape (1,), but init ",
        ),
        (
            "def metrics(self, server):\n        return {'participants': torch.ones(())}",
            "1",
            "own.Own.metrics (own.py, line 12) returned 'participants', which is already a column",
        ),
        (
            "def extra_models(self, server):\n        return {'global': server['model']}",
            "1",
            "own.Own.extra_models (own.py, line 12) returned 'global', which is already the model of a protocol",
        ),
        (
            "def local_passes(self):\n        return Train(self.loss)",
            "1",
            "own.Own.local_passes (own.py, line 12) returned a Train. Return a tuple of passes",
        ),
        (
            "def loss(self, client, batch):\n        return 0.5",
            "1",
            "own.Own.loss (own.py, line 12) returned 0.5, a Python float. Return a floating-point scalar tensor",
        ),
        (
            "def init(self, initial_model):\n        return {'model': initial_model(0)['nothing']}",
            "1",
            "own.Own.init (own.py, line 13): `return {'model': initial_model(0)['nothing']}` reads 'nothing'",
        ),
        (
            "def init(self, initial_model):\n        return {'model': initial_model(0) + "
            "initial_model(0).without(['head.bias'])}",
            "1",
            "own.Own.init (own.py, line 13): `return {'model': initial_model(0) + "
            "initial_model(0).without(['head.bias'])}` combines "
            "Tensors with different names: only one of them has head.bias",
        ),
    ],
)
def test_segment_reports_error_in_custom_algorithm(
    body: str,
    stack: str,
    expected_message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_fedpipe: RunFedpipe,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(OWN.format(body))
    plan = studies.prepare(studies.settings(("own",), rounds=1, algorithms={"own": {"algorithm": "own.Own"}}))
    path = str(plan.runs[0].path)
    message = run_with_error(run_fedpipe, "segment", path, "--stop", "1", "--stack", stack)
    assert message.startswith(f"fedpipe: {expected_message}"), message


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


def run_with_error(run_fedpipe: RunFedpipe, *arguments: str) -> str:
    """Run a command with an error. Return its message."""
    status, _, error = run_fedpipe(*arguments)
    assert status == 2
    assert "Traceback" not in error
    return error.splitlines()[-1]


def test_error_about_running_statistics_shows_net_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_fedpipe: RunFedpipe
) -> None:
    """The message shows the method that omits running statistics."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    body = (
        "def init(self, initial_model):\n        return {'model': initial_model(0) - "
        "self.net.parameters(initial_model(0))}"
    )
    (tmp_path / "own.py").write_text(
        OWN.format(body) + "\n\ndef normed(shape, classes):\n"
        "    inner = [torch.nn.Flatten(), torch.nn.BatchNorm1d(64)]\n"
        "    return torch.nn.Sequential(*inner), torch.nn.Linear(64, classes)\n"
    )
    params = studies.settings(("own",), rounds=1, algorithms={"own": {"algorithm": "own.Own"}})
    plan = studies.prepare(params | {"model": {"name": "own.normed"}})
    message = run_with_error(run_fedpipe, "segment", str(plan.runs[0].path), "--stop", "1", "--stack", "1")
    assert message.startswith(
        "fedpipe: own.Own.init (own.py, line 13): `return {'model': initial_model(0) - "
        "self.net.parameters(initial_model(0))}` "
        "combines Tensors with different names: only one of them has body.1.running_mean, body.1.running_var. Use "
        "self.net.parameters(model)"
    ), message
