"""Hooks for random numbers, participants, local steps and several trained parts, with methods that need them."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedpipe.algorithms.base import Algorithm, Batch, ClientInfo, State, Train, Uploads, cross_entropy
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.errors import SettingsError
from fedpipe.core.noise import draw_normal, draw_uniform
from fedpipe.core.tensors import Tensors
from fedpipe.testing import check_algorithm
from fedpipe.testing.comparisons import ROUNDING, describe_trial_difference
from fedpipe.testing.trial import Trial, make_trial
from tests.algorithms.oracles import list_batches


@dataclass(frozen=True, kw_only=True)
class DPFedAvg(FedAvg):
    """Clients clip their updates, and the server adds Gaussian noise to the mean."""

    server_optimizer_part: ClassVar[str | None] = None

    clip: float = 1.0
    noise: float = 0.1

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        return {"model": download["model"], "anchor": self.net.parameters(download["model"])}

    def upload(self, client: State) -> State:
        update = (self.net.parameters(client["model"]) - client["anchor"]).clipped(self.clip)
        return {"model": client["model"] | (client["anchor"] + update)}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        mean = uploads.with_equal_weights().mean("model")
        parameters = self.net.parameters(mean)
        noise = draw_normal(self.server_noise_key, "privacy", parameters)
        return {"model": mean | (parameters + self.noise * self.clip / len(uploads) * noise)}


@dataclass(frozen=True, kw_only=True)
class QSGD(FedAvg):
    """Clients round each element of their update at random to one of some levels, without a bias."""

    levels: int = 4

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        return {"model": download["model"], "anchor": self.net.parameters(download["model"]), "key": info.noise_key}

    def upload(self, client: State) -> State:
        update = self.net.parameters(client["model"]) - client["anchor"]
        norm = update.norm().clamp(min=1e-12)
        level = update.map(lambda value: value.abs() / norm * self.levels)
        draws = draw_uniform(client["key"], "rounding", level)
        rounded = Tensors((name, (level[name] + draws[name]).floor()) for name in level)
        signs = update.map(torch.sign)
        quantized = Tensors((name, signs[name] * rounded[name] * norm / self.levels) for name in level)
        return {"model": client["model"] | (client["anchor"] + quantized)}


@dataclass(frozen=True, kw_only=True)
class RandomMask(FedAvg):
    """Clients upload a random fraction of each tensor's changes."""

    fraction: float = 0.5

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        return {"model": download["model"], "anchor": self.net.parameters(download["model"]), "key": info.noise_key}

    def upload(self, client: State) -> State:
        anchor, model = client["anchor"], self.net.parameters(client["model"])
        draws = draw_uniform(client["key"], "mask", anchor)
        chosen = Tensors((name, torch.where(draws[name] < self.fraction, model[name], anchor[name])) for name in anchor)
        return {"model": client["model"] | chosen}


@dataclass(frozen=True, kw_only=True)
class NoisySteps(FedAvg):
    """Each step's gradient has noise."""

    needs_step_noise: ClassVar[bool] = True
    unsupported_settings: ClassVar[tuple[str, ...]] = ("clip_norm",)

    scale: float = 0.1

    def local_passes(self) -> Sequence[Train]:
        return (Train(self.loss, step=self.step),)

    def step(self, client: State, batch: Batch, gradient: Any) -> State:
        g = gradient(client)
        return gradient.descend(client, g + self.scale * draw_normal(batch.noise_key, "gradient", g))


@dataclass(frozen=True, kw_only=True)
class APFL(FedAvg):
    """One step trains the global model and a personal model, which is mixed with it (fixed alpha)."""

    alpha: float = 0.5

    def init_client(self, server: State, initial_model: Any) -> State:
        return {"personal": self.net.parameters(initial_model(0))}

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        return {"model": download["model"], "personal": state["personal"]}

    def mix(self, client: State, model: Tensors) -> Tensors:
        personal = self.net.parameters(model) * (1 - self.alpha) + client["personal"] * self.alpha
        return model | personal

    def predict(self, client: State, x: Tensor) -> Tensor:
        return self.net(self.mix(client, client["model"]), x)

    def loss(self, client: State, batch: Batch) -> Tensor:
        global_loss = cross_entropy(self.net(client["model"], batch.x), batch)
        detached = client["model"].map(torch.detach)
        return global_loss + cross_entropy(self.net(self.mix(client, detached), batch.x), batch)

    def training_pass(self) -> Train:
        return Train(self.loss, group=("model", "personal"))

    def keep(self, client: State) -> State:
        return {"personal": client["personal"]}


