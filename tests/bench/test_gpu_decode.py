"""The benchmark of a GPU, on a pretended one where there is none, and once on a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from dejavu.bench import decode
from dejavu.bench.arms import ArmInfo
from dejavu.bench.backend import Backend, open_backend
from dejavu.bench.decode import bench, bench_subject, play_peers_alone
from dejavu.bench.forced import Target
from dejavu.bench.machine import GPU, Machine, _said, this_machine
from dejavu.bench.options import BenchOptions
from dejavu.bench.peers import _chosen
from dejavu.bench.subject import is_shape, open_subject, shape_dtype
from dejavu.bench.table import decode_table
from dejavu.errors import BackendError, InputError
from dejavu.kernels.reference import TorchOps

from .conftest import TINY

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
QUICK = BenchOptions(
    densities=(Target(0.2, 0.5),),
    peers=("transformers-generate",),
    prompt_tokens=6,
    new_tokens=6,
    skipped=1,
    repeats=2,
)


@pytest.fixture
def pretended(monkeypatch):
    """A GPU of 1 KiB of cache and 2 GB/s that is a CPU."""
    machine = Machine("a CPU", "x", "y", 1, 1, {}, [], GPU("a GPU", 1, 1 << 10, 2, "sm_90", "", ""))
    backend = Backend(CPU, TorchOps(), None, "sm_90", machine, lambda: 2.0)
    monkeypatch.setattr(decode, "this_machine", lambda *_: machine)
    monkeypatch.setattr(decode, "open_backend", lambda *_, **__: backend)


def test_peers_that_ran_alone_stand_beside_ours(tiny, pretended):
    told = []
    played = play_peers_alone(
        TINY, replace(QUICK, peers=(*QUICK.peers, "transformers-static")), "fp32", CPU,
        tell=told.append,
    )  # fmt: skip
    assert [line.partition(":")[0] for line in told] == [
        "transformers-generate",
        "transformers-static",
    ]
    done = bench_subject(tiny, {}, QUICK, played=played)
    assert [arm.name for arm in done.arms] == [
        "dense",
        "forced 0.2, heads 0.5",
        "transformers-generate fp32",
    ]
    for arm in done.arms[2:]:
        assert arm.bytes_per_token == done.dense_bytes
        assert any("ran alone" in note for note in arm.notes)
        assert len(arm.repeat_medians) == QUICK.repeats
        assert arm.lopsided == []
    (missing,) = done.missing
    assert missing.name == "transformers-static"
    assert "cuda" in missing.reason


def test_the_machine_is_the_gpu(tiny, pretended):
    done = bench_subject(tiny, {}, replace(QUICK, peers=()))
    assert not done.cache_resident  # more than 4 times the cache of the GPU
    assert done.roofline_ms == pytest.approx(done.dense_bytes / 2.0 / 1e6)
    assert done.conditions.threads is None
    assert done.conditions.runs_on == "cpu (sm_90)"
    assert not any("busy" in line or "cache" in line for line in done.warnings)
    told = json.loads(json.dumps(done.to_json()))
    assert told["machine"]["gpu"]["name"] == "a GPU"
    assert "standard deviations" in told["conditions"]["weights"]
    console = Console(width=250, record=True, file=StringIO())
    console.print(decode_table(done))
    assert "a GPU, read 2.0 GB/s" in console.export_text()


def test_a_batch_tells_rows_and_union_apart(tiny, pretended):
    options = replace(QUICK, peers=(), densities=(0.1,), batch=4, new_tokens=30)
    forced = bench_subject(tiny, {}, options).arms[1].density
    assert forced.neurons_of_a_row == pytest.approx(0.1, abs=0.02)
    # Rows that chose independently of each other would read this; these have a little in common.
    independent = 1 - (1 - forced.neurons_of_a_row) ** 4
    assert 2 * forced.neurons_of_a_row < forced.neurons < independent + 0.02


def test_a_peer_that_runs_on_cpus_only():
    pytest.importorskip("ctranslate2")
    with pytest.raises(BackendError, match="on cpu only"):
        _chosen("ctranslate2:int8", "fp16", CUDA)


def test_defaults_follow_the_device():
    assert shape_dtype("auto", CPU) == "bf16"
    assert shape_dtype("auto", CUDA) == "fp16"
    assert shape_dtype("bf16", CUDA) == "bf16"
    assert is_shape("opt-66b")
    assert not is_shape("no/such/model")
    assert _chosen("transformers", "fp16", CUDA) == ("transformers", "fp16")
    with pytest.raises(InputError, match="threads and isa"):
        open_backend(CUDA, torch.float16, threads=2, machine=this_machine())
    assert ArmInfo("a", "b", "fp16", None).threads is None
    assert _said(["no-such-program-anywhere"]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told_before_anything_is_made():
    with pytest.raises(BackendError, match="--device cuda"):
        bench("opt-66b", options=QUICK, device="cuda")
    with pytest.raises(BackendError, match="--device cuda"):
        open_subject("opt-66b", device="cuda")


def test_imports_need_no_compiled_kernels():
    code = (
        "import sys; sys.modules['dejavu.kernels._native'] = None; sys.modules['gguf'] = None;"
        "import dejavu.cli.bench, dejavu.bench.decode, dejavu.bench.gpu_kernels, torch;"
        "from dejavu.bench.machine import this_machine;"
        "assert this_machine.__module__;"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.cuda
def test_a_shape_on_a_gpu():
    options = replace(QUICK, densities=(0.1, Target(0.1, 0.5)), peers=("transformers",))
    # Of smaller shapes the table of costs has MLPs computed whole.
    done = bench("opt-2.7b", options=options, device="cuda")
    assert done.conditions.dtype == "fp16"
    assert done.machine.gpu is not None
    assert done.machine.gpu.l2_bytes > 1 << 20
    assert done.read_bandwidth > 100
    assert [arm.recorded for arm in done.arms] == [True, True, True, None]
    forced = done.arms[2].density
    assert forced.neurons == pytest.approx(0.1, abs=0.02)
    assert forced.groups == pytest.approx(0.5, abs=0.05)
    assert 0 < forced.bytes < 1
