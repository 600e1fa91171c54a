"""The engine against transformers, and its manners with a scripted model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dejavu.engine.engine import Engine
from dejavu.engine.params import SamplingParams
from dejavu.errors import DejavuError, InputError
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import load_model
from dejavu.models.base import DecoderLM
from dejavu.sparsity.policy import Dense, Points, Selector, Site
from models.tiny import Tiny, prompt, reference_greedy

from .stub import ScriptedLM, config, loaded, scripted

GREEDY = SamplingParams(max_tokens=40)


class Everything(Selector):
    """All neurons and heads through the sparse path: must change nothing."""

    def __init__(self, model: DecoderLM, *, capturable: bool = True) -> None:
        self.capturable = capturable
        self.calls = 0
        self._choice = {
            Site.NEURONS: Selection.full(model.config.intermediate_size),
            Site.HEADS: Selection.full(model.config.num_key_value_heads),
        }

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection:
        self.calls += 1
        return self._choice[site]


def run(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams] | SamplingParams
) -> list[list[int]]:
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    requests = [engine.add(p, wanted) for p, wanted in zip(prompts, params, strict=True)]
    finish(engine)
    assert all(request.done and request.error is None for request in requests)
    return [request.token_ids for request in requests]


def finish(engine: Engine) -> None:
    while engine.running or engine.waiting:
        assert engine.step()


@pytest.mark.parametrize("sparse", ["dense", "sparse", "sparse-eager"])
@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_rows_of_a_batch_equal_transformers(
    model_type: str, sparse: str, ops: Ops, tiny: Callable[..., Tiny]
) -> None:
    """Prompts of very different lengths, two of which finish early and make room for others."""
    case = tiny(model_type)
    model = load_model(case.path)
    selector = Everything(model.model, capturable=sparse == "sparse") if sparse != "dense" else None
    engine = Engine(model, selector, ops=ops, max_batch=3)
    prompts = [prompt(length, seed=length) for length in (1, 2, 7, 30, 5)]
    counts = [40, 11, 40, 25, 40]
    answers = run(engine, prompts, [SamplingParams(max_tokens=n) for n in counts])
    for ids, count, answer in zip(prompts, counts, answers, strict=True):
        assert answer == reference_greedy(case.reference, ids, count)
        assert run(engine, [ids], SamplingParams(max_tokens=count)) == [answer]
    assert selector is None or selector.calls > 0


def test_sampled_rows_do_not_depend_on_their_neighbours(
    ops: Ops, tiny: Callable[..., Tiny]
) -> None:
    engine = Engine(load_model(tiny("opt").path), ops=ops)
    prompts = [prompt(length, seed=length) for length in (1, 2, 7, 30)]
    params = [
        SamplingParams(max_tokens=20, temperature=2.0, top_k=20, seed=1),
        SamplingParams(max_tokens=20, repetition_penalty=1.5),
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=9, temperature=2.0, top_p=0.9, frequency_penalty=1.0, seed=2),
    ]
    together = run(engine, prompts, params)
    for ids, wanted, answer in zip(prompts, params, together, strict=True):
        assert run(engine, [ids], wanted) == [answer]
    assert together[2] == reference_greedy(tiny("opt").reference, prompts[2], 20)


def test_learned_positions_end_the_answer(ops: Ops, tiny: Callable[..., Tiny]) -> None:
    case = tiny("opt", max_position_embeddings=32)
    engine = Engine(load_model(case.path), ops=ops)
    long, short = prompt(20), prompt(2)
    params = [SamplingParams(max_tokens=50), SamplingParams(max_tokens=25)]
    for _ in range(2):  # the next call works
        requests = [engine.add(ids, p) for ids, p in zip((long, short), params, strict=True)]
        finish(engine)
        assert [len(r.token_ids) for r in requests] == [12, 25]
        assert [r.finish_reason for r in requests] == ["length", "length"]
        assert requests[0].token_ids == reference_greedy(case.reference, long, 12)
        assert requests[1].token_ids == reference_greedy(case.reference, short, 25)


def counting(prompt: tuple[int, ...]) -> list[int]:
    """10, 11, 12, ... after any prompt."""
    return list(range(10, 50))


def test_limit_is_that_of_the_engine_and_others_go_on() -> None:
    engine, model = scripted(counting, context=64, max_model_len=32)
    stream = engine.add([1], SamplingParams())
    engine.step()
    for length, answer in ((31, 1), (25, 7)):
        request = engine.add([1] * length, SamplingParams(max_tokens=40))
        while not request.done:
            engine.step()
        assert (len(request.token_ids), request.finish_reason) == (answer, "length")
    prefills = len(model.prefills)
    for length in (32, 33, 65):
        with pytest.raises(InputError, match=rf"{length} tokens.*32"):
            engine.add([1] * length, SamplingParams(max_tokens=1))
    assert len(model.prefills) == prefills, "refused before any work"
    finish(engine)
    assert stream.token_ids == counting(())[:31]


@pytest.mark.parametrize("wrong", [1, 65])
def test_max_model_len_beyond_the_model_is_refused(wrong: int) -> None:
    with pytest.raises(InputError, match=rf"2\.\.64.*not {wrong}"):
        scripted(counting, context=64, max_model_len=wrong)


def test_a_cache_beyond_the_machine_is_refused() -> None:
    model = ScriptedLM(config(context=2**44), counting)
    with pytest.raises(InputError, match=r"max_model_len .* GB"):
        Engine(loaded(model), ops=TorchOps(), max_model_len=2**44)


def test_eos_may_be_several() -> None:
    engine, _ = scripted(lambda ids: [7, ids[0], 9, 9], eos_token_ids=[3, 4])
    requests = [engine.add([i], SamplingParams(max_tokens=4)) for i in (3, 4, 5)]
    ignoring = engine.add([3], SamplingParams(max_tokens=4, ignore_eos=True))
    own = engine.add([5], SamplingParams(max_tokens=4, stop_token_ids=[7]))
    finish(engine)
    assert [r.token_ids for r in requests] == [[7, 3], [7, 4], [7, 5, 9, 9]]
    assert [r.finish_reason for r in requests] == ["stop", "stop", "length"]
    assert (ignoring.token_ids, ignoring.finish_reason) == ([7, 3, 9, 9], "length")
    assert (own.token_ids, own.finish_reason) == ([7], "stop")


def test_config_names_the_end_tokens_by_default() -> None:
    model = ScriptedLM(config(eos_token_ids=(11,)), counting)
    engine = Engine(loaded(model), ops=TorchOps())
    assert run(engine, [[1]], GREEDY) == [[10, 11]]


@pytest.mark.parametrize("at", [0, 2])
def test_logits_that_are_not_finite_end_only_their_request(at: int) -> None:
    def script(ids: tuple[int, ...]) -> list[int | None]:
        return [*range(10, 10 + at), None] if ids[0] == 1 else [20, 21, 22, 23]

    engine, _ = scripted(script)
    broken, sound = (engine.add([i, 1], SamplingParams(max_tokens=4)) for i in (1, 2))
    finish(engine)
    assert isinstance(broken.error, DejavuError)
    assert f"2 prompt and {at} answer tokens" in str(broken.error)
    assert (broken.done, broken.finish_reason, len(broken.token_ids)) == (True, None, at)
    assert (sound.token_ids, sound.finish_reason) == ([20, 21, 22, 23], "length")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_single_bad_logit_is_noticed(value: float) -> None:
    class Bad(ScriptedLM):
        def forward(self, *arguments: object) -> Tensor:
            logits = super().forward(*arguments)  # type: ignore[arg-type]
            logits[:, 5] = value
            return logits

    engine = Engine(loaded(Bad(config(), counting)), ops=TorchOps())
    request = engine.add([1], GREEDY)
    finish(engine)
    assert request.error is not None


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([1, 50], GREEDY, "token id 50.*0 to 49"),
        ([-1], GREEDY, "token id -1"),
        ([1], SamplingParams(logit_bias={45: 1, 3: 1}), "logit_bias.*45.*below 45"),
        ([1], SamplingParams(stop_token_ids=[1, 45]), "stop_token_ids.*45.*below 45"),
    ],
)
def test_ids_out_of_range_are_refused(ids: list[int], params: SamplingParams, message: str) -> None:
    engine, _ = scripted(counting, vocab_size=50)
    engine.vocab_size = 45
    with pytest.raises(InputError, match=message):
        engine.add(ids, params)
    assert engine.waiting == 0


def test_ids_beyond_the_tokenizer_are_not_sampled() -> None:
    model = ScriptedLM(config(vocab_size=50), lambda ids: [45, 45, 45])
    engine = Engine(loaded(model), ops=TorchOps(), vocab_size=40)
    model.before = model._answers.clear  # the stub may see other ids than it said
    request = engine.add([1], SamplingParams(max_tokens=1))
    finish(engine)
    assert request.token_ids == [0]


def test_rows_join_and_leave_at_every_step() -> None:
    engine, model = scripted(counting, max_batch=3)
    requests = [engine.add([1], SamplingParams(max_tokens=n)) for n in (2, 5, 3)]
    late = [engine.add([1, 2], SamplingParams(max_tokens=n)) for n in (4, 2)]
    finish(engine)
    assert [len(r.token_ids) for r in requests + late] == [2, 5, 3, 4, 2]
    assert model.prefills == [1, 1, 1, 2, 2]
    # Two tokens come with the first step, so one leaves; then a late one joins at each step.
    assert model.rows == [3, 3, 3, 2]


def test_abort_anywhere_frees_everything() -> None:
    engine, _ = scripted(counting, max_batch=1)
    free = engine._cache.free_blocks
    running, waiting = engine.add([1], GREEDY), engine.add([1], GREEDY)
    engine.step()
    for request in (waiting, running, running):
        engine.abort(request)
        assert request.done
        assert request.finish_reason is None
    assert (engine.running, engine.waiting, engine._cache.free_blocks) == (0, 0, free)
    assert engine.step() == []
    assert run(engine, [[1]], SamplingParams(max_tokens=3)) == [[10, 11, 12]]


@pytest.mark.parametrize("in_decode", [False, True], ids=["prompt", "decode"])
def test_abort_in_the_middle_of_a_step(in_decode: bool) -> None:
    """What happens when a dropped stream is collected while a step runs."""
    engine, model = scripted(counting)
    kept, dropped = engine.add([1], SamplingParams(max_tokens=5)), engine.add([1], GREEDY)
    if in_decode:
        engine.step()
    model.before = lambda: engine.abort(dropped)
    engine.step()
    model.before = lambda: None
    finish(engine)
    assert len(dropped.token_ids) == (2 if in_decode else 0)
    assert kept.token_ids == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("forwards", [0, 1, 2, 3])
def test_an_interrupted_step_can_be_repeated(forwards: int) -> None:
    """In the first or the second prompt, in the first or a later decode step."""
    engine, model = scripted(counting)
    requests = [engine.add([1], SamplingParams(max_tokens=4)) for _ in range(2)]
    left = forwards

    def interrupt() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise KeyboardInterrupt

    model.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    finish(engine)
    assert [r.token_ids for r in requests] == [[10, 11, 12, 13]] * 2


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_decode_step_that_fails_ends_its_arm_alone(step: int) -> None:
    """The other arm's answers go on, and so does whatever is asked for later."""
    engine, model = scripted(counting, arms={"other": Dense()})
    broken = [engine.add([1], SamplingParams(max_tokens=9)) for _ in range(2)]
    sound = [engine.add([1], SamplingParams(max_tokens=9), arm="other") for _ in range(2)]
    engine.step()
    left = 2 * step

    def fail() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise RuntimeError("no memory")

    model.before = fail
    for _ in range(step + 1):
        touched = engine.step()
    assert set(touched) == {*broken, *sound}
    for request in broken:
        assert "no memory" in str(request.error)
        assert isinstance(request.error.__cause__, RuntimeError)
        assert request.token_ids == [10, 11, 12, 13][: 2 + step]
    finish(engine)
    assert [r.token_ids for r in sound] == [list(range(10, 19))] * 2
    assert engine.free_blocks == engine.cache_blocks
    assert run(engine, [[1]], SamplingParams(max_tokens=3)) == [[10, 11, 12]]


def test_sampling_that_fails_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = scripted(counting)
    first, broken, last = (
        engine.add([1], SamplingParams(max_tokens=5, logit_bias={1: float(n)})) for n in range(3)
    )
    engine.step()
    sampler = engine._samplers[broken]
    monkeypatch.setattr(sampler, "sample", lambda logits: 1 // 0)
    finish(engine)
    assert isinstance(broken.error, DejavuError)
    assert isinstance(broken.error.__cause__, ZeroDivisionError)
    assert broken.token_ids == [10, 11]
    assert first.token_ids == last.token_ids == [10, 11, 12, 13, 14]
    assert engine.free_blocks == engine.cache_blocks


def test_times_are_counted() -> None:
    engine, _ = scripted(counting)
    one, more = engine.add([1], SamplingParams(max_tokens=1)), engine.add([1], GREEDY)
    finish(engine)
    assert one.prefill_seconds > 0
    assert one.decode_seconds == 0
    assert more.decode_seconds > 0
