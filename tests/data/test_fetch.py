"""Files from mirrors, the cache, and HTTP servers with and without faults."""

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedpipe.core.errors import ArtifactError
from fedpipe.data.sources.fetch import Fetcher, PublishedFile
from tests.errors import rejects
from tests.models import published

WHOLE = bytes(range(256)) * 1024  # 256 KiB
MD5, SHA256 = hashlib.md5(WHOLE).hexdigest(), hashlib.sha256(WHOLE).hexdigest()
NAME = "some/file.gz"
NO_SERVER = "http://127.0.0.1:9"  # port of the discard protocol, on which no server listens
MakeFetcher = Callable[..., Fetcher]


@dataclass
class Server:
    """A server of one file. ``answers`` contains its behavior for the first requests. Later requests succeed."""

    address: str
    content: bytes = WHOLE
    answers: list[str] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)  #: the header Range of each request
    paths: list[str] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)

    @property
    def file(self) -> PublishedFile:
        return PublishedFile(NAME, f"md5:{MD5}", (f"{self.address}/upstream/file.gz",))


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404 if "absent" in state.answers else 200)
            self.end_headers()

        def do_GET(self) -> None:
            answer = state.answers.pop(0) if state.answers else "well"
            byte_range = self.headers["Range"]
            state.ranges.append(byte_range)
            state.paths.append(self.path)
            if answer.isdigit():
                self.send_error(int(answer))
                return
            start = (
                int(byte_range.removeprefix("bytes=").rstrip("-")) if byte_range and answer != "from the start" else 0
            )
            if start >= len(state.content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(state.content) - start))
            self.end_headers()
            body = state.content[start:]
            self.wfile.write(body[: len(body) // 2] if answer in {"breaks off", "stalls"} else body)
            if answer == "stalls":
                self.wfile.flush()
                state.has_ended.wait(10)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http_server.daemon_threads = True
    state = Server(f"http://127.0.0.1:{http_server.server_port}")
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    state.has_ended.set()
    http_server.shutdown()
    thread.join()
    http_server.server_close()


@pytest.fixture
def make_fetcher(tmp_path: Path) -> MakeFetcher:
    return lambda mirror=None: Fetcher(mirror=mirror, cache=tmp_path / "cache", timeout=0.3, tries=2, pause=0)


def list_cached_files(tmp_path: Path) -> list[str]:
    """List the files in the cache, except locks."""
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock")


def write_partial_file(path: Path, content: bytes) -> None:
    """Write the first bytes of a download, or those of another file."""
    path.parent.mkdir(parents=True)
    path.with_name(f"{path.name}.part").write_bytes(content)


# -- servers -----------------------------------------------------------------------------------------------------------


def test_fetcher_downloads_file_once(server: Server, make_fetcher: MakeFetcher, tmp_path: Path) -> None:
    (path,) = make_fetcher().fetch([server.file])
    assert path.read_bytes() == WHOLE
    assert path == tmp_path / "cache" / NAME
    assert make_fetcher().fetch([server.file]) == [path]
    assert server.ranges == [None]


def test_fetcher_shows_progress_in_terminal(
    server: Server, make_fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    (path,) = make_fetcher().fetch([server.file])
    assert path.read_bytes() == WHOLE
    assert "file.gz: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "ranges"),
    [
        (["breaks off", "breaks off"], [None, f"bytes={len(WHOLE) // 2}-", f"bytes={len(WHOLE) * 3 // 4}-"]),
        (["stalls", "stalls"], [None, f"bytes={len(WHOLE) // 2}-", f"bytes={len(WHOLE) * 3 // 4}-"]),
        (["breaks off", "from the start"], [None, f"bytes={len(WHOLE) // 2}-"]),
        (["503"], [None, None]),
    ],
)
def test_fetcher_resumes_interrupted_download(
    server: Server, make_fetcher: MakeFetcher, answers: list[str], ranges: list[str | None]
) -> None:
    server.answers = answers.copy()
    (path,) = make_fetcher().fetch([server.file])
    assert path.read_bytes() == WHOLE
    assert server.ranges == ranges


@pytest.mark.parametrize("part", [WHOLE[:1000], b"of another file", WHOLE + b"too much", b"x" * len(WHOLE)])
def test_fetcher_resumes_partial_file_of_other_process_or_discards_it(
    server: Server, make_fetcher: MakeFetcher, tmp_path: Path, part: bytes
) -> None:
    write_partial_file(tmp_path / "cache" / NAME, part)
    assert make_fetcher().fetch([server.file])[0].read_bytes() == WHOLE
    assert server.ranges == [f"bytes={len(part)}-", *([] if WHOLE.startswith(part) else [None])]
    assert list_cached_files(tmp_path) == ["file.gz"]


@pytest.mark.parametrize(
    "content", [WHOLE[:-1] + b"x", WHOLE[:-1], b"<html>moved</html>"], ids=["tampered", "truncated", "page"]
)
def test_fetcher_rejects_and_deletes_file_with_wrong_checksum(
    server: Server, make_fetcher: MakeFetcher, tmp_path: Path, content: bytes
) -> None:
    server.content = content
    with rejects(f"{server.address}/upstream/file.gz: ... md5 is not {MD5}", ArtifactError):
        make_fetcher().fetch([server.file])
    assert list_cached_files(tmp_path) == []


def test_fetcher_tries_next_server_after_wrong_file(server: Server, make_fetcher: MakeFetcher, tmp_path: Path) -> None:
    """The first server answers each request with its login page."""
    (tmp_path / "page").mkdir()
    (tmp_path / "page/file.gz").write_bytes(b"<html>sign in</html>")
    with published.serve(tmp_path / "page") as address:
        (path,) = make_fetcher().fetch([server.file._replace(urls=(f"{address}/file.gz", *server.file.urls))])
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (["404"], "the server answered 404 Not Found"),
        (["503", "503"], "the server answered 503 Service Unavailable"),
        (["stalls", "stalls"], "the server does not answer"),
    ],
)
def test_fetcher_error_shows_reason_of_failed_download(
    server: Server, make_fetcher: MakeFetcher, answers: list[str], reason: str
) -> None:
    server.content = b"x"  # a stalling server sends half of it, which is no byte
    server.answers = answers.copy()
    with rejects(f"dataset.name: ... ({reason})", ArtifactError):
        make_fetcher().fetch([server.file])
    assert len(server.ranges) == len(answers)


