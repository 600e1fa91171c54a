"""Other programs on the same weights, prompts and threads, and, where they can, the same dtype.

They get our very weights, written as a Hugging Face checkpoint into a temporary folder. So any
checkpoint that we read can be compared, and a named shape with random weights too. Each runs in a
process of its own (`peer_worker` says why).

Two copies of a large shape do not fit onto a GPU. There a peer gets random weights of its own,
whose values change no dense program's time, and runs alone before ours are made.
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

import torch

from dejavu.bench.arms import ArmInfo, Decoded, Prompt
from dejavu.bench.export import export
from dejavu.bench.subject import Subject
from dejavu.errors import BackendError, InputError
from dejavu.registry import unknown
from dejavu.sparsity.accounting import dense_bytes

# Each peer, and the best it can do where our weights are of a dtype.
_TORCH_DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "int8": "bf16"}
PEERS = {
    "transformers": _TORCH_DTYPES,
    "transformers-generate": _TORCH_DTYPES,
    "transformers-static": _TORCH_DTYPES,
    "ctranslate2": {"fp32": "fp32", "bf16": "int8", "int8": "int8"},
}
DEFAULT_PEERS = {
    "cpu": ("transformers",),
    "cuda": ("transformers", "transformers-generate", "transformers-static"),
}
_TITLES = {"ctranslate2": "CTranslate2"}
_OWN_TOKENS = "reads its own tokens"
_NOTES = {
    "ctranslate2": [_OWN_TOKENS],
    "transformers-generate": [_OWN_TOKENS],
    "transformers-static": [_OWN_TOKENS],
}
_ALONE = "ran alone, before our arms, on random weights of its own"
_ON = {"ctranslate2": "cpu", "transformers-static": "cuda"}


def parse_peer(name: str) -> tuple[str, str | None]:
    """Program and dtype of `name` or `name:dtype`. Raises InputError for an unknown one."""
    program, _, dtype = name.partition(":")
    if program not in PEERS:
        raise unknown("peer", program, PEERS, InputError)
    known = sorted({*PEERS[program].values(), "fp32", "bf16"})
    if dtype and dtype not in known:
        raise unknown(f"dtype of {program}", dtype, known, InputError)
    return program, dtype or None


def check_peers(names: Sequence[str], device: torch.device) -> None:
    """Raises InputError for an unknown name or dtype, BackendError for a program that is not
    installed or not compared on this device."""
    for name in names:
        try:
            _check_runs(parse_peer(name)[0], device)
        except BackendError as error:
            raise BackendError(f"peers {name}: {error}") from error


@contextmanager
def open_peer(name: str, subject: Subject, *, threads: int | None) -> Iterator[PeerArm]:
    """A peer as `parse_peer` takes it, on the subject's weights and device; without a dtype, in the
    one nearest to the subject's.

    Raises InputError for an unknown name or dtype, BackendError where the peer cannot run here.
    """
    model = subject.loaded.model
    program, dtype = _chosen(name, subject.loaded.dtype, model.device)
    # bf16 halves what is written; only fp32 weights would lose by it.
    written = "fp32" if "fp32" in (dtype, subject.loaded.dtype) else dtype
    if written not in ("fp32", "bf16", "fp16"):
        written = "bf16"
    with _Worker() as worker:
        with tempfile.TemporaryDirectory(prefix="dejavu-bench-") as folder:
            export(model, subject.hf_config, Path(folder), written)
            loaded = worker.ask(
                program=program,
                folder=folder,
                dtype=dtype,
                threads=threads,
                device=str(model.device),
            )
        info = _info(program, loaded["label"], dtype, threads)
        yield PeerArm(worker, info, dense_bytes(model.weights, dtype))


@contextmanager
def open_random_peer(
    name: str, config: dict[str, Any], dtype: str, device: torch.device
) -> Iterator[PeerArm]:
    """A peer on a GPU, with random weights in the shape of a `config.json`. dtype: where the name
    has none. Raises as `open_peer`."""
    program, dtype = _chosen(name, dtype, device)
    with _Worker() as worker:
        loaded = worker.ask(
            program=program, config=config, dtype=dtype, threads=None, device=str(device)
        )
        info = _info(program, loaded["label"], dtype, None)
        info.notes.append(_ALONE)
        yield PeerArm(worker, info, 0)


def _chosen(name: str, ours: str, device: torch.device) -> tuple[str, str]:
    """Program and dtype, beside weights of ours of some dtype."""
    program, dtype = parse_peer(name)
    _check_runs(program, device)
    return program, dtype or PEERS[program][ours]


def _check_runs(program: str, device: torch.device) -> None:
    module = program.partition("-")[0]
    if find_spec(module) is None:
        raise BackendError(f"{module} is not installed: pip install 'dejavu-llm[peers]'")
    if _ON.get(program, device.type) != device.type:
        raise BackendError(f"{program} is compared on {_ON[program]} only")


def _info(program: str, label: str, dtype: str, threads: int | None) -> ArmInfo:
    title = _TITLES.get(program, program)
    return ArmInfo(f"{title} {dtype}", label, dtype, threads, notes=[*_NOTES.get(program, ())])


class PeerArm:
    """A program in another process as an arm."""

    def __init__(self, worker: _Worker, info: ArmInfo, nbytes: int) -> None:
        """worker: with the program loaded. nbytes: weights that a step reads."""
        self._worker = worker
        self._bytes = nbytes
        self.info = info

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
