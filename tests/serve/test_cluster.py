"""Replicas under a real Ray on this machine: `make test-ray`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="needs the extra dejavu-llm[ray]: make test-ray")

from dejavu.embedded import NAME

from .process import Server, until

ASK: dict[str, Any] = {"model": NAME, "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@dataclass
class Answer:
    """What came of a request: who worked on it, text, and the error that ended it."""

    replica: str
    text: str = ""
    error: dict[str, Any] | None = None
    done: bool = False


def ask(server: Server, prompt: str, begun: Callable[[], None] = lambda: None) -> Answer:
    body = ASK | {"prompt": prompt, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as got:
        if got.status_code != 200:
            return Answer("", error=json.loads(got.read())["error"])
        answer = Answer(got.headers["x-replica"])
        for line in filter(None, got.iter_lines()):
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                answer.done = True
            elif "error" in (piece := json.loads(data)):
                answer.error = piece["error"]
            else:
                answer.text += piece["choices"][0]["text"]
                begun()
    return answer


@pytest.fixture(scope="module")
def pair(chatty: Path) -> Iterator[Server]:
    also = ("--also", f"org/chatty={chatty}")
    server = Server(NAME, "--plan", NAME, *also, "--threads", 1, "--ray", "--replicas", 2)
    yield server.ready()
    started = _descendants(server.process.pid)
    assert len(started) >= 3, "the head of the cluster and the replicas"
    server.stop()
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in started), 30)


def replicas(server: Server) -> list[dict[str, Any]]:
    health = server.health()
    assert health is not None
    found: list[dict[str, Any]] = health["replicas"]
    return found


def test_answers_are_those_of_a_server_alone(pair: Server, expected: Callable[..., str]) -> None:
    for sparsity in ("balanced", "dense"):
        answer = pair.client().completions.create(
            model=NAME, prompt="Once", max_tokens=20, temperature=0,
            extra_body={"sparsity": sparsity},
        )  # fmt: skip
        assert answer.choices[0].text == expected("Once", sparsity, max_tokens=20)
    stream = pair.client().chat.completions.create(
        model="org/chatty", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True
    )
    assert len(list(stream)) >= 2
    wrong = pair.post("/v1/completions", json={"model": "nobody", "prompt": "x"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert httpx.get(f"{pair.url}/").headers["content-type"].startswith("text/html")
    assert pair.post("/v1/completions", content=b"x" * 5_000_000).status_code == 413
    assert pair.metric("dejavu_tokens_total") >= 45


def test_who_leaves_is_dropped(pair: Server) -> None:
    body = ASK | {"prompt": "Once", "stream": True, "max_tokens": 480}
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=body) as got:
        next(got.iter_lines())
    until(pair.idle, 10)
    assert pair.metric("dejavu_dropped_total") >= 1


def test_a_replica_that_dies_takes_its_own_answers_only(
    pair: Server, expected: Callable[..., str]
) -> None:
    prompts = [f"Once there were {number} of them" for number in range(12)]
    until(lambda: len(replicas(pair)) == 2, 60)
    streaming = threading.Semaphore(0)
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(ask, pair, prompt, streaming.release) for prompt in prompts]
        for _ in range(100):  # tokens, of whomever
            assert streaming.acquire(timeout=60)
        victim = max(replicas(pair), key=lambda one: one["running"])
        assert victim["running"] > 0
        os.kill(victim["process"], signal.SIGKILL)
        later = [pool.submit(ask, pair, prompt) for prompt in prompts[:4]]
        answers = [job.result() for job in jobs]
        after = [job.result() for job in later]
    lost = [answer for answer in answers if answer.error is not None]
    assert lost
    for prompt, answer in zip(prompts + prompts[:4], answers + after, strict=True):
        if answer.error is None:
            assert answer.done
            assert answer.text == expected(prompt, max_tokens=300, ignore_eos=True)
        else:
            assert answer.error["code"] == "replica_lost"
            assert not answer.done
            assert answer.replica in ("", victim["name"])
    until(lambda: len(replicas(pair)) == 2, 120)
    names = {one["name"] for one in replicas(pair)}
    assert victim["name"] not in names
    used = set()
    for _ in range(20):
        used.add(ask(pair, prompts[0]).replica)
        if used == names:
            break
    assert used == names, "both answer again"


def test_a_long_queue_brings_another_replica(expected: Callable[..., str]) -> None:
    server = Server(
        NAME, "--plan", NAME, "--threads", 1, "--ray", "--replicas", 1, "--max-replicas", 2,
        "--target-ongoing", 1,
    ).ready()  # fmt: skip
    try:
        assert len(replicas(server)) == 1
        enough = threading.Event()
        answers: list[Answer] = []

        def keep_asking() -> None:
            while not enough.is_set():
                answers.append(ask(server, "Once"))

        with ThreadPoolExecutor(6) as pool:
            asking = [pool.submit(keep_asking) for _ in range(6)]
            try:
                until(lambda: len(replicas(server)) == 2, 90)
                two = {one["name"] for one in replicas(server)}
                until(lambda: {answer.replica for answer in answers} >= two, 60)
            finally:
                enough.set()
            for one in asking:
                one.result()
        said = expected("Once", max_tokens=300, ignore_eos=True)
        assert all(answer.done and answer.text == said for answer in answers)
    finally:
        server.stop()


def test_a_batch_goes_on_where_another_kind_of_run_stopped(chatty: Path, tmp_path: Path) -> None:
    def entry(place: int, **body: Any) -> str:
        asked = {
            "model": "tiny",
            "prompt": f"number {place}",
            "max_tokens": 8,
            "temperature": 0,
        } | body
        return json.dumps({"custom_id": str(place), "url": "/v1/completions", "body": asked})

    source, plain, out = (tmp_path / name for name in ("in.jsonl", "plain.jsonl", "out.jsonl"))
    lines = [entry(place) for place in range(150)]
    lines[7:9] = ["nonsense", entry(8, max_tokens=-1)]
    source.write_text("\n".join(lines))

    def batch(target: Path, *more: object) -> dict[str, Any]:
        command = ["batch", source, target, chatty, "--name", "tiny", "--threads", 1, "--json", "-"]
        done = subprocess.run(
            [sys.executable, "-m", "dejavu", *map(str, (*command, *more))],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        return found

    def said(path: Path) -> list[Any]:
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [
            (one["id"], one["custom_id"], one["error"],
             one["response"] and one["response"]["body"].get("choices"))
            for one in found
        ]  # fmt: skip

    batch(plain)
    partial = plain.read_bytes().splitlines(keepends=True)[:40]
    (tmp_path / "out.jsonl.partial").write_bytes(b"".join(partial))
    summary = batch(out, "--ray", "--replicas", 2)
    assert (summary["lines"], summary["kept"], summary["errors"]) == (150, 40, 2)
    assert said(out) == said(plain)


def _descendants(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children")
    if not children.exists():
        return []
    own = [int(child) for child in children.read_text().split()]
    return own + [grandchild for child in own for grandchild in _descendants(child)]
