"""`fedpipe check own.Prox`: each algorithm violates one rule, and the message shows the cure."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from fedpipe import testing
from fedpipe.testing import checks
from tests.small_studies import RunFedpipe

HEAD = """
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from fedpipe.algorithms.base import Measure, Pull, Train, Update
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedprox import FedProx
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class Prox(FedAvg):
    mu: float = 0.01

    def start(self, state, download, info):
        return {"model": download["model"], "anchor": download["model"].only(self.net.names)}

    def loss(self, client, batch):
        drift = client["model"].only(self.net.names) - client["anchor"]
        return self.risk(client, batch) + self.mu / 2 * drift.square_norm()


class Hidden:
    calls = 0


HIDDEN = Hidden()
SEEN = {}
"""

#: Bodies of classes and the message for each.
BREACHES = {
    # names
    "def agregate(self, server, uploads):\n  return server": (
        "own.Own.agregate is never used, because no hook has that name. Did you mean 'aggregate'?"
    ),
    "def kepe(self, client):\n  return {}": (
        "own.Own.kepe is never used, because no hook has that name. Did you mean 'keep'?"
    ),
    "def combin(self, server, uploads):\n  return server": (
        "own.Own.combin is never used, because no hook has that name. Did you mean 'aggregate'?"
    ),
    "def prepare(self):\n  return ()": (
        "own.Own.prepare is never used, because no hook has that name. Did you mean 'personal_passes'?"
    ),
    "prototype = True": (
        "own.Own.prototype is never used, because no hook has that name. Did you mean 'has_prototype_logits'?"
    ),
    "def aggregate(self, uploads):\n  return {}": "own.Own.aggregate takes (uploads). Use (server, uploads).",
    "risk: float = 0.1": "own.Own: the field 'risk' hides the hook",
    # values that hooks return
    "def upload(self, client):\n  return {'model': client['model'], 'norm': 0.5}": (
        "own.Own.upload (own.py, line 35) returned 'norm' as 0.5, a Python float. Return a tensor"
    ),
    "def start(self, state, download, info):\n  return {'model': download['model'], 'buffers': download['model']}": (
        "own.Own.start (own.py, line 35) returned 'buffers', which is fedpipe's name of BatchNorm's running statistics."
    ),
    "def keep(self, client):\n  {'last': client['model']}": (
        "own.Own.keep (own.py, line 35) returned None. Return a dict of named parts"
    ),
    "def keep(self, client):\n  return {'last': client['model']}": (
        "own.Own.keep (own.py, line 35) returned 'last.body.1.weight' as float64 of shape (6, 5), but init_client "
    ),
    "def init(self, initial_model):\n  return {'model': dict(initial_model(0))}": (
        "own.Own.init (own.py, line 35) returned 'model' as a dict. Wrap the dict in Tensors(...)"
    ),
    "def send(self, server, ids):\n  return {'model': server['model']}": (
        "own.Own.send (own.py, line 35) returned a dict. Return a tuple of two dicts"
    ),
    "def local_passes(self):\n  return Train(self.loss)": (
        "own.Own.local_passes (own.py, line 35) returned a Train. Return a tuple of passes"
    ),
    "def aggregate(self, server, uploads):\n  return {'model': uploads.mean('model'), 'n': torch.ones(len(uploads))}": (
        "own.Own.aggregate (own.py, line 35) returned 'n' as float32 of shape (4,), but init did not"
    ),
    "def upload(self, client):\n  return {**super().upload(client), 'big': client['model'].norm() > 1}": (
        "own.Own: `upload` returns a tensor of torch.bool."
    ),
    "def metrics(self, server):\n  return {'bytes_up': server['model'].norm()}": (
        "own.Own.metrics (own.py, line 35) returned 'bytes_up', which is already a column"
    ),
    "def extra_models(self, server):\n  return {'personal': server['model']}": (
        "own.Own.extra_models (own.py, line 35) returned 'personal', which is already the model of a protocol"
    ),
    "def predict(self, client, x):\n  return self.net(client['model'], x).argmax(1)": (
        "own.Own.predict (own.py, line 35) returned int64 of shape (28,) for 28 samples and 4 classes. Return logits "
        "of shape (samples, classes)"
    ),
    "def predict(self, client, x):\n  return F.pad(self.net(client['model'], x), (0, 1))": (
        "own.Own.predict (own.py, line 35) returned float64 of shape (28, 5) for 28 samples and 4 classes."
    ),
    "has_prototype_logits: ClassVar[bool] = True\n def prototype_logits(self, client, x):\n  return x.long()[:, :4]": (
        "own.Own.prototype_logits (own.py, line 36) returned int64 of shape (28, 4) for 28 samples and 4 classes."
    ),
    "def matrices(self, server):\n  return None": (  # without the advice to type this command
        "). Return the types and shapes that FedAvg's hooks return."
    ),
    # passes
    "def loss(self, client, batch):\n  return F.cross_entropy(self.net(client['model'], batch.x), batch.y).item()": (
        "a Python float. Return a floating-point scalar tensor"
    ),
    "def keep(self, client):\n  return {'n': torch.tensor(client['model'].norm().item())}\n"
    " def init_client(self, server, initial_model):\n  return {'n': torch.tensor(0.0)}": (
        "reads a tensor's value in Python, as `if`, float() and item() do. Use torch.where"
    ),
    "def loss(self, client, batch):\n  return self.risk(client, batch) * (2 if client['model'].norm() > 1 else 1)": (
        "own.Own.loss (own.py, line 36): `return self.risk(client, batch) * (2 if client['model'].norm() > 1 else 1)` "
        "reads a tensor's value in Python"
    ),
    "def loss(self, client, batch):\n"
    "  return F.cross_entropy(self.predict(client, batch.x), batch.y, reduction='none')": (
        "own.Own.loss (own.py, line 35) returned a tensor of shape (1,). Return a floating-point scalar tensor"
    ),
    "def loss(self, client, batch):\n  return self.risk(client, batch).detach()": (
        "own.Own.loss (own.py, line 35) returned a loss that does not depend on the parameters of 'model'"
    ),
    "def loss(self, client, batch):\n  return self.risk(client, batch) + client['anchor'].norm()": (
        "own.Own.loss (own.py, line 36): `return self.risk(client, batch) + client['anchor'].norm()` reads 'anchor'"
    ),
    "def local_passes(self):\n  return Train(self.loss), Update(lambda client: {'model': client['model']}),\n"
    " def start(self, state, download, info):\n  return {'model': download['model'], 'n': info.size}": (
        "own.Own: a lambda (own.py, line 36) returned a client without 'n'"
    ),
    "def local_passes(self):\n  return (Train(self.loss, when=lambda client: True),)": (
        "own.Own: a lambda (own.py, line 36) returned True, a Python bool. Return a Boolean scalar tensor"
    ),
    "def local_passes(self):\n  return (Train(self.loss, pull=Pull('anchor', 0.1)),)": (
        "own.Own: a Train pass has a pull to 'anchor', but the client has no 'anchor'. Return 'anchor' from `start`"
    ),
    "def local_passes(self):\n  return (Train(self.loss, pull=Pull('anchor', 0.1)),)\n"
    " def start(self, state, download, info):\n"
    "  return {'model': download['model'], 'anchor': download['model'].only(['head.weight'])}": (
        "own.Own: a Train pass has a pull to 'anchor', but 'anchor' has no 'body.1.weight'"
    ),
    "def local_passes(self):\n  return (Train(self.loss, pull=Pull('anchor', 0.1)),)\n"
    " def start(self, state, download, info):\n"
    "  return {'model': download['model'], 'anchor': download['model'].flat()}": (
        "own.Own: a Train pass has a pull to 'anchor', but the client has 'anchor' as a tensor"
    ),
    "def local_passes(self):\n  return (Train(self.loss, pull=Pull('anchor', 0.1)),)\n"
    " def start(self, state, download, info):\n"
    "  return {'model': download['model'], 'anchor': download['model'].map(torch.Tensor.float)}": (
        "but 'body.1.weight' is float32 of shape (6, 5) in 'anchor' and float64 of shape (6, 5) in 'model'"
    ),
    "def start(self, state, download, info):\n  download['model']['head.bias'].add_(info.size)\n  return download": (
        "`download['model']['head.bias'].add_(info.size)` changes a tensor in place"
    ),
    # hidden state and random numbers
    "def keep(self, client):\n  self.last = client['model']\n  return {}": (
        "own.Own.keep (own.py, line 36): `self.last = client['model']` stores a value on the algorithm"
    ),
    "def keep(self, client):\n  SEEN['calls'] = SEEN.get('calls', 0) + 1\n  return {}": (
        "own.Own: 'own.SEEN' changes while clients train"
    ),
    "def aggregate(self, server, uploads):\n"
    "  server['model']['head.bias'].add_(1)\n  return {'model': uploads.mean('model')}": (
        "own.Own: a round changes the server's state in place"
    ),
    "def global_model(self, server):\n  server['model']['head.bias'].mul_(0.5)\n  return server['model']": (
        "own.Own: a round changes the server's state in place"
    ),
    "def aggregate(self, server, uploads):\n  return {'model': uploads.mean('model') * (1 + torch.rand(()) / 100)}": (
        "own.Own: its code draws random numbers from PyTorch's global generator"
    ),
    "def aggregate(self, server, uploads):\n  HIDDEN.calls += 1\n"
    "  return {'model': uploads.mean('model') * (1 + HIDDEN.calls / 100)}": (
        "own.Own: the same run twice has different results"
    ),
    "def loss(self, client, batch):\n  return F.cross_entropy(self.net(client['model'], batch.x), batch.y)": (
        "own.Own: clients trained in one call differ from clients trained one after the other"
    ),
    "def start(self, state, download, info):\n  return {'model': download['model'], 'rare': (1 / "
    "info.class_counts).mean()}\n"
    " def loss(self, client, batch):\n  return self.risk(client, batch) + client['model'].norm() * client['rare']": (
        "own.Own: `aggregate` returns infinity or NaN"
    ),
}

#: Bodies of classes, and for each the check that detects the violation and its message.
LATER = {
    "def finetune_passes(self, epochs):\n  return ()": (
        checks.check_evaluation,
        "own.Own: fine-tuning does not change the personal model",
    ),
    "def upload(self, client):\n  return {'theta': client['model']}\n"
    " def aggregate(self, server, uploads):\n  mean, name = uploads.mean('theta'), 'body.1.running_var'\n"
    "  return {'model': mean | {name: mean[name] - 10}}": (
        checks.check_batch_normalization,
        "own.Own: the server's 'body.1.running_var' has a negative variance (-",
    ),
    "def upload(self, client):\n  return {'theta': client['model']}\n"
    " def aggregate(self, server, uploads):\n  return {'model': uploads.mean('theta') * 2}": (
        checks.check_batch_normalization,
        "is outside the range of the clients' uploads",
    ),
    "def upload(self, client):\n"
    "  return {'model': client['model'] | self.net.client_buffers | self.federation_statistics}\n"
    " @property\n def federation_statistics(self):\n"
    "  return Tensors({name: torch.full((6,), float('inf')).double() for name in self.net.buffer_names})": (
        checks.check_batch_normalization,
        "own.Own: running statistics of batch normalization become infinite or NaN.",
    ),
    "def aggregate(self, server, uploads):\n  return {'model': uploads[-1][2]['model']}": (
        checks.check_order_of_uploads,
        "own.Own: `aggregate` depends on the order of uploads",
    ),
    "def traffic(self, state):\n  return {}": (
        checks.check_traffic,
        "own.Own: `traffic` leaves out a part of the download that clients read",
    ),
    "def loss(self, client, batch):\n  return -0.01 * self.risk(client, batch)": (
        checks.check_training_on_digits,
        "own.Own: three rounds on handwritten digits do not lower the clients' mean loss (2.",
    ),
    "def predict(self, client, x):\n  return self.net(client['model'], x) / self.net(client['model'], x).norm(dim=0)": (
        checks.check_evaluation,
        "own.Own: in the phase 'receive', clients in one call differ",
    ),
    "def loss(self, client, batch):\n  scale = batch.x.std() if client['model']['body.0.weight'].dim() == 4 else 1\n"
    "  return self.risk(client, batch) * scale": (
        checks.check_loop_and_stack_with_convolutions,
        "own.Own: clients trained in one call differ from clients trained",
    ),
    "def start(self, state, download, info):\n  return {'model': download['model'], 'rare': 1 / info.class_counts[3]}\n"
    " def loss(self, client, batch):\n  return self.risk(client, batch) + client['model'].norm() * client['rare']": (
        checks.check_missing_classes,
        "own.Own: states become infinite or NaN when the clients [0, 1] train",
    ),
}


@pytest.fixture(autouse=True)
def project(own_module: Path) -> Path:
    return own_module.parent


def write_module(folder: Path, body: str, base: str = "FedAvg") -> None:
    (folder / "own.py").write_text(
        f"{HEAD}\n@dataclass(frozen=True, kw_only=True)\nclass Own({base}):\n {body}\n", encoding="utf-8"
    )


@pytest.mark.parametrize("body", BREACHES, ids=range(len(BREACHES)))
def test_check_command_prints_message_for_violation(body: str, project: Path, run_fedpipe: RunFedpipe) -> None:
    write_module(project, body)
    status, said, errors = run_fedpipe("check", "own.Own")
    assert status == 1
    assert BREACHES[body] in said, said
    assert all(line.startswith("own.Own") and line.endswith((".", "?")) for line in said.splitlines()), said
    assert errors == ""


@pytest.mark.parametrize("body", LATER, ids=range(len(LATER)))
def test_check_function_returns_message_for_violation(body: str, project: Path) -> None:
    check, sentence = LATER[body]
    found = check(import_module(project, body).Own())
    assert sentence in found[0]


@pytest.mark.parametrize(
    ("check", "start"),
    [
        (checks.check_loop_and_stack, "clients trained in one call differ from clients trained"),
        (checks.check_loop_and_stack_with_adam, "clients trained in one call differ from clients trained"),
        (checks.check_batch_normalization, "with batch normalization, clients in one call differ from clients"),
    ],
    ids=["SGD", "Adam", "BatchNorm"],
)
def test_each_check_finds_loss_that_padding_changes(check: testing.Check, start: str, project: Path) -> None:
    body = "def loss(self, client, batch):\n  return self.risk(client, batch) * batch.x.std()"
    (message,) = check(import_module(project, body).Own())
    assert message.startswith(f"own.Own: {start} one after the other (client 0, ")


def test_server_momentum_of_whole_model_passes_batch_norm_check(project: Path) -> None:
    """The server's running statistics are the mean of the uploads, although the rule adds momentum to the model."""
    body = (
        "def init(self, initial_model):\n  return {'model': initial_model(0), 'speed': initial_model(0).zeros()}\n"
        " def aggregate(self, server, uploads):\n"
        "  speed = 0.9 * server['speed'] + (uploads.mean('model') - server['model'])\n"
        "  return {'model': server['model'] + speed, 'speed': speed}"
    )
    assert checks.check_batch_normalization(import_module(project, body).Own()) == []


