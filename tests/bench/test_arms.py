"""Our arms: what they read, and what they count."""

from __future__ import annotations

import pytest

from dejavu.bench.arms import engine_arms
from dejavu.bench.forced import force
from dejavu.bench.subject import make_prompts
from dejavu.kernels.native import NativeOps
from dejavu.sparsity.policy import Dense, Site

STEPS, SKIP = 6, 3


def arm(subject, selector, **options):
    options = {"batch": 2, "max_model_len": 64, "ops": NativeOps(1), "threads": 1, **options}
    (found,) = engine_arms(subject.loaded, {"ours": selector}, **options)
    return found


def test_reads_what_it_is_fed(tiny, transformers):
    prompts, fed = make_prompts(tiny, 2, 8, seed=1), make_prompts(tiny, 2, STEPS + SKIP, seed=2)
    ours = arm(tiny, Dense()).decode(prompts, STEPS, skip=SKIP, fed=fed)
    assert len(ours.seconds) == STEPS
    # The engine's first step reads what it sampled; the loop of the peer starts one token later.
    first = [
        arm(tiny, Dense()).decode([prompt], 1, skip=0, fed=None).token_ids[0] for prompt in prompts
    ]
    read = [[token, *ids] for token, ids in zip(first, fed, strict=True)]
    theirs = transformers.decode(prompts, STEPS, skip=SKIP + 1, fed=read)
    assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
    assert (
        ours.token_ids != arm(tiny, Dense()).decode(prompts, STEPS, skip=SKIP, fed=None).token_ids
    )


@pytest.mark.parametrize("recorded", [True, False])
def test_counts_the_timed_steps_alone(tiny, recorded):
    prompts = make_prompts(tiny, 2, 8, seed=1)
    (forced,) = force(tiny.loaded, (0.3,), prompts[0], prompts[1])
    ours = arm(tiny, forced, at_once=() if recorded else ("ours",))
    for _ in range(2):
        done = ours.decode(prompts, STEPS, skip=SKIP, fed=None)
        rows = forced.meter._counters[Site.NEURONS][:, 2]
        assert rows.tolist() == [2 * STEPS] * 3
        assert done.reads == forced.reads()
    assert ours.info.recorded is recorded
