import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedbabu import FedBABU
from fedpipe.engine.clients.loop import LoopExecutor
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import compute_finetuned_loss, train_plainly

EXPECTED = Expected(traffic=[({}, lambda n: (n.body, n.body))], centralized="the head never trains")

EVERYONE = range(8)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_fedbabu_keeps_initial_head_at_server_and_clients(make_trial, assert_same, settings, width):
    trial = make_trial(FedBABU(), width=width, weight_decay=0.1, **settings)
    head = trial.initial_model(0).only(("head.weight", "head.bias"))
    for _ in range(3):
        trial.run()
        assert_same(trial.server["head"], head)
        for client in EVERYONE:
            assert_same(trial.start(client)["model"], trial.algorithm.global_model(trial.server))
    assert not torch.equal(trial.server["body"].flat(), trial.initial_model(0).only(trial.net.body_names).flat())


@pytest.mark.parametrize("weighting", ["count", "uniform"])
def test_fedbabu_matches_fedavg_loop_with_frozen_head(make_trial, assert_same, weighting):
    """Train with PyTorch's optimizer on the body only."""
    settings = {"momentum": 0.9, "weight_decay": 0.01, "weighting": weighting}
    trial, plain = make_trial(FedBABU(), **settings), make_trial(FedAvg(), **settings)
    expected = train_plainly(
        plain,
        lambda client, module, received, x, y: cross_entropy(module(x), y),
        3,
        freeze=lambda module: module.head.requires_grad_(False),
    )
    assert_same(trial.run(3).algorithm.global_model(trial.server), expected, tolerance=1e-12)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("finetuned", ["model", "head", "body"])
def test_fedbabu_fine_tunes_model_or_head_or_body(make_trial, finetuned, width):
    trial = make_trial(FedBABU(finetuned=finetuned), width=width, momentum=0.9).run(2)
    parts = ("body", "head") if finetuned == "model" else (finetuned,)
    for client in (1, 4):
        (found,) = trial.train([client], ("local",), "finetune")
        assert found.scores["local"].loss == pytest.approx(compute_finetuned_loss(trial, client, parts), rel=1e-12)


def test_fedbabu_fine_tuning_does_not_change_run(make_trial, assert_same):
    tried, plain = (make_trial(FedBABU()).run(2) for _ in range(2))
    tried.train(EVERYONE, ("local",), "finetune")
    assert_same(tried.server, plain.server)
    assert_same(tried.client_states, plain.client_states)
    assert_same(tried.run().server, plain.run().server)


def test_fedbabu_fine_tuning_without_epochs_equals_global_model(make_trial):
    """Zero epochs of fine-tuning, the received model, and the global model give the same predictions."""
    trial = make_trial(FedBABU(), learning_rate=0.2).run(3)
    download = trial.train(EVERYONE, ("local",), "receive")
    trial.executor = LoopExecutor(trial.algorithm, trial.clients, finetune_epochs=0)
    untouched = trial.train(EVERYONE, ("local",), "finetune")
    for client, indices in enumerate(trial.clients.test):
        _, y = trial.clients.gather_samples(indices)
        logits = trial.executor.compute_logits(trial.algorithm.global_model(trial.server), indices, 1)
        hits = int((logits.argmax(-1) == y).sum())
        assert untouched[client].scores == download[client].scores
        assert download[client].scores["local"].correct == hits


def test_fedbabu_fine_tuning_improves_local_scores(make_trial):
    """Fine-tuned copies fit the clients' classes. One model with a random head cannot."""
    trial = make_trial(FedBABU(), learning_rate=0.2, participation=1.0).run(5)
    download, finetuned = (trial.train(EVERYONE, ("local",), stage) for stage in ("receive", "finetune"))
    before, after = ([outcome.scores["local"] for outcome in outcomes] for outcomes in (download, finetuned))
    assert sum(score.correct for score in after) > sum(score.correct for score in before)
    pairs = zip(before[1:], after[1:], strict=True)
    assert sum(score.loss > tuned.loss for score, tuned in pairs) >= 6
