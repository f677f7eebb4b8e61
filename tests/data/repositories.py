"""Images, archives, and repositories in the format of Hugging Face's library, in the working directory."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from PIL import Image


def write_repository(columns: dict[str, Any], tests: int = 0, features: dict[str, Any] | None = None) -> None:
    """Write the folder `repository` with Parquet files, as the library uploads them."""
    import datasets

    for split, rows in (("train", slice(tests, None)), ("test", slice(0, tests))):
        if split == "train" or tests:
            part = {name: list(values)[rows] for name, values in columns.items()}
            table = datasets.Dataset.from_dict(part)
            for name, feature in (features or {}).items():
                table = table.cast_column(name, feature)
            Path("repository/data").mkdir(parents=True, exist_ok=True)
            table.to_parquet(f"repository/data/{split}-00000-of-00001.parquet")


def encode_image(pixels: npt.NDArray[Any], kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_image(path: str | Path, pixels: npt.NDArray[Any]) -> None:
    """Write a file with the image, in a folder that may be new."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(encode_image(pixels))


def encode_archive(contents: Mapping[str, bytes]) -> bytes:
    """Encode files with these paths as a compressed tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
