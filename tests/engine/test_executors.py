"""Cases that the small clients of the contract test do not cover, such as data in several chunks and images."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from fedpipe.algorithms.fedala import FedALA
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedprox import FedProx
from fedpipe.algorithms.passes import Measure, Train, Update
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.executor import MEASURE_BATCH, ClientTask, get_passes
from fedpipe.engine.stack import stack as stack_module
from fedpipe.engine.stack import stack_run
from fedpipe.engine.torch_env import layout
from fedpipe.engine.torch_env.trees import count_bytes
from fedpipe.models.base import Network
from fedpipe.settings.transforms import Transforms
from tests.algorithms.oracles import compute_finetuned_loss

WIDTHS = [None, 3]
LARGE = (1, MEASURE_BATCH + 10, 9, 2 * MEASURE_BATCH, 4)


def list_uploads(outcomes):
    return [
        (outcome.upload, outcome.kept_state, {test: tuple(score) for test, score in outcome.scores.items()})
        for outcome in outcomes
    ]


@pytest.mark.parametrize("name", ["feddw", "feddual", "ifca"])
def test_stack_with_clients_larger_than_chunk_equals_loop(make_clients, make_trial, assert_same, name):
    settings = {"clients": make_clients(sizes=LARGE), "batch_size": 100, "participation": 1.0}
    loop, stack = (make_trial(name, width=width, **settings) for width in WIDTHS)
    expected, result = (list_uploads(trial.train(tests=("local", "global"))) for trial in (loop, stack))
    assert_same(result, expected, tolerance=1e-12)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["feddw", "feddual", "fedala"])
def test_client_bits_do_not_depend_on_sizes_of_other_clients(make_clients, make_trial, assert_same, name, width):
    settings = {"clients": make_clients(sizes=LARGE), "batch_size": 100, "participation": 1.0, "width": width}
    trial = make_trial(name, **settings).run()
    outcomes_together = list_uploads(trial.train([0, 1, 2], tests=("local",)))
    assert_same(list_uploads(trial.train([0, 2], tests=("local",))), [outcomes_together[0], outcomes_together[2]])
    assert_same(list_uploads(trial.train([1], tests=("local",))), [outcomes_together[1]])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["fedavg", "fedala", "cwfedavg", "ifca"])
def test_blocks_of_image_clients_have_equal_bits(make_trial, assert_same, name, width):
    trial = make_trial(name, "cnn", width=width, local_epochs=1).run()
    all_uploads = list_uploads(trial.train(range(5), tests=("local",)))
    block_outcomes = [*trial.train([0, 1], tests=("local",)), *trial.train([2, 3, 4], tests=("local",))]
    assert_same(list_uploads(block_outcomes), all_uploads)


@pytest.mark.parametrize("width", WIDTHS)
def test_outcomes_keep_order_of_client_ids(make_trial, width):
    assert [outcome.client for outcome in make_trial("fedavg", width=width).train([6, 0, 3, 1])] == [6, 0, 3, 1]


@pytest.mark.parametrize("width", WIDTHS)
def test_scores_match_predictions_of_trained_model(make_trial, width):
    trial = make_trial("fedavg", width=width, participation=1.0)
    for outcome in trial.train(tests=("local", "global")):
        for test, indices in (("local", trial.clients.test[outcome.client]), ("global", trial.clients.global_test)):
            x, y = trial.clients.gather_samples(indices)
            logits = trial.net(outcome.upload["model"], x)
            score = outcome.scores[test]
            assert score.total == len(indices)
            assert score.correct == int((logits.argmax(-1) == y).sum())
            assert score.loss == pytest.approx(float(cross_entropy(logits, y, reduction="sum")), rel=1e-12)


@pytest.mark.parametrize(
    ("device", "transforms", "samples"),
    [("cpu", Transforms(), 250), ("cuda", Transforms(), 8000), ("cuda", Transforms(flip=True, on_test=True), 250)],
)
def test_logits_batch_size_is_larger_on_gpu_without_random_transforms(make_clients, device, transforms, samples):
    clients = make_clients((1, 4, 4), transforms=transforms)
    clients.device = torch.device(device)
    assert stack_run.get_logits_batch_size(clients, 32) == samples


def test_batch_statistics_use_one_batch_size_on_every_device(make_trial, monkeypatch):
    trial = make_trial("fedavg", "norm", width=3, buffers="drop")
    calls, indices = record_logits_batches(trial, monkeypatch), np.concatenate(trial.clients.train * 40)
    monkeypatch.setattr(stack_module, "get_logits_batch_size", lambda clients, width: MEASURE_BATCH * width)
    trial.executor.compute_logits(trial.server["model"], indices, 1)
    assert len(calls) == -(-len(indices) // MEASURE_BATCH) > 1


def record_logits_batches(trial, monkeypatch):
    """Record the number of samples in each call that computes logits of the server's model."""
    calls, gather = [], trial.clients.gather_server_test_inputs
    monkeypatch.setattr(
        trial.clients, "gather_server_test_inputs", lambda rows, *where: calls.append(len(rows)) or gather(rows, *where)
    )
    return calls


