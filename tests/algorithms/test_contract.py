"""What holds for every algorithm: the universal oracles, and that no executor, block or order changes a result.

An algorithm that is added is tested as soon as its file is there. Where it rightly breaks an oracle, it is named with
the reason in `EXCEPTIONS`; where its defaults make a test blunt, other parameters stand in `PARAMETERS`.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from fedpipe import registry
from fedpipe.algorithms.base import Uploads
from fedpipe.models.mlp import MLP
from fedpipe.tensors import Tensors

ALGORITHMS = registry.names(registry.ALGORITHM)
OPTIMISERS = {
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.01},
}

#: Parameters other than the defaults, where those would leave part of an algorithm idle or amplify rounding.
PARAMETERS = {
    "feddual": {"epsilon": 0.1},  # at 1e-5 the kernel multiplies differences of distances by 1e5
    "perfedavg": {"variant": "hessian-free", "alpha": 0.1},
    "cfl": {"after": 0, "eps1": 1.0, "eps2": 0.01},  # splits as soon as it can
}

#: Oracle to algorithm to the reason why the oracle does not hold for it.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "U1": {
        "local": "nothing is uploaded",
        "fedproto": "prototypes are uploaded, no models: see test_fedproto.py",
        "fedamp": "a client's model is its own, only the mixture is equal: see test_fedamp.py",
        "fedfomo": "a client's model is its own until it has mixed it: see test_fedfomo.py",
        "ifca": "equal models of one cluster leave the other clusters' models as they are: see test_ifca.py",
        "feddyn": "the server goes on along the mean update: see test_feddyn.py",
    },
    "U4": {"fednh": "prototypes follow the class means, whatever the learning rate: see test_fednh.py"},
}

#: U2 holds where these parameters switch off what an algorithm adds to training (spec, section 32 A3).
CENTRALISED: dict[str, dict[str, object]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.0},
    "scaffold": {},
    "feddw": {"mu": 0.0},
    "feddual": {"adaptive_loss": False},
    "pfps_lwc": {"penalty": 0.0, "recall_epochs": 0},
    "cwfedavg": {"wdr": 0.0},
    "ifca": {"clusters": 1},
    "fedala": {},
    "local": {},
    "fedamp": {"attraction": 0.0},
    "fedfomo": {},
    "cfl": {},
    "fedper": {},
    "fednova": {},
    "fedbn": {},
    "fedpvr": {},
    "perfedavg": {"variant": "first-order", "alpha": 0.0, "same_batch": True},
    "feddistill_plus": {"mu": 0.0},
    "moon": {"mu": 0.0},
    "feduv": {"variance": 0.0, "uniformity": 0.0},
}

#: Whose local steps have no momentum.
PLAIN = {"scaffold", "fedpvr", "perfedavg"}

#: Parts of the server's state that are named like a model but are none.
NO_MODELS = {"feddual": {"effective"}, "scaffold": {"control"}, "fedpvr": {"control"}, "feddyn": {"h"}}

#: Scalars down and up (spec, section 29) of a model with `all`, `body` and `last` parameters, C classes, d features.
TRAFFIC = {
    "fedavg": ({}, lambda n: (n["all"], n["all"])),
    "fedprox": ({}, lambda n: (n["all"], n["all"])),
    "scaffold": ({}, lambda n: (2 * n["all"], 2 * n["all"])),
    "fedpvr": ({}, lambda n: (n["all"] + n["last"], n["all"] + n["last"])),
    "fednova": ({}, lambda n: (n["all"], n["all"] + 1)),
    "feddyn": ({}, lambda n: (n["all"], n["all"])),
    "fedbn": ({}, lambda n: (n["all"], n["all"])),
    "perfedavg": ({}, lambda n: (n["all"], n["all"])),
    "feddistill_plus": ({}, lambda n: (n["all"] + n["C"] ** 2, n["all"] + n["C"] ** 2 + n["C"])),
    "feddistill_plus-paper": ({"mode": "paper"}, lambda n: (n["all"] + n["C"] ** 2, n["all"] + n["C"] ** 2 + n["C"])),
    "feddw": ({}, lambda n: (n["all"] + n["C"] ** 2, n["all"] + n["C"] ** 2 + n["C"])),
    "feddual": ({}, lambda n: (n["all"], n["all"])),
    "feddual-gradient": ({"vector": "gradient"}, lambda n: (n["all"], n["all"] + n["last"])),
    "pfps_lwc": ({}, lambda n: (n["body"], n["body"])),
    "cwfedavg": ({}, lambda n: (n["all"], n["all"])),
    "cwfedavg-empirical": ({"distribution": "empirical"}, lambda n: (n["all"], n["all"] + n["C"])),
    "ifca": ({"clusters": 3}, lambda n: (3 * n["all"], n["all"] + 1)),
    "fedala": ({}, lambda n: (n["all"], n["all"])),
    "pfedme": ({}, lambda n: (n["all"], n["all"])),
    "local": ({}, lambda n: (0, 0)),
    "fedper": ({}, lambda n: (n["body"], n["body"])),
    "fedper-all": ({"layers": 2}, lambda n: (0, 0)),
    "fedrep": ({}, lambda n: (n["body"], n["body"])),
    "fedbabu": ({}, lambda n: (n["body"], n["body"])),
    "fedamp": ({}, lambda n: (n["all"], n["all"])),
    "cfl": ({}, lambda n: (n["all"], n["all"])),
    "fednh": ({}, lambda n: (n["all"], n["all"] + n["C"])),
    "fedfomo": ({}, lambda n: (0, n["all"])),  # in the first round; for the others see test_fedfomo.py
    "fedproto": ({}, lambda n: (n["C"] * n["d"] + n["C"], n["C"] * n["d"] + n["C"])),
    "moon": ({}, lambda n: (n["all"], n["all"])),
    "feduv": ({}, lambda n: (n["all"], n["all"])),
}


def build(name, **parameters):
    return registry.build(registry.ALGORITHM, name, PARAMETERS.get(name, {}) | parameters)


def holds(oracle, name):
    if name in EXCEPTIONS.get(oracle, {}):
        pytest.skip(EXCEPTIONS[oracle][name])


def insisting(name, optimizer):
    """The algorithm, told to obey where its theory asks for another optimizer."""
    return build(name, adam=True) if optimizer == "adam" and build(name).needs_sgd else build(name)


def model_parts(name, server):
    named = {part: value for part, value in server.items() if isinstance(value, Tensors)}
    return {part: value for part, value in named.items() if part not in NO_MODELS.get(name, set())}


def results(outcomes):
    """As one tree that can be compared."""
    return [
        (each.client, each.upload, each.keep, {test: tuple(s) for test, s in each.scores.items()}) for each in outcomes
    ]


@pytest.mark.parametrize("width", [3, 7])
@pytest.mark.parametrize("optimizer", OPTIMISERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_stack_computes_what_the_loop_computes(make_trial, assert_same, name, optimizer, width):
    """Four participants of unequal sizes: a width of 3 pads the last stack, a width of 7 the only one."""
    settings = OPTIMISERS[optimizer]
    loop, stack = (make_trial(insisting(name, optimizer), width=each, **settings) for each in (None, width))
    met = set()
    for _ in range(3):
        loop.run(tests=("local", "global"))
        stack.run(tests=("local", "global"))
        assert_same(results(stack.outcomes), results(loop.outcomes), within=1e-12)
        assert_same(stack.server, loop.server, within=1e-12)
        met |= {outcome.client for outcome in loop.outcomes}
    assert 0 in met, "the client with a single sample should be among the participants"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_stack_computes_what_the_loop_computes_with_convolutions(make_trial, assert_same, name):
    loop, stack = (make_trial(build(name), "cnn", width=each, local_epochs=1) for each in (None, 3))
    for trial in (loop, stack):
        trial.run(2, tests=("local", "global"))
    assert_same(results(stack.outcomes), results(loop.outcomes), within=1e-12)
    assert_same(stack.server, loop.server, within=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_batch_normalization(make_trial, assert_same, name):
    """In loop and stack alike; running statistics are finite, and those of two samples or more moved."""
    loop, stack = (make_trial(build(name), "norm", width=each) for each in (None, 3))
    initial = loop.fresh(0)
    for _ in range(2):
        loop.run(tests=("local", "global"))
        stack.run(tests=("local", "global"))
        assert_same(results(stack.outcomes), results(loop.outcomes), within=1e-10)
        assert_same(stack.server, loop.server, within=1e-10)
        for outcome in loop.outcomes:
            parts = [part for part in (outcome.upload | outcome.keep).values() if isinstance(part, Tensors)]
            found = [(part[key], initial[key]) for part in parts for key in loop.net.buffer_names if key in part]
            assert all(value.isfinite().all() for value, _ in found)
            if loop.clients.sizes[outcome.client] > 1:
                assert any(not torch.equal(value, before) for value, before in found)


@pytest.mark.parametrize("stage", ["receive", "finetune"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_stack_evaluates_what_the_loop_evaluates(make_trial, assert_same, name, stage):
    loop, stack = (make_trial(build(name), width=each).run(2) for each in (None, 3))
    everyone = range(len(loop.clients))
    found, wanted = (results(trial.train(everyone, ("local", "global"), stage)) for trial in (stack, loop))
    assert_same(found, wanted, within=1e-12)
    assert [scores["local"][1] for *_, scores in found] == [len(indices) for indices in loop.clients.test]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_finetuning_changes_what_is_measured(make_trial, name):
    """A copy that trained on the client's data answers otherwise than the model that was received."""
    trial = make_trial(build(name), learning_rate=0.1).run(2)
    everyone = range(1, len(trial.clients))
    received, finetuned = (trial.train(everyone, ("local",), stage) for stage in ("receive", "finetune"))
    for before, after in zip(received, finetuned, strict=True):
        assert after.scores["local"].loss != before.scores["local"].loss


