"""The learning rate by round, local steps instead of epochs, and clipped gradients, compared with PyTorch's."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.feddual import FedDUAL
from fedpipe.algorithms.fedpvr import FedPVR
from fedpipe.algorithms.passes import Train
from fedpipe.algorithms.scaffold import Scaffold
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.settings.federation import Federation, Schedule
from fedpipe.settings.transforms import Transforms
from fedpipe.testing.comparisons import ROUNDING
from tests import small_studies as studies
from tests.algorithms.oracles import copy_parameters, list_batches, load_mlp, run_fedavg

WIDTHS: list[int | None] = [None, 3]
NAMES = registry.list_components(component.ALGORITHM)
COSINE = {"name": "cosine", "period": 3, "minimum": 0.01, "warmup": 1}


def pair_with_widths(names: Iterable[str]) -> list[Any]:
    """Combine each name with one of the widths, in turn. Representative methods have both widths."""
    others = itertools.cycle(WIDTHS)
    return [
        pytest.param(name, width, marks=[] if name in studies.REPRESENTATIVE else pytest.mark.slow)
        for name in names
        for width in (WIDTHS if name in studies.REPRESENTATIVE else [next(others)])
    ]


SCHEDULES = {
    "step": ({"name": "step", "step_size": 4}, lambda rule: lr_scheduler.StepLR(rule, 4)),
    "exponential": ({"name": "exponential", "gamma": 0.9}, lambda rule: lr_scheduler.ExponentialLR(rule, 0.9)),
    "cosine": (
        {"name": "cosine", "period": 10, "minimum": 0.01},
        lambda rule: lr_scheduler.CosineAnnealingLR(rule, 10, 0.01),
    ),
    "constant": ({"name": "constant"}, lambda rule: lr_scheduler.ConstantLR(rule, 1.0)),
}


def build_algorithm(name):
    parameters = {"feddual": {"epsilon": 0.1}, "pfedme": {"attraction": 5.0}}.get(name, {})
    return registry.build_component(component.ALGORITHM, name, parameters)


def get_states(trial):
    return trial.server, trial.client_states


# -- the learning rate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_of_each_round_matches_pytorch_schedulers(name, warmup):
    settings, make = SCHEDULES[name]
    rule = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = make(rule)
    if warmup:
        warmup_schedule = lr_scheduler.LambdaLR(rule, lambda step: min(step + 1, warmup) / warmup)
        if warmup > 1:
            warmup_schedule = lr_scheduler.LinearLR(rule, 1 / warmup, 1.0, warmup - 1)
        scheduler = lr_scheduler.SequentialLR(rule, [warmup_schedule, make(rule)], [warmup])
    expected = []
    for _ in range(25):
        expected.append(rule.param_groups[0]["lr"])
        rule.step()
        scheduler.step()
    federation = Federation(learning_rate=0.3, schedule=settings | {"warmup": warmup})
    assert [federation.with_round_learning_rate(number + 1).learning_rate for number in range(25)] == pytest.approx(
        expected, rel=1e-12
    )
    assert len(set(expected)) > 1 or (name == "constant" and warmup < 2)


@pytest.mark.parametrize(("name", "width"), pair_with_widths(NAMES))
def test_scheduled_round_equals_round_with_constant_rate(make_trial, assert_same, name, width):
    """Training, evaluation and finetuning are equal bit for bit for every algorithm."""
    scheduled = make_trial(build_algorithm(name), width=width, learning_rate=0.1, schedule=COSINE)
    for number in (1, 2):
        rate = Schedule(**COSINE).compute_learning_rate(0.1, number)
        plain = make_trial(build_algorithm(name), width=width, learning_rate=rate)
        plain.server, plain.client_states, plain.rounds = scheduled.server, dict(scheduled.client_states), number - 1
        for phase in ("receive", "finetune"):
            result, expected = (trial.train([1, 4], ("local",), phase) for trial in (scheduled, plain))
            assert_same(
                [tuple(outcome.scores["local"]) for outcome in result],
                [tuple(outcome.scores["local"]) for outcome in expected],
            )
        assert_same(get_states(scheduled.run()), get_states(plain.run()))


def test_constant_schedule_equals_no_schedule(make_trial, assert_same):
    flat = make_trial("fedavg", schedule={"name": "constant", "warmup": 0})
    assert flat.algorithm.bind_round(7, 0).federation is flat.algorithm.federation
    assert_same(get_states(flat.run(2)), get_states(make_trial("fedavg").run(2)))


# -- PyTorch's own loop ------------------------------------------------------------------------------------------------


def train_by_hand(trial, rounds, settings, rate, clip, steps):
    """Train FedAvg with PyTorch's optimizer, scheduler and clipping."""

    def train_client(client, number, model):
        module = load_mlp(model)
        rule = torch.optim.SGD(module.parameters(), rate(number), **settings)
        for x, y in itertools.islice(list_batches(trial, client, number, epochs=steps), steps):
            rule.zero_grad()
            cross_entropy(module(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            rule.step()
        return copy_parameters(module)

    return run_fedavg(trial, rounds, train_client)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_fedavg_with_local_steps_matches_plain_pytorch(make_trial, assert_same, width, clip):
    """The steps end within an epoch. The test uses a scheduler, momentum, weight decay and clipped gradients."""
    settings = {"momentum": 0.9, "weight_decay": 0.05}
    schedule = {"name": "exponential", "gamma": 0.7}
    trial = make_trial(
        "fedavg",
        width=width,
        local_epochs=None,
        local_steps=7,
        learning_rate=0.2,
        schedule=schedule,
        clip_norm=clip,
        **settings,
    )

    def rate(number):
        rule = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.2)
        scheduler = lr_scheduler.ExponentialLR(rule, 0.7)
        for _ in range(number - 1):
            rule.step()
            scheduler.step()
        return scheduler.get_last_lr()[0]

    expected = train_by_hand(trial, 3, settings, rate, clip, 7)
    assert_same(trial.run(3).server["model"], expected, tolerance=1e-12)


# -- local steps -------------------------------------------------------------------------------------------------------

BY_STEPS = [name for name in NAMES if not build_algorithm(name).local_steps_conflict]


def test_only_feddual_and_fedrep_conflict_with_local_steps():
    assert sorted(set(NAMES) - set(BY_STEPS)) == ["feddual", "fedrep"]
    assert FedDUAL(mode="code").local_steps_conflict is None
    assert FedDUAL(adaptive_loss=False).local_steps_conflict is None


@pytest.mark.parametrize(("name", "width"), pair_with_widths(BY_STEPS))
def test_local_steps_of_complete_epochs_equal_local_epochs(make_clients, make_trial, assert_same, name, width):
    """If all clients have one size, two epochs of two batches equal four steps bit for bit."""
    clients = make_clients(sizes=(8,) * 8)
    epochs = make_trial(build_algorithm(name), clients=clients, width=width, local_epochs=2, momentum=0.0).run(2)
    steps = make_trial(build_algorithm(name), clients=clients, width=width, local_epochs=None, local_steps=4).run(2)
    assert_same(get_states(steps), get_states(epochs))


@pytest.mark.parametrize("name", studies.mark_others_slow(BY_STEPS))
def test_stack_with_local_steps_equals_loop(make_trial, assert_same, name):
    """Clients with 1 to 20 samples end within different epochs. Rates decrease, and gradients are clipped."""
    settings = {"local_epochs": None, "local_steps": 5, "schedule": COSINE}
    settings |= {"clip_norm": 0.3} if "clip_norm" not in build_algorithm(name).unsupported_settings else {}
    loop, *stacks = (make_trial(build_algorithm(name), width=width, **settings).run(3) for width in (None, 3, 7))
    for stack in stacks:
        assert_same(get_states(stack), get_states(loop), tolerance=ROUNDING)


@pytest.mark.parametrize("width", WIDTHS)
def test_local_steps_do_not_depend_on_other_clients_in_stack(make_trial, assert_same, width):
    trial = make_trial("fedavg", width=width, local_epochs=None, local_steps=5, momentum=0.9).run()
    expected = [outcome.upload for outcome in trial.train([0, 2, 5])]
    assert_same([trial.train([client])[0].upload for client in (0, 2, 5)], expected)


def test_stack_with_augmentation_and_local_steps_equals_loop(make_clients, make_trial, assert_same):
    clients = make_clients((1, 4, 4), transforms=Transforms(flip=True, crop=1))
    settings = {"local_epochs": None, "local_steps": 6}
    loop, stack = (make_trial("fedavg", "cnn", clients, width=width, **settings).run(2) for width in WIDTHS)
    assert_same(get_states(stack), get_states(loop), tolerance=1e-12)
    plain = make_trial("fedavg", "cnn", make_clients((1, 4, 4)), **settings).run(2)
    assert not torch.equal(plain.server["model"]["head.weight"], loop.server["model"]["head.weight"])


class TwoPasses(FedAvg):
    """FedAvg with two passes of one stream."""

    def local_passes(self):
        return (Train(self.loss), Train(self.loss))


def test_stack_with_two_passes_of_local_steps_equals_loop(make_trial, assert_same):
    settings = {"local_epochs": None, "local_steps": 3}
    loop, stack = (make_trial(TwoPasses(), width=width, **settings).run(2) for width in WIDTHS)
    assert_same(get_states(stack), get_states(loop), tolerance=1e-12)


class ByEpochs(FedAvg):
    """FedAvg with a hook after each epoch."""

    def local_passes(self):
        return (Train(self.loss, after=lambda client: client),)


@pytest.mark.parametrize("width", WIDTHS)
def test_local_steps_reject_pass_with_epoch_hook(make_trial, width):
    with pytest.raises(SettingsError, match=r"^federation\.local_steps: 3 .*ByEpochs\.local_passes .*`after`"):
        make_trial(ByEpochs(), width=width, local_epochs=None, local_steps=3).run()


def test_count_epochs_converts_local_steps_to_epochs():
    by_steps = Federation(local_steps=6, batch_size=4)
    assert [by_steps.count_epochs(samples) for samples in (1, 4, 5, 24)] == [6, 6, 3, 1]
    assert Federation(local_steps=6, batch_size="full").count_epochs(100) == 6
    assert Federation(local_epochs=3).count_epochs(100) == 3


# -- clipping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width"),
    pair_with_widths(name for name in NAMES if "clip_norm" not in build_algorithm(name).unsupported_settings),
)
def test_clip_norm_larger_than_gradients_changes_no_bit(make_trial, assert_same, name, width):
    clipped, plain = (make_trial(build_algorithm(name), width=width, clip_norm=norm).run(2) for norm in (1e9, None))
    assert_same(get_states(clipped), get_states(plain))