@dataclass(frozen=True, kw_only=True)
class LargestFirst(FedAvg):
    """The largest clients participate, then those that participated least."""

    def init(self, initial_model: Any) -> State:
        return {"model": initial_model(0), "counts": torch.zeros(self.federation.clients, dtype=self.net.dtype)}

    def select_participants(self, server: State, sizes: Tensor) -> Sequence[int]:
        order = torch.argsort(server["counts"] * 1000 - sizes, stable=True)
        return order[: self.federation.participants].tolist()

    def aggregate(self, server: State, uploads: Uploads) -> State:
        return {
            "model": uploads.mean("model"),
            "counts": server["counts"] + uploads.mark(torch.zeros_like(server["counts"])),
        }


@dataclass(frozen=True, kw_only=True)
class GeometricSteps(FedAvg):
    """Each client stops after each step with probability 1/2."""

    def count_local_steps(self, size: int, round_number: int, noise_key: Tensor) -> int:
        draw = draw_uniform(noise_key, "steps", torch.zeros((), dtype=torch.float64))
        return 1 + int(torch.log2(1 / (1 - draw)))

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        return {"model": download["model"], "steps": torch.zeros_like(info.size)}

    def local_passes(self) -> Sequence[Train]:
        return (Train(self.loss, step=self.step),)

    def step(self, client: State, batch: Batch, gradient: Any) -> State:
        client = gradient.descend(client, gradient(client))
        return client | {"steps": client["steps"] + 1}

    def upload(self, client: State) -> State:
        return {"model": client["model"], "steps": client["steps"]}


@dataclass(frozen=True, kw_only=True)
class TwoStreams(GeometricSteps):
    """Two passes that continue the same stream of batches."""

    def local_passes(self) -> Sequence[Train]:
        return (Train(self.loss, step=self.step), Train(self.loss, step=self.step))


METHODS: list[Algorithm] = [DPFedAvg(), QSGD(), RandomMask(), NoisySteps(), APFL(), GeometricSteps(), TwoStreams()]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if isinstance(method, NoisySteps | APFL) else pytest.mark.slow)
        for method in METHODS
    ],
    ids=lambda method: type(method).__name__,
)
def test_methods_with_random_numbers_and_several_parts_pass_all_checks(method: Algorithm) -> None:
    assert check_algorithm(method) == []


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_stack_equals_loop_for_custom_methods(method: Algorithm) -> None:
    loop, stack = (make_trial(method, width=width, local_epochs=2).run(3) for width in (None, 3))
    assert describe_trial_difference(stack, loop, ROUNDING) is None


# -- draws -------------------------------------------------------------------------------------------------------------


def test_draws_depend_only_on_key_purpose_name_and_index() -> None:
    like = Tensors(a=torch.zeros(40, 50), b=torch.zeros(2000, dtype=torch.float64))
    key, other_key = torch.tensor(2**61 + 3), torch.tensor(2**61 + 4)
    for draw in (draw_uniform, draw_normal):
        values = draw(key, "noise", like)
        assert [value.dtype for value in values.values()] == [torch.float32, torch.float64]
        assert all(torch.equal(values[name], draw(key, "noise", like)[name]) for name in like)
        flat = [
            draws.flat().double().numpy() for draws in (values, draw(key, "mask", like), draw(other_key, "noise", like))
        ]
        flat += [values["a"].flatten().double().numpy(), values["b"].numpy()]
        for index, one in enumerate(flat):
            for two in flat[:index]:
                count = min(len(one), len(two))
                is_part = np.array_equal(one[:count], two[:count])
                assert is_part or abs(np.corrcoef(one[:count], two[:count])[0, 1]) < 5 / math.sqrt(count)
        assert not np.array_equal(flat[3], flat[4])


