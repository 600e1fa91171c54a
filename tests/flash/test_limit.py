"""The limit on memory: kept, and named where it is too small."""

import json
import subprocess
import sys

import pytest

from dejavu.embedded import model_path, plan_path
from dejavu.errors import CheckpointError, DejavuError, InputError
from dejavu.flash.memory import parse_size
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


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_limit_is_kept_and_text_is_the_same(bundle):
    limited = run(str(bundle), "600MB")
    assert limited["peak"] <= 600_000_000
    assert limited["texts"] == run("", "")["texts"]


def test_too_small_says_the_least(bundle):
    from dejavu import LLM

    with pytest.raises(InputError, match=r"\d+MB is the least"):
        LLM("relu-30m", plan=plan_path("relu-30m"), memory_limit="20MB", bundle=bundle)


def test_a_limit_needs_a_bundle():
    from dejavu import LLM

    with pytest.raises(InputError, match="dejavu pack"):
        LLM("relu-30m", memory_limit="1GB")


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
