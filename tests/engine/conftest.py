"""Models for the engine's tests, each made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from dejavu.engine.codec import Codec
from dejavu.errors import BackendError
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.weights.checkpoint import open_checkpoint
from dejavu.weights.tokenizer import load_tokenizer
from models.tiny import Case, Tiny, build


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """A random checkpoint and its transformers model: `tiny("opt", max_position_embeddings=32)`."""
    built: dict[tuple[object, ...], Tiny] = {}

    def get(model_type: str, **fields: object) -> Tiny:
        key = (model_type, *sorted(fields.items()))
        if key not in built:
            case = Case(model_type, model_type, dict(fields))
            built[key] = build(case, tmp_path_factory.mktemp(model_type))
        return built[key]

    return get


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Of the decode steps: eager on plain PyTorch, or recorded on the compiled kernels."""
    if request.param == "torch":
        return TorchOps()
    try:
        return NativeOps(threads=1)
    except BackendError as error:
        pytest.skip(f"compiled kernels: {error}")


@pytest.fixture
def few_programs() -> Iterator[Ops]:
    """The GPU kernels in Triton's interpreter, which takes its time for every program."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("in Triton's interpreter; on a GPU see test_cuda.py")
    from dejavu.kernels.gpu.ops import TritonOps
    from dejavu.kernels.gpu.tuning import Config, Tuning
    from triton_once import patched_once

    class Few(Tuning):
        def project(self, *shape: int) -> Config:
            return Config(128, 64, 1, 4)

        up = lazy = select = project  # type: ignore[assignment]

        def sums(self, *shape: object) -> Config:
            return Config(64, 64, 1, 4)

        def attention(self, *shape: int) -> Config:
            return Config(64, 0, 1, 4, 2)

    with patched_once():
        yield TritonOps("cpu", tuning=Few(4))


@pytest.fixture(scope="session")
def relu_path(shared: Path) -> Path:
    """The real ReLU model."""
    return shared / "models/relu-30m"


@pytest.fixture(scope="session")
def codec(relu_path: Path) -> Codec:
    """Its tokenizer: byte-level, BOS and EOS are id 2, no chat template."""
    return Codec(load_tokenizer(open_checkpoint(relu_path)))
