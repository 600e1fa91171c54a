"""Where a server's settings come from, and what is wrong with them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from dejavu.cli import main
from dejavu.embedded import NAME
from dejavu.errors import InputError
from dejavu.serve import run
from dejavu.serve.logs import log_to_stderr
from dejavu.serve.settings import Settings

FILE = """
port = 4000
max_batch = 3
max_queue = 5
[[models]]
name = "a"
source = "somewhere"
plan = "a-plan"
level = "fast"
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What would be served."""
    found: list[Settings] = []
    monkeypatch.setattr(run, "run", found.append)
    monkeypatch.setattr("dejavu.serve.logs.log_to_stderr", lambda level: None)
    return found


def serve(*arguments: object) -> Any:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *map(str, arguments)])
    return stop.value.code


def test_flags_win_over_environment_over_file(
    asked: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(FILE)
    monkeypatch.setenv("DEJAVU_MAX_BATCH", "7")
    monkeypatch.setenv("DEJAVU_PORT", "5000")
    monkeypatch.setenv("DEJAVU_API_KEY", "secret")
    assert not serve("--config", file, "--port", 6000)
    (found,) = asked
    assert (found.port, found.max_batch, found.max_queue) == (6000, 7, 5)
    assert (found.api_key, found.host) == ("secret", "127.0.0.1")
    (model,) = found.models
    assert (model.name, model.source, model.plan, model.level) == (
        "a",
        "somewhere",
        "a-plan",
        "fast",
    )
    assert "secret" not in repr(found)


def test_a_gpu_by_flag_environment_and_file(
    asked: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('device = "cuda:1"\nlazy_kv = true\nwhole_layers = false\n')
    model = ("a", "--plan", "p", "--dtype", "fp16")
    assert not serve(*model, "--config", file)
    assert not serve(*model, "--device", "cuda", "--lazy-kv", "--no-whole-layers")
    monkeypatch.setenv("DEJAVU_DEVICE", "cuda:0")
    monkeypatch.setenv("DEJAVU_LAZY_KV", "1")
    assert not serve(*model)
    assert [(s.device, s.lazy_kv, s.whole_layers) for s in asked] == [
        ("cuda:1", True, False),
        ("cuda", True, False),
        ("cuda:0", True, True),
    ]


def test_a_replica_on_a_gpu_reserves_one(asked: list[Settings]) -> None:
    for device in ("cpu", "cuda"):
        assert not serve("a", "--device", device)
    assert [one.needs(3) for one in asked] == [{"num_cpus": 3}, {"num_cpus": 3, "num_gpus": 1}]


def test_a_gpu_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert serve(NAME, "--device", "cuda", "--port", 0) == 1
    assert "--device cuda cannot be used" in capsys.readouterr().err


def test_models_by_name(asked: list[Settings]) -> None:
    also = ("--also", "b=org/b", "--also", "c=org/a,org/plan")
    assert not serve("org/a", "--name", "a", "--plan", "p", *also, "--dtype", "int8")
    found = [(m.name, m.source, m.plan, m.dtype) for m in asked[0].models]
    assert found == [
        ("a", "org/a", "p", "int8"),
        ("b", "org/b", None, "int8"),
        ("c", "org/a", "org/plan", "int8"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model: give MODEL"),
        (("a", "--also", "a=b"), "same name"),
        (("a", "--also", "b"), "NAME=MODEL"),
        (("a", "--max-batch", 0), "--max-batch: "),
        (("a", "--port", 70000), "--port: "),
        (("a", "--cache-memory", 0), "--cache-memory: "),
        (("--config", "nowhere.toml"), "cannot read nowhere.toml: No such file"),
        (("a", "--replicas", 2), "--max-replicas, --target-ongoing go with --ray"),
        (("a", "--ray", "--replicas", 3, "--max-replicas", 2), "below --replicas 3"),
        (("a", "--device", "gpu"), "--device: 'gpu' is unknown; what exists is cpu"),
        (("a", "--dtype", "fp16"), "fp16 weights need --device cuda"),
        (("a", "--dtype", "int8", "--device", "cuda"), "int8 weights do not run on cuda"),
        (("a", "--plan", "p", "--lazy-kv"), "give --device cuda too"),
        (("a", "--lazy-kv", "--device", "cuda"), "goes with a plan"),
        (("a", "--memory-limit", "1GB", "--device", "cuda"), "is for the CPU"),
        (("a", "--device", "cuda:1", "--ray"), "a GPU of its own"),
    ],
)
def test_wrong_settings_are_named(
    arguments: tuple[object, ...],
    message: str,
    asked: list[Settings],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve(*arguments) == 1
    assert message in capsys.readouterr().err
    assert asked == []


def test_keys_of_the_file_that_nobody_knows_are_refused(
    asked: list[Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.toml"
    for text, message in (("max_bach = 3", "max_bach"), ("= 3", "TOML")):
        file.write_text(text)
        assert serve("a", "--config", file) == 1
        assert message in capsys.readouterr().err


def test_a_busy_port_shows_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve("nowhere/at-all", "--port", port) == 1
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_level_of_logs_that_nobody_knows() -> None:
    with pytest.raises(InputError, match=r"'loud'.*info"):
        log_to_stderr("loud")
