"""Steps that begin before the host knows what they read: the same texts, and no more than needed.

A forward stands for its graph, and runs where it is sent off, so a step that begins too early or
with wrong inputs would read what is not there yet.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dejavu.engine.graph_step import GraphStep, Replay
from dejavu.engine.params import SamplingParams
from dejavu.engine.sampling import Sampler
from dejavu.engine.scheduler import Request
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.sparsity.policy import Dense
from models.tiny import VOCAB, Tiny, prompt

LENGTH = 64
GREEDY = SamplingParams()


class Counted:
    """Stands for CUDA graphs and counts their replays."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, forward: Replay) -> Replay:
        def replay() -> torch.Tensor:
            self.replays += 1
            return forward()

        return replay


class Side:
    """Requests over one model, each with its sampler."""

    def __init__(
        self, model: DecoderLM, params: list[SamplingParams], *, overlapped: bool, limit: int
    ) -> None:
        self.graphs = Counted()
        rows = len(params)
        cache = KVCache(model.config, rows * blocks_for(LENGTH))
        self.step = GraphStep(
            model, cache, Dense(), TorchOps(), max_rows=rows, max_length=LENGTH,
            capture=self.graphs,
        )  # fmt: skip
        self.step.overlapped = overlapped
        self.requests = []
        self.samplers: dict[Request, Sampler] = {}
        for seed, one in enumerate(params):
            request = Request(tuple(prompt(3 + seed, seed)), limit)
            request.blocks = cache.allocate(blocks_for(LENGTH))
            batch = Batch.prefill(list(request.prompt), request.blocks)
            model.prepare(len(request.prompt))
            logits = model.forward(batch, cache, Dense(), TorchOps())
            request.token_ids.append(int(logits[0].argmax()))
            self.requests.append(request)
            self.samplers[request] = Sampler(one, request.prompt, VOCAB)

    def play(self, rows: list[int]) -> None:
        chosen = [self.requests[row] for row in rows]
        self.step.run(chosen)
        picked = self.step.pick([self.samplers[r] for r in chosen])
        for request, token in zip(chosen, picked, strict=True):
            assert token is not None
            request.token_ids.append(token)


@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_texts_are_the_same(model_type: str, tiny: Callable[..., Tiny]) -> None:
    """Greedy, drawn and penalised rows, alone, padded and together; rows come, go and change."""
    model = load_model(tiny(model_type).path).model
    params = [
        GREEDY,
        SamplingParams(temperature=1.2, seed=1),
        SamplingParams(temperature=0.8, top_k=9, seed=2),
        SamplingParams(frequency_penalty=0.5),
    ]
    seats = [[0]] * 5 + [[0, 1]] * 4 + [[1, 0]] * 3 + [[0, 1, 2]] * 6 + [[2, 0, 3]] * 3 + [[1]] * 4
    sides = [Side(model, params, overlapped=on, limit=LENGTH) for on in (False, True)]
    for rows in seats:
        for side in sides:
            side.play(rows)
    plain, early = sides
    assert [r.token_ids for r in early.requests] == [r.token_ids for r in plain.requests]
    assert plain.graphs.replays == len(seats)
    # One is in vain wherever rows change, but for those with a penalised row, and at the end.
    assert early.graphs.replays == len(seats) + 5


def test_nothing_begins_that_will_not_be_wanted(tiny: Callable[..., Tiny]) -> None:
    model = load_model(tiny("opt").path).model
    side = Side(model, [GREEDY], overlapped=True, limit=3 + 1 + 6)
    for _ in range(6):
        side.play([0])
    assert side.requests[0].length == side.requests[0].limit
    assert side.graphs.replays == 6
    side = Side(model, [SamplingParams(logprobs=2)], overlapped=True, limit=LENGTH)
    for done in range(1, 4):
        side.play([0])
        assert side.graphs.replays == done


def test_a_token_that_others_put_in_place_is_read(tiny: Callable[..., Tiny]) -> None:
    """Told ahead it costs nothing, else the step begins anew; either way it is what counts."""
    model = load_model(tiny("llama").path).model
    texts, replays = [], []
    for overlapped, told in ((False, False), (True, False), (True, True)):
        side = Side(model, [GREEDY, GREEDY], overlapped=overlapped, limit=LENGTH)
        fed = [[5, 9, 2, 7, 3, 8], [1, 1, 4, 6, 0, 2]]
        sampled = []
        for request, ids in zip(side.requests, fed, strict=True):
            if told:
                request.fed = dict(enumerate(ids, start=1))
        for step in range(6):
            side.play([0, 1])
            sampled.append([r.token_ids[-1] for r in side.requests])
            for request, ids in zip(side.requests, fed, strict=True):
                request.token_ids[-1] = ids[step]
        texts.append(sampled)
        replays.append(side.graphs.replays)
    assert texts[0] == texts[1] == texts[2]
    assert replays == [6, 12, 7]