def test_normal_draws_have_standard_normal_moments() -> None:
    values = draw_normal(torch.tensor(7), "noise", torch.zeros(200_000, dtype=torch.float64))
    moments = [float((values**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)
    assert float((values.abs() < 1.959964).double().mean()) == pytest.approx(0.95, abs=0.002)


@pytest.mark.parametrize("draw", [draw_uniform, draw_normal])
def test_stacked_and_single_client_draws_have_equal_bits(draw: Any) -> None:
    keys, like = torch.tensor([5, -9, 2**62 - 1]), torch.zeros(3, 13, 7)
    stacked = vmap(lambda key, value: draw(key, "noise", value))(keys, like)
    assert torch.equal(stacked, torch.stack([draw(key, "noise", like[0]) for key in keys]))


def test_noise_keys_differ_between_seeds_rounds_clients_and_server() -> None:
    trial = make_trial(FedAvg())
    keys = [
        int(trial.clients.get_client_info(client, number, torch.zeros(())).noise_key)
        for number in (1, 2)
        for client in (0, 1)
    ]
    keys += [int(trial.algorithm.bind_round(number, seed).server_noise_key) for number in (0, 1, 2) for seed in (0, 1)]
    assert len(set(keys)) == len(keys)
    stacked = trial.clients.get_client_info([1, 0], 2, torch.zeros(2)).noise_key
    assert stacked.tolist() == [keys[3], keys[2]]


def test_server_noise_matches_draws_of_round_at_declared_scale() -> None:
    plain, noisy, repeated = (make_trial(DPFedAvg(noise=noise, clip=2.0)).run(1) for noise in (0.0, 0.5, 0.5))
    difference = (noisy.server["model"] - plain.server["model"]).flat()
    key = noisy.algorithm.bind_round(1, noisy.clients.seed).server_noise_key
    expected = 0.5 * 2.0 / len(noisy.outcomes) * draw_normal(key, "privacy", plain.server["model"]).flat()
    torch.testing.assert_close(difference, expected, rtol=0, atol=1e-14)
    assert torch.equal(repeated.server["model"].flat(), noisy.server["model"].flat())


def test_random_rounding_is_unbiased_with_two_levels() -> None:
    level = torch.full((200_000,), 1.3, dtype=torch.float64)
    rounded = (level + draw_uniform(torch.tensor(3), "rounding", level)).floor()
    assert set(rounded.tolist()) == {1.0, 2.0}
    assert float(rounded.mean()) == pytest.approx(1.3, abs=0.005)


def test_each_step_has_noise_key_except_in_evaluation_mode() -> None:
    keys: list[int | None] = []

    @dataclass(frozen=True, kw_only=True)
    class Recording(NoisySteps):
        def local_passes(self) -> Sequence[Train]:
            return (Train(self.loss, step=self.record), Train(self.loss, step=self.record, eval_mode=True))

        def record(self, client: State, batch: Batch, gradient: Any) -> State:
            keys.append(None if batch.noise_key is None else int(batch.noise_key))
            return gradient.descend(client, gradient(client))

    make_trial(Recording(), batch_size=4, local_epochs=1).run(2, [3])  # 12 samples: three steps per pass
    numbers = [key for key in keys if key is not None]
    assert len(set(numbers)) == len(numbers) == 6
    assert keys.count(None) == 6


# -- several parts -----------------------------------------------------------------------------------------------------


def test_apfl_step_trains_two_parts_like_pytorch_sgd() -> None:
    """APFL with full batches, compared with PyTorch's optimizer on two copies of the parameters."""
    trial = make_trial(APFL(alpha=0.3), batch_size="full", local_epochs=3, momentum=0.0, learning_rate=0.1)
    start, (x, y) = trial.start(3), trial.clients.gather_samples(trial.clients.train[3])
    w, v = ([value.clone().requires_grad_() for value in trial.net.parameters(start[part]).values()] for part in start)
    optimizer = torch.optim.SGD([*w, *v], lr=0.1)
    names = tuple(start["personal"])
    for _ in range(3):
        optimizer.zero_grad()
        model = Tensors(zip(names, w, strict=True))
        mixed = Tensors((name, 0.7 * a.detach() + 0.3 * b) for name, a, b in zip(names, w, v, strict=True))
        loss = sum(torch.nn.functional.cross_entropy(trial.net(weights, x), y) for weights in (model, mixed))
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    (outcome,) = trial.train([3])
    for values, tensors in ((w, outcome.upload["model"]), (v, outcome.kept_state["personal"])):
        torch.testing.assert_close(torch.cat([value.detach().flatten() for value in values]), tensors.flat())


def test_first_trained_part_receives_running_statistics() -> None:
    trial = make_trial(APFL(), "norm")
    initial = trial.initial_model(0)
    (outcome,) = trial.train([3])
    for name in trial.net.buffer_names:
        assert not torch.equal(outcome.upload["model"][name], initial[name])
    assert set(outcome.kept_state["personal"]) == set(trial.net.names)


@pytest.mark.parametrize("width", [None, 3])
def test_mixture_of_parts_does_not_change_running_statistics_of_first_part(width: int | None) -> None:
    mixed, alone = (make_trial(method, "norm", width=width) for method in (APFL(alpha=0.5), FedAvg()))
    for name in mixed.net.buffer_names:
        (outcome,), (alone_outcome,) = mixed.train([3]), alone.train([3])
        torch.testing.assert_close(outcome.upload["model"][name], alone_outcome.upload["model"][name])


@dataclass(frozen=True, kw_only=True)
class MutualLearning(FedAvg):
    """One loss trains the global model and a private model, which learn from each other (Shen et al., 2020)."""

    def init_client(self, server: State, initial_model: Any) -> State:
        return {"private": server["model"]}

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        return {"model": download["model"], "private": state["private"]}

    def training_pass(self) -> Train:
        return Train(self.loss, group=("private", "model"))

    def loss(self, client: State, batch: Batch) -> Tensor:
        logits, private_logits = (self.net(client[part], batch.x) for part in ("model", "private"))
        gap = (logits.softmax(1) - private_logits.softmax(1)).square().sum(1)
        return cross_entropy(logits, batch) + 2 * cross_entropy(private_logits, batch) + batch.mean(gap)

    def predict(self, client: State, x: Tensor) -> Tensor:
        return self.net(client["private"], x)

    def keep(self, client: State) -> State:
        return {"private": client["private"]}


@pytest.mark.parametrize("width", [None, 3])
def test_two_models_of_one_loss_receive_their_own_running_statistics(width: int | None) -> None:
    trial = make_trial(MutualLearning(), "norm", width=width, batch_size=4, local_epochs=2, momentum=0.0)
    models = {part: trial.net._build().double() for part in ("model", "private")}
    for model in models.values():
        model.load_state_dict(trial.initial_model(0), strict=False)
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(parameters, trial.algorithm.federation.learning_rate)
    for x, y in list_batches(trial, 3, 1):
        logits, private_logits = models["model"](x), models["private"](x)
        gap = (logits.softmax(1) - private_logits.softmax(1)).square().sum(1).mean()
        cross_entropies = [torch.nn.functional.cross_entropy(z, y) for z in (logits, private_logits)]
        optimizer.zero_grad()
        (cross_entropies[0] + 2 * cross_entropies[1] + gap).backward()
        optimizer.step()
    (outcome,) = trial.train([3])
    for part, state in (("model", outcome.upload), ("private", outcome.kept_state)):
        for name, value in models[part].state_dict().items():
            if name in state[part]:
                torch.testing.assert_close(state[part][name], value, rtol=1e-9, atol=1e-11)


@dataclass(frozen=True, kw_only=True)
class ControlledSteps(FedAvg):
    """Gradient steps with a control variate that is 0: the gradient at another model, minus itself."""

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        return {"model": download["model"], "anchor": download["model"]}

    def local_passes(self) -> Sequence[Train]:
        return (Train(self.loss, step=self.step),)

    def step(self, client: State, batch: Batch, gradient: Any) -> State:
        g, anchor = gradient(client), gradient(client | {"model": client["anchor"]})
        return gradient.descend(client, g + 0.0 * anchor)


@pytest.mark.parametrize("width", [None, 3])
def test_gradient_at_another_model_does_not_change_running_statistics(width: int | None) -> None:
    controlled, plain = (make_trial(method, "norm", width=width) for method in (ControlledSteps(), FedAvg()))
    (outcome,), (plain_outcome,) = controlled.train([3]), plain.train([3])
    torch.testing.assert_close(outcome.upload["model"], plain_outcome.upload["model"], rtol=1e-12, atol=1e-14)


def test_train_pass_selects_tensors_by_part_and_name() -> None:
    @dataclass(frozen=True, kw_only=True)
    class HeadOnly(APFL):
        def training_pass(self) -> Train:
            names = tuple(f"personal/{name}" for name in self.net.head_names)
            return Train(self.loss, group=("model", "personal"), only=names)

    trial = make_trial(HeadOnly())
    (outcome,) = trial.train([3])
    assert torch.equal(outcome.upload["model"].flat(), trial.server["model"].flat())
    changed = {
        name
        for name, value in outcome.kept_state["personal"].items()
        if not torch.equal(value, trial.initial_model(0)[name])
    }
    assert changed == set(trial.net.head_names)


# -- participants ------------------------------------------------------------------------------------------------------


def test_select_participants_hook_chooses_clients_of_each_round() -> None:
    trial = make_trial(LargestFirst(), participation=0.25)  # two of eight clients
    rounds = [trial.run().outcomes for _ in range(4)]
    by_size = np.argsort(-trial.clients.sizes, kind="stable").tolist()
    ids = [[outcome.client for outcome in outcomes] for outcomes in rounds]
    assert ids == [sorted(by_size[first : first + 2]) for first in (0, 2, 4, 6)]


@pytest.mark.parametrize(
    "selected", [[0], [0, 0], [0, 8], [-1, 0], [0, 1, 2], 3, [0.5, 1], [[0], [1]], ["0", "1"], "01", torch.ones(2, 2)]
)
def test_invalid_participant_selection_is_rejected(selected: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Selected(FedAvg):
        def select_participants(self, server: State, sizes: Tensor) -> Any:
            return selected

    with pytest.raises(SettingsError, match=r"\.select_participants .*Return 2 different numbers from 0 to 7\."):
        make_trial(Selected(), participation=0.25).run()


# -- local steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [None, 3])
def test_clients_train_counted_local_steps(width: int | None) -> None:
    trial = make_trial(GeometricSteps(), width=width, batch_size=4)
    counted = set()
    for number in (1, 2, 3):
        trial.run()
        for outcome in trial.outcomes:
            key = trial.clients.get_client_info(outcome.client, number, torch.zeros(())).noise_key
            steps = trial.algorithm.count_local_steps(0, number, key)
            assert int(outcome.upload["steps"]) == steps
            counted.add(steps)
    assert len(counted) > 2


def test_constant_step_count_equals_local_steps_setting() -> None:
    @dataclass(frozen=True, kw_only=True)
    class FiveSteps(FedAvg):
        def count_local_steps(self, size: int, round_number: int, noise_key: Tensor) -> int:
            return 5

    for width in (None, 3):
        counted = make_trial(FiveSteps(), width=width, batch_size=4).run(2)
        fixed = make_trial(FedAvg(), width=width, batch_size=4, local_epochs=None, local_steps=5).run(2)
        assert torch.equal(counted.server["model"].flat(), fixed.server["model"].flat())


@pytest.mark.parametrize("count", [0, -1, None, "many", 2.7, True, torch.tensor(2.0), torch.tensor([2, 3])])
def test_invalid_local_step_count_is_rejected(count: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Counted(FedAvg):
        def count_local_steps(self, size: int, round_number: int, noise_key: Tensor) -> Any:
            return count

    for width in (None, 3):
        with pytest.raises(SettingsError, match=r"\.count_local_steps .*at least 1\."):
            make_trial(Counted(), width=width).run()


def test_hook_error_contains_hook_name_and_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are in a user's module. The stack counts steps before it trains, so another call raises its error."""
    (tmp_path / "failing_hooks.py").write_text(
        "from fedpipe.algorithms.fedavg import FedAvg\n\n"
        "class Selection(FedAvg):\n"
        "    def select_participants(self, server, sizes):\n"
        "        return server['losses']\n\n"
        "class Counts(FedAvg):\n"
        "    def count_local_steps(self, size, round_number, noise_key):\n"
        "        return size / 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("failing_hooks")
    with pytest.raises(
        SettingsError, match=r"Selection\.select_participants \(failing_hooks\.py, line 5\): .*'losses'"
    ):
        make_trial(module.Selection()).run()
    for width in (None, 3):
        trial = make_trial(module.Counts(), width=width)
        with pytest.raises(SettingsError, match=r"Counts\.count_local_steps \(failing_hooks\.py, line 9\): .*by zero"):
            trial.run()


# -- values ------------------------------------------------------------------------------------------------------------


def test_sum_adds_tensors_and_scalar_has_network_dtype() -> None:
    parts = [Tensors(a=torch.full((2,), float(value))) for value in (1, 2, 3)]
    assert sum(parts)["a"].tolist() == [6, 6]  # type: ignore[index]
    trial: Trial = make_trial(FedAvg())
    assert trial.algorithm.scalar(1.5).dtype == torch.float64


@dataclass(frozen=True, kw_only=True)
class Annealed(FedAvg):
    """A proximal term that vanishes in the last round."""

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        return {"model": download["model"], "mu": 1 - info.round / self.federation.rounds}


def test_check_finds_hook_that_reads_number_of_rounds() -> None:
    (message,) = check_algorithm(Annealed())
    assert "Annealed.start (test_open_contract.py, line " in message
    assert "self.federation.rounds can't be read in a hook" in message
