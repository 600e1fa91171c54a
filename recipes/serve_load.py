"""Load on a real server: `make serve-bench`, or for ten minutes `make serve-soak`.

Starts `dejavu serve relu-30m --plan relu-30m` in its own process and asks it over HTTP:

- one stream alone against `LLM.stream` in this process, in turns: ms a token;
- the same requests one at a time and over 32 connections (`--connections`: over other numbers too):
  tokens/s, dense and with the plan. A third of the latter leave midway; their tokens count for
  neither side, and on a CPU every other answer must be the one that its request got alone;
- a stream beside which prompts of nearly the whole context arrive: its longest gap;
- memory before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, cast

import httpx
import torch
import uvloop

from dejavu import LLM, SamplingParams, __version__
from dejavu.bench.machine import this_machine
from dejavu.embedded import HELDOUT_TEXT, NAME
from dejavu.engine.codec import Codec
from dejavu.load import load_model
from dejavu.weights.files import atomic_write
from dejavu.weights.tokenizer import load_tokenizer

CONNECTIONS = 32
ARMS = ("dense", "careful")


@dataclass(frozen=True)
class Ask:
    """One request. leaves_after: tokens after which the client goes."""

    prompt: str | list[int]
    max_tokens: int
    sparsity: str
    leaves_after: int | None = None


def asks(count: int, sparsity: str, seed: int = 0) -> list[Ask]:
    """Prompts of 8 to 150 words, answers of 16 to 128 tokens; every third leaves midway."""
    words = HELDOUT_TEXT.read_text(encoding="utf-8").split()
    draw = random.Random(seed)
    made = []
    for i in range(count):
        start, length = draw.randrange(len(words) - 200), draw.choice((8, 12, 20, 40, 150))
        tokens = draw.choice((16, 32, 64, 96, 128))
        leaves = tokens // 2 if i % 3 == 2 else None
        made.append(Ask(" ".join(words[start : start + length]), tokens, sparsity, leaves))
    return made


class Answer(asyncio.Protocol):
    """A stream on a connection of its own: what comes is kept, and read when all is over.

    The server shares the machine with whoever asks, and a general HTTP client costs more for a
    token than the server does; a user's runs elsewhere.
    """

    def __init__(self, ask: Ask, host: str, *, leave: bool) -> None:
        self.began = time.perf_counter()
        self.times: list[float] = []  # at which the tokens came
        self.ended = asyncio.get_running_loop().create_future()
        self._raw = bytearray()
        self._leaves_after = ask.leaves_after if leave else None
        self._left = False
        self._request = _request(ask, host)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has other parents
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the events that are whole by now."""
        unseen = max(0, len(self._raw) - 1)  # a break between two lines may be an event's end
        self._raw += data
        self.times += [time.perf_counter()] * self._raw.count(b"\n\n", unseen)
        if self._leaves_after is not None and len(self.times) >= self._leaves_after:
            del self.times[self._leaves_after :]
            self._left = True
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Over, one way or the other."""
        if self.complete:
            del self.times[-1]
        if not self.ended.done():
            self.ended.set_result(self)

    @property
    def complete(self) -> bool:
        """Whether the server said so to a client that was still there."""
        return not self._left and b"data: [DONE]" in self._raw[-100:]

    @property
    def text(self) -> str:
        """Of the tokens in `times`, those of one that was left included."""
        if not self._raw.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"refused: {bytes(self._raw[:500])!r}")
        texts = []
        for event in self._raw.split(b"\n\n")[: len(self.times)]:
            piece = json.loads(event[event.index(b"data: ") + 6 :])
            if "error" in piece:
                raise SystemExit(f"failed: {piece}")
            texts.append(piece["choices"][0]["text"])
        return "".join(texts)


def _request(ask: Ask, host: str) -> bytes:
    body = {
        "model": NAME,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "sparsity": ask.sparsity,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def answer(url: str, ask: Ask, *, leave: bool) -> Answer:
    """Stream one request."""
    host = url.removeprefix("http://")
    address, _, port = host.rpartition(":")
    _, found = await asyncio.get_running_loop().create_connection(
        lambda: Answer(ask, host, leave=leave), address, int(port)
    )
    await asyncio.wait_for(found.ended, 300)
    return found


async def over_connections(
    url: str, wanted: list[Ask], connections: int, *, leave: bool
) -> tuple[float, list[Answer]]:
    """(seconds, answers) of requests over so many connections."""
    waiting = list(enumerate(wanted))[::-1]
    found: list[Answer | None] = [None] * len(wanted)

    async def connection() -> None:
        while waiting:
            place, ask = waiting.pop()
            found[place] = await answer(url, ask, leave=leave)

    began = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(connections)))
    return time.perf_counter() - began, [one for one in found if one is not None]


def throughput(url: str, sparsity: str, count: int, connections: list[int]) -> dict[str, Any]:
    """Of the same requests one at a time, then over each number of connections."""
    wanted = asks(count, sparsity)
    alone_seconds, alone = uvloop.run(over_connections(url, wanted, 1, leave=True))
    one_by_one = sum(len(a.times) for a in alone)
    found: dict[str, Any] = {
        "requests": count,
        "left_midway": sum(not a.complete for a in alone),
        "tokens": one_by_one,
        "one_at_a_time_tokens_per_second": one_by_one / alone_seconds,
        "one_at_a_time_first_token_seconds": _first_tokens(alone),
        "over": {},
    }
    for number in connections:
        seconds, together = uvloop.run(over_connections(url, wanted, number, leave=True))
        tokens = sum(len(a.times) for a in together)
        if tokens != one_by_one:
            raise SystemExit(
                f"{sparsity}: {tokens} tokens came over {number} connections and {one_by_one} one "
                "at a time, of the same requests; answers were lost or cut, so nothing is measured"
            )
        found["over"][number] = {
            "wrong": sum(a.text != b.text for a, b in zip(alone, together, strict=True)),
            "tokens_per_second": tokens / seconds,
            "ratio": alone_seconds / seconds,
            "first_token_seconds": _first_tokens(together),
        }
    return found


def _first_tokens(answers: list[Answer]) -> dict[str, float]:
    first = sorted(one.times[0] - one.began for one in answers)
    return {"median": median(first), "p95": quantiles(first, n=20)[-1]}


def against_llm(url: str, sparsity: str, repeats: int, device: str, dtype: str) -> dict[str, float]:
    """Median ms a token of a stream alone, over HTTP and by `LLM.stream`, in turns."""
    ask = Ask("It was a dark night, and the old house", 128, sparsity)
    loaded = load_model(NAME, device=device, dtype=dtype)
    llm = LLM(loaded) if sparsity == "dense" else LLM(loaded, NAME, level=sparsity)
    params = SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True)

    def paces(times: list[float]) -> float:
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1)

    server, local = [], []
    for _ in range(repeats + 1):
        _, (got,) = uvloop.run(over_connections(url, [ask], 1, leave=False))
        server.append(paces(got.times))
        times = [time.perf_counter() for _ in llm.stream(ask.prompt, params)]
        local.append(paces(times))
    served, direct = median(server[1:]), median(local[1:])
    return {"served_ms": served, "llm_ms": direct, "ratio": served / direct}


def beside_prompts(url: str, sparsity: str, prompts: int = 6) -> dict[str, float]:
    """Gaps of a stream while long prompts are computed, and without them."""
    text = HELDOUT_TEXT.read_text(encoding="utf-8")[:20_000]
    codec = Codec(load_tokenizer(load_model(NAME).checkpoint))
    ids = codec.encode(text)
    long = [Ask(ids[500 * i : 500 * (i + 1)], 1, sparsity) for i in range(prompts)]
    stream = Ask("Once upon a time", 300, sparsity)

    async def measure(extra: list[Ask]) -> list[float]:
        running = asyncio.ensure_future(answer(url, stream, leave=False))
        await asyncio.sleep(0.2)
        for ask in extra:
            await answer(url, ask, leave=False)
        times = (await running).times
        # Between deliveries: tokens of a fast stream come a few at a time.
        return [1e3 * (b - a) for a, b in pairwise(times) if b > a]

    quiet, busy = uvloop.run(measure([])), uvloop.run(measure(long))
    began = time.perf_counter()
    uvloop.run(over_connections(url, long[:1], 1, leave=False))
    return {
        "prompt_alone_ms": 1e3 * (time.perf_counter() - began),
        "quiet_median_ms": median(quiet),
        "quiet_max_ms": max(quiet),
        "beside_median_ms": median(busy),
        "beside_p95_ms": quantiles(busy, n=20)[-1],
        "beside_max_ms": max(busy),
    }


def soak(url: str, process: int, minutes: float) -> dict[str, Any]:
    """Load for so long; memory after every round of 200 answers, and of that what it was when the
    first minute was over."""
    began = time.monotonic()
    answers = 0
    memory: list[tuple[float, int]] = []  # seconds since the start, bytes
    while time.monotonic() < began + 60 * minutes:
        for sparsity in ARMS:
            wanted = asks(100, sparsity, len(memory))
            _, found = uvloop.run(over_connections(url, wanted, CONNECTIONS, leave=True))
            for ask, one in zip(wanted, found, strict=True):
                tokens = ask.leaves_after or ask.max_tokens
                if not one.text or len(one.times) != tokens:
                    raise SystemExit(f"{len(one.times)} of {tokens} tokens came to {ask}")
            answers += len(found)
        memory.append((round(time.monotonic() - began, 1), resident(process)))
    warm = next((size for seconds, size in memory if seconds >= 60), memory[-1][1])
    return {
        "minutes": minutes,
        "rounds": len(memory),
        "answers": answers,
        "warm_bytes": warm,
        "end_bytes": memory[-1][1],
        "seconds_and_bytes": memory,
    }


def resident(process: int) -> int:
    """Bytes of a process's memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def server(device: str, dtype: str) -> Iterator[tuple[str, int]]:
    """(address, process id) of a running server."""
    command = [sys.executable, "-m", "dejavu", "serve", NAME, "--plan", NAME, "--port", "0"]
    command += ["--device", device, "--dtype", dtype]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            if line.startswith("{") and (url := json.loads(line).get("url", "")):
                break
            sys.stderr.write(line)  # a warning, or why it does not start
        if not url:
            raise SystemExit("the server did not start")
        # Nobody reads its log: a full pipe would stop it.
        subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def warm(url: str, connections: list[int], device: str) -> dict[str, float]:
    """Seconds of one answer of each arm, the first ones of all; then a few of every number of rows
    that a GPU captures a step for, when it is first needed."""
    cold = {}
    rows = {*connections} if device == "cpu" else {1, 2, 4, 8, 16, *connections}
    for sparsity in ARMS:
        one = asks(1, sparsity, 98)
        cold[sparsity], _ = uvloop.run(over_connections(url, one, 1, leave=True))
        for number in sorted(rows):
            some = [replace(ask, leaves_after=None) for ask in asks(number, sparsity, 99)]
            uvloop.run(over_connections(url, some, number, leave=True))
    return cold


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--connections", default=str(CONNECTIONS), metavar="N,N,...")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    connections = [int(number) for number in options.connections.split(",")]
    device, dtype = options.device, options.dtype
    with server(device, dtype) as (url, process):
        cold = warm(url, connections, device)
        before = resident(process)
        result: dict[str, Any] = {
            "version": __version__,
            "machine": asdict(this_machine(torch.device(device))),
            "dtype": dtype,
            "seconds_of_the_very_first_answers": cold,
        }
        if options.soak:
            result["soak"] = soak(url, process, options.soak)
        else:
            for sparsity in ARMS:
                result[sparsity] = {
                    "throughput": throughput(url, sparsity, options.requests, connections),
                    "single": against_llm(url, sparsity, options.repeats, device, dtype),
                    "beside_long_prompts": beside_prompts(url, sparsity),
                }
        result["memory"] = {"before_bytes": before, "after_bytes": resident(process)}
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    text = json.dumps(result, indent=2, default=str) + "\n"
    print(text)
    if options.json is not None:
        with atomic_write(options.json) as partial:
            partial.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
