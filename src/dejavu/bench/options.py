"""What a benchmark runs, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dejavu.bench.forced import HEAD_RANK, Target
from dejavu.bench.peers import parse_peer
from dejavu.errors import InputError


@dataclass(frozen=True)
class BenchOptions:
    """What to run beside the dense arm, and how.

    densities: a forced arm each, numbers being densities of neurons; default: 0.1 on random
        weights, else none.
    exact: an arm that skips what the model itself zeroes; default: where the model is trained and
        has a ReLU.
    peers: other programs, as `peers.open_peer` takes them; default: `peers.DEFAULT_PEERS` of the
        device. One that cannot run here is reported.
    threads, isa: of our CPU kernels and the peers; default: all physical cores, the best set.
    batch: sequences decoded together. prompt_tokens: default, 128, or what a short context leaves.
    skipped: untimed steps at the start of each turn, while threads wake and caches fill.
    rank, head_rank, look_ahead: of forced predictors, as `forced.force` takes them.
    lazy_kv: forced arms with densities of heads run a second time, with keys and values of unused
        heads left for later (GPU).
    at_once: names of our arms whose steps shall not be replayed from a recording.
    text: of the prompts, where weights are not random; default: random ids.
    """

    densities: Sequence[float | Target] | None = None
    exact: bool | None = None
    peers: Sequence[str] | None = None
    threads: int | None = None
    isa: str | None = None
    batch: int = 1
    prompt_tokens: int | None = None
    new_tokens: int = 64
    skipped: int = 4
    repeats: int = 5
    rank: int | None = None
    head_rank: int = HEAD_RANK
    look_ahead: float = 0.0
    lazy_kv: bool = False
    at_once: Sequence[str] = ()
    text: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_tokens", "new_tokens", "repeats", "rank", "head_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        for peer in self.peers or ():
            parse_peer(peer)
        if self.skipped < 0:
            raise InputError(f"skipped must not be negative, not {self.skipped}")
