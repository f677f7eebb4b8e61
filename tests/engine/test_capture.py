"""Steps for GPUs, tested on a CPU. No operation uses the host, and recorded steps have the bits of plain steps."""

import csv
import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Measure, Train
from fedpipe.core.components import component, registry
from fedpipe.engine import contract
from fedpipe.engine.clients.executor import FIRST, get_passes, make_client_start_state
from fedpipe.engine.stack import graphs, schedule
from fedpipe.engine.stack.graphs import overwrite_buffers
from fedpipe.engine.stack.stack import StackExecutor
from fedpipe.engine.stack.stack_run import StackRun
from fedpipe.engine.torch_env.trees import stack_states
from fedpipe.models.base import Network
from fedpipe.settings.federation import Server
from fedpipe.settings.transforms import Transforms
from fedpipe.testing.trial import CLASSES
from tests import small_studies as studies

LAUNCHES = Path(__file__).with_name("launches.csv")
SIZES = (9, 5, 5)  #: in batches of 4: two steps with 3 clients, then one step with 1 client
NAMES = registry.list_components(component.ALGORITHM)
DW = sorted(set(NAMES) - {"feddw", "fednh"})  #: these two define the classification layer themselves

#: Operations that launch no kernel, because they return a view or select one of several results.
VIEWS = {
    *("alias", "as_strided", "detach", "diagonal", "expand", "getitem", "permute", "select", "slice", "split"),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "_unsafe_view"),
}


def build_algorithm(name, **parameters):
    parameters |= {"epsilon": 0.1} if name == "feddual" else {}
    return registry.build_component(component.ALGORITHM, name, parameters)


def list_operations(graph):
    """List the operations of a graph with their names."""
    return [(node.target.__name__.partition(".")[0], node) for node in graph.graph.nodes if node.op == "call_function"]


def count_launches(graph):
    return sum(name not in VIEWS for name, _ in list_operations(graph))


def assert_operations_on_device(graph):
    """Require that no operation reads from the device, creates a tensor from host values, or copies between devices."""
    for name, node in list_operations(graph):
        assert name not in {"_local_scalar_dense", "lift_fresh_copy", "item", "nonzero", "masked_select"}, node
        if name in {"_to_copy", "copy_"}:
            assert "device" not in node.kwargs, node
        devices = [value for value in pytree.tree_leaves(node.kwargs) if isinstance(value, torch.device)]
        assert all(device.type == "meta" for device in devices), node
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = getattr(graph, node.target)
            assert value.device.type == "meta" or not value.dim(), f"{node} is on the host"


def start_stack(trial, ids):
    """Build the initial state of a stack of all clients, in a job that trains some of them."""
    algorithm, clients, number = trial.algorithm, trial.clients, trial.rounds + 1
    stack_clients = schedule.group_clients_into_stacks(clients.sizes, range(len(clients)), len(clients))[0]
    local_clients = [client for client in stack_clients if client in ids]
    stack_run = StackRun(
        algorithm, clients, number, stack_clients, local_clients, schedule.get_allowed_stack_widths(len(clients))
    )
    common, client_parts = contract.validate_download(algorithm, trial.send(stack_run.rows))
    axes = dict.fromkeys(common) | dict.fromkeys(client_parts, 0)
    kept_states, start = (
        stack_states([trial.client_states[client] for client in stack_run.rows]),
        functools.partial(make_client_start_state, algorithm),
    )
    info = clients.get_client_info(stack_run.rows, number, kept_states[FIRST])
    return stack_run, vmap(start, in_dims=(0, axes, 0))(kept_states, common | client_parts, info)


def move_clients(clients, device):
    """Move the samples to another device. Return the previous attributes."""
    attributes = {name: getattr(clients, name) for name in ("x", "y", "device", "_normalization")}
    clients.x, clients.y, clients.device = clients.x.to(device), clients.y.to(device), torch.device(device)
    clients._normalization = type(attributes["_normalization"])(clients.transforms, clients.dtype, device)
    return attributes


def replace_nans(tree):
    """Replace each NaN, which marks an unknown value, by a number that equals itself."""
    return pytree.tree_map(lambda value: value.nan_to_num(-1e30) if value.is_floating_point() else value, tree)