def fedpipe(folder: Path, *args: str) -> tuple[int, str]:
    """Run the command in a folder in a new process. Return its status and output."""
    done = subprocess.run([sys.executable, "-m", "fedpipe", *args], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_check_command_uses_parameters_of_study_method(project: Path, run_fedpipe: RunFedpipe) -> None:
    """The check ignores other settings of the study, so it needs no data set."""
    write_module(
        project, "size: int = 1\n def upload(self, client):\n  return {'model': client['model'], 'n': self.size * 0.5}"
    )
    entries = {"mine": {"algorithm": "own.Own", "size": 3, "title": "Mine", "overrides": {"federation.momentum": 0.5}}}
    (project / "params.yaml").write_text(yaml.safe_dump({"dataset": {"name": "nowhere"}, "algorithms": entries}))
    for more, number in (((), "1.5"), (("--set", "size=4"), "2.0")):
        status, said, _ = run_fedpipe("check", "mine", "--params", "params.yaml", *more)
        assert status == 1
        assert f"own.Own.upload (own.py, line 36) returned 'n' as {number}, a Python float" in said


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("mien",), "'mien' is not a method of the study. Did you mean 'mine'?"),
        (("mine",), "algorithms.mine.mu: -1 can't be used. Use a value greater than or equal to 0."),
        (("mine", "--set", "nu=1", "--set", "mu=1"), "algorithms.mine.nu: unknown key. Did you mean 'mu'?"),
        (("fedprox", "--set", "mu=-2"), "algorithms.fedprox.mu: -2 can't be used. Use a value greater than or equal"),
        (("none",), "algorithms.none: empty. Use {} for the defaults, or remove the key."),
    ],
)
def test_check_command_rejects_invalid_method_of_study(
    args: tuple[str, ...], sentence: str, project: Path, run_fedpipe: RunFedpipe
) -> None:
    (project / "params.yaml").write_text("algorithms: {mine: {algorithm: fedprox, mu: -1}, none: }\n")
    status, said, errors = run_fedpipe("check", *args, "--params", "params.yaml")
    assert (status, errors) == (1, "")
    assert said.startswith(sentence)


