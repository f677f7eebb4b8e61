"""Getting files from where they are published, or from a mirror; what arrives is checked before anybody reads it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fedpipe import artifacts
from fedpipe.errors import ArtifactError

ENVIRONMENT = "FEDPIPE_MIRROR"  #: names a mirror where `dataset.mirror` does not


class File(NamedTuple):
    """A file as it is published."""

    name: str  #: where it lies below a mirror, as "mnist/t10k-labels-idx1-ubyte.gz"
    checksum: str  #: as published, with its kind: "md5:..." or "sha256:..."
    addresses: tuple[str, ...]  #: where it is published, tried in this order


def user_cache() -> Path:
    """The folder of this user in which downloads are kept."""
    import pooch

    return Path(pooch.os_cache("fedpipe"))


@dataclass(frozen=True)
class Fetcher:
    """Finds files in a mirror, in the cache, or at their published addresses, in this order.

    Parameters
    ----------
    mirror
        A folder or a base address (http, https or file).
    cache
        Where downloads are kept, whole ones and parts of them that a later attempt resumes.
    timeout
        Seconds without a byte after which an attempt is given up.
    tries
        Attempts in a row that bring nothing new until an address is given up.
    pause
        Seconds between attempts, more after each.
    """

    mirror: str | None = None
    cache: Path = field(default_factory=user_cache)
    timeout: float = 60.0
    tries: int = 3
    pause: float = 1.0

    def fetch(self, files: Sequence[File]) -> list[Path]:
        """Where these files lie on this machine, each with its published checksum.

        Raises
        ------
        ArtifactError
            A file is not what its checksum says, or could not be fetched; the sentence says where to put it.
        """
        found: list[Path] = []
        for file in files:
            try:
                found.append(self._fetch(file))
            except OSError as error:  # of requests, too
                missing = [file for file in files[len(found) :] if not self.holds(file.name)]
                raise ArtifactError(self._advice(missing, file, error)) from error
        return found

    def declared(self, name: str, sha256: str) -> Path:
        """Where the mirror's file with this SHA-256 lies on this machine.

        Raises
        ------
        ArtifactError
            There is no mirror, or its file is missing or another one.
        """
        cached = self.cache / sha256[:12] / name
        if cached.is_file() and artifacts.sha256_of(cached) == sha256:
            return cached
        if self.mirror is None:
            raise ArtifactError(
                f"dataset.sha256: it names a mirror's {name}, but no mirror is named; set dataset.mirror or "
                f"{ENVIRONMENT} to where {name} lies, or remove it to take the original."
            )
        if (path := self._local(name)) is not None:
            if not path.is_file():
                raise ArtifactError(f"{path} is missing; put the file with SHA-256 {sha256} there.")
            _check(path, f"sha256:{sha256}", str(path))
            return path
        try:
            return self._download(self._address(name), f"sha256:{sha256}", cached)
        except OSError as error:
            raise ArtifactError(
                f"dataset.mirror: {self._address(name)} could not be fetched ({_reason(error)})."
            ) from error

    def undeclared(self, name: str) -> Path | None:
        """The mirror's file of that name, whatever is in it, on this machine; None if the mirror has none."""
        if self.mirror is None or not self.holds(name):
            return None
        if (path := self._local(name)) is not None:
            return path
        try:
            return self._download(self._address(name), None, self.cache / "undeclared" / name)
        except OSError as error:
            raise ArtifactError(
                f"dataset.mirror: {self._address(name)} could not be fetched ({_reason(error)})."
            ) from error

    def holds(self, name: str) -> bool:
        """Whether the mirror has a file of that name."""
        if self.mirror is None:
            return False
        if (path := self._local(name)) is not None:
            return path.is_file()
        import requests

        try:
            return requests.head(self._address(name), timeout=self.timeout, allow_redirects=True).ok
        except requests.RequestException:
            return False

    @property
    def is_local(self) -> bool:
        """Whether looking into the mirror needs no network."""
        return self.mirror is None or self._local("") is not None

    def _fetch(self, file: File) -> Path:
        local = self._local(file.name)
        if local is not None and local.is_file():
            _check(local, file.checksum, str(local))
            return local
        from requests import RequestException

        cached = self.cache / file.name
        addresses = [self._address(file.name)] if self.mirror is not None and local is None else []
        for address in (addresses := [*addresses, *file.addresses]):
            try:
                return self._download(address, file.checksum, cached)
            except RequestException:
                if address == addresses[-1]:
                    raise
        raise AssertionError

    def _local(self, name: str) -> Path | None:
        """The file's path in a mirror that is a folder."""
        if self.mirror is None:
            return None
        parts = urlsplit(self.mirror)
        if parts.scheme == "file":
            return Path(url2pathname(parts.path)) / name
        return None if parts.scheme in {"http", "https"} else Path(self.mirror).expanduser() / name

    def _address(self, name: str) -> str:
        return f"{(self.mirror or '').rstrip('/')}/{name}"

    def _download(self, address: str, checksum: str | None, path: Path) -> Path:
        """The file from that address, unless the cache has it; without a checksum nothing in the cache is trusted."""
        import pooch
        from filelock import FileLock

        pooch.get_logger().setLevel(logging.WARNING)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")

        def download(url: str, output: str, _: Any) -> None:
            self._persist(url, part)
            part.replace(output)

        with FileLock(f"{path}.lock"):  # two jobs may want the same file
            for old in (path, part) if checksum is None else ():
                old.unlink(missing_ok=True)
            for resumed in (part.exists(), False):
                try:
                    pooch.retrieve(address, checksum, path.name, path.parent, downloader=download)
                    return path
                except ValueError as error:
                    if not resumed:
                        raise ArtifactError(
                            f"{address}: what it serves is damaged or another file, since its {_kind(checksum)} should "
                            f"be {_value(checksum)}; it was deleted, and the file is needed from elsewhere."
                        ) from error
            raise AssertionError

    def _persist(self, address: str, part: Path) -> None:
        """Go on where the last attempt broke off, until the file is whole or nothing new arrives any more."""
        import requests

        failures = 0
        while True:
            before = _size(part)
            try:
                return self._resume(address, part)
            except requests.RequestException as error:
                refused = error.response is not None and error.response.status_code < 500
                failures = 1 if _size(part) > before else failures + 1
                if refused or failures >= self.tries:
                    raise
                time.sleep(self.pause * failures)

    def _resume(self, address: str, part: Path) -> None:
        """One attempt, from the byte at which the part ends."""
        import requests
        from tqdm import tqdm

        have = _size(part)
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(address, stream=True, timeout=self.timeout, headers=headers) as response:
            if have and response.status_code == requests.codes.requested_range_not_satisfiable:
                return  # nothing is missing; whether it is the right file, its checksum tells
            response.raise_for_status()
            have = have if response.status_code == requests.codes.partial_content else 0
            total = have + int(response.headers.get("Content-Length", 0)) or None
            bar = tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=part.stem, disable=None)
            with part.open("ab" if have else "wb") as stream, bar:
                for chunk in response.iter_content(1 << 16):
                    stream.write(chunk)
                    bar.update(len(chunk))

    def _advice(self, missing: Sequence[File], file: File, error: OSError) -> str:
        local = self.mirror is not None and self.is_local
        names = " and ".join(Path(file.name).name for file in missing)
        place = Path(self.mirror if self.mirror is not None and local else "FOLDER") / Path(file.name).parent
        return (
            f"dataset.name: {Path(file.name).name} can't be downloaded from {urlsplit(file.addresses[-1]).netloc} "
            f"({_reason(error)}); where there is a network, get {names} from {file.addresses[0].rpartition('/')[0]}, "
            f"and put {'it' if len(missing) == 1 else 'them'} into {place}"
            + (f"; then set dataset.mirror or {ENVIRONMENT} to FOLDER." if not local else ".")
        )


def _check(path: Path, checksum: str, shown: str) -> None:
    import pooch

    found = pooch.file_hash(str(path), alg=_kind(checksum))
    if found != _value(checksum):
        raise ArtifactError(
            f"{shown} is damaged or another file: its {_kind(checksum)} is {found} and should be {_value(checksum)}; "
            f"replace it."
        )


def _kind(checksum: str | None) -> str:
    return (checksum or "").partition(":")[0]


def _value(checksum: str | None) -> str:
    return (checksum or "").partition(":")[2]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _reason(error: OSError) -> str:
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"it answers {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout) or "timed out" in str(error):
        return "it does not answer"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "it breaks off"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return " ".join(str(error).split())
