"""A user's images, one folder per class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from typing_extensions import override

from fedpipe.core.components import pinned_files
from fedpipe.core.errors import ArtifactError
from fedpipe.data.datasets.base import ImageSize, Samples, UserDataset


def _require_label_level(levels: tuple[str, ...]) -> tuple[str, ...]:
    if levels and (levels.count("label") != 1 or len({*levels}) < len(levels)):
        raise ValueError(f"[{', '.join(levels)}] can't be used. Use different names, of which one is label.")
    return levels


@dataclass(frozen=True, kw_only=True)
class Folder(UserDataset):
    """Your own images, in one folder per class, below train and test or directly.

    Images are gray if all of them are. Without the folders train and test there is no test set.

    For folders within folders, ``levels`` names each level from the top. One of them is ``label``, and ``split`` (train
    and test) is optional. Partition schemes can read the others: with ``levels: [domain, label]`` and images such as
    ``sketch/dog/1.png``, ``partition: {scheme: natural, column: domain}`` makes each domain a client.

    Parameters
    ----------
    path
        The folder.
    sha256
        SHA-256 of the list of its files and their hashes. `fedpipe download` fills it in.
    image_size
        Width and height of the images in pixels. They are cropped to squares and resized. By default, they must have
        one size.
    levels
        Names of the levels of folders, from the top. By default split and label, or label only.
    """

    image_size: ImageSize | None = None
    levels: Annotated[tuple[str, ...], AfterValidator(_require_label_level)] = ()

    @override
    def _compute_sha256(self) -> str:
        root = Path(self.path)
        if not root.is_dir():
            raise ArtifactError(f"dataset.path: {self.path} is missing. Use an existing folder.")
        return pinned_files.compute_content_sha256(root)

    @override
    def _read(self, path: Path) -> Samples:
        from fedpipe.data.sources.images import read_folder, read_nested_folders

        if self.levels:
            return read_nested_folders(path, self.levels, self.image_size)
        return read_folder(path, self.image_size)