def count_pass_launches(trial, assert_same):
    """Require that all training passes are on the device and repeat bit for bit. Return their numbers of launches."""
    counts = {}
    with torch.no_grad():
        stack_run, state = start_stack(trial, [0, 1])
        for number, pass_ in enumerate(get_passes(trial.algorithm, "train", 1)):
            initial = state
            if isinstance(pass_, Train):
                client_pass = stack_run.make_client_pass(pass_, state)
                initial = vmap(client_pass.add_optimizer_state)(state)
                step, row = (
                    stack_run.make_stack_step(client_pass),
                    stack_run.make_batch_plan(pass_, [0]).get_step_batch(0),
                )
                assert row.live.tolist() == [True, True, False]
            elif isinstance(pass_, Measure):
                samples = trial.clients.train if pass_.on == "train" else trial.clients.validation_or_train
                step = stack_run.make_measure_function(pass_)
                row = stack_run.make_evaluation_plan(samples, [3, 4] if pass_.is_augmented else None)[1].get_step_batch(
                    0
                )
            if not isinstance(pass_, (Train, Measure)):
                state = stack_run.run_pass(pass_, state)
                continue
            graph = make_fx(step)(initial, row)
            assert_same(replace_nans(graph(initial, row)), replace_nans(step(initial, row)))
            previous_attributes = move_clients(trial.clients, "meta")
            meta_arguments = pytree.tree_map_only(torch.Tensor, lambda value: value.to("meta"), (initial, row))
            assert_operations_on_device(
                make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*meta_arguments)
            )
            vars(trial.clients).update(previous_attributes)
            counts[f"{type(pass_).__name__.lower()} {number}"] = count_launches(graph)
            state = stack_run.run_pass(pass_, state)
    return counts


@pytest.fixture
def trial(make_clients, make_trial):
    def make(algorithm, model="cnn", shape=(1, 4, 4), transforms=Transforms(), **settings):  # noqa: B008
        clients = make_clients(shape, sizes=SIZES, transforms=transforms)
        all_settings = {"participation": 1.0, "local_epochs": 1, "width": 3} | settings
        return make_trial(algorithm, model, clients, **all_settings)

    return make


def read_launch_table():
    with LAUNCHES.open() as file:
        table = list(csv.DictReader(file))
    return {
        name: {row["pass"]: int(row["launches"]) for row in table if row["algorithm"] == name}
        for name in {row["algorithm"] for row in table}
    }


@pytest.mark.parametrize("name", studies.mark_others_slow(NAMES))
def test_passes_stay_on_device_and_launch_at_most_listed_kernels(trial, assert_same, name):
    """`launches.csv` has one line per pass. More launches are slower on a GPU. Update the table if there are fewer."""
    counts, table = (
        count_pass_launches(trial(build_algorithm(name)).run(1), assert_same),
        read_launch_table().get(name, {}),
    )
    assert counts.keys() == table.keys()
    assert {name: count for name, count in counts.items() if count > table[name]} == {}


def test_launch_table_covers_all_algorithms():
    assert set(read_launch_table()) == set(NAMES)
    assert read_launch_table()["fedavg"]["train 0"] <= 90


def build_biasless_network():
    """Build a network whose head has no bias, because DW requires it."""
    return Network(nn.Sequential(nn.Linear(5, 6), nn.ReLU()), nn.Linear(6, CLASSES, bias=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name in DW if name == "fedavg" or {"step", "local_passes"} & vars(type(build_algorithm(name))).keys()],
)
def test_passes_with_dw_stay_on_device(trial, assert_same, name):
    count_pass_launches(trial(build_algorithm(name, dw={"mu": 0.7}), build_biasless_network, (5,)).run(1), assert_same)


def build_layered_network():
    """Build a network with layers that behave differently in training and evaluation."""
    body = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.5), nn.Flatten()),
        *(nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5)),
    )
    return Network(body, nn.Linear(6, CLASSES))


CHANGES = Transforms(mean=(0.1,), std=(2.0,), crop=1, flip=True, rotation=40)
SETTINGS = [
    {"momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam"},
    {"server": Server(optimizer="adam")},
    {"model": build_layered_network, "transforms": CHANGES},
    {"model": build_layered_network, "buffers": "keep"},
    {"model": build_layered_network, "buffers": "drop"},
    {"dtype": "float32"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings))
def test_layers_transforms_and_optimizers_stay_on_device(trial, assert_same, settings):
    count_pass_launches(trial(FedAvg(), **settings).run(1), assert_same)


class Tracer:
    """Records steps as lists of operations. A replay runs these operations without any code of the algorithm.

    With FEDPIPE_DEVICE=cuda, steps are recorded as CUDA graphs.
    """

    def __init__(self):
        self.captures, self.replays = 0, 0

    def __call__(self, advance, buffers):
        self.captures += 1
        if buffers[0].is_cuda:
            run_graph = graphs.make_cuda_graph_backend()(advance, buffers)
        else:
            graph = make_fx(advance)(*buffers)
            run_graph = lambda: overwrite_buffers(buffers, graph(*buffers))  # noqa: E731

        def replay():
            self.replays += 1
            run_graph()

        return replay


