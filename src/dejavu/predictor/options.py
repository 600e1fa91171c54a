"""What a run of `prepare` may be asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.registry import unknown

KINDS = ("svd", "paper")
DISTANCES = (0.0, 0.5, 1.0)
BITS = (4, 8)
EXACT, CAREFUL, BALANCED, FAST = LEVELS = ("exact", "careful", "balanced", "fast")
_MIDDLE_RANK = 213
_PREDICTOR_SHARE = 0.33  # of the first matrix's size, were it int8
_SPREAD = (0.75, 1.0, 1.25)
_OF_LEVELS = ("careful_loss", "fast_loss", "default_level", "measure_cost")


@dataclass(frozen=True)
class PrepareOptions:
    """Everything that decides what a plan becomes, beside model and text.

    max_loss, fast_loss, careful_loss: allowed relative rise of perplexity at the levels `balanced`,
    `fast` and `careful`; of the last None: half of max_loss. default_level: what the plan runs at
    where nobody asks for a level.
    tokens: trained on. held_out: tokens for thresholds and losses. window: tokens read at a time,
    at most the model's context. ranks: tried for every layer, None: three that suit the shape.
    predictor_share: bytes of all predictors over those of the dense model, at most; None: whatever
    pays. heads: whether to look for heads to skip. lookahead: distances in blocks to compare.
    bits: of a predictor's stored weights, 4 or 8.
    kind: `svd`, or `paper` for the baseline of Deja Vu (random start, every active neuron alike).
    epochs, batch, rate: of the training. threads: of torch, None leaves them as they are.
    measure_cost: time the kernels here, so that no layer runs sparse where dense is faster.
    memory_gib: for recorded inputs; layers are trained in groups that fit.
    """

    max_loss: float = 0.01
    fast_loss: float = 0.03
    careful_loss: float | None = None
    default_level: str = CAREFUL
    tokens: int = 200_000
    held_out: int = 16_384
    window: int = 512
    ranks: tuple[int, ...] | None = None
    predictor_share: float | None = None
    heads: bool = True
    lookahead: tuple[float, ...] = DISTANCES
    bits: int = 4
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
        if not 0 < self.losses[CAREFUL] <= self.max_loss:
            raise InputError(
                f"careful_loss must lie in (0, {self.max_loss:g}], not {self.careful_loss!r}: the "
                "level `careful` may lose no more than `balanced`"
            )
        if self.default_level not in LEVELS:
            raise unknown("level", self.default_level, LEVELS, InputError)
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
        if self.bits not in BITS:
            raise InputError(f"bits must be one of {BITS}, not {self.bits!r}")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads must be at least 1, not {self.threads!r}")

    @property
    def losses(self) -> dict[str, float]:
        """What the levels that lose anything may lose, ascending."""
        careful = self.max_loss / 2 if self.careful_loss is None else self.careful_loss
        return {CAREFUL: careful, BALANCED: self.max_loss, FAST: self.fast_loss}

    @property
    def of_work(self) -> dict[str, Any]:
        """Those that finished layers and curves depend on: not what only levels come from, which
        are found when all of these are there."""
        return {name: value for name, value in asdict(self).items() if name not in _OF_LEVELS}

    def neuron_ranks(self, config: ModelConfig, distance: float = 0.0) -> tuple[int, ...]:
        """Ranks to try for neurons, ascending; distance: in blocks, that their input is earlier.

        By default three quarters, all and five quarters of the rank at which a 4-bit predictor has
        a sixth of the bytes of the first matrix in int8, about 256 at most. An earlier input says
        less, and rank makes up for it: from there on twice the largest is tried too.
        """
        width, neurons = config.hidden_size, config.intermediate_size
        if self.ranks is not None:
            wanted = {min(rank, width, neurons) for rank in self.ranks}
        else:
            middle = min(_MIDDLE_RANK, _PREDICTOR_SHARE * width * neurons / (width + neurons))
            step = 16 if middle >= 64 else 1
            wanted = {max(1, round(share * middle / step) * step) for share in _SPREAD}
            if distance:
                wanted.add(min(2 * max(wanted), width, neurons))
        return tuple(sorted(wanted))

    def head_ranks(self, config: ModelConfig) -> tuple[int, ...]:
        """Ranks to try for heads, ascending: a map to few heads needs few."""
        groups = config.num_key_value_heads
        return tuple(sorted({max(1, min(groups, 64) // 2), min(groups, 64)}))
