"""Faults while a model runs from its file: each one is an error, and no token comes of it."""

import os
import subprocess
import sys

import pytest

from dejavu.engine.engine import Engine
from dejavu.engine.params import SamplingParams
from dejavu.errors import CheckpointError
from dejavu.flash.ops import FlashOps, PromptOps
from dejavu.load import LoadedModel
from dejavu.weights.bundle import open_bundle
from dejavu.weights.checkpoint import Checkpoint

PROMPT = [5, 6, 7, 8]


def flip(path, offset, *, keep_time):
    """Flip a bit; keep_time: as a failing disk does, not a program."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def short(path, bundle, reader):
    os.truncate(path, int(bundle.offsets(1)[3]))


def bit(path, bundle, reader):
    flip(path, int(bundle.offsets(1)[3]) + 17, keep_time=True)


def written(path, bundle, reader):
    flip(path, int(bundle.offsets(1)[3]) + 17, keep_time=False)


def replaced(path, bundle, reader):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def failing_disk(path, bundle, reader):
    failing = os.open("/proc/self/mem", os.O_RDONLY)  # nothing is mapped there: EIO
    os.dup2(failing, reader.fileno())
    os.close(failing)


FAULTS = [
    (short, r"layer \d, neuron \d+.*cut off|replaced"),
    (bit, r"layer 1, neuron \d+, at byte \d+, is damaged"),
    (written, "damaged|replaced"),
    (replaced, "replaced or written to"),
    (failing_disk, "Input/output error"),
]


def engine(outside, store):
    loaded = LoadedModel(outside, Checkpoint(store.bundle.path, {}, []), store.bundle.dtype)
    return Engine(loaded, ops=FlashOps(store, 1), prompt_ops=PromptOps(store, 1), eos_token_ids=())


def answer(running, prompt=PROMPT):
    request = running.add(prompt, SamplingParams(max_tokens=6, temperature=0))
    while running.running or running.waiting:
        running.step()
    if request.error is not None:
        raise request.error
    return request.token_ids


@pytest.mark.parametrize("moment", ["prompt", "answer"])
@pytest.mark.parametrize(
    ("fault", "message"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_fault_is_an_error(in_file, fault, message, moment):
    _, outside, store = in_file("opt", "fp32", 192)
    path, bundle, running = store.bundle.path, store.bundle, engine(outside, store)
    assert len(answer(running)) == 6
    request = None
    if moment == "answer":
        request = running.add([9, 9, 9], SamplingParams(max_tokens=20, temperature=0))
        running.step()
    fault(path, bundle, store.reader)
    with pytest.raises(Exception, match=message) as raised:
        if request is None:
            answer(running, [9, 9, 9])
        else:
            before = len(request.token_ids)
            while not request.done:
                running.step()
            raise request.error
    cause = raised.value.__cause__ or raised.value
    assert isinstance(cause, CheckpointError)
    if request is not None:
        assert len(request.token_ids) == before


def test_what_failed_once_is_read_again(in_file):
    memory, outside, store = in_file("opt", "bf16", 192)
    running = engine(outside, store)
    good = os.dup(store.reader.fileno())
    request = running.add(PROMPT, SamplingParams(max_tokens=6, temperature=0))
    running.step()
    failing_disk(None, None, store.reader)
    while not request.done:
        running.step()
    assert isinstance(request.error.__cause__, CheckpointError)
    os.dup2(good, store.reader.fileno())
    os.close(good)
    loaded = LoadedModel(memory, Checkpoint(store.bundle.path, {}, []), "bf16")
    assert answer(running) == answer(Engine(loaded, threads=1, eos_token_ids=()))


PACK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
from dejavu.cli import main
sys.argv = ["dejavu", "pack", "relu-30m", "--out", sys.argv[1]]
main()
"""


def test_a_disk_that_is_full_leaves_nothing(tmp_path):
    path = tmp_path / "relu-30m.flash"
    path.write_bytes(b"old")
    full = subprocess.run(
        [sys.executable, "-c", PACK, str(path), str(1 << 20)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert full.returncode == 1
    assert "cannot write" in full.stderr
    assert "Make room" in full.stderr
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


READ = """
import hashlib, sys, torch
from dejavu.weights.bundle import open_bundle
bundle = open_bundle(sys.argv[1])
reader = bundle.reader()
digest = hashlib.sha256()
generator = torch.Generator().manual_seed(0)
for layer in range(bundle.layers):
    for _ in range(50):
        chosen = torch.randperm(bundle.neurons[layer], generator=generator)[:40]
        out = torch.empty(40, bundle.record_bytes, dtype=torch.uint8)
        to = out.data_ptr() + torch.arange(40) * bundle.record_bytes
        reader.wait(reader.submit(bundle.offsets(layer, chosen), bundle.record_bytes, to))
        digest.update(out.numpy().tobytes())
print(digest.hexdigest())
"""


def test_processes_share_a_file(in_file):
    path = in_file("opt", "fp32", 192)[2].bundle.path
    command = [sys.executable, "-c", READ, str(path)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(3)
    ]
    found = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(found) == 1
    open_bundle(path).verify()
