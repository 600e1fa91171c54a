"""A Hugging Face Hub in a thread: repositories of files in memory, as much HTTP as clients use.

with HubStub() as hub:
    hub.repos["org/name"] = {"config.json": b"{}"}
    ... HF_ENDPOINT=hub.url ...
    hub.requests  # [("GET", "/api/models/org/name"), ...]
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit


class HubStub:
    """repos: id -> {file name: content}; every revision of a repository is its present state."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
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

        def log_message(self, format: str, *args: Any) -> None:
            """Keep quiet."""

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
                commit = hub.commit(repo_id)
                self._send(200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def _prefixes(parts: list[str]) -> list[str]:
    return ["/".join(parts[:2]), parts[0]] if parts else []


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
