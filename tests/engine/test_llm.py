"""Text in, text out: the public face, with a scripted model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dejavu import (
    LLM,
    Completion,
    DejavuError,
    InputError,
    SamplingParams,
)
from dejavu.engine.codec import Codec

from .stub import ScriptedLM, scripted

MESSAGES = [{"role": "user", "content": "Hello"}]
WRONG: list[dict[str, Any]] = [
    {"model": 5},
    {"model": None},
    {"plan": 5},
    {"bundle": 5},
    {"policy": 5},
    {"threads": "2"},
    {"max_model_len": 5.5},
]


def writer(codec: Codec, text: str, **options: object) -> tuple[LLM, ScriptedLM]:
    """An LLM that answers every prompt with the same text and then its end token."""
    ids = [*codec._encode(text, special=False), codec.eos_token_id]
    engine, model = scripted(
        lambda prompt: ids,
        vocab_size=codec.vocab_size,
        context=256,
        eos_token_ids=[codec.eos_token_id],
        **options,
    )
    return LLM.around(engine, codec), model


@pytest.fixture
def greek(codec: Codec) -> LLM:
    return writer(codec, "alpha beta gamma delta")[0]


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("beta gamma", "alpha ", "stop"),
        ("gam", "alpha beta ", "stop"),
        ("delta!", "alpha beta gamma delta", "stop"),
        ("a", "", "stop"),
        (["beta gamma", "beta"], "alpha ", "stop"),
        (["gamma", "beta gamma"], "alpha ", "stop"),
        (["delta", "gamma", "eta g"], "alpha b", "stop"),
        ([], "alpha beta gamma delta", "stop"),
        ("", "alpha beta gamma delta", "stop"),
        (None, "alpha beta gamma delta", "stop"),
    ],
)
def test_stop_strings(greek: LLM, stop: object, text: str, reason: str) -> None:
    params = SamplingParams(stop=stop)  # type: ignore[arg-type]
    whole = greek.generate("x", params)
    assert (whole.text, whole.finish_reason) == (text, reason)
    chunks = list(greek.stream("x", params))
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert last.finish_reason == reason
    assert last.completion is not None
    assert last.completion.text == text
    assert last.completion.token_ids == whole.token_ids
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
    assert (greek.engine.running, greek.engine.waiting) == (0, 0)


def test_the_end_token_has_no_text(greek: LLM) -> None:
    full = greek.generate("x")
    params = SamplingParams(stop_token_ids=[full.token_ids[3]])
    answer = greek.generate("x", params)
    assert answer.token_ids == full.token_ids[:4]
    assert answer.text == greek.codec.decode(list(full.token_ids[:3]))
    assert answer.finish_reason == "stop"
    assert "".join(chunk.text for chunk in greek.stream("x", params)) == answer.text


def test_held_text_comes_at_the_limit(greek: LLM) -> None:
    full = greek.generate("x")
    for tokens in range(1, len(full.token_ids)):
        params = SamplingParams(max_tokens=tokens, stop=["delta!", "alpha beta gamma delta?"])
        answer = greek.generate("x", params)
        assert answer.finish_reason == "length"
        assert answer.text == greek.codec.decode(list(answer.token_ids))
        assert "".join(chunk.text for chunk in greek.stream("x", params)) == answer.text


def test_no_more_is_held_than_may_become_a_stop_string(greek: LLM) -> None:
    told = ""
    for chunk in greek.stream("x", SamplingParams(stop="delta!")):
        told += chunk.text
        if told.endswith("gamma "):
            return
    pytest.fail("'gamma ' should have been sent before 'delta' was over")


def test_characters_of_several_tokens(codec: Codec) -> None:
    text = "naïve 汉字 😀 end"
    llm, _ = writer(codec, text)
    chunks = list(llm.stream("x"))
    assert len(chunks) > len(text.split()) + 3
    assert "".join(chunk.text for chunk in chunks) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk.text for chunk in chunks)
    assert llm.generate("x", SamplingParams(stop="字")).text == "naïve 汉"


def test_answers_have_the_shape_of_the_question(greek: LLM) -> None:
    ids = greek.codec.encode("x")
    one = greek.generate("x")
    assert isinstance(one, Completion)
    assert [a.text for a in greek.generate(["x", "y"])] == [one.text] * 2
    assert [a.prompt_token_ids for a in greek.generate([ids, [2]])] == [tuple(ids), (2,)]
    assert greek.generate([]) == []
    each = greek.generate(["x", "y"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert [a.completion_tokens for a in each] == [1, 2]
    (from_tensor,) = greek.generate([torch.tensor(ids)])  # type: ignore[list-item]
    assert from_tensor.prompt_token_ids == tuple(ids)


def test_completion_counts(greek: LLM) -> None:
    answer = greek.generate("x", SamplingParams(max_tokens=3))
    assert answer.prompt_tokens == len(greek.codec.encode("x"))
    assert answer.completion_tokens == len(answer.token_ids) == 3
    assert answer.tokens_per_second is not None
    assert answer.tokens_per_second == pytest.approx(2 / answer.decode_seconds)
    assert greek.generate("x", SamplingParams(max_tokens=1)).tokens_per_second is None
    json = answer.to_json()
    assert json["completion_tokens"] == 3
    assert json["text"] == answer.text


def test_many_more_prompts_than_rows(codec: Codec) -> None:
    llm, model = writer(codec, "alpha beta gamma delta", max_batch=2)
    answers = llm.generate(["x"] * 7, SamplingParams(stop="beta"))
    assert [a.text for a in answers] == ["alpha "] * 7
    assert len(model.prefills) == 7
    assert max(model.rows) == 2
    stopped = len(answers[0].token_ids)
    # A stop string frees its row at once: nobody's answer runs on to its end behind the scenes.
    assert sum(model.rows) == 7 * (stopped - 1)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["x", "y"], [SamplingParams()], "2 prompts and 1 params"),
        (["x"], [{"max_tokens": 3}], "params must be SamplingParams"),
        ([5], None, "a prompt is a text or a list of token ids"),
        ([[1.5]], None, "a prompt is a text or a list of token ids"),
        (["x", "word " * 300], None, "the context is 256"),
        (["x", [10**6]], None, "token id 1000000"),
        (["\ud800"], None, "not valid Unicode"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    codec: Codec, prompts: object, params: object, message: str
) -> None:
    llm, model = writer(codec, "alpha")
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, params)  # type: ignore[call-overload]
    assert model.prefills == []
    assert llm.engine.waiting == 0
    assert llm.generate("x").text == "alpha"


@pytest.mark.parametrize("wrong", [5, None, b"x", {"x": 1}, [5], [None], [b"x"], [["x"]]])
def test_prompts_of_another_kind_are_refused(greek: LLM, wrong: Any) -> None:
    with pytest.raises(InputError, match=r"prompts must be a text|a prompt is a text"):
        greek.generate(wrong)


@pytest.mark.parametrize("wrong", [5, None, b"x", ["x"]])
def test_one_prompt_of_another_kind_is_refused(greek: LLM, wrong: Any) -> None:
    with pytest.raises(InputError, match="a prompt is a text"):
        greek.stream(wrong)
    with pytest.raises(InputError, match="params must be SamplingParams"):
        greek.stream("x", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_of_another_kind_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=f"^{name} must be a "):
        LLM(**{"model": "relu-30m"} | wrong)


def test_stream_refuses_bad_input_at_once(greek: LLM) -> None:
    with pytest.raises(InputError, match="the context is 256"):
        greek.stream("word " * 300)


def test_broken_logits_are_an_error_that_names_the_prompt(codec: Codec) -> None:
    fine = [*codec._encode("fine", special=False), codec.eos_token_id]
    engine, _ = scripted(
        lambda ids: [None] if ids[-1] == 7 else fine,
        vocab_size=codec.vocab_size,
        eos_token_ids=[codec.eos_token_id],
    )
    llm = LLM.around(engine, codec)
    bystander = llm.stream([5])
    next(bystander)
    with pytest.raises(DejavuError, match=r"prompts\[1\].*not finite"):
        llm.generate([[6], [7]])
    with pytest.raises(DejavuError, match=r"^the logits"):
        list(llm.stream([7]))
    assert next(bystander).finish_reason or list(bystander)[-1].finish_reason == "stop"
    assert llm.generate([[6]])[0].text == "fine"
    assert (llm.engine.running, llm.engine.waiting) == (0, 0)


def test_interrupt_inside_a_stream_leaves_the_engine_usable(codec: Codec) -> None:
    llm, model = writer(codec, "alpha beta gamma delta")
    free = llm.engine._cache.free_blocks
    other = llm.stream("y")
    told = next(other).text

    def interrupt() -> None:
        model.before = lambda: None
        raise KeyboardInterrupt

    stream = llm.stream("x")
    next(stream)
    model.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert (llm.engine.running, llm.engine.waiting) == (1, 0)
    assert told + "".join(chunk.text for chunk in other) == "alpha beta gamma delta"
    model.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x", "y"])
    assert llm.generate("x").text == "alpha beta gamma delta"
    assert (llm.engine.running, llm.engine._cache.free_blocks) == (0, free)


def test_dropped_and_interleaved_streams(greek: LLM) -> None:
    for chunk in greek.stream("x"):
        assert chunk.token_ids
        break
    assert greek.engine.running == 0
    greek.stream("never started")
    assert greek.engine.waiting == 0
    text = greek.generate("x").text
    first, second = greek.stream("x"), greek.stream("y")
    pairs = list(zip(first, second, strict=True))
    assert "".join(a.text for a, _ in pairs) == "".join(b.text for _, b in pairs) == text


def test_empty_prompt_is_the_bos(codec: Codec, greek: LLM) -> None:
    for prompt in ("", []):
        (chunk,) = greek.stream(prompt, SamplingParams(max_tokens=1))
        assert chunk.completion is not None
        assert chunk.completion.prompt_token_ids == (codec.bos_token_id,)


def test_chat(greek: LLM) -> None:
    with pytest.raises(InputError, match="chat_template="):
        greek.chat(MESSAGES)
    template = "{{ messages[0].content }}"
    answer = greek.chat(MESSAGES, chat_template=template)
    assert answer.text == "alpha beta gamma delta"
    assert answer.prompt_token_ids == tuple(greek.codec._encode("Hello", special=False))
    chunks = list(greek.chat(MESSAGES, stream=True, chat_template=template))
    assert "".join(chunk.text for chunk in chunks) == answer.text


def test_threads_share_an_llm(codec: Codec) -> None:
    llm, _ = writer(codec, "alpha beta gamma delta")

    def run(number: int) -> str:
        if number % 3:
            return "".join(chunk.text for chunk in llm.stream("x"))
        return llm.generate("x").text

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(run, range(30))) == {"alpha beta gamma delta"}
    assert (llm.engine.running, llm.engine.waiting) == (0, 0)
