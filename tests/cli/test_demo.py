"""`dejavu demo` but for its timing, which is a bench as any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dejavu.bench import decode
from dejavu.bench.result import BenchResult

from .conftest import run

RESULT = Path(__file__).parents[2] / "docs" / "results" / "bench-relu-30m.json"


def test_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = BenchResult.from_json(json.loads(RESULT.read_text()))
    arms = [replace(a, name=a.name.replace("plan careful", "sparse")) for a in told.arms]

    def timed(*_: Any, **__: Any) -> BenchResult:
        return replace(told, arms=arms)

    monkeypatch.setattr(decode, "bench_subject", timed)
    result = tmp_path / "demo.json"
    assert run("demo", "--tokens", 600, "-n", 8, "--json", result) == 0
    shown = capsys.readouterr()
    assert "its plan at level careful" in shown.out
    assert "Perplexity on the first 600 tokens" in " ".join(shown.out.split())
    stages = [line for line in shown.err.splitlines() if line.endswith(" ...")]
    assert [line.split()[0] for line in stages] == ["loading", "reading", "timing", "writing"]
    found = json.loads(result.read_text())
    assert found["level"] == "careful"
    assert found["perplexity"]["tokens"] == 600
    for name, text in found["text"].items():
        assert f"{name}: {found['prompt']}{text}" in shown.out
