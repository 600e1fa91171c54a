"""How fast every level of a plan decodes on this machine, for its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dejavu.bench.decode import bench_subject
from dejavu.bench.options import BenchOptions
from dejavu.bench.subject import open_subject
from dejavu.load import LoadedModel
from dejavu.predictor.plan import Plan
from dejavu.sparsity.accounting import dense_bytes

_NEW_TOKENS = 64
# Steps of a millisecond feel everything else that a machine does: with 5 turns a bench right after
# gave rates up to 28 % away, with 15 up to 12 %. Steps of larger models are long enough.
_TURNS_OF_SMALL, _SMALL = 15, 1 << 28  # the latter in bytes of weights


def _arm(level: str) -> str:
    return f"level {level}"  # one may be called dense


def timed(
    loaded: LoadedModel,
    plan: Plan,
    text: Path | None = None,
    *,
    threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """The plan whose levels state the tokens/s that `bench` measures of one sequence, the dense
    model and all levels in turn within one run; `dense_tokens_per_second` stands in the plan's
    report.

    text: of the prompts, default: random ids. Raises PlanError for another model's plan.
    """
    small = dense_bytes(loaded.model.weights) < _SMALL
    options = BenchOptions(
        densities=(),
        exact=False,
        peers=(),
        threads=threads,
        repeats=_TURNS_OF_SMALL if small else BenchOptions().repeats,
        new_tokens=min(_NEW_TOKENS, loaded.model.config.context_length // 2),
        text=text,
    )

    def turn(done: int, of: int) -> None:
        if progress is not None:
            progress("decoding", done, of)

    result = bench_subject(
        open_subject(loaded),
        {_arm(name): plan.selector(loaded, name) for name in plan.levels},
        options,
        progress=turn,
    )
    rates = {arm.name: arm.tokens_per_second for arm in result.arms}
    levels = {
        name: replace(level, report=level.report | {"tokens_per_second": rates[_arm(name)]})
        for name, level in plan.levels.items()
    }
    return replace(
        plan, levels=levels, report=plan.report | {"dense_tokens_per_second": rates["dense"]}
    )
