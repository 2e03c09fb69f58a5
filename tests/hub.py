"""A stand-in of the Hugging Face hub: a server on this machine with the models of a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """folder: holds OWNER/NAME/files. fetched: files that were asked for, with the first byte.

    sha: the commit of every branch now. asked: the revisions that files were asked for. drops: of a
    file, how many of its bytes are sent before the connection ends, once. failing: the files that
    are answered with an error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[tuple[str, int]] = []
        self.drops: dict[str, int] = {}
        self.failing: set[str] = set()
        self.gated = False
        self.sha, self.asked = SHA, []

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """GET or HEAD."""
        path = request.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            name = "/".join(path.split("/")[2:4])
            self._model(request, name)
            return
        name, _, file = path.partition("/resolve/")
        revision, _, file = file.partition("/")
        self.asked.append(revision)
        content = self.folder / name / file
        if not content.is_file():
            _send(request, 404, {"X-Error-Code": "EntryNotFound"}, b"{}")
            return
        self._file(request, file, content.read_bytes())

    def _model(self, request: BaseHTTPRequestHandler, name: str) -> None:
        folder = self.folder / name
        if not folder.is_dir():
            _send(request, 404, {"X-Error-Code": "RepoNotFound"}, b"{}")
            return
        if self.gated:
            _send(request, 403, {"X-Error-Code": "GatedRepo"}, b"{}")
            return
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        siblings = [
            {"rfilename": str(path.relative_to(folder)), "size": path.stat().st_size}
            for path in paths
        ]
        model = {"id": name, "sha": self.sha, "siblings": siblings, "tags": [], "downloads": 0}
        content = json.dumps(model | {"likes": 0, "private": False}).encode()
        _send(request, 200, {"Content-Type": "application/json"}, content)

    def _file(self, request: BaseHTTPRequestHandler, file: str, content: bytes) -> None:
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": self.sha, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if request.command == "HEAD":
            _send(request, 200, headers | {"Content-Length": str(len(content))}, b"")
            return
        first = int(request.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        self.fetched.append((file, first))
        if file in self.failing:
            _send(request, 500, {}, b"failing")
            return
        if file in self.drops:
            headers["Content-Length"] = str(len(content))
            _send(request, 200, headers, content[: self.drops.pop(file)])
            request.close_connection = True
            return
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        _send(request, 206 if first else 200, headers, content[first:])


def _send(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes
) -> None:
    request.send_response(status)
    for name, value in ({"Content-Length": str(len(content))} | headers).items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Hub, str]]:
    """A hub of the models in a folder, and its address."""
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