def test_fetcher_tries_next_url(server: Server, make_fetcher: MakeFetcher) -> None:
    file = server.file._replace(urls=(f"{NO_SERVER}/file.gz", *server.file.urls))
    assert make_fetcher().fetch([file])[0].read_bytes() == WHOLE


def test_offline_error_shows_missing_files_and_mirror_folder(make_fetcher: MakeFetcher) -> None:
    files = [
        PublishedFile(f"mnist/{name}", f"md5:{MD5}", (f"{NO_SERVER}/{name}",)) for name in ("images.gz", "labels.gz")
    ]
    with pytest.raises(ArtifactError) as error:
        make_fetcher().fetch(files)
    message = str(error.value)
    assert message.startswith("dataset.name: images.gz can't be downloaded from 127.0.0.1:9 (no connection).")
    assert "images.gz and labels.gz from http://127.0.0.1:9" in message
    assert "into FOLDER/mnist" in message
    assert "FEDPIPE_MIRROR" in message


# -- mirrors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    folder = tmp_path / "mirror"
    (folder / NAME).parent.mkdir(parents=True)
    (folder / NAME).write_bytes(WHOLE)
    (folder / "own.npz").write_bytes(WHOLE)
    return folder


@pytest.mark.parametrize("format_path", [str, lambda path: path.as_uri()], ids=["path", "file"])
def test_fetcher_reads_mirror_folder_before_server(
    server: Server, make_fetcher: MakeFetcher, mirror: Path, format_path: Callable[[Path], str]
) -> None:
    assert make_fetcher(format_path(mirror)).fetch([server.file]) == [mirror / NAME]
    assert server.ranges == []


def test_fetcher_downloads_files_missing_from_mirror_folder(
    server: Server, make_fetcher: MakeFetcher, mirror: Path
) -> None:
    (mirror / NAME).unlink()
    assert make_fetcher(str(mirror)).fetch([server.file])[0].read_bytes() == WHOLE


@pytest.mark.parametrize("content", [WHOLE[:-1], WHOLE[:-1] + b"x"], ids=["truncated", "tampered"])
def test_fetcher_rejects_damaged_file_in_mirror_folder(
    server: Server, make_fetcher: MakeFetcher, mirror: Path, content: bytes
) -> None:
    (mirror / NAME).write_bytes(content)
    md5 = hashlib.md5(content).hexdigest()
    with rejects(f"{mirror / NAME} is damaged ... md5 is {md5} instead of {MD5}", ArtifactError):
        make_fetcher(str(mirror)).fetch([server.file])
    assert server.ranges == []


def test_offline_error_shows_configured_mirror_folder(make_fetcher: MakeFetcher, mirror: Path) -> None:
    file = PublishedFile("mnist/images.gz", f"md5:{MD5}", (f"{NO_SERVER}/images.gz",))
    with pytest.raises(ArtifactError, match=rf"images\.gz from {NO_SERVER}, .* {mirror}/mnist\.$"):
        make_fetcher(str(mirror)).fetch([file])