def test_correct_algorithm_passes_check_command(project: Path) -> None:
    write_module(project, "pass")
    assert fedpipe(project, "check", "own.Prox", "--set", "mu=0.1") == (0, "own.Prox passes all checks.\n")


#: Losses without a gradient for a client with one class.
ONE_CLASS = {
    "FedLC": (  # Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022
        "tau: float = 1.0\n"
        " def start(self, state, download, info):\n"
        "  return {'model': download['model'], 'margins': self.tau * info.class_counts.clamp(1e-8) ** -0.25}\n"
        " def loss(self, client, batch):\n"
        "  logits = self.net(client['model'], batch.x) - client['margins']\n"
        "  return batch.mean(F.cross_entropy(logits, batch.y, reduction='none'))"
    ),
    "restricted softmax": (  # over the client's own classes
        "def start(self, state, download, info):\n"
        "  return {'model': download['model'], 'owned': info.class_counts}\n"
        " def loss(self, client, batch):\n"
        "  logits = self.net(client['model'], batch.x).masked_fill(client['owned'] == 0, -1e9)\n"
        "  return batch.mean(F.cross_entropy(logits, batch.y, reduction='none'))"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("body", ONE_CLASS.values(), ids=ONE_CLASS)
def test_loss_without_gradient_for_one_class_passes_check_command(body: str, project: Path) -> None:
    write_module(project, body)
    assert fedpipe(project, "check", "own.Own") == (0, "own.Own passes all checks.\n")


def test_check_command_prints_all_violations(project: Path, run_fedpipe: RunFedpipe) -> None:
    write_module(project, "def agregate(self, server, uploads):\n  return server\n def sends(self):\n  pass")
    status, said, _ = run_fedpipe("check", "own.Own")
    assert status == 1
    assert said == (
        "own.Own.agregate is never used, because no hook has that name. Did you mean 'aggregate'?\n"
        "own.Own.sends is never used, because no hook has that name. Did you mean 'send'?\n"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "class Own(:\n",
            "own.Own: 'own.Own' can't be imported (SyntaxError: invalid syntax, own.py, line 1: `class Own(:`). "
            "Correct this line.",
        ),
        ("import torch\n1 / 0\n", "(ZeroDivisionError: division by zero, own.py, line 2). Correct this line."),
        ("import nowhere\n", "(No module named 'nowhere', own.py, line 1). Install nowhere, or remove the import."),
        (f"{HEAD}class Owm(FedAvg):\n pass\n", "no attribute 'Own'). Did you mean 'own.Owm'?"),
        (f"{HEAD}class Near(FedAvg):\n pass\n", "no attribute 'Own'). Use one of: own.Prox, own.Near."),
        (
            f"{HEAD}@dataclass\nclass Own(FedAvg):\n mu: float = 1\n",
            "(TypeError: cannot inherit non-frozen dataclass from a frozen one, own.py, line 32). Write "
            "`@dataclass(frozen=True, kw_only=True)` above class Own.",
        ),
        ("class Own:\n pass\n", "own.Own: 'own.Own' is not an algorithm. It must derive from Algorithm."),
        (f"{HEAD}class Own(FedAvg):\n mu = 1\n nu: float = 2\n", "has fields. Make it a @dataclass(frozen=True"),
        (
            f"{HEAD}@dataclass(frozen=True, kw_only=True)\nclass Own(FedAvg):\n"
            " def __post_init__(self):\n  {}['a']\n",
            "own.Own: the class fails with these parameters (KeyError: 'a', own.py, line 35)",
        ),
    ],
)
def test_check_command_explains_import_and_class_errors(
    text: str, sentence: str, project: Path, run_fedpipe: RunFedpipe
) -> None:
    (project / "own.py").write_text(text)
    status, said, errors = run_fedpipe("check", "own.Own")
    assert (status, errors) == (1, "")
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "status", "sentence"),
    [
        (("fedprx",), 1, "fedprx: unknown algorithm 'fedprx'. Did you mean 'fedprox'?"),
        (("fedprox", "--set", "mu=-1"), 1, "fedprox.mu: -1 can't be used. Use a value greater than or equal to 0."),
        (("fedprox", "--set", "nu=1"), 1, "fedprox.nu: unknown key. Did you mean 'mu'?"),
        (("fedprox", "--set", "mu"), 1, "--set: 'mu' can't be used. Use KEY=VALUE, such as mu=0.1."),
    ],
)
def test_check_command_rejects_invalid_arguments(
    args: tuple[str, ...], status: int, sentence: str, run_fedpipe: RunFedpipe
) -> None:
    assert run_fedpipe("check", *args) == (status, f"{sentence}\n", "")


