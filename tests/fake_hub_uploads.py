"""The part of the Hub's API that an upload uses, on loopback: create, model info, preupload, LFS batch and upload,
verify, commit. Faults are set before a call and happen once each."""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

TOKEN = "hf_" + "w" * 34


class FakeUploads(ThreadingHTTPServer):
    """`repos`: name -> {private, files (name -> bytes), commits (message list)}; `objects`: LFS content by checksum;
    `asked`: (method, path) of every request; `faults`: path part -> list of what to do with the next requests there:
    a status, or "cut" to close the connection, or "lost" to do the work and then close it."""

    daemon_threads = True

    def __init__(self, token: str = TOKEN) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token, self.repos, self.objects, self.asked = token, {}, {}, []
        self.faults: dict[str, list] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "FakeUploads":
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address) -> None:
        """A connection that was cut is no news."""

    def count(self, method: str, part: str) -> int:
        return sum(m == method and part in path for m, path in self.asked)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def do_PUT(self) -> None:
        self.answer("PUT")

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, method: str) -> None:
        hub, path = self.server, urlsplit(self.path).path
        hub.asked.append((method, path))
        part = next((part for part, todo in hub.faults.items() if todo and part in f"{method} {path}"), None)
        fault = hub.faults[part].pop(0) if part else None
        content = self.body() if fault != "cut" else b""
        if fault == "cut":
            self.close()
        elif isinstance(fault, int):
            self.send(fault, {"error": "made to fail"})
        elif not path.startswith("/storage/") and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.send(401, {"error": "Invalid username or password."})
        else:
            status, value = self.work(method, path, content)
            if fault == "lost":
                self.close()
            else:
                self.send(status, value)

    def close(self) -> None:
        self.close_connection = True
        self.connection.shutdown(2)

    def work(self, method: str, path: str, content: bytes) -> tuple[int, dict | list]:
        hub = self.server
        if path.startswith("/storage/"):
            oid = hashlib.sha256(content).hexdigest()
            if oid != path.rpartition("/")[2]:
                return 400, {"error": "another checksum"}
            hub.objects[oid] = content
            return 200, {}
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if name in hub.repos:
                return 409, {"error": "exists", "url": f"{hub.url}/{name}"}
            private = asked.get("private") or asked.get("visibility") == "private"
            hub.repos[name] = {"private": bool(private), "files": {}, "commits": []}
            return 200, {"url": f"{hub.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name = next((name for name in hub.repos if f"/{name}" in path), None)
        if name is None:
            return 404, {"error": "Repository not found"}
        repo = hub.repos[name]
        if path.endswith("/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self.entry(hub, o) for o in json.loads(content)["objects"]]}
        if path.endswith("/verify"):
            return (200 if json.loads(content)["oid"] in hub.objects else 404), {}
        if "/preupload/" in path:
            return 200, {"files": [{"path": f["path"], "shouldIgnore": False, "oid": None,
                                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                                   for f in json.loads(content)["files"]]}
        if "/commits/" in path:
            return 200, [{"id": self.sha(repo, n), "title": message, "message": "", "authors": [],
                          "date": "2026-01-01T00:00:00.000Z"}
                         for n, message in reversed(list(enumerate(repo["commits"], 1)))]
        if "/commit/" in path:
            return self.commit(hub, repo, content)
        return 200, {"id": name, "sha": self.sha(repo), "private": repo["private"], "tags": [], "downloads": 0,
                     "likes": 0, "siblings": [{"rfilename": f} for f in repo["files"]]}

    @staticmethod
    def entry(hub: FakeUploads, asked: dict) -> dict:
        found = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] not in hub.objects:
            found["actions"] = {"upload": {"href": f"{hub.url}/storage/{asked['oid']}", "header": {}},
                                "verify": {"href": f"{hub.url}/{next(iter(hub.repos))}/verify", "header": {}}}
        return found

    @staticmethod
    def sha(repo: dict, number: int | None = None) -> str:
        return hashlib.sha1(str(len(repo["commits"]) if number is None else number).encode()).hexdigest()

    def commit(self, hub: FakeUploads, repo: dict, content: bytes) -> tuple[int, dict]:
        header, *rows = [json.loads(line) for line in content.splitlines()]
        if header["value"].get("parentCommit") not in (None, self.sha(repo)):
            return 412, {"error": "another commit is the head"}
        for row in rows:
            value = row["value"]
            if row["key"] == "deletedFile":
                del repo["files"][value["path"]]
            elif row["key"] == "lfsFile":
                if value["oid"] not in hub.objects:
                    return 400, {"error": "no such object"}
                repo["files"][value["path"]] = hub.objects[value["oid"]]
            else:
                repo["files"][value["path"]] = base64.b64decode(value["content"])
        repo["commits"].append(header["value"]["summary"])
        made = self.sha(repo)
        where = f"{hub.url}/{next(iter(hub.repos))}/commit/{made}"
        return 200, {"commitUrl": where, "commitOid": made, "success": True}

    def send(self, status: int, value: dict | list) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(content)
