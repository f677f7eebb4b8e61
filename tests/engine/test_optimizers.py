import pytest
import torch

from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.optimizers import SGD, Adam, build_optimizer
from fedpipe.settings.federation import Federation

STEPS = 5


def start():
    generator = torch.Generator().manual_seed(0)
    return Tensors(
        {
            name: torch.randn(shape, dtype=torch.float64, generator=generator)
            for name, shape in (("w", (3, 2)), ("b", (2,)))
        }
    )


def gradient(parameters, step):
    """Of a quartic bowl whose center moves; exactly 0 for one entry."""
    found = parameters.map(lambda value: value**3 - (step + 1) * torch.sin(value))
    found["b"][0] = 0
    return found


def ours(rule):
    parameters = start()
    slots = rule.init(parameters)
    for step in range(STEPS):
        parameters, slots = rule.update(parameters, gradient(parameters, step), slots)
    return parameters


def theirs(make):
    leaves = start().map(lambda value: value.requires_grad_())
    rule = make(list(leaves.values()))
    for step in range(STEPS):
        with torch.no_grad():
            found = gradient(leaves, step)
        for name, leaf in leaves.items():
            leaf.grad = found[name]
        rule.step()
    return leaves.map(lambda value: value.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_is_pytorchs(assert_same, momentum, weight_decay):
    found = ours(SGD(0.05, momentum, weight_decay))
    wanted = theirs(lambda leaves: torch.optim.SGD(leaves, 0.05, momentum, weight_decay=weight_decay))
    assert_same(found, wanted, within=2e-15)
    assert not torch.equal(found["w"], start()["w"])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_pytorchs(assert_same, weight_decay):
    found = ours(Adam(0.05, weight_decay))
    wanted = theirs(lambda leaves: torch.optim.Adam(leaves, 0.05, weight_decay=weight_decay))
    assert_same(found, wanted, within=2e-15)
    assert not torch.equal(found["w"], start()["w"])


def test_adam_leaves_alone_what_never_had_a_gradient():
    assert torch.equal(ours(Adam(0.05))["b"][0], start()["b"][0])


@pytest.mark.parametrize("rule", [SGD(0.1, 0.9, 0.01), Adam(0.1, 0.01)])
def test_an_update_changes_nothing_in_place(assert_same, rule):
    parameters, slots = start(), rule.init(start())
    found = gradient(parameters, 0)
    rule.update(parameters, found, slots)
    assert_same(parameters, start())
    assert_same(found, gradient(start(), 0))
    assert_same(slots, rule.init(start()))


@pytest.mark.parametrize("rule", [SGD(0.1), SGD(0.1, 0.0, 0.01), SGD(0.1, 0.9), SGD(0.1, 0.9, 0.01), Adam(0.1, 0.01)])
def test_a_donated_gradient_leads_to_the_same_bits_and_leaves_all_else_alone(assert_same, rule):
    parameters, slots = start(), rule.init(start())
    found, wanted = (rule.update(parameters, gradient(parameters, 0), slots, donated) for donated in (True, False))
    assert_same(found, wanted)
    assert_same(parameters, start())
    assert_same(slots, rule.init(start()))
    again, _ = rule.update(found[0], gradient(found[0], 1), found[1], can_overwrite_gradient=True)
    assert_same(found, wanted)
    assert not torch.equal(again["w"], found[0]["w"])


@pytest.mark.parametrize("rule", [SGD(0.1, 0.9, 0.01), Adam(0.1, 0.01)])
def test_clients_in_a_stack_move_as_they_do_alone(assert_same, rule):
    parameters = start()
    stacked = parameters.map(lambda value: torch.stack([value, -2 * value]))
    slots = torch.func.vmap(rule.init)(stacked)
    moved, _ = torch.func.vmap(rule.update)(stacked, stacked, slots)
    for row, gradient in enumerate((parameters, -2 * parameters)):
        alone, _ = rule.update(gradient, gradient, rule.init(gradient))
        assert_same(moved.map(lambda value, row=row: value[row]), alone, within=1e-15)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"learning_rate": 0.2, "momentum": 0.5, "weight_decay": 0.1}, SGD(0.2, 0.5, 0.1)),
        ({"optimizer": "adam", "learning_rate": 0.2, "weight_decay": 0.1}, Adam(0.2, 0.1)),
    ],
)
def test_the_federations_settings_choose_the_rule(settings, rule):
    assert build_optimizer(Federation(**settings)) == rule
