"""OpenAI's own client against the server: what it sends is understood, what it gets is right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from dejavu.embedded import NAME
from dejavu.serve import fields
from dejavu.serve.requests import ChatRequest, CompletionRequest

from .process import Server

CHATTY = "org/chatty"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def text(server: Server, prompt: str = "Once upon a time", **options: Any) -> Any:
    options = {"model": NAME, "max_tokens": 12, "temperature": 0, **options}
    return server.client().completions.create(prompt=prompt, **options)


def chat(server: Server, messages: list[Any] = HELLO, **options: Any) -> Any:
    options = {"model": CHATTY, "max_tokens": 8, "temperature": 0, **options}
    return server.client().chat.completions.create(messages=messages, **options)


def test_models(server: Server) -> None:
    client = server.client()
    found = {model.id: model for model in client.models.list()}
    assert list(found) == [NAME, CHATTY]
    assert all(m.object == "model" and m.owned_by and m.created > 0 for m in found.values())
    assert client.models.retrieve(CHATTY).id == CHATTY
    for ask in (
        lambda: client.models.retrieve("org/other"),
        lambda: text(server, model="org/other"),
        lambda: chat(server, model="org/other"),
    ):
        with pytest.raises(openai.NotFoundError, match=f"org/other.*{NAME}"):
            ask()


@pytest.mark.parametrize("sparsity", [None, "plan", "dense", "exact", "fast"])
def test_text_is_that_of_llm_generate(
    sparsity: str | None, server: Server, expected: Callable[..., str]
) -> None:
    level = "careful" if sparsity in (None, "plan") else sparsity
    prompt = "The old house at the end of the road"
    want = expected(prompt, level, max_tokens=40)
    answer = text(server, prompt, max_tokens=40, extra_body={"sparsity": sparsity})
    assert (answer.choices[0].text, answer.model_extra["sparsity"]) == (want, level)
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    pieces = list(
        text(
            server,
            prompt,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"sparsity": sparsity},
        )
    )
    assert "".join(p.choices[0].text for p in pieces if p.choices) == want
    assert [p.usage for p in pieces] == [None] * (len(pieces) - 1) + [usage]
    assert pieces[-2].choices[0].finish_reason == answer.choices[0].finish_reason == "length"
    assert len({p.id for p in pieces}) == 1


def test_an_unknown_level_is_refused(server: Server) -> None:
    with pytest.raises(
        openai.BadRequestError, match="plan, dense, exact, careful, balanced, fast"
    ) as bad:
        text(server, extra_body={"sparsity": "slow"})
    assert bad.value.param == "sparsity"
    with pytest.raises(openai.BadRequestError, match="one of dense"):
        chat(server, extra_body={"sparsity": "plan"})


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.2, "top_p": 0.8, "seed": 5},
    {"logit_bias": {"100": 100.0}},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"stop": ["a man", "e"]},
    {"stop": " wh"},
    {"temperature": 0.9, "seed": 1, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3},
    {"stop_token_ids": [265, 300], "ignore_eos": True},
]


@pytest.mark.parametrize("params", SAMPLED, ids=lambda p: "+".join(p))
def test_every_field_has_its_effect(
    params: dict[str, Any], server: Server, expected: Callable[..., str]
) -> None:
    prompt = "There was once"
    want = expected(prompt, max_tokens=15, **params)
    theirs = {k: v for k, v in params.items() if k in CompletionRequest.model_fields}
    answer = text(server, prompt, max_tokens=15, extra_body=theirs)
    assert answer.choices[0].text == want


def test_the_choices_of_n_draw_from_seeds_of_their_own(
    server: Server, expected: Callable[..., str]
) -> None:
    prompts = ["Once", "The sea"]
    answer = server.client().completions.create(
        model=NAME, prompt=prompts, n=2, max_tokens=9, temperature=1.5, seed=3
    )
    want = [
        expected(prompt, max_tokens=9, temperature=1.5, seed=seed)
        for prompt in prompts
        for seed in (3, 4)
    ]
    assert [choice.text for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(want)) == 4
    streamed = [""] * 4
    for piece in server.client().completions.create(
        model=NAME, prompt=prompts, n=2, max_tokens=9, temperature=1.5, seed=3, stream=True
    ):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == want
    with pytest.raises(openai.BadRequestError, match="limit is 16"):
        text(server, n=17)


def test_prompts_of_token_ids(server: Server, expected: Callable[..., str]) -> None:
    ids = server.post("/tokenize", json={"model": NAME, "prompt": "Once upon"}).json()
    assert (ids["count"], ids["max_model_len"]) == (len(ids["tokens"]), 512)
    want = expected("Once upon", max_tokens=6)
    for prompt, count in ((ids["tokens"], 1), ([ids["tokens"]] * 2, 2), ("Once upon", 1)):
        answer = server.client().completions.create(
            model=NAME, prompt=prompt, max_tokens=6, temperature=0
        )
        assert [choice.text for choice in answer.choices] == [want] * count
    back = server.post("/detokenize", json={"model": NAME, "tokens": ids["tokens"]}).json()
    assert back == {"prompt": "Once upon"}
    for tokens in ([9999], [10**30]):
        with pytest.raises(openai.BadRequestError, match=r"token id|prompt"):
            text(server, prompt=tokens)  # type: ignore[arg-type]


def test_logprobs_and_echo_of_text(server: Server) -> None:
    answer = text(server, logprobs=3, echo=True)
    (choice,) = answer.choices
    scored = choice.logprobs
    assert choice.text.startswith("Once upon a time there was")
    assert scored.token_logprobs[0] is scored.top_logprobs[0] is None
    assert scored.tokens[0] == "</s>", "a BOS, which has no text"
    assert "".join(scored.tokens[1:]) == choice.text
    for offset, token in list(zip(scored.text_offset, scored.tokens, strict=True))[1:]:
        assert choice.text[offset : offset + len(token)] == token
    for token, value, top in list(
        zip(scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True)
    )[1:]:
        assert len(top) == 3
        assert value < 0
        assert value == pytest.approx(top[token]) if token in top else value <= min(top.values())
    alone = text(server, logprobs=3, echo=True, max_tokens=0)
    prompt_tokens = alone.usage.prompt_tokens
    assert (alone.choices[0].text, alone.usage.completion_tokens) == ("Once upon a time", 0)
    assert alone.choices[0].logprobs.tokens == scored.tokens[:prompt_tokens]
    assert alone.choices[0].logprobs.token_logprobs == scored.token_logprobs[:prompt_tokens]
    streamed = [p.choices[0] for p in text(server, logprobs=3, echo=True, stream=True)]
    assert "".join(c.text for c in streamed) == choice.text
    assert [t for c in streamed for t in c.logprobs.text_offset] == scored.text_offset
    assert text(server, logprobs=0).choices[0].logprobs.top_logprobs is None


def test_logprobs_of_a_chat(server: Server) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    said = b"".join(bytes(entry.bytes) for entry in content)
    assert said.decode(errors="replace") == answer.choices[0].message.content
    for entry in content:
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert len(entry.top_logprobs) == 2
    assert answer.choices[0].message.role == "assistant"
    streamed = [p.choices[0] for p in chat(server, logprobs=True, top_logprobs=2, stream=True)]
    assert streamed[0].delta.role == "assistant"
    assert [e for c in streamed if c.logprobs for e in c.logprobs.content] == content
    assert "".join(c.delta.content for c in streamed) == answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="logprobs: true"):
        chat(server, top_logprobs=2)


def test_activity_comes_with_every_decoded_token(server: Server) -> None:
    def ask(**body: Any) -> list[Any]:
        pieces = text(server, max_tokens=4, stream=True, extra_body=body)
        return [piece.choices[0].model_extra.get("activity") for piece in pieces]

    first, *others = ask(activity=True, sparsity="fast")
    assert first is None, "it was computed with the prompt"
    for layers in others:
        assert len(layers) == 8
        for layer in layers:
            assert (len(layer["neurons"]), layer["heads"]) == (32, [1] * 16)
            mean = sum(layer["neurons"]) / 32
            assert mean == pytest.approx(100 * layer["density"], abs=0.51)
    assert ask(activity=True, sparsity="dense") == [None] * 4
    assert ask(sparsity="fast") == [None] * 4


def test_max_tokens_and_its_newer_name(server: Server) -> None:
    def said(**limits: int) -> tuple[int, str]:
        answer = chat(server, **{"max_tokens": None, **limits})
        return answer.usage.completion_tokens, answer.choices[0].finish_reason

    assert said(max_completion_tokens=5) == (5, "length")
    assert said(max_completion_tokens=5, max_tokens=5) == (5, "length")
    with pytest.raises(openai.BadRequestError, match="give one of them"):
        said(max_completion_tokens=5, max_tokens=6)
    tokens, reason = said()
    assert reason == "stop" or tokens > 60, "up to the context, no silent limit"


NULLS = ("max_tokens", "stop", "seed", "temperature", "top_p", "n", "logit_bias", "user")


@pytest.mark.parametrize(
    "body",
    [
        *({name: None} for name in NULLS),
        *({"stop": stop} for stop in ("x", [], "", ["1", "2", "3", "4", "5"])),
        *({"logit_bias": bias} for bias in ({}, {"5": 100})),
        {"user": "somebody"},
        {"stream": None, "stream_options": None, "logprobs": None, "sparsity": None},
    ],
    ids=str,
)
def test_legal_but_rare_values(body: dict[str, Any], server: Server) -> None:
    for path, rest in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HELLO})):
        request = {"model": CHATTY, "max_tokens": 3, **rest, **body}
        answer = server.post(f"/v1/{path}", json=request)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": [1]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "word " * 600}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"model": None}, "model"),
    ],
    ids=str,
)
def test_wrong_values_are_named(body: dict[str, Any], param: str, server: Server) -> None:
    request = {"model": CHATTY, "prompt": "a", "max_tokens": 3, **body}
    as_ascii = json.dumps(request).encode()  # where a lone surrogate may stand
    json_type = {"Content-Type": "application/json"}
    answer = server.post("/v1/completions", content=as_ascii, headers=json_type)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert server.health() is not None


def test_every_field_of_the_official_client_is_known() -> None:
    """And the tables hold nothing else."""
    for theirs, request, table in (
        (chat_create_params.CompletionCreateParamsBase, ChatRequest, fields.CHAT),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest, fields.TEXT),
    ):
        known = set(theirs.__annotations__)
        assert known - set(request.model_fields) <= set(table)
        assert not set(table) & set(request.model_fields)


@pytest.mark.parametrize("name", list(fields.CHAT))
def test_fields_without_an_effect_are_refused_unless_they_ask_for_nothing(
    name: str, server: Server
) -> None:
    def ask(value: object) -> int:
        body = {"model": CHATTY, "messages": HELLO, "max_tokens": 1, name: value}
        answer = server.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            assert answer.json()["error"]["param"] == name
        return answer.status_code

    assert [ask(value) for value in (None, *fields.CHAT[name])] == [200] * (
        1 + len(fields.CHAT[name])
    )
    assert ask({"some": "thing"}) == 400


def test_unknown_fields_are_named(server: Server) -> None:
    answer = text(server, extra_body={"mirostat": 2})
    assert answer.model_extra["warnings"] == ["the field 'mirostat' is not known and was ignored"]
    assert "warnings" not in text(server).model_extra
    (first, *_) = text(server, extra_body={"mirostat": 2}, stream=True)
    assert "mirostat" in first.model_extra["warnings"][0]
    with pytest.raises(openai.BadRequestError, match="suffix"):
        text(server, suffix="the end")


def test_parts_of_a_message_are_joined(server: Server) -> None:
    def content(parts: Any) -> list[Any]:
        return [{"role": "user", "content": parts}]

    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    one, other = chat(server, content(parts)), chat(server, content("Hello\nthere"))
    assert one.choices[0].message == other.choices[0].message
    assert one.usage == other.usage
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for messages, why in (
        (content([*parts, image]), "image_url"),
        (content(None), "content"),
        ([{"role": "system", "content": "Be brief"}, *HELLO], "no system messages"),
        ([{"role": "developer", "content": "Be brief"}, *HELLO], "no system messages"),
        ([], "messages"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            chat(server, messages)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        chat(server, model=NAME)


def test_parallel_requests_get_what_each_gets_alone(
    server: Server, expected: Callable[..., str]
) -> None:
    """Three sparsities, streamed and not, differing lengths; a third leave early."""
    prompts = ["Once", "The sea was calm that night, and nobody", "He said that", "A king " * 20]
    jobs = [
        (prompts[i % 4], ("balanced", "dense", "fast")[i // 4 % 3], 5 + i % 3 * 15, i % 2, i % 3)
        for i in range(36)
    ]

    async def one(prompt: str, sparsity: str, count: int, stream: int, kind: int) -> str | None:
        async with server.async_client() as client:
            ask = client.completions.create(
                model=NAME,
                prompt=prompt,
                max_tokens=count,
                temperature=0,
                stream=bool(stream),
                extra_body={"sparsity": sparsity},
            )
            if kind == 2:
                try:
                    answer = await asyncio.wait_for(ask, 0.2)
                except TimeoutError:
                    return None
                if stream:
                    await anext(aiter(answer))
                    await answer.close()
                return None
            answer = await ask
            if not stream:
                return str(answer.choices[0].text)
            return "".join([piece.choices[0].text async for piece in answer])

    async def everything() -> list[str | None]:
        return await asyncio.gather(*(one(*job) for job in jobs))

    said = asyncio.run(everything())
    for (prompt, sparsity, count, _, kind), answer in zip(jobs, said, strict=True):
        if kind != 2:
            assert answer == expected(prompt, sparsity, max_tokens=count)
