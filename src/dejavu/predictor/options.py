"""What a run of `prepare` may be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.registry import unknown

KINDS = ("svd", "paper")
DISTANCES = (0.0, 0.5, 1.0)
_MOST_RANK = 256
_PREDICTOR_SHARE = 1 / 3  # of the first matrix's size, at most


@dataclass(frozen=True)
class PrepareOptions:
    """Everything that decides what a plan becomes, beside model and text.

    max_loss, fast_loss: allowed relative rise of perplexity at the levels `balanced` and `fast`.
    tokens: trained on. held_out: tokens for thresholds and losses. window: tokens read at a time,
    at most the model's context. ranks: tried for every layer, None: three that suit the shape.
    predictor_share: bytes of all predictors over those of the dense model, at most; None: whatever
    pays. heads: whether to look for heads to skip. lookahead: distances in blocks to compare.
    kind: `svd`, or `paper` for the baseline of Deja Vu (random start, every active neuron alike).
    epochs, batch, rate: of the training. threads: of torch, None leaves them as they are.
    measure_cost: time the kernels here, so that no layer runs sparse where dense is faster.
    memory_gib: for recorded inputs; layers are trained in groups that fit.
    """

    max_loss: float = 0.01
    fast_loss: float = 0.03
    tokens: int = 200_000
    held_out: int = 16_384
    window: int = 512
    ranks: tuple[int, ...] | None = None
    predictor_share: float | None = None
    heads: bool = True
    lookahead: tuple[float, ...] = DISTANCES
    kind: str = "svd"
    epochs: float = 1.5
    batch: int = 512
    rate: float = 0.008
    seed: int = 0
    threads: int | None = None
    measure_cost: bool = True
    memory_gib: float = 4.0

    def __post_init__(self) -> None:
        positive = ("max_loss", "fast_loss", "epochs", "rate", "memory_gib")
        whole = {"tokens": 1, "held_out": 1, "window": 2, "batch": 1}
        for name in positive:
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0, not {getattr(self, name)!r}")
        for name, least in whole.items():
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, not {getattr(self, name)!r}")
        if self.fast_loss < self.max_loss:
            raise InputError(
                f"fast_loss {self.fast_loss:g} is below max_loss {self.max_loss:g}: the level "
                "`fast` may lose more than `balanced`"
            )
        if self.kind not in KINDS:
            raise unknown("predictor kind", self.kind, KINDS, InputError)
        if self.ranks is not None and not (self.ranks and min(self.ranks) >= 1):
            raise InputError(f"ranks must be whole numbers from 1 on, not {self.ranks!r}")
        if self.predictor_share is not None and not 0 < self.predictor_share < 1:
            raise InputError(f"predictor_share must lie in (0, 1), not {self.predictor_share!r}")
        if 0.0 not in self.lookahead or not set(self.lookahead) <= set(DISTANCES):
            raise InputError(
                f"lookahead must hold 0 and else only 0.5 and 1, not {self.lookahead!r}"
            )
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads must be at least 1, not {self.threads!r}")

    def neuron_ranks(self, config: ModelConfig) -> tuple[int, ...]:
        """Ranks to try for neurons, ascending.

        By default a half, three quarters and all of the rank at which a predictor has a third of
        the first matrix's size, 256 at most: beyond that it cannot pay.
        """
        width, neurons = config.hidden_size, config.intermediate_size
        if self.ranks is not None:
            wanted = {min(rank, width, neurons) for rank in self.ranks}
        else:
            top = min(_MOST_RANK, int(_PREDICTOR_SHARE * width * neurons / (width + neurons)))
            step = 16 if top >= 64 else 1
            wanted = {max(1, round(share * top / step) * step) for share in (0.5, 0.75, 1.0)}
        return tuple(sorted(wanted))

    def head_ranks(self, config: ModelConfig) -> tuple[int, ...]:
        """Ranks to try for heads, ascending: a map to few heads needs few."""
        groups = config.num_key_value_heads
        return tuple(sorted({max(1, min(groups, 64) // 2), min(groups, 64)}))
