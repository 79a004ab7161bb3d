"""A Hub of one data set on loopback: the requests that `datasets` and `huggingface_hub` make for it, no more."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves data set `name` with one revision. Use as a context manager; `url` is its endpoint."""

    daemon_threads = True

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.contents, self.asked = name, files, []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "FakeHub":
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.shutdown()
        self.server_close()

    def entry(self, path: str) -> dict:
        content = self.contents[path]
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked.append(path)
        if path == f"/api/datasets/{hub.name}/tree/{COMMIT}":
            self.answer([hub.entry(p) for p in hub.contents])
        elif path == f"/api/datasets/{hub.name}/revision/{COMMIT}":
            self.answer({"id": hub.name, "sha": COMMIT, "siblings": [{"rfilename": p} for p in hub.contents]})
        elif path.startswith(f"/datasets/{hub.name}/resolve/"):
            name = path.split("/resolve/")[1].partition("/")[2]
            found = hub.contents.get(name)
            self.send(404 if found is None else 200, found or b"", name)
        else:
            self.send(404, b"", "")

    def answer(self, value) -> None:
        self.send(200, json.dumps(value).encode(), "json")

    def send(self, status: int, content: bytes, name: str) -> None:
        start, end = 0, len(content)
        if status == 200 and self.headers.get("Range"):
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, end, status = int(first), min(int(last or end) + 1, end), 206
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Type", "application/json" if name == "json" else "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[start:end])