def import_module(folder: Path, body: str, base: str = "FedAvg") -> ModuleType:
    write_module(folder, body, base)
    import own  # type: ignore[import-not-found]

    return own  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", [checks.check_training_in_blocks, checks.check_resuming], ids=testing.get_check_title)
def test_check_detects_hidden_state_by_its_effect(check: testing.Check, project: Path) -> None:
    body = (
        "def keep(self, client):\n  HIDDEN.calls += 1\n  return {}\n"
        " def upload(self, client):\n  return {'model': client['model'] * (1 + HIDDEN.calls / 100)}"
    )
    found = check(import_module(project, body).Own())
    assert len(found) == 1
    assert "client's results depend" in found[0] or "a resumed run differs" in found[0]


def test_check_names_ignores_methods_that_class_calls(project: Path) -> None:
    body = (
        "def step(self, client):\n  return client\n"
        " def local_passes(self):\n  return Train(self.loss), Update(self.step)"
    )
    assert checks.check_names(import_module(project, body).Own()) == []


def test_check_names_finds_default_without_type(project: Path) -> None:
    assert checks.check_names(import_module(project, "mu = 1.0", "Prox").Own()) == [
        "own.Own sets 'mu' without a type, so this value has no effect. Write `mu: float = 1.0`."
    ]


def test_check_command_shows_cure_of_class_that_prevents_import(project: Path, run_fedpipe: RunFedpipe) -> None:
    code = f"{HEAD}\n@dataclass\nclass Unfrozen(FedAvg):\n    mu: float = 1\n"
    (project / "own.py").write_text(code)
    location = f"own.py, line {code.count(chr(10)) - 2}"
    for name in ("own.Unfrozen", "own.Prox"):
        status, output, _ = run_fedpipe("check", name)
        assert status == 1
        assert f"{location}). Write `@dataclass(frozen=True, kw_only=True)` above class Unfrozen." in output
