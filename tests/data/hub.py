"""A local server that replaces the Hugging Face hub for one repository of a data set."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote_plus

from typing_extensions import override

NAME, COMMIT = "org/data", "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_repository(folder: Path) -> Iterator[str]:
    """Serve a folder as the repository ``org/data``. All branches have one commit. Yields the hub's address."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    entries = [
        {"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
        for path, content in files.items()
    ]
    folders = {str(parent) for path in files for parent in Path(path).parents if parent.name}
    entries += [{"type": "directory", "path": folder, "oid": "", "size": 0} for folder in sorted(folders)]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            resource, _, rest = path.removeprefix(f"/api/datasets/{NAME}").lstrip("/").partition("/")
            _, _, name = path.removeprefix(f"/datasets/{NAME}/resolve/").partition("/")
            if path.startswith(f"/datasets/{NAME}/resolve/") and name in files:
                self.reply(files[name], {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'})
            elif path.startswith(f"/api/datasets/{NAME}") and resource in ("", "revision"):
                self.reply({"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]})
            elif path.startswith(f"/api/datasets/{NAME}/tree/"):
                base, is_deep = Path(rest.partition("/")[2]), "recursive=true" in self.path.lower()
                parents = {str(entry["path"]): Path(str(entry["path"])).parents for entry in entries}
                selected = {path for path, above in parents.items() if base in (above if is_deep else above[:1])}
                self.reply([entry for entry in entries if entry["path"] in selected])
            else:
                is_file = path.startswith(f"/datasets/{NAME}/")
                self.reply({}, {"X-Error-Code": "EntryNotFound" if is_file else "RepoNotFound"}, 404)

        do_HEAD = do_GET  # noqa: N815

        def do_POST(self) -> None:
            requested = unquote_plus(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.reply([entry for entry in entries if str(entry["path"]) in requested])

        def reply(self, content: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
            for key, value in {"X-Repo-Commit": COMMIT, "Content-Type": kind, **(headers or {})}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        @override
        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
