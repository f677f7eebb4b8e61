"""The user's own assignment."""

from __future__ import annotations

import functools
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedpipe import artifacts, pins
from fedpipe.data.partitions.base import Integers, Pairs, Scheme
from fedpipe.errors import SettingsError
from fedpipe.pins import Pin, Sha256

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class File(Scheme):
    """Each client owns the samples that your own table assigns to it.

    The table has a row for each pair of a sample and its client, with columns ``sample`` (index into the data set as
    it is stored, from 0, so that there is no ``dataset.subset``) and ``client`` (0 to N-1). A sample may stand nowhere.

    With a column ``split`` ("train", "validation" or "test") the table says what each sample is for, as the
    ``assignment.parquet`` of any partition does. Then ``dataset.split``, its shares and all seeds have no say in the
    partition, which is one for all seeds; the data set needs no official test set. A sample may stand with several
    clients, unless some train on it and others test on it; a test sample of client -1 is in the global test set alone.

    Without it the table deals what any scheme deals: training samples if ``dataset.split`` is official, all samples
    if it is pooled; where it is official a sample may stand with several clients.

    The file's SHA-256 is part of the run's key, and its path is not: another file is another run.

    Parameters
    ----------
    path
        A Parquet file (``.parquet``) or else a CSV file with a header, from the folder of params.yaml.
    sha256
        SHA-256 of the file's bytes; `fedpipe download` fills it in.
    """

    by_index: ClassVar[bool] = True

    path: str
    sha256: Sha256 | None = None

    @property
    def pin(self) -> Pin:
        """See :class:`~fedpipe.registry.Component`."""
        return Pin("path", Path(self.path), self.sha256)

    @property
    def splits(self) -> bool:
        """See :class:`~fedpipe.data.partitions.base.Scheme`."""
        return self._read().split is not None

    def keyed(self) -> dict[str, Any]:
        """See :class:`~fedpipe.registry.Component`: no seed, where nothing is drawn."""
        return {name: value for name, value in super().keyed().items() if name != "seed" or not self.splits}

    @property
    def validates(self) -> bool:
        """Whether some samples of the table are for validation."""
        split = self._read().split
        return split is not None and bool((split == "validation").any())

    def check(self, clients: int, classes: int, samples: int) -> None:
        """The file has to be the one that is meant, and give every client a training sample."""
        dealt = self._read()
        if self.splits and dealt.sample.max(initial=0) >= samples:
            raise SettingsError(
                f"partition.path: sample {dealt.sample.max()} of {self.path} can't be dealt; it should be one of the "
                f"data set's {samples} samples."
            )
        train = np.ones(len(dealt.client), dtype=np.bool_) if dealt.split is None else dealt.split == "train"
        if len(dealt.client) and dealt.client.max() >= clients:
            raise SettingsError(
                f"federation.clients: {clients} can't be used with {self.path}, which gives samples to client "
                f"{dealt.client.max()}; it should be {dealt.client.max() + 1}."
            )
        lacking = np.setdiff1d(np.arange(clients), dealt.client[train])
        if len(lacking):
            raise SettingsError(
                f"partition.path: {self.path} gives client {lacking[0]} no training sample; it should give each of "
                f"federation.clients ({clients}) at least one."
            )
        if dealt.split is not None and not (dealt.split == "test").any():
            raise SettingsError(f"partition.path: {self.path} has no test sample; it should have at least one.")

    def deal(self, labels: Integers, samples: Integers, clients: int, rng: np.random.Generator) -> Pairs:
        """See :class:`~fedpipe.data.partitions.base.Scheme`.

        Raises
        ------
        SettingsError
            The file is not the one that is meant, or names samples that are not to be dealt.
        """
        dealt = self._read()
        wrong = np.setdiff1d(dealt.sample, samples if dealt.split is None else np.arange(len(labels)))
        if len(wrong):
            raise SettingsError(
                f"partition.path: sample {wrong[0]} of {self.path} can't be dealt; it should be one of the data set's "
                f"{len(labels)} samples, and a training sample if dataset.split is official and there is no column "
                f"split."
            )
        return dealt

    def _read(self) -> Pairs:
        return _pairs(self, pins.stamp(Path(self.path)))

    def read(self) -> Pairs:
        """The table's columns, each row a pair that can be.

        Raises
        ------
        SettingsError
            The file is not the one that is meant, or holds no such table.
        """
        try:
            content = Path(self.path).read_bytes()
        except OSError as error:
            raise SettingsError(f"partition.path: {self.path} can't be read ({error.strerror}).") from None
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            told = f"'{self.sha256}' is not that of {self.path}" if self.sha256 else f"missing for {self.path}"
            raise SettingsError(f"partition.sha256: {told}; if this is the file that you mean, write {found}.")
        return self._checked(_parsed(content, self.path))

    def _checked(self, table: pa.Table) -> Pairs:
        if twice := [name for name in ("sample", "client", "split") if table.column_names.count(name) > 1]:
            raise SettingsError(
                f"partition.path: {self.path} has the column '{twice[0]}' more than once; it should have it once."
            )
        sample, client = (self._integers(table, name) for name in ("sample", "client"))
        split = table["split"].to_numpy(zero_copy_only=False).astype(str) if "split" in table.column_names else None
        if split is not None and not np.isin(split, SPLITS).all():
            odd = split[~np.isin(split, SPLITS)][0]
            raise SettingsError(f"partition.path: split '{odd}' of {self.path} should be one of {', '.join(SPLITS)}.")
        nobody = client < 0 if split is None else (client < 0) & ((client < -1) | (split != "test"))
        if nobody.any():
            raise SettingsError(f"partition.path: client {client[nobody][0]} of {self.path} should be at least 0.")
        pairs = np.stack([sample, client])
        if len(np.unique(pairs, axis=1).T) < len(sample):
            raise SettingsError(
                f"partition.path: {self.path} lists a sample twice for one client; each may appear once."
            )
        if len(sample) and sample.min() < 0:
            raise SettingsError(f"partition.path: sample {sample.min()} of {self.path} should be at least 0.")
        if split is not None and len(both := np.intersect1d(sample[split == "test"], sample[split != "test"])):
            raise SettingsError(
                f"partition.path: {self.path} gives sample {both[0]} to be tested on and to be trained on or validated "
                f"on; it should be one of them."
            )
        return Pairs(sample, client, split)

    def _integers(self, table: pa.Table, name: str) -> npt.NDArray[np.int64]:
        import pyarrow as pa

        if name not in table.column_names:
            raise SettingsError(
                f"partition.path: {self.path} has no column '{name}'; it should have sample and client, and may have "
                f"split."
            )
        if table[name].null_count or not pa.types.is_integer(table[name].type):
            raise SettingsError(f"partition.path: column '{name}' of {self.path} should hold whole numbers only.")
        return np.asarray(table[name].to_numpy(), dtype=np.int64)


@functools.lru_cache(maxsize=8)
def _pairs(scheme: File, stamp: str) -> Pairs:
    """What a scheme's file holds, read once as long as it does not change."""
    return scheme.read()


def _parsed(content: bytes, path: str) -> pa.Table:
    import pandas as pd
    import pyarrow as pa

    try:
        if path.endswith(".parquet"):
            return artifacts.parquet(io.BytesIO(content))
        frame = pd.read_csv(io.BytesIO(content), dtype_backend="pyarrow")
        if not isinstance(frame.index, pd.RangeIndex):  # the first fields of longer rows became the rows' names
            raise ValueError("its rows have more fields than its header has names")
        header = pd.read_csv(io.BytesIO(content), header=None, nrows=1, dtype=str, keep_default_na=False)
        table = pa.Table.from_pandas(frame, preserve_index=False, nthreads=1)
        return table.rename_columns(header.iloc[0].tolist())  # pandas numbers names that stand twice
    except (ValueError, OSError) as error:  # of Arrow and pandas
        reason = str(error).split("\n", 1)[0]
        raise SettingsError(f"partition.path: {path} is neither Parquet nor CSV as its name says ({reason}).") from None
