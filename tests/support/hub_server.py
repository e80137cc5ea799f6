"""A model hub on this machine: the part of the hub's protocol that fetching a model needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class FakeHub:
    """What the hub has and does. Requests are noted as `METHOD file`, with the range that was asked for, if any.

    `files` are those of the model `name`; with a `token`, only who sends it gets them. `gated` models also ask for an
    agreement. `cut` maps files to the bytes after which they end, once.
    """

    name: str
    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    @classmethod
    def of(cls, name: str, folder: Path) -> FakeHub:
        """A hub with the files of a checkpoint, and some that are not wanted."""
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        unwanted = dict.fromkeys(("README.md", "pytorch_model.bin", "original/model.safetensors"), b"unwanted")
        return cls(name, files | unwanted | {"consolidated.safetensors": b"unwanted", "code.py": b"unwanted"})

    def fetched(self) -> set[str]:
        """The files of which the contents were requested."""
        return {request.split()[1] for request in self.requests if request.startswith("GET ")}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub, answering at its `url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *args: object) -> None:
            """Print nothing."""

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._refuse(401, "GatedRepo" if hub.gated else "RepoNotFound")
            if path.startswith(f"/api/models/{hub.name}/revision/"):
                known = path.rsplit("/", 1)[1] in ("main", "v1", COMMIT)
                return self._json(self._info()) if known else self._refuse(404, "RevisionNotFound")
            if path.startswith(f"/api/models/{hub.name}/tree/{COMMIT}"):
                return self._json([self._entry(name) for name in hub.files])
            start = f"/{hub.name}/resolve/{COMMIT}/"
            if path.startswith(start) and (name := path.removeprefix(start)) in hub.files:
                return self._file(name, body)
            return self._refuse(404, "EntryNotFound" if hub.name in path else "RepoNotFound")

        def _info(self) -> dict[str, object]:
            return {"id": hub.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in hub.files]}

        def _entry(self, name: str) -> dict[str, object]:
            content = hub.files[name]
            oid = hashlib.sha1(content).hexdigest()
            entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": oid}
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
            return entry

        def _file(self, name: str, body: bool) -> None:
            content, asked = hub.files[name], self.headers.get("Range")
            first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            hub.requests.append(f"{self.command} {name}" + (f" from {first}" if first else ""))
            self.send_response(206 if asked else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content) - first))
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if body:
                end = hub.cut.pop(name, len(content))
                self.wfile.write(content[first:end])
                self.close_connection = self.close_connection or end < len(content)

        def _json(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
