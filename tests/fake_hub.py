"""A hub on the loopback: as much of its interface as one upload needs, every file stored as it came."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FakeHub:
    """What was asked of the hub, and the files that it holds by repository."""

    url: str = ""
    refuses: int | None = None  # a status to answer every commit with
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[dict] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """What a command finds that talks to this hub."""
        return os.environ | self.words()

    def words(self) -> dict[str, str]:
        """What of it is about this hub."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_fake", "HF_HUB_DISABLE_XET": "1"}

    def answer(self, path: str, body: bytes) -> tuple[int, object]:
        if path.startswith("/api/repos/create"):
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
            self.repos.setdefault(name, {})
            return 200, {"url": f"{self.url}/{name}", "name": name, "id": name}
        found = re.match(r"/api/models/([^/]+/[^/]+)/(preupload|commit|tree|revision|paths-info)", path)
        if path.startswith("/api/validate-yaml"):
            return 200, {"errors": [], "warnings": []}
        if not found:
            return 404, {"error": f"the fake hub does not know {path}"}
        repo, what = found[1], found[2]
        held = self.repos[repo]
        if what == "preupload":
            files = json.loads(body)["files"]
            return 200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        if what == "tree":
            return 200, [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in held.items()]
        if what == "revision":
            return 200, {"id": repo, "sha": "0" * 40, "siblings": [{"rfilename": n} for n in held]}
        if what == "paths-info":
            return 200, []
        if self.refuses:
            return self.refuses, {"error": "no"}
        for row in map(json.loads, body.splitlines()):
            if row["key"] == "header":
                self.commits.append(row["value"])
            elif row["key"] == "file":
                held[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
            elif row["key"] == "deletedFile":
                held.pop(row["value"]["path"])
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40, "success": True}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that listens until the block ends."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def _speak(self) -> None:
            length = self.headers.get("Content-Length")
            body = self.rfile.read(int(length)) if length else _chunks(self.rfile) if self.command == "POST" else b""
            code, value = hub.answer(self.path, body)
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _speak

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _chunks(stream) -> bytes:
    found = b""
    while size := int(stream.readline().strip() or b"0", 16):
        found += stream.read(size)
        stream.readline()
    stream.readline()
    return found
