"""The server on a GPU: the engine's thread replays and captures there, whoever loaded the model.

fp32 throughout. One answer at a time is that of `LLM` bit for bit. Beside others a row is computed
by kernels for more rows, which round otherwise: a text may part from the one it gets alone where
the two likeliest tokens nearly tie.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from dejavu import LLM, SamplingParams
from dejavu.embedded import NAME
from dejavu.engine.output import Chunk
from dejavu.errors import DejavuError, InputError
from dejavu.load import LoadedModel, load_model
from dejavu.serve.batch import run_batch
from dejavu.serve.mailbox import Mailbox
from dejavu.serve.models import DENSE, ServedModel, serve_models
from dejavu.serve.settings import Settings, settings
from dejavu.serve.worker import Event, Job, Worker

from .process import Server, until
from .scene import run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:the plan was calibrated on int8 weights"),
]
ARMS = (DENSE, "exact", "careful", "fast")
TIE = 0.05  # in nats between the two likeliest tokens
PROMPTS = [
    f"{opening} {'and the old house at the end of the road ' * (n % 5)}"
    for n, opening in enumerate(
        ("Once upon a time", "It was", "The captain said that", "She", "In the year of") * 5
    )
]
Said = Callable[[str, str, int], list[tuple[str, float]]]


@pytest.fixture(scope="module")
def on_gpu() -> LoadedModel:
    return load_model(NAME, dtype="fp32", device="cuda")


@pytest.fixture(scope="module")
def said(on_gpu: LoadedModel) -> Said:
    """What `LLM` says alone, token by token, and how far its two likeliest tokens were apart."""

    @cache
    def llm(arm: str) -> LLM:
        plan = {} if arm == DENSE else {"plan": NAME, "level": arm}
        return LLM(on_gpu, whole_layers=False, **plan)  # type: ignore[arg-type]

    @cache
    def ask(arm: str, prompt: str, tokens: int) -> list[tuple[str, float]]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=2)
        found = []
        for chunk in llm(arm).stream(prompt, params):
            assert chunk.logprob is not None
            (_, first), (_, second) = chunk.logprob.top
            found.append((chunk.text, first - second))
        return found

    return ask


def same_but_for_ties(text: str, alone: list[tuple[str, float]]) -> bool:
    """Whether a text is the one that came alone; else they part where tokens nearly tied."""
    expected = "".join(piece for piece, _ in alone)
    if text == expected:
        return True
    parted = next(
        (n for n, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b),
        min(len(text), len(expected)),
    )
    length, gaps = 0, []
    for piece, gap in alone:  # a token may show its text a little later: those around it count too
        if length - 8 <= parted <= length + len(piece) + 8:
            gaps.append(gap)
        length += len(piece)
    assert min(gaps) < TIE, (expected, text, gaps)
    return False


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    arguments = ("--device", "cuda", "--dtype", "fp32", "--no-whole-layers", "--max-queue", 200)
    server = Server(NAME, "--plan", NAME, *arguments)
    yield server.ready()
    assert server.process.poll() is None, "it lives to the end of the tests"
    server.stop()
    assert not [line for line in server.lines if "traceback" in line]


def body(arm: str, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    fields = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "sparsity": arm}
    return {"model": NAME, "prompt": prompt} | fields | more


def stream(server: Server, asked: dict[str, Any], leave_after: int | None = None) -> str:
    """The text of a stream, or of its beginning."""
    text, pieces = "", 0
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=asked | {"stream": True}, timeout=120
    ) as got:
        assert got.status_code == 200, got.read()
        for line in filter(None, got.iter_lines()):
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return text
            choices = json.loads(data)["choices"]
            text += choices[0]["text"]
            pieces += 1
            if pieces == leave_after:
                return text
    raise AssertionError(f"the stream broke off after {pieces} pieces")


@pytest.mark.parametrize("arm", ARMS)
def test_one_at_a_time_is_what_llm_says(arm: str, server: Server, said: Said) -> None:
    for prompt in PROMPTS[:5]:
        expected = "".join(text for text, _ in said(arm, prompt, 60))
        assert stream(server, body(arm, prompt, 60)) == expected
    until(server.idle, 5)


def test_many_streams_some_of_which_leave(server: Server, said: Said) -> None:
    """All levels at once over 24 connections, while graphs are captured and metrics are read."""
    done = threading.Event()
    read = []

    def scrape() -> None:
        while not done.wait(0.02):
            read.append(httpx.get(f"{server.url}/metrics", timeout=60).status_code)

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        with ThreadPoolExecutor(24) as pool:
            wanted = [
                (ARMS[n % len(ARMS)], PROMPTS[n % len(PROMPTS)], 30 + 10 * (n % 5), n % 3 == 2)
                for n in range(72)
            ]
            found = list(
                pool.map(
                    lambda one: stream(
                        server, body(*one[:3]), leave_after=one[2] // 2 if one[3] else None
                    ),
                    wanted,
                )
            )
    finally:
        done.set()
        scraper.join()
    until(server.idle, 5)
    assert set(read) == {200}
    whole = [
        same_but_for_ties(text, said(arm, prompt, tokens))
        for text, (arm, prompt, tokens, left) in zip(found, wanted, strict=True)
        if not left
    ]
    assert sum(whole) > 0.8 * len(whole), "few texts meet a tie"
    assert server.metric("dejavu_dropped_total") >= len(wanted) - len(whole)


def test_fields_and_metrics(server: Server, said: Said) -> None:
    both = server.post("/v1/completions", json=body("fast", PROMPTS[0], 20, n=2, logprobs=2)).json()
    assert both["sparsity"] == "fast"
    for choice in both["choices"]:
        same_but_for_ties(choice["text"], said("fast", PROMPTS[0], 20))
        assert len(choice["logprobs"]["tokens"]) == 20
    sampled = [
        server.post(
            "/v1/completions",
            json=body("careful", PROMPTS[1], 20, temperature=0.9, seed=7, top_p=0.9),
        ).json()["choices"][0]["text"]
        for _ in range(2)
    ]
    assert sampled[0] == sampled[1], "the same seed draws the same"
    values = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in httpx.get(f"{server.url}/metrics").text.splitlines()
        if line[0] != "#"
    }
    density = values[f'dejavu_density{{level="careful",model="{NAME}",site="neurons"}}']
    assert 0.02 < density < 0.9
    held, free = (
        values[f'dejavu_device_memory_bytes{{device="cuda:0",state="{state}"}}']
        for state in ("held", "free")
    )
    assert held > 5e7
    assert free > 1e9


def test_activity_comes_with_every_decoded_token(server: Server) -> None:
    asked = body("fast", PROMPTS[0], 30, activity=True, stream=True)
    layers = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as got:
        for line in filter(None, got.iter_lines()):
            if "[DONE]" not in line:
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                layers.append(choice.get("activity"))
    assert layers[0] is None, "the first token came from the prompt"
    assert {len(one) for one in layers[1:]} == {8}
    densities = [layer["density"] for one in layers[1:] for layer in one]
    assert len(set(densities)) > 10
    assert 0.02 < sum(densities) / len(densities) < 0.6


def configured(**options: Any) -> Settings:
    entry = {"name": NAME, "source": NAME, "plan": NAME, "dtype": "fp32"}
    return settings({"models": [entry], "device": "cuda", **options})


def jobs(
    served: ServedModel, arm: str, prompts: list[str], tokens: int, *, watched: bool = False
) -> list[Job]:
    mail: Mailbox[tuple[int, Event]] = Mailbox()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [
        Job(served, served.codec.encode(prompt), params, arm, "", watched, place, mail)
        for place, prompt in enumerate(prompts)
    ]


async def chunks(wanted: list[Job]) -> dict[int, list[Chunk] | DejavuError]:
    """Chunks or the error of each job."""
    parts: dict[int, list[Chunk]] = {job.index: [] for job in wanted}
    ended: dict[int, list[Chunk] | DejavuError] = {}
    while len(ended) < len(wanted):
        for index, event in await asyncio.wait_for(wanted[0].mail.take(), 120):
            if isinstance(event, DejavuError):
                ended[index] = event
                continue
            parts[index].append(event)
            if event.completion is not None:
                ended[index] = parts[index]
    return ended


def text(found: list[Chunk] | DejavuError) -> str:
    assert isinstance(found, list), found
    return "".join(chunk.text for chunk in found)


@pytest.mark.parametrize("lazy_kv", [False, True])
def test_a_failed_step_ends_its_level_alone_and_the_next_answers_are_right(
    lazy_kv: bool, said: Said
) -> None:
    """It fails when its graph runs already and the next one may have begun."""
    served = serve_models(configured(lazy_kv=lazy_kv, whole_layers=False))[NAME]
    step: Any = served.engine.arms["careful"].step
    draw, left = step._picked.draw, 6

    def fail(logits: Any, samplers: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("a failing kernel")
        draw(logits, samplers)

    step._picked.draw = fail

    async def scene(worker: Worker) -> Any:
        broken = jobs(served, "careful", PROMPTS[:3], 40)
        sound = jobs(served, DENSE, PROMPTS[3:5], 40)
        worker.submit(broken)
        worker.submit(sound)
        first = await chunks(broken), await chunks(sound)
        left_over = jobs(served, "careful", PROMPTS[:1], 40)
        worker.submit(left_over)
        await left_over[0].mail.take()
        worker.cancel(left_over)
        after = []
        for prompt in PROMPTS[:4]:
            one = jobs(served, "careful", [prompt], 40)
            worker.submit(one)
            after.append(text((await chunks(one))[0]))
        return *first, after, worker.alive

    failed, sound, after, alive = run(served, scene)
    assert all(isinstance(error, DejavuError) for error in failed.values())
    for place, prompt in enumerate(PROMPTS[3:5]):
        same_but_for_ties(text(sound[place]), said(DENSE, prompt, 40))
    for found, prompt in zip(after, PROMPTS, strict=False):
        assert found == "".join(piece for piece, _ in said("careful", prompt, 40))
    assert alive
    assert served.engine.free_blocks == served.engine.cache_blocks


def test_activity_is_what_the_meter_counts_where_layers_are_computed_whole() -> None:
    """16 rows list most neurons together, so MLPs are computed whole, and are told to be."""
    served = serve_models(configured())[NAME]

    async def scene(worker: Worker) -> Any:
        wanted = jobs(served, "careful", PROMPTS[:16], 150, watched=True)
        worker.submit(wanted)
        return await chunks(wanted)

    found = run(served, scene)
    told = [
        layer.density
        for answer in found.values()
        for chunk in answer
        for layer in chunk.activity or ()
    ]
    assert len(told) == 16 * 149 * 8
    counted = served.engine.density_of("careful")
    assert counted is not None
    assert abs(sum(told) / len(told) - counted) < 0.02
    if served.engine.whole_share("careful"):
        assert max(told) == 1.0


def test_two_models_share_what_the_gpu_has_left() -> None:
    entries = [
        {"name": name, "source": NAME, "plan": NAME, "dtype": dtype}
        for name, dtype in (("single", "fp32"), ("half", "fp16"))
    ]
    served = serve_models(settings({"models": entries, "device": "cuda"}))
    for one in served.values():
        assert one.engine.max_model_len == 512
        assert one.loaded.model.device.type == "cuda"

        async def scene(worker: Worker, one: ServedModel = one) -> Any:
            wanted = jobs(one, "careful", PROMPTS[:4], 20)
            worker.submit(wanted)
            return await chunks(wanted)

        assert all(len(answer) == 20 for answer in run(one, scene).values())


def test_int8_weights_are_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match="--dtype fp16"):
        serve_models(settings({"models": [{"name": "a", "source": NAME}], "device": "cuda"}))


def test_a_batch_on_a_gpu(tmp_path: Path, said: Said) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = [(ARMS[n % len(ARMS)], prompt, 20 + n) for n, prompt in enumerate(PROMPTS[:12])]
    source.write_text(
        "".join(
            json.dumps({"custom_id": str(n), "url": "/v1/completions", "body": body(*one)}) + "\n"
            for n, one in enumerate(asked)
        )
    )
    summary = run_batch(configured(whole_layers=False), source, out)
    assert (summary.errors, summary.tokens) == (0, sum(tokens for *_, tokens in asked))
    for line, one in zip(out.read_text().splitlines(), asked, strict=True):
        found = json.loads(line)["response"]["body"]
        assert found["sparsity"] == one[0]
        same_but_for_ties(found["choices"][0]["text"], said(*one))
