"""A user's images, one folder per class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from fedpipe.core.components import pinned_files
from fedpipe.core.errors import ArtifactError
from fedpipe.data.datasets.base import Samples, UserDataset


@dataclass(frozen=True, kw_only=True)
class Folder(UserDataset):
    """Your own images, all of one size, in one folder per class, below train and test or directly.

    Images are gray if all of them are. Without the folders train and test there is no test set.

    Parameters
    ----------
    path
        The folder.
    sha256
        SHA-256 of the list of its files and their hashes. `fedpipe download` fills it in.
    """

    @override
    def _compute_sha256(self) -> str:
        root = Path(self.path)
        if not root.is_dir():
            raise ArtifactError(f"dataset.path: {self.path} is missing. Use an existing folder.")
        return pinned_files.compute_content_sha256(root)

    @override
    def _read(self, path: Path) -> Samples:
        from fedpipe.data.sources.formats import read_folder

        return read_folder(path)
