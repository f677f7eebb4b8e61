"""Downloads files from their publishers or a mirror, and checks them before they are read."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
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
        Folder for complete downloads and for partial ones, which a later attempt resumes.
    timeout
        Seconds without new bytes after which an attempt fails.
    tries
        Consecutive attempts without new bytes after which an address is abandoned.
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
            _verify_checksum(path, f"sha256:{sha256}")
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
            return self._download_to_cache(self._get_mirror_url(name), checksum, path)
        except OSError as error:
            raise ArtifactError(
                f"dataset.mirror: {self._get_mirror_url(name)} can't be downloaded ({_describe_download_cause(error)})."
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
            _verify_checksum(mirror_file, file.checksum)
            return mirror_file
        from requests import RequestException

        mirror_urls = [self._get_mirror_url(file.name)] if self.mirror is not None and mirror_file is None else []
        *other_urls, last_url = [*mirror_urls, *file.urls]
        for url in other_urls:
            with suppress(RequestException, ArtifactError):  # a server may answer with another page
                return self._download_to_cache(url, file.checksum, self.cache / file.name)
        return self._download_to_cache(last_url, file.checksum, self.cache / file.name)

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

    def _download_to_cache(self, source_url: str, checksum: str | None, path: Path) -> Path:
        """Download the file unless it is cached. Without a checksum the cache is not used."""
        import pooch

        pooch.get_logger().setLevel(logging.WARNING)
        part_file = path.with_name(f"{path.name}.part")

        def download(url: str, output: str, _: Any) -> None:
            self._download_with_retries(url, part_file)
            part_file.replace(output)

        with lock_file(path.with_name(f"{path.name}.lock")):  # two jobs may download the same file
            for stale_file in (path, part_file) if checksum is None else ():
                stale_file.unlink(missing_ok=True)
            for is_resumed in (part_file.exists(), False):
                try:
                    pooch.retrieve(source_url, checksum, path.name, path.parent, downloader=download)
                    return path
                except ValueError as error:
                    if not is_resumed:
                        algorithm, _, digest = (checksum or "").partition(":")
                        raise ArtifactError(
                            f"{source_url}: the downloaded file is damaged or another one, because its {algorithm} is "
                            f"not {digest}. It was deleted. Get the file from another source."
                        ) from error
            raise AssertionError

    def _download_with_retries(self, url: str, part_file: Path) -> None:
        """Resume after the last attempt until the file is complete or no more bytes arrive."""
        import requests

        failures = 0
        while True:
            previous_size = _get_file_size(part_file)
            try:
                return self._attempt_download(url, part_file)
            except requests.RequestException as error:
                is_refused = error.response is not None and error.response.status_code < 500
                failures = 1 if _get_file_size(part_file) > previous_size else failures + 1
                if is_refused or failures >= self.tries:
                    raise
                time.sleep(self.pause * failures)

    def _attempt_download(self, url: str, part_file: Path) -> None:
        """Make one attempt, starting at the end of the partial file."""
        import requests
        from tqdm import tqdm

        offset = _get_file_size(part_file)
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
        with requests.get(url, stream=True, timeout=self.timeout, headers=headers) as response:
            if offset and response.status_code == requests.codes.requested_range_not_satisfiable:
                return  # complete: the checksum is checked next
            response.raise_for_status()
            offset = offset if response.status_code == requests.codes.partial_content else 0
            total = offset + int(response.headers.get("Content-Length", 0)) or None
            bar = tqdm(total=total, initial=offset, unit="B", unit_scale=True, desc=part_file.stem, disable=None)
            with part_file.open("ab" if offset else "wb") as stream, bar:
                for chunk in response.iter_content(1 << 16):
                    stream.write(chunk)
                    bar.update(len(chunk))

    def _format_download_error(
        self, missing_files: Sequence[PublishedFile], file: PublishedFile, error: OSError
    ) -> str:
        names = " and ".join(Path(file.name).name for file in missing_files)
        mirror_file = self._get_local_mirror_path(file.name)
        folder = (mirror_file or Path("FOLDER", file.name)).parent
        return (
            f"dataset.name: {Path(file.name).name} can't be downloaded from {urlsplit(file.urls[-1]).netloc} "
            f"({_describe_download_cause(error)}). On a machine with a network, get {names} from "
            f"{file.urls[0].rpartition('/')[0]}, and put {'it' if len(missing_files) == 1 else 'them'} into {folder}."
            + (f" Then set dataset.mirror or {MIRROR_VARIABLE} to FOLDER." if mirror_file is None else "")
        )


def _verify_checksum(path: Path, checksum: str) -> None:
    import pooch

    algorithm, _, digest = checksum.partition(":")
    actual_digest = pooch.file_hash(str(path), alg=algorithm)
    if actual_digest != digest:
        raise ArtifactError(
            f"{path} is damaged or another file: its {algorithm} is {actual_digest} instead of {digest}. Replace it."
        )


def _get_file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _describe_download_cause(error: OSError) -> str:
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
