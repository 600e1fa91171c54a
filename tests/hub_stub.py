"""A Hugging Face Hub in a thread: repositories of files in memory, as much HTTP as clients use.

with HubStub() as hub:
    hub.repos["org/name"] = {"config.json": b"{}"}
    hub.writers["hf_token"] = "org"
    ... HF_ENDPOINT=hub.url ...
    hub.requests  # [("GET", "/api/models/org/name"), ...]
"""

import base64
import hashlib
import json
import threading
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit


class HubStub:
    """repos: id -> {file name: content}; every revision of a repository is its present state.

    writers: token -> the namespace it may write to. large: names of files that the Hub keeps
    outside of git (LFS); they are sent before the commit, which then names their hash.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.writers: dict[str, str] = {}
        self.large = ("*.safetensors",)
        self.objects: dict[str, bytes] = {}  # SHA-256 -> content
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def commit(self, repo_id: str) -> str:
        """A hash of the repository's content, 40 hexadecimal digits as git's."""
        content = hashlib.sha1(repo_id.encode())
        for name, data in sorted(self.repos[repo_id].items()):
            content.update(name.encode() + data)
        return content.hexdigest()

    def __enter__(self) -> "HubStub":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(hub: HubStub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            """An object goes to the place that the batch answer named."""
            digest = self.path.rsplit("/", 1)[1]
            content = self._body()
            hub.requests.append((self.command, self.path))
            right = hashlib.sha256(content).hexdigest() == digest
            if right:
                hub.objects[digest] = content
            self._send(200 if right else 400, b"{}")

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            body = self._body()
            parts = path.strip("/").split("/")
            if path == "/api/repos/create":
                asked = json.loads(body)
                self._create("/".join(filter(None, (asked["organization"], asked["name"]))))
            elif parts[-3:] == ["lfs", "objects", "batch"]:
                self._batch(json.loads(body))
            elif parts[:2] == ["api", "models"] and parts[-2] in ("preupload", "commit"):
                self._write("/".join(parts[2:-2]), parts[-2], body)
            else:
                self._send(404, b"{}")

        def log_message(self, format: str, *args: Any) -> None:
            """Keep quiet."""

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _may_write(self, repo_id: str) -> bool:
            """Whether the request's token allows it; otherwise the refusal is sent."""
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token not in hub.writers:
                self._error(401, "Invalid username or password.")
            elif hub.writers[token] != repo_id.split("/")[0]:
                self._error(403, f"You don't have the rights to write to {repo_id}")
            else:
                return True
            return False

        def _create(self, repo_id: str) -> None:
            if not self._may_write(repo_id):
                return
            if repo_id in hub.repos:
                self._error(409, "You already created this model repo", f"{hub.url}/{repo_id}")
                return
            hub.repos[repo_id] = {}
            self._json({"url": f"{hub.url}/{repo_id}", "name": repo_id})

        def _write(self, repo_id: str, what: str, body: bytes) -> None:
            if repo_id not in hub.repos:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif self._may_write(repo_id):
                self._preupload(body) if what == "preupload" else self._commit(repo_id, body)

        def _preupload(self, body: bytes) -> None:
            files = [
                {"path": name, "uploadMode": "lfs" if is_large(name) else "regular"}
                for name in (file["path"] for file in json.loads(body)["files"])
            ]
            self._json({"files": [file | {"shouldIgnore": False} for file in files]})

        def _batch(self, asked: dict[str, Any]) -> None:
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/objects/{one['oid']}"}}}
                for one in asked["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})

        def _commit(self, repo_id: str, body: bytes) -> None:
            files = dict(hub.repos[repo_id])
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
            hub.repos[repo_id] = files
            oid = hub.commit(repo_id)
            self._json({"commitUrl": f"{hub.url}/{repo_id}/commit/{oid}", "commitOid": oid})

        def _json(self, value: dict[str, Any]) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _error(self, status: int, message: str, url: str = "") -> None:
            body = json.dumps({"error": message, "url": url})
            self._send(status, body.encode(), {"X-Error-Message": message})

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._api(parts[2:])
            elif "resolve" in parts:
                self._file(parts)
            else:
                self._send(404, b"{}")

        def _api(self, parts: list[str]) -> None:
            repo_id = next((i for i in _prefixes(parts) if i in hub.repos), None)
            if repo_id is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            files, sha = hub.repos[repo_id], hub.commit(repo_id)
            rest = parts[repo_id.count("/") + 1 :]
            if rest[:1] == ["tree"]:
                tree = [
                    {"type": "file", "path": n, "size": len(d), "oid": _etag(d)}
                    for n, d in files.items()
                ]
                self._send(200, json.dumps(tree).encode())
            else:
                siblings = [{"rfilename": name} for name in files]
                info = {"_id": sha, "id": repo_id, "modelId": repo_id, "sha": sha}
                self._send(200, json.dumps({**info, "siblings": siblings}).encode())

        def _file(self, parts: list[str]) -> None:
            at = parts.index("resolve")
            repo_id, name = "/".join(parts[:at]), "/".join(parts[at + 2 :])
            if repo_id not in hub.repos:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif name not in hub.repos[repo_id]:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                data = hub.repos[repo_id][name]
                kind = hashlib.sha256 if is_large(name) else hashlib.sha1
                tag, commit = kind(data).hexdigest(), hub.commit(repo_id)
                self._send(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def is_large(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in hub.large)

    return Handler


def _prefixes(parts: list[str]) -> list[str]:
    return ["/".join(parts[:2]), parts[0]] if parts else []


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
