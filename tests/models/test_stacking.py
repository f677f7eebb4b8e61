"""All models have equal results in a stack and one by one, with dropout, BatchNorm and a client with one sample."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.components import component, registry
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients import loop as looping
from fedpipe.engine.clients.executor import FIRST, ClientTask, Executor
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.loop import LoopExecutor
from fedpipe.engine.stack.stack import StackExecutor
from fedpipe.engine.torch_env.trees import move_state
from fedpipe.models.base import FunctionalNetwork, Model
from fedpipe.settings.federation import Federation
from tests import fake_device

pytestmark = pytest.mark.usefixtures("narrow_vgg16")

SMALL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "cnn": ((1, 8, 8), {"batch_norm": True}),
    "cnn4": ((1, 16, 16), {}),
    "cnn5": ((3, 16, 16), {"batch_norm": True}),
    "fasttext": ((7,), {"vocabulary": 50}),
    "feddw_cnn": ((1, 20, 20), {"dropout": 0.5}),
    "feddw_resnet18": ((3, 9, 9), {}),  # at 8x8, sums of two values that are normalized to +-1 are at ReLU's kink
    "lenet": ((1, 16, 16), {}),
    "mlp": ((5,), {}),
    "mobilenet": ((3, 16, 16), {}),
    "resnet18": ((3, 40, 40), {}),  # at 32x32 its last layers normalize two values, and errors grow by 1e8
    "shufflenet": ((3, 16, 16), {}),
    "timm": ((3, 32, 32), {"architecture": "test_vit"}),
    "torchvision": ((3, 32, 32), {"architecture": "mobilenet_v3_small", "norm": "group"}),
    "vgg16": ((3, 32, 32), {"weights": None, "frozen": False}),
}
UNSTACKABLE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "bilstm": ((7,), {"vocabulary": 50}),
    "lstm": ((7,), {"vocabulary": 50}),
}
STACKABLE = [
    name
    for name in registry.list_components(component.MODEL)
    if registry.find_component(component.MODEL, name).is_stackable  # type: ignore[attr-defined]
]


def test_all_stackable_models_are_tested() -> None:
    assert sorted(SMALL) == STACKABLE


def parametrize_models(*slow: str) -> pytest.MarkDecorator:
    names = [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in STACKABLE]
    return pytest.mark.parametrize("name", names)


def train_round(
    name: str,
    kind: Callable[..., Executor],
    device: torch.device = fake_device.HOST,
    dtype: Literal["float32", "float64"] = "float64",
    case: tuple[tuple[int, ...], dict[str, Any]] | None = None,
) -> tuple[Tensors, list[tuple[State, tuple[Any, ...]]]]:
    """Return the initial model, and upload and scores of each of two clients after a round."""
    shape, parameters = case or (SMALL | UNSTACKABLE)[name]
    family: Model = registry.build_component(component.MODEL, name, parameters)  # type: ignore[assignment]
    family.check(shape, 3)
    random = np.random.default_rng(0)
    has_tokens = len(shape) == 1 and "vocabulary" in parameters
    x = torch.as_tensor(random.integers(0, 50, (4, *shape)) if has_tokens else random.normal(size=(4, *shape)))
    parts = [np.array([0, 1, 2]), np.array([3])]
    clients = FederatedData(
        x, torch.tensor([0, 1, 2, 1]), parts, parts, np.arange(4), 3, 0, getattr(torch, dtype), device
    )
    federation = Federation(clients=2, batch_size=2, learning_rate=0.01, dtype=dtype)
    net = FunctionalNetwork(lambda: family.build(shape, 3), getattr(torch, dtype), device)
    algorithm = FedAvg().bind(net, federation)
    server = algorithm.init(lambda _: net.make_initial_model(1))
    first = {FIRST: torch.ones(())}
    task = ClientTask(
        "train", 1, [0, 1], lambda _: first, lambda ids: algorithm.send(move_state(server, device), ids), ["local"]
    )
    outcomes = kind(algorithm, clients).run(task)
    results = [(move_state(outcome.upload, fake_device.HOST), tuple(outcome.scores["local"])) for outcome in outcomes]
    return server["model"], results


def make_stack(algorithm: Algorithm, clients: FederatedData) -> Executor:
    return StackExecutor(algorithm, clients, 2)


@parametrize_models("resnet18", "feddw_resnet18", "shufflenet", "mobilenet")
def test_stack_training_equals_loop(name: str, assert_same: Any) -> None:
    (initial_model, loop), (_, stack) = train_round(name, LoopExecutor), train_round(name, make_stack)
    assert_same(stack, loop, tolerance=1e-7)  # BatchNorm of two or three values divides by deviations near 0
    has_file_changed = [not torch.equal(value, initial_model[key]) for key, value in loop[0][0]["model"].items()]
    assert sum(has_file_changed) > len(has_file_changed) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side", "parameters"),
    [
        ("torchvision", 32, {"architecture": "squeezenet1_1"}),  # dropout
        ("torchvision", 32, {"architecture": "efficientnet_b0", "norm": "group"}),  # stochastic depth
        ("torchvision", 32, {"architecture": "resnet18"}),
        ("timm", 32, {"architecture": "test_resnet"}),
        ("timm", 32, {"architecture": "test_byobnet"}),  # BatchNorm with activation
        ("timm", 32, {"architecture": "test_convnext"}),
    ],
)
def test_stack_training_of_library_networks_equals_loop(
    name: str, side: int, parameters: Any, assert_same: Any
) -> None:
    """Networks in which rounding errors grow little, such as those with GroupNorm."""
    case = (3, side, side), parameters
    (_, loop), (_, stack) = train_round(name, LoopExecutor, case=case), train_round(name, make_stack, case=case)
    assert_same(stack, loop, tolerance=1e-7)


@parametrize_models("resnet18", "feddw_resnet18", "shufflenet", "mobilenet")
def test_stack_on_simulated_gpu_equals_stack_on_cpu(name: str, assert_same: Any) -> None:
    """The CPU simulates a GPU. No tensor is on the host, and all kernels are deterministic."""
    _, host_results = train_round(name, make_stack, dtype="float32")
    with fake_device.use_device():
        assert_same(train_round(name, make_stack, fake_device.DEVICE, "float32")[1], host_results)


@pytest.mark.parametrize("name", [*UNSTACKABLE, "cnn"])
def test_loop_on_simulated_gpu_equals_loop_on_cpu(name: str, assert_same: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping, "ThreadPoolExecutor", fake_device.SequentialExecutor)
    _, host_results = train_round(name, LoopExecutor)
    with fake_device.use_device():  # LSTM has another kernel there
        assert_same(train_round(name, LoopExecutor, fake_device.DEVICE)[1], host_results, tolerance=1e-15)
