"""Noise in the features and labels of the clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedpipe.core import rng
from fedpipe.core.errors import SettingsError
from fedpipe.engine.clients.corruption import ClientSamples, corrupt_samples
from fedpipe.settings import parser
from tests import small_studies as studies

CLASSES = 5


def make_samples(count=2000, clients=4, shape=(3, 4), images=True):
    """Make training, validation and test samples of clients. The last test samples belong to no client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)
    x = x if images else x.float() / 100
    y = torch.arange(count) % CLASSES
    order = np.random.default_rng(1).permutation(count - 100)
    parts = [np.array_split(part, clients) for part in np.split(order, [1200, 1400])]
    train, validation, test = ([np.sort(rows) for rows in part] for part in parts)
    return ClientSamples(x, y, train, test, validation, np.unique(np.concatenate([*test, np.arange(1900, 2000)])))


def corrupt(samples, seed=0, **settings):
    return corrupt_samples(samples, CLASSES, seed, torch.float64, **settings)


@pytest.mark.parametrize("images", [True, False])
def test_feature_noise_variance_grows_linearly_with_client_index(images):
    samples = make_samples(images=images)
    noisy = corrupt(samples, feature_noise=0.2)
    clean = samples.x.double() / 255 if images else samples.x.double()
    for part in ("train", "validation", "test"):
        for client in range(4):
            rows, noisy_rows = getattr(samples, part)[client], getattr(noisy, part)[client]
            assert torch.equal(noisy.y[noisy_rows], samples.y[rows])
            noise = (noisy.x[noisy_rows] - clean[rows]).numpy()
            count = noise.size
            assert abs(noise.mean()) < 5 * np.sqrt(0.2 / count)
            assert noise.var() == pytest.approx(0.2 * (client + 1) / 4, rel=5 * np.sqrt(2 / count))
    assert torch.equal(noisy.x[noisy.global_test], clean[samples.global_test])
    assert torch.equal(noisy.y[noisy.global_test], samples.y[samples.global_test])


def test_noise_depends_only_on_seed_purpose_and_client():
    samples = make_samples()
    first, again, other = (corrupt(samples, seed, feature_noise=0.1, label_noise=0.3) for seed in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.x, other.x)
    assert not torch.equal(first.y, other.y)
    rows = np.unique(np.concatenate([part[2] for part in (samples.train, samples.validation, samples.test)]))
    noise = rng.make_generator(0, "feature noise", client=2).normal(0, np.sqrt(0.1 * 3 / 4), (len(rows), 3, 4))
    expected = samples.x[rows].double() / 255 + torch.from_numpy(noise)
    assert torch.equal(first.x[first.train[2]], expected[np.searchsorted(rows, samples.train[2])])


def test_symmetric_label_noise_draws_other_classes_uniformly():
    samples = make_samples()
    noisy = corrupt(samples, label_noise=0.4)
    shifts = np.concatenate(
        [
            (noisy.y[new] - samples.y[old]).numpy() % CLASSES
            for new, old in zip([*noisy.train, *noisy.validation], [*samples.train, *samples.validation], strict=True)
        ]
    )
    counts = np.bincount(shifts, minlength=CLASSES) / len(shifts)
    assert counts == pytest.approx([0.6, 0.1, 0.1, 0.1, 0.1], abs=5 * np.sqrt(0.24 / len(shifts)))


def test_pairwise_label_noise_changes_labels_to_next_class():
    samples = make_samples()
    noisy = corrupt(samples, label_noise=1.0, label_noise_kind="pairwise")
    for new, old in zip(noisy.train, samples.train, strict=True):
        assert torch.equal(noisy.y[new], (samples.y[old] + 1) % CLASSES)
        assert torch.equal(noisy.x[new], samples.x[old])


