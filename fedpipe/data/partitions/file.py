"""A user's table of samples and clients."""

from __future__ import annotations

import functools
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedpipe.core.components import pinned_files
from fedpipe.core.components.pinned_files import PinnedFile, Sha256
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files
from fedpipe.data.partitions.base import Integers, SampleClientPairs, Scheme

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class File(Scheme):
    """Each client owns the samples that your own table assigns to it.

    The table has a row for each pair of a sample and its client, with columns ``sample`` (index into the stored data
    set, from 0, so you can't use ``dataset.subset``) and ``client`` (0 to N-1). The table may omit samples.

    With a column ``split`` ("train", "validation" or "test") the table also assigns each sample to a split, like the
    ``assignment.parquet`` of any partition. Then ``dataset.split``, its fractions and ``seed`` have no effect, all
    seeds of the study have this partition, and the data set needs no official test set. A sample may have several
    clients, all in the same split. A test sample of client -1 is only in the global test set.

    Without that column the table partitions the training samples if ``dataset.split`` is official, and all samples
    if it is pooled. If it is official, a sample may have several clients.

    The file's SHA-256 is part of the run's key, but its path is not.

    Parameters
    ----------
    path
        A Parquet file (``.parquet``) or else a CSV file with a header, from the folder of params.yaml.
    sha256
        SHA-256 of the file. `fedpipe download` fills it in.
    """

    is_index_based: ClassVar[bool] = True

    path: str
    sha256: Sha256 | None = None

    @property
    @override
    def pinned_file(self) -> PinnedFile:
        return PinnedFile("path", Path(self.path), self.sha256)

    @property
    @override
    def has_fixed_splits(self) -> bool:
        return self._load_sample_owners().split is not None

    @override
    def get_hashed_parameters(self) -> dict[str, Any]:
        """Omit the seed if the table has fixed splits."""
        return {
            name: value
            for name, value in super().get_hashed_parameters().items()
            if name != "seed" or not self.has_fixed_splits
        }

    @property
    @override
    def has_validation(self) -> bool:
        """Whether the table has validation samples."""
        split = self._load_sample_owners().split
        return split is not None and bool((split == "validation").any())

    @override
    def check(self, num_clients: int, num_classes: int, num_samples: int) -> None:
        """Require the declared file and a training sample for every client."""
        pairs = self._load_sample_owners()
        if self.has_fixed_splits and pairs.sample.max(initial=0) >= num_samples:
            raise SettingsError(
                f"partition.path: sample {pairs.sample.max()} of {self.path} is not in the data set. Use 0 to "
                f"{num_samples - 1}."
            )
        train = np.ones(len(pairs.client), dtype=np.bool_) if pairs.split is None else pairs.split == "train"
        if len(pairs.client) and pairs.client.max() >= num_clients:
            raise SettingsError(
                f"federation.clients: {num_clients} can't be used with {self.path}, because it assigns samples to "
                "client "
                f"{pairs.client.max()}. Use {pairs.client.max() + 1}."
            )
        missing_clients = np.setdiff1d(np.arange(num_clients), pairs.client[train])
        if len(missing_clients):
            raise SettingsError(
                f"partition.path: {self.path} assigns no training sample to client {missing_clients[0]}. Assign at "
                f"least one to each of the {num_clients} clients."
            )
        if pairs.split is not None and not (pairs.split == "test").any():
            raise SettingsError(f"partition.path: {self.path} has no test sample. Add a row with split test.")

    @override
    def partition_samples(
        self, labels: Integers, samples: Integers, num_clients: int, rng: np.random.Generator
    ) -> SampleClientPairs:
        """Return the pairs of the table.

        Raises
        ------
        SettingsError
            The file's SHA-256 differs, or it contains samples that it must not assign.
        """
        pairs = self._load_sample_owners()
        invalid_samples = np.setdiff1d(pairs.sample, samples if pairs.split is None else np.arange(len(labels)))
        if len(invalid_samples):
            raise SettingsError(
                f"partition.path: sample {invalid_samples[0]} of {self.path} can't be assigned. Use 0 to "
                f"{len(labels) - 1}. If dataset.split is official and there is no column split, use only training "
                "samples."
            )
        return pairs

    def _load_sample_owners(self) -> SampleClientPairs:
        return _read_pairs_cached(self, pinned_files.compute_stat_fingerprint(Path(self.path)))

    def read_sample_client_pairs(self) -> SampleClientPairs:
        """Columns of the table after validation.

        Raises
        ------
        SettingsError
            The file's SHA-256 is not the declared one, or the file contains no table with these columns.
        """
        try:
            content = Path(self.path).read_bytes()
        except OSError as error:
            raise SettingsError(
                f"partition.path: {self.path} can't be read ({error.strerror}). Use an existing file."
            ) from None
        actual_sha256 = hashlib.sha256(content).hexdigest()
        if actual_sha256 != self.sha256:
            problem = (
                f"'{self.sha256}' is not the SHA-256 of {self.path}" if self.sha256 else f"missing for {self.path}"
            )
            raise SettingsError(f"partition.sha256: {problem}. If you mean this file, use {actual_sha256}.")
        return self._validate_table(_parse_table(content, self.path))

    def _validate_table(self, table: pa.Table) -> SampleClientPairs:
        if duplicates := [name for name in ("sample", "client", "split") if table.column_names.count(name) > 1]:
            raise SettingsError(
                f"partition.path: {self.path} has the column '{duplicates[0]}' more than once. Keep one of them."
            )
        sample, client = (self._read_integers(table, name) for name in ("sample", "client"))
        split = table["split"].to_numpy(zero_copy_only=False).astype(str) if "split" in table.column_names else None
        if split is not None and not np.isin(split, SPLITS).all():
            invalid_split = split[~np.isin(split, SPLITS)][0]
            raise SettingsError(
                f"partition.path: split '{invalid_split}' of {self.path} can't be used. Use {', '.join(SPLITS)}."
            )
        is_invalid_client = client < 0 if split is None else (client < 0) & ((client < -1) | (split != "test"))
        if is_invalid_client.any():
            raise SettingsError(
                f"partition.path: client {client[is_invalid_client][0]} of {self.path} can't be used. Use at least 0."
            )
        pairs = np.stack([sample, client])
        if len(np.unique(pairs, axis=1).T) < len(sample):
            raise SettingsError(
                f"partition.path: {self.path} lists a sample twice for one client. List each pair once."
            )
        if len(sample) and sample.min() < 0:
            raise SettingsError(f"partition.path: sample {sample.min()} of {self.path} can't be used. Use at least 0.")
        for name in ("test", "validation") if split is not None else ():
            if len(ambiguous_samples := np.intersect1d(sample[split == name], sample[split != name])):
                raise SettingsError(
                    f"partition.path: sample {ambiguous_samples[0]} of {self.path} is in split {name} and in another "
                    "split. Use one of them."
                )
        return SampleClientPairs(sample, client, split)

    def _read_integers(self, table: pa.Table, name: str) -> npt.NDArray[np.int64]:
        import pyarrow as pa

        if name not in table.column_names:
            raise SettingsError(
                f"partition.path: {self.path} has no column '{name}'. Use the columns sample, client and, optionally, "
                "split."
            )
        if table[name].null_count or not pa.types.is_integer(table[name].type):
            raise SettingsError(
                f"partition.path: column '{name}' of {self.path} has values that are not integers. Use integers."
            )
        return np.asarray(table[name].to_numpy(), dtype=np.int64)


