"""Fixtures for every test."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:  # Triton reads it when the kernels are imported, so before any test module is
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")
    # Triton's interpreter computes masked-off lanes too, and NumPy comments on what they hold.
    for category in ("RuntimeWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}:triton\\.")


def pytest_collection_modifyitems(items):
    if CUDA:
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of models and texts beside the project, which not every machine has."""
    folder = Path(__file__).resolve().parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder ../shared with models and texts, which is not here")
    return folder


@pytest.fixture(scope="session")
def brief_bench() -> Iterator[None]:
    """Benches of the CPU that neither rest nor read for long, and rates of levels from two turns:
    no test is about speed."""
    from dejavu.bench import decode, level_speed
    from dejavu.kernels.native import measure_read_bandwidth

    open_backend = decode.open_backend

    def brief(device, *args, **options):
        backend = open_backend(device, *args, **options)
        if device.type != "cpu":
            return backend
        return replace(
            backend, read_bandwidth=lambda: measure_read_bandwidth(1, size=1 << 22, repeats=1)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "open_backend", brief)
        patch.setattr(decode, "_REST", 0.0)
        patch.setattr(level_speed, "_TURNS_OF_SMALL", 2)
        yield
