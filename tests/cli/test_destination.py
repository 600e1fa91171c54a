"""Results that cannot be written are known before any work, and lose nothing half-way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dejavu.cli import output
from dejavu.embedded import PLAN
from dejavu.errors import DejavuError

from .conftest import run

# Each writes what it was asked for at its end, and would read a model first.
COMMANDS = {
    "generate": ("--prompt", "A"),
    "measure": (),
    "prepare": ("--out", "plan"),
    "plan show": (),
    "plan level": ("relu-30m", "--name", "x", "--max-loss", "9%", "--out", "plan"),
    "plan count": (),
    "quantize": ("--out", "q"),
    "pack": ("--out", "f"),
    "verify": (),
    "eval": (),
    "bench": (),
    "demo": (),
    "tune": (),
}
FOLDERS = {  # options that name folders
    "prepare": ("--out",),
    "plan level": ("relu-30m", "--name", "x", "--max-loss", "9%", "--out"),
    "plan pull": ("--out",),
    "quantize": ("--out",),
    "measure": ("--plots",),
    "eval": ("--plan", "relu-30m", "--suite", "paper", "--data", ".", "--out"),
}


def argv(command: str) -> list[str]:
    return [*command.split(), *(() if command == "demo" else ("relu-30m",))]


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dejavu import load
    from dejavu.predictor import plan
    from dejavu.weights import checkpoint

    def read(*_: object, **__: object) -> None:
        pytest.fail("work was done before the destination was checked")

    monkeypatch.setattr(load, "load_model", read)
    monkeypatch.setattr(checkpoint, "open_checkpoint", read)
    monkeypatch.setattr(plan, "load_plan", read)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_where_nothing_can_be_written(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, said in ((tmp_path / "no" / "x.json", "no folder"), (tmp_path, "is a folder")):
        assert run(*argv(command), *COMMANDS[command], "--json", place) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith(f"error: --json {place}: ")
        assert said in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", FOLDERS)
def test_folders_where_nothing_can_be_written(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place, said in (
        (tmp_path / "no" / "x", "no folder"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "x", "is a file, not a folder"),
    ):
        assert run(*argv(command), *FOLDERS[command], place) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith(f"error: {FOLDERS[command][-1]} {place}: ")
        assert said in captured.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", ["prepare", "plan level", "plan pull"])
def test_a_folder_of_something_else_is_never_replaced_by_a_plan(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.tex").touch()
    assert run(*argv(command), *FOLDERS[command], tmp_path / "docs") == 1
    assert "that folder holds something else" in capsys.readouterr().err
    assert (tmp_path / "docs" / "thesis.tex").exists()


@pytest.mark.parametrize("arguments", [("bench", "relu-30m", "--plot"), ("pack", "relu-30m", "-o")])
def test_other_files(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, tmp_path / "no" / "x.png") == 1
    assert "no folder" in capsys.readouterr().err


def test_a_folder_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return not mode & os.W_OK

    monkeypatch.setattr(os, "access", access)
    assert run("verify", "relu-30m", "--json", "x.json") == 1
    assert f"--json x.json: you may not write to {tmp_path}" in capsys.readouterr().err
    assert asked[-1] == tmp_path
    (tmp_path / "plots").mkdir()
    assert run("measure", "relu-30m", "--plots", "plots") == 1  # files are put into it
    assert asked[-1] == tmp_path / "plots"


def test_plots_that_cannot_be_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", "relu-30m", "--plot", "plot.xyz") == 1
    assert "--plot plot.xyz: give a name that ends in .png" in capsys.readouterr().err
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    for arguments in (("bench", "relu-30m", "--plot", "a.png"), ("measure", "m", "--plots", "p")):
        assert run(*arguments) == 1
        assert "pip install 'dejavu-llm[plots]'" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_file_that_cannot_be_written_in_the_end(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("older")

    def half(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(b"{")
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(DejavuError, match=rf"cannot write {path}: {os.strerror(number)}"):
        output.write_json({"a": 1}, path)
    assert path.read_bytes() == b"older"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_devices_are_written_into(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_json({"a": 1}, Path("/dev/null"))
    assert Path("/dev/null").is_char_device()
    with pytest.raises(DejavuError, match="cannot write /dev/full"):
        output.write_json({"a": 1}, Path("/dev/full"))


def shell(line: str) -> subprocess.CompletedProcess[str]:
    code = f"{sys.executable} -c 'from dejavu.cli import main; main()'"
    script = f'd() {{ {code} "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)


def test_output_that_nobody_reads_any_more_ends_quietly() -> None:
    done = shell("d plan show relu-30m 2>&1 >/dev/full; echo $?")
    assert done.stdout.splitlines() == ["error: No space left on device", "1"]
    # `exec <&-` closes the reading end before anything is written.
    for command in ("plan show relu-30m", "--version", "generate relu-30m --prompt A -n 3"):
        done = shell(f"d {command} | (exec <&-); echo ${{PIPESTATUS[0]}}")
        assert (done.stdout, done.stderr) == ("141\n", ""), command


def test_an_error_of_the_system_is_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dejavu.predictor import plan

    def unreadable(source: str) -> None:
        (tmp_path / "none").read_text()

    monkeypatch.setattr(plan, "load_plan", unreadable)
    assert run("plan", "show", PLAN) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: No such file or directory\n"