def test_label_noise_has_rate_per_client_and_keeps_test_labels():
    samples, rates = make_samples(), [0.0, 0.2, 0.5, 1.0]
    noisy = corrupt(samples, label_noise=rates)
    for client, rate in enumerate(rates):
        changed = (noisy.y[noisy.train[client]] != samples.y[samples.train[client]]).double().mean().item()
        assert changed == pytest.approx(rate, abs=5 * np.sqrt(rate * (1 - rate) / 300) + 1e-12)
        assert torch.equal(noisy.y[noisy.test[client]], samples.y[samples.test[client]])
        assert {*noisy.test[client]} <= {*noisy.global_test}
    assert torch.equal(noisy.y[noisy.global_test], samples.y[samples.global_test])


def test_noise_of_shared_sample_differs_between_clients():
    samples = make_samples()
    no_samples = [np.empty(0, np.int64)] * 2
    shared = ClientSamples(
        samples.x, samples.y, [samples.train[0]] * 2, samples.test[:2], no_samples, samples.global_test
    )
    noisy = corrupt(shared, feature_noise=0.1, label_noise=[0.0, 1.0])
    assert not torch.equal(noisy.x[noisy.train[0]], noisy.x[noisy.train[1]])
    assert torch.equal(noisy.y[noisy.train[0]], samples.y[samples.train[0]])
    assert (noisy.y[noisy.train[1]] != samples.y[samples.train[0]]).all()
    assert [len(indices) for indices in noisy.validation] == [0, 0]


def test_samples_without_noise_are_not_copied():
    samples = make_samples()
    assert corrupt(samples) is samples


def test_feature_noise_rejects_token_ids():
    samples = make_samples()
    tokens = replace(samples, x=samples.x.long())
    with pytest.raises(SettingsError, match=r"^dataset\.feature_noise: 0\.1 .*token"):
        corrupt(tokens, feature_noise=0.1)


# -- in a study --------------------------------------------------------------------------------------------------------


def make_study(**dataset):
    params = studies.settings(("fedavg",), 2, evaluation={"protocols": ["global-on-local", "personal-on-local"]})
    return params | {"dataset": {"name": "digits"} | dataset}


@pytest.mark.usefixtures("in_empty_folder")
def test_run_key_depends_only_on_enabled_noise():
    off = [{}, {"feature_noise": 0}, {"label_noise": 0.0}, {"label_noise_kind": "pairwise"}, {"label_noise": [0] * 10}]
    keys = {studies.prepare(make_study(**settings)).runs[0].key for settings in off}
    assert len(keys) == 1
    on = [
        {"feature_noise": 0.1},
        {"feature_noise": 0.2},
        {"label_noise": 0.1},
        {"label_noise": 0.1, "label_noise_kind": "pairwise"},
        {"label_noise": [0.1] * 9 + [0.2]},
    ]
    keys |= {studies.prepare(make_study(**settings)).runs[0].key for settings in on}
    assert len(keys) == 6
    assert studies.prepare(make_study(label_noise=[0.1] * 10)).runs[0].key in keys


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize("stack", [1, 3])
def test_global_model_is_evaluated_on_noisy_local_test_samples(stack):
    """Therefore its scores equal those of FedAvg's personal models, which are the global model."""
    run = studies.open_runs(studies.prepare(make_study(feature_noise=0.5, label_noise=0.2)), stack=stack)[0]
    studies.finish_run(run, 2)
    scores = [studies.read_scores(run, 2, protocol) for protocol in ("global-on-local", "personal-on-local")]
    assert scores[0].keys() == scores[1].keys()
    for key, (correct, total, loss) in scores[0].items():
        assert (correct, total) == scores[1][key][:2]
        assert loss == pytest.approx(scores[1][key][2], rel=1e-5)
    noisy_rows = np.concatenate(run.clients.test)
    assert not np.isin(noisy_rows, run.clients.global_test).any()


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"label_noise": [0.1, 0.2]}, r"^dataset\.label_noise: .*2 .*10"),
        ({"label_noise": 1.5}, r"^dataset\.label_noise"),
        ({"feature_noise": -1}, r"^dataset\.feature_noise: -1"),
        ({"label_noise": 0.1, "label_noise_kind": "paired"}, r"^dataset\.label_noise_kind: 'paired'"),
    ],
)
def test_invalid_noise_settings_are_rejected(dataset, message):
    with pytest.raises(SettingsError, match=message):
        parser.parse_params(make_study(**dataset))