def test_larger_logits_batches_give_equal_logits_in_fewer_calls(make_clients, make_trial, assert_same, monkeypatch):
    trial = make_trial("fedavg", clients=make_clients(sizes=LARGE), width=3)
    calls, indices = record_logits_batches(trial, monkeypatch), np.concatenate(trial.clients.train)
    small = trial.executor.compute_logits(trial.server["model"], indices, 1)
    assert len(calls) == 4
    monkeypatch.setattr(stack_module, "get_logits_batch_size", lambda clients, width: MEASURE_BATCH * width)
    assert_same(trial.executor.compute_logits(trial.server["model"], indices, 1), small, tolerance=1e-12)
    assert sum(calls[4:]) == len(indices)
    assert len(calls[4:]) == 2


@pytest.mark.parametrize("width", WIDTHS)
def test_evaluation_phases_have_no_upload_and_no_kept_state(make_trial, width):
    trial = make_trial("fedala", width=width).run()
    for phase in ("receive", "finetune"):
        assert all(
            outcome.upload == {} and outcome.kept_state == {} for outcome in trial.train([1, 2], ("local",), phase)
        )


@pytest.mark.parametrize("width", WIDTHS)
def test_finetuning_matches_manual_training_on_finetune_stream(make_trial, width):
    trial = make_trial("fedavg", width=width, learning_rate=0.1).run()
    (outcome,) = trial.train([5], ("local",), "finetune")
    expected = compute_finetuned_loss(trial, 5, ("body", "head"))
    assert outcome.scores["local"].loss == pytest.approx(expected, rel=1e-12)


class TwoPasses(FedAvg):
    """FedAvg with one pass for each of its two epochs."""

    def local_passes(self):
        return (Train(self.loss, epochs=1), Update(lambda client: client), Train(self.loss, epochs=1))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_second_pass_continues_stream_and_optimizer_of_first_pass(make_trial, assert_same, width, settings):
    """Two passes of one epoch equal one pass of two epochs."""
    one_pass, two_passes = (
        make_trial(algorithm, width=width, **settings).run(2) for algorithm in (FedAvg(), TwoPasses())
    )
    assert_same(two_passes.server, one_pass.server)


class ConditionalEpochs(FedAvg):
    """Trains one epoch per sample of the client, at most five epochs."""

    def start(self, state, download, info):
        return {"model": download["model"], "left": info.size}

    def local_passes(self):
        decrement = lambda client: client | {"left": client["left"] - 1}  # noqa: E731
        return (Train(self.loss, epochs=5, when=lambda client: client["left"] > 0, after=decrement),)

    def upload(self, client):
        return super().upload(client) | {"left": client["left"]}


