"""Noise in the features and labels of clients, which makes their data more heterogeneous.

A corrupted sample is a further row of the data set. So the global test set is clean, and each client has its own noise
in a sample that several clients have. A client's noise is drawn once, as a function of (seed, purpose, client).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpipe.core import rng
from fedpipe.core.errors import SettingsError
from fedpipe.engine.clients.federated_data import Integers
from fedpipe.settings.dataset import LabelNoiseKind


@dataclass(frozen=True)
class ClientSamples:
    """Inputs (n, *shape) and classes (n,) of all rows, and the rows of the clients and of the global test set."""

    x: Tensor
    y: Tensor
    train: Sequence[Integers]
    test: Sequence[Integers]
    validation: Sequence[Integers]
    global_test: Integers

    def replace_rows(self, x: Tensor, y: Tensor, rows: Sequence[Integers], has_test: bool) -> ClientSamples:
        """Replace samples of the clients by new rows with inputs ``x`` and classes ``y``, first those of client 0.

        ``rows`` are the current rows of each client, ascending, that are replaced. With ``has_test`` the clients' test
        samples are among them.
        """
        kept_rows = np.unique(np.concatenate([self.global_test, *([] if has_test else self.test)]))
        starts = len(kept_rows) + np.cumsum([0, *map(len, rows)])

        def map_to_new_rows(parts: Sequence[Integers]) -> list[Integers]:
            return [
                start + np.searchsorted(client_rows, part)
                for start, client_rows, part in zip(starts[:-1], rows, parts, strict=True)
            ]

        return ClientSamples(
            torch.cat([convert_and_scale_inputs(self.x[kept_rows], x.dtype), x]),
            torch.cat([self.y[kept_rows], y]),
            map_to_new_rows(self.train),
            map_to_new_rows(self.test) if has_test else [np.searchsorted(kept_rows, part) for part in self.test],
            map_to_new_rows(self.validation),
            np.searchsorted(kept_rows, self.global_test),
        )


def convert_and_scale_inputs(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert inputs to a type. Bytes are images, which are divided by 255 to become floats."""
    return x.to(dtype) / 255 if x.dtype == torch.uint8 and dtype.is_floating_point else x.to(dtype)


def corrupt_samples(
    samples: ClientSamples,
    classes: int,
    seed: int,
    dtype: torch.dtype,
    feature_noise: float = 0.0,
    label_noise: float | Sequence[float] = 0.0,
    label_noise_kind: LabelNoiseKind = "symmetric",
) -> ClientSamples:
    """Add the noise of section `dataset`. Without noise, the samples stay as they are."""
    if feature_noise:
        samples = add_feature_noise(samples, feature_noise, seed, dtype)
    if label_noise:
        rates = np.broadcast_to(np.asarray(label_noise), len(samples.train))
        samples = add_label_noise(samples, rates, label_noise_kind, classes, seed)
    return samples


def add_feature_noise(samples: ClientSamples, sigma: float, seed: int, dtype: torch.dtype) -> ClientSamples:
    """Add Gaussian noise of variance sigma * i / N to all samples of client i = 1, ..., N.

    The rule is that of NIID-Bench (Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022). In the authors'
    code the standard deviation instead of the variance is sigma * (i - 1) / (N - 1), and each access to a sample draws
    new noise. There and here the client's test samples have its noise, and values are not clipped. Here the noise is
    added to inputs in [0, 1], before `transforms.mean` and `std`, and the global test set has no noise.
    """
    x, count = samples.x, len(samples.train)
    if not (x.is_floating_point() or x.dtype == torch.uint8):
        raise SettingsError(f"dataset.feature_noise: {sigma} can't be used with token ids. Use 0.")
    parts = zip(samples.train, samples.test, samples.validation, strict=True)
    rows, noisy_inputs = [np.unique(np.concatenate(client_parts)) for client_parts in parts], []
    for client, client_rows in enumerate(rows):
        generator = rng.make_generator(seed, "feature noise", client=client)
        noise = generator.normal(0, np.sqrt(sigma * (client + 1) / count), (len(client_rows), *x.shape[1:]))
        noisy_inputs.append(convert_and_scale_inputs(x[client_rows], dtype) + torch.from_numpy(noise).to(dtype))
    y = samples.y[np.concatenate(rows)]
    return samples.replace_rows(torch.cat(noisy_inputs), y, rows, has_test=True)


def add_label_noise(
    samples: ClientSamples, rates: npt.NDArray[np.float64], kind: LabelNoiseKind, classes: int, seed: int
) -> ClientSamples:
    """Replace the class of each training and validation sample with the client's probability.

    Symmetric noise draws one of the other classes. Pairwise noise takes the next class, and class 0 after the last one
    (Han et al., Co-teaching, NeurIPS 2018). Test samples have their true classes.
    """
    rows = [np.unique(np.concatenate(parts)) for parts in zip(samples.train, samples.validation, strict=True)]
    labels = []
    for client, (client_rows, rate) in enumerate(zip(rows, rates, strict=True)):
        generator = rng.make_generator(seed, "label noise", client=client)
        is_flipped = generator.random(len(client_rows)) < rate
        shifts = generator.integers(1, classes, len(client_rows)) if kind == "symmetric" else 1
        labels.append((samples.y[client_rows].numpy() + is_flipped * shifts) % classes)
    y = torch.from_numpy(np.concatenate(labels))
    return samples.replace_rows(samples.x[np.concatenate(rows)], y, rows, has_test=False)
