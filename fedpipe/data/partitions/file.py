"""The user's own assignment."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedpipe.data.partitions.base import Integers, Pairs, Scheme
from fedpipe.errors import SettingsError

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class File(Scheme):
    """Each client owns the samples that a table of one's own gives it.

    The table has a row for each pair of a sample and its client, with columns ``sample`` (index into the data set as
    it is stored, from 0) and ``client`` (0 to N-1). With ``dataset.split: official`` a sample may stand with several
    clients; with either split it may stand nowhere.

    Without a column ``split`` the table deals what any scheme deals: training samples if ``dataset.split`` is
    official, all samples if it is pooled. With it ("train", "validation" or "test") the table says what each sample
    is for, as the ``assignment.parquet`` of any partition does, and ``dataset.split`` and its shares do nothing; a
    test sample of client -1 is in the global test set alone.

    The file's SHA-256 is part of the run's key: another file is another run.

    Parameters
    ----------
    path
        A Parquet file (``.parquet``) or else a CSV file with a header, from the folder of params.yaml.
    sha256
        SHA-256 of the file's bytes; where it is missing or wrong, the error says what to write.
    """

    path: str
    sha256: str = ""

    @property
    def validates(self) -> bool:
        """Whether some samples of the table are for validation."""
        split = self._read().split
        return split is not None and bool((split == "validation").any())

    def check(self, clients: int, classes: int, samples: int) -> None:
        """The file has to be the one that is meant, and give every client a training sample."""
        dealt = self._read()
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
        """The table's columns, each row a pair that can be."""
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
                f"partition.path: {self.path} has a sample twice with one client; it should stand once."
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


def _parsed(content: bytes, path: str) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        if path.endswith(".parquet"):
            return parquet.read_table(io.BytesIO(content))
        return csv.read_csv(io.BytesIO(content))
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise SettingsError(f"partition.path: {path} is neither Parquet nor CSV as its name says ({reason}).") from None