@pytest.mark.parametrize("width", WIDTHS)
def test_pass_condition_ends_training_of_each_client_separately(make_trial, assert_same, width):
    trial = make_trial(ConditionalEpochs(), width=width, momentum=0.9)
    result = trial.train([0, 1, 6, 7])
    assert [float(outcome.upload["left"]) for outcome in result] == [0, 0, 0, 15]
    for outcome, epochs in zip(result, (1, 5, 3, 5), strict=True):
        plain = make_trial(FedAvg(), momentum=0.9, local_epochs=epochs).train([outcome.client])[0]
        assert_same(outcome.upload["model"], plain.upload["model"], tolerance=1e-13)


class HeadOnly(FedAvg):
    """FedAvg that trains only the head."""

    def local_passes(self):
        return (Train(self.loss, only=self.net.head_names),)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "weight_decay": 0.1},
        {"optimizer": "adam", "weight_decay": 0.1},
        {"optimizer": "adamw", "weight_decay": 0.1},
    ],
)
def test_pass_changes_only_its_trained_parameters(make_trial, assert_same, width, settings):
    trial = make_trial(HeadOnly(), width=width, **settings)
    for outcome in trial.train():
        body, head = trial.net.body_names, trial.net.head_names
        assert_same(outcome.upload["model"].only(body), trial.server["model"].only(body))
        assert all(not torch.equal(outcome.upload["model"][name], trial.server["model"][name]) for name in head)


@pytest.mark.parametrize("label", ["fedavg", "fedala", "moon"])
def test_stack_with_decoupled_weight_decay_equals_loop(make_trial, assert_same, label):
    settings = {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.5}
    loop, stack = (make_trial(label, width=width, **settings).run(2) for width in WIDTHS)
    assert_same(stack.server, loop.server, tolerance=1e-12)
    adam = make_trial(label, **settings | {"optimizer": "adam"}).run(2)
    assert not torch.equal(loop.server["model"]["head.weight"], adam.server["model"]["head.weight"])


def test_get_passes_lists_passes_of_phase():
    algorithm = TwoPasses()
    assert [type(pass_) for pass_ in get_passes(algorithm, "train", 3)] == [Train, Update, Train]
    assert get_passes(algorithm, "receive", 3) == []
    (finetune,) = get_passes(algorithm, "finetune", 3)
    assert (finetune.epochs, finetune.stream) == (3, "finetune")


def test_get_passes_starts_with_personal_passes(make_trial):
    algorithm = make_trial("ifca").algorithm
    kinds = {
        phase: [type(pass_) for pass_ in get_passes(algorithm, phase, 1)] for phase in ("train", "receive", "finetune")
    }
    assert kinds == {"train": [Measure, Train], "receive": [Measure], "finetune": [Measure, Train]}


def test_count_bytes_uses_size_of_dtype():
    state = {"model": Tensors(w=torch.zeros(3, 2), b=torch.zeros(2, dtype=torch.float64)), "index": torch.tensor(1)}
    assert count_bytes(state) == 6 * 4 + 2 * 8 + 8


class BorrowedGradient(torch.autograd.Function):
    """An inner product with a tensor. The gradient is this tensor itself, not a copy."""

    @staticmethod
    def forward(ctx, x, direction):
        ctx.save_for_backward(direction)
        return (x * direction).sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None


class SharedGradients(FedAvg):
    """Gradients are a tensor that two parameters share, one number for all entries, or a part of the client's state."""

    def start(self, state, download, info):
        return {"model": download["model"], "direction": torch.ones_like(download["model"]["head.bias"])}

    def loss(self, client, batch):
        first, second = (client["model"][name] for name in ("body.1.bias", "body.1.bias"))
        added = client["model"]["body.1.weight"].sum() + (first + second).sum()
        return added + BorrowedGradient.apply(client["model"]["head.bias"], client["direction"])

    def upload(self, client):
        return super().upload(client) | {"direction": client["direction"]}


