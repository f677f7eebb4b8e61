"""What a run says where an algorithm of the user's own breaks the contract: a sentence, and no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedpipe.cli import app
from tests import small_studies as studies

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
    ("body", "stack", "sentence"),
    [
        (
            BRANCH,
            "2",
            "fedpipe: own.Own: own.py, line 13, in loss: `return self.risk(client, batch) * (1 if batch.y.sum() > 3 "
            "else 2)` takes a tensor's value into Python, as `if`, float() and item() do; clients that train in one "
            "call differ in it, so that it should be torch.where, or the condition `when` of a Train pass.",
        ),
        (
            "def upload(self, client):\n        return {'model': client['model'], 'n': 0.5}",
            "1",
            "fedpipe: own.Own.upload gives 'n' as 0.5, a Python float. Use a tensor or Tensors, as "
            "torch.tensor(...) makes them.",
        ),
        (
            "def start(self, kept, received, info):\n        {'model': received['model']}",
            "2",
            "fedpipe: own.Own.start gives nothing (None). It must give named parts, each a tensor or Tensors, as "
            "{'model': model}.",
        ),
        (
            "def keep(self, client):\n        return {'last': torch.ones(2)}",
            "1",
            "fedpipe: own.Own.keep gives 'last', which init_client does not give; a state should have the same parts, "
            "of the same shapes and dtypes, in every round.",
        ),
        (
            "def aggregate(self, server, uploads):\n"
            "        return {'model': uploads.mean('model'), 'n': torch.ones(1)}",
            "1",
            "fedpipe: own.Own.aggregate gives 'n', which init does not give; a state should have the same parts, of "
            "the same shapes and dtypes, in every round.",
        ),
        (
            "def metrics(self, server):\n        return {'participants': torch.ones(())}",
            "1",
            "fedpipe: own.Own.metrics gives 'participants', which is recorded of every round already. It must have "
            "another name.",
        ),
        (
            "def extra_models(self, server):\n        return {'global': server['model']}",
            "1",
            "fedpipe: own.Own.extra_models gives 'global', which is a model of protocols. It must have another name.",
        ),
        (
            "def local_passes(self):\n        return Train(self.loss)",
            "1",
            "fedpipe: own.Own.local_passes gives a Train. It must give a tuple of passes, each a Train, Measure or "
            "Update, as (Train(self.loss),).",
        ),
        (
            "def loss(self, client, batch):\n        return 0.5",
            "1",
            "fedpipe: own.Own: loss (own.py, line 12) gives 0.5, a Python float; a loss should be a scalar, a mean",
        ),
        (
            "def init(self, fresh):\n        return {'model': fresh(0)['nothing']}",
            "1",
            "fedpipe: own.Own: own.py, line 13, in init: `return {'model': fresh(0)['nothing']}` asks for 'nothing', "
            "which is not there. Use one of the parts at hand.",
        ),
        (
            "def init(self, fresh):\n        return {'model': fresh(0) + fresh(0).without(['head.bias'])}",
            "1",
            "fedpipe: own.Own: own.py, line 13, in init: `return {'model': fresh(0) + fresh(0).without(['head.bias'])}`"
            " combines tensors of different names: head.bias is in one only. Use tensors of the same names.",
        ),
    ],
)
def test_a_job_says_it(
    body: str,
    stack: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(OWN.format(body))
    made = studies.prepare(studies.settings(("own",), rounds=1, algorithms={"own": {"algorithm": "own.Own"}}))
    path = str(made.runs[0].path)
    said = refused(monkeypatch, capsys, "segment", path, "--stop", "1", "--stack", stack)
    assert said.startswith(sentence), said


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["segment", "--stop", "1", "--stack", "wide"], "execution.stack: 'wide' can't be used. It must be"),
        (["diagnostic", "--stack", "wide"], "execution.stack: 'wide' can't be used. It must be"),
        (["segment", "--stop", "1", "--keep-models", "some"], "artifacts.keep_models: 'some' can't be used; it should"),
        (["collect", "--rounds", "1", "--keep-models", "0"], "artifacts.keep_models: 0 can't be used. It must be"),
    ],
)
def test_a_wrong_option_of_a_job_is_a_sentence(
    command: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    made = studies.prepare(studies.settings(rounds=1))
    name, *options = command
    said = refused(monkeypatch, capsys, name, str(made.runs[0].path), *options)
    assert said.startswith(f"fedpipe: {sentence}")


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence with which a command ends that refuses."""
    monkeypatch.setattr(sys, "argv", ["fedpipe", *arguments])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.splitlines()[-1]


def test_a_gradient_has_no_running_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What steps from a whole model along a gradient is told how to leave them out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    body = "def init(self, fresh):\n        return {'model': fresh(0) - self.net.parameters(fresh(0))}"
    (tmp_path / "own.py").write_text(
        OWN.format(body) + "\n\ndef normed(shape, classes):\n"
        "    inner = [torch.nn.Flatten(), torch.nn.BatchNorm1d(64)]\n"
        "    return torch.nn.Sequential(*inner), torch.nn.Linear(64, classes)\n"
    )
    params = studies.settings(("own",), rounds=1, algorithms={"own": {"algorithm": "own.Own"}})
    made = studies.prepare(params | {"model": {"name": "own.normed"}})
    said = refused(monkeypatch, capsys, "segment", str(made.runs[0].path), "--stop", "1", "--stack", "1")
    assert said.startswith(
        "fedpipe: own.Own: own.py, line 13, in init: `return {'model': fresh(0) - self.net.parameters(fresh(0))}` "
        "combines tensors of different names: body.1.running_mean, body.1.running_var are in one only; BatchNorm's "
        "running statistics, which a gradient does not have, are left out by self.net.parameters(model)."
    ), said