def test_fetcher_tries_mirror_url_before_published_url(server: Server, make_fetcher: MakeFetcher) -> None:
    fetch = make_fetcher(f"{server.address}/mirror/")
    assert fetch.fetch([server.file])[0].read_bytes() == WHOLE
    server.answers = ["404"]
    assert fetch.fetch([server.file._replace(name="some/other.gz")])[0].read_bytes() == WHOLE
    assert server.paths == ["/mirror/some/file.gz", "/mirror/some/other.gz", "/upstream/file.gz"]


def test_fetcher_replaces_damaged_file_in_cache(server: Server, make_fetcher: MakeFetcher, tmp_path: Path) -> None:
    (path,) = make_fetcher().fetch([server.file])
    path.write_bytes(b"damaged")
    assert make_fetcher().fetch([server.file])[0].read_bytes() == WHOLE
    assert len(server.ranges) == 2


# -- files that params.yaml declares -----------------------------------------------------------------------------------


def test_pinned_and_unpinned_files_come_from_mirror_folder(make_fetcher: MakeFetcher, mirror: Path) -> None:
    assert make_fetcher(str(mirror)).fetch_unpinned("own.npz") == mirror / "own.npz"
    assert make_fetcher(str(mirror)).fetch_unpinned("other.npz") is None
    assert make_fetcher().fetch_unpinned("own.npz") is None
    assert make_fetcher(str(mirror)).fetch_mirror_file("own.npz", SHA256) == mirror / "own.npz"
    (mirror / "own.npz").write_bytes(WHOLE + b"x")
    with pytest.raises(ArtifactError, match=r"own\.npz is damaged .* sha256 is"):
        make_fetcher(str(mirror)).fetch_mirror_file("own.npz", SHA256)
    with pytest.raises(ArtifactError, match=rf"other\.npz is missing.* {SHA256} "):
        make_fetcher(str(mirror)).fetch_mirror_file("other.npz", SHA256)


def test_fetcher_downloads_pinned_file_once(server: Server, make_fetcher: MakeFetcher) -> None:
    fetch = make_fetcher(server.address)
    path = fetch.fetch_unpinned("own.npz")
    assert path.read_bytes() == WHOLE
    path = fetch.fetch_mirror_file("own.npz", SHA256)
    assert path.read_bytes() == WHOLE
    assert make_fetcher(NO_SERVER).fetch_mirror_file("own.npz", SHA256) == path
    assert make_fetcher().fetch_mirror_file("own.npz", SHA256) == path
    assert server.paths == ["/own.npz", "/own.npz"]
    path.write_bytes(WHOLE + b"x")
    assert make_fetcher(server.address).fetch_mirror_file("own.npz", SHA256).read_bytes() == WHOLE
    path.write_bytes(WHOLE + b"x")
    with rejects("dataset.sha256: ", ArtifactError):
        make_fetcher().fetch_mirror_file("own.npz", SHA256)


def test_fetcher_downloads_unpinned_file_each_time(server: Server, make_fetcher: MakeFetcher) -> None:
    make_fetcher(server.address).fetch_unpinned("own.npz")
    server.content = b"another"
    path = make_fetcher(server.address).fetch_unpinned("own.npz")
    assert path.read_bytes() == b"another"


def test_fetcher_discards_partial_file_of_unpinned_file(
    server: Server, make_fetcher: MakeFetcher, tmp_path: Path
) -> None:
    write_partial_file(tmp_path / "cache" / "undeclared" / "own.npz", b"of another file")
    path = make_fetcher(server.address).fetch_unpinned("own.npz")
    assert path.read_bytes() == WHOLE
    assert server.ranges == [None]


def test_fetcher_returns_none_if_mirror_lacks_unpinned_file(server: Server, make_fetcher: MakeFetcher) -> None:
    server.answers = ["absent"]
    assert make_fetcher(server.address).fetch_unpinned("own.npz") is None


def test_pinned_file_needs_mirror(make_fetcher: MakeFetcher) -> None:
    with rejects(f"dataset.sha256: {SHA256} ... own.npz of a mirror, but no mirror is set", ArtifactError):
        make_fetcher().fetch_mirror_file("own.npz", SHA256)


def test_unreachable_mirror_error_shows_url(make_fetcher: MakeFetcher) -> None:
    with pytest.raises(ArtifactError, match=rf"^dataset\.mirror: {NO_SERVER}/own\.npz .*\(no connection\)"):
        make_fetcher(NO_SERVER).fetch_mirror_file("own.npz", SHA256)