def test_step_writes_only_into_its_own_memory(make_trial):
    trial = make_trial(SharedGradients(), local_epochs=2)
    initial_model, rate = trial.server["model"], trial.algorithm.federation.learning_rate
    download = initial_model.map(lambda value: value.clone())
    for outcome in trial.train():
        steps = 2 * -(-int(trial.clients.sizes[outcome.client]) // trial.algorithm.federation.batch_size)
        multiples = {"body.1.weight": 1, "body.1.bias": 2, "head.bias": 1}
        for name, value in outcome.upload["model"].items():
            expected = download[name] - steps * rate * multiples.get(name, 0)
            assert torch.allclose(value, expected, rtol=0, atol=1e-12), name
        assert outcome.upload["direction"].tolist() == [1] * len(outcome.upload["direction"])
    assert all(torch.equal(value, download[name]) for name, value in initial_model.items())


class DetachedLoss(FedAvg):
    def loss(self, client, batch):
        return self.risk(client, batch).detach()


@pytest.mark.parametrize("width", WIDTHS)
def test_loss_without_trained_parameters_is_rejected(make_trial, width):
    with pytest.raises(
        SettingsError, match=r"DetachedLoss\.loss \(test_executors.py, line \d+\) .* does not depend on .*'model'"
    ):
        make_trial(DetachedLoss(), width=width).train()


class OutOfMemory(FedAvg):
    """Raises PyTorch's error for a full GPU."""

    def loss(self, client, batch):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
        )


def test_out_of_memory_error_suggests_smaller_stack(make_trial):
    with pytest.raises(SettingsError, match=r"^execution\.stack: 6 .*memory .*\(CUDA out of memory\).* 3\."):
        make_trial(OutOfMemory(), width=6).train()
    with pytest.raises(torch.OutOfMemoryError):
        make_trial(OutOfMemory()).train()


class CountedMixing(FedALA):
    """FedALA that counts its mixing steps."""

    steps: ClassVar[list[int]] = []

    def mix_models(self, client, batch, gradient):
        self.steps.append(1)
        return super().mix_models(client, batch, gradient)


@pytest.mark.parametrize("change", [None, "server", "kept"])
def test_personal_model_is_computed_once_for_evaluation_and_training(make_trial, assert_same, change):
    """It is computed again if its inputs have changed."""
    trial = make_trial(CountedMixing(passes=3), participation=1.0).run(2)
    number, ids, all_clients = 3, [1, 5], range(8)
    expected = list_uploads(trial.train(ids))

    def run(phase, clients, tests=(), ids_to_cache=()):
        CountedMixing.steps.clear()
        state = trial.client_states.__getitem__
        task = ClientTask(phase, number, clients, state, trial.send, tests, ids_to_cache=ids_to_cache)
        outcomes = list(trial.executor.run(task))
        return list_uploads(outcomes), len(CountedMixing.steps)

    outcomes_by_phase = {phase: run(phase, all_clients, ("local",)) for phase in ("receive", "finetune")}
    for index, phase in enumerate(("receive", "finetune", "receive")):
        (scores, all_steps), (result, steps) = outcomes_by_phase[phase], run(phase, all_clients, ("local",), ids)
        assert_same(result, scores)
        assert 0 < steps < all_steps if index else steps == all_steps > 0
    if change == "server":
        trial.server = trial.server | {"model": trial.server["model"] * 1.01}
    if change == "kept":
        trial.client_states = {
            client: state | {"local": state["local"] * 1.01} for client, state in trial.client_states.items()
        }
    result, steps = run("train", ids)
    assert (steps > 0) == (change is not None)
    if change is None:
        assert_same(result, expected)
    repeated, steps = run("train", ids)
    assert steps > 0, "the cached state is used once"
    assert_same(repeated, result)


