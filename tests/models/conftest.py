"""Tiny models of every architecture, and the ways to run a decode step on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import transformers

from dejavu.errors import BackendError
from dejavu.kernels.native import NativeOps

from .cases import CASES
from .decoding import Eager, Recorded, Stepper
from .tiny import Tiny, build, reference_greedy


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    """One thread (many tiny tensors), and no progress bars or notes about odd tiny configs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """The case of a name, built once."""
    cases = {case.name: case for case in CASES}
    built: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in built:
            built[name] = build(cases[name], tmp_path_factory.mktemp(name))
        return built[name]

    return get


@pytest.fixture(scope="session")
def reference_tokens(tiny: Callable[[str], Tiny]) -> Callable[[str, tuple[int, ...]], list[int]]:
    """40 tokens of the reference's greedy continuation, computed once a case and prompt."""
    known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def get(name: str, ids: tuple[int, ...]) -> list[int]:
        if (name, ids) not in known:
            known[name, ids] = reference_greedy(tiny(name).reference, list(ids), 40)
        return known[name, ids]

    return get


@pytest.fixture(params=["torch", "native", "native-recorded"])
def stepper(request: pytest.FixtureRequest) -> Callable[[], Stepper]:
    """Makes fresh steppers: plain PyTorch, or the compiled kernels at once or replayed."""
    if request.param == "torch":
        return Eager
    try:
        native = NativeOps(threads=1)
    except BackendError as error:
        pytest.skip(f"compiled kernels: {error}")
    if request.param == "native":
        return lambda: Eager(native)
    return lambda: Recorded(native)
