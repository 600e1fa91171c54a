"""Tokens/s that a plan states, and what a bench measures right after: how far apart they are.

Usage: python recipes/predicted_speed.py MODEL PLAN RESULT.json [ROUNDS]

What `prepare` and `plan level` store with a level, and one `dejavu bench --plan` of 9 turns, one
after the other; nothing else should run. Default: 3 rounds, 7 minutes for relu-30m on two cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dejavu.bench.decode import bench_subject
from dejavu.bench.level_speed import timed
from dejavu.bench.machine import origin, this_machine
from dejavu.bench.options import BenchOptions
from dejavu.bench.subject import open_subject
from dejavu.load import LoadedModel, load_model
from dejavu.predictor.plan import Plan, load_plan
from dejavu.weights.files import atomic_write

ROUNDS = 3


def stated(loaded: LoadedModel, plan: Plan) -> dict[str, float]:
    """Of the dense model and every level."""
    found = timed(loaded, plan)
    levels = {name: level.report["tokens_per_second"] for name, level in found.levels.items()}
    return {"dense": found.report["dense_tokens_per_second"]} | levels


def benched(loaded: LoadedModel, plan: Plan) -> dict[str, float]:
    """The same arms, by a bench of its own."""
    arms = {f"plan {name}": plan.selector(loaded, name) for name in plan.levels}
    options = BenchOptions(peers=(), densities=(), exact=False, repeats=9)
    result = bench_subject(open_subject(loaded), arms, options)
    return {arm.name.removeprefix("plan "): arm.tokens_per_second for arm in result.arms}


def main() -> None:
    """Alternate, compare, write."""
    source, plan_name, path = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    loaded, plan = load_model(source), load_plan(plan_name)
    rounds: list[dict[str, Any]] = []
    for _ in range(int(sys.argv[4]) if sys.argv[4:] else ROUNDS):
        before, after = stated(loaded, plan), benched(loaded, plan)
        off = {name: rate / after[name] - 1 for name, rate in before.items()}
        rounds.append({"stated": before, "benched": after, "off": off})
        print(rounds[-1], flush=True)
    worst = max(abs(off) for one in rounds for off in one["off"].values())
    print(f"at most {worst:.1%} apart")
    content = {"model": source, "plan": plan_name, "worst": worst, "rounds": rounds}
    content |= {"machine": this_machine().to_json(), "origin": origin().to_json()}
    with atomic_write(path) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
