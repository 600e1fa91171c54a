"""How fast every level of a plan decodes on this machine, for its report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dejavu.engine.engine import Engine
from dejavu.engine.params import SamplingParams
from dejavu.load import LoadedModel
from dejavu.predictor.plan import Plan

_TURNS = 5  # other programs come and go: the middle step of all turns counts, as in a bench
_NEW_TOKENS = 64


def timed(
    loaded: LoadedModel,
    plan: Plan,
    prompt: Sequence[int],
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """The plan whose levels state the tokens/s of one sequence, greedy, the dense model and all
    levels in turn within one run; `dense_tokens_per_second` stands in the plan's report.

    prompt: token ids, at most half of the model's context. Raises PlanError for another model's
    plan, InputError for a prompt that is too long.
    """
    new = min(_NEW_TOKENS, loaded.model.config.context_length // 2)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    selectors = {name: plan.selector(loaded, name) for name in plan.levels}
    engines = {
        name: Engine(loaded, selector, max_batch=1, max_model_len=len(prompt) + new)
        for name, selector in ({None: None} | selectors).items()
    }
    seconds: dict[str | None, list[float]] = {name: [] for name in engines}
    for turn in range(_TURNS):
        for name, engine in engines.items():
            seconds[name] += _steps(engine, prompt, params)
        if progress is not None:
            progress("decoding", turn + 1, _TURNS)
    rates = {name: 1 / statistics.median(found) for name, found in seconds.items()}
    levels = {
        name: replace(level, report=level.report | {"tokens_per_second": rates[name]})
        for name, level in plan.levels.items()
    }
    return replace(
        plan, levels=levels, report=plan.report | {"dense_tokens_per_second": rates[None]}
    )


def _steps(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[float]:
    """Seconds of every decode step of one answer but the first, which comes with the prompt."""
    request = engine.add(prompt, params)
    engine.step()
    found = []
    while not request.done:
        start = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - start)
    return found
