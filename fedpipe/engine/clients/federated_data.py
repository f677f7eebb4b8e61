"""The clients' samples on the training device."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpipe.algorithms.batch import ClientInfo
from fedpipe.core import rng
from fedpipe.engine.clients.transforms import Normalization, transform_images
from fedpipe.settings.transforms import Transforms

Integers = npt.NDArray[np.int64]


class FederatedData:
    """The samples of all clients. The data set is in memory once, and batches are gathered from it.

    Parameters
    ----------
    x, y
        All samples: inputs, shape (n, *shape), and classes, shape (n,). Inputs of bytes are images,
        which are divided by 255 when they are gathered. Other integers are tokens.
    train, test
        Indices of each client's training and test samples.
    global_test
        Indices of the global test set.
    num_classes
        Number of classes C.
    seed
        Seed of the run, for the order of samples, for dropout and for transforms.
    dtype, device
        Data type and device of gathered inputs.
    validation
        Indices of each client's validation samples, if there are any.
    transforms
        Transforms of gathered inputs.
    data_checksums
        SHA-256 of the data set and the partition.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        train: Sequence[Integers],
        test: Sequence[Integers],
        global_test: Integers,
        num_classes: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        validation: Sequence[Integers] = (),
        transforms: Transforms = Transforms(),  # noqa: B008  # frozen
        data_checksums: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.device, self.dtype, self.seed, self.classes = torch.device(device), dtype, seed, num_classes
        self.x, self.y = x.to(self.device), y.to(self.device)
        if x.is_floating_point():
            self.x = self.x.to(dtype)
        self.train, self.test, self.global_test = list(train), list(test), global_test
        self.validation = list(validation) or [np.empty(0, np.int64)] * len(self.train)
        pairs = zip(self.validation, self.train, strict=True)
        # A client without validation samples uses its training samples.
        self.validation_or_train = [validation if len(validation) else train for validation, train in pairs]
        self.ids: Sequence[int] = range(len(self.train))  #: clients that have samples here, ascending
        self.transforms, self.data_checksums = transforms, data_checksums
        counts = np.stack([np.bincount(y[indices].cpu().numpy(), minlength=num_classes) for indices in self.train])
        self.class_counts = torch.as_tensor(counts, dtype=dtype, device=self.device)
        self.sizes = np.array([len(indices) for indices in self.train])
        self.drift: tuple[int, FederatedData] | None = None  #: round of a drift, and the clients from this round on

    def __len__(self) -> int:
        return len(self.train)

    def select_clients(self, ids: Collection[int]) -> FederatedData:
        """Copy without the samples of other clients. The clients ``ids`` have the same numbers as before."""
        other, nobody, ids = copy.copy(self), np.empty(0, np.int64), frozenset(ids)
        other.train, other.test, other.validation, other.validation_or_train = (
            [indices if client in ids else nobody for client, indices in enumerate(samples)]
            for samples in (self.train, self.test, self.validation, self.validation_or_train)
        )
        is_here = np.isin(np.arange(len(self)), list(ids))
        other.sizes = np.where(is_here, self.sizes, 0)
        other.class_counts = self.class_counts * torch.as_tensor(is_here, device=self.device).unsqueeze(-1)
        other.ids = sorted(ids)
        other.drift = self.drift and (self.drift[0], self.drift[1].select_clients(ids))
        return other

    def select_round_samples(self, round_number: int) -> FederatedData:
        """Select the clients with their samples of a round, which only `federation.drift` changes."""
        return self if self.drift is None or round_number < self.drift[0] else self.drift[1]

    def has_drifted(self, client: int, last_round: int, round_number: int) -> bool:
        """Whether a client that last trained in a round (-1: none) has other samples in a later one."""
        train = self.select_round_samples(last_round).train[client]
        return last_round >= 0 and self.select_round_samples(round_number).train[client] is not train

    def get_client_positions(self, ids: Iterable[int]) -> list[int]:
        """Positions of clients among those that have samples here. They are the clients' numbers in an algorithm."""
        return [bisect.bisect_left(self.ids, client) for client in ids]

    @property
    def transforms(self) -> Transforms:
        """Transforms of gathered inputs."""
        return self._transforms

    @transforms.setter
    def transforms(self, transforms: Transforms) -> None:
        self._transforms, self._normalization = transforms, Normalization(transforms, self.dtype, self.device)

    def resolve_batch_size(self, size: int | Literal["full"]) -> int:
        """Number of samples per training step, at most the size of the largest client."""
        largest = int(self.sizes.max())
        return largest if size == "full" else min(size, largest)

    def get_client_info(self, client: int | Sequence[int], round_number: int, is_first: Tensor) -> ClientInfo:
        """Get a client's facts at the start of a round, with a first axis for several clients.

        ``is_first`` is 1 for clients that have not trained yet and 0 for others.
        """
        class_counts = self.class_counts[client if isinstance(client, int) else list(client)]
        size = class_counts.sum(-1)
        noise_keys = (
            self.get_client_noise_key(client, round_number)
            if isinstance(client, int)
            else [self.get_client_noise_key(one_client, round_number) for one_client in client]
        )
        return ClientInfo(
            size=size,
            class_counts=class_counts,
            round=torch.full_like(size, float(round_number)),
            is_first=is_first.to(size),
            noise_key=torch.tensor(noise_keys, device=self.device),
        )

    def shuffle_indices(
        self, client: int, round_number: int, stream: str, epoch: int, fraction: float = 1.0
    ) -> Integers:
        """Shuffle the client's training samples for one epoch, or a random fraction of them."""
        indices = self.train[client]
        if fraction < 1:
            subset = rng.make_generator(self.seed, f"{stream}/share", round_number, client).permutation(len(indices))
            indices = indices[np.sort(subset[: self.compute_subset_size(client, fraction)])]
        return rng.make_generator(self.seed, f"{stream}/{epoch}", round_number, client).permutation(indices)

    def compute_subset_size(self, client: int, fraction: float = 1.0) -> int:
        """Number of samples in a fraction of the client's training samples."""
        count = len(self.train[client])
        return count if fraction >= 1 else max(1, int(fraction * count + 0.5))

    def gather_samples(self, indices: Integers | Tensor) -> tuple[Tensor, Tensor]:
        """Gather inputs and classes of samples."""
        rows = torch.as_tensor(indices, device=self.device)
        x = self.x[rows]
        if x.dtype == torch.uint8:
            x = x.to(self.dtype).div_(255)
        elif not x.is_floating_point():
            return x.long(), self.y[rows]
        return self._normalization(x), self.y[rows]

    def get_labels(self, indices: Integers) -> Tensor:
        """Classes of samples, shape (n,)."""
        return self.y[torch.as_tensor(indices, device=self.device)]

    def gather_batches(self, indices: Integers, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Gather inputs and classes of samples, ``size`` at a time."""
        return (self.gather_samples(indices[first : first + size]) for first in range(0, len(indices), size))

    def gather_server_test_inputs(self, indices: Integers, round_number: int, batch_number: int) -> Tensor:
        """Gather the inputs of the ``batch_number``-th batch of test samples for the server's model after a round."""
        x, _ = self.gather_samples(indices)
        if not self.transforms.on_test:
            return x
        return transform_images(
            self.transforms,
            x,
            torch.tensor(self.get_noise_key(-1, round_number, "test", 0) + batch_number, device=self.device),
        )

    def replace_inputs(self, x: Tensor, input_checksums: Mapping[str, str]) -> FederatedData:
        """Copy with other inputs, and ``input_checksums`` to record."""
        other = copy.copy(self)
        other.x, other.transforms = x.to(self.device, self.dtype), Transforms()
        other.data_checksums = {**self.data_checksums, **input_checksums}
        return other

    def replace_samples(
        self, x: Tensor, y: Tensor, train: Sequence[Integers], test: Sequence[Integers], validation: Sequence[Integers]
    ) -> FederatedData:
        """Copy with other samples of the clients. The global test set has the same rows as before."""
        return FederatedData(
            x,
            y,
            train,
            test,
            self.global_test,
            self.classes,
            self.seed,
            self.dtype,
            self.device,
            validation,
            self.transforms,
            self.data_checksums,
        )

    def get_evaluation_indices(self, client: int, test: str) -> Integers:
        """Indices of the samples of a test set: ``local``, ``global``, ``train`` or ``validation``."""
        if test == "global":
            return self.global_test
        return {"local": self.test, "train": self.train, "validation": self.validation}[test][client]

    def get_evaluation_noise_key(self, client: int, round_number: int, test: str) -> int | None:
        """Noise key of those samples. None without augmentation in evaluation."""
        has_noise = self.transforms.on_test and test != "train"
        return self.get_noise_key(client, round_number, f"test/{test}", 0) if has_noise else None

    def get_client_noise_key(self, client: int, round_number: int) -> int:
        """Noise key of the client's hooks in a round."""
        return self.get_noise_key(client, round_number, "client", 0)

    def get_noise_key(self, client: int, round_number: int, stream: str, epoch: int) -> int:
        """Noise key of an epoch: 62 bits, to which the number of a batch is added."""
        return rng.derive_entropy(self.seed, f"{stream}/noise/{epoch}", round_number, client) >> 66
