"""Downloads files from their publishers or a mirror, and checks them before they are read."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage.files import compute_file_sha256
from fedpipe.core.storage.locks import lock_file

MIRROR_VARIABLE = "FEDPIPE_MIRROR"  #: mirror to use if params.yaml has no `dataset.mirror`


class PublishedFile(NamedTuple):
    """A published file."""

    name: str  #: path below a mirror, such as "mnist/t10k-labels-idx1-ubyte.gz"
    checksum: str  #: published checksum with its kind: "md5:..." or "sha256:..."
    urls: tuple[str, ...]  #: addresses, tried in this order


def get_cache_folder() -> Path:
    """Folder for the user's downloads."""
    import pooch

    return Path(pooch.os_cache("fedpipe"))


@dataclass(frozen=True)
class Fetcher:
    """Gets files from a mirror, the cache, or their published addresses, in this order.

    Parameters
    ----------
    mirror
        A folder or a base address (http, https or file).
    cache
        Folder for downloads.
    timeout
        Seconds without new bytes after which an attempt fails.
    tries
        Attempts after which an address is abandoned.
    pause
        Seconds between attempts, which increase with each attempt.
    """

    mirror: str | None = None
    cache: Path = field(default_factory=get_cache_folder)
    timeout: float = 60.0
    tries: int = 3
    pause: float = 1.0

    def fetch(self, files: Sequence[PublishedFile]) -> list[Path]:
        """Local paths of these files, whose checksums are checked.

        Raises
        ------
        ArtifactError
            A file differs from its checksum or can't be downloaded. The message has the path for a manual download.
        """
        paths: list[Path] = []
        for file in files:
            try:
                paths.append(self._fetch_file(file))
            except OSError as error:  # includes errors of requests
                missing_files = [other for other in files[len(paths) :] if not self.has_file(other.name)]
                raise ArtifactError(self._format_download_error(missing_files, file, error)) from error
        return paths

    def fetch_mirror_file(self, name: str, sha256: str) -> Path:
        """Local path of the mirror's file with this SHA-256.

        Raises
        ------
        ArtifactError
            There is no mirror, or its file is missing or differs.
        """
        cached_file = self.cache / sha256[:12] / name
        if cached_file.is_file() and compute_file_sha256(cached_file) == sha256:
            return cached_file
        if self.mirror is None:
            raise ArtifactError(
                f"dataset.sha256: {sha256} belongs to {name} of a mirror, but no mirror is set. Set dataset.mirror or "
                f"{MIRROR_VARIABLE} to the mirror, or remove dataset.sha256 to use the published files."
            )
        if (path := self._get_local_mirror_path(name)) is not None:
            if not path.is_file():
                raise ArtifactError(f"{path} is missing. Put the file with SHA-256 {sha256} there.")
            _verify_checksum(path, f"sha256:{sha256}", str(path))
            return path
        return self._download_from_mirror(name, f"sha256:{sha256}", cached_file)

    def fetch_unpinned(self, name: str) -> Path | None:
        """Local path of the mirror's file with that name, without a check. None if the mirror has none."""
        if self.mirror is None or not self.has_file(name):
            return None
        if (path := self._get_local_mirror_path(name)) is not None:
            return path
        return self._download_from_mirror(name, None, self.cache / "undeclared" / name)

    def _download_from_mirror(self, name: str, checksum: str | None, path: Path) -> Path:
        try:
            return self._download(self._get_mirror_url(name), checksum, path)
        except OSError as error:
            raise ArtifactError(
                f"dataset.mirror: {self._get_mirror_url(name)} can't be downloaded ({_describe_download_error(error)})."
            ) from error

    def has_file(self, name: str) -> bool:
        """Whether the mirror has a file with that name."""
        if self.mirror is None:
            return False
        if (path := self._get_local_mirror_path(name)) is not None:
            return path.is_file()
        import requests

        try:
            return requests.head(self._get_mirror_url(name), timeout=self.timeout, allow_redirects=True).ok
        except requests.RequestException:
            return False

    @property
    def is_mirror_local(self) -> bool:
        """Whether the mirror can be read without a network."""
        return self.mirror is None or self._get_local_mirror_path("") is not None

    def _fetch_file(self, file: PublishedFile) -> Path:
        mirror_file = self._get_local_mirror_path(file.name)
        if mirror_file is not None and mirror_file.is_file():
            _verify_checksum(mirror_file, file.checksum, str(mirror_file))
            return mirror_file
        from requests import RequestException

        mirror_urls = [self._get_mirror_url(file.name)] if self.mirror is not None and mirror_file is None else []
        urls = [*mirror_urls, *file.urls]
        for url in urls:
            try:
                return self._download(url, file.checksum, self.cache / file.name)
            except (RequestException, ArtifactError):  # a server may answer with another page
                if url == urls[-1]:
                    raise
        raise AssertionError

    def _get_local_mirror_path(self, name: str) -> Path | None:
        """Path of the file in a mirror that is a folder."""
        if self.mirror is None:
            return None
        url = urlsplit(self.mirror)
        if url.scheme == "file":
            return Path(url2pathname(url.path)) / name
        return None if url.scheme in {"http", "https"} else Path(self.mirror).expanduser() / name

    def _get_mirror_url(self, name: str) -> str:
        return f"{(self.mirror or '').rstrip('/')}/{name}"

    def _download(self, source_url: str, checksum: str | None, path: Path) -> Path:
        """Download the file unless it is cached. Without a checksum the cache is not used."""
        import pooch
        import requests

        pooch.get_logger().setLevel(logging.WARNING)
        downloader = pooch.HTTPDownloader(
            progressbar=sys.stderr.isatty(),
            chunk_size=1 << 16,
            timeout=self.timeout,
            headers={"Accept-Encoding": "identity"},
        )
        with lock_file(path.with_name(f"{path.name}.lock")):  # two jobs may download the same file
            if checksum is None:
                path.unlink(missing_ok=True)
            for attempt in range(1, self.tries + 1):
                try:
                    pooch.retrieve(source_url, checksum, path.name, path.parent, downloader=downloader)
                    return path
                except requests.RequestException as error:
                    is_refused = error.response is not None and error.response.status_code < 500
                    if is_refused or attempt == self.tries:
                        raise
                    time.sleep(self.pause * attempt)
                except ValueError as error:
                    algorithm, _, digest = (checksum or "").partition(":")
                    raise ArtifactError(
                        f"{source_url}: the downloaded file is damaged or another one, because its {algorithm} is "
                        f"not {digest}. It was deleted. Get the file from another source."
                    ) from error
        raise AssertionError

    def _format_download_error(
        self, missing_files: Sequence[PublishedFile], file: PublishedFile, error: OSError
    ) -> str:
        has_local_mirror = self.mirror is not None and self.is_mirror_local
        names = " and ".join(Path(file.name).name for file in missing_files)
        folder = (
            Path(self.mirror if self.mirror is not None and has_local_mirror else "FOLDER") / Path(file.name).parent
        )
        return (
            f"dataset.name: {Path(file.name).name} can't be downloaded from {urlsplit(file.urls[-1]).netloc} "
            f"({_describe_download_error(error)}). On a machine with a network, get {names} from "
            f"{file.urls[0].rpartition('/')[0]}, and put {'it' if len(missing_files) == 1 else 'them'} into {folder}."
            + (f" Then set dataset.mirror or {MIRROR_VARIABLE} to FOLDER." if not has_local_mirror else "")
        )


def _verify_checksum(path: Path, checksum: str, path_text: str) -> None:
    import pooch

    algorithm, _, digest = checksum.partition(":")
    actual_digest = pooch.file_hash(str(path), alg=algorithm)
    if actual_digest != digest:
        raise ArtifactError(
            f"{path_text} is damaged or another file: its {algorithm} is {actual_digest} instead of {digest}. Replace "
            "it."
        )


def _describe_download_error(error: OSError) -> str:
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout) or "timed out" in str(error):
        return "the server does not answer"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return " ".join(str(error).split())
