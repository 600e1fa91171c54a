"""Batches over files: every line has its answer, whatever it holds and whatever stops the run."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dejavu import LLM, SamplingParams
from dejavu.cli import main
from dejavu.errors import DejavuError, InputError
from dejavu.serve import batch_files
from dejavu.serve.batch import Summary, _fingerprint, run_batch
from dejavu.serve.settings import Settings, settings

from .process import until

Write = Callable[..., Path]


def line(prompt: str = "Once", *, tokens: int = 5, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    entry = {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": body}
    body |= changes.pop("body", {})
    return entry | changes


def lines(count: int) -> list[dict[str, Any]]:
    """Of many lengths, so that they end in another order than they begin."""
    return [line(f"A tale of {i} men", tokens=1 + 37 * i % 64) for i in range(count)]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*entries: dict[str, Any] | bytes, name: str = "in.jsonl") -> Path:
        raw = [e if isinstance(e, bytes) else json.dumps(e).encode() for e in entries]
        (tmp_path / name).write_bytes(b"".join(one + b"\n" for one in raw))
        return tmp_path / name

    return write


@pytest.fixture
def tiny(chatty: Path) -> Settings:
    entry = {"name": "tiny", "source": str(chatty)}
    return settings({"models": [entry], "threads": 1, "max_batch": 4})


def read(path: Path) -> list[dict[str, Any]]:
    """Without the times at which answers were made, which alone may differ between two runs."""
    entries = [json.loads(raw) for raw in path.read_bytes().splitlines()]
    for entry in entries:
        if entry["response"] and "created" in entry["response"]["body"]:
            assert entry["response"]["body"].pop("created") > 0
    return entries


def test_answers_are_those_of_llm_in_the_order_of_the_input(
    tiny: Settings, write: Write, chatty: Path, tmp_path: Path
) -> None:
    asked = lines(20)
    seen: list[tuple[int, int]] = []
    summary = run_batch(
        tiny, write(*asked), tmp_path / "out.jsonl", lambda done, total: seen.append((done, total))
    )
    found = read(tmp_path / "out.jsonl")
    llm = LLM(str(chatty), threads=1)
    expected = [
        llm.generate(
            e["body"]["prompt"], SamplingParams(max_tokens=e["body"]["max_tokens"], temperature=0)
        )
        for e in asked
    ]
    bodies = [entry["response"]["body"] for entry in found]
    assert [entry["custom_id"] for entry in found] == [e["custom_id"] for e in asked]
    assert [body["choices"][0]["text"] for body in bodies] == [c.text for c in expected]
    assert all(set(entry) == {"id", "custom_id", "response", "error"} for entry in found)
    assert all(entry["error"] is None for entry in found)
    assert all(entry["response"]["status_code"] == 200 for entry in found)
    assert summary.tokens == sum(body["usage"]["completion_tokens"] for body in bodies) > 0
    assert summary.tokens == sum(len(c.token_ids) for c in expected)
    assert (summary.lines, summary.errors, summary.kept) == (20, 0, 0)
    assert seen == [(done, 20) for done in range(21)]
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_chats_and_several_answers(tiny: Settings, write: Write, tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    many = [line(body={"n": 2, "prompt": ["Once"] * 8}, custom_id=str(n)) for n in range(12)]
    run_batch(tiny, write(chat, *many), tmp_path / "out.jsonl")
    first, *others = read(tmp_path / "out.jsonl")
    assert first["response"]["body"]["object"] == "chat.completion"
    assert first["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    for entry in others:  # 12 times 16 answers, far more than the engine holds
        assert entry["response"]["status_code"] == 200
        assert len({c["text"] for c in entry["response"]["body"]["choices"]}) == 1
        assert len(entry["response"]["body"]["choices"]) == 16


BAD: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "not JSON": (b"{nonsense", "line 2: it is not JSON"),
    "a number of no JSON": (b'{"custom_id": "x", "body": NaN}', "NaN is no number"),
    "deep": (b"[" * 100_000, "it is not JSON"),
    "not UTF-8": (b'{"custom_id": "\xff"}', "it is not UTF-8: invalid start byte, byte 15"),
    "no object": (b"[1, 2]", "body: Input should be"),
    "unknown url": (line(url="/v1/embeddings"), "url: Input should be '/v1/chat/completions'"),
    "no url": ({"custom_id": "a", "body": {}}, "url: Field required"),
    "another method": (line(method="GET"), "method: Input should be 'POST'"),
    "no body": ({"url": "/v1/completions"}, "body: Field required"),
    "number as custom_id": (line(custom_id=7), "custom_id: Input should be a valid string"),
    "half a surrogate pair": (line(custom_id="\ud800", url="x"), "url: Input should be"),
}
REFUSED: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "invalid field": (line(body={"temperature": -1}), 400, "temperature"),
    "not supported": (line(body={"suffix": "x"}), 400, "suffix"),
    "a stream": (line(body={"stream": True}), 400, "stream"),
    "another model": (line(body={"model": "gpt-4o"}), 404, "model"),
    "no model": (line(body={"model": None}), 400, "model"),
    "no text": (line(body={"prompt": "\ud800"}), 400, "prompt"),
    "too long": (line("word " * 500), 400, "prompt"),
    "too many answers": (line(body={"n": 128}), 400, "n"),
    "no plan": (line(body={"sparsity": "fast"}), 400, "sparsity"),
}


def test_bad_lines_are_errors_in_their_place(
    tiny: Settings, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "LONGEST_LINE", 200_000)
    asked: list[dict[str, Any] | bytes] = [line()]
    asked += [entry for entry, _ in BAD.values()]
    asked += [b"", b"  \r", b"x" * 500_000]
    asked += [entry | {"custom_id": name} for name, (entry, _, _) in REFUSED.items()]
    asked += [line("last", custom_id=None)]
    summary = run_batch(tiny, write(*asked), tmp_path / "out.jsonl")
    first, *found, last = read(tmp_path / "out.jsonl")
    assert first["response"]["status_code"] == last["response"]["status_code"] == 200
    assert last["custom_id"] is None
    assert last["id"].endswith(f"_{len(asked)}"), "blank lines count, but have no answer"
    bad, long, refused = found[: len(BAD)], found[len(BAD)], found[len(BAD) + 1 :]
    for entry, (given, message) in zip(bad, BAD.values(), strict=True):
        assert entry["response"] is None
        assert entry["error"]["code"] == "invalid_line"
        assert message in entry["error"]["message"]
        if isinstance(given, dict) and isinstance(given.get("custom_id"), str):
            assert entry["custom_id"] == given["custom_id"]
    assert "longer than" in long["error"]["message"]
    for entry, (_, status, param) in zip(refused, REFUSED.values(), strict=True):
        assert entry["error"] is None
        assert entry["response"]["status_code"] == status
        assert entry["response"]["body"]["error"]["param"] == param
    assert (summary.lines, summary.errors) == (len(asked) - 2, len(BAD) + 1 + len(REFUSED))


def test_a_mark_at_the_beginning_and_no_end_of_line(
    tiny: Settings, write: Write, tmp_path: Path
) -> None:
    source = write()
    source.write_bytes(b"\xef\xbb\xbf" + json.dumps(line()).encode())
    assert run_batch(tiny, source, tmp_path / "out.jsonl").errors == 0


def test_an_input_that_asks_nothing_or_is_ambiguous_is_refused(
    tiny: Settings, write: Write, tmp_path: Path
) -> None:
    nameless = line("a", custom_id=None)
    for asked, message in (
        ([], "holds no requests"),
        ([b"", b"  "], "holds no requests"),
        ([line("a"), nameless, nameless, line("b"), line("a")], r"lines 1 and 5 .* 'a'"),
    ):
        with pytest.raises(InputError, match=message):
            run_batch(tiny, write(*asked), tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert run_batch(tiny, write(nameless, nameless), tmp_path / "out.jsonl").lines == 2


def test_a_folder_is_no_place_for_answers(tiny: Settings, write: Write, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        run_batch(tiny, write(), tmp_path / "d")


def cut(source: Path, whole: Path, place: int) -> None:
    """As if the run that wrote `whole` had been killed after so many bytes."""
    (source.parent / "out.jsonl.partial").write_bytes(whole.read_bytes()[:place])


def test_torn_lines_are_answered_again(tiny: Settings, write: Write, tmp_path: Path) -> None:
    source = write(*lines(3))
    whole = tmp_path / "whole.jsonl"
    run_batch(tiny, source, whole)
    content = whole.read_bytes()
    second = content.index(b"\n") + 1
    for place in (0, 5, 40, second - 1, second, second + 1, len(content) - 1, len(content)):
        cut(source, whole, place)
        out = tmp_path / "out.jsonl"
        summary = run_batch(tiny, source, out)
        assert summary.kept == content[:place].count(b"\n")
        assert read(out) == read(whole)
        assert not (tmp_path / "out.jsonl.partial").exists()
        out.unlink()


def test_what_is_not_ours_is_left_alone(tiny: Settings, write: Write, tmp_path: Path) -> None:
    source, out, partial = write(*lines(2)), tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    for path, content, message in (
        (partial, "a diary", "does not hold answers"),
        (partial, '{"id": "batch_req_7"}\n', "does not hold answers"),
        (out, "a diary", "does not hold answers"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            run_batch(tiny, source, out)
        assert path.read_text() == content
        path.unlink()
    with pytest.raises(InputError, match="is the input"):
        run_batch(tiny, source, source)
    with pytest.raises(InputError, match="no file"):
        run_batch(tiny, tmp_path, out)
    with pytest.raises(DejavuError, match="nowhere"):
        run_batch(settings({"models": [{"name": "a", "source": "./nowhere"}]}), source, out)
    assert list(tmp_path.iterdir()) == [source]


def test_another_input_or_model_is_not_mixed_in(
    tiny: Settings, write: Write, tmp_path: Path
) -> None:
    source, out = write(*lines(3)), tmp_path / "out.jsonl"
    run_batch(tiny, source, out)
    before = out.read_bytes()
    assert run_batch(tiny, source, out) == Summary(3, kept=3), "complete: nothing to do"
    cut(source, out, before.index(b"\n") + 1)
    partial = (tmp_path / "out.jsonl.partial").read_bytes()
    longer = tiny.model_copy(update={"max_model_len": 64})
    for other, asked in ((tiny, write(*lines(4), name="b")), (longer, source)):
        with pytest.raises(InputError, match="delete it or choose another OUT"):
            run_batch(other, asked, out)
    for content, reason in (
        (before[:-5], "damaged behind its first 2 answers"),
        (before[: before.index(b"\n") + 1], "it has 1 answers, and the input 3 lines"),
        (b"", "it has 0 answers, and the input 3 lines"),
    ):
        out.write_bytes(content)
        with pytest.raises(InputError, match=reason):
            run_batch(tiny, source, out)
    out.write_bytes(before)
    with pytest.raises(InputError, match=r"of other options \(line 1 differs"):
        run_batch(longer, source, out)
    out.unlink()
    for other, asked in ((tiny, write(*lines(3)[::-1], name="c")), (longer, source)):
        with pytest.raises(InputError, match=r"another input or other options \(line 1 differs"):
            run_batch(other, asked, out)
    assert (tmp_path / "out.jsonl.partial").read_bytes() == partial
    # Lines that came since are no other input.
    assert run_batch(tiny, write(*lines(4), name="b"), out).kept == 1


def test_only_one_process_writes(tiny: Settings, write: Write, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with (
        batch_files.Results(out),
        pytest.raises(InputError, match="another process is writing"),
    ):
        run_batch(tiny, write(line()), out)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full: the system lets no file of this process grow beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_costs_nothing(
    tiny: Settings, write: Write, tmp_path: Path
) -> None:
    source, out, whole = write(*lines(12)), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run_batch(tiny, source, whole)
    partial = tmp_path / "out.jsonl.partial"
    size = whole.stat().st_size // 2
    with files_of_at_most(size), pytest.raises(DejavuError, match="are whole: make room") as told:
        run_batch(tiny, source, out)
    kept = partial.read_bytes()
    assert len(kept) <= size
    assert kept.endswith(b"\n")
    done = kept.count(b"\n")
    assert f"The {done} answers" in str(told.value)
    assert not out.exists()
    assert run_batch(tiny, source, out).kept == done > 0
    assert read(out) == read(whole)


def test_a_disk_that_is_full_when_all_is_done(
    tiny: Settings, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(*lines(3)), tmp_path / "out.jsonl"

    def full(path: Path) -> Any:
        raise DejavuError(f"cannot write {path}: No space left on device")

    with monkeypatch.context() as patch, pytest.raises(DejavuError, match="No space"):
        patch.setattr(batch_files, "atomic_write", full)
        run_batch(tiny, source, out)
    assert run_batch(tiny, source, out).kept == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_stopped_in_the_middle_it_goes_on(
    number: int, code: int, tiny: Settings, chatty: Path, write: Write, tmp_path: Path
) -> None:
    count = 2000
    source, out = write(*lines(count)), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    command = ["batch", str(source), str(out), str(chatty), "--name", "tiny", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dejavu", *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    until(lambda: partial.exists() and partial.stat().st_size > 20_000, 60)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert not out.exists()
    kept = partial.read_bytes().count(b"\n")
    assert 0 < kept < count
    if number == signal.SIGINT:
        assert f"{kept} of {count} lines are done" in told
        assert partial.read_bytes().endswith(b"\n")
    # The input is cut behind what is done, to spare the time.
    done = batch_files.read_kept(partial)
    short = max(done) + 5
    source.write_bytes(b"".join(source.read_bytes().splitlines(keepends=True)[:short]))
    assert run_batch(tiny, source, out).kept == kept
    run_batch(tiny, source, tmp_path / "whole.jsonl")
    assert read(out) == read(tmp_path / "whole.jsonl")
    assert len(read(out)) == short


def test_the_command(
    chatty: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write(*lines(3), b"nonsense"), tmp_path / "out.jsonl"
    arguments = ["batch", str(source), str(out), str(chatty), "--name", "tiny", "--json", "-"]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert not stop.value.code
    found = json.loads(capsys.readouterr().out)
    assert (found["lines"], found["errors"], found["kept"]) == (4, 1, 0)
    assert set(asdict(Summary(0))) < set(found)
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"])
    out.write_text("else")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 1
    assert "choose another OUT" in capsys.readouterr().err


def test_a_gpu_s_answers_are_not_mixed_with_a_cpu_s(tiny: Settings) -> None:
    runs = {
        _fingerprint(tiny.model_copy(update=update))
        for update in (
            {},
            {"device": "cuda"},
            {"device": "cuda:1"},
            {"device": "cuda", "whole_layers": False},
            {"device": "cuda", "lazy_kv": True},
        )
    }
    assert len(runs) == 4, "one GPU is like another"
