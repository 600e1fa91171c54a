"""A served model under a memory limit: every arm writes what it writes in memory."""

import shutil

import pytest
from pydantic import ValidationError

from dejavu.embedded import model_path, plan_path
from dejavu.engine.params import SamplingParams
from dejavu.load import CheckpointNeurons
from dejavu.serve.models import serve_models
from dejavu.serve.settings import Settings
from dejavu.weights.bundle import write_bundle


def answers(**limits):
    bundle, plan = limits.pop("bundle", None), limits.pop("plan", "relu-30m")
    entry = {"name": "m", "source": "relu-30m", "plan": plan, "bundle": bundle}
    engine = serve_models(Settings(models=[entry], threads=1, **limits))["m"].engine
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    arms = ("dense", "careful", "fast", "balanced")
    requests = [engine.add([5, 6, 7 + i], params, arm=arm) for i, arm in enumerate(arms)]
    while engine.running or engine.waiting:
        engine.step()
    return [request.token_ids for request in requests]


@pytest.fixture(scope="module")
def in_memory():
    return answers()


def test_same_tokens_for_all_arms(tmp_path, in_memory):
    path = tmp_path / "relu-30m.flash"
    write_bundle(path, CheckpointNeurons(model_path("relu-30m")))
    # Far above what is resident here: other tests' memory counts, since it is the process's limit.
    assert answers(bundle=str(path), memory_limit="16GB") == in_memory


def test_the_bundle_beside_the_plan_is_found(tmp_path, in_memory):
    plan = tmp_path / "plan"
    shutil.copytree(plan_path("relu-30m"), plan)
    write_bundle(plan / "any.flash", CheckpointNeurons(model_path("relu-30m")))
    assert answers(plan=str(plan), memory_limit="16GB") == in_memory


def test_a_limit_is_of_one_model_and_a_bundle_needs_one():
    one, other = ({"name": name, "source": "relu-30m"} for name in "ab")
    with pytest.raises(ValidationError, match="one model"):
        Settings(models=[one, other], memory_limit="1GB")
    with pytest.raises(ValidationError, match="goes with --memory-limit"):
        Settings(models=[one | {"bundle": "f"}])
