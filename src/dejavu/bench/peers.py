"""Other programs on the same weights, prompts and threads, and, where they can, the same dtype.

They get our very weights, written as a Hugging Face checkpoint into a temporary folder. So any
checkpoint that we read can be compared, and a named shape with random weights too. Each runs in a
process of its own (`peer_worker` says why).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dejavu.bench.arms import ArmInfo, Decoded, Prompt
from dejavu.bench.export import export
from dejavu.bench.subject import Subject
from dejavu.errors import BackendError, InputError
from dejavu.registry import unknown
from dejavu.sparsity.accounting import dense_bytes

# Each peer, and the best it can do where our weights are of a dtype.
PEERS = {
    "transformers": {"fp32": "fp32", "bf16": "bf16", "int8": "bf16"},
    "ctranslate2": {"fp32": "fp32", "bf16": "int8", "int8": "int8"},
}
_TITLES = {"transformers": "transformers", "ctranslate2": "CTranslate2"}
_NOTES = {"ctranslate2": ["reads its own tokens"]}


def parse_peer(name: str) -> tuple[str, str | None]:
    """Program and dtype of `name` or `name:dtype`. Raises InputError for an unknown one."""
    program, _, dtype = name.partition(":")
    if program not in PEERS:
        raise unknown("peer", program, PEERS, InputError)
    known = sorted({*PEERS[program].values(), "fp32", "bf16"})
    if dtype and dtype not in known:
        raise unknown(f"dtype of {program}", dtype, known, InputError)
    return program, dtype or None


@contextmanager
def open_peer(name: str, subject: Subject, *, threads: int) -> Iterator[PeerArm]:
    """A peer as `parse_peer` takes it; without a dtype, in the one nearest to the subject's.

    Raises InputError for an unknown name or dtype, BackendError where the peer cannot run here.
    """
    program, dtype = parse_peer(name)
    if find_spec(program) is None:
        raise BackendError(f"{program} is not installed: pip install 'dejavu-llm[peers]'")
    with _Worker() as worker:
        yield PeerArm(
            worker, subject, program, dtype or PEERS[program][subject.loaded.dtype], threads
        )


class PeerArm:
    """A program in another process as an arm."""

    def __init__(
        self, worker: _Worker, subject: Subject, program: str, dtype: str, threads: int
    ) -> None:
        """Load it. Raises BackendError where it cannot be."""
        model = subject.loaded.model
        # bf16 halves what is written; only fp32 weights would lose by it.
        written = "fp32" if "fp32" in (dtype, subject.loaded.dtype) else "bf16"
        with tempfile.TemporaryDirectory(prefix="dejavu-bench-") as folder:
            export(model, subject.hf_config, Path(folder), written)
            loaded = worker.ask(program=program, folder=folder, dtype=dtype, threads=threads)
        self._worker = worker
        self._bytes = dense_bytes(model.weights, dtype)
        notes = list(_NOTES.get(program, ()))
        self.info = ArmInfo(
            f"{_TITLES[program]} {dtype}", loaded["label"], dtype, threads, notes=notes
        )

    def decode(
        self, prompts: Sequence[Prompt], steps: int, *, skip: int, fed: Sequence[Prompt] | None
    ) -> Decoded:
        """See `Arm.decode`. Raises BackendError where the program fails."""
        turn = self._worker.ask(prompts=prompts, steps=skip + steps, fed=fed)
        return Decoded(turn["seconds"][skip:], turn["token_ids"], self._bytes)


class _Worker:
    """A running `peer_worker`."""

    def __enter__(self) -> _Worker:
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dejavu.bench.peer_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises BackendError for an error in it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BackendError(f"its process has ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BackendError(answer["error"])
        return answer

    def _last_words(self) -> str:
        """The last line on the process's stderr, and its exit status."""
        status = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit status {status}")