def test_large_kernels_and_their_inputs_are_not_channels_last(make_trial, assert_same, monkeypatch):
    """The layout changes only the speed. Results are equal up to rounding."""
    layouts, forward = dict[int, tuple[bool, bool]](), torch.nn.Conv2d.forward

    def record_layout(layer, x):
        layouts[layer.weight.numel()] = (layer.weight.is_contiguous(), x.is_contiguous())
        return forward(layer, x)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", record_layout)
    expected = list_uploads(make_trial("fedavg", "cnn").train(tests=("local",)))
    small, large = sorted(layouts)
    assert layouts[large] == (False, False)
    monkeypatch.setattr("fedpipe.models.layers.MAX_CHANNELS_LAST_WEIGHTS", small)
    result = list_uploads(make_trial("fedavg", "cnn").train(tests=("local",)))
    assert layouts[large] == (True, True)
    assert_same(result, expected, tolerance=1e-12)


@pytest.mark.parametrize(
    ("shape", "by_columns"),
    [
        ((512, 1024), True),
        ((100, 2048), True),
        ((512, 1600), False),  # no whole pages
        ((10, 1024), False),  # narrow
        ((1024, 2048), False),  # columns collide too
        ((30_522, 1024), False),  # a table of embeddings
    ],
)
def test_optimize_layout_stores_cache_colliding_weights_by_columns(shape, by_columns):
    weight = torch.arange(shape[0] * shape[1]).reshape(shape)
    optimized_weight = layout.optimize_layout({"model": Tensors({"weight": weight})})["model"]["weight"]
    assert optimized_weight.stride() == ((1, shape[0]) if by_columns else (shape[1], 1))
    assert torch.equal(optimized_weight, weight)


@pytest.mark.parametrize("name", registry.list_components(component.ALGORITHM))
def test_weight_layout_does_not_change_results(make_trial, assert_same, monkeypatch, name):
    layouts, forward = set[bool](), torch.nn.Linear.forward

    def record_layout(layer, x):
        layouts.add(layer.weight.is_contiguous())
        return forward(layer, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", record_layout)
    expected = list_uploads(make_trial(name).run().train(tests=("local",)))
    assert layouts == {True}
    monkeypatch.setattr(layout, "PAGE", 6)
    monkeypatch.setattr(layout, "NARROW", 1)
    result = list_uploads(make_trial(name).run().train(tests=("local",)))
    assert layouts == {True, False} or name == "fednh", "FedNH computes its head from prototypes at each step"
    assert_same(result, expected, tolerance=1e-12)


class SharedLayer(nn.Module):
    """A layer with two parameters whose gradients are views of one tensor in PyTorch."""

    def __init__(self):
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.zeros(5, 6) + share) for share in (0.1, 0.2))

    def forward(self, x):
        return linear(x, self.w.T + self.v.T).relu()


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (FedAvg(), {}),
        (FedAvg(), {"clip_norm": 0.1}),
        (FedAvg(), {"optimizer": "adam"}),
        (FedProx(mu=0.5), {}),
        (FedProx(mu=0.5), {"momentum": 0.9}),
    ],
)
def test_shared_gradient_is_applied_to_each_parameter(make_trial, assert_same, algorithm, settings):
    """A step may write into gradients. Equal steps do not change the difference of the two parameters."""
    loop, stack = (
        make_trial(algorithm, lambda: Network(SharedLayer(), nn.Linear(6, 4)), width=width, **settings)
        for width in WIDTHS
    )
    initial_gap = loop.server["model"]["body.v"] - loop.server["model"]["body.w"]
    assert_same(loop.run(2).server, stack.run(2).server, tolerance=1e-12)
    if algorithm == FedAvg() and "optimizer" not in settings:
        final_gap = loop.server["model"]["body.v"] - loop.server["model"]["body.w"]
        assert_same(final_gap, initial_gap, tolerance=1e-14)