@pytest.fixture(autouse=True)
def _record_at_once(monkeypatch):
    """Record each step before it runs, because the trials have few steps."""
    monkeypatch.setattr(graphs, "MAX_PLAIN_STEPS", 0)


def record_steps(recording_trial, width=3):
    """Record the steps of a trial. Return the trial and the tracer."""
    tracer = Tracer()
    recording_trial.executor = StackExecutor(recording_trial.algorithm, recording_trial.clients, width, backend=tracer)
    return recording_trial, tracer


def list_results(outcomes):
    return [(outcome.upload, outcome.kept_state, outcome.scores) for outcome in outcomes]


RECORDED = [
    ("fedavg", {"momentum": 0.9, "clip_norm": 0.1}),
    ("fedavg", {"optimizer": "adam", "local_epochs": 2}),
    ("fedavg", {"model": build_layered_network, "transforms": CHANGES, "buffers": "keep"}),
    ("fedavg", {"precision": "bfloat16", "dtype": "float32"}),
    ("feduv", {"local_epochs": 2}),
    ("fednova", {"local_steps": 3, "local_epochs": None}),
]


@pytest.mark.parametrize("name", studies.mark_others_slow(NAMES))
def test_recorded_and_plain_steps_of_algorithm_have_equal_bits(trial, assert_same, capsys, name):
    check_recorded_steps(trial, assert_same, capsys, name)


@pytest.mark.parametrize(("name", "settings"), RECORDED, ids=lambda value: value if isinstance(value, str) else None)
def test_recorded_and_plain_steps_have_equal_bits(trial, assert_same, capsys, name, settings):
    check_recorded_steps(trial, assert_same, capsys, name, **settings)


def check_recorded_steps(trial, assert_same, capsys, name, **settings):
    """Require that recorded steps have the bits of plain ones, and are recorded once."""
    recording_trial, tracer = record_steps(trial(build_algorithm(name), **settings))
    plain, recorded_trial = (
        trial(build_algorithm(name), **settings).run(2, tests=("local",)),
        recording_trial.run(2, tests=("local",)),
    )
    assert_same(list_results(recorded_trial.outcomes), list_results(plain.outcomes))
    assert_same(recorded_trial.server, plain.server)
    step_count = tracer.captures
    assert 0 < step_count < tracer.replays
    assert_same(list_results(recording_trial.run(1).outcomes), list_results(plain.run(1).outcomes))
    assert tracer.captures == step_count, "a round of the same shape must record nothing"
    assert_same(list_results(recording_trial.train([0, 1])), list_results(plain.train([0, 1])))
    assert capsys.readouterr().err == ""


def test_step_is_recorded_before_its_fifth_use(trial, monkeypatch):
    """In each round, two steps train three clients and one step trains one client."""
    monkeypatch.setattr(graphs, "MAX_PLAIN_STEPS", 4)
    recording_trial, tracer = record_steps(trial(FedAvg()))
    captures = []
    for _ in range(5):
        recording_trial.run(1)
        captures.append(tracer.captures)
    assert captures == [0, 0, 1, 1, 2]


def test_recorded_steps_follow_learning_rate_schedule(trial, assert_same):
    """A recorded step contains its learning rate. If the rate does not change, it is not recorded again."""
    settings = {"schedule": {"name": "step", "step_size": 2, "gamma": 0.5}}
    recording_trial, tracer = record_steps(trial(FedAvg(), **settings))
    plain, captures = trial(FedAvg(), **settings), []
    for _ in range(4):
        assert_same(list_results(recording_trial.run(1).outcomes), list_results(plain.run(1).outcomes))
        captures.append(tracer.captures)
    assert captures == [2, 2, 4, 4]


def test_conditional_pass_in_recorded_training_equals_plain_training(trial, assert_same):
    """FedALA trains its weights until they converge. The CPU checks this condition before each epoch."""
    recording_trial, tracer = record_steps(trial(build_algorithm("fedala")).run(1))
    plain = trial(build_algorithm("fedala")).run(1)
    assert_same(list_results(recording_trial.train()), list_results(plain.train()))
    assert tracer.captures > 0, "FedALA's local training has no condition"


def test_failed_recording_falls_back_to_plain_steps_and_warns_once(trial, assert_same, capsys):
    """On a GPU, recording fails if the host must wait for a result."""

    def raise_capture_error(advance, buffers):
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    recording_trial = trial(FedAvg())
    recording_trial.executor = StackExecutor(
        recording_trial.algorithm, recording_trial.clients, 3, backend=raise_capture_error
    )
    assert_same(list_results(recording_trial.run(2).outcomes), list_results(trial(FedAvg()).run(2).outcomes))
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("execution.graphs: pass 0 of the phase 'train' can't be recorded")
    assert "(operation not permitted when stream is capturing)" in message
