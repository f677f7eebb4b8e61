"""Training with `federation.precision: bfloat16`."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.errors import SettingsError
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.torch_env import numerics
from fedpipe.engine.torch_env.trees import is_finite
from fedpipe.models.base import Network
from fedpipe.planning import planner
from fedpipe.settings import parser
from fedpipe.testing.trial import CLASSES, describe_difference
from tests import small_studies as studies

WIDTHS = [None, 3]


def make_float32_trial(
    make_trial, make_clients, algorithm="fedavg", model="cnn", precision="bfloat16", **other_settings
):
    exact = make_clients((1, 4, 4) if model == "cnn" else (5,))
    parts = exact.train, exact.test, exact.global_test
    clients = FederatedData(exact.x, exact.y, *parts, exact.classes, exact.seed, torch.float32)
    settings = {"dtype": "float32", "precision": precision, "learning_rate": 0.1} | other_settings
    return make_trial(algorithm, model, clients, **settings)


def compute_relative_distance(result, expected, initial):
    """Divide the norm of the difference of two models by the norm of the update."""
    return float((result - expected).norm() / (expected - initial).norm())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("model", ["cnn", "norm"])
def test_bfloat16_training_is_close_to_float32_training(make_trial, make_clients, width, model):
    bfloat16_trial = make_float32_trial(make_trial, make_clients, model=model, width=width)
    full_trial = make_float32_trial(make_trial, make_clients, model=model, width=width, precision="full")
    initial = full_trial.server["model"]
    for outcome, expected in zip(bfloat16_trial.train(), full_trial.train(), strict=True):
        assert {value.dtype for value in outcome.upload["model"].values()} == {torch.float32}
        assert 0 < compute_relative_distance(outcome.upload["model"], expected.upload["model"], initial) < 0.3


@pytest.mark.parametrize("width", WIDTHS)
def test_products_use_bfloat16_only_in_training(make_trial, make_clients, width):
    """Losses receive float32 logits, and evaluation uses only float32."""
    dtypes = {True: set(), False: set()}

    class RecordingFedAvg(FedAvg):
        def risk(self, client, batch):
            logits = self.net(client["model"], batch.x)
            dtypes[True].add((logits.dtype, torch.is_autocast_enabled("cpu")))
            return super().risk(client, batch)

        def predict(self, client, x):
            logits = super().predict(client, x)
            dtypes[False].add((logits.dtype, torch.is_autocast_enabled("cpu")))
            return logits

    products = []
    run = make_float32_trial(make_trial, make_clients, RecordingFedAvg(), width=width)
    linear = torch.nn.functional.linear

    def record_product(*arguments):
        product = linear(*arguments)
        products.append(product.dtype)
        return product

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", record_product)
        run.train()
        assert set(products) == {torch.bfloat16}
        products.clear()
        run.train(range(8), ("local",), "receive")
        assert set(products) == {torch.float32}
    assert dtypes == {True: {(torch.float32, False)}, False: {(torch.float32, False)}}


def test_repeated_bfloat16_runs_have_equal_bits_with_any_threads(make_trial, make_clients, assert_same):
    first_trial = make_float32_trial(make_trial, make_clients).run(2)
    assert_same(make_float32_trial(make_trial, make_clients).run(2).server, first_trial.server)
    assert_same(make_float32_trial(make_trial, make_clients, threads=3).run(2).server, first_trial.server)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "name",
    studies.mark_others_slow(
        ("fedala", "fednh", "fedproto", "feduv", "feddw", "feddual", "moon", "perfedavg", "pfedme", "pfps_lwc"),
        ("feddw", "moon", "pfps_lwc"),
    ),
)
def test_methods_with_feature_losses_train_in_bfloat16(make_trial, make_clients, name, width):
    run = make_float32_trial(make_trial, make_clients, name, width=width, participation=1.0)
    initial_server = copy.deepcopy(run.server)
    run.run(2, tests=("local",))
    assert is_finite(run.server)
    assert all(is_finite(state) for state in run.client_states.values())
    assert describe_difference(run.server, initial_server) is not None


def build_layered_network():
    body = nn.Sequential(
        *(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()),
        *(nn.Linear(6, 8), nn.LayerNorm(8), nn.Unflatten(1, (4, 2)), nn.GroupNorm(2, 4), nn.Flatten()),
    )
    return Network(body, nn.Linear(8, CLASSES))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["fedavg", "moon"])
def test_bfloat16_training_with_normalization_is_close_to_float32(make_trial, make_clients, name, width):
    """MOON's teachers use running statistics."""
    bfloat16_trial, full_trial = (
        make_float32_trial(
            make_trial, make_clients, name, build_layered_network, precision, width=width, participation=1.0
        )
        for precision in ("bfloat16", "full")
    )
    initial = full_trial.server["model"]
    for outcome, expected in zip(bfloat16_trial.train(), full_trial.train(), strict=True):
        assert 0 < compute_relative_distance(outcome.upload["model"], expected.upload["model"], initial) < 0.3


def test_run_key_depends_on_precision(in_empty_folder: Path) -> None:
    keys = {}
    for precision in (None, "full", "bfloat16"):
        studies.write(studies.settings(federation={"precision": precision} if precision else {}), in_empty_folder)
        plan = planner.make_plan(Path("params.yaml"))
        keys[precision] = plan.runs[0].key
    assert keys[None] == keys["full"] != keys["bfloat16"]


def test_bfloat16_precision_rejects_float64() -> None:
    with pytest.raises(SettingsError, match=r"^federation\.precision: bfloat16 .*float64"):
        parser.parse_params(studies.settings(federation={"precision": "bfloat16", "dtype": "float64"}))


@pytest.mark.usefixtures("in_empty_folder")
def test_opened_run_has_deterministic_kernels_and_no_tf32() -> None:
    with numerics.preserve_torch_flags():
        torch.set_deterministic_debug_mode("default")
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        studies.open_runs(studies.prepare(studies.settings()))
        assert torch.get_deterministic_debug_mode() == 2, "error"
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
