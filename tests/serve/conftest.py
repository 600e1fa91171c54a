"""Servers for the tests, each started once, and what a model says when asked without one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra dejavu-llm[serve]")
pytest.importorskip("openai", reason="needs the extra dejavu-llm[dev]")

from dejavu import LLM, SamplingParams
from dejavu.embedded import MODEL, NAME
from dejavu.load import LoadedModel, load_model
from models.tiny import Case, build

from .process import Server

# Writes plainly what it got, and refuses a system message as some published ones do.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a chat template and a context of 96 tokens."""
    folder = tmp_path_factory.mktemp("chatty")
    fields = {"vocab_size": 8192, "max_position_embeddings": 96, "eos_token_id": 2}
    build(Case("opt", "opt", fields), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    return folder


@pytest.fixture(scope="session")
def server(chatty: Path) -> Iterator[Server]:
    """The embedded model with its plan, and `org/chatty`."""
    also = ("--also", f"org/chatty={chatty}")
    server = Server(NAME, "--plan", NAME, *also, "--threads", 1, "--max-queue", 200)
    yield server.ready()
    assert server.process.poll() is None, "it lives to the end of the tests"
    assert server.stop() is not None
    assert not [line for line in server.lines if "traceback" in line]


@pytest.fixture(scope="session")
def small(chatty: Path) -> Iterator[Server]:
    """One row, one place in the queue, an API key."""
    server = Server(
        chatty,
        *("--name", "tiny", "--max-batch", 1, "--max-queue", 1, "--max-body", 100_000),
        *("--threads", 1),
        key="secret",
        DEJAVU_API_KEY="secret",
    )
    yield server.ready()
    server.stop()


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return load_model(NAME)


@pytest.fixture(scope="session")
def expected(loaded: LoadedModel) -> Callable[..., str]:
    """What the embedded model says, by `LLM` in this process: `expected("Once", "fast")`."""
    llms: dict[str, LLM] = {}
    said: dict[tuple[str, str, SamplingParams], str] = {}

    def ask(prompt: str, sparsity: str = "careful", **params: object) -> str:
        if sparsity not in llms:
            plan = {} if sparsity == "dense" else {"plan": NAME, "level": sparsity}
            llms[sparsity] = LLM(loaded, threads=1, **plan)  # type: ignore[arg-type]
        wanted = SamplingParams(**params)  # type: ignore[arg-type]
        key = sparsity, prompt, wanted
        if key not in said:
            said[key] = llms[sparsity].generate(prompt, wanted).text
        return said[key]

    return ask
