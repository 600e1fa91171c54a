"""The limit on memory: kept, and named where it is too small."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from dejavu.embedded import model_path, plan_path
from dejavu.errors import CheckpointError, DejavuError, InputError
from dejavu.flash.memory import parse_size
from dejavu.flash.model import find_bundle
from dejavu.load import CheckpointNeurons
from dejavu.weights.bundle import write_bundle

PROGRAM = r"""
import json, re, sys
from dejavu import LLM, SamplingParams
bundle, limit = sys.argv[1:]
options = {"memory_limit": limit, "bundle": bundle} if bundle else {}
llm = LLM("relu-30m", plan="relu-30m", threads=1, **options)
out = llm.generate(["Once upon a time", "The sea", "A dog"], SamplingParams(max_tokens=24))
# Not getrusage, which also knows the parent's peak from before exec.
peak = int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({"texts": [c.text for c in out], "peak": peak}))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("flash") / "relu-30m.flash"
    write_bundle(path, CheckpointNeurons(model_path("relu-30m")))
    return path


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process):
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(out)


def test_limit_is_kept_and_text_is_the_same_for_processes_that_share_a_file(bundle):
    running = [start(str(bundle), "600MB") for _ in range(2)]
    limited = [result(process) for process in running]
    assert max(each["peak"] for each in limited) <= 600_000_000
    expected = result(start("", ""))["texts"]
    assert [each["texts"] for each in limited] == [expected, expected]


def test_the_least_limit_that_is_told_does(bundle):
    """In a process of its own: what is resident there is what counts."""
    refused = start(str(bundle), "20MB")
    _, errors = refused.communicate()
    least = re.search(r"(\d+)MB is the least", errors)
    assert least is not None, errors
    # What is resident differs by a little from run to run.
    enough = int(least[1]) + 8
    found = result(start(str(bundle), f"{enough}MB"))
    assert found["peak"] <= enough * 1_000_000


def test_too_small_says_the_least(bundle):
    from dejavu import LLM

    with pytest.raises(InputError, match=r"\d+MB is the least"):
        LLM("relu-30m", plan=plan_path("relu-30m"), memory_limit="20MB", bundle=bundle)


def test_a_limit_needs_a_bundle(bundle):
    from dejavu import LLM

    with pytest.raises(InputError, match="dejavu pack"):
        LLM("relu-30m", memory_limit="1GB")
    with pytest.raises(InputError, match="--memory-limit"):
        LLM("relu-30m", bundle=bundle)


def test_a_bundle_beside_the_plan_is_found(bundle, tmp_path):
    plan = tmp_path / "plan"
    shutil.copytree(plan_path("relu-30m"), plan)
    with pytest.raises(InputError, match=f"neither {plan} nor "):
        find_bundle("relu-30m", plan)
    (plan / "a.flash").write_bytes(b"something else")
    os.link(bundle, plan / "z.flash")
    assert find_bundle("relu-30m", plan) == plan / "z.flash"
    damaged = plan / "b.flash"
    damaged.write_bytes(bundle.read_bytes()[:-1])
    assert find_bundle("relu-30m", plan) == plan / "z.flash"
    (plan / "z.flash").unlink()
    with pytest.raises(InputError, match=f"dejavu pack.*; {damaged}.*truncated"):
        find_bundle("relu-30m", plan)
    os.link(bundle, plan / "z.flash")
    with pytest.raises(InputError, match="in bf16"):
        find_bundle("relu-30m", plan, "bf16")


def test_a_plan_on_the_hub_is_not_taken_for_a_folder(bundle, tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    os.link(bundle, tmp_path / "org" / "other.flash")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="dejavu pack"):
        find_bundle("relu-30m", "org/plan")


@pytest.mark.parametrize("through", ["prefill", "decode"])
def test_evaluated_as_in_memory(bundle, through):
    import typer.testing

    from dejavu.cli.app import app

    found = []
    for limits in ([], ["--memory-limit", "16GB", "--bundle", str(bundle)]):
        command = ["eval", "relu-30m", "--plan", "relu-30m", "-n", "96", "--window", "48"]
        command += ["--through", through, "--threads", "1", "--json", "-", *limits]
        done = typer.testing.CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout))
    memory, flash = found
    assert flash.pop("memory_limit") == "16GB"
    if through == "decode":
        assert flash == memory
    else:  # the matrices are not widened beforehand, which may change the order of a product's sums
        assert flash["sparse"]["loss"] == pytest.approx(memory["sparse"]["loss"], rel=1e-6)
        assert flash["reads"] == memory["reads"]


def test_foreign_and_other_dtype(bundle, tmp_path):
    from dejavu import LLM

    foreign = tmp_path / "foreign.flash"
    foreign.write_bytes(b"not a bundle" * 100)
    with pytest.raises((CheckpointError, DejavuError), match="foreign"):
        LLM("relu-30m", memory_limit="1GB", bundle=foreign)
    with pytest.raises(InputError, match="--dtype int8"):
        LLM("relu-30m", memory_limit="1GB", bundle=bundle, dtype="bf16")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("512MiB", 512 << 20), ("1.5g", 1_500_000_000), (7, 7)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "four", "-1GB", "0", "4XB"])
def test_bad_sizes(text):
    with pytest.raises(InputError, match="--memory-limit"):
        parse_size(text)
