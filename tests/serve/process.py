"""The real server in its own process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai


class Server:
    """`dejavu serve ARGUMENTS`; every line of its log is parsed and kept. port: 0 is any."""

    def __init__(
        self, *arguments: object, key: str = "unused", port: int = 0, **environment: str
    ) -> None:
        self.key = key
        self.lines: list[dict[str, Any]] = []
        self._listening = threading.Event()
        self.url = ""
        # It says itself where it listens: port 0 is a free one.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dejavu", "serve", *map(str, arguments), "--port", str(port)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            entry = json.loads(line) if line.startswith("{") else {"event": line}
            self.lines.append(entry)
            if entry["event"] == "serving":
                self.url = entry["url"]
                self._listening.set()
        self._listening.set()

    def ready(self) -> Server:
        assert self._listening.wait(120)
        assert self.url, f"no server: {self.lines}"
        until(lambda: self.health() is not None, 30)
        return self

    def health(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=10).json()
            return found
        except httpx.TransportError:
            return None

    def idle(self) -> bool:
        health = self.health()
        return health is not None and (health["running"], health["waiting"]) == (0, 0)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, **{"max_retries": 0, **options}
        )

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=60, **options)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.split("[{ ]", line)[0] == name)

    def resident(self) -> int:
        """Bytes of memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
