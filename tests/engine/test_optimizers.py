import pytest
import torch

from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.optimizers import SGD, Adam, AdamW, build_optimizer
from fedpipe.settings.federation import Federation

STEPS = 5


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    return Tensors(
        {
            name: torch.randn(shape, dtype=torch.float64, generator=generator)
            for name, shape in (("w", (3, 2)), ("b", (2,)))
        }
    )


def compute_gradient(parameters, step):
    """Compute the gradient of a quartic function whose center moves. It is exactly 0 for one entry."""
    result = parameters.map(lambda value: value**3 - (step + 1) * torch.sin(value))
    result["b"][0] = 0
    return result


def run_optimizer(rule):
    parameters = make_parameters()
    slots = rule.init_slots(parameters)
    for step in range(STEPS):
        parameters, slots = rule.update_parameters(parameters, compute_gradient(parameters, step), slots)
    return parameters


def run_torch_optimizer(make):
    leaves = make_parameters().map(lambda value: value.requires_grad_())
    rule = make(list(leaves.values()))
    for step in range(STEPS):
        with torch.no_grad():
            result = compute_gradient(leaves, step)
        for name, leaf in leaves.items():
            leaf.grad = result[name]
        rule.step()
    return leaves.map(lambda value: value.detach())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("rule", "torch_rule", "settings"),
    [
        (SGD, torch.optim.SGD, {"momentum": 0.0}),
        (SGD, torch.optim.SGD, {"momentum": 0.9}),
        (Adam, torch.optim.Adam, {}),
        (AdamW, torch.optim.AdamW, {}),
    ],
)
def test_optimizer_matches_pytorch(assert_same, rule, torch_rule, settings, weight_decay):
    settings = settings | {"weight_decay": weight_decay}
    result = run_optimizer(rule(0.05, **settings))
    expected = run_torch_optimizer(lambda leaves: torch_rule(leaves, 0.05, **settings))
    assert_same(result, expected, tolerance=2e-15)
    assert not torch.equal(result["w"], make_parameters()["w"])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_decouples_weight_decay(weight_decay):
    adam, adamw = (run_optimizer(rule(0.05, weight_decay)) for rule in (Adam, AdamW))
    assert torch.equal(adamw["w"], adam["w"]) == (weight_decay == 0)


def test_adamw_decays_parameters_with_zero_gradient():
    expected = make_parameters()["b"][0] * (1 - 0.05 * 0.1) ** STEPS
    assert run_optimizer(AdamW(0.05, 0.1))["b"][0] == pytest.approx(expected.item(), rel=1e-14)


def test_adam_keeps_parameters_with_zero_gradient():
    assert torch.equal(run_optimizer(Adam(0.05))["b"][0], make_parameters()["b"][0])


@pytest.mark.parametrize("rule", [SGD(0.1, 0.9, 0.01), Adam(0.1, 0.01), AdamW(0.1, 0.01)])
def test_optimizer_update_does_not_modify_its_inputs(assert_same, rule):
    parameters, slots = make_parameters(), rule.init_slots(make_parameters())
    result = compute_gradient(parameters, 0)
    rule.update_parameters(parameters, result, slots)
    assert_same(parameters, make_parameters())
    assert_same(result, compute_gradient(make_parameters(), 0))
    assert_same(slots, rule.init_slots(make_parameters()))


@pytest.mark.parametrize(
    "rule", [SGD(0.1), SGD(0.1, 0.0, 0.01), SGD(0.1, 0.9), SGD(0.1, 0.9, 0.01), Adam(0.1, 0.01), AdamW(0.1, 0.01)]
)
def test_overwritable_gradient_gives_equal_bits_and_keeps_other_inputs(assert_same, rule):
    parameters, slots = make_parameters(), rule.init_slots(make_parameters())
    result, expected = (
        rule.update_parameters(parameters, compute_gradient(parameters, 0), slots, can_overwrite)
        for can_overwrite in (True, False)
    )
    assert_same(result, expected)
    assert_same(parameters, make_parameters())
    assert_same(slots, rule.init_slots(make_parameters()))
    next_parameters, _ = rule.update_parameters(
        result[0], compute_gradient(result[0], 1), result[1], can_overwrite_gradient=True
    )
    assert_same(result, expected)
    assert not torch.equal(next_parameters["w"], result[0]["w"])


@pytest.mark.parametrize("rule", [SGD(0.1, 0.9, 0.01), Adam(0.1, 0.01), AdamW(0.1, 0.01)])
def test_stacked_update_equals_update_of_each_client(assert_same, rule):
    parameters = make_parameters()
    stacked = parameters.map(lambda value: torch.stack([value, -2 * value]))
    slots = torch.func.vmap(rule.init_slots)(stacked)
    stepped, _ = torch.func.vmap(rule.update_parameters)(stacked, stacked, slots)
    for row, gradient in enumerate((parameters, -2 * parameters)):
        unstacked, _ = rule.update_parameters(gradient, gradient, rule.init_slots(gradient))
        assert_same(stepped.map(lambda value, row=row: value[row]), unstacked, tolerance=1e-15)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"learning_rate": 0.2, "momentum": 0.5, "weight_decay": 0.1}, SGD(0.2, 0.5, 0.1)),
        ({"optimizer": "adam", "learning_rate": 0.2, "weight_decay": 0.1}, Adam(0.2, 0.1)),
        ({"optimizer": "adamw", "learning_rate": 0.2, "weight_decay": 0.1}, AdamW(0.2, 0.1)),
    ],
)
def test_build_optimizer_follows_federation_settings(settings, rule):
    assert build_optimizer(Federation(**settings)) == rule
