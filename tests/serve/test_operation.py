"""Clients that leave, queues that fill, bodies that are no requests, and the server's end."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dejavu.embedded import NAME

from .process import Server, until

LONG: dict[str, Any] = {"model": NAME, "prompt": "Once", "max_tokens": 480, "ignore_eos": True}
QUICK: dict[str, Any] = {"model": "org/chatty", "prompt": "Once", "max_tokens": 60}
JSON = {"Content-Type": "application/json"}


def stream(server: Server, body: dict[str, Any], tokens: int) -> None:
    """Read so many pieces of a stream, and leave."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as got:
        lines = (line for line in got.iter_lines() if line)
        for _ in range(tokens):
            next(lines)


def leave(server: Server, body: dict[str, Any], after: float) -> None:
    """Ask without a stream and do not wait for the answer."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=after)


def test_who_leaves_is_dropped(server: Server, expected: Callable[..., str]) -> None:
    """While it streams, while it does not, in the queue, and while its prompt is read."""
    reading = LONG | {"prompt": [[100] * 500] * 16, "max_tokens": 1}
    dropped = server.metric("dejavu_dropped_total")
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            jobs = [pool.submit(stream, server, LONG, 5) for _ in range(3)]
            jobs += [pool.submit(leave, server, LONG, 0.3) for _ in range(3)]
            jobs += [pool.submit(leave, server, reading, 0.3)]
            jobs += [pool.submit(leave, server, LONG | {"n": 4}, 0.5) for _ in range(3)]
            for job in jobs:
                job.result()
            until(server.idle, 2)
    assert server.metric("dejavu_dropped_total") - dropped >= 3 * (3 + 3 + 1 + 12)
    assert server.metric("dejavu_cache_blocks") > 0
    answer = server.client().completions.create(
        model=NAME, prompt="Once", max_tokens=5, temperature=0
    )
    assert answer.choices[0].text == expected("Once", max_tokens=5)


def test_memory_is_level_after_many_streams(server: Server) -> None:
    def some() -> int:
        for _ in range(30):
            stream(server, QUICK, 2)
        until(server.idle, 2)
        return server.resident()

    some()
    before = some()
    assert some() < before * 1.03


def test_health_answers_while_a_huge_prompt_is_read(server: Server) -> None:
    """4 MB of text for a context of 512: refused, and the loop was never blocked for long."""
    gaps = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            began = time.monotonic()
            assert server.health() is not None
            gaps.append(time.monotonic() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for path in ("/v1/completions", "/tokenize"):
            body = {"model": NAME, "prompt": "some words " * 360_000}
            answer = server.post(path, json=body)
            assert answer.status_code == 400
            assert "512" in answer.json()["error"]["message"]
        big = server.post("/v1/completions", json={"model": NAME, "prompt": "x" * 10_000_000})
        assert (big.status_code, big.json()["error"]["type"]) == (413, "invalid_request_error")
    finally:
        done.set()
        watcher.join()
    assert max(gaps) < 5, "a hang; how fast it is on a busy machine is no test's matter"


def test_many_requests_at_once_are_answered_or_refused(server: Server) -> None:
    def ask(_: int) -> int:
        body = QUICK | {"max_tokens": 1, "n": 4}
        return server.post("/v1/completions", json=body).status_code

    with ThreadPoolExecutor(100) as pool:
        statuses = list(pool.map(ask, range(100)))
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= (16 + 200) // 4
    assert server.idle()


def test_a_full_queue_says_when_to_come_back(small: Server) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 90, "ignore_eos": True}
    key = {"Authorization": "Bearer secret"}
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda _: small.post("/v1/completions", json=body, headers=key), range(8))
        )
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == len([a for a in answers if a.status_code != 200]) > 0
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    assert refused[0].json()["error"]["code"] == "queue_full"
    too_many = small.post("/v1/completions", json=body | {"n": 3}, headers=key)
    assert (too_many.status_code, "at most 2" in too_many.text) == (400, True)


def test_the_key_opens_what_is_locked(small: Server) -> None:
    assert small.client().models.list().data[0].id == "tiny"
    for wrong in ("secre", "secret1", "Secret"):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{small.url}/v1", api_key=wrong, max_retries=0).models.list()
    for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nowhere"):
        answer = httpx.get(f"{small.url}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/", "/health", "/page/style.css"):
        assert httpx.get(f"{small.url}{path}").status_code == 200
    strange = {"Authorization": "Bearer ßé".encode()}
    assert httpx.get(f"{small.url}/metrics", headers=strange).status_code == 401


def test_a_page_from_elsewhere_gets_no_answer(server: Server, small: Server) -> None:
    elsewhere = {"Host": "evil.example:80"}
    assert httpx.get(f"{server.url}/v1/models", headers=elsewhere).status_code == 403
    for host in ("localhost", "127.0.0.1:1", "[::1]:80"):
        assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == 200
    assert httpx.get(f"{small.url}/health", headers=elsewhere).status_code == 200
    # What a form or a script from elsewhere can send without asking first is no request.
    plain = server.post(
        "/v1/completions",
        content=json.dumps({"model": NAME, "prompt": "x", "max_tokens": 1}),
        headers={"Content-Type": "text/plain"},
    )
    assert (plain.status_code, "application/json, not text/plain" in plain.text) == (400, True)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b'"x"', b'{"model": "\xff\xfe"}',
     b'{"model": "relu-30m", "prompt": "\xc3\x28"}',
     b'{"model": "relu-30m", "prompt": "half \\ud800 a pair"}', b"[" * 100_000, b"\x00" * 50,
     b'{"model": "relu-30m", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
     b'{"model": "relu-30m", "prompt": "a", "temperature": NaN}'],
    ids=lambda c: repr(c[:20]),
)  # fmt: skip
def test_what_is_no_request_is_refused(content: bytes, server: Server) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = server.post(path, content=content, headers=JSON)
        assert answer.status_code == 400, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"[]", "the body must be a JSON object"),
        (b'"x"', "the body must be a JSON object"),
        (b'{"model": "\xff"}', "cannot be read: it is not UTF-8: invalid start byte, byte 11"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": "a", "prompt": []}', "a list must not be empty"),
        (b'{"model": "a", "prompt": ["a", 1]}', "things of two kinds"),
        (b'{"model": "a", "prompt": "a", "stop": 5}', "stop must be a text or a list"),
    ],
    ids=lambda c: repr(c[:30]),
)
def test_what_is_wrong_with_a_body_is_told(content: bytes, message: str, server: Server) -> None:
    answer = server.post("/v1/completions", content=content, headers=JSON)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True)


def test_what_the_guard_refuses_is_counted_for_its_route(small: Server) -> None:
    key = {"Authorization": "Bearer secret"}
    assert small.post("/v1/completions", content=b"x" * 200_000, headers=key).status_code == 413
    assert small.post("/v1/chat/completions", content=b"x").status_code == 401
    assert small.post("/v1/completions/nowhere", content=b"x").status_code == 401
    metrics = httpx.get(f"{small.url}/metrics", headers=key).text
    for route, status in (("/v1/completions", 413), ("/v1/chat/completions", 401), ("other", 401)):
        assert f'dejavu_responses_total{{route="{route}",status="{status}"}}' in metrics


def test_a_body_of_undeclared_length_has_the_same_limit(small: Server) -> None:
    headers = JSON | {"Authorization": "Bearer secret"}

    def chunks() -> Any:
        for _ in range(20):
            yield b" " * 10_000

    assert small.post("/tokenize", content=chunks(), headers=headers).status_code == 413
    short = json.dumps({"model": "tiny", "prompt": "a"}).encode()
    answer = small.post("/tokenize", content=iter([short[:5], short[5:]]), headers=headers)
    assert answer.status_code == 200


def test_paths_that_are_not_there(server: Server) -> None:
    nowhere = httpx.get(f"{server.url}/nowhere").json()["error"]
    assert nowhere["type"] == "not_found_error"
    assert "no GET /nowhere" in nowhere["message"]
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("PUT", "/health", "GET")):
        wrong = httpx.request(method, f"{server.url}{path}")
        assert wrong.status_code == 405
        assert wrong.headers["Allow"].startswith(allowed)
        assert f"no {method} {path} here; this path takes {allowed}" in wrong.text
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py"):
        assert httpx.get(f"{server.url}{path}").status_code == 404


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/page/style.css", "/nowhere"])
def test_head_is_get_without_a_body(path: str, server: Server) -> None:
    with httpx.Client() as client:  # on one connection: a body that comes after all would show
        head, got = (client.request(m, f"{server.url}{path}") for m in ("HEAD", "GET"))
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["Content-Length"] == str(len(got.content))


def test_idle_connections_cost_nothing(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(1000)]
    try:
        assert server.health() is not None
        stream(server, LONG | {"max_tokens": 5}, 3)
    finally:
        for connection in idle:
            connection.close()
    assert server.health() is not None


def test_metrics_count_what_happened(server: Server) -> None:
    before = server.metric("dejavu_tokens_total")
    ask = {"model": NAME, "prompt": "Once", "max_tokens": 30, "ignore_eos": True}
    assert server.post("/v1/completions", json=ask | {"sparsity": "fast"}).status_code == 200
    assert server.metric("dejavu_tokens_total") - before == 2 + 30
    names = {line.split("{")[0].split()[0] for line in _metrics(server) if line[0] != "#"}
    for name in (
        "time_to_first_token_seconds_count",
        "time_between_tokens_seconds_count",
        "queue_seconds_sum",
        "batch_size_bucket",
        "requests_running",
        "requests_waiting",
    ):
        assert f"dejavu_{name}" in names
    assert server.metric("process_resident_memory_bytes") > 1e7
    level = '{level="fast",model="relu-30m"}'
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in _metrics(server)
              if line[0] != "#"}  # fmt: skip
    density = values['dejavu_density{level="fast",model="relu-30m",site="neurons"}']
    assert 0.02 < density < 0.6
    assert abs(values[f"dejavu_density_drift{level}"]) < 0.3
    assert 1e7 < values[f"dejavu_step_bytes{level}"] < 29_806_592
    assert values['dejavu_density{level="fast",model="relu-30m",site="heads"}'] == 1.0


def _metrics(server: Server) -> list[str]:
    return httpx.get(f"{server.url}/metrics").text.splitlines()


def test_the_log_says_nothing_of_what_was_written(server: Server) -> None:
    server.post("/v1/completions", json=LONG | {"prompt": "xylophone", "max_tokens": 1})
    until(lambda: any(line["event"] == "answer" for line in server.lines), 5)
    answer = next(line for line in reversed(server.lines) if line["event"] == "answer")
    assert {"model", "sparsity", "client", "prompt_tokens", "completion_tokens"} <= set(answer)
    assert "xylophone" not in json.dumps(server.lines)


@pytest.mark.parametrize("grace", [30, 0])
def test_the_end_is_clean(grace: int, chatty: Path, tmp_path: Path) -> None:
    """With time, a stream gets to its end; without, it is told so. New requests are refused."""
    config = tmp_path / "server.toml"
    config.write_text(
        f"grace = {grace}\nthreads = 1\nmax_batch = 1\n"
        f"[[models]]\nname = 'tiny'\nsource = '{chatty}'\n"
    )
    server = Server("--config", config).ready()
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 94, "ignore_eos": True, "stream": True}
    body["n"] = 1 if grace else 16  # one at a time: it would take its time
    pieces = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line:
                continue
            if not pieces:
                server.process.send_signal(signal.SIGTERM)
            pieces.append(line.removeprefix("data: "))
    assert server.process.wait(30) in (0, -signal.SIGTERM)
    if grace:
        assert pieces[-1] == "[DONE]"
        assert len(pieces) == 94 + 1
    else:
        assert "stopping" in json.loads(pieces[-1])["error"]["message"]
    assert not [line for line in server.lines if "traceback" in line]


def test_a_kill_is_seen_by_who_streams_and_the_next_server_answers() -> None:
    """No half answer looks whole, and the port is free at once."""
    server = Server(NAME, "--threads", 1).ready()
    with (
        pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)),
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}
        ) as answer,
    ):
        for line in answer.iter_lines():
            assert line != "data: [DONE]"
            server.process.kill()
    server.process.wait(30)
    following = Server(NAME, "--threads", 1, port=int(server.url.rpartition(":")[2])).ready()
    assert following.post("/v1/completions", json=LONG | {"max_tokens": 2}).status_code == 200
    following.stop()
