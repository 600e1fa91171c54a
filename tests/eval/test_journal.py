"""Interrupted runs: nothing is lost, nothing is mixed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dejavu.errors import DejavuError, InputError
from dejavu.eval.journal import Journal

SETTING = {"task": "copa", "seed": 0, "limit": None, "name": "häuser"}


def write(path: Path, names: str) -> bytes:
    with Journal(path, SETTING) as journal:
        for name in names:
            journal.add(name, {"value": ord(name), "text": "a\u2028b"})
    return path.read_bytes()


def test_every_cut_goes_on(tmp_path: Path) -> None:
    """Cut anywhere, the journal holds what was whole, and the run ends as if never cut."""
    path = tmp_path / "deep" / "a.jsonl"
    whole = write(path, "xyz")
    for place in range(len(whole) + 1):
        path.write_bytes(whole[:place])
        with Journal(path, SETTING) as journal:
            done = "".join(journal.records)
            assert len(done) == max(whole[:place].count(b"\n") - 1, 0)
            for name in "xyz"[len(done) :]:
                journal.add(name, {"value": ord(name), "text": "a\u2028b"})
            assert [r["value"] for r in journal.records.values()] == [120, 121, 122]
        assert path.read_bytes() == whole


def test_records_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path, SETTING) as journal:
        journal.add("x", {"value": 1})
        last = path.read_text(encoding="utf-8").splitlines()[-1]
        assert json.loads(last) == {"item": "x", "value": 1}


def test_another_run_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    before = write(path, "x")
    with pytest.raises(InputError, match=r"limit: None, now 5; seed: 0, now 1\)"):
        Journal(path, SETTING | {"seed": 1, "limit": 5})
    with pytest.raises(InputError, match="extra: None, now 2"):
        Journal(path, SETTING | {"extra": 2})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["no JSON\n", "[]\n", '{"a": 1}\n', "half a line", '{"x'])
def test_files_of_others_are_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=r"a\.jsonl is no journal"):
        Journal(path, SETTING)
    assert path.read_text() == content


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DejavuError, match="cannot write"):
        Journal(tmp_path / "file" / "a.jsonl", SETTING)


def test_in_memory() -> None:
    with Journal(None, SETTING) as journal:
        journal.add("x", {"value": 1})
    assert journal.records == {"x": {"item": "x", "value": 1}}
