"""Every command on the embedded model, in process, and once with wrong input."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from dejavu.cli.app import app
from dejavu.embedded import MODEL, PLAN

from .conftest import run

COMMANDS = [
    "plan",
    "plan show",
    "plan level",
    "plan count",
    "plan push",
    "plan pull",
    "tune",
    "demo",
    "generate",
    "chat",
    "measure",
    "prepare",
    "quantize",
    "pack",
    "verify",
    "eval",
    "bench",
    "serve",
    "batch",
]


def run_json(path: Path, *argv: object) -> dict[str, Any]:
    assert run(*argv, "--json", path) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_true_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    shown = capsys.readouterr().out.partition("Example")[2]
    assert f"dejavu {command}" in shown
    examples = shown.partition("\n╭")[0].replace("\n", " ").split(" dejavu ")[1:]
    for example in examples:
        words = example.split()
        name = " ".join(words[:2] if words[0] == "plan" else words[:1])
        flags = _flags(name)
        assert flags >= {word for word in words if word.startswith("-") and word != "-"}, example


def _flags(command: str) -> set[str]:
    found: Any = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]
    return {flag for option in found.params for flag in (*option.opts, *option.secondary_opts)}


def test_help_is_cheap() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['dejavu', '--help']\n"
        "from dejavu.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("dejavu ")


def test_generate_streams_and_repeats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("generate", "relu-30m", "--prompt", "Once upon a time", "-n", 12) == 0
    streamed = capsys.readouterr().out
    found = run_json(
        tmp_path / "a.json", "generate", "relu-30m", "--prompt", "Once upon a time", "-n", 12
    )
    (completion,) = found["completions"]
    assert completion["text"] + "\n" == streamed
    assert completion["finish_reason"] == "length"
    assert len(completion["token_ids"]) == 12


def test_generate_several_with_the_plan(tmp_path: Path) -> None:
    prompts = ("--prompt", "The old house", "--prompt", "She")
    found = run_json(
        tmp_path / "a.json", "generate", "relu-30m", *prompts, "--plan", "relu-30m", "-n", 5
    )
    assert [len(c["token_ids"]) for c in found["completions"]] == [5, 5]
    assert 0.0 < found["completions"][0]["density"] < 0.9
    assert found["whole_layers"] == 0.0  # a CPU always chooses


def test_an_answer_that_the_context_ends_is_said_to_be_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompt = ("generate", "relu-30m", "--prompt", "word " * 500)
    for more in ((), ("--json", "-")):
        assert run(*prompt, "-n", 1000, *more) == 0
        found = re.search(
            r"after (\d+) of 1000 tokens .*'s (\d+) it .* context of 512", capsys.readouterr().err
        )
        assert found is not None
        assert int(found[1]) + int(found[2]) == 512
    assert run(*prompt, "-n", 1) == 0
    assert "note:" not in capsys.readouterr().err


def test_chat_says_at_once_that_a_model_cannot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dejavu import load

    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    assert run("chat", "relu-30m") == 1
    assert "relu-30m has no chat template" in capsys.readouterr().err


def test_json_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "relu-30m", "--prompt", "A", "-n", 2, "--json", "-") == 0
    assert len(json.loads(capsys.readouterr().out)["completions"]) == 1


def test_eval_dense_and_with_a_plan(tmp_path: Path) -> None:
    dense = run_json(tmp_path / "a.json", "eval", "relu-30m", "-n", 300)
    both = run_json(tmp_path / "b.json", "eval", "relu-30m", "-n", 300, "--plan", "relu-30m")
    assert both["dense"]["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-6)
    assert both["ratio"] == pytest.approx(
        both["sparse"]["perplexity"] / both["dense"]["perplexity"], rel=1e-6
    )
    assert both["reads"]["weight_bytes"] < 1.0


def test_eval_reads_a_plan_once_and_names_its_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dejavu.eval import suite
    from dejavu.predictor import plan

    read, own = [], plan.load_plan

    def counted(source: str) -> plan.Plan:
        read.append(source)
        return own(source)

    monkeypatch.setattr(plan, "load_plan", counted)
    argv = ("eval", "relu-30m", "-n", 100, "--plan", "relu-30m")
    assert run_json(tmp_path / "a.json", *argv)["level"] == "careful"
    assert read == ["relu-30m"]
    told = []

    def stopped(*_: Any, selection: dict[str, Any], **__: Any) -> None:
        told.append(selection)
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "SuiteOptions", lambda *_, **__: None)
    monkeypatch.setattr(suite, "Suite", stopped)
    suite_of = ("--suite", "paper", "--data", tmp_path, "--policy", "oracle")
    assert run("eval", "relu-30m", "--plan", "relu-30m", *suite_of[:4]) == 130
    assert run("eval", "relu-30m", *suite_of) == 130
    assert told[0].pop("sha256")
    assert told == [{"plan": "relu-30m", "level": "careful"}, {"policy": "oracle"}]
    assert read == ["relu-30m"] * 2


@pytest.mark.parametrize(
    ("asked", "level", "fast"),
    [
        ((), "careful", 0.03),
        (("--max-loss", "2%"), "balanced", 0.03),
        (("--max-loss", "5%"), "balanced", 0.05),
        (("--max-loss", "5%", "--fast-loss", "8%"), "balanced", 0.08),
    ],
)
def test_prepare_makes_the_level_asked_for_the_default(
    asked: tuple[str, ...], level: str, fast: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dejavu.predictor import prepare

    seen = []

    def stopped(*args: Any, options: Any, **rest: Any) -> None:
        seen.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "prepare", stopped)
    run("prepare", "relu-30m", "--out", "plan", *asked)
    assert [(options.default_level, options.fast_loss) for options in seen] == [(level, fast)]


def test_eval_with_a_policy(tmp_path: Path) -> None:
    found = run_json(tmp_path / "a.json", "eval", "relu-30m", "-n", 200, "--policy", "oracle")
    assert found["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert found["reads"]["neuron_density"] < 0.2


@pytest.mark.parametrize(("policy", "density"), [("topk:keep=1", 1), ("threshold:value=1e9", 0)])
def test_an_option_has_an_effect_at_both_ends(tmp_path: Path, policy: str, density: float) -> None:
    found = run_json(tmp_path / "r.json", "eval", "relu-30m", "--policy", policy, "-n", 200)
    assert found["reads"]["neuron_density"] == density
    assert (found["ratio"] == pytest.approx(1, abs=1e-4)) == (density == 1)


def test_measure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    argv = ("measure", "relu-30m", "--windows", 1, "--window", 64, "--densities", "0.2")
    first = run_json(tmp_path / "a.json", *argv, "--plots", tmp_path / "plots")
    again = run_json(tmp_path / "b.json", *argv)
    assert first == again
    assert list((tmp_path / "plots").glob("*.png"))


def test_plan_show(tmp_path: Path) -> None:
    found = run_json(tmp_path / "a.json", "plan", "show", "relu-30m")
    assert {"exact", "balanced", "fast"} <= found["levels"].keys()
    assert found["default_level"] == "careful"


def test_plan_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("plan", "level", "relu-30m", "relu-30m", "--name", "wide", "--tokens", 600)
    out = tmp_path / "plan"
    found = run_json(tmp_path / "a.json", *command, "--max-loss", "20%", "--default", "--out", out)
    report = found["report"]
    assert 1 < report["perplexity_ratio"] + report["perplexity_ratio_error"] <= 1.2
    shown = run_json(tmp_path / "b.json", "plan", "show", out)
    assert shown["levels"]["wide"]["report"] == report
    assert shown["default_level"] == "wide"
    assert list(shown["levels"]) == ["exact", "careful", "balanced", "fast", "wide"]
    capsys.readouterr()
    assert run(*command, "--max-loss", "much", "--out", out) == 1
    assert "--max-loss: 'much' is not a share" in capsys.readouterr().err


def test_bench(tmp_path: Path) -> None:
    found = run_json(
        tmp_path / "a.json",
        *("bench", "relu-30m", "--plan", "relu-30m", "--levels", "balanced", "--peers", "none"),
        *("--new-tokens", 2, "--repeats", 1, "--prompt-tokens", 8),
    )
    assert [arm["name"] for arm in found["arms"]] == ["dense", "exact", "plan balanced"]
    assert found["conditions"]["prompt_tokens"] == 8


def test_quantize_the_quantised_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("quantize", MODEL, "--out", tmp_path / "q") == 1
    assert "quantised already, to int8: use it as it is" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(tmp_path / "v.json", "verify", "relu-30m", "--plan", "relu-30m")
    assert found["identity"].startswith("d31fc6e1")
    assert found["without_hash"] == []
    folder = shutil.copytree(PLAN, tmp_path / "plan")
    content = json.loads((folder / "plan.json").read_text())
    content["base_model"]["identity"] = "0" * 64
    (folder / "plan.json").write_text(json.dumps(content))
    assert run("verify", "relu-30m", "--plan", folder) == 1
    assert "another model, or not what it was" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("generate", "no/such/model", "--prompt", "a"), "no such file or folder"),
        (("generate", "relu-30m"), "--prompt"),
        (("generate", "relu-30m", "--prompt", "a", "--temperature", "-1"), "temperature"),
        (("generate", "relu-30m", "--prompt", "a", "--dtype", "fp8"), "fp8"),
        (("generate", "relu-30m", "--prompt", "a", "--level", "fast"), "plan"),
        (("generate", "relu-30m", "--prompt", "a", "--stop", ""), "--stop ''"),
        (("generate", "relu-30m", "--prompt", "a", "--top-k", "-2"), "--top-k must"),
        (("generate", "relu-30m", "--prompt", "a", "--plan", "nowhere//x"), "nowhere"),
        (("generate", "relu-30m", "--prompt", "a", "--plan", str(MODEL)), "plan.json"),
        (("generate", "relu-30m", "--prompt", "word " * 600), "512"),
        (("eval", "relu-30m", "--preset", "foo"), "foo"),
        (("eval", "relu-30m", "--policy", "tpok:keep=0.1"), "topk"),
        (("eval", "relu-30m", "--plan", "relu-30m", "--level", "turbo"), "balanced"),
        (("measure", "relu-30m", "--densities", "0.5,x"), "--densities"),
        (("measure", "relu-30m", "--densities", ""), "--densities: '' names nothing"),
        (("measure", "relu-30m", "--densities", "2"), "--densities: 2"),
        (("bench", "relu-30m", "--densities", ","), "--densities: ',' names nothing"),
        (("bench", "relu-30m", "--peers", "transformers-static"), "--peers transformers-static"),
        (("bench", "relu-30m", "--kernels", "--plot", "a.png"), "--plot: not with --kernels"),
        (
            ("bench", "relu-30m", "--peers", "none", "--prompt-tokens", "500"),
            "at most --prompt-tok",
        ),
        (("prepare", "relu-30m", "--out", "plan", "--max-loss", "200"), "'200' is 20000%"),
        (
            ("prepare", "relu-30m", "--out", "plan", "--max-loss", "5%", "--fast-loss", "3%"),
            "larger --fast-loss",
        ),
        (("prepare", "relu-30m", "--out", "plan", "--ranks", "a,b"), "whole numbers like 8,16"),
        (("prepare", "relu-30m", "--out", "plan", "--predictor", "x"), "'x'"),
        (("bench",), "--shape"),
        (("bench", "--shape", "opt-1.3"), "opt-1.3b"),
        (("bench", "relu-30m", "--levels", "fast"), "--plan"),
        (("prepare", "relu-30m", "--out", "plan", "--max-loss", "much"), "--max-loss"),
        (("prepare", "relu-30m", "--out", "plan", "--max-loss", "-1%"), "--max-loss: '-1%'"),
        (("plan", "show", "nowhere//x"), "nowhere"),
        (("plan", "show", str(PLAN.parent)), "there is no plan.json in that folder; plans are"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_wrong_input_names_what_is_wrong(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err


def test_wrong_usage_is_exit_code_2() -> None:
    assert run("generate", "relu-30m", "--no-such-option") == 2
    assert run("prepare", "relu-30m") == 2


def test_embedded_files_fit_the_package() -> None:
    folder = PLAN.parent
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size <= 36_000_000