def train_clipped_by_hand(trial, client, corrected, client_control, server_control, norm):
    """Run SCAFFOLD's local steps with PyTorch's gradients and PyTorch's clipping of the corrected gradients."""
    module, norms = load_mlp(trial.server["model"]), []
    parameters, rule = dict(module.named_parameters()), torch.optim.SGD(module.parameters(), 0.1, weight_decay=0.05)
    for x, y in list_batches(trial, client, trial.rounds + 1):
        rule.zero_grad()
        cross_entropy(module(x), y).backward()
        for name in corrected:
            parameters[name].grad += server_control[name] - client_control[name]
        norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), norm)))
        rule.step()
    assert max(norms) > norm > min(norms), "only some gradients are clipped"
    return copy_parameters(module)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("algorithm", [Scaffold(), FedPVR(layers=1)], ids=["scaffold", "fedpvr"])
def test_clip_norm_applies_to_corrected_gradient_of_scaffold(make_trial, assert_same, algorithm, width):
    norm = 0.9
    settings = {"local_epochs": 1, "learning_rate": 0.1, "weight_decay": 0.05, "clip_norm": norm}
    trial = make_trial(algorithm, width=width, participation=1.0, **settings).run(2)
    corrected = trial.algorithm.corrected_parameter_names
    client_control, server_control = trial.client_states[7]["control"], trial.server["control"]
    assert float(client_control.norm()) > 0
    expected = train_clipped_by_hand(trial, 7, corrected, client_control, server_control, norm)
    (outcome,) = trial.train([7])
    assert_same(outcome.upload["model"], expected, tolerance=1e-12)
    steps = math.ceil(len(trial.clients.train[7]) / 4)
    change = (trial.server["model"].only(corrected) - outcome.upload["model"].only(corrected)) / (
        0.1 * steps
    ) - server_control
    assert_same(outcome.upload["change"], change, tolerance=1e-12)