@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_participants_in_blocks_send_the_same_bits(make_trial, assert_same, name, width):
    trial = make_trial(build(name), width=width).run(2)
    everyone = list(range(len(trial.clients)))
    whole = trial.train(everyone, tests=("local",))
    blocks = [trial.train(everyone[first : first + 3], tests=("local",)) for first in range(0, len(everyone), 3)]
    assert_same(results(itertools.chain(*blocks)), results(whole))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_number_of_threads_changes_no_bit(make_trial, assert_same, name):
    one, two = (make_trial(build(name), threads=threads).run(2, tests=("local",)) for threads in (1, 2))
    assert_same(results(two.outcomes), results(one.outcomes))
    assert_same(two.server, one.server)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_u1_equal_uploads_are_the_next_model(make_trial, assert_same, name):
    holds("U1", name)
    trial = make_trial(build(name)).run(1)
    sent = trial.outcomes[-1].upload
    ids = [outcome.client for outcome in trial.outcomes]
    weights = trial.clients.sizes[ids].tolist()
    trial.server = trial.aggregate(Uploads(ids, weights, [sent] * len(ids)))
    trial.kept = dict.fromkeys(trial.kept, trial.initial)
    model = sent["model"] if "model" in sent else sent["body"]
    for client in ids:
        assert_same(trial.start(client)["model"].only(model), model, within=1e-14)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, optimizer) for name in CENTRALISED for optimizer in ("sgd", "plain")],
)
def test_u2_one_client_is_centralized_training(make_clients, make_trial, assert_same, name, optimizer):
    algorithm = build(name, **CENTRALISED[name])
    if name in PLAIN and optimizer == "sgd":
        pytest.skip("its local steps have no momentum")
    settings = {"learning_rate": 0.1, "weight_decay": 0.01, "momentum": 0.9 if optimizer == "sgd" else 0.0}
    clients = make_clients(sizes=[17], labels=lambda client: range(4))
    trial = make_trial(algorithm, clients=clients, participation=1.0, **settings)

    module = trial.algorithm.adapt(MLP(hidden=(6,)).build((5,), 4)).double()
    module.load_state_dict(trial.fresh(0))
    for number in (1, 2, 3):
        rule = torch.optim.SGD(module.parameters(), settings["learning_rate"], settings["momentum"], 0, 0.01)
        for epoch in range(2):
            order = clients.order(0, number, "batches", epoch)
            for first in range(0, len(order), 4):
                x, y = clients.gather(order[first : first + 4])
                rule.zero_grad()
                torch.nn.functional.cross_entropy(module(x), y).backward()
                rule.step()
    central = Tensors((key, value.detach()) for key, value in module.named_parameters())
    assert_same(trial.run(3).start(0)["model"], central, within=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_u3_the_order_of_clients_does_not_matter(make_trial, assert_same, name):
    holds("U3", name)
    trial = make_trial(build(name), participation=1.0).run(1)
    uploads = trial.uploads(trial.train())
    shuffled = np.random.default_rng(1).permutation(len(uploads)).tolist()
    ids, weights, states = zip(*(uploads[index] for index in shuffled), strict=True)
    assert ids != uploads.ids
    assert_same(trial.aggregate(Uploads(ids, weights, states)), trial.aggregate(uploads), within=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMISERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_u4_without_a_learning_rate_no_model_changes(make_trial, assert_same, name, optimizer):
    holds("U4", name)
    trial = make_trial(insisting(name, optimizer), **OPTIMISERS[optimizer] | {"learning_rate": 0.0})
    before = model_parts(name, trial.server)
    assert_same(model_parts(name, trial.run(3).server), before, within=1e-14)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_u5_a_run_repeats_bit_by_bit(make_trial, assert_same, name, width):
    first, second = (make_trial(build(name), width=width).run(2, tests=("local",)) for _ in range(2))
    assert_same(second.server, first.server)
    assert_same(second.kept, first.kept)
    assert_same(results(second.outcomes), results(first.outcomes))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_u6_the_names_of_classes_do_not_matter(make_clients, make_trial, assert_same, name):
    """Labels and the head's rows are permuted alike: the same samples are classified correctly."""
    holds("U6", name)
    new = [2, 0, 3, 1]
    plain = make_trial(build(name), participation=1.0)

    def fresh(index):
        rows = torch.tensor(new).argsort()
        model = plain.fresh(index)
        return model | {key: value[rows] for key, value in model.items() if key in ("head.weight", "head.bias")}

    renamed = make_trial(build(name), clients=make_clients(relabel=new), participation=1.0, fresh=fresh)
    scores = [[each.scores for each in trial.run(3, tests=("local", "global")).outcomes] for trial in (plain, renamed)]
    hits, losses = (
        [[getattr(score, what) for each in trial for score in each.values()] for trial in scores]
        for what in ("correct", "loss")
    )
    assert hits[1] == hits[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic_is_what_the_specification_says(make_trial, name, width):
    parameters, formula = TRAFFIC[name]
    trial = make_trial(build(name.partition("-")[0], **parameters), width=width)
    model = trial.fresh(0)
    numbers = {
        "all": sum(value.numel() for value in model.values()),
        "body": sum(model[key].numel() for key in trial.net.body_names),
        "last": sum(model[key].numel() for key in trial.net.head_names),
        "C": 4,
        "d": 6,
    }
    others = {"feddw": 0, "fednh": 1}.get(name.partition("-")[0], 4)  # biases of the head, or FedNH's scale
    assert numbers["all"] == 5 * 6 + 6 + 6 * 4 + others
    down, up = formula(numbers)
    assert [(outcome.down, outcome.up) for outcome in trial.train()] == [(8 * down, 8 * up)] * 4


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_states_keep_their_shapes(make_trial, name, width):
    trial = make_trial(build(name), width=width)
    server, kept = _outline(trial.server), _outline(trial.initial)
    for _ in range(2):
        trial.run()
        assert _outline(trial.server) == server
        assert all(_outline(outcome.keep) == kept for outcome in trial.outcomes)
        assert len({str(_outline(outcome.upload)) for outcome in trial.outcomes}) == 1


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_states_are_finite_and_need_no_gradient(make_trial, name, width):
    trial = make_trial(build(name), width=width).run(2)
    leaves = pytree.tree_leaves([trial.server, [(each.upload, each.keep) for each in trial.outcomes]])
    assert not any(leaf.requires_grad for leaf in leaves)
    assert all(leaf.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_class_that_nobody_in_the_round_owns(make_clients, make_trial, name, width):
    """At a participation of 0.3; one class is nobody's at all, and another's first owner joins in the third round."""
    clients = make_clients(labels=lambda client: [1, 2] if client in (3, 6) else [0, 1])
    trial = make_trial(build(name), clients=clients, width=width, participation=0.3)
    for ids in ([0, 1], [1, 7], [0, 3]):
        trial.run(1, ids=ids, tests=("local", "global"))
        sent = [(each.upload, each.keep) for each in trial.outcomes]
        assert all(leaf.isfinite().all() for leaf in pytree.tree_leaves([trial.server, sent]))
    everyone = trial.train(range(8), ("local", "global"), "receive")
    assert all(math.isfinite(score.loss) for each in everyone for score in each.scores.values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_leaves_what_it_was_given_as_it_was(make_trial, assert_same, name):
    """Passes are pure: neither the server's state nor the kept ones change while clients train."""
    trial = make_trial(build(name)).run(1)
    before = pytree.tree_map(torch.clone, (trial.server, trial.kept))
    trial.aggregate(trial.uploads(trial.train()))
    assert_same((trial.server, trial.kept), before)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_helps(make_trial, name):
    """Clients that train fit their own data better than the initial model does, and no loss is NaN."""
    trial = make_trial(build(name), participation=1.0, learning_rate=0.05)

    def loss(rounds):
        scores = [outcome.scores["local"] for outcome in trial.run(rounds, tests=("local",)).outcomes]
        return sum(score.loss for score in scores) / sum(score.total for score in scores)

    first, last = loss(1), loss(9)
    assert math.isfinite(last)
    assert last < first


def _outline(state):
    return pytree.tree_map(lambda leaf: (tuple(leaf.shape), leaf.dtype), state)