@functools.lru_cache(maxsize=8)
def _read_pairs_cached(scheme: File, fingerprint: str) -> SampleClientPairs:
    """Columns of a scheme's file, cached until the file changes."""
    return scheme.read_sample_client_pairs()


def _parse_table(content: bytes, path: str) -> pa.Table:
    import pandas as pd
    import pyarrow as pa

    try:
        if path.endswith(".parquet"):
            return files.decode_parquet(io.BytesIO(content))
        frame = pd.read_csv(io.BytesIO(content), dtype_backend="pyarrow")
        if not isinstance(frame.index, pd.RangeIndex):  # rows are longer than the header
            raise ValueError("a row has more fields than the header")
        header = pd.read_csv(io.BytesIO(content), header=None, nrows=1, dtype=str, keep_default_na=False)
        table = pa.Table.from_pandas(frame, preserve_index=False, nthreads=1)
        return table.rename_columns(header.iloc[0].tolist())  # pandas renames duplicate columns
    except (ValueError, OSError) as error:  # of Arrow and pandas
        reason = str(error).split("\n", 1)[0]
        kind = "Parquet" if path.endswith(".parquet") else "CSV"
        raise SettingsError(
            f"partition.path: {path} can't be read as {kind} ({reason}). Use a Parquet file (.parquet), or a CSV file "
            "with a header."
        ) from None
