"""Plans to the Hub and back, against a local server that answers as the Hub does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.cli import main
from dejavu.embedded import PLAN
from dejavu.errors import PlanError
from dejavu.predictor.hub import FILES, pull_plan, push_plan
from dejavu.predictor.plan import load_plan
from hub_stub import HubStub

REPO = "org/tiny-plan"


@pytest.fixture(params=["lfs", "pipeline"])
def hub(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubStub]:
    """Both ways in which the library uploads a folder: large files apart (without its xet
    extension), and its pipeline, which the stub serves as long as no file is large."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", request.param == "lfs")
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    with HubStub() as hub:
        hub.writers["hf_ours"] = "org"
        if request.param == "pipeline":
            hub.large = ()
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        # As in a process that starts with the variable.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *(str(part) for part in argv)])
    return int(stop.value.code or 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_push_and_pull(hub: HubStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(PLAN, tmp_path / "plan")
    (folder / "notes.txt").write_text("not of the plan")
    assert run("push", folder, REPO) == 0
    assert capsys.readouterr().out.strip() == f"{hub.url}/{REPO}/commit/{hub.commit(REPO)}"
    assert hub.repos[REPO].keys() == set(FILES)
    assert run("pull", REPO, "--out", tmp_path / "pulled") == 0
    assert contents(tmp_path / "pulled") == {name: (PLAN / name).read_bytes() for name in FILES}
    assert load_plan(REPO).levels == load_plan(PLAN).levels


def test_pushing_again_replaces(hub: HubStub, tmp_path: Path) -> None:
    push_plan(PLAN, REPO)
    folder = shutil.copytree(PLAN, tmp_path / "plan")
    content = json.loads((folder / "plan.json").read_text())
    content["report"] = {"second": True}
    (folder / "plan.json").write_text(json.dumps(content))
    push_plan(folder, REPO, private=True)
    assert json.loads(hub.repos[REPO]["plan.json"])["report"] == {"second": True}
    assert hub.repos[REPO]["predictors.safetensors"] == (PLAN / FILES[1]).read_bytes()


@pytest.mark.parametrize(
    ("token", "namespace", "exists", "message"),
    [
        ("hf_wrong", "org", False, "401"),
        ("hf_wrong", "org", True, "401"),
        ("hf_ours", "elsewhere", False, "403"),
        ("hf_ours", "elsewhere", True, "403"),
    ],
)
def test_without_rights(
    hub: HubStub,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    namespace: str,
    exists: bool,
    message: str,
) -> None:
    """An existing repository passes the library's creation, and refuses the files."""
    monkeypatch.setenv("HF_TOKEN", token)
    before = {f"{namespace}/plan": {"README.md": b"mine"}} if exists else {}
    hub.repos |= {name: dict(files) for name, files in before.items()}
    with pytest.raises(PlanError, match=rf"{namespace}/plan failed .*{message}(.|\n)*HF_TOKEN"):
        push_plan(PLAN, f"{namespace}/plan")
    assert hub.repos == before


def test_what_is_no_plan_is_not_pushed(hub: HubStub, tmp_path: Path) -> None:
    folder = shutil.copytree(PLAN, tmp_path / "plan")
    path = folder / "predictors.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PlanError, match="is damaged"):
        push_plan(folder, REPO)
    assert hub.requests == []


def test_pull_of_what_is_not_there(
    hub: HubStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("pull", "org/none", "--out", tmp_path / "out") == 1
    assert "'org/none'" in (shown := capsys.readouterr().err)
    assert "there is no such repository" in shown
    assert shown.count("\n") == 1
    hub.repos[REPO] = {"plan.json": b"{}"}
    with pytest.raises(PlanError, match=r"no plan: it lacks predictors\.safetensors"):
        pull_plan(REPO)
    assert not (tmp_path / "out").exists()


def test_a_damaged_download_is_refused(hub: HubStub, tmp_path: Path) -> None:
    files = {name: (PLAN / name).read_bytes() for name in FILES}
    files[FILES[1]] = files[FILES[1]][:-1] + b"\0"
    hub.repos[REPO] = files
    with pytest.raises(PlanError, match="is damaged"):
        load_plan(REPO)
    assert run("pull", REPO, "--out", tmp_path / "out") == 1
    assert not (tmp_path / "out").exists()
