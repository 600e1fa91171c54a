"""A served model under a memory limit: every arm writes what it writes in memory."""

import pytest
from pydantic import ValidationError

from dejavu.embedded import model_path
from dejavu.engine.params import SamplingParams
from dejavu.load import CheckpointNeurons
from dejavu.serve.models import serve_models
from dejavu.serve.settings import Settings
from dejavu.weights.bundle import write_bundle


def answers(**limits):
    bundle = limits.pop("bundle", None)
    entry = {"name": "m", "source": "relu-30m", "plan": "relu-30m", "bundle": bundle}
    engine = serve_models(Settings(models=[entry], threads=1, **limits))["m"].engine
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    arms = ("dense", "balanced", "fast", "balanced")
    requests = [engine.add([5, 6, 7 + i], params, arm=arm) for i, arm in enumerate(arms)]
    while engine.running or engine.waiting:
        engine.step()
    return [request.token_ids for request in requests]


def test_same_tokens_for_all_arms(tmp_path):
    path = tmp_path / "relu-30m.flash"
    write_bundle(path, CheckpointNeurons(model_path("relu-30m")))
    # Far above what is resident here: other tests' memory counts, since it is the process's limit.
    assert answers(bundle=str(path), memory_limit="16GB") == answers()


def test_a_limit_goes_with_a_bundle():
    with pytest.raises(ValidationError, match="bundle of one model"):
        Settings(models=[{"name": "m", "source": "relu-30m"}], memory_limit="1GB")
