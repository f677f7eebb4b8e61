"""A data set of Hugging Face's hub, or a folder in the format of its library."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fedpipe.core.errors import ArtifactError, SettingsError, format_error
from fedpipe.core.optional_libraries import import_optional_library
from fedpipe.core.storage.files import compute_file_sha256
from fedpipe.data.datasets.base import Samples, TableDataset
from fedpipe.data.sources.fetch import Fetcher
from fedpipe.data.sources.formats import INPUT_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa


COMMIT = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})/")  #: start of the library's URL of a file on the hub


@dataclass(frozen=True, kw_only=True)
class HuggingFace(TableDataset):
    """A data set of texts, images or numbers on Hugging Face's hub, fetched by the library ``datasets``.

    Install the library with ``pip install 'fedpipe[huggingface]'``. For example, FEMNIST with its writers:
    ``{name: huggingface, path: flwrlabs/femnist, input: image, label: character, client: writer_id}`` with
    ``partition: {scheme: natural}``. The folder ``studies/natural`` has more examples. The splits train and test are
    used, or the only one. Jobs read the samples that `fedpipe download` has stored, so they need neither the network
    nor the library. `fedpipe download` uses the library's environment variables, such as HF_HOME. With
    HF_HUB_OFFLINE=1, it reads the files in the hub's cache, if the study has ``revision`` and ``sha256``.

    Parameters
    ----------
    path
        Name of the repository, such as flwrlabs/femnist, or a folder of Parquet files, as ``Dataset.to_parquet`` writes
        them (not ``save_to_disk``).
    config
        Name of the configuration (also called subset), if the repository has several.
    revision
        Commit, tag or branch of the repository. With a commit, the files can't change. `fedpipe download` fills in the
        commit of main.
    input
        Column of texts or images, or a list of columns of numbers. By default text or image.
    label
        Column of the labels.
    client
        Column of the clients or domains for ``natural`` and ``by-domain``.
    tokens
        Tokens of a text: words (in lower case, as in IMDB) or characters.
    vocabulary
        Number of token ids.
    length
        Token ids per text.
    image_size
        Width and height of the images in pixels. They are cropped to squares and resized. By default, they must have
        one size.
    sha256
        SHA-256 of the list of the data files and their hashes. `fedpipe download` fills it in.
    """

    path: str
    config: str | None = None
    revision: str | None = None
    client: str | None = None

    @override
    def get_hashed_parameters(self) -> dict[str, Any]:
        """Omit the revision, because the SHA-256 pins the files, and a configuration that is not set.

        Raises
        ------
        SettingsError
            The SHA-256 is not declared.
        """
        if not self.sha256:
            raise SettingsError(
                f"dataset.sha256: missing for {self.path}. Run `fedpipe download` with this study, which fills it in."
            )
        omitted_names = {"revision"} if self.config else {"revision", "config"}
        return {name: value for name, value in super().get_hashed_parameters().items() if name not in omitted_names}

    @override
    def compute_unpinned_sha256(self, fetch: Fetcher) -> str | None:
        return None if self.sha256 else self._compute_sha256(self._fetch_files())

    def find_current_commit(self) -> str | None:
        """Find the commit of the hub that a study without a revision uses. None for a folder.

        Raises
        ------
        ArtifactError
            The repository can't be read.
        """
        urls = [url for split_urls in self._list_urls().values() for url in split_urls] if not self.revision else []
        commits = {match[1] for url in urls if (match := COMMIT.match(url))}
        return commits.pop() if len(commits) == 1 else None

    @override
    def load(self, fetch: Fetcher) -> Samples:
        if (actual_sha256 := self._compute_sha256(self._fetch_files())) != self.sha256:
            if self._find_cached_files():
                raise ArtifactError(
                    f"dataset.sha256: {self.sha256} is declared, but the hub's cache has other files of {self.path}, "
                    "or only some. Repeat this without HF_HUB_OFFLINE on a machine with a network, or copy its "
                    "results/data."
                )
            advice = (
                "Restore the declared files"
                if Path(self.path).exists()
                else "Set dataset.revision to the commit of the declared files"
            )
            raise ArtifactError(
                f"dataset.sha256: {self.sha256} is declared, but {self.path} has SHA-256 {actual_sha256}. {advice}, or "
                "set dataset.sha256 to the new value."
            )
        return self.make_samples(self._read_splits(), self.path)

    def _list_urls(self) -> dict[str, list[str]]:
        """List the addresses or paths of the data files by split."""
        builder = self._call_library(_import_datasets_library().load_dataset_builder)
        urls = {split: [str(url) for url in files] for split, files in (builder.config.data_files or {}).items()}
        if not urls:  # without the hub, the library reads tables that it has cached, of any commit
            raise ArtifactError(
                f"dataset.path: {self.path} can't be fetched, because the hub can't be reached. Repeat this on a "
                "machine with a network, or copy its results/data. To use the files in the hub's cache, set "
                "HF_HUB_OFFLINE=1, dataset.revision and dataset.sha256."
            )
        return urls

    def _fetch_files(self) -> dict[str, list[tuple[str, Path]]]:
        """Fetch the data files: name and local path by split."""
        urls = self._list_urls()
        try:
            local_files = _import_datasets_library().DownloadManager().download(urls)
        except Exception as error:  # any error of the network
            raise self._make_fetch_error(error) from error
        return {
            split: [(PurePosixPath(url).name, Path(file)) for url, file in zip(urls[split], paths, strict=True)]
            for split, paths in local_files.items()
        }

    def _compute_sha256(self, files: dict[str, list[tuple[str, Path]]]) -> str:
        lines = (
            f"{compute_file_sha256(path)}  {split}/{name}\n" for split in sorted(files) for name, path in files[split]
        )
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _read_splits(self) -> pa.Table:
        """Read the columns of the splits, with a column split."""
        import pyarrow as pa

        splits = self._call_library(_import_datasets_library().load_dataset)
        names = [name for name in ("train", "test") if name in splits] or [*splits]
        if len(splits) > 1 and "train" not in names:
            raise ArtifactError(
                f"dataset.path: {self.path} has the splits {', '.join(splits)}. Use a data set with train and test, or "
                "with one split."
            )
        tables = []
        for name in names:
            table = splits[name].data.table
            used_names = {self.label, self.client, *(self.input_columns or INPUT_COLUMNS)}
            table = table.select([column for column in table.column_names if column in used_names])
            table = _import_datasets_library().table.embed_table_storage(table)  # images in files, too
            split = "test" if name == "test" and len(names) > 1 else "train"
            tables.append(table.append_column("split", pa.array([split] * len(table))))
        columns = splits[names[0]].column_names
        inputs = self.input_columns or tuple(name for name in INPUT_COLUMNS if name in columns)
        if not inputs:
            raise ArtifactError(
                f"dataset.input: missing, because {self.path} has no column text or image. Use one of: "
                f"{', '.join(columns)}."
            )
        named_columns = [*(("input", name) for name in inputs), ("label", self.label), ("client", self.client)]
        for key, column in named_columns:
            if column is not None and column not in columns:
                raise ArtifactError(
                    f"dataset.{key}: '{column}' is not a column of {self.path}. Use one of: {', '.join(columns)}."
                )
        return pa.concat_tables(tables)

    def _call_library(self, function: Any) -> Any:
        """Call a function of the library for this repository or folder, or for its files in the hub's cache."""
        try:
            return function(self._find_cached_files() or self.path, self.config, revision=self.revision)
        except Exception as error:  # any error of the library or the network
            self._check_config()
            raise self._make_fetch_error(error) from error

    def _find_cached_files(self) -> str | None:
        """Find the folder with the declared files in the hub's cache, if HF_HUB_OFFLINE is set.

        None without a revision and SHA-256, because the cache may lack some of the files.
        """
        library = _import_datasets_library()
        if not (library.config.HF_HUB_OFFLINE and self.revision and self.sha256) or Path(self.path).exists():
            return None
        from huggingface_hub import snapshot_download

        with suppress(Exception):  # any error of the library, if the cache lacks the repository
            return snapshot_download(self.path, repo_type="dataset", revision=self.revision, local_files_only=True)
        return None

    def _check_config(self) -> None:
        """Require that the repository has the configuration, or only one."""
        names: list[str] = []
        with suppress(Exception):  # any error of the library or the network
            path = self._find_cached_files() or self.path
            names = _import_datasets_library().get_dataset_config_names(path, revision=self.revision)
        if names and (self.config not in names if self.config else len(names) > 1):
            found = f"'{self.config}' is not a configuration of" if self.config else "missing for"
            raise ArtifactError(f"dataset.config: {found} {self.path}. Use one of: {', '.join(names)}.")

    def _make_fetch_error(self, error: Exception) -> ArtifactError:
        advice = (
            "Use a folder of Parquet files, or dataset.name parquet for a single file."
            if Path(self.path).exists()
            else "Check its name and dataset.revision, and repeat this on a machine with a network, or use an existing "
            "folder."
        )
        return ArtifactError(f"dataset.path: {self.path} can't be fetched ({format_error(error)}). {advice}")


def _import_datasets_library() -> Any:
    return import_optional_library("datasets", "dataset.name", "huggingface")
