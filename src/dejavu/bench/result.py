"""What a benchmark says: every speed with its ceiling, its ratios and its conditions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dejavu.bench.machine import GPU, Machine, Origin
from dejavu.bench.spread import Spread


@dataclass(frozen=True)
class Conditions:
    """What was run. shape: the fields of `ModelConfig`. weights: where they come from. threads: of
    the CPU kernels, None on a GPU. isa: of our kernels. Lengths in tokens; a repeat times
    `new_tokens` steps after `skipped` untimed ones, and the arms take turns (a peer's notes say
    where it did not). rank, head_rank, look_ahead: of forced predictors of neurons, of heads, and
    how many blocks ahead both select. cuts: of the GPU's kernels, see `kernels.gpu.tuning`."""

    shape: dict[str, Any]
    weights: str
    dtype: str
    device: str
    threads: int | None
    isa: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    skipped: int
    repeats: int
    sampling: str
    rank: int
    head_rank: int
    look_ahead: float
    cuts: dict[str, list[int]]
    seed: int

    @property
    def runs_on(self) -> str:
        """`8 threads (avx512)` or `cuda:0 (sm_90)`."""
        threads = self.device if self.threads is None else f"{self.threads} threads"
        return f"{threads} ({self.isa})"


@dataclass(frozen=True)
class Density:
    """What the timed steps read, as shares of the dense model; of neurons and groups by layer.

    neurons: rows of up (and gate) read; active: rows of down; groups: KV groups whose query and
    output rows were read. Under a batch these are of the step, the union of its rows, and
    neurons_of_a_row is what one row used. bytes: weight bytes of a step, predictors included.
    asked, asked_groups: densities of a row that a plan was forced to.
    """

    neurons: float
    active: float
    groups: float
    bytes: float
    neurons_by_layer: list[float]
    neurons_of_a_row: float = 1.0
    asked: float | None = None
    asked_groups: float | None = None


@dataclass(frozen=True)
class ArmResult:
    """One arm. Times are of whole steps over the rows of a step; GB are 1e9 bytes.

    threads: None on a GPU. recorded: whether steps were replayed without Python, from a CUDA graph
    on a GPU (None: does not apply). repeat_medians: ms/token of each turn. of_bandwidth: achieved
    GB/s over the best measured. of_bandwidth_then: over what was measured right before and after,
    median of the turns: where others use the memory too, the best of other moments says little.
    of_roofline: time of the dense roofline over ours, above 1 where less is read than the dense
    model has; all None for cache-resident models. faster_than: other arms' ms/token over ours.
    agreeing: tokens up to the first that differs from the dense arm's, None where all arms were fed
    the same tokens.
    """

    name: str
    program: str
    dtype: str
    threads: int | None
    recorded: bool | None
    ms_per_token: Spread
    repeat_medians: list[float]
    tokens_per_second: float
    bytes_per_token: float
    gb_per_second: float
    of_bandwidth: float | None
    of_roofline: float | None
    faster_than: dict[str, float]
    density: Density | None
    agreeing: int | None
    of_bandwidth_then: float | None = None
    lopsided: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Missing:
    """An arm that was asked for and could not run."""

    name: str
    reason: str


@dataclass(frozen=True)
class BenchResult:
    """All arms of one run.

    read_bandwidth: GB/s, the best of streaming sums between the turns, same threads or
    all multiprocessors. roofline_ms:
    bytes of the dense model over it; no dense engine can be faster. None for cache-resident models
    (under 4 times the last-level cache), whose bytes do not all come from memory.
    """

    name: str
    random_weights: bool
    dense_bytes: int
    cache_resident: bool
    read_bandwidth: float
    roofline_ms: float | None
    arms: list[ArmResult]
    missing: list[Missing]
    warnings: list[str]
    conditions: Conditions
    machine: Machine
    origin: Origin

    def arm(self, name: str) -> ArmResult:
        """An arm by name; KeyError if there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            **asdict(self),
            "machine": self.machine.to_json(),
            "origin": self.origin.to_json(),
        }

    @staticmethod
    def from_json(told: dict[str, Any]) -> BenchResult:
        """What `to_json` made. Raises KeyError or TypeError for anything else."""
        machine = {k: v for k, v in told["machine"].items() if k != "last_level_cache"}
        gpu = machine.get("gpu")
        parts = {
            "arms": [_arm(arm) for arm in told["arms"]],
            "missing": [Missing(**missing) for missing in told["missing"]],
            "conditions": Conditions(**told["conditions"]),
            "machine": Machine(**machine | {"gpu": None if gpu is None else GPU(**gpu)}),
            "origin": Origin(**told["origin"]),
        }
        return BenchResult(**told | parts)


def _arm(told: dict[str, Any]) -> ArmResult:
    density = told["density"]
    parts = {
        "ms_per_token": Spread(**told["ms_per_token"]),
        "density": None if density is None else Density(**density),
    }
    return ArmResult(**told | parts)
